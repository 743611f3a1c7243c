"""Runs without a tokenizer: token ids in, token ids out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.errors import CheckpointError

ROW: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def bare_folder(llama_checkpoint: tuple[Path, Any], tmp_path_factory: Any) -> Path:
    """Give the folder of a model that came without a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama_checkpoint[0] / name, folder)
    return folder


def answers(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    engine = fminfer.Engine(str(folder), dtype="float32", kernels="off", **options)
    records = sorted(engine.run(rows), key=lambda record: record.line.number)
    engine.close()
    return [record.error or record.result for record in records]


def test_a_folder_without_a_tokenizer_says_so(bare_folder: Path) -> None:
    """It said "You need to have sentencepiece or tiktoken installed"."""
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer .*--skip-tokenizer-init"
    ) as told:
        fminfer.Engine(str(bare_folder))
    assert "installed" not in str(told.value)


def test_token_ids_are_answered_without_a_tokenizer(
    bare_folder: Path, llama_checkpoint: tuple[Path, Any]
) -> None:
    rows = [ROW, ROW | {"echo": True, "return_token_ids": True}]
    with_words = answers(
        llama_checkpoint[0], [row | {"return_token_ids": True} for row in rows]
    )
    without = answers(bare_folder, rows, skip_tokenizer_init=True)
    for with_text, bare in zip(with_words, without, strict=True):
        expected = with_text["choices"][0]
        choice = bare["choices"][0]
        assert choice["text"] == "" and set(choice["logprobs"]["text_offset"]) == {0}
        for name in ("token_ids", "prompt_token_ids", "finish_reason"):
            assert choice[name] == expected[name]
        ids = choice["token_ids"]
        listed = (
            ids if len(ids) == len(choice["logprobs"]["tokens"]) else [5, 6, 7, *ids]
        )
        assert choice["logprobs"]["tokens"] == [
            f"token_id:{token_id}" for token_id in listed
        ]
        values = [each["logprobs"]["token_logprobs"] for each in (choice, expected)]
        assert values[0] == values[1]


def test_text_is_refused_line_by_line(bare_folder: Path) -> None:
    rows = [
        ROW | {"prompt": "text"},
        ROW | {"stop": "x"},
        ROW | {"bad_words": ["x"]},
        ROW,
    ]
    found = answers(bare_folder, rows, skip_tokenizer_init=True)
    assert [getattr(each, "param", None) for each in found] == [
        "prompt",
        "stop",
        "bad_words",
        None,
    ]
    assert all(each.code == "unsupported_parameter" for each in found[:3])
    assert "--skip-tokenizer-init" in str(found[0]) and "stop_token_ids" in str(
        found[1]
    )
