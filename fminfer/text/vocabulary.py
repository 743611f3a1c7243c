"""The bytes of a model's tokens, for grammars."""

from __future__ import annotations

from fminfer.core.errors import RequestError
from fminfer.text.tokenizer import Tokenizer

# Its tokens, those for what is unknown left out, must be the bytes of what they say.
PROBE = '{"a": [1, "b c"], "é": "x\\n-2.5"}'


class Vocabulary:
    """The bytes of a model's tokens, as llguidance's `TokenizerWrapper` takes them.

    Raises:
        RequestError: texts are not their tokens' bytes, one after another.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not tokenizer.has_words or not eos_ids:
            lacks = "EOS, which ends such answers" if tokenizer.has_words else "tokenizer"
            raise RequestError(
                "unsupported_parameter",
                f"the answer is constrained, and this run has no {lacks}; ask without a constraint",
            )
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids | eos_ids)
        self.tokens = [
            tokenizer.token_bytes(token_id)
            if tokenizer.has_text(token_id, skip_special_tokens=False)
            else b""
            for token_id in range(vocab_size)
        ]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids))
        usable = {*self._ids.values()}
        ids = [each for each in tokenizer.encode(PROBE).ids if each in usable]
        text = tokenizer.decode(ids).lstrip(" ")  # some put a space before a text, and take it off
        if b"".join(self.tokens[each] for each in ids).lstrip(b" ") != text.encode():
            raise RequestError(
                "unsupported_parameter",
                "the answer is constrained, and the texts of this model's tokenizer are not its "
                "tokens' bytes, as in WordPiece; ask without a constraint",
            )

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens that a model would write for a text in the middle of another."""
        data = text if isinstance(text, bytes) else text.encode()
        for before in ("", "="):  # some tokenizers put a space before a text
            ids = self._tokenizer.encode(before + data.decode(), add_special_tokens=False).ids
            ids = ids[len(before) :]
            if self._spells(ids, data):
                return ids
        return self._cut(data)

    def _spells(self, ids: list[int], data: bytes) -> bool:
        """Tell whether ids spell a text."""
        if any(token_id >= len(self.tokens) for token_id in ids):
            return False
        return b"".join(self.tokens[token_id] for token_id in ids) == data

    def _cut(self, data: bytes) -> list[int]:
        """Take the longest token each time, as far as there are tokens."""
        ids: list[int] = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids
