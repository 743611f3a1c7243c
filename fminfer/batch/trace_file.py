"""The trace of a run, one row a rank, which Perfetto and Chrome open (Chrome's Trace Event Format).

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
It is written as the run goes on, and can be opened even if the run was cut short.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from fminfer.core.messages import StepTrace


class TraceFile:
    """Writes a trace.

    Args:
        path: a .json file; an older one is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(b"[\n")
        self._start_s: float | None = None
        self._num_ranks = 0

    def add(self, step: StepTrace) -> None:
        """Write what each rank did for one step."""
        self._name_ranks(len(step.spans))
        if self._start_s is None:
            self._start_s = step.spans[0].start_s
        for rank, span in enumerate(step.spans):
            self._write(
                {
                    "name": step.phase,  # Perfetto colours by name
                    "cat": step.phase,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": round((span.start_s - self._start_s) * 1e6, 1),
                    "dur": round((span.end_s - span.start_s) * 1e6, 1),
                    "args": {
                        "step": step.step_id,
                        "prompt_tokens": step.num_prompt_tokens,
                        "decode_rows": step.num_decode_rows,
                        "sent_bytes": span.sent_bytes,
                    },
                }
            )

    def close(self) -> None:
        """End the file."""
        self._file.write(b"{}]\n")
        self._file.close()

    def _name_ranks(self, num_ranks: int) -> None:
        while self._num_ranks < num_ranks:
            rank = self._num_ranks
            name = {"name": f"rank {rank}"}
            event = {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name}
            self._write(event)
            self._num_ranks += 1

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(orjson.dumps(event) + b",\n")
