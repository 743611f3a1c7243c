"""How a sentencepiece model wants text prepared, told to the tokenizer that was made of it.

transformers builds its tokenizers from a `.model` file's pieces alone. What the file says about
spaces and normalization is lost on the way: a leading space, say, or which doubled spaces stay. It
knows no ids beyond comparing that both sides number the pieces alike.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as BackendTokenizer


def follow_model_file(backend: BackendTokenizer, folder: Path) -> None:
    """Make `backend` prepare text as the folder's sentencepiece model says.

    Does nothing where a tokenizer.json rules, where there is no such model, and where its pieces
    have other ids than the tokenizer's (families that shift them bring rules of their own).
    Each stretch of text between special tokens is prepared like a text of its own.
    """
    if (folder / "tokenizer.json").exists():
        return
    for file in sorted(folder.glob("*.model")):
        model = _read(file)
        if model is not None and all(
            backend.id_to_token(token_id) == piece.piece
            for token_id, piece in enumerate(model.pieces)
        ):
            backend.normalizer = _normalizer(model.normalizer_spec)
            # The model itself finds the words; a split before it could only do harm.
            backend.pre_tokenizer = None


def _read(file: Path) -> Any | None:
    """Return the model, or None: other things than sentencepiece's are called tokenizer.model."""
    # Imported only where a folder has such a file; neither has types.
    format_of: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    protobuf: Any = importlib.import_module("google.protobuf.message")
    model = format_of.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except protobuf.DecodeError:
        return None
    return model if model.pieces else None


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """Do what sentencepiece's normalizer.cc does, in its order."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    steps.append(normalizers.Replace(" ", "▁"))
    return normalizers.Sequence(steps)
