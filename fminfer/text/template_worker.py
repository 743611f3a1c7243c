"""Renders chat templates in a limited process: a template is a program of unknown people."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property, partial
from hashlib import blake2b
from importlib import import_module
from typing import Any

from fminfer.core.bounded_cache import BoundedCache
from fminfer.text.message_forms import ChatMessage, Forms, Turn, find_forms

MAX_FORMS = 1000  # structures of conversations whose forms are kept
MAX_FORM_BYTES = 64 << 20  # of these structures, together
LINE = "line "
MAX_FAULT_CHARS = 1000  # of what a template raises; transformers quotes whole prompts


class RenderedTemplate:
    """A template with the special tokens of its tokenizer, as transformers renders it.

    Args:
        library: transformers' module for chat templates.
    """

    def __init__(self, library: Any, text: str, special_tokens: dict[str, Any]) -> None:
        self._library = library
        self._text = text
        self._special_tokens = special_tokens
        # By a digest of all that they depend on.
        self._forms: BoundedCache[bytes, Forms] = BoundedCache(
            MAX_FORMS, MAX_FORM_BYTES
        )
        self._clock = ""

    @cached_property
    def variables(self) -> list[str]:
        """The variables that it reads from outside."""
        return sorted(self._library._get_template_variables(self._text))

    def render(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a message that `ChatTemplate.make_call` made."""
        self._clock = message["clock"]
        messages: list[ChatMessage] = message["messages"]
        args: dict[str, Any] = message["args"]
        forms = self._find_forms(messages, message["tools"], args)
        rendered = self._render_messages(
            message["tools"],
            [forms.convert(chat_message) for chat_message in messages],
            add_generation_prompt=message["begins"],
            continue_final_message=message["continues"],
            **args,
        )
        variables = self.variables if args else []
        return {"text": rendered, "losses": forms.losses, "variables": variables}

    def _find_forms(
        self,
        messages: list[ChatMessage],
        tools: list[ChatMessage],
        args: dict[str, Any],
    ) -> Forms:
        """Return the forms in which the template reads messages of this structure."""
        turns = tuple(map(Turn.from_message, messages))
        description = repr(turns) + (json.dumps([tools, args]) if tools or args else "")
        key = blake2b(
            description.encode(errors="surrogatepass"), digest_size=16
        ).digest()
        forms = self._forms.get(key)
        if forms is None:
            begins = messages[-1]["role"] != "assistant"
            render = partial(
                self._render_messages, tools, add_generation_prompt=begins, **args
            )
            forms = find_forms(turns, render)
            self._forms.put(key, forms, len(description))
        return forms

    def _render_messages(
        self, tools: list[ChatMessage], messages: list[ChatMessage], **args: Any
    ) -> str:
        # apply_chat_template would drop nulls, and some templates test for them.
        args = {**self._special_tokens, **args}
        # functions among the arguments would become strings
        if "strftime_now" in self._text:
            template = self._library._compile_jinja_template(self._text)
            template.globals["strftime_now"] = self._format_time
        rendered, _ = self._library.render_jinja_template(
            [messages], tools or None, chat_template=self._text, **args
        )
        return str(rendered[0])

    def _format_time(self, form: str) -> str:
        """Return the time of the request that is being rendered, as `strftime_now` does."""
        time = datetime.fromisoformat(self._clock) if self._clock else datetime.now()
        return time.strftime(form)


class TemplateWorker:
    """Answers messages about templates, each of which is sent once and then named."""

    def __init__(self) -> None:
        self._library = import_module("transformers.utils.chat_template_utils")
        self._templates: dict[str, RenderedTemplate] = {}

    def __call__(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return a reply with a prompt's text; None: the template must be sent along.

        Raises:
            ValueError: what the template raises; an error of its syntax begins with `LINE`.
        """
        name = message["name"]
        if "template" in message:
            self._templates[name] = RenderedTemplate(
                self._library, *message["template"]
            )
        elif name not in self._templates:
            return None
        try:
            return self._templates[name].render(message)
        except MemoryError:
            raise
        except Exception as error:  # whatever a template does
            place = (
                f"{LINE}{line}: " if (line := getattr(error, "lineno", None)) else ""
            )
            fault = f"{place}{type(error).__name__}: {error}"
            if len(fault) > MAX_FAULT_CHARS:
                fault = fault[:MAX_FAULT_CHARS] + "…"
            raise ValueError(fault) from error
