"""How many tokens a text has at least: one far too long is refused before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

# Unicode's normal forms make a text at most so many times shorter, in bytes: 4 of full
# width or of mathematics, 3 of composition.
NORMAL_FORMS_SHRINK = 12
NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
# What these leave of a text is all of it; other normalizers and splitters may drop white space.
LOSSLESS_PARTS = frozenset(
    {"Sequence", "Prepend", "ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
)


@dataclass(slots=True, frozen=True)
class LongestToken:
    """The most that one token can stand for."""

    num_bytes: int
    # every byte of a text is in some token; otherwise letters and digits are
    is_exact: bool


def find_longest_token(
    backend: BackendTokenizer, added: Iterable[Any], *, has_all_bytes: bool
) -> LongestToken | None:
    """Return the longest token; None: a token may stand for a text of any length.

    Args:
        added: tokens that were added to the vocabulary, as transformers describes them.
        has_all_bytes: every byte has a token, so none stands for what is unknown.
    """
    if not has_all_bytes:
        return None
    # A byte-level piece has a sign for each byte, which UTF-8 writes in one or two.
    num_bytes = max(
        len(piece.encode()) for piece in backend.get_vocab(with_added_tokens=True)
    )
    parts = [*_list_parts(backend.normalizer), *_list_parts(backend.pre_tokenizer)]
    if any(
        part["type"] in NORMAL_FORMS or part["type"] not in LOSSLESS_PARTS
        for part in parts
    ):
        num_bytes *= NORMAL_FORMS_SHRINK
    takes_spaces = any(token.lstrip or token.rstrip for token in added)
    return LongestToken(
        num_bytes, is_exact=not takes_spaces and all(map(_is_lossless, parts))
    )


def count_least_tokens(text: str, longest: LongestToken | None) -> int:
    """Return a number of tokens that a text certainly has."""
    if longest is None:
        return 0
    length = len(text.encode()) if longest.is_exact else sum(map(str.isalnum, text))
    return -(-length // longest.num_bytes)


def _list_parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield what a normalizer or pre-tokenizer is made of."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [*part.get("normalizers", ()), *part.get("pretokenizers", ())]


def _is_lossless(part: dict[str, Any]) -> bool:
    """Tell whether all bytes of a text are left, in whatever form."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(
            part["content"].encode()
        )
    kept = LOSSLESS_PARTS | NORMAL_FORMS
    return part["type"] in kept and part.get("behavior") not in ("Removed", "removed")
