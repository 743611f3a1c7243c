"""What a kept answer costs: 100,000 requests that are found, and as many that are not.

    python benchmarks/result_cache.py

The demo model answers one request of each kind. That answer is then kept for many other ones,
whose prompts have 200 tokens. No model computes while they are looked up. `whole run`
is the time of `Engine.run` over lines that are all found: to parse, tokenize, look up, and write
the records.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import fminfer
from fminfer.answers.answer_index import AnswerIndex, open_answer_index
from fminfer.answers.answer_store import FILE
from fminfer.answers.cache_place import CachePlace
from fminfer.contract.envelope import Line
from fminfer.engine.engine_core import Finished
from fminfer.engine.sequence import PreparedRequest

# with the part of --rows that is tried
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "a text of 20 tokens": ({"max_tokens": 20}, 1),
    "100 tokens with 5 logprobs each": ({"max_tokens": 100, "logprobs": 5}, 10),
}
WORDS = ("north", "south", "east", "west", "den", "porch", "attic", "cellar")


def request(number: int, kind: dict[str, Any]) -> dict[str, Any]:
    """Return a request of 200 tokens or so."""
    words = " ".join(WORDS[(number >> 3 * (place % 7)) % 8] for place in range(195))
    return {"prompt": f"{number} {words}", "temperature": 0, "ignore_eos": True} | kind


def each_us(
    do: Callable[[PreparedRequest], object], prepared: Iterable[PreparedRequest]
) -> float:
    """Return the microseconds of a call."""
    all_prepared = list(prepared)
    start = time.perf_counter()
    for each in all_prepared:
        do(each)
    return (time.perf_counter() - start) / len(all_prepared) * 1e6


def lines(kind: dict[str, Any], num_rows: int) -> Iterator[Line]:
    for number in range(num_rows):
        yield Line(0, number + 1, json.dumps(request(number, kind)).encode())


def measure(
    engine: fminfer.Engine, kind: dict[str, Any], num_rows: int, folder: Path
) -> dict[str, float]:
    """Keep, find, and answer lines."""
    engine.add(request(0, kind))
    events = [
        event for _ in iter(lambda: engine.has_work, False) for event in engine.step()
    ]
    (answer,) = events
    assert isinstance(answer, Finished)
    intake = engine.intake
    parsed = [intake.parse(request(number, kind)) for number in range(num_rows)]
    prepared = [intake.prepare(each, is_openai=False) for each in parsed]
    figures = {"value_bytes": float(len(json.dumps(answer.result)))}

    def cached() -> AnswerIndex:
        cache = open_answer_index({}, CachePlace(folder, 2**34), click.echo)
        assert cache is not None
        return cache

    cache = cached()
    figures["miss_us"] = each_us(cache.find, prepared)
    figures["keep_us"] = 0.0
    start = time.perf_counter()
    # as a run has them: not faster than the disk
    for first in range(0, num_rows, 1000):
        part = prepared[first : first + 1000]
        figures["keep_us"] += each_us(lambda each: cache.add(each, answer), part)
        store = cache._store
        assert store is not None
        while store._pending_bytes > 2**25:
            time.sleep(0.01)
    figures["keep_us"] /= num_rows / 1000
    cache.close()
    figures["write_s"] = time.perf_counter() - start
    cache = cached()
    figures["hit_us"] = each_us(cache.find, prepared)
    assert cache.num_found == num_rows
    others = [replace(each, kind="openai") for each in prepared]
    figures["miss_in_a_full_file_us"] = each_us(cache.find, others)
    engine.runs.cache = cache
    start = time.perf_counter()
    num_bytes = sum(
        len(record.to_json()) for record in engine.run(lines(kind, num_rows))
    )
    figures["whole_run_us"] = (time.perf_counter() - start) / num_rows * 1e6
    assert num_bytes and cache.num_found == 2 * num_rows
    engine.runs.cache = None
    cache.close()
    figures["file_mb"] = (folder / FILE).stat().st_size / 1e6
    return figures


@click.command()
@click.option("--rows", default=100_000, show_default=True)
def main(rows: int) -> None:
    """Measure each kind, and print a table and a line of JSON."""
    engine = fminfer.Engine(dtype="float32")
    found = {}
    for name, (kind, part) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(engine, kind, rows // part, Path(folder))
        click.echo(f"{name}, {rows // part:,} rows")
        for figure, value in found[name].items():
            click.echo(f"{value:14,.1f}  {figure}")
    engine.close()
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
