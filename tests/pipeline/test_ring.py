"""The ring of ranks: what comes after a failure is no result, whatever it looks like."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fminfer.compute.values.step import Results, Step
from fminfer.core.errors import FminferError, PipelineError
from fminfer.core.messages import StageSpan
from fminfer.core.partition import Part
from fminfer.pipeline import ring
from fminfer.pipeline.ring import RingPipeline, serve_stage
from fminfer.pipeline.wire import LinkSpec, RankMessage, encode_step
from tests.steps import make_logprobs

FORM = LinkSpec(4, torch.float32, torch.device("cpu"))
GARBAGE = 666
ABORT_S = 0.005
WAIT_S = 10.0
TURNS = range(20)


class Sums:
    """A stage whose sum over ranks returns garbage once it is aborted, as NCCL's does."""

    max_tokens = 0

    def __init__(self) -> None:
        self.is_summing = threading.Event()
        self.is_aborted = threading.Event()
        span = StageSpan(0.0, 0.0)
        self.clock: Any = SimpleNamespace(start=lambda: None, stop=lambda **_: span)

    def forward(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        self.is_summing.set()
        assert self.is_aborted.wait(WAIT_S)
        return torch.full((1, 4), float(GARBAGE))

    def finish(self, step: Step, hidden: torch.Tensor) -> Results:
        return {"tokens": make_logprobs([GARBAGE], [-0.1])}

    def abort(self) -> None:
        """End the sum; the abort itself takes a while."""
        self.is_aborted.set()
        time.sleep(ABORT_S)


class Wire:
    """Connections to other ranks, which break once `is_broken` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *first: RankMessage) -> None:
        self.is_broken = threading.Event()
        self.sent = queue.SimpleQueue[RankMessage]()
        self._first = [*first]
        monkeypatch.setattr(ring, "receive_message", self.receive)
        monkeypatch.setattr(
            ring, "send_message", lambda message, *_: self.sent.put(message)
        )

    def receive(self, rank: int, form: LinkSpec) -> RankMessage:
        if self._first:
            return self._first.pop()
        assert self.is_broken.wait(WAIT_S)
        raise RuntimeError("Connection closed by peer")


def explain(text: str) -> FminferError:
    return PipelineError(text)


def close(pipeline: RingPipeline) -> None:
    """Wait for all threads: a late one would send to the next test's wire."""
    pipeline.close()
    for thread in (pipeline._thread, *pipeline._ring, *pipeline._rank_work.followers):
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("turn", TURNS)
def test_no_token_of_an_aborted_sum_is_a_result(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shard died, the sum was aborted, and its garbage was the step's token."""
    stage = Sums()
    wire = Wire(monkeypatch)
    part = Part(0, 1, 0, 1, num_shards=2)
    pipeline = RingPipeline(stage, part, FORM, explain, release=stage.abort)
    for number in range(2):
        pipeline.submit(Step(number))
    assert stage.is_summing.wait(WAIT_S)
    wire.is_broken.set()
    with pytest.raises(PipelineError, match="the connection to rank 1 broke"):
        pipeline.collect()
    time.sleep(2 * ABORT_S)  # the stage is done with both
    with pytest.raises(PipelineError, match="the connection to rank 1 broke"):
        pipeline.collect()
    close(pipeline)


@pytest.mark.parametrize("turn", TURNS[:5])
def test_a_result_of_the_last_stage_that_comes_late_is_dropped(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has heard of the failure; the last stage has not, and sends what it computed."""
    stage = Sums()
    wire = Wire(monkeypatch)
    pipeline = RingPipeline(stage, Part(0, 2, 0, 1), FORM, explain, release=stage.abort)
    for number in range(2):
        pipeline.submit(Step(number))
    assert stage.is_summing.wait(WAIT_S)
    pipeline.fail(PipelineError("rank 1 has failed"))
    results = stage.finish(Step(0), torch.empty(0))
    pipeline._receive_message(RankMessage("result", ring.encode_result(0, results)))
    for _ in range(2):
        with pytest.raises(PipelineError, match="rank 1 has failed"):
            pipeline.collect()
    wire.is_broken.set()
    close(pipeline)


@pytest.mark.parametrize("turn", TURNS[:5])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_rank_sends_nothing_of_an_aborted_sum(
    num_stages: int, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage sent its garbage on as a result, others theirs as hidden states."""
    stage = Sums()
    wire = Wire(monkeypatch, RankMessage("step", encode_step(Step(7))))
    part = Part(1, num_stages, 0, 1, num_shards=2)

    def break_off() -> None:
        assert stage.is_summing.wait(WAIT_S)
        wire.is_broken.set()

    threading.Thread(target=break_off, daemon=True).start()
    with pytest.raises(PipelineError, match="broke"):
        serve_stage(stage, part, FORM, lambda: None, stage.abort)
    time.sleep(2 * ABORT_S)
    kinds = set()
    while not wire.sent.empty():
        message = wire.sent.get()
        kinds.add((message.kind, message.hidden is None))
    assert kinds <= {("step", True)}, (
        "a follower was told of the step, and nothing else"
    )
