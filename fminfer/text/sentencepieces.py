"""How a sentencepiece model wants text prepared, told to the tokenizer that was made of it.

transformers makes a tokenizer of a `.model` file's pieces alone, and loses what the file says of
spaces and normalization.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as BackendTokenizer


def follow_model_file(backend: BackendTokenizer, folder: Path) -> None:
    """Make `backend` prepare text as the folder's sentencepiece model says.

    Nothing is done where the model's pieces have other ids than the tokenizer's: families that
    shift them bring rules of their own.
    """
    for file in sorted(folder.glob("*.model")):
        model = _read_model(file)
        if model is not None and all(
            backend.id_to_token(token_id) == piece.piece
            for token_id, piece in enumerate(model.pieces)
        ):
            backend.normalizer = _make_normalizer(model.normalizer_spec)
            # The model itself finds the words; a split before it could only do harm.
            backend.pre_tokenizer = None


def _read_model(file: Path) -> Any | None:
    """Return a sentencepiece model; None: the file is something else of that name."""
    # Imported only where a folder has such a file; neither has types.
    model_format: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    protobuf: Any = importlib.import_module("google.protobuf.message")
    model = model_format.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except protobuf.DecodeError:
        return None
    return model if model.pieces else None


def _make_normalizer(spec: Any) -> normalizers.Normalizer:
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
