"""How the logprobs arrays spell a token: by its vocabulary piece, or by its text."""

from __future__ import annotations

from collections.abc import Iterable

from fminfer.text.tokenizer import Tokenizer

_PLAIN = {*range(0x20, 0x7F)} - {ord("\\")}  # shown as they are


class Spelling:
    """Spells tokens in one of two ways.

    Args:
        is_text: by the text, such as ` north`, and `bytes:\\xe2\\x80` where it is no whole
            character (as the OpenAI completions API does); else by the piece, such as `Ġnorth`.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_text: bool) -> None:
        self._tokenizer = tokenizer
        self._is_text = is_text
        self._bytes: dict[int, bytes] = {}

    def spell_token(self, token_id: int, *, is_first: bool = False) -> str:
        """Return a token's spelling.

        Args:
            is_first: it is the first of its sequence that is text. Tokenizers in sentencepiece's
                manner leave out the space that the first token begins with.
        """
        if not self._is_text:
            return self._tokenizer.piece_of_token(token_id)
        return _show_bytes(self.spell_bytes(token_id, is_first=is_first))

    def spell_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return what a token stands for, in UTF-8; it may be a piece of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._tokenizer.bytes_of_token(token_id)
        token = self._bytes[token_id]
        if is_first and token.startswith(b" "):
            decoded = self._tokenizer.decode([token_id]).encode()
            return decoded if decoded == token[1:] else token
        return token

    @property
    def has_words(self) -> bool:
        """Whether tokens have texts at all."""
        return self._tokenizer.has_words

    def find_first_text(self, ids: Iterable[int], *, skip_special_tokens: bool) -> int:
        """Return the place of the first id that is text, -1 if none is; behind a BOS it is 1."""
        special_ids = (
            self._tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        return next(
            (i for i, token_id in enumerate(ids) if token_id not in special_ids), -1
        )


def _show_bytes(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        shown = (chr(b) if b in _PLAIN else f"\\x{b:02x}" for b in token)
        return "bytes:" + "".join(shown)
