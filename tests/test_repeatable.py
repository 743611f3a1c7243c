"""What is said of answers that are to be had again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import fminfer
from fminfer.output.summary import JobSummary


def test_seeds_in_16_bits_come_with_a_note() -> None:
    """A resumed run differed in 121 of 4,949 rows, and nothing had said that it might."""
    row = {"prompt": "Question:", "max_tokens": 2}
    engine = fminfer.Engine(budget=1024, attention="eager")
    list(engine.run([row | {"seed": 5}, row | {"seed": 5, "temperature": 0}, row]))
    assert engine.stats.read.num_seeded == 1
    for dtype in ("bfloat16", "float32"):
        summary = JobSummary("m", dtype, [Path("a")], [Path("b")], engine=asdict(engine.stats))
        has_note = "in bfloat16 a seed repeats its draws only beside the same rows"
        assert (has_note in summary.to_text()) == (dtype == "bfloat16")
    engine.close()
