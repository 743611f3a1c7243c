"""Messages as a prompt's text, as lm-eval's `hf` model writes them."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from jinja2.exceptions import TemplateError

from fminfer.core.errors import UsageError

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]


class ChatRenderer:
    """Renders messages with a tokenizer of transformers.

    Args:
        template: in place of the tokenizer's own.
        template_args: further variables of the template.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, template_args: dict[str, Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self._args = template_args or {}
        self._has_warned = False

    def render(self, messages: Messages, *, adds_generation_prompt: bool) -> str:
        """Return the prompt's text, with the special tokens that the template writes.

        A template that knows no role `system` gets the other messages, as `hf` does it.

        Args:
            adds_generation_prompt: begin an answer. Without it the last message goes on.

        Raises:
            UsageError: there is no template, or it cannot write these messages.
        """
        if self.template is None and not self._tokenizer.chat_template:
            raise UsageError(
                "the model has no chat template; give one by chat_template=FILE in "
                "model_args, or leave apply_chat_template out"
            )
        try:
            try:
                return self._apply(messages, adds_generation_prompt)
            except TemplateError as error:
                others = [message for message in messages if message["role"] != "system"]
                if len(others) == len(messages):
                    raise
                self._warn_of_system(error)
                return self._apply(others, adds_generation_prompt)
        except (TemplateError, ValueError) as error:
            raise UsageError(
                f"the chat template cannot write the task's messages: {error}. Give another "
                "one by chat_template=FILE, change the task, or leave out apply_chat_template"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Tell what was given from what the tokenizer has, for a cache of prompts."""
        if self.template is None and not self._args:
            return ""
        given = json.dumps([self.template, self._args], sort_keys=True, default=str)
        return "-" + hashlib.sha256(given.encode()).hexdigest()[:16]

    def warn_of_name(self, name: str) -> None:
        """Say so if a template is asked for by name that `hf`, and so we, do not apply."""
        named = self._tokenizer.chat_template
        if isinstance(named, dict) and name in named and name != "default":
            log.warning(
                "lm-eval reports the chat template %r, but its hf model applies the default one, "
                "and so does fminfer; chat_template=FILE in model_args applies another",
                name,
            )

    def _apply(self, messages: Messages, adds_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=adds_generation_prompt,
            continue_final_message=not adds_generation_prompt,
            **self._args,
        )
        return text

    def _warn_of_system(self, error: TemplateError) -> None:
        if not self._has_warned:
            log.warning(
                "the chat template refuses system messages (%s); they are left out, as lm-eval's "
                "hf model does it",
                error,
            )
        self._has_warned = True
