"""Messages to a prompt's text, by a chat template that transformers renders in a sandbox."""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateSyntaxError

from fminfer.core.errors import RequestError, UsageError
from fminfer.text.message_forms import ChatMessage, Forms, Turn, find_forms
from fminfer.text.tokenizer import Tokenizer

_DEVELOPER = re.compile("""['"]developer['"]""")  # the role, not a word of the template's text
_CLOCK = ContextVar("clock", default="")  # of the request that this thread renders
MAX_FORMS = 1000  # structures of conversations whose forms are kept


class ChatTemplate:
    """Renders the messages of chat requests. Any thread may call it.

    Args:
        text: a template in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._given = text
        self._forms: dict[tuple[object, ...], Forms] = {}  # by all that they depend on

    def check(self) -> None:
        """Raise a UsageError if the given template has an error of syntax."""
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
        """Return the template, which may be another for requests with tools; None: none."""
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
        clock: str = "",
    ) -> str:
        """Return the text of a prompt, with the special tokens that the template writes.

        Args:
            args: further variables of the template.
            clock: the time that `strftime_now` tells, in ISO format; "": now.

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
        messages, args = _with_known_roles(text, messages), args or {}
        _CLOCK.set(clock)
        try:
            forms = self._find_forms(text, messages, tools, args)
            rendered = self._apply(
                text,
                tools,
                [forms.convert(message) for message in messages],
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=continues_final_message,
                **args,
            )
        except (MemoryError, OSError):
            raise
        except Exception as error:  # whatever a template does: it is a program
            bare = [place for place, each in enumerate(messages) if not each.get("content")]
            hint = f"; messages[{bare[0]}] has no content" if bare else ""
            raise RequestError(
                "unsupported_parameter",
                f"the chat template cannot write these messages ({type(error).__name__}: "
                f"{error}{hint}). Change them, or give another template by --chat-template FILE",
                "messages",
            ) from error
        return rendered

    def find_losses(
        self, messages: list[ChatMessage], tools: list[ChatMessage], args: dict[str, Any]
    ) -> tuple[str, ...]:
        """Return what of messages their prompt lacks, each a sentence for people."""
        text = self.find_text(has_tools=bool(tools)) or ""
        return self._find_forms(text, _with_known_roles(text, messages), tools, args).losses

    def _find_forms(
        self, text: str, messages: list[ChatMessage], tools: list[ChatMessage], args: dict[str, Any]
    ) -> Forms:
        """Return the forms in which the template reads messages of this structure."""
        turns = tuple(map(Turn.of, messages))
        key = (text, turns, json.dumps([tools, args]) if tools or args else "")
        if (known := self._forms.get(key)) is not None:
            return known
        begins = messages[-1]["role"] != "assistant"
        render = partial(self._apply, text, tools, add_generation_prompt=begins, **args)
        found = find_forms(turns, render)
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()  # perhaps beside another thread, which has its own by now
        self._forms[key] = found
        return found

    def _apply(
        self, text: str, tools: list[ChatMessage], messages: list[ChatMessage], **args: Any
    ) -> str:
        from transformers.utils import chat_template_utils  # slow to import

        # apply_chat_template would drop nulls, and some templates test for them.
        args = {**self._renderer.special_tokens_map, **args}
        if "strftime_now" in text:  # functions among the arguments would become strings
            chat_template_utils._compile_jinja_template(text).globals["strftime_now"] = _tell_time
        rendered, _ = chat_template_utils.render_jinja_template(
            [messages], tools or None, chat_template=text, **args
        )
        only: str = rendered[0]
        return only

    @cached_property
    def _renderer(self) -> Any:
        if self.tokenizer.hf is not None:
            return self.tokenizer.hf
        from transformers import PreTrainedTokenizerFast  # slow to import

        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer.backend)


def read_variables(text: str) -> frozenset[str]:
    """Return the variables that a template reads from outside."""
    from transformers.utils.chat_template_utils import _get_template_variables  # slow to import

    found: frozenset[str] = _get_template_variables(text)
    return found


def _tell_time(form: str) -> str:
    """Return the time of the request that is being rendered, as `strftime_now` does."""
    clock = _CLOCK.get()
    return (datetime.fromisoformat(clock) if clock else datetime.now()).strftime(form)


def _with_known_roles(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages of the role system in place of developer, if a template has not that one."""
    if _DEVELOPER.search(text):
        return messages
    return [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
