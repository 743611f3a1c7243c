"""Answers that engines of Python keep, and take in other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fminfer import Engine, UsageError

ROOT = Path(__file__).parents[2]
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "How do you go", "max_tokens": 5, "temperature": 0, "logprobs": 1},
    {"prompt": "from the den?", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "from the den?", "max_tokens": 4, "seed": 3},
]


def answer(folder: Path, **options: Any) -> tuple[list[Any], int]:
    """Return the choices of each request, and how many tokens were computed for them."""
    with Engine(dtype="float32", result_cache=str(folder), **options) as engine:
        records = sorted(engine.run(REQUESTS), key=lambda record: record.line.number)
        choices = [[choice.fields for choice in record.choices] for record in records]
        return choices, engine.stats.num_prompt_tokens


def test_a_second_engine_computes_nothing(tmp_path: Path) -> None:
    first, num_computed = answer(tmp_path / "kept")
    again, num_computed_again = answer(tmp_path / "kept")
    assert first == again and num_computed > 0
    assert num_computed_again == 0
    _, num_of_another = answer(tmp_path / "kept", kv_dtype="bfloat16")
    assert num_of_another > 0, "another way to compute has other answers"


def test_a_wrong_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; give a folder"):
        Engine(result_cache=str(tmp_path / "file"))
    with pytest.raises(UsageError, match="has no effect without"):
        Engine(result_cache_bytes=10**8)


def test_a_program_that_closes_nothing_keeps_its_answers(tmp_path: Path) -> None:
    """Evaluators close no engine: what was drawn in the last second was lost."""
    code = (
        "import sys, fminfer\n"
        "engine = fminfer.Engine(dtype='float32', result_cache=sys.argv[1])\n"
        "for record in engine.run([{'prompt': 'a', 'temperature': 0}] * 2):\n"
        "    record.text\n"
        "print(engine.stats.num_prompt_tokens)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kept")]
    computed = [
        int(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
        for _ in range(2)
    ]
    assert computed[0] > 0 and computed[1] == 0
