"""Stands for the tokenizer of a run without one: ids have names and no text."""

from __future__ import annotations

from collections.abc import Iterable

from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Spells id 5 as `token_id:5`, as vLLM does; texts are empty."""

    has_words = False

    def __init__(self) -> None:
        super().__init__(None)

    def encode(
        self, text: str, *, with_offsets: bool = False, add_special_tokens: bool = True
    ) -> EncodedPrompt:
        raise AssertionError("text was to be tokenized without a tokenizer")

    def piece(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self.piece(token_id).encode()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        return False
