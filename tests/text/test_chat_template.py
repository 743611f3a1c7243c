"""Rendered templates: the text and the ids are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from fminfer.contract.chat import parse_chat
from fminfer.core.errors import RequestError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.tokenizer import Tokenizer
from tests.text.test_sentencepiece import make_folder

CHATML = """{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\n" + (message.content or "") -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + "}\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""
LLAMA3 = """{{- bos_token -}}
{%- if tools -%}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + tools | tojson -}}
{%- endif -%}
{%- for message in messages -%}
{{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\n\n" -}}
{{- (message["content"] or "") | trim + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" -}}
{%- endif -%}"""
MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}{{- "[INST] " + message.content + " [/INST]" -}}
{%- elif message.role == "assistant" -%}{{- " " + (message.content or "") + eos_token -}}
{%- elif message.role == "system" -%}{{- "[SYS] " + message.content -}}
{%- endif -%}
{%- endfor -%}"""
GEMMA = """{{- bos_token -}}
{%- for message in messages -%}
{%- if (message.role == "user") and style == "plain" -%}{{- "plain " -}}{%- endif -%}
{%- set role = "model" if message.role == "assistant" else message.role -%}
{{- "<start_of_turn>" + role + "\n" + (message.content or "") | trim + "<end_of_turn>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<start_of_turn>model\n" -}}{%- endif -%}"""
STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": "é"}'},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "  Hello 🙂\nthere  "},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "north?"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "c"},
        ],
        "tools": [TOOL],
        "chat_template_kwargs": {"style": "plain"},
    },
    {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "The way is"},
        ],
        "continue_final_message": True,
    },
    {
        "messages": [{"role": "user", "content": "Hello"}],
        "add_generation_prompt": False,
    },
]


@pytest.fixture(scope="module", params=["demo", "llama"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """Byte-level BPE without BOS, and sentencepiece with one."""
    if request.param == "demo":
        return Tokenizer.load(DEMO_MODEL)
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder, "llama")
    return Tokenizer.load(folder)


def render(tokenizer: Tokenizer, text: str | None, **fields: Any) -> str:
    chat = parse_chat(fields, max_logprobs=5)
    return (
        ChatTemplate(tokenizer, text)
        .render(
            chat.messages,
            chat.tools,
            adds_generation_prompt=chat.adds_generation_prompt,
            continues_final_message=chat.continues_final_message,
            args=chat.template_args,
        )
        .text
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fields", CHATS)
def test_ids_are_those_of_transformers(
    tokenizer: Tokenizer, style: str, fields: dict[str, Any]
) -> None:
    hf = tokenizer.hf
    assert hf is not None
    template = STYLES[style]
    if hf.bos_token is None:
        template = template.replace("bos_token", "''")
    rendered = render(tokenizer, template, **fields)
    messages = [dict(message) for message in fields["messages"]]
    for message in messages:
        if "tool_calls" in message:
            function = {"name": "f", "arguments": {"a": "é"}}
            message["tool_calls"] = [CALL | {"function": function}]
    continues = fields.get("continue_final_message", False)
    expected = hf.apply_chat_template(
        messages,
        tools=fields.get("tools"),
        chat_template=template,
        add_generation_prompt=fields.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        tokenize=True,
        return_dict=False,
        **fields.get("chat_template_kwargs", {}),
    )
    assert tokenizer.encode(rendered, add_special_tokens=False).ids == expected
    assert len(expected) > 5


def test_developer_is_system_where_a_template_has_no_such_role(
    tokenizer: Tokenizer,
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x"},
    ]
    assert "<|im_start|>system\nBe brief." in render(
        tokenizer, CHATML, messages=messages
    )
    aware = CHATML + "{# 'developer' #}"
    assert "<|im_start|>developer\n" in render(tokenizer, aware, messages=messages)


def test_without_a_template_the_error_says_what_to_give(tmp_path: Any) -> None:
    make_folder(tmp_path, "llama")
    for tokenizer in (Tokenizer.load(tmp_path), Tokenizer(None)):
        with pytest.raises(RequestError, match="--chat-template FILE") as caught:
            render(tokenizer, None, messages=[{"role": "user", "content": "x"}])
        assert caught.value.param == "messages"
    assert render(Tokenizer(None), MISTRAL.replace("bos_token", "''"), **CHATS[0])


@pytest.mark.parametrize(
    ("template", "hint"),
    [
        ('{{ raise_exception("roles must alternate") }}', "roles must alternate"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_does_costs_its_request_only(
    tokenizer: Tokenizer, template: str, hint: str
) -> None:
    with pytest.raises(RequestError, match=hint) as caught:
        render(tokenizer, template, **CHATS[0])
    assert caught.value.type == "invalid_request_error"


def test_a_model_with_several_templates(tokenizer: Tokenizer) -> None:
    hf = tokenizer.hf
    assert hf is not None
    before = hf.chat_template
    try:
        hf.chat_template = {"default": CHATML, "tool_use": "tools {{ tools | length }}"}
        assert render(tokenizer, None, **CHATS[0]).startswith("<|im_start|>")
        assert (
            render(tokenizer, None, **CHATS[2] | {"chat_template_kwargs": {}})
            == "tools 1"
        )
        hf.chat_template = {"other": CHATML}
        with pytest.raises(RequestError, match="--chat-template FILE"):
            render(tokenizer, None, **CHATS[0])
    finally:
        hf.chat_template = before
