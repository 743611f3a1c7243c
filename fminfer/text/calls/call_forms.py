"""The forms in which models write tool calls: how each is told, and read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fminfer.core.config import KnownParser
from fminfer.text.calls.call_cursor import ANYTHING, CallCursor, Reading
from fminfer.text.calls.harmony_calls import read_harmony
from fminfer.text.calls.json_calls import (
    read_list,
    read_llama3_call,
    read_tagged_call,
)
from fminfer.text.calls.named_calls import read_deepseek_calls, read_mistral_calls
from fminfer.text.calls.python_calls import read_python_call
from fminfer.text.calls.xml_calls import GLM45, MINIMAX_M2, QWEN3_CODER


@dataclass(slots=True, frozen=True)
class MarkedCalls:
    """Reads calls behind opening tags, anywhere in the text."""

    openings: tuple[str, ...]
    read_calls: Callable[[CallCursor], Reading[object]]

    def __call__(self, cursor: CallCursor) -> Reading[None]:
        """Read the text."""
        starts = re.escape("".join({opening[0] for opening in self.openings}))
        content = re.compile(f"[^{starts}]*")
        while True:
            yield from cursor.read_pattern(content, cursor.add_content)
            if (yield from cursor.hold_tag(*self.openings)):
                yield from cursor.hold_pattern()
                yield from self.read_calls(cursor)
            cursor.return_held()


@dataclass(slots=True, frozen=True)
class LeadingCalls:
    """Reads calls at the beginning of a text, maybe behind an opening tag.

    From the first text that is no call on, all is content.
    """

    opening: str
    read_calls: Callable[[CallCursor], Reading[bool]]

    def __call__(self, cursor: CallCursor) -> Reading[None]:
        """Read the text."""
        may_go_on = True
        while may_go_on:
            yield from cursor.hold_pattern()
            if (yield from cursor.peek_character()) == self.opening[0]:
                may_go_on = bool((yield from cursor.hold_tag(self.opening)))
            else:
                may_go_on = yield from self.read_calls(cursor)
        cursor.return_held()
        yield from cursor.read_pattern(ANYTHING, cursor.add_content)


@dataclass(slots=True, frozen=True)
class CallForm:
    """A form of calls.

    A template has this form if it has all texts of one of the `signs`, and no form before
    it in the table fits.
    """

    name: KnownParser
    signs: tuple[tuple[str, ...], ...]
    # What the answer's text must show, even where it is a special token.
    markers: tuple[str, ...]
    read: Callable[[CallCursor], Reading[None]]
    # The arguments have no types, so that the tools' schemas must say them.
    needs_tools: bool = False


FORMS = (
    CallForm(
        "openai",
        (("<|channel|>commentary",),),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
        read_harmony,
    ),
    CallForm(
        "deepseek_v3",
        (("<｜tool▁calls▁begin｜>",),),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        MarkedCalls(("<｜tool▁calls▁begin｜>",), read_deepseek_calls),
    ),
    CallForm(
        "minimax_m2",
        (("<minimax:tool_call>",),),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        MarkedCalls(("<minimax:tool_call>",), MINIMAX_M2),
        needs_tools=True,
    ),
    CallForm(
        "mistral",
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        MarkedCalls(("[TOOL_CALLS]",), read_mistral_calls),
    ),
    CallForm(
        "glm45",
        (("<tool_call>", "<arg_key>"),),
        (
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        MarkedCalls(("<tool_call>",), GLM45),
        needs_tools=True,
    ),
    CallForm(
        "qwen3_coder",
        (("<tool_call>", "<function="),),
        ("<tool_call>", "</tool_call>"),
        MarkedCalls(("<tool_call>",), QWEN3_CODER),
        needs_tools=True,
    ),
    CallForm(
        "phi4_mini_json",
        (("<|/tool|>",), ("functools[",), ("<|/tool_call|>",)),
        ("<|tool_call|>", "<|/tool_call|>"),
        MarkedCalls(
            ("<|tool_call|>", "functools"), partial(read_list, closing="<|/tool_call|>")
        ),
    ),
    CallForm(
        "granite",
        (("<|tool_call|>",),),
        ("<|tool_call|>", "<tool_call>"),
        MarkedCalls(("<|tool_call|>", "<tool_call>"), read_list),
    ),
    CallForm(
        "hermes",
        (("<tool_call>",),),
        ("<tool_call>", "</tool_call>"),
        MarkedCalls(
            ("<tool_call>",), partial(read_tagged_call, closing="</tool_call>")
        ),
    ),
    CallForm(
        "pythonic",
        ((" [func_name1(",),),
        ("<|python_start|>", "<|python_end|>"),
        LeadingCalls(
            "<|python_start|>",
            partial(read_list, closing="<|python_end|>", read_call=read_python_call),
        ),
    ),
    CallForm(
        "llama3_json",
        (
            ("<|python_tag|>",),
            (
                '{"name": function name, '
                '"parameters": dictionary of argument name and its value}',
            ),
        ),
        ("<|python_tag|>",),
        LeadingCalls("<|python_tag|>", read_llama3_call),
    ),
)
# Texts of forms that nothing here reads. Their templates may quote a form that is read.
OTHER_SIGNS = (
    "<seed:tool_call>",
    "<tool_calls>",
    "<function_calls>",
    "<|tool_call_start|>",
    "<|tools_prefix|>",
    "<|START_ACTION|>",
    "<TOOLCALL>",
    "<｜DSML｜",
)


def find_form(name: KnownParser) -> CallForm:
    """Return the form of a name."""
    return next(form for form in FORMS if form.name == name)


def find_parser(template: str) -> KnownParser | None:
    """Tell by a chat template how its model writes tool calls; None is no known form."""
    if any(sign in template for sign in OTHER_SIGNS):
        return None
    for form in FORMS:
        if any(all(text in template for text in texts) for texts in form.signs):
            return form.name
    return None
