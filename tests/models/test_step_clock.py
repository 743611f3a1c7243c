"""Steps are timed by who does them: a GPU works on when Python's call has returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fminfer.engine.stats import StageStats
from fminfer.forward.stage import StepClock
from fminfer.pipeline.wire import decode_spans, encode_spans


class Gpu:
    """A stream: work that was asked for, and how far it is done."""

    def __init__(self) -> None:
        self.asked_ms = 0.0

    def event(self, *, enable_timing: bool) -> Any:
        gpu = self
        assert enable_timing

        class Event:
            at_ms = 0.0

            def record(self) -> None:
                self.at_ms = gpu.asked_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return other.at_ms - self.at_ms

        return Event()


def test_a_step_that_nobody_waits_for_is_told_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time was taken for that of the step after it."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    clock = StepClock(torch.device("cuda"))
    stats = StageStats()
    spans = []
    for took_ms, is_awaited in [
        (100.0, False),
        (200.0, False),
        (10.0, True),
        (7.0, True),
    ]:
        clock.start()
        gpu.asked_ms += took_ms
        spans.append(clock.stop(is_awaited=is_awaited, sent_bytes=3, max_tokens=5))
    for span in decode_spans(encode_spans(spans)):
        assert (span.sent_bytes, span.max_tokens) == (3, 5)
        stats.add(span)
    own_s = [span.end_s - span.start_s for span in spans]
    assert own_s == pytest.approx([0, 0, 0.010, 0.007], abs=1e-5)
    assert [span.earlier_s for span in spans] == pytest.approx([0, 0, 0.300, 0])
    assert stats.busy_s == pytest.approx(0.317, abs=1e-5)


def test_a_cpu_is_done_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.5])
    monkeypatch.setattr("fminfer.forward.stage.time.time", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    clock.start()
    span = clock.stop(is_awaited=False, max_tokens=2)
    assert (span.start_s, span.end_s, span.max_tokens, span.earlier_s) == (
        100.0,
        100.5,
        2,
        0.0,
    )
