"""How the logprobs arrays spell a token: by its vocabulary piece, or by the text it stands for.

It knows one token at a time; whole texts are the detokenizer's.
"""

from __future__ import annotations

from collections.abc import Iterable

from fminfer.text.tokenizer import Tokenizer

_PLAIN = range(0x20, 0x7F)


class Spelling:
    """Spells tokens in one of two ways.

    Args:
        is_text: by the text, such as ` north`, and `bytes:\\xe2\\x80` where it is no whole
            character (as the OpenAI completions API does); else by the piece, such as `Ġnorth`.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_text: bool) -> None:
        self._tokenizer = tokenizer
        self._is_text = is_text
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def spell(self, token_id: int, *, is_first: bool = False) -> str:
        """Return a token's spelling.

        Args:
            is_first: it is the first of its sequence that is text. Tokenizers in sentencepiece's
                manner leave out the space that the first token begins with.
        """
        if not self._is_text:
            return self._tokenizer.piece(token_id)
        if token_id not in self._texts:
            self._texts[token_id] = _show(self._tokenizer.token_bytes(token_id))
        text = self._texts[token_id]
        if is_first and text.startswith(" ") and self._tokenizer.decode([token_id]) == text[1:]:
            return text[1:]
        return text

    def spell_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return what a token stands for, in UTF-8; it may be a piece of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._tokenizer.token_bytes(token_id)
        found = self._bytes[token_id]
        if is_first and found.startswith(b" "):
            shown = self._tokenizer.decode([token_id]).encode()
            return shown if shown == found[1:] else found
        return found

    @property
    def has_words(self) -> bool:
        """Whether tokens have texts at all."""
        return self._tokenizer.has_words

    def find_first(self, ids: Iterable[int], *, skip_special_tokens: bool) -> int:
        """Return the place of the first id that is text, -1 if none is; behind a BOS it is 1."""
        special_ids = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return next((i for i, token_id in enumerate(ids) if token_id not in special_ids), -1)


def _show(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        plain = (b in _PLAIN and b != ord("\\") for b in token)
        shown = (
            chr(b) if is_plain else f"\\x{b:02x}" for b, is_plain in zip(token, plain, strict=True)
        )
        return "bytes:" + "".join(shown)
