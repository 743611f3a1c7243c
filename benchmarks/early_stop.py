#!/usr/bin/env python
"""Rows that end long before max_tokens, in a tight KV cache: what learning their lengths brings.

160 rows of 16–191 tokens on a random-init llama of 12 × 768, max_tokens 512, each token
an end with a probability of 1 in 50. The two sides, one engine each, take turns: rows enter with
room for what rows like them drew, or, as if nothing had been learned, with room for all
that they may draw.

    python benchmarks/early_stop.py --budget 8192 --repeats 3

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import click
from against_transformers import SIZE

import fminfer
from fminfer.engine import reservation

MIN_ROWS_SEEN = {"learned": reservation.MIN_ROWS_SEEN, "all": 10**9}


def make_rows(count: int) -> list[dict[str, Any]]:
    rng = random.Random(2026)
    return [
        {
            "prompt": [rng.randrange(32000) for _ in range(rng.randint(16, 191))],
            "max_tokens": 512,
            "temperature": 1.0,
            "seed": i,
            "stop_token_ids": list(range(32000 // 50)),
        }
        for i in range(count)
    ]


@click.command()
@click.option("--budget", default=8192, show_default=True, help="Tokens of KV cache.")
@click.option("--rows", "num_rows", default=160, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
def main(budget: int, num_rows: int, repeats: int, dtype: str) -> None:
    """Print seconds, rows at once and rows put back of both sides."""
    engines = {
        side: fminfer.Engine(random_init=SIZE, dtype=dtype, budget=budget)
        for side in MIN_ROWS_SEEN
    }
    seconds: dict[str, list[float]] = {side: [] for side in MIN_ROWS_SEEN}
    texts: dict[str, list[str]] = {}
    for turn in range(repeats):
        for side, engine in engines.items():
            reservation.MIN_ROWS_SEEN = MIN_ROWS_SEEN[side]
            rows = make_rows(num_rows)
            # other tokens each time, so that no turn finds them in the cache
            for row in rows:
                row["prompt"] = [(token + turn) % 32000 for token in row["prompt"]]
            started = time.perf_counter()
            records = sorted(engine.run(rows), key=lambda record: record.line.number)
            seconds[side].append(time.perf_counter() - started)
            texts[side] = [r.to_dict()["result"]["choices"][0]["text"] for r in records]
        same = sum(a == b for a, b in zip(*texts.values(), strict=True))
        print(
            f"turn {turn + 1}: {same} of {num_rows} rows are equal on both sides",
            flush=True,
        )
    results = {
        side: {
            "seconds": statistics.median(seconds[side]),
            "runs": seconds[side],
            "rows_at_once": engine.stats.max_rows_running,
            "put_back": engine.stats.num_put_back,
        }
        for side, engine in engines.items()
    }
    print(f"{'room for':<12}{'seconds':>9}{'at once':>9}{'put back':>10}")
    for side, r in results.items():
        print(
            f"{side:<12}{r['seconds']:>9.1f}{r['rows_at_once']:>9}{r['put_back']:>10}"
        )
    print(
        json.dumps(
            {"budget": budget, "rows": num_rows, "dtype": dtype, "sides": results}
        )
    )


if __name__ == "__main__":
    main()
