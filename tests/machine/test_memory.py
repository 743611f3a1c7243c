"""Memory that runs out costs time, never an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.core.errors import OutOfMemoryError, UsageError
from fminfer.forward.stage import Stage
from fminfer.machine.out_of_memory import SizeLimit, is_out_of_memory

FULL = RuntimeError(
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
)


def test_what_runs_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(real.value), "as torch says it on this machine"
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(
        torch.OutOfMemoryError("x")
    )
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    for text in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",  # of a kernel's launch; it was missed
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_work_is_halved_until_it_fits_and_the_size_is_kept() -> None:
    limit = SizeLimit("tokens")
    parts = list[tuple[int, int]]()

    def work(first: int, last: int) -> int:
        parts.append((first, last))
        if last - first > 13:
            raise FULL
        return last - first

    assert sum(limit.run(100, work)) == 100
    assert parts[:4] == [(0, 100), (0, 50), (0, 25), (0, 13)] and limit.most == 13
    parts.clear()
    assert limit.run(26, work) == [13, 13] and parts == [(0, 13), (13, 26)]
    assert limit.run(0, work) == []


def test_what_cannot_be_halved_ends_the_run_and_says_so() -> None:
    def fail(first: int, last: int) -> None:
        raise FULL

    with pytest.raises(
        OutOfMemoryError, match=r"even one of its tokens .*smaller --budget"
    ):
        SizeLimit("tokens").run(9, fail)
    with pytest.raises(ZeroDivisionError):
        SizeLimit("tokens").run(9, lambda first, last: 1 // 0)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    shared = list(range(40, 90))
    odd = [
        {"prompt": [7, n, 9] * n, "max_tokens": n, "logprobs": 2} for n in range(1, 14)
    ]
    even = [
        {"prompt": [*shared, n], "max_tokens": 5, "n": 2, "seed": n} for n in range(8)
    ]
    scored = [
        {"prompt": [*shared, 5, n], "max_tokens": 0, "echo": True, "logprobs": 1}
        for n in (1, 2)
    ]
    return [row | {"ignore_eos": True} for row in (*odd, *even, *scored)]


@pytest.fixture(scope="module")
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", chunk_size=64)
    yield engine
    engine.close()


def answers(engine: fminfer.Engine, rows: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = [None] * len(rows)
    for record in engine.run(rows):
        assert record.result is not None, record.error
        found[record.line.number - 1] = record.result["choices"]
    return found


def test_steps_in_parts_give_the_same(
    llama_checkpoint: tuple[Path, Any],
    engine: fminfer.Engine,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory for 5 tokens at most, found out in the middle of the run."""
    whole = answers(engine, rows)
    run_part = Stage._compute_part
    sizes = list[int]()

    def run_few(self: Stage, *step: Any) -> torch.Tensor:
        *_, first, last = step
        sizes.append(last - first)
        if len(sizes) > 3 and sizes[-1] > 5:
            raise FULL
        return run_part(self, *step)

    monkeypatch.setattr(Stage, "_compute_part", run_few)
    other = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", chunk_size=64)
    parts = answers(other, rows)
    other.close()
    assert max(sizes) > 32, "whole steps were tried"
    assert 2 < other.stats.stages[0].max_tokens <= 5
    assert sum(size > 5 for size in sizes[3:]) < 6, "the size that fits is remembered"
    for one, two in zip(whole, parts, strict=True):
        assert [choice["text"] for choice in one] == [choice["text"] for choice in two]
        for a, b in zip(one, two, strict=True):
            if "logprobs" in a:
                values = (x["logprobs"]["token_logprobs"] for x in (a, b))
                for x, y in zip(*values, strict=True):
                    assert x == y or abs(x - y) < 1e-5


def test_a_cache_that_cannot_be_is_wrong_usage(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    with pytest.raises(
        UsageError, match=r"a KV cache of .* GiB are free; give a smaller --budget"
    ):
        fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", budget=2**50)
