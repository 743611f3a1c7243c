"""Turns a chat request's fields into a request whose prompt is the rendered template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fminfer.contract.chat import ChatRequest, overwrite, parse_chat
from fminfer.contract.fields import INT64
from fminfer.contract.prompts import check_text
from fminfer.contract.request import Request, SamplingParams
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.config import KnownParser, ToolCallParser
from fminfer.core.errors import RequestError
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.tool_calls import HERMES_OPENING, find_parser


@dataclass(slots=True, frozen=True)
class ChatIntake:
    """Parses and renders chat requests."""

    template: ChatTemplate
    tool_call_parser: ToolCallParser

    def parse(
        self,
        fields: Mapping[str, Any],
        args: Mapping[str, Any],
        *,
        max_logprobs: int,
        is_strict: bool,
        defaults: SamplingParams,
        max_new_tokens: int | None,
    ) -> Request:
        """Check a chat request and render its prompt.

        Args:
            args: fields that replace its own, by the names that completions have for them.
            max_new_tokens: as in `Limits`; the others as in `parse_chat`.

        Raises:
            RequestError: what is wrong with it.
        """
        chat = parse_chat(
            overwrite(fields, args),
            max_logprobs=max_logprobs,
            is_strict=is_strict,
            defaults=defaults,
            max_new_tokens=max_new_tokens or INT64 - 1,
        )
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
        return found
