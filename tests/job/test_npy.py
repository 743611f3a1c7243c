"""Vectors as one .npy file: row i is line i of the input, whatever happens on the way."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from tests.conftest import IS_ALL
from tests.forked import Forked
from tests.vector_models import mean_vectors, save_bert

SIZE = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, *save_bert(folder)


def command(model: Path, source: Path, output: Path, *flags: str) -> list[str]:
    given = [
        "run",
        source,
        "--model-name",
        model,
        "--output",
        output,
        "--dtype",
        "float32",
    ]
    return [*map(str, given), "--embeddings", "npy", *flags]


def run(model: Path, source: Path, output: Path, *flags: str, status: int = 0) -> str:
    return run_as(command(model, source, output, *flags), status)


def run_as(given: list[str], status: int = 0) -> str:
    found = CliRunner().invoke(main, given)
    assert found.exit_code == status, found.output
    return found.stderr


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join(f"{json.dumps(line)}\n" if line else "\n" for line in lines)
    )
    return path


def test_rows_are_lines(model: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Wrong lines and blank ones have rows of nan; several inputs on a line are refused."""
    folder, own, hf = model
    lines: list[object] = [
        {"input": "w1 w2"},
        {"input": ["w1", "w2"]},
        None,
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"input": "w3"},
        },
        {"request": {"input": "w1 w2"}, "id": 5},
        {"prompt": "w1"},
        {"input": [2, 9, 3], "encoding_format": "base64"},
        {"query": "w1", "documents": ["w2"]},
    ]
    source = write(tmp_path / "a.jsonl", *lines)
    output = tmp_path / "out.jsonl"
    told = run(folder, source, output, status=3)
    vectors = np.load(tmp_path / "out.npy")
    assert vectors.shape == (8, SIZE) and vectors.dtype == np.float32
    expected = mean_vectors(own, hf, ["w1 w2", "w3", "w1 w2"])
    np.testing.assert_allclose(vectors[[0, 3, 4]], expected, atol=1e-4)
    assert np.isnan(vectors[[1, 2, 5, 7]]).all() and np.isfinite(vectors[6]).all()
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 4 and records[1]["custom_id"] == "a"
    assert records[0]["result"]["data"] == [
        {"object": "embedding", "index": 0, "embedding": None}
    ]
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").open()]
    assert [error["line"] for error in errors] == [2, 6, 8]
    assert "each line asks for one embedding of 32" in errors[0]["error"]["message"]
    assert "rows/s" in told and "generated" not in told and "out.npy" in told
    run(folder, source, output, status=3)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), vectors)


def test_fewer_dimensions_and_more_lines_later(
    model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """What is complete is gone on with: its vectors are read from the file."""
    folder, own, hf = model
    texts = [f"w{number} w5" for number in range(30)]
    source = write(tmp_path / "a.jsonl", *({"input": text} for text in texts))
    output = tmp_path / "o.jsonl"
    flags = ("--dimensions", "8", "--overwrite-request-args")
    run(folder, source, output, *flags, "--limit", "10")
    first = np.load(tmp_path / "o.npy")
    assert first.shape == (10, 8)
    told = run(folder, source, output, *flags)
    assert "10 kept from earlier runs" in told
    vectors = np.load(tmp_path / "o.npy")
    np.testing.assert_array_equal(vectors[:10], first)
    np.testing.assert_allclose(vectors, mean_vectors(own, hf, texts)[:, :8], atol=1e-4)
    with (tmp_path / "o.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"\1")
    told = run(folder, source, output, *flags, status=2)
    assert "o.npy is not as it was written" in told
    run(folder, source, output, "--restart")
    assert np.load(tmp_path / "o.npy").shape == (30, SIZE)


def test_a_file_of_vectors_is_that_of_its_answers(
    model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """One that fminfer did not write is kept; one of an earlier run goes."""
    source = write(tmp_path / "a.jsonl", {"input": "w1"})
    output = tmp_path / "o.jsonl"
    vectors = tmp_path / "o.npy"
    vectors.write_text("precious")
    told = run(model[0], source, output, status=2)
    assert "o.npy exists, and nothing tells that fminfer wrote it" in told
    plain = [
        each
        for each in command(model[0], source, output)
        if each not in ("--embeddings", "npy")
    ]
    run_as(plain)
    run(model[0], source, output, "--restart", status=2)
    assert vectors.read_text() == "precious"
    # and the answer that is kept has none
    write(source, {"input": "w1"}, {"input": "w2"})
    run_as(plain)
    assert (
        len(output.read_text().splitlines()) == 2 and vectors.read_text() == "precious"
    )
    vectors.unlink()
    run(model[0], source, output, "--restart")
    assert np.load(vectors).shape == (2, SIZE)
    write(source, {"input": 5})
    run(model[0], source, output, "--restart", status=3)
    assert not vectors.exists()
    write(source, {"input": "w1"})
    run(model[0], source, output, "--restart")
    run_as([*plain, "--restart"])
    assert output.exists() and not vectors.exists()


def test_a_file_that_comes_while_a_run_answers_is_kept(
    model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """The rows are kept too, and the same command goes on once it is moved away."""
    pipe = tmp_path / "a.jsonl"
    output = tmp_path / "o.jsonl"
    vectors = tmp_path / "o.npy"
    journal = tmp_path / "o.jsonl.journal"
    status = tmp_path / "o.status.json"
    os.mkfifo(pipe)

    def answer(*, has_file: bool) -> tuple[int, str]:
        process = Forked(command(model[0], pipe, output))
        with pipe.open("w") as lines:
            lines.write('{"input": "w1"}\n')
            lines.flush()
            # from then on it answers, and has looked for others
            while not journal.exists():
                assert process.poll() is None
                time.sleep(0.01)
            if has_file:
                vectors.write_text("precious")
        told = process.communicate(timeout=60)[1]
        return process.returncode, told

    code, told = answer(has_file=True)
    assert code == 2 and "o.npy exists, and nothing tells" in told
    assert vectors.read_text() == "precious" and journal.exists() and status.exists()
    vectors.unlink()
    code, told = answer(has_file=False)
    assert code == 0 and "1 kept from earlier runs" in told, told
    assert np.load(vectors).shape == (1, SIZE)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--output", "-"), "give --output FILE"),
        (("--output", "x.npy"), "answers are written as plain JSON lines"),
        (("--model-name", "demo"), "of models that give embeddings"),
    ],
)
def test_what_cannot_be(
    model: tuple[Path, Any, Any],
    tmp_path: Path,
    flags: tuple[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "a.jsonl", {"input": "w1"})
    given = command(model[0], source, tmp_path / "o.jsonl")
    given[given.index(flags[0]) + 1] = flags[1]
    assert told in run_as(given, 2)


NUM_ROWS = 1200
NUM_FILES = 3


def test_two_workers_are_killed_and_go_on(
    model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """Nothing is lost, doubled or mixed."""
    folder, *_ = model
    inputs = tmp_path / "in"
    outputs = tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    texts: dict[str, list[str]] = {}
    for number in range(NUM_FILES):
        name = f"part{number}"
        texts[name] = [
            f"w{number} w{row % 200} w{row // 200} w{row % 7}"
            for row in range(NUM_ROWS)
        ]
        lines = [{"input": text} for text in texts[name]]
        lines[17] = {"input": 5}
        write(inputs / f"{name}.jsonl", *lines)
    for _ in range(3 if IS_ALL else 2):
        workers = [Forked(command(folder, inputs, outputs, "-q")) for _ in range(2)]
        until = time.monotonic() + 60
        before = size_of(outputs)
        while size_of(outputs) < before + 50_000 and time.monotonic() < until:
            if all(worker.poll() is not None for worker in workers):
                break
            time.sleep(0.02)
        for worker in workers:
            worker.kill()
            worker.wait()
        for claim in outputs.glob("*.claim/*"):
            # it was killed before it had written whose it is,
            if not claim.stat().st_size:
                os.utime(claim, (0, 0))  # and a minute later nobody minds it
    assert list(outputs.glob("*.journal")), "they were killed in the middle"
    run(folder, inputs, outputs, status=3)
    with fminfer.Engine(str(folder), dtype="float32") as engine:
        for name, own in texts.items():
            vectors = np.load(outputs / f"output_{name}.npy")
            expected = engine.embed(own)
            expected[17] = np.nan
            np.testing.assert_allclose(vectors, expected, atol=1e-4)
            records = (outputs / f"output_{name}.jsonl").read_text().splitlines()
            asked = [json.loads(record)["request"]["input"] for record in records]
            assert asked == own[:17] + own[18:]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.journal"))
