"""The rows that a report shows, as JSON: what was asked and answered, cut to fit."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import orjson

from fminfer.core.quantities import with_noun
from fminfer.job.report.answer_fields import (
    ODD_RECORD,
    AnswerFields,
    TextPiece,
    as_dict,
    cut_choice,
    find_drawn_text,
    find_logprobs,
    find_prompt,
)
from fminfer.job.report.label_tally import RowLabel
from fminfer.job.report.plain_text import dump_value, make_visible
from fminfer.job.report.scanning import Place, Reason

# Fields of a request that are not told as its parameters.
HIDDEN_FIELDS = frozenset(
    {"prompt", "messages", "suffix", "user", "metadata", "prompt_cache_key"}
)

MAX_SHOWN = 80  # characters
# Of them, those before the first that is not as in the most similar text.
MIN_SHARED = 12
MAX_SHARED = 60
# Where a preview begins best: with a line, else with a sentence, else with a word.
STARTS = (
    re.compile(r"\n\s*(?=\S)"),
    re.compile(r"[.?!]\s+(?=\S)"),
    re.compile(r"\s+(?=\S)"),
)


def make_previews(texts: Sequence[str]) -> list[str]:
    """Return a line for each text: its beginning, or what differs from all other texts."""
    shared = dict.fromkeys(texts, 0)
    for one, other in pairwise(sorted(shared)):  # the most similar ones are neighbours
        number = _count_shared(one, other)
        shared[one] = max(shared[one], number)
        shared[other] = max(shared[other], number)
    return [_make_preview(text, shared[text]) for text in texts]


def make_one_line(text: str, most: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 8 * most].split())  # spaces may follow spaces
    return line if len(line) <= most and len(text) <= 8 * most else f"{line[:most]}…"


def _make_preview(text: str, num_shared: int) -> str:
    first = num_shared - MAX_SHARED
    if first <= 0:
        return make_one_line(text, MAX_SHOWN)
    last = num_shared - MIN_SHARED
    # it looks at what follows
    matches = (each.search(text, first, last + 1) for each in STARTS)
    start = next((match.end() for match in matches if match), first)
    return "…" + make_one_line(text[start:], MAX_SHOWN)


def _count_shared(one: str, other: str) -> int:
    """Count the first characters that two texts share; slices are compared fast."""
    most = min(len(one), len(other))
    return bisect_left(
        range(1, most + 1), True, key=lambda end: one[:end] != other[:end]
    )


MAX_BYTES = 1_400_000  # of all rows
MAX_PARTS = 16  # prompts, messages or choices of one row
MAX_ANSWER = 200  # characters of an answer in the list of rows
MAX_ODDS = 10  # labels of a choice, with their probabilities


@dataclass(slots=True, frozen=True)
class Cut:
    """How much of a row is shown."""

    num_chars: int  # of each text
    num_tokens: int  # of each choice, with their probabilities
    num_others: int  # alternatives of a token


# From the most to the least: the first one with which all rows fit is taken.
CUTS = (
    Cut(20_000, 2_000, 10),
    Cut(8_000, 800, 6),
    Cut(4_000, 400, 5),
    Cut(2_000, 250, 4),
    Cut(1_200, 120, 3),
    Cut(600, 60, 3),
    Cut(300, 25, 2),
    Cut(120, 8, 1),
)
WHOLE = Cut(sys.maxsize, sys.maxsize, 0)


@dataclass(slots=True)
class ShownRow:
    """A row to show, with the request that its shape may not repeat."""

    place: Place
    reasons: set[Reason]
    answer: AnswerFields
    request: Any
    input_line: int | None = None  # its number in the input, if it is known
    label: RowLabel | None = None

    def to_dict(self, cut: Cut) -> dict[str, Any]:
        """Return the row for JSON."""
        answer = self.answer
        request = self.request
        fields = request if isinstance(request, dict) else {}
        custom_id = answer.fields.get("custom_id")
        shown: dict[str, Any] = {
            "file": self.place.file,
            "line": self.place.number,
            "input_line": self.input_line or answer.fields.get("line"),
            "why": sorted(self.reasons),
            "id": None if custom_id is None else make_visible(str(custom_id))[:200],
            "asked": []
            if _is_echo_alone(answer, fields)
            else _list_request_parts(request, cut),
            "params": [
                [make_visible(str(name))[:80], make_visible(dump_value(value))[:200]]
                for name, value in fields.items()
                if name not in HIDDEN_FIELDS and name != "tools"
            ],
            "tools": [
                _find_tool_name(each)
                for each in (fields.get("tools") or [])[:MAX_PARTS]
            ],
        }
        if answer.others:
            shown["others"] = cut_text(dump_value(answer.others), 400)
        if self.label is not None:
            shown["label"] = self.label.to_dict()
        if answer.error is not None:
            return shown | {
                "error": {
                    k: make_visible(str(v))[:2000] for k, v in answer.error.items()
                }
            }
        usage = answer.usage
        return shown | {
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get(
                "cached_tokens"
            ),
            "seconds": answer.times.get("batch_time"),
            "choices": [
                _show_choice(each, fields, cut) for each in answer.choices[:MAX_PARTS]
            ],
            "num_choices": len(answer.choices),
        }


def cut_text(text: str, num_chars: int) -> dict[str, Any]:
    """Return a text, or its beginning and its end with the number of characters between them."""
    if len(text) <= num_chars:
        return {"text": make_visible(text)}
    tail = num_chars // 3
    head = num_chars - tail
    return {
        "text": make_visible(text[:head]),
        "left_out": len(text) - num_chars,
        "tail": make_visible(text[len(text) - tail :]),
    }


def _is_echo_alone(answer: AnswerFields, request: dict[str, Any]) -> bool:
    """Tell whether each choice is its prompt and no more: the prompt is then shown once."""
    pairs = (
        (c.get("text"), find_prompt(request, c.get("index", 0))) for c in answer.choices
    )
    is_drawn = not answer.choices or answer.usage.get("completion_tokens") != 0
    return not is_drawn and all(text and text == prompt for text, prompt in pairs)


def _list_request_parts(request: Any, cut: Cut) -> list[dict[str, Any]]:
    """Return the messages or prompts of a request; what is no request is shown as it stands."""
    if not isinstance(request, dict):
        return (
            []
            if request is None
            else [{"who": "line", **cut_text(str(request), cut.num_chars)}]
        )
    messages = request.get("messages")
    if isinstance(messages, list) and "prompt" not in request:
        shown = [_show_message(each, cut) for each in messages[-MAX_PARTS:]]
        num_before = len(messages) - len(shown)
        return [{"who": "note", "text": f"{num_before:,} earlier messages"}] * (
            num_before > 0
        ) + shown
    if "prompt" not in request:
        return [{"who": "line", **cut_text(dump_value(request), cut.num_chars)}]
    prompt = request["prompt"]
    is_many = (
        isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    )
    prompts: Sequence[Any] = prompt if is_many else [prompt]
    shown = [
        {"who": "prompt", **_show_prompt(each, cut)} for each in prompts[:MAX_PARTS]
    ]
    num_more = len(prompts) - len(shown)
    return shown + [{"who": "note", "text": with_noun(num_more, "more prompt")}] * (
        num_more > 0
    )


def _show_prompt(prompt: Any, cut: Cut) -> dict[str, Any]:
    if isinstance(prompt, str):
        return cut_text(prompt, cut.num_chars)
    if isinstance(prompt, list):
        return {"is_ids": True, **cut_text(" ".join(map(str, prompt)), cut.num_chars)}
    return cut_text(dump_value(prompt), cut.num_chars)


def _show_message(message: Any, cut: Cut) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {"who": "?", **cut_text(dump_value(message), cut.num_chars)}
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            str(part.get("text", dump_value(part)))
            if isinstance(part, dict)
            else str(part)
            for part in content
        )
    shown = {
        "who": make_visible(str(message.get("role")))[:40],
        **cut_text("" if content is None else str(content), cut.num_chars),
    }
    calls = _list_calls(message.get("tool_calls"), cut)
    return shown | ({"calls": calls} if calls else {})


def _list_calls(calls: Any, cut: Cut) -> list[list[str]]:
    if not isinstance(calls, list):
        return []
    functions = [each.get("function") for each in calls if isinstance(each, dict)]
    shown = []
    for each in functions[:MAX_PARTS]:
        if isinstance(each, dict):
            arguments = each.get("arguments")
            text = arguments if isinstance(arguments, str) else dump_value(arguments)
            shown.append(
                [
                    make_visible(str(each.get("name")))[:200],
                    make_visible(text)[: cut.num_chars],
                ]
            )
    return shown


def _find_tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    return make_visible(
        str(function.get("name") if isinstance(function, dict) else tool)
    )[:80]


def _show_choice(
    choice: dict[str, Any], request: dict[str, Any], cut: Cut
) -> dict[str, Any]:
    """Return a choice's text: its tokens as far as they have logprobs, and the rest plainly."""
    message = choice.get("message")
    content = (
        message.get("content") if isinstance(message, dict) else choice.get("text")
    )
    text = "" if content is None else str(content)
    logprobs = find_logprobs(choice, request)
    shown: dict[str, Any] = {
        "reason": make_visible(str(choice.get("finish_reason")))[:40]
    }
    if logprobs:
        shown["logprobs"] = [round(sum(logprobs), 4), len(logprobs)]
    if odds := as_dict(choice.get("label_probabilities")):
        shown["odds"] = [
            [make_visible(label)[:200], value]
            for label, value in islice(odds.items(), MAX_ODDS)
        ]
        shown["mass"] = choice.get("label_mass")
    if choice.get("stop_reason") is not None:
        shown["stop"] = make_visible(dump_value(choice["stop_reason"]))[:100]
    calls = (
        _list_calls(message.get("tool_calls"), cut) if isinstance(message, dict) else []
    )
    pieces = cut_choice(choice, request)
    kept, rest = _fit_pieces(text, pieces[: cut.num_tokens], is_all=bool(calls))
    if kept:
        shown["pieces"] = [piece.to_list(cut.num_others) for piece in kept]
    if rest:
        shown |= cut_text(rest, cut.num_chars)
    if calls:
        shown["calls"] = calls
    if isinstance(ids := choice.get("token_ids"), list):
        shown["ids"] = cut_text(" ".join(map(str, ids)), cut.num_chars)
    return shown


def _fit_pieces(
    text: str, pieces: list[TextPiece], *, is_all: bool
) -> tuple[list[TextPiece], str]:
    """Return the pieces to show (`is_all`: all of them), and what of the text is behind them."""
    covered = "".join(piece.text for piece in pieces)
    if not pieces or is_all or not text:
        return pieces, "" if pieces else text
    if text.startswith(covered):
        return pieces, text[len(covered) :]
    if not covered.startswith(text):  # such as half a character at the end
        return [], text
    left = len(text)  # a stop string has cut the last token
    kept = []
    for piece in pieces:
        if left > 0:
            kept.append(replace(piece, text=piece.text[:left]))
        left -= len(piece.text)
    return kept, ""


def _make_starts(rows: Sequence[ShownRow]) -> list[tuple[str, str]]:
    """Return what the list shows of each row: a line of its prompt, and one of its answer."""
    texts = [_find_texts(row) for row in rows]
    prompts = make_previews([prompts for prompts, _ in texts])
    answers = [make_one_line(answer, MAX_ANSWER) for _, answer in texts]
    return [*zip(prompts, answers, strict=True)]


def _find_texts(row: ShownRow) -> tuple[str, str]:
    """Return the first prompt or the last message, and the first answer or the error's code."""
    try:
        parts = _list_request_parts(row.request, WHOLE)
        prompt = (
            parts[0 if parts[0]["who"] == "prompt" else -1]["text"] if parts else ""
        )
        if row.answer.error is not None:
            return prompt, make_visible(str(row.answer.error.get("code")))
        return prompt, make_visible(
            _find_shown_text(next(iter(row.answer.choices), {}), row.request)
        )
    except ODD_RECORD:
        return make_visible(dump_value(row.answer.fields)), ""


def _find_shown_text(choice: dict[str, Any], request: Any) -> str:
    """Return a choice's drawn text, and the calls of tools behind it."""
    message = choice.get("message")
    if isinstance(message, dict):
        calls = [
            "".join(call) for call in _list_calls(message.get("tool_calls"), WHOLE)
        ]
        return "".join([find_drawn_text(choice, request), *calls])
    return find_drawn_text(choice, request)


def _dump_row(row: ShownRow, cut: Cut, start: tuple[str, str]) -> bytes:
    try:
        return orjson.dumps(row.to_dict(cut) | {"start": start})
    except ODD_RECORD:  # edited by hand, or another program's: shown as it stands
        raw = dump_value(row.answer.fields)
        odd = replace(row, answer=AnswerFields(raw, [], {}, {}, None, {}), request=raw)
        return orjson.dumps(odd.to_dict(cut) | {"start": start})


def dump_rows(rows: Sequence[ShownRow]) -> tuple[bytes, Cut]:
    """Return all rows as JSON, and how they were cut so that it is short enough."""
    starts = _make_starts(rows)
    for cut in CUTS:
        dumped = []
        total = 0
        for row, start in zip(rows, starts, strict=True):
            dumped.append(_dump_row(row, cut, start))
            total += len(dumped[-1]) + 1
            if total > MAX_BYTES and cut is not CUTS[-1]:
                break
        else:
            return b"[" + b",".join(dumped) + b"]", cut
    raise AssertionError("the last cut is always taken")
