"""Messages to the text of a prompt, by the model's chat template or one of the user's.

transformers renders it, in a sandbox. What a template refuses is an error of its request.
Templates differ in the form of message that they read, and none says which: probes find it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

from jinja2 import TemplateSyntaxError

from fminfer.core.errors import RequestError, UsageError
from fminfer.text.tokenizer import Tokenizer

Message = dict[str, Any]


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_DEVELOPER = re.compile("""['"]developer['"]""")  # the role, not a word of the template's text

# Digits, which a template may trim, shorten or write in capitals without harm.
_FIRST, _SECOND, _KEY = "7301946285", "9058271634", "4612095837"
# No template reads that key. It shows only where a list is written whole, as Python or as JSON.
_PARTS = [{"type": "text", "text": text, _KEY: 0} for text in (_FIRST, _SECOND)]
_ARGUMENTS = {"value": _FIRST}
_ID = "a1b2c3d4e"  # Mistral's templates want nine letters or digits
_PARAMETERS = {"type": "object", "properties": {"value": {"type": "string"}}, "required": []}
_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": _PARAMETERS},
}
# What a message with calls may have for a content that it lacks, and what else may stand there.
_LACKING: tuple[Message, ...] = ({}, {"content": None})
_BESIDE_CALLS = (*_LACKING, {"content": ""}, {"content": "x"}, {"content": [_part("x")]})
# Conversations to try. A template that drops earlier turns may write an answer only if it is last.
_SHAPES = {
    "user": ("user",),
    "assistant": ("user assistant user", "user assistant"),
    "tool": ("user call tool",),
    "call": ("user call tool",),
}


class ChatTemplate:
    """Renders the messages of chat requests. Any thread may call it.

    Args:
        tokenizer: the model's; it has the template and the special tokens that this writes.
        text: a template in place of the model's own.
    """

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._given = text
        self._forms: dict[tuple[str, bool], _MessageForms] = {}  # by template and whether has tools

    def check(self) -> None:
        """See that the given template can be read; what it refuses is seen with each request.

        Raises:
            UsageError: it has an error of syntax.
        """
        try:
            self._renderer.apply_chat_template(
                [{"role": "user", "content": ""}], chat_template=self._given, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise UsageError(
                f"--chat-template has an error in line {error.lineno}: {error.message}. Mend the "
                "file, or leave out the flag to take the model's own template"
            ) from error
        except Exception:  # it may want more than one message
            return

    def find_text(self, *, has_tools: bool) -> str | None:
        """Return the template; None: there is none.

        Args:
            has_tools: a model may have one template for requests with tools and one for others.
        """
        if self._given is not None:
            return self._given
        if self.tokenizer.hf is None:
            return None
        try:
            text: str = self.tokenizer.hf.get_chat_template(None, [{}] if has_tools else None)
        except ValueError:  # none, or several and none of them the default
            return None
        return text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        adds_generation_prompt: bool = True,
        continues_final_message: bool = False,
        args: dict[str, Any] | None = None,
    ) -> str:
        """Return the text of a prompt, with the special tokens that the template writes.

        Args:
            args: further variables of the template.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        text = self.find_text(has_tools=bool(tools))
        if text is None:
            raise RequestError(
                "unsupported_parameter",
                "the model has no chat template for messages; give one by --chat-template FILE "
                "(in Python: chat_template), or send a prompt",
                "messages",
            )
        try:
            rendered = self._apply(
                text,
                tools,
                self._find_forms(text, has_tools=bool(tools)).convert(messages),
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=continues_final_message,
                **(args or {}),
            )
        except (MemoryError, OSError):
            raise
        except Exception as error:  # whatever a template does: it is a program
            raise RequestError(
                "unsupported_parameter",
                f"the chat template cannot write these messages ({type(error).__name__}: {error}). "
                "Change them, or give another template by --chat-template FILE",
                "messages",
            ) from error
        return rendered

    def _find_forms(self, text: str, *, has_tools: bool) -> _MessageForms:
        found = self._forms.get((text, has_tools))
        if found is None:
            render = partial(self._apply, text, [_TOOL] * has_tools)
            found = _MessageForms(render, knows_developer=bool(_DEVELOPER.search(text)))
            self._forms[text, has_tools] = found
        return found

    def _apply(
        self, text: str, tools: list[dict[str, Any]], messages: list[Message], **args: Any
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

        # apply_chat_template does the same, but leaves out nulls, which some templates ask for.
        args = {**self._renderer.special_tokens_map, **args}
        rendered, _ = render_jinja_template([messages], tools or None, chat_template=text, **args)
        only: str = rendered[0]
        return only

    @cached_property
    def _renderer(self) -> Any:
        if self.tokenizer.hf is not None:
            return self.tokenizer.hf
        from transformers import PreTrainedTokenizerFast  # slow to import

        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer.backend)


@dataclass(slots=True, frozen=True)
class _ContentForm:
    """Which contents of a role reach the prompt."""

    strings: bool
    one_part: bool
    parts: bool  # each of several

    def convert(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Return a content as it is, or in the form that is read."""
        if isinstance(content, list):
            if self.parts:
                return content
            content = "\n".join(part["text"] for part in content)
        return [_part(content)] if self.one_part and not self.strings else content


class _MessageForms:
    """Gives a template messages in the forms that it reads, which it finds out once.

    Args:
        render: writes a conversation by the template, with the arguments that this takes.
        knows_developer: the template has this role; otherwise it is `system`.
    """

    def __init__(self, render: Callable[..., str], *, knows_developer: bool) -> None:
        self._render = render
        self._knows_developer = knows_developer
        self._contents: dict[str, _ContentForm] = {}  # by role

    def convert(self, messages: list[Message]) -> list[Message]:
        """Return messages in the forms that the template reads."""
        return [self._convert(message) for message in messages]

    def _convert(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows_developer:
            message = message | {"role": "system"}
        role, content = message["role"], message.get("content")
        if content is not None:
            if role not in self._contents:
                self._contents[role] = self._find_content_form(role)
            given = self._contents[role].convert(content)
            if given is not content:
                message = message | {"content": given}
        if "tool_calls" in message:
            if content is None:
                message = message | self._beside_calls
            calls = [self._convert_call(call) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        return message

    def _convert_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and not self._reads_json:
            arguments = json.loads(arguments)
        elif self._reads_json and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    @cached_property
    def _reads_json(self) -> bool:
        """Whether the arguments of a call are read as a string of JSON, not as an object."""
        written = self._probe("call", None, _ARGUMENTS)
        if written and str(_ARGUMENTS) not in written:
            return False
        text = json.dumps(_ARGUMENTS)
        return text in self._probe("call", None, text)

    @cached_property
    def _beside_calls(self) -> Message:
        """What stands for the content that a message with calls lacks: nothing, or a null."""
        arguments = json.dumps(_ARGUMENTS) if self._reads_json else _ARGUMENTS
        return next((each for each in _LACKING if self._probe("call", None, arguments, [each])), {})

    def _find_content_form(self, role: str) -> _ContentForm:
        arguments: object = "{}" if role == "tool" and self._reads_json else {}
        parts = self._probe(role, _PARTS, arguments)
        reads_parts = bool(parts) and _KEY not in parts
        return _ContentForm(
            strings=bool(self._probe(role, _FIRST, arguments)),
            one_part=reads_parts,
            parts=reads_parts and _FIRST in parts and _SECOND in parts,
        )

    def _probe(
        self,
        probed: str,
        content: object,
        arguments: object,
        beside_calls: Sequence[Message] = _BESIDE_CALLS,
    ) -> str:
        """Return the first text that has anything of what is asked about; "" if none has."""
        for conversation in _conversations(probed, content, arguments, beside_calls):
            begins = conversation[-1]["role"] != "assistant"
            try:
                text = self._render(conversation, add_generation_prompt=begins)
            except (MemoryError, OSError):
                raise
            except Exception:  # it wants another conversation, or another form
                continue
            if _FIRST in text or _SECOND in text:
                return text
        return ""


def _conversations(
    probed: str, content: object, arguments: object, beside_calls: Sequence[Message]
) -> Iterator[list[Message]]:
    """Return conversations in which a role has a content, or "call" has arguments."""
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    bare: dict[str, Message] = {
        "call": {"role": "assistant", "tool_calls": [call]},
        "tool": {"role": "tool", "tool_call_id": _ID, "name": "probe"},
    }
    shapes = _SHAPES.get(probed, (f"{probed} user",))
    for start, shape, other in product(("", "system "), shapes, ("x", [_part("x")])):
        kinds = (start + shape).split()
        for said in beside_calls:
            contents: dict[str, Message] = {kind: {"content": other} for kind in kinds}
            contents["call"] = said
            if content is not None:
                contents[probed] = {"content": content}
            yield [bare.get(kind, {"role": kind}) | contents[kind] for kind in kinds]
