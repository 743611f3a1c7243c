"""Rows whose logits are nan, beside rows that share their prefix: each has a verdict of
its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import fminfer
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.values.step import ResultKind, Step, StepResult
from fminfer.contract.record import Record
from fminfer.engine.sequence import PromptState, RequestState, TokenReport
from fminfer.models.layer_source import open_weights
from fminfer.text.encoded_prompt import EncodedPrompt
from tests.engine.test_contract import Bench, ScriptedPipeline
from tests.steps import Row

BAD = 77
BODIES = ["off", "auto"] if find_compiler() else ["off"]


class SpoiledPipeline(ScriptedPipeline):
    """Keeps track of which places of the KV cache hold nan: where BAD was fed, and behind it.

    Args:
        num_faults: so often BAD spoils its place, and then no more, as if a machine had failed.
    """

    num_faults = 0

    def __init__(self, script: bytes, block_size: int) -> None:
        super().__init__(script, block_size)
        self._spoiled: set[tuple[int, int]] = set()  # blocks, and places in them

    def _answer(self, step: Step, rows: list[Row]) -> StepResult:
        result = super()._answer(step, rows)
        for source, target in step.block_copies.tolist():
            self._spoiled = {place for place in self._spoiled if place[0] != target}
            copied = [(target, at) for block, at in self._spoiled if block == source]
            self._spoiled.update(copied)
        is_nan: list[bool] = []
        for row in rows:
            for position, token_id in enumerate(row.token_ids, row.position):
                places = [
                    (row.block_table[p // self.block_size], p % self.block_size)
                    for p in range(position + 1)
                ]
                is_bad = token_id == BAD and self.num_faults > 0
                self.num_faults -= is_bad
                self._spoiled.discard(places[-1])
                if is_bad or not self._spoiled.isdisjoint(places):
                    self._spoiled.add(places[-1])
                is_nan.append(places[-1] in self._spoiled)
        asked: list[tuple[ResultKind, np.ndarray]]
        asked = [("tokens", step.draws), ("prompt scores", step.scores)]
        for kind, entries in asked:
            spoiled = np.array(is_nan)[entries["token_index"]]
            result.logprobs_of(kind).logprobs[spoiled] = float("nan")
        return result


def run(
    num_faults: int, requests: list[dict[str, Any]], **options: int
) -> tuple[Bench, list[Record]]:
    bench = Bench(**options)
    pipeline = SpoiledPipeline(bench.pipeline.script, bench.pipeline.block_size)
    pipeline.num_faults = num_faults
    bench.pipeline = bench.loop._pipeline = pipeline
    return bench, bench.run(
        *({"temperature": 0, "max_tokens": 3} | each for each in requests)
    )


def codes(records: list[Record]) -> list[str | None]:
    return [record.error.code if record.error else None for record in records]


PREFIX = [*range(1, 9), BAD, *range(1, 16)]
ROWS = {
    "drawn": [{"prompt": [*PREFIX, 20 + i]} for i in range(4)],
    "scored": [
        {"prompt": [*PREFIX, 20 + i], "max_tokens": 0, "echo": True, "logprobs": 1}
        for i in range(4)
    ],
    "both": [
        {"prompt": [*PREFIX, 20 + i], "echo": True, "logprobs": 1} for i in range(4)
    ],
    "candidates": [
        {"prompt": [*PREFIX, 20 + i], "n": 3, "temperature": 1} for i in range(4)
    ],
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_a_spoiled_prefix_costs_the_row_that_computed_it_and_no_other(
    kind: str, chunk_size: int
) -> None:
    """The prefix stayed in the cache, and all rows that shared it failed, then and for ever."""
    bench, records = run(1, ROWS[kind], chunk_size=chunk_size)
    assert sorted(map(str, codes(records))) == ["None"] * 3 + ["nan_logits"]
    _, sound = run(0, ROWS[kind], chunk_size=chunk_size)
    for record, expected in zip(records, sound, strict=True):
        # whose draws hang on their place
        if record.error is None and kind != "candidates":
            assert _choices(record) == _choices(expected)
    assert 0 < bench.loop.stats.num_apart <= 3
    later = bench.run({"prompt": [*PREFIX, 50], "temperature": 0, "max_tokens": 3})
    assert later[0].error is None


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_give_nan_each_by_themselves_all_fail(kind: str) -> None:
    """They are fed at most twice, and leave no block behind in the books."""
    bench, records = run(1000, [*ROWS[kind], {"prompt": [*PREFIX[:8], 9, 9]}])
    assert codes(records) == ["nan_logits"] * 4 + [None]
    assert bench.loop.stats.num_apart <= 3
    stats = bench.loop.stats
    fed = stats.num_prompt_tokens - stats.num_again_tokens + stats.num_cached_tokens
    assert fed == stats.read.num_tokens


def test_a_row_that_lost_its_blocks_keeps_the_scores_of_its_prompt() -> None:
    """Fed again after a spoiled prefix, it was answered without the logprobs of its prompt."""
    reports = [TokenReport(2, -1.5)]
    prompt = PromptState(
        cast(RequestState, None),
        0,
        EncodedPrompt([1, 2], "", []),
        reports=reports,
        ids_to_refeed=[1, 2, 3],
    )
    prompt.num_fed = 3
    prompt.nan_at = "generated token 1"
    prompt.reset_results()
    assert (prompt.num_fed, prompt.nan_at, prompt.reports) == (0, "", reports)


def _choices(record: Record) -> Any:
    return record.to_dict()["result"]["choices"]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("is_scored", [False, True])
def test_a_row_with_nan_fails_alone_among_those_that_share_its_beginning(
    body: str,
    is_scored: bool,
    llama_checkpoint: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 times the nan of its last tokens made its first ones nan, which three others shared."""

    def load_damaged(*arguments: Any, **options: Any) -> Any:
        source: Any = open_weights(*arguments, **options)
        entry = source.load_entry()
        entry["embed.weight"].plain[BAD] = float("nan")
        source.load_entry = lambda: entry
        return source

    monkeypatch.setattr("fminfer.runtime.load.builder.open_weights", load_damaged)
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "logprobs": 2}
    if is_scored:
        asked |= {"max_tokens": 0, "echo": True}
    shared = list(range(100, 130))
    ends = [[BAD, 5, 6, 7, 8], [9, 8, 7], [9, 8, 6, 5], [10]]
    requests = [asked | {"prompt": shared + end} for end in ends]
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels=body)
    alone = [next(iter(engine.run([request]))) for request in requests[::-1]][::-1]
    engine.close()
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels=body)
    together = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    assert codes(together) == ["nan_logits", None, None, None]
    for record, expected in zip(together[1:], alone[1:], strict=True):
        found, wanted = (_choices(each)[0] for each in (record, expected))
        assert found["text"] == wanted["text"]
        pairs = (
            each["logprobs"]["token_logprobs"][is_scored:] for each in (found, wanted)
        )
        torch.testing.assert_close(*map(torch.tensor, pairs), atol=1e-5, rtol=0)
