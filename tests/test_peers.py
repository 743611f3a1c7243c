"""The benchmark beside peers: which sides there are, and those that cannot answer are left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts, not a package: they find each other like this

import peers  # noqa: E402


def test_sides_are_found_by_their_environments(tmp_path: Path) -> None:
    python = tmp_path / "llama.cpp/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    found = peers.find_sides(tmp_path, ())
    assert list(found) == ["fminfer", "transformers", "llama.cpp"]
    assert found["llama.cpp"] == str(python)
    assert peers.find_sides(tmp_path, ("llama.cpp",)) == {"llama.cpp": str(python)}


def test_every_side_has_a_colour() -> None:
    assert {"fminfer", "transformers", "vllm", *peers.CONVERTERS} <= set(peers.COLOURS)


def test_a_side_that_cannot_score_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = {"llama.cpp": str(tmp_path), "rows": [{"prompt": [1, 2, 3], "max_tokens": 0}]}
    assert peers.measure("b", {"llama.cpp": sys.executable}, job, tmp_path, repeats=2) == {}
    assert capfd.readouterr().err.count("gives no logprobs of prompts") == 1


def test_a_side_that_cannot_convert_is_told(tmp_path: Path) -> None:
    converter = tmp_path / "peers/ctranslate2/bin/python"
    converter.parent.mkdir(parents=True)
    converter.write_text("#!/bin/sh\nexit 1\n")
    converter.chmod(0o755)
    (tmp_path / "model").mkdir()
    how = ("ctranslate2", tmp_path / "peers", tmp_path / "model", "float32")
    assert peers.convert(*how) is None
    converter.write_text("#!/bin/sh\nexit 0\n")
    assert peers.convert(*how) is not None
    converter.unlink()
    assert peers.convert(*how) is not None  # once is enough
