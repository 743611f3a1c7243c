"""Turns a chat request that passed into a request whose prompt is the rendered template."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fminfer.contract.chat import ChatRequest
from fminfer.contract.prompts import check_text
from fminfer.contract.request import Request
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.config import KnownParser, ToolCallParser
from fminfer.core.errors import RequestError
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.tool_calls import HERMES_OPENING, find_parser


@dataclass(slots=True, frozen=True)
class ChatIntake:
    """Renders chat requests."""

    template: ChatTemplate
    tool_call_parser: ToolCallParser

    def render(self, chat: ChatRequest, *, is_strict: bool) -> Request:
        """Return the request whose prompt is what the template writes.

        Args:
            is_strict: what is otherwise only warned of is an error.

        Raises:
            RequestError: the template refuses the messages.
        """
        text = self.template.render(
            chat.messages,
            chat.tools,
            adds_generation_prompt=chat.adds_generation_prompt,
            continues_final_message=chat.continues_final_message,
            args=chat.template_args,
        )
        if not text:
            raise RequestError(
                "missing_prompt",
                "the chat template writes nothing for these messages; give others",
                "messages",
            )
        parser = self._find_parser() if chat.tools else None
        warnings = (*chat.warnings, *self._warn(chat, parser))
        if warnings and is_strict:
            raise RequestError(
                "unsupported_parameter",
                f"{warnings[0]}; change that, or run without --strict",
            )
        params = chat.params
        if parser == "hermes" and HERMES_OPENING in self.template.tokenizer.special_pieces:
            params = replace(params, skip_special_tokens=False)  # the text would lose its calls
        return Request(
            [check_text(text, "messages")],
            params,
            warnings,
            is_chat=True,
            fills_context=chat.fills_context,
            tool_parser=parser,
        )

    def _find_parser(self) -> KnownParser | None:
        if self.tool_call_parser == "none":
            return None
        if self.tool_call_parser != "auto":
            return self.tool_call_parser
        return find_parser(self.template.find_text(has_tools=True) or "")

    def _warn(self, chat: ChatRequest, parser: KnownParser | None) -> list[RowWarning]:
        """Return what the request asks for and the template, or the run, has no means for."""
        found = []
        text = self.template.find_text(has_tools=bool(chat.tools)) or ""
        if chat.tools and parser is None and self.tool_call_parser == "auto":
            kind = "the form of this model's tool calls is not known, so that they stay text"
            found.append(RowWarning(f"{kind}; --tool-call-parser names one"))
        if chat.tools and "tools" not in text:
            found.append(RowWarning("the chat template does not write tools"))
        if "reasoning_effort" in chat.template_args and "reasoning_effort" not in text:
            found.append(RowWarning("the chat template does not look at reasoning_effort"))
        losses = self.template.find_losses(chat.messages, chat.tools, chat.template_args)
        return found + [RowWarning(loss) for loss in losses]
