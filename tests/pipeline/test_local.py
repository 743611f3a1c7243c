"""The pipeline of one stage, and the deadline that steps of any pipeline have."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fminfer.compute.values.step import Step, StepResult
from fminfer.core.errors import PipelineError
from fminfer.core.messages import StageSpan
from fminfer.pipeline import local
from fminfer.pipeline.local import LocalPipeline


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WAIT_S", 0.02, raising=False)


class Sleeper:
    """A stage that sleeps in one of its steps until it is woken."""

    def __init__(self, sleeps_in: int, took_s: float = 0.0) -> None:
        self._sleeps_in = sleeps_in
        self._took_s = took_s
        self.is_woken = threading.Event()

    def run(self, step: Step) -> StepResult:
        if step.step_id == self._sleeps_in:
            self.is_woken.wait(30)
        return StepResult(step.step_id, {}, [StageSpan(0.0, self._took_s)])


def test_a_step_that_hangs_ends_the_run() -> None:
    """Nobody noticed it: the run waited for ever. What comes late after all is dropped."""
    stage = Sleeper(sleeps_in=1)
    pipeline = LocalPipeline(stage.run)
    pipeline.limit_s = 0.2
    for number in range(3):
        pipeline.submit(Step(number))
    assert pipeline.collect().step_id == 0
    started_s = time.monotonic()
    with pytest.raises(
        PipelineError, match=r"no result came for .* s, so a step hangs"
    ):
        pipeline.collect()
    assert time.monotonic() - started_s < 5
    stage.is_woken.set()
    time.sleep(0.05)
    with pytest.raises(PipelineError, match="a step hangs"):
        pipeline.collect()
    with pytest.raises(PipelineError, match="a step hangs"):
        pipeline.submit(Step(3))
    pipeline.close()  # and waits for nothing


def test_a_step_may_take_a_hundred_times_as_long_as_most_did() -> None:
    """A prompt's chunk may take longer than all decode steps before it."""
    stage = Sleeper(sleeps_in=3, took_s=0.01)
    pipeline = LocalPipeline(stage.run)
    pipeline.limit_s = 0.1
    for number in range(4):
        pipeline.submit(Step(number))
    assert [pipeline.collect().step_id for _ in range(3)] == [0, 1, 2]
    threading.Timer(0.4, stage.is_woken.set).start()
    assert pipeline.collect().step_id == 3, "its limit was 1 s"
    pipeline.close()


def test_a_run_that_was_suspended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are counted: the time in which this process slept, too, is nobody's fault."""
    stage = Sleeper(sleeps_in=0)
    pipeline = LocalPipeline(stage.run)
    pipeline.limit_s = 0.2
    get = pipeline._results.get
    num_waits = list[int]()

    def get_late(timeout: float) -> Any:
        num_waits.append(1)
        if len(num_waits) == 1:
            time.sleep(0.5)
        stage.is_woken.set()
        return get(timeout=timeout)

    late = SimpleNamespace(get=get_late, put=pipeline._results.put)
    monkeypatch.setattr(pipeline, "_results", late)
    pipeline.submit(Step(0))
    assert pipeline.collect().step_id == 0
    pipeline.close()
