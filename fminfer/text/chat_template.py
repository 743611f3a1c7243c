"""Messages to a prompt's text, by a chat template that a limited process renders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

from fminfer.core.errors import RequestError, UsageError
from fminfer.text.limited_process import LimitedPool, LimitError
from fminfer.text.message_forms import ChatMessage
from fminfer.text.template_worker import LINE, TemplateWorker
from fminfer.text.tokenizer import Tokenizer

# the role, not a word of the template's text
_DEVELOPER = re.compile("""['"]developer['"]""")
# the key, not a variable of the template
THOUGHT_NAMES = {
    name: re.compile(rf"""['".]{name}\b""")
    for name in ("reasoning_content", "reasoning", "thinking")
}
_RENDERERS = LimitedPool(TemplateWorker)


@dataclass(slots=True, frozen=True)
class RenderedChat:
    """What a template made of messages."""

    text: str  # the prompt, with the special tokens that the template writes
    losses: tuple[str, ...]  # a sentence for each thing that the prompt lacks
    # that the template reads; empty if the request gives none
    variables: frozenset[str]


@dataclass(slots=True)
class RenderCall:
    """Messages for a template, and the limited process's reply, once that is known."""

    template: list[Any]  # its text, and the tokenizer's special tokens
    message: dict[str, Any]
    reply: Any = None  # an error, or `TemplateWorker`'s reply


class ChatTemplate:
    """Renders the messages of chat requests. Any thread may call it.

    Args:
        text: a template in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._override = text
        hf = tokenizer.hf
        self._special_tokens: dict[str, Any] = (
            {} if hf is None else hf.special_tokens_map
        )
        self._template_names: dict[str, str] = {}  # of templates by their text

    def check_syntax(self) -> None:
        """Raise a UsageError if the given template has an error of syntax, or takes too long."""
        remedy = "Mend the file, or leave out the flag to take the model's own template"
        try:
            _ask_renderer(self.make_call([{"role": "user", "content": ""}], []))
        except LimitError as error:
            raise UsageError(
                f"--chat-template: with one message, {error}. {remedy}"
            ) from None
        except ValueError as error:
            if str(error).startswith(LINE):  # other faults may be of this one message
                raise UsageError(
                    f"--chat-template has an error in {error}. {remedy}"
                ) from None

    def find_template(self, *, has_tools: bool) -> str | None:
        """Return the template, which may be another for requests with tools; None: none."""
        if self._override is not None:
            return self._override
        if self.tokenizer.hf is None:
            return None
        try:
            return str(
                self.tokenizer.hf.get_chat_template(None, [{}] if has_tools else None)
            )
        except ValueError:  # none, or several and none of them the default
            return None

    def make_call(
        self,
        messages: list[ChatMessage],
        tools: list[ChatMessage],
        *,
        adds_generation_prompt: bool = True,
        continues_final_message: bool = False,
        args: dict[str, Any] | None = None,
        clock: str = "",
    ) -> RenderCall:
        """Return the call that `finish_call` makes a prompt of.

        Args:
            args: further variables of the template.
            clock: the time that `strftime_now` tells, in ISO format; "": now.

        Raises:
            RequestError: there is no template.
        """
        text = self.find_template(has_tools=bool(tools))
        if text is None:
            raise RequestError(
                "unsupported_parameter",
                "the model has no chat template for messages; give one by --chat-template FILE "
                "(in Python: chat_template), or send a prompt",
                "messages",
            )
        template = [text, self._special_tokens]
        if text not in self._template_names:
            self._template_names[text] = blake2b(
                json.dumps(template).encode()
            ).hexdigest()
        message = {
            "name": self._template_names[text],
            "messages": _name_thoughts(text, _replace_unknown_roles(text, messages)),
            "tools": tools,
            "args": args or {},
            "begins": adds_generation_prompt,
            "continues": continues_final_message,
            "clock": clock,
        }
        return RenderCall(template, message)

    def render(
        self, messages: list[ChatMessage], tools: list[ChatMessage], **settings: Any
    ) -> RenderedChat:
        """Return the prompt of messages; `make_call` and `finish_call` in one."""
        return self.finish_call(self.make_call(messages, tools, **settings))

    def ask_calls_ahead(self, calls: Iterator[tuple[RenderCall, str]]) -> None:
        """Get the replies to the first of some calls, while the next ones are made.

        Args:
            calls: each with its message in JSON.
        """
        first = next(calls, None)
        if first is None:
            return
        sent = list[RenderCall]()

        def write() -> Iterator[str]:
            for call, message in chain([first], calls):
                sent.append(call)
                yield message

        for call, reply in zip(sent, _RENDERERS.ask_all(write()), strict=False):
            call.reply = reply

    def finish_call(self, call: RenderCall) -> RenderedChat:
        """Return the prompt of a call.

        Raises:
            RequestError: the template refuses these messages, or takes too long.
        """
        try:
            reply = _ask_renderer(call)
        except (TypeError, ValueError, RecursionError) as error:  # also of JSON
            messages = call.message["messages"]
            empty_messages = [
                index
                for index, message in enumerate(messages)
                if not message.get("content")
            ]
            hint = (
                f"; messages[{empty_messages[0]}] has no content"
                if empty_messages
                else ""
            )
            raise RequestError(
                "unsupported_parameter",
                f"the chat template cannot write these messages ({error}{hint}). "
                "Change them, or give another template by --chat-template FILE",
                "messages",
            ) from None
        return RenderedChat(
            reply["text"], tuple(reply["losses"]), frozenset(reply["variables"])
        )


def _ask_renderer(call: RenderCall) -> dict[str, Any]:
    """Return what a limited process answers, or raise its error."""
    reply = _RENDERERS.ask(call.message) if call.reply is None else call.reply
    if reply is None:  # the process does not know the template
        reply = _RENDERERS.ask(call.message | {"template": call.template})
    if isinstance(reply, Exception):
        raise reply
    return dict(reply)


def _replace_unknown_roles(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages with the role system for developer, if the template lacks that role."""
    if _DEVELOPER.search(text):
        return messages
    return [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def _name_thoughts(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages whose thoughts have the name that the template reads."""
    read = [name for name, place in THOUGHT_NAMES.items() if place.search(text)]
    if not read:
        return messages
    return [_name_thought(message, read) for message in messages]


def _name_thought(message: ChatMessage, read: list[str]) -> ChatMessage:
    sent = [name for name in THOUGHT_NAMES if name in message]
    if message["role"] != "assistant" or not sent or any(each in read for each in sent):
        return message
    return message | {read[0]: message[sent[0]]}
