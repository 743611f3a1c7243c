"""When a stage worked on a step: by this machine's clock, and on a GPU by the GPU's own events."""

from __future__ import annotations

import time

import torch

from fminfer.core.messages import StageSpan

Pair = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a step's work


class StepClock:
    """Times the steps of one stage.

    A GPU works on when the call that gave it work returns. A step that nobody waits for, such as a
    prompt's chunk of which nothing is drawn, has its time told with the next one that is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._untold: list[Pair] = []
        self._start_s = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._start_s = time.time()
        if self._on_gpu:
            self._untold.append((_new_event(), _new_event()))
            self._untold[-1][0].record()

    def stop(self, *, is_awaited: bool, sent_bytes: int = 0, max_tokens: int = 0) -> StageSpan:
        """End the step that was begun, and return when it was.

        Args:
            is_awaited: a GPU has done its work, for somebody has read what it gave.
        """
        end_s = time.time()
        if not self._on_gpu:
            return StageSpan(self._start_s, end_s, sent_bytes, max_tokens)
        last = self._untold[-1][1]
        last.record()
        if not is_awaited:
            return StageSpan(end_s, end_s, sent_bytes, max_tokens)
        last.synchronize()
        *earlier, own_s = (first.elapsed_time(last) / 1000 for first, last in self._untold)
        self._untold.clear()
        return StageSpan(end_s - own_s, end_s, sent_bytes, max_tokens, sum(earlier))


def _new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
