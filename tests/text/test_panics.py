"""Panics of tokenizers' Rust, which are no `Exception`, cost the line of their text."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import CheckpointError, RequestError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.tokenizer import Tokenizer

REPLACES_WORDS = {
    "type": "Replace",
    "pattern": {"Regex": "(?=panic)"},
    "content": "aaaa",
}


def make_folder(folder: Path, **parts: Any) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def test_a_text_that_panics_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    """`tokenizers` panics where a normalizer replaces nothing by something, and a run ended."""
    tokenizer = Tokenizer.load(
        make_folder(tmp_path / "model", normalizer=REPLACES_WORDS)
    )
    for with_offsets in (False, True):
        with pytest.raises(RequestError, match="tokenizer fails at this text: "):
            tokenizer.encode("panic", with_offsets=with_offsets)
    with pytest.raises(RequestError, match="tokenizer fails at this text"):
        tokenizer.spell_words(("panic",))


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


def replaces(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


SEQUENCES = {
    "normalizer": {"type": "Sequence", "normalizers": [replaces("q", "qq")] * 30},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}] * 20,
    },
    "decoder": {"type": "Sequence", "decoders": [replaces("n", "nn")] * 30},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
        "pair": [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"],
        "special_tokens": {},
    },
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_tokenizer_that_multiplies_texts_is_refused(
    tmp_path: Path, name: str
) -> None:
    """A request of one letter took gigabytes, and the run with it."""
    folder = make_folder(tmp_path / "model", **{name: SEQUENCES[name]})
    with pytest.raises(
        CheckpointError, match=rf"its {name} may make a text .* times as long"
    ):
        Tokenizer.load(folder)


def test_a_tokenizer_that_writes_three_for_one_is_read(tmp_path: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        replaces(" ", "\u2581"),
        replaces("``", '"'),
    ]
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    normalizer = {"type": "Sequence", "normalizers": [*steps, {"type": "NFKC"}]}
    assert (
        Tokenizer.load(make_folder(tmp_path / "model", normalizer=normalizer))
        .encode("a")
        .ids
    )
