"""The benchmark beside peers: which sides there are, and those that cannot answer are
left out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import transformers
from click.testing import CliRunner

from fminfer.machine import processor
from fminfer.models.config_fields import architecture_of

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
# scripts, not a package: they find each other like this
sys.path.insert(0, str(BENCHMARKS))

import limit  # noqa: E402
import other_work  # noqa: E402
import peers  # noqa: E402


def test_sides_are_found_by_their_environments(tmp_path: Path) -> None:
    python = tmp_path / "llama.cpp/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    found = peers.find_sides(tmp_path, ())
    assert list(found) == ["fminfer", "transformers", "llama.cpp"]
    assert found["llama.cpp"] == str(python)
    assert peers.find_sides(tmp_path, ("llama.cpp",)) == {"llama.cpp": str(python)}


def test_it_runs_where_the_package_is_not_installed(tmp_path: Path) -> None:
    """It needed PYTHONPATH or an install, and a machine with a GPU for an hour may have
    neither."""
    sites = [path for path in sys.path if path.endswith("-packages")]
    # so, no .pth file is followed
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sites)}
    code = (
        "import importlib.util as u, sys; sys.exit(u.find_spec('fminfer') is not None)"
    )
    python: Any = {
        "cwd": tmp_path,
        "env": environ,
        "capture_output": True,
        "text": True,
    }
    if subprocess.run([sys.executable, "-S", "-c", code], **python).returncode:
        pytest.skip("the package is installed as files")
    command = [sys.executable, "-S", str(BENCHMARKS / "peers.py"), "--help"]
    found = subprocess.run(command, **python)
    assert found.returncode == 0 and "--workload" in found.stdout, found.stderr


def test_its_command_finds_the_package_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, env: dict[str, str], check: bool) -> None:
        assert command[1:3] == ["-m", "fminfer"] and check
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(BENCHMARKS.parent)
        raise ZeroDivisionError

    monkeypatch.setattr(peers.subprocess, "run", run)
    job = {"rows": [], "model": "none", "dtype": "float32", "device": "cpu"}
    with pytest.raises(ZeroDivisionError):
        peers.run_fminfer(job, tmp_path)


def test_every_side_has_a_colour() -> None:
    assert {"fminfer", "transformers", "vllm", *peers.CONVERTERS} <= set(peers.COLOURS)


def test_a_side_that_cannot_score_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = {"llama.cpp": str(tmp_path), "rows": [{"prompt": [1, 2, 3], "max_tokens": 0}]}
    assert (
        peers.measure("b", {"llama.cpp": sys.executable}, job, tmp_path, repeats=2)
        == {}
    )
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


def test_workloads_by_name() -> None:
    (first, second) = peers.make_rows("2x3+5", 1.0)
    assert len(first["prompt"]) == 3 and first["max_tokens"] == 5
    assert first["prompt"] != second["prompt"]
    assert len(peers.make_rows("batch-8", 1.0)) == 8
    with pytest.raises(click.BadParameter, match="512x512"):
        peers.make_rows("d", 1.0)


def test_on_a_gpu_only_sides_that_use_it(tmp_path: Path) -> None:
    for name in ("vllm", "llama.cpp"):
        python = tmp_path / name / "bin/python"
        python.parent.mkdir(parents=True)
        python.touch()
    assert list(peers.find_sides(tmp_path, (), "cuda")) == [
        "fminfer",
        "transformers",
        "vllm",
    ]


def test_prefixes_that_are_shared_count_once() -> None:
    assert limit.count_distinct([[1, 2, 3], [7], [1, 2, 4, 5], [1, 2, 3]]) == 6


def write_config(folder: Path, **fields: object) -> str:
    config = transformers.AutoConfig.for_model(**fields)
    config.save_pretrained(folder)
    return str(folder)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}
LAYER = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 16  # q, k, v, o; gate, up and down


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_limit_of_a_run(tmp_path: Path, is_tied: bool) -> None:
    """Counted by hand: 2 × weights × tokens to feed, then steps that multiply or read."""
    folder = write_config(tmp_path, **LLAMA, tie_word_embeddings=is_tied)
    rows = [
        {"prompt": [1, 2, 3], "max_tokens": 3},
        {"prompt": [1, 2, 4], "max_tokens": 2},
    ]
    feed = 2 * (2 * LAYER * 4 + 80 * 2)  # four distinct tokens, two draws
    products = 2 * (2 * LAYER + 80) * (2 + 1)  # two rows, then one
    # all weights twice, and keys
    reads = 2 * (2 * LAYER + 80) * 2 + 2 * 2 * 4 * 2 * (4 + 4 + 5)
    fast_memory = limit.least_s(folder, "bfloat16", rows, limit.Roof(1e3, 1e12))
    assert fast_memory == pytest.approx((feed + products) / 1e3)
    slow_memory = limit.least_s(folder, "bfloat16", rows, limit.Roof(1e12, 1e3))
    assert slow_memory == pytest.approx(reads / 1e3, rel=1e-6)


def test_the_limit_of_scoring(tmp_path: Path) -> None:
    folder = write_config(tmp_path, **LLAMA)
    rows = [{"prompt": [1, 2, 3], "max_tokens": 0}]
    found = limit.least_s(folder, "float32", rows, limit.Roof(1e3, 1e3))
    assert found == pytest.approx(2 * (2 * LAYER * 3 + 80 * 2) / 1e3)


def test_a_token_meets_its_experts_only() -> None:
    fields = peers.MORE_SIZES["qwen3-moe"] | {"num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(**fields)
    layers, active, head = limit.count_weights(architecture_of(config).model)
    expert = 3 * 768 * 1024
    assert layers - active == (16 - 2) * expert
    assert head == 32000 * 768


def children() -> set[int]:
    """List this process's children that run, those that earlier tests left among them."""
    return set(
        map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no Linux")
@pytest.mark.parametrize(("busy", "number"), [("0", 0), ("2", 2), ("build", 4)])
def test_other_work_runs_beside_a_turn_and_ends_with_it(busy: str, number: int) -> None:
    before = children()
    with other_work.other_work(busy):
        new = children() - before
        assert len(new) == number
        groups = [child for child in new if os.getpgid(child) == child]
    assert not children() & new
    end = time.monotonic() + 10.0
    while any(map(is_running, groups)):  # nor does any compiler
        assert time.monotonic() < end


def is_running(group: int) -> bool:
    """Tell whether a process of a group runs; one that ended may wait for its new parent."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def test_other_work_is_there_for_every_turn_of_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    before = children()

    def answer(name: str) -> dict[str, Any]:
        seen.append((name, len(children() - before)))
        return {"run_s": 1.0, "ready_s": 1.0, "sample": [[1]]}

    monkeypatch.setattr(peers, "run_fminfer", lambda job, folder: answer("fminfer"))
    monkeypatch.setattr(
        peers, "run_peer", lambda python, side, job, folder: answer(side)
    )
    peers.measure("a", {"fminfer": "", "vllm": ""}, {}, tmp_path, 2, "1")
    assert seen == [("fminfer", 1), ("vllm", 1)] * 2
    assert children() == before


def test_what_is_beside_the_sides_is_a_number_or_a_build() -> None:
    for wrong in ("-1", "many", "²"):
        found = CliRunner().invoke(peers.main, ["--busy", wrong])
        assert (
            found.exit_code == 2 and "a number of processes, or build" in found.output
        )
    assert other_work.describe("1") == "beside 1 busy process"
    assert other_work.describe("build") == "beside a build of 4 processes"


def test_every_side_stands_for_a_lesser_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = processor.LEVELS["avx2"]
    names = [processor.VARIABLE, *least.caps]
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set is undone
    monkeypatch.setattr(processor, "_read_units", lambda: least.units)
    peers.use_processor("avx2")
    assert [os.environ[name] for name in names] == ["avx2", "avx2", "AVX2", "AVX2"]
    with pytest.raises(click.ClickException, match="this processor has no avx512bw"):
        peers.use_processor("avx512")
