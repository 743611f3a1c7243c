"""What is said of answers that are to be had again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import fminfer
from fminfer.job.run_summary import JobSummary


def test_seeds_in_16_bits_come_with_a_note() -> None:
    """A resumed run differed in 121 of 4,949 rows, and nothing had said that it might."""
    row = {"prompt": "Question:", "max_tokens": 2}
    engine = fminfer.Engine(budget=1024, kernels="off")
    list(engine.run([row | {"seed": 5}, row | {"seed": 5, "temperature": 0}, row]))
    assert engine.stats.read.num_seeded == 1

    def note(dtype: str, kv_dtype: str) -> str:
        summary = JobSummary(
            "m", dtype, [Path("a")], [Path("b")], engine=asdict(engine.stats)
        )
        summary.kv_dtype = kv_dtype
        return next(
            (each for each in summary.to_text().splitlines() if "a seed" in each), ""
        )

    assert not note("float32", "float32")
    both = note("bfloat16", "bfloat16")
    assert "in bfloat16 a seed repeats its draws only beside the same rows" in both
    assert "in float32 (--dtype and --kv-dtype) it does" in both
    cache = note("float32", "bfloat16")  # it advised --dtype float32, which was given
    assert "with a KV cache in bfloat16 a seed repeats" in cache
    assert "in float32 (--kv-dtype) it does" in cache
    assert "in bfloat16 a seed" in note("bfloat16", "float32")
    assert "in float32 (--dtype) it does" in note("bfloat16", "float32")
    engine.close()
