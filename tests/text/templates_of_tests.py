"""Chat templates written for the tests, in the manner of models', and the messages they
expect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# What a template's author expects of a role: strings, lists of parts of which all are
# read, lists of which only the first part is read, or strings as well as lists.
Content = Literal["strings", "parts", "one part", "both", "both without tools"]


@dataclass(frozen=True)
class WrittenTemplate:
    """A template, and the form of the messages that its author has in mind."""

    text: str
    contents: Content = "strings"
    # roles with another form
    contents_of: dict[str, Content] = field(default_factory=dict)
    reads_json: bool = False  # the arguments of calls, as a string
    lacking: Literal["absent", "null", "empty"] = "absent"  # the content beside calls
    knows_developer: bool = False  # or writes it as the system's
    refuses: str = ""  # names of conversations


BEGIN = "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
# Reads strings and parts, as many models of pictures do.
BOTH = """{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content or [] -%}
{%- if part.type == "text" -%}{{- part.text -}}
{%- else -%}{{- raise_exception("?") -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}"""
# Reads parts, and skips strings in silence.
PARTS = """{%- for part in message["content"] -%}
{%- if part["type"] == "text" -%}{{- part["text"] -}}
{%- elif part["type"] == "image" -%}{{- "<image>" -}}{%- endif -%}
{%- endfor -%}"""


def every(body: str, before: str = "", after: str = BEGIN) -> str:
    """Return a template that writes one message after the other."""
    return before + "{%- for message in messages -%}" + body + "{%- endfor -%}" + after


def calling(arguments: str) -> str:
    """Return a template that reads strings, and writes `call.function.arguments` so."""
    return every(
        "{{- '<' + message.role + '>' + (message.content or '') -}}"
        "{%- for call in message.tool_calls or [] -%}"
        "{{- '<call>' + call.function.name -}}" + arguments + "{%- endfor -%}"
    )


STRINGS = {
    "chatml": WrittenTemplate(
        every(
            "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}"
            "{%- for call in message.tool_calls or [] -%}"
            "{{- '\n<tool_call>' -}}{{- call.function | tojson -}}{{- '</tool_call>' -}}"
            "{%- endfor -%}{{- '<|im_end|>\n' -}}",
            "{%- if tools -%}{{- 'Tools: ' -}}{{- tools | tojson -}}{%- endif -%}",
        )
    ),
    "only strings": WrittenTemplate(  # and skips parts in silence, as Qwen 3 does
        every(
            "{%- set content = message.content if message.content is string else '' -%}"
            "{{- message.role + ': ' + content.split('</think>')[-1] + '\n' -}}"
        )
    ),
    "trimmed": WrittenTemplate(
        every("{{- '[' + message.role + ']' + message.content | default('') | trim -}}")
    ),
    "capitals": WrittenTemplate(
        every("{{- message.role -}}{{- message.content | upper -}}"),
        refuses="prefill prefill_of_parts",
    ),
    "written whole": WrittenTemplate(
        every("{{- message.role -}}: {{ message.content }}\n")
    ),
    "messages as JSON": WrittenTemplate(
        "{{- tools | tojson -}}{{- messages | tojson(indent=1) -}}",
        refuses="prefill prefill_of_parts",
    ),
    "refuses lists": WrittenTemplate(
        every(
            "{%- if message.content is not string -%}{{- raise_exception('no') -}}{%- endif -%}"
            "{{- message.role + ' ' + message.content -}}"
        ),
        lacking="empty",
    ),
    # Llama 2's system message goes into the user's first
    "system first": WrittenTemplate(
        "{%- if messages[0].role == 'system' -%}"
        "{%- set start = '<<SYS>>' + messages[0].content + '<</SYS>>' -%}"
        "{%- set messages = messages[1:] -%}{%- endif -%}"
        "{%- for message in messages -%}"
        "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{- raise_exception('roles must alternate') -}}{%- endif -%}"
        "{{- '[INST]' + (start or '') * loop.first + message.content -}}"
        "{%- endfor -%}",
        refuses="call call_of_object call_beside_empty two_calls said_beside_call",
    ),
}
CALLS = {
    "JSON joined": WrittenTemplate(
        calling("{{- '```json\n' + call['function']['arguments'] + '\n```' -}}"),
        reads_json=True,
    ),
    # DeepSeek V3's: beside a content calls are not written
    "calls beside a null": WrittenTemplate(
        every(
            "{%- if message['role'] == 'assistant' and message['content'] is none -%}"
            "{%- for call in message['tool_calls'] -%}"
            "{{- '<call>' + call['function']['name'] + '\n' + call['function']['arguments'] -}}"
            "{%- endfor -%}"
            "{%- else -%}{{- '<' + message['role'] + '>' + message['content'] -}}{%- endif -%}"
        ),
        reads_json=True,
        lacking="null",
    ),
    "JSON joined to content": WrittenTemplate(  # DeepSeek's, which wants some content
        every(
            "{%- if message['role'] == 'assistant' and 'tool_calls' in message -%}"
            "{%- for call in message['tool_calls'] -%}"
            "{{- message['content'] + '<call>' + call['type'] + call['function']['name'] -}}"
            "{{- '\n' + call['function']['arguments'] + '\n' -}}"
            "{%- endfor -%}"
            "{%- else -%}{{- '<' + message['role'] + '>' + message['content'] -}}{%- endif -%}"
        ),
        reads_json=True,
        lacking="empty",
    ),
    "JSON where it is a string": WrittenTemplate(
        calling(
            "{%- if call.function.arguments is string -%}"
            "{{- call.function.arguments -}}{%- endif -%}"
        ),
        reads_json=True,
    ),
    "arguments written whole": WrittenTemplate(
        calling("({{ call.function.arguments }})"), reads_json=True
    ),
    "objects or JSON": WrittenTemplate(
        calling(
            "{{- call.function.arguments if call.function.arguments is string "
            "else call.function.arguments | tojson -}}"
        )
    ),
    "arguments one by one": WrittenTemplate(
        calling(
            "{%- for name, value in call.function.arguments.items() -%}"
            "{{- '<' + name + '>' -}}{{- value | tojson if value is not string else value -}}"
            "{%- endfor -%}"
        )
    ),
    "arguments sorted": WrittenTemplate(
        calling(
            "{%- for name, value in call.function.arguments | dictsort -%}"
            "{{- name + '=' -}}{{- value -}}{{- ',' * (not loop.last) -}}{%- endfor -%}"
        )
    ),
}
ONLY_PARTS = {
    "idefics": WrittenTemplate(
        every(
            "{{- message['role'] | capitalize + ': ' -}}" + PARTS + "{{- '<end>\n' -}}"
        ),
        "parts",
    ),
    # looks at the first part, which a message without content lacks
    "smolvlm": WrittenTemplate(
        every(
            "{{- message['role'] -}}"
            "{{- ':' if message['content'][0]['type'] == 'image' else ': ' -}}" + PARTS
        ),
        "parts",
        lacking="empty",
    ),
    "pictures first": WrittenTemplate(
        every(
            "{{- message.role + ': ' -}}"
            "{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}"
            "{{- '<image>' -}}{%- endfor -%}"
            "{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}"
            "{{- part.text + ' ' -}}{%- endfor -%}"
        ),
        "parts",
    ),
    "parts without a look at types": WrittenTemplate(
        every(
            "<{{ message.role }}>{% for part in message.content %}{{ part.text }}{% endfor %}"
        ),
        "parts",
    ),
    "parts with an empty line between": WrittenTemplate(
        every(
            "{{- message.role + ': ' + message.content | map(attribute='text') | "
            "join('\n\n') -}}"
        ),
        "parts",
    ),
    "refuses strings": WrittenTemplate(
        every(
            "{%- if message.content is string -%}{{- raise_exception('parts') -}}{%- endif -%}"
            "{{- '<' + message.role + '>' -}}" + PARTS
        ),
        "parts",
    ),
    "one part": WrittenTemplate(
        every("{{- '<' + message.role + '>' + message.content[0].text -}}"),
        "one part",
        lacking="empty",
    ),
    "last part": WrittenTemplate(
        every("{{- '<' + message.role + '>' + message.content[-1].text -}}"),
        "one part",
        lacking="empty",
    ),
    "last question": WrittenTemplate(
        "{%- set message = messages | selectattr('role', 'equalto', 'user') | list | last -%}"
        "{{- 'Question: ' -}}" + PARTS + "{{- '\nAnswer: ' -}}"
        "{%- set message = messages[-1] -%}"
        "{%- if message.role == 'assistant' and not add_generation_prompt -%}"
        + PARTS
        + "{%- endif -%}",
        "parts",
    ),
    "wants a system message": WrittenTemplate(
        every(
            "{{- '<' + message.role + '>' -}}" + PARTS,
            "{%- if messages[0].role != 'system' -%}{{- raise_exception('no') -}}{%- endif -%}",
        ),
        "parts",
        refuses="user parts turns answer_of_parts call call_of_object "
        "call_beside_empty two_calls "
        "said_beside_call tools tools_and_parts turns_of_parts prefill "
        "prefill_of_parts no_prompt "
        "variable",
    ),
    "wants no system message": WrittenTemplate(
        every(
            "{%- if message.role == 'system' -%}{{- raise_exception('no') -}}{%- endif -%}"
            "{{- '<' + message.role + '>' -}}" + PARTS
        ),
        "parts",
        refuses="system system_of_parts developer",
    ),
}
BY_ROLE = {
    "strings and parts": WrittenTemplate(
        every(
            "{{- '<' + message.role + '>' + text(message.content) + '</s>' -}}", BOTH
        ),
        "both",
    ),
    # and writes its calls only as objects, as Gemma 4 does
    "trims each part": WrittenTemplate(
        every(
            "{{- '<turn>' + message.role -}}"
            "{%- for call in message.tool_calls -%}"
            "{%- for name, value in call.function.arguments | dictsort -%}"
            "{{- name -}}:{{- value -}}{%- endfor -%}{%- endfor -%}"
            "{%- if message.content is string -%}{{- message.content | trim -}}"
            "{%- elif message.content is sequence -%}"
            "{%- for part in message.content -%}{{- part.text | trim -}}{%- endfor "
            "-%}{%- endif -%}"
        ),
        "both",
    ),
    "first part of a system message": WrittenTemplate(  # Gemma 3's, in the user's first
        BOTH + "{%- if messages[0].role == 'system' -%}"
        "{%- set start = messages[0].content if messages[0].content is string "
        "else messages[0].content[0].text -%}{%- set messages = messages[1:] -%}{%- endif -%}"
        "{%- for message in messages -%}"
        "{{- '<turn>' + message.role + '\n' + (start or '') * loop.first -}}"
        "{{- text(message.content) | trim + '<end>' -}}{%- endfor -%}" + BEGIN,
        "both",
        {"system": "strings"},
    ),
    "system as a string": WrittenTemplate(  # Llama 3.2's, whose tools' answers are JSON
        every(
            "{%- if message.role == 'tool' -%}{{- message.content | tojson -}}"
            "{%- else -%}{{- message.role + ': ' + text(message.content) -}}{%- endif -%}",
            BOTH + "{%- if messages[0].role == 'system' -%}"
            "{{- '<system>' -}}{{- messages[0].content | trim -}}"
            "{%- set messages = messages[1:] -%}{%- endif -%}",
        ),
        "both",
        {"system": "strings", "tool": "strings"},
    ),
    # Llama 4's, which is then a string
    "tools with the first question": WrittenTemplate(
        every(
            "{{- '<' + message.role + '>' + text(message.content) -}}"
            "{%- for call in message.tool_calls or [] -%}"
            "{{- call.function.arguments | tojson -}}{%- endfor -%}",
            BOTH + "{%- if tools -%}{{- tools | tojson + messages[0].content | trim -}}"
            "{%- set messages = messages[1:] -%}{%- endif -%}",
        ),
        "both",
        {"user": "both without tools"},
    ),
    # GLM 4.5's answers of tools, if no string
    "answers written whole": WrittenTemplate(
        every(
            "{%- if message.role == 'tool' and message.content is not string -%}"
            "{%- for each in message.content -%}{{- each.output or each -}}{%- endfor -%}"
            "{%- else -%}{{- '<|' + message.role + '|>' + text(message.content) -}}{%- "
            "endif -%}",
            BOTH,
        ),
        "both",
        {"tool": "strings"},
    ),
    # Mistral's, which alternates and wants nine letters or digits
    "long ids": WrittenTemplate(
        every(
            "{%- if message.role == 'user' -%}{{- '[INST]' + text(message.content) + "
            "'[/INST]' -}}"
            "{%- elif message.role == 'system' -%}{{- '[SYS]' + text(message.content) -}}"
            "{%- elif message.role == 'tool' -%}"
            "{%- if message.tool_call_id | length != 9 -%}"
            "{{- raise_exception('id') -}}{%- endif -%}"
            "{{- '[RESULT]' + text(message.content) -}}"
            "{%- elif message.tool_calls -%}"
            "{%- for call in message.tool_calls -%}{%- if call.id | length != 9 -%}"
            "{{- raise_exception('id') -}}{%- endif -%}"
            "{{- '[CALL]' -}}{{- call.function | tojson -}}{%- endfor -%}"
            "{%- elif message.content is string -%}{{- message.content + '</s>' -}}"
            "{%- else -%}{{- message.content[0].text + '</s>' -}}{%- endif -%}",
            BOTH,
        ),
        "both",
        {"assistant": "strings"},
    ),
    "thinking": WrittenTemplate(
        every(
            "{{- '<' + message.role + '>' -}}"
            "{%- if message.role == 'user' -%}"
            "{{- text(message.content) + ('' if thinking else '/no') -}}"
            "{%- else -%}"
            "{{- (message.content or '').split('</think>')[-1].lstrip() -}}{%- endif -%}",
            BOTH,
        ),
        contents_of={"user": "both"},
    ),
    "last turns": WrittenTemplate(  # shortened
        "{{- 'Today is Monday. ' -}}" + BOTH + "{%- for message in messages[-2:] -%}"
        "{{- message.role + ':' + text(message.content)[:80] + '\n' -}}{%- endfor -%}"
        + BEGIN,
        "both",
    ),
    "developer": WrittenTemplate(
        every(
            "{{- message.role -}}"
            "{%- if message.role in ['developer', 'user'] -%}" + PARTS + "{%- else -%}"
            "{{- message.content or '' -}}{%- endif -%}"
        ),
        contents_of={"user": "parts", "developer": "parts"},
        knows_developer=True,
    ),
}
TEMPLATES = STRINGS | CALLS | ONLY_PARTS | BY_ROLE
