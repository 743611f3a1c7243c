"""Chat templates written for the tests, each in the structure of a family that thinks.

They differ in what a reader of thoughts must find out: the tags, whether the prompt ends
within a thought or behind an empty one, which variable decides it, by which name a past
thought is read, and how calls are written behind a thought.
"""

from __future__ import annotations

OPENS = "{%- if add_generation_prompt -%}"
CHATML = "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}"
CONTENT = "{%- set content = message.content or '' -%}"
HERMES_TOOLS = """{%- if tools -%}
{{- '<|im_start|>system\nThe tools, as JSON:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\nWrite each call as JSON with its name and arguments:\n' -}}
{{- '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}"""
HERMES_CALLS = """{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}{%- endfor -%}"""
# A past thought is sent by its name, or stands before the closing tag in the content.
PAST_THOUGHT = """{%- set content = message.content or '' -%}{%- set thought = '' -%}
{%- if message.reasoning_content is string -%}
{%- set thought = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}"""

# Thoughts of turns behind the last question stay; earlier ones are dropped.
QWEN3_TURNS = (
    HERMES_TOOLS
    + "{%- set ns = namespace(multi_step_tool=true, last_query=messages | length - 1) -%}"
    "{%- for message in messages[::-1] -%}"
    "{%- if ns.multi_step_tool and message.role == 'user' -%}"
    "{%- set ns.multi_step_tool = false -%}"
    "{%- set ns.last_query = messages | length - loop.index -%}{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}"
    + PAST_THOUGHT
    + "{%- if message.role == 'tool' -%}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content -}}"
    "{{- '\n</tool_response><|im_end|>\n' -}}"
    "{%- elif message.role != 'assistant' -%}"
    + CHATML
    + "{%- else -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > ns.last_query and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- content.lstrip('\n') -}}"
    + HERMES_CALLS
    + "{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
)
QWEN3 = (
    QWEN3_TURNS + OPENS + "{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)
QWEN3_THINKING = (
    QWEN3_TURNS + OPENS + "{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
)

# Drops past thoughts; calls stand in the maker's wide brackets.
DEEPSEEK_TURNS = """{{- '<｜begin▁of▁sentence｜>' -}}
{%- for message in messages -%}{%- set content = message.content or '' -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' + content -}}
{%- elif message.role == 'system' -%}{{- content -}}
{%- elif message.role == 'tool' -%}
{{- '<｜tool▁output▁begin｜>' + content + '<｜tool▁output▁end｜>' -}}
{%- else -%}{{- '<｜Assistant｜>' + past_tag + content.split('</think>')[-1] -}}
{%- for call in message.tool_calls or [] -%}
{%- if loop.first -%}{{- '<｜tool▁calls▁begin｜>' -}}{%- endif -%}
{{- '<｜tool▁call▁begin｜>' + first_part + call.function.name + '<｜tool▁sep｜>' -}}
{%- if call.function.arguments is not string -%}
{{- raise_exception('arguments are JSON') -}}{%- endif -%}
{{- before + call.function.arguments + behind + '<｜tool▁call▁end｜>' -}}
{%- if loop.last -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}
{%- endfor -%}{{- '<｜end▁of▁sentence｜>' -}}{%- endif -%}{%- endfor -%}"""
DEEPSEEK_R1 = (
    "{%- set past_tag = '' -%}{%- set first_part = 'function<｜tool▁sep｜>' -%}"
    "{%- set before = '\n```json\n' -%}{%- set behind = '\n```' -%}"
    # the name stands on the line of the first separator
    + DEEPSEEK_TURNS.replace(" + '<｜tool▁sep｜>' -}}", " -}}")
    + OPENS
    + "{{- '<｜Assistant｜><think>\n' -}}{%- endif -%}"
)
# `thinking` opens a thought; else the prompt ends with a closing tag alone.
DEEPSEEK_V31 = (
    "{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}"
    "{%- set past_tag = '</think>' -%}{%- set first_part = '' -%}"
    "{%- set before = '' -%}{%- set behind = '' -%}"
    + DEEPSEEK_TURNS
    + OPENS
    + "{{- '<｜Assistant｜>' -}}"
    "{{- '<think>' if thinking else '</think>' -}}{%- endif -%}"
)

GLM45 = (
    """{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\n# Tools\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\nWrite a call so:\n<tool_call>{name}\n<arg_key>{key}</arg_key>\n' -}}
{{- '<arg_value>{value}</arg_value>\n</tool_call>' -}}{%- endif -%}
{%- for message in messages -%}"""
    + PAST_THOUGHT
    + """{%- if message.role == 'assistant' -%}
{{- '<|assistant|>\n<think>' + thought.strip() + '</think>' -}}
{%- if content.strip() -%}{{- '\n' + content.strip() -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>' + call.function.name + '\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
{{- value if value is string else value | tojson -}}{{- '</arg_value>\n' -}}
{%- endfor -%}{{- '</tool_call>' -}}{%- endfor -%}
{%- elif message.role == 'tool' -%}
{{- '<|observation|>\n<tool_response>\n' + content + '\n</tool_response>' -}}
{%- else -%}{{- '<|' + message.role + '|>\n' + content -}}
{%- if message.role == 'user' and enable_thinking is defined and not enable_thinking
and not content.endswith('/nothink') -%}{{- '/nothink' -}}{%- endif -%}
{%- endif -%}{%- endfor -%}"""
    + OPENS
    + "{{- '<|assistant|>' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{- '\n<think></think>' -}}{%- endif -%}{%- endif -%}"
)

# Channels. A past thought is `thinking`, and stays only beside calls.
GPT_OSS = (
    """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') -}}
{{- '\n\n# Valid channels: analysis, commentary, final.<|end|>' -}}
{%- if tools -%}
{{- '<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n' -}}
{%- for tool in tools -%}
{{- 'type ' + tool.function.name + ' = (_: ' -}}
{{- tool.function.parameters | tojson + ') => any;\n' -}}{%- endfor -%}
{{- '} // namespace functions<|end|>' -}}{%- endif -%}
{%- for message in messages -%}"""
    + CONTENT
    + """{%- if message.role == 'assistant' -%}
{%- if '<|channel|>' in content -%}
{{- raise_exception('a content holds one channel') -}}{%- endif -%}
{%- set ns = namespace(thought=message.thinking or '') -%}
{%- if message.tool_calls -%}
{%- if content and message.thinking -%}
{{- raise_exception('beside calls, content is the thought') -}}{%- endif -%}
{%- set ns.thought = content or ns.thought -%}{%- endif -%}
{%- if ns.thought and (message.tool_calls or loop.last) -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + ns.thought + '<|end|>' -}}
{%- endif -%}
{%- if message.tool_calls -%}
{%- set function = message.tool_calls[0].function -%}
{{- '<|start|>assistant to=functions.' + function.name -}}
{{- '<|channel|>commentary json<|message|>' -}}
{{- function.arguments | tojson -}}{{- '<|call|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + content -}}
{{- '<|return|>' if loop.last else '<|end|>' -}}{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions.' + (message.name or 'tool') -}}
{{- ' to=assistant<|channel|>commentary<|message|>' -}}
{{- content | tojson + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + content + '<|end|>' -}}
{%- endif -%}{%- endfor -%}"""
    + OPENS
    + "{{- '<|start|>assistant' -}}{%- endif -%}"
)

# Thoughts are parts of a past content.
MAGISTRAL = """{{- '<s>' -}}
{%- if messages[0].role != 'system' -%}
{{- '[SYSTEM_PROMPT]First write your thoughts in this form:[THINK]Thoughts.[/THINK]' -}}
{{- 'Then the answer.[/SYSTEM_PROMPT]' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
{%- elif message.role == 'user' -%}{{- '[INST]' + message.content + '[/INST]' -}}
{%- elif message.role == 'tool' -%}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' -}}
{%- else -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content or [] -%}
{%- if part.type == 'thinking' -%}{{- '[THINK]' + part.thinking + '[/THINK]' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' -}}
{{- call.function.arguments | tojson -}}{%- endfor -%}{{- '</s>' -}}
{%- endif -%}{%- endfor -%}"""

# Has a budget of its own: 0 writes an empty thought.
SEED_OSS = (
    """{%- set budget = thinking_budget if thinking_budget is defined else -1 -%}
{%- if budget > 0 -%}
{{- '<seed:bos>system\nThink with at most ' ~ budget ~ ' tokens.<seed:eos>' -}}{%- endif -%}
{%- for message in messages -%}"""
    + CONTENT
    + """{{- '<seed:bos>' + message.role + '\n' -}}
{%- if message.role == 'assistant' and message.reasoning_content is string -%}
{{- '<seed:think>' + message.reasoning_content | trim + '</seed:think>' -}}{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<parameter=' + key + '>' ~ value ~ '</parameter>\n' -}}{%- endfor -%}
{{- '</function>\n</seed:tool_call>' -}}{%- endfor -%}{{- '<seed:eos>' -}}{%- endfor -%}"""
    + OPENS
    + """{{- '<seed:bos>assistant\n' -}}
{%- if budget == 0 -%}
{{- '<seed:think><seed:cot_budget_reflect>No thoughts are left.' -}}
{{- '</seed:cot_budget_reflect></seed:think>' -}}{%- endif -%}{%- endif -%}"""
)

# Answers and calls have tags of their own behind the thought.
COHERE = """{{- '<BOS_TOKEN>' -}}{%- for message in messages -%}
{%- set name = {'user': 'USER', 'assistant': 'CHATBOT'}[message.role] | default('SYSTEM') -%}
{{- '<|START_OF_TURN_TOKEN|><|' + name + '_TOKEN|>' -}}
{%- if message.role == 'tool' -%}
{{- '<|START_TOOL_RESULT|>' + message.content | tojson + '<|END_TOOL_RESULT|>' -}}
{%- elif message.role != 'assistant' -%}{{- message.content -}}
{%- else -%}
{%- if message.reasoning_content -%}
{{- '<|START_THINKING|>' + message.reasoning_content + '<|END_THINKING|>' -}}{%- endif -%}
{%- if message.tool_calls -%}{{- '<|START_ACTION|>[' -}}
{%- for call in message.tool_calls -%}
{{- {'tool_call_id': loop.index0 | string, 'tool_name': call.function.name,
'parameters': call.function.arguments} | tojson -}}{{- '' if loop.last else ', ' -}}
{%- endfor -%}{{- ']<|END_ACTION|>' -}}
{%- else -%}{{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' -}}
{%- endif -%}{%- endif -%}{{- '<|END_OF_TURN_TOKEN|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
{%- if reasoning is defined and not reasoning -%}
{{- '<|START_THINKING|><|END_THINKING|>' -}}{%- endif -%}{%- endif -%}"""

# Drops past thoughts, and shows the closing tag alone.
KIMI = (
    "{%- for message in messages -%}"
    + CONTENT
    + """{%- set name = message.role if message.role in ['user', 'assistant'] else 'system' -%}
{{- '<|im_' + name + '|>' + message.role + '<|im_middle|>' -}}
{{- content.split('◁/think▷')[-1] + '<|im_end|>' -}}{%- endfor -%}"""
    + OPENS
    + "{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"
)

# Opens a thought; those behind the last question stay.
MINIMAX_M2 = (
    """{{- ']~!b[]~b]system\n' -}}
{%- if tools -%}{{- '<tools>\n' -}}
{%- for tool in tools -%}{{- '<tool>' + tool.function | tojson + '</tool>\n' -}}{%- endfor -%}
{{- '</tools>\n\n<minimax:tool_call>\n<invoke name="name">\n' -}}
{{- '<parameter name="key">value</parameter>\n</invoke>\n</minimax:tool_call>' -}}
{%- endif -%}{{- '[e~[\n' -}}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}"""
    + PAST_THOUGHT
    + """{%- if message.role == 'assistant' -%}{{- ']~b]ai\n' -}}
{%- if thought and loop.index0 > ns.last -%}
{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}{{- content -}}
{%- if message.tool_calls -%}{{- '\n<minimax:tool_call>\n' -}}
{%- for call in message.tool_calls -%}
{{- '<invoke name="' + call.function.name + '">\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<parameter name="' + key + '">' -}}
{{- value if value is string else value | tojson -}}{{- '</parameter>\n' -}}
{%- endfor -%}{{- '</invoke>\n' -}}{%- endfor -%}{{- '</minimax:tool_call>' -}}{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- ']~b]tool\n<response>' + content + '</response>' -}}
{%- else -%}{{- ']~b]' + message.role + '\n' + content -}}{%- endif -%}
{{- '[e~[\n' -}}{%- endfor -%}"""
    + OPENS
    + "{{- ']~b]ai\n<think>\n' -}}{%- endif -%}"
)

# Thoughts stand between sentences, and only if `thinking` asks for them.
GRANITE32 = (
    """{{- '<|start_of_role|>system<|end_of_role|>' -}}
{%- if thinking -%}
{{- "Write your thoughts behind 'Here is my thought process:', and then your answer " -}}
{{- "behind 'Here is my response:'." -}}{%- endif -%}{{- '<|end_of_text|>\n' -}}
{%- if tools -%}
{{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson + '<|end_of_text|>\n' -}}
{%- endif -%}{%- for message in messages -%}"""
    + CONTENT
    + """{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' -}}
{{- content.split('Here is my response:')[-1] -}}
{%- if message.tool_calls -%}{{- '<|tool_call|>[' -}}
{%- for call in message.tool_calls -%}{{- call.function | tojson -}}
{{- '' if loop.last else ', ' -}}{%- endfor -%}{{- ']' -}}{%- endif -%}
{{- '<|end_of_text|>\n' -}}{%- endfor -%}"""
    + OPENS
    + "{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"
)

# The system message may say /no_think, as `enable_thinking` false does.
SMOLLM3 = (
    """{%- set ns = namespace(mode='/think', system='') -%}
{%- if enable_thinking is defined and not enable_thinking -%}
{%- set ns.mode = '/no_think' -%}{%- endif -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content -%}
{%- if '/no_think' in ns.system -%}{%- set ns.mode = '/no_think' -%}{%- endif -%}
{%- endif -%}
{{- '<|im_start|>system\nReasoning Mode: ' + ns.mode + '\n' -}}
{%- if ns.mode == '/think' -%}
{{- 'Write it so: <think> thoughts </think> answer.\n' -}}{%- endif -%}
{{- ns.system.replace('/no_think', '') + '<|im_end|>\n' -}}"""
    + HERMES_TOOLS
    + "{%- for message in messages -%}"
    + CONTENT
    + """{%- if message.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}
{%- if ns.mode == '/no_think' -%}{{- '<think>\n\n</think>\n' -}}{%- endif -%}
{{- content -}}"""
    + HERMES_CALLS
    + "{{- '<|im_end|>\n' -}}{%- elif not (loop.first and message.role == 'system') -%}"
    + CHATML
    + "{%- endif -%}{%- endfor -%}"
    + OPENS
    + "{{- '<|im_start|>assistant\n' -}}"
    "{%- if ns.mode == '/no_think' -%}{{- '<think>\n\n</think>\n' -}}{%- endif -%}{%- endif -%}"
)

# Keeps all past thoughts, by the name `reasoning`.
KEEPS_REASONING = (
    "{%- for message in messages -%}"
    + CONTENT
    + """{%- if message.reasoning is string -%}
{%- set content = '<think>' + message.reasoning + '</think>' + content -%}{%- endif -%}"""
    + CHATML
    + "{%- endfor -%}"
    + OPENS
    + "{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
NO_THOUGHT = (
    HERMES_TOOLS
    + "{%- for message in messages -%}"
    + CONTENT
    + "{{- '<|im_start|>' + message.role + '\n' + content -}}"
    + HERMES_CALLS
    + "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    + OPENS
    + "{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

THINKING_TEMPLATES: dict[str, str] = {
    "qwen3": QWEN3,
    "qwen3 thinking": QWEN3_THINKING,
    "deepseek r1": DEEPSEEK_R1,
    "deepseek v3.1": DEEPSEEK_V31,
    "glm 4.5": GLM45,
    "gpt-oss": GPT_OSS,
    "magistral": MAGISTRAL,
    "seed-oss": SEED_OSS,
    "cohere": COHERE,
    "kimi": KIMI,
    "minimax m2": MINIMAX_M2,
    "granite 3.2": GRANITE32,
    "smollm3": SMOLLM3,
    "keeps reasoning": KEEPS_REASONING,
    "no thought": NO_THOUGHT,
}
