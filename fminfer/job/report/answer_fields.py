"""Reads an output's record, of any shape: its fields, logprobs, and pieces of its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fminfer.contract.record import parse_record
from fminfer.contract.responses import convert_result
from fminfer.job.report.plain_text import make_visible

# What a record raises that has the names of a record, and other values.
ODD_RECORD = (TypeError, ValueError, LookupError, AttributeError, OverflowError)
RESERVED = frozenset({"request", "result", "line", "custom_id", "error", "retryable"})


@dataclass(slots=True)
class AnswerFields:
    """One record. What its shape does not hold is None or empty."""

    request: Any  # as it stands there; None: a Batch record has none
    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    times: dict[str, float]
    error: dict[str, Any] | None
    fields: dict[str, Any]  # the whole record

    @property
    def is_batch(self) -> bool:
        return "response" in self.fields

    @property
    def others(self) -> dict[str, Any]:
        """The further keys of a wrapped line."""
        if self.is_batch:
            return {}
        return {
            name: value for name, value in self.fields.items() if name not in RESERVED
        }

    @property
    def columns(self) -> dict[str, Any]:
        """The further keys of a wrapped line, and the cells of a table's row."""
        others = self.others
        return {**others, **as_dict(others.get("row"))}


def read_answer(raw: bytes) -> AnswerFields | None:
    """Read a record of an output or of an errors file; None: it is none."""
    try:
        fields = parse_record(raw)
    except (ValueError, RecursionError):
        return None
    if "response" in fields:
        result = as_dict(fields["response"]).get("body")
        error = as_dict(result).get("error")
        result = None if isinstance(error, dict) else result
    elif "request" in fields:
        result = fields.get("result")
        error = fields.get("error")
    else:
        return None
    request = fields.get("request")
    if not isinstance(result, dict):
        is_error = isinstance(error, dict)
        return AnswerFields(request, [], {}, {}, error, fields) if is_error else None
    try:
        result = convert_result(result)
    except ODD_RECORD:
        return None
    # One that is made of vectors has no choices.
    is_of_vectors = isinstance(result.get("data", result.get("results")), list)
    choices = result.get("choices", [] if is_of_vectors else None)
    if not isinstance(choices, list) or not all(
        isinstance(each, dict) for each in choices
    ):
        return None
    times = as_dict(result.get("request_time"))
    times = {
        name: value for name, value in times.items() if type(value) in (float, int)
    }
    return AnswerFields(
        request, choices, as_dict(result.get("usage")), times, None, fields
    )


def as_dict(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one in the place of anything else."""
    return value if isinstance(value, dict) else {}


def find_logprobs(choice: dict[str, Any], request: Any) -> list[float]:
    """Return the logprobs of drawn tokens, or of an echoed prompt that drew none."""
    logprobs = as_dict(choice.get("logprobs"))
    if isinstance(entries := logprobs.get("content"), list):
        return [entry["logprob"] for entry in entries]
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list):
        return []
    values = values[_count_echoed(choice, request) :] or values
    return [value for value in values if value is not None]


def _count_echoed(choice: dict[str, Any], request: Any) -> int:
    """Return how many tokens of an echoed prompt stand before the drawn ones."""
    if not isinstance(request, dict) or not request.get("echo"):
        return 0
    prompt = find_prompt(request, choice.get("index", 0))
    if isinstance(prompt, list):
        return len(prompt)
    if not isinstance(prompt, str):
        return 0
    if not prompt:  # one token stands for an empty prompt
        return 1
    return sum(
        offset < len(prompt) for offset in choice["logprobs"].get("text_offset") or []
    )


def find_prompt(request: Any, index: int) -> Any:
    """Return the prompt that the choice of this index goes on with; None: it is not known."""
    if not isinstance(request, dict):
        return None
    prompt = request.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    n = request.get("n") or 1
    place = index // int(n) if isinstance(n, int | float) else 0
    return prompt[place] if place < len(prompt) else None


def find_drawn_text(choice: dict[str, Any], request: Any) -> str:
    """Return a choice's text; under echo what follows the prompt."""
    message = choice.get("message")
    if isinstance(message, dict):
        return str(message.get("content") or "")
    text = str(choice.get("text") or "")
    if not isinstance(request, dict) or not request.get("echo"):
        return text
    prompt = find_prompt(request, choice.get("index", 0))
    if not isinstance(prompt, str):  # ids, whose text the tokens tell
        pieces = cut_choice(choice, request)
        prompt = "".join(piece.text for piece in pieces if piece.is_given)
    return text.removeprefix(prompt)


Alternative = tuple[str, float]
# How vocabularies spell a space, a newline and a tab.
SPELLED = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


@dataclass(slots=True, frozen=True)
class Token:
    """One token as a record tells of it."""

    name: str
    logprob: float | None
    others: list[Alternative]  # the likeliest ones, the best first

    def to_list(self, num_others: int) -> list[list[Any]]:
        """Return spelling, logprob and whether it is the chosen one, for each alternative."""
        shown = self.others[:num_others]
        if self.logprob is not None and all(name != self.name for name, _ in shown):
            shown = [*shown, (self.name, self.logprob)]
        return [[make_visible(n), round(p, 3), int(n == self.name)] for n, p in shown]


@dataclass(slots=True, frozen=True)
class TextPiece:
    """Tokens that together have whole characters."""

    text: str
    tokens: list[Token]
    is_given: bool = False  # of an echoed prompt

    def to_list(self, num_others: int) -> list[Any]:
        """Return text, logprob, alternatives token by token, and whether it was given."""
        known = [token.logprob for token in self.tokens if token.logprob is not None]
        total = round(sum(known), 3) if known else None
        listed = [
            token.to_list(num_others)
            for token in self.tokens
            if token.logprob is not None
        ]
        return [make_visible(self.text), total, listed, *([1] if self.is_given else [])]


def cut_choice(choice: dict[str, Any], request: Any) -> list[TextPiece]:
    """Return the pieces of a choice's text; an empty list if it has no logprobs."""
    logprobs = as_dict(choice.get("logprobs"))
    if isinstance(entries := logprobs.get("content"), list):
        return list(_cut_by_bytes(entries))
    tokens = _make_tokens(logprobs)
    text = str(choice.get("text") or "")
    offsets = logprobs.get("text_offset") or []
    if not tokens or len(offsets) != len(tokens):
        return []
    num_given = _count_echoed(choice, request)
    if not text:  # of a run without a tokenizer: the names are all that there is
        return [
            TextPiece(f"{token.name} ", [token], i < num_given)
            for i, token in enumerate(tokens)
        ]
    return list(_cut_by_offsets(text, tokens, offsets, num_given))


def _make_tokens(logprobs: dict[str, Any]) -> list[Token]:
    names = logprobs.get("tokens") or []
    values = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(names)
    return [
        Token(
            str(name).translate(SPELLED),
            value,
            [(str(other).translate(SPELLED), p) for other, p in (top or {}).items()],
        )
        for name, value, top in zip(names, values, tops, strict=False)
    ]


def _cut_by_offsets(
    text: str, tokens: list[Token], offsets: list[int], num_given: int
) -> Iterator[TextPiece]:
    """Cut by the offset of each token, in characters from the prompt's start."""
    base = 0 if num_given else offsets[0]
    ends = [*offsets[1:], base + len(text)]
    joined: list[Token] = []
    for place, (token, first, end) in enumerate(
        zip(tokens, offsets, ends, strict=True)
    ):
        joined.append(token)
        piece = text[first - base : end - base]
        is_last_given = place == num_given - 1
        if piece or is_last_given:
            yield TextPiece(piece, joined, place < num_given)
            joined = []
    if joined:  # tokens without text, such as the one that ends
        yield TextPiece("", joined)


def _cut_by_bytes(entries: list[dict[str, Any]]) -> Iterator[TextPiece]:
    """Cut by the bytes of each entry of a chat's logprobs."""
    raw = b""
    joined = []
    for entry in entries:
        others = [
            (str(each["token"]), each["logprob"])
            for each in entry.get("top_logprobs") or []
        ]
        text = str(entry["token"])
        joined.append(Token(text, entry["logprob"], others))
        token_bytes = entry.get("bytes")
        raw += (
            bytes(token_bytes)
            if isinstance(token_bytes, list)
            else text.encode(errors="surrogatepass")
        )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            is_begun = error.reason == "unexpected end of data"
            if is_begun and entry is not entries[-1]:
                continue
            text = raw.decode(errors="replace")
        yield TextPiece(text, joined)
        raw = b""
        joined = []
