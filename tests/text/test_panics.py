"""Panics of tokenizers' Rust, which are no `Exception`, cost the line of their text."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import RequestError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.tokenizer import Tokenizer

REPLACES_WORDS = {"type": "Replace", "pattern": {"Regex": "(?=panic)"}, "content": "aaaa"}


def make_folder(folder: Path, **parts: Any) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def test_a_text_that_panics_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    """`tokenizers` panics where a normalizer replaces nothing by something, and a run ended."""
    tokenizer = Tokenizer.load(make_folder(tmp_path / "model", normalizer=REPLACES_WORDS))
    for with_offsets in (False, True):
        with pytest.raises(RequestError, match="tokenizer fails at this text: "):
            tokenizer.encode("panic", with_offsets=with_offsets)
    with pytest.raises(RequestError, match="tokenizer fails at this text"):
        tokenizer.spell_all(("panic",))


def test_lines_before_and_after_are_answered(tmp_path: Path) -> None:
    """Also where an answer's text is what panics: the engine decodes it between steps."""
    decoder = {"type": "Strip", "content": "~", "start": 0, "stop": 9}
    folder = make_folder(tmp_path / "model", normalizer=REPLACES_WORDS, decoder=decoder)
    token_id = Tokenizer.load(folder).encode("~").ids[0]
    requests: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "panic"},
        {"prompt": "hello", "allowed_token_ids": [token_id]},
        {"prompt": "north", "logprobs": 1},
    ]
    with closing(fminfer.Engine(model_name=str(folder))) as engine:
        records = list(engine.run(each | {"max_tokens": 3} for each in requests))
    records.sort(key=lambda record: record.line.number)
    errors = [record.error for record in records]
    assert [error is not None for error in errors] == [False, True, True, False]
    assert all("tokenizer fails" in str(error) for error in errors[1:3])
