"""Turns a chat request that passed into a request whose prompt is the rendered template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fminfer.contract.chat import ChatRequest
from fminfer.contract.prompts import check_text
from fminfer.contract.read_fields import describe_guess
from fminfer.contract.request import Request
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.core.config import KnownParser, ToolCallParser
from fminfer.core.errors import RequestError
from fminfer.text.chat_template import ChatTemplate, RenderCall, RenderedChat
from fminfer.text.tool_calls import HERMES_OPENING, find_parser

# Keys of messages and of their parts that many templates do without.
_USUAL_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "type", "text", "id"}
)
# read by any of these
_REASONING_KEYS = frozenset({"reasoning_content", "reasoning", "thinking"})

_THOUGHT_MARKS = {  # the marks between which models think
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "<|channel|>analysis": "<|end|>",
}
OPEN_THOUGHT = RowWarning(
    "the prompt ends inside an open thought, and the constraint holds from there on, "
    "so that the answer has no thought. Let the template close it; many do with "
    "enable_thinking false in chat_template_kwargs"
)


@dataclass(slots=True, frozen=True)
class ChatIntake:
    """Renders chat requests."""

    template: ChatTemplate
    tool_call_parser: ToolCallParser

    def begin_render(self, chat: ChatRequest, clock: str) -> RenderCall:
        """Return the call of the template for a chat, at the time of `clock`."""
        return self.template.make_call(
            chat.messages,
            chat.tools,
            adds_generation_prompt=chat.adds_generation_prompt,
            continues_final_message=chat.continues_final_message,
            args=chat.template_args,
            clock=clock,
        )

    def render(self, chat: ChatRequest, call: RenderCall) -> Request:
        """Return the request of a chat, with the prompt that the template writes."""
        rendered = self.template.finish_call(call)
        if not rendered.text:
            raise RequestError(
                "missing_prompt",
                "the chat template writes nothing for these messages; give others",
                "messages",
            )
        has_calls = bool(chat.tools) and chat.params.constraint is None
        parser: KnownParser | None = None
        if has_calls:
            if self.tool_call_parser == "auto":
                parser = find_parser(self.template.find_template(has_tools=True) or "")
            elif self.tool_call_parser != "none":
                parser = self.tool_call_parser
        warnings = (
            *chat.warnings,
            *self._find_warnings(chat, rendered, parser, has_calls=has_calls),
            *_find_open_beginnings(chat, rendered.text),
        )
        params = chat.params
        if (
            parser == "hermes"
            and self.template.tokenizer.find_special_id(HERMES_OPENING) is not None
        ):
            # the text would lose its calls
            params = replace(params, skip_special_tokens=False)
        return Request(
            [check_text(rendered.text, "messages")],
            params,
            warnings,
            endpoint="chat",
            fills_context=chat.fills_context,
            tool_parser=parser,
            keeps_one_call=parser is not None and chat.keeps_one_call,
        )

    def _find_warnings(
        self,
        chat: ChatRequest,
        rendered: RenderedChat,
        parser: KnownParser | None,
        *,
        has_calls: bool,
    ) -> list[RowWarning]:
        """Return warnings of what a request wants, and the template or the run cannot do."""
        warnings = []
        text = self.template.find_template(has_tools=bool(chat.tools)) or ""
        if has_calls and parser is None and self.tool_call_parser == "auto":
            warnings.append(
                RowWarning(
                    "the form of this model's tool calls is not known, so that they stay text; "
                    "--tool-call-parser names one"
                )
            )
        if chat.tools and "tools" not in text:
            warnings.append(RowWarning("the chat template does not write tools"))
        warnings += _find_unread_names(chat, text, rendered.variables)
        return warnings + [RowWarning(loss) for loss in rendered.losses]


def ends_in_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that begins a thought."""
    return prompt.rstrip().endswith(tuple(_THOUGHT_MARKS))


def _find_open_beginnings(chat: ChatRequest, text: str) -> Iterator[RowWarning]:
    """Warn of a constraint that would begin inside a thought or a JSON text."""
    if chat.params.constraint is None:
        return
    content = chat.messages[-1].get("content") if chat.continues_final_message else ""
    parts = content if isinstance(content, list) else [{"text": content}]
    begun = "".join(str(part.get("text") or "") for part in parts)
    if not ends_in_thought(text) and any(
        begun.rfind(start) > begun.rfind(end) for start, end in _THOUGHT_MARKS.items()
    ):
        yield OPEN_THOUGHT
    if any(begun.count(start) > begun.count(end) for start, end in ("{}", "[]")):
        yield RowWarning(
            "continue_final_message goes on from an unfinished JSON text, and the "
            "constraint asks for a whole one after it. Leave the beginning out"
        )


def _find_unread_names(
    chat: ChatRequest, text: str, read: frozenset[str]
) -> Iterator[RowWarning]:
    """Warn of variables and keys of messages that a template does not read."""
    set_names = {
        name for name, value in chat.template_args.items() if value is not None
    }
    if unread := sorted(set_names - read):
        yield RowWarning(
            "the chat template does not read these variables, which have no effect",
            tuple(
                name + describe_guess(name, read)
                for name in map(cut_name, unread[: MAX_NAMES + 1])
            ),
        )
    contents = [each.get("content") for each in chat.messages]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    keys = (
        set().union(*(each.keys() for each in (*chat.messages, *parts))) - _USUAL_KEYS
    )
    if _REASONING_KEYS & keys and any(key in text for key in _REASONING_KEYS):
        keys -= _REASONING_KEYS
    if unread := sorted(key for key in keys if key not in text):
        yield RowWarning(
            "the chat template does not read these keys of messages, which have no effect",
            tuple(map(cut_name, unread[: MAX_NAMES + 1])),
        )
