"""The vocabulary in the header of a GGUF file: pieces, their types, scores and special ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fminfer.core.errors import CheckpointError

Metadata = Mapping[str, object]
Json = dict[str, object]
OWN = "tokenizer.ggml."  # what the keys of a tokenizer begin with
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
# Ids of special tokens that files of a kind may leave out, as llama.cpp has them.
_USUAL_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
# Stands for rows of the head that no token has. Older converters gave it the type of added tokens.
_PADDING = re.compile(r"\[PAD\d+\]")
# Tokens of Phi-3 behind which spaces stay; a GGUF file does not say that others swallow them.
_KEPT_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(slots=True, frozen=True)
class StoredVocabulary:
    """The pieces of a vocabulary in the order of their ids, and all else of its tokenizer."""

    metadata: Metadata
    pieces: list[str | None]  # None: the id has no spelling
    types: list[int]
    scores: list[float]

    @classmethod
    def read(cls, metadata: Metadata) -> StoredVocabulary:
        """Read the vocabulary of a header, which may be broken or empty."""
        tokens, types, scores = (
            list(found) if isinstance(found := metadata.get(f"{OWN}{key}"), list) else []
            for key in ("tokens", "token_type", "scores")
        )
        pieces = [each if isinstance(each, str) else None for each in tokens]
        types = types or [NORMAL] * len(pieces)
        scores = scores or [0.0] * len(pieces)
        for token_id, (piece, kind) in enumerate(zip(pieces, types, strict=False)):
            if piece and kind in (UNUSED, USER_DEFINED) and _PADDING.fullmatch(piece):
                pieces[token_id] = None
        return cls(metadata, pieces, types, scores)

    def refuse_broken(self) -> None:
        """Refuse a vocabulary that has no piece, or fewer types or scores than pieces."""
        num = len(self.pieces)
        if not num or min(len(self.types), len(self.scores)) < num:
            raise CheckpointError(
                f"the GGUF file has {num} tokens, {len(self.types)} types and {len(self.scores)} "
                "scores of tokens: it is broken; fetch it again, or name a tokenizer by --tokenizer"
            )

    def find(self, key: str, default: Any = None) -> Any:
        """Return what the file says of its tokenizer."""
        return self.metadata.get(f"{OWN}{key}", default)

    @property
    def kind(self) -> str:
        """What llama.cpp calls it: "gpt2" is of bytes, "llama" and "t5" are of sentencepiece."""
        return str(self.find("model"))

    @property
    def ids(self) -> dict[str, int]:
        """The id of each spelling."""
        return {piece: i for i, piece in enumerate(self.pieces) if piece is not None}

    @property
    def has_bytes(self) -> bool:
        """Whether text without a piece becomes pieces of bytes."""
        return BYTE in self.types

    @property
    def leads_with_space(self) -> bool:
        """Whether a text gets a space before it."""
        return bool(self.find("add_space_prefix", self.kind == "llama"))

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token, such as "bos"; None: there is none."""
        found = self.find(f"{name}_token_id", _USUAL_IDS.get(self.kind, {}).get(name))
        is_one = isinstance(found, int) and 0 <= found < len(self.pieces)
        return found if is_one and self.pieces[found] is not None else None

    def special(self, name: str) -> str | None:
        """Return a special token; None: there is none."""
        token_id = self.special_id(name)
        return None if token_id is None else self.pieces[token_id]

    def added_tokens(self) -> list[Json]:
        """Return the `added_tokens` of tokenizer.json: what is found in a text before all else."""
        arch = self.metadata.get("general.architecture")
        swallows_spaces = self.kind == "llama" and arch == "phi3"
        return [
            {
                "id": token_id,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": swallows_spaces and piece not in _KEPT_SPACES,
                "normalized": False,
                "special": self.types[token_id] != USER_DEFINED,
            }
            for token_id, piece in enumerate(self.pieces)
            if piece and self.types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
