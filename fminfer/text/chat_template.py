"""Messages to the text of a prompt, by the model's chat template or one of the user's.

transformers renders it, in a sandbox. What a template refuses is an error of its request.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError

from fminfer.core.errors import RequestError, UsageError
from fminfer.text.tokenizer import Tokenizer

_DEVELOPER = re.compile("""['"]developer['"]""")  # the role, not a word of the template's text


class ChatTemplate:
    """Renders the messages of chat requests. Any thread may call it.

    Args:
        tokenizer: the model's; it has the template and the special tokens that this writes.
        text: a template in place of the model's own.
    """

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._given = text

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
        if not _DEVELOPER.search(text):
            messages = [_as_system(message) for message in messages]
        try:
            rendered: str = self._renderer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=text,
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=continues_final_message,
                tokenize=False,
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

    @cached_property
    def _renderer(self) -> Any:
        if self.tokenizer.hf is not None:
            return self.tokenizer.hf
        from transformers import PreTrainedTokenizerFast  # slow to import

        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer.backend)


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "system"} if message["role"] == "developer" else message
