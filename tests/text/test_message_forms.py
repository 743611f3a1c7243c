"""Templates differ in the form of messages that they read; each gets its own, as
transformers'."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fminfer.contract.chat import parse_chat
from fminfer.core.errors import RequestError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.chat_template import ChatTemplate, RenderedChat
from fminfer.text.tokenizer import Tokenizer
from tests.text.templates_of_tests import TEMPLATES, WrittenTemplate, calling, every

TOKENIZER = Tokenizer.load(DEMO_MODEL)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {"type": "object", "properties": {"way": {"type": "string"}}},
    },
}


def say(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    """Return a message; more texts than one are parts."""
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": texts[0] if len(texts) == 1 else parts, **more}


def call(arguments: object, call_id: str = "call00001") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }


def history(*calls: dict[str, Any], said: Any = None, answer: tuple[str, ...]) -> Any:
    asked = {"role": "assistant", "content": said, "tool_calls": list(calls)}
    answers = [
        say("tool", *answer, tool_call_id=each["id"], name="look") for each in calls
    ]
    return {"messages": [HELLO, asked, *answers], "tools": [TOOL]}


HELLO = say("user", " Hello,\nyou")
# Wants turns, and content in each.
STRICT = """{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('?') }}{%- endif -%}
{{ m['role'] + ': ' + m['content'] + '\n' }}{%- endfor -%}"""
TWO = ("first ", "second")
# Not as json.dumps writes it, with a number of more than 64 bits.
SPACED = '{"way":  "n\\u00f6rth", "far": [12345678901234567890123, 2.50]}'
CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": [HELLO]},
    "system": {"messages": [say("system", "Be brief. "), HELLO]},
    "developer": {"messages": [say("developer", "Be brief."), HELLO]},
    "parts": {"messages": [say("user", *TWO)]},
    "system_of_parts": {"messages": [say("system", *TWO), say("user", *TWO)]},
    "turns": {"messages": [HELLO, say("assistant", "Hi"), say("user", *TWO)]},
    "answer_of_parts": {"messages": [HELLO, say("assistant", *TWO), HELLO]},
    "tools": {"messages": [HELLO], "tools": [TOOL]},
    "tools_and_parts": {"messages": [say("user", *TWO)], "tools": [TOOL]},
    "call": history(call(SPACED), answer=("far",)),
    "call_of_object": history(call({"way": "nörth", "far": 1}), answer=TWO),
    "two_calls": history(call(SPACED), call("", "call00002"), answer=("far",)),
    "call_beside_empty": history(call(SPACED), said="", answer=("far",)),
    "said_beside_call": history(call(SPACED), said="Let me look.", answer=TWO),
    "turns_of_parts": {
        "messages": [say("user", *TWO), say("assistant", "Hi"), say("user", *TWO)]
    },
    "prefill": {
        "messages": [HELLO, say("assistant", "The way ")],
        "continue_final_message": True,
    },
    "prefill_of_parts": {
        "messages": [HELLO, say("assistant", *TWO)],
        "continue_final_message": True,
    },
    "no_prompt": {"messages": [HELLO], "add_generation_prompt": False},
    "variable": {"messages": [HELLO], "chat_template_kwargs": {"thinking": True}},
}


def render_whole(template: ChatTemplate, fields: dict[str, Any]) -> RenderedChat:
    chat = parse_chat(fields, max_logprobs=5)
    return template.render(
        chat.messages,
        chat.tools,
        adds_generation_prompt=chat.adds_generation_prompt,
        continues_final_message=chat.continues_final_message,
        args=chat.template_args,
    )


def render(template: ChatTemplate, fields: dict[str, Any]) -> str:
    return render_whole(template, fields).text


def intend(
    message: dict[str, Any], template: WrittenTemplate, *, has_tools: bool
) -> Any:
    """Return a message in the form that the template's author has in mind."""
    message = {name: value for name, value in message.items() if value is not None}
    if message["role"] == "developer" and not template.knows_developer:
        message["role"] = "system"
    form = template.contents_of.get(message["role"], template.contents)
    content = message.get("content")
    if content is None and template.lacking == "empty":
        content = ""
    joined = (
        "\n".join(part["text"] for part in content)
        if isinstance(content, list)
        else content
    )
    if form == "strings" or (form == "both without tools" and has_tools):
        content = joined
    elif form == "one part" or (form == "parts" and isinstance(content, str)):
        content = [{"type": "text", "text": joined}]
    if joined is not None or template.lacking != "absent":
        message["content"] = content
    if content == "" and template.lacking == "null":
        message["content"] = None
    calls = message.pop("tool_calls", [])
    for each in calls:
        arguments = each["function"]["arguments"] or "{}"
        if template.reads_json and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not template.reads_json and isinstance(arguments, str):
            arguments = json.loads(arguments)
        message.setdefault("tool_calls", []).append(call(arguments, each["id"]))
    return message


def render_by_transformers(template: WrittenTemplate, fields: dict[str, Any]) -> str:
    hf = TOKENIZER.hf
    tools = fields.get("tools")
    assert hf is not None
    continues = fields.get("continue_final_message", False)
    messages = [
        intend(message, template, has_tools=bool(tools))
        for message in fields["messages"]
    ]
    how = {
        "tools": tools,
        "chat_template": template.text,
        "add_generation_prompt": fields.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
        **fields.get("chat_template_kwargs", {}),
    }
    # from some version on, apply_chat_template leaves it out
    if template.lacking == "null":
        return str(
            render_jinja_template([messages], **hf.special_tokens_map, **how)[0][0]
        )
    return str(hf.apply_chat_template(messages, tokenize=False, **how))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_gets_the_form_that_it_reads(template: WrittenTemplate) -> None:
    """Texts vanished, calls were refused, and parts were joined by a newline, all in silence."""
    ours = ChatTemplate(TOKENIZER, template.text)
    for name, fields in CHATS.items():
        if name in template.refuses.split():
            with pytest.raises(RequestError):
                render(ours, fields)
        else:
            assert render(ours, fields) == render_by_transformers(template, fields), (
                name
            )
    two = CHATS["system_of_parts" if "parts" in template.refuses.split() else "parts"]
    assert all(text.strip() in render(ours, two).lower() for text in TWO)


BROKEN = ('{"way": "nor', "north", "[1]", '{"way": NaN}', "[" * 100_000)
ASKED = {**HELLO, "content": "Hello"}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_what_a_model_wrote_for_arguments_arrives(template: WrittenTemplate) -> None:
    """Arguments that hold no object ended in 400 for all later turns of the chat."""
    ours = ChatTemplate(TOKENIZER, template.text)
    for said, broken, beside in product((None, "", "I look."), BROKEN, (False, True)):

        def find(arguments: str, said: Any = said, beside: bool = beside) -> str | None:
            calls = [call('{"far": "mile"}', "call00002")] * beside + [call(arguments)]
            try:
                return render(ours, history(*calls, said=said, answer=("no way",)))
            except RequestError:
                return None

        if (whole := find('{"way": "north"}')) is None:
            continue
        found = find(broken)
        assert found is not None, f"{broken} is refused"
        if "north" in whole:
            assert broken in found or json.dumps(broken)[1:-1] in found, found[:300]
        assert ("mile" in found) == ("mile" in whole)


def test_broken_arguments_come_in_the_form_that_shows_them_best() -> None:
    fields = history(call(BROKEN[0]), answer=("no",))
    broken = BROKEN[0]

    def find(arguments: str) -> str:
        template = ChatTemplate(TOKENIZER, calling(arguments))
        return render(template, fields).split("<call>look")[1].split("<tool>")[0]

    read = "call.function.arguments"
    assert (
        find(f"{{{{- {read} if {read} is string else {read} | tojson -}}}}") == broken
    )
    assert find(f"{{{{- {read} | tojson -}}}}") == json.dumps(broken)
    assert find(f"{{{{- '(' + {read} + ')' -}}}}") == f"({broken})"
    items = (
        "{%- for name, value in "
        + read
        + ".items() -%}{{- name ~ '=' ~ value -}}{%- endfor -%}"
    )
    assert find(items) == f"arguments={broken}"
    only = (
        "{%- if " + read + " is mapping -%}{{- " + read + " | tojson -}}{%- endif -%}"
    )
    assert json.loads(find(only)) == {"arguments": broken}


def test_an_empty_answer_is_rendered_as_an_empty_one() -> None:
    """A past answer without content ended in 400."""
    for text in (
        STRICT,
        TEMPLATES["smolvlm"].text,
        TEMPLATES["strings and parts"].text,
    ):
        ours = ChatTemplate(TOKENIZER, text)
        empty = render(
            ours, {"messages": [ASKED, {"role": "assistant", "content": ""}, ASKED]}
        )
        for past in (
            {"content": None},
            {"content": []},
            {},
            {"content": [], "tool_calls": []},
        ):
            past = {"role": "assistant"} | past
            assert render(ours, {"messages": [ASKED, past, ASKED]}) == empty
        parts = [{"type": "refusal", "refusal": "I will not."}]
        told = {"role": "assistant", "content": parts}
        assert "I will not." in render(ours, {"messages": [ASKED, told, ASKED]})


def check_joined(text: str, messages: list[dict[str, Any]], **more: Any) -> None:
    """See that parts come joined by newlines, as one form has to do for all of a role."""
    found = render(ChatTemplate(TOKENIZER, text), {"messages": messages, **more})
    assert "first \nsecond" in found and "'type'" not in found, found


READS_BOTH = """{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"""


def test_parts_are_joined_if_a_place_of_their_role_writes_lists_whole() -> None:
    """Kimi's template printed Python's list of parts beside calls; other places read parts."""
    of_calls = every(
        "{%- set content = message.content -%}"
        "{%- if message.tool_calls -%}"
        "{{- content -}}{{- message.tool_calls[0].function.arguments -}}"
        "{%- else -%}" + READS_BOTH + "{%- endif -%}"
    )
    history_of_parts = history(
        call(SPACED), said=say("assistant", *TWO)["content"], answer=("far",)
    )
    check_joined(of_calls, history_of_parts["messages"], tools=[TOOL])
    of_first = every(
        "{%- set content = message.content -%}"
        "{%- if loop.first -%}{{- '<s>' ~ content -}}{%- else -%}"
        + READS_BOTH
        + "{%- endif -%}"
    )
    check_joined(of_first, CHATS["turns_of_parts"]["messages"])


def test_a_requests_variables_decide_its_forms() -> None:
    """Probes left them out, and Python's list came into the prompt."""
    text = every(
        "{%- set content = message.content -%}"
        "{%- if whole is defined -%}{{- content -}}{%- else -%}"
        + READS_BOTH
        + "{%- endif -%}"
    )
    ours = ChatTemplate(TOKENIZER, text)
    fields = CHATS["parts"]
    assert "first second" in render(ours, fields)
    check_joined(text, fields["messages"], chat_template_kwargs={"whole": True})
    assert "first \nsecond" in render(
        ours, fields | {"chat_template_kwargs": {"whole": True}}
    )


def test_a_null_that_would_be_written_is_no_content() -> None:
    """A template that writes any content as JSON wrote "null" beside calls."""
    text = every(
        "{%- if message.content is not defined -%}{{- raise_exception('?') -}}{%- endif -%}"
        "{{- message.content | tojson -}}"
        "{%- for call in message.tool_calls or [] -%}{{- call.function | tojson -}}{%- "
        "endfor -%}"
    )
    found = render(ChatTemplate(TOKENIZER, text), CHATS["call"])
    assert "null" not in found and '""{"name": "look"' in found


def test_what_a_template_leaves_out_is_told() -> None:
    """Calls beside a text, and all messages for a misspelt name, were dropped without a word."""

    def find(text: str, fields: dict[str, Any]) -> tuple[str, ...]:
        return render_whole(ChatTemplate(TOKENIZER, text), fields).losses

    of_texts = every("{{- message.content or '' -}}")
    assert find(of_texts, CHATS["turns"]) == find(of_texts, CHATS["parts"]) == ()
    (told,) = find(of_texts, CHATS["said_beside_call"])
    assert "leaves out tool calls" in told
    (told,) = find(every("{{- message.contnet -}}"), CHATS["turns"])
    assert "writes no text" in told
    of_null = TEMPLATES["calls beside a null"].text
    assert (
        find(of_null, CHATS["call_beside_empty"]) == find(of_null, CHATS["call"]) == ()
    )
    assert "leaves out tool calls" in find(of_null, CHATS["said_beside_call"])[0]


# Join a content, or ask it for a text's method, which an absent or a null one lacks.
JOINED = {
    "plus": every("{{- message['role'] + ': ' + message['content'] + '\n' -}}"),
    "plus of an attribute": every("{{- '<' + message.role + '>' + message.content -}}"),
    "a method": every("{{- message['role'] ~ ': ' ~ message['content'].strip() -}}"),
    "tilde": every("{{- message['role'] ~ ': ' ~ message['content'] -}}"),
    "a filter": every("{{- message.role ~ ': ' -}}{{- message.content | trim -}}"),
    "a filter of roles": "{%- for message in messages if message.role in "
    "['user', 'assistant'] -%}{{- message.role + message['content'] -}}{%- endfor -%}",
    "refuses what is no text": every(
        "{%- if message.content is not string -%}{{- raise_exception('?') -}}"
        "{%- endif -%}{{- message.role + message.content -}}"
    ),
    "wants the key": every(
        "{%- if message.content is not defined -%}{{- raise_exception('?') -}}"
        "{%- endif -%}{{- message.role -}}{{- message.content | lower -}}"
    ),
    "the first part": every("{{- message.role + message.content[0].text -}}"),
    "the first part of answers": every(
        "{{- message.role + (message.content[0].text "
        "if message.role == 'assistant' else message.content) -}}"
    ),
}


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_calls_alone_are_an_empty_text_where_contents_are_joined(text: str) -> None:
    """A history with calls was refused, though the template writes no calls at all."""
    ours = ChatTemplate(TOKENIZER, text)
    (loss,) = render_whole(ours, CHATS["call"]).losses
    assert "leaves out tool calls" in loss
    alone = render(ours, CHATS["call"])
    assert alone == render(ours, CHATS["call_beside_empty"])
    assert alone == render(
        ours, {"messages": [HELLO, say("assistant", ""), say("tool", "far")]}
    )
    old = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    old_answer = {"role": "function", "name": "look", "content": "far"}
    assert render(ours, {"messages": [HELLO, old, old_answer]}) == alone


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_answers_without_a_content_are_empty_texts(text: str) -> None:
    """Neither a tool nor a thought without an answer says anything; both may lack a content."""
    ours = ChatTemplate(TOKENIZER, text)
    silent = [say("assistant", ""), say("tool", "", tool_call_id="a")]
    empty = render(ours, {"messages": [HELLO, *silent, ASKED]})
    for lacking in ({}, {"content": None}, {"content": []}):
        answers = [
            {"role": "assistant", "reasoning_content": "So it is north."} | lacking,
            {"role": "tool", "tool_call_id": "a", "name": "look"} | lacking,
        ]
        whole = render_whole(ours, {"messages": [HELLO, *answers, ASKED]})
        assert (whole.text, whole.losses) == (empty, ())


def test_forms_do_not_depend_on_the_order_of_requests_and_threads() -> None:
    """What a template reads is found out by probes, never by the requests of some run."""
    for template in (
        TEMPLATES["smolvlm"],
        TEMPLATES["long ids"],
        TEMPLATES["JSON joined to content"],
    ):
        names = [name for name in CHATS if name not in template.refuses.split()]
        apart = [
            render(ChatTemplate(TOKENIZER, template.text), CHATS[name])
            for name in names
        ]
        together = ChatTemplate(TOKENIZER, template.text)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(
                render, repeat(together), [CHATS[name] for name in reversed(names)]
            )
        assert list(found) == apart[::-1]
