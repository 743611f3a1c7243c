"""Cuts a choice's text into its tokens, each with its logprob and what else could have come.

A token that is a part of a character is joined with its neighbours until the character is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fminfer.job.report.answer_fields import num_echoed
from fminfer.job.report.plain_text import show

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
        return [[show(n), round(p, 3), int(n == self.name)] for n, p in shown]


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
        listed = [token.to_list(num_others) for token in self.tokens if token.logprob is not None]
        return [show(self.text), total, listed, *([1] if self.is_given else [])]


def cut_choice(choice: dict[str, Any], prompt: Any, *, is_echo: bool) -> list[TextPiece]:
    """Return the pieces of a choice's text; an empty list if it has no logprobs."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return []
    if isinstance(entries := logprobs.get("content"), list):
        return list(_cut_by_bytes(entries))
    tokens = _tokens_of(logprobs)
    text, offsets = str(choice.get("text") or ""), logprobs.get("text_offset") or []
    if not tokens or len(offsets) != len(tokens):
        return []
    given = num_echoed(logprobs, prompt) if is_echo else 0
    if not text:  # of a run without a tokenizer: the names are all that there is
        return [TextPiece(f"{token.name} ", [token], i < given) for i, token in enumerate(tokens)]
    return list(_cut_by_offsets(text, tokens, offsets, given))


def _tokens_of(logprobs: dict[str, Any]) -> list[Token]:
    names, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
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
    for place, (token, first, end) in enumerate(zip(tokens, offsets, ends, strict=True)):
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
    raw, joined = b"", []
    for entry in entries:
        others = [(str(each["token"]), each["logprob"]) for each in entry.get("top_logprobs") or []]
        joined.append(Token(str(entry["token"]), entry["logprob"], others))
        found = entry.get("bytes")
        text = str(entry["token"])
        raw += bytes(found) if isinstance(found, list) else text.encode(errors="surrogatepass")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            is_begun = error.reason == "unexpected end of data"
            if is_begun and entry is not entries[-1]:
                continue
            text = raw.decode(errors="replace")
        yield TextPiece(text, joined)
        raw, joined = b"", []
