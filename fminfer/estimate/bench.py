"""`fminfer bench`: what a token takes at several batch sizes, in the figures of the
BLOOM scripts.

Those of huggingface/transformers-bloom-inference: greedy generation of 100 tokens a row
from inputs of a few. A model that gives vectors is timed by rows a second, at several lengths.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from fminfer.core.errors import FminferError, OutOfMemoryError
from fminfer.core.messages import RankMemory, make_memory_table
from fminfer.core.quantities import describe_dtypes, with_noun
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.process_roles import lead_or_join, start_engine

TOO_SMALL = "the KV cache is too small; raise --budget, or take smaller batches"
LENGTHS = (16, 64, 256, 512)  # of rows that become vectors


@dataclass(slots=True, frozen=True)
class Figures:
    """The times of one batch size, which each pipeline ran at once."""

    batch_size: int  # of a pipeline
    length: int  # tokens of a row that becomes a vector; 0: rows of generated tokens
    num_rows: int  # of all pipelines
    num_tokens: int  # generated, or read
    seconds: float  # tokenizing included
    ready_s: float  # from the process's start until the model could be used
    dtype: str  # of the arithmetic
    weight_dtype: str  # the format of most weights

    @property
    def ms_per_token(self) -> float:
        return self.seconds / self.num_tokens * 1000

    @property
    def rows_per_s(self) -> float:
        return self.num_rows / self.seconds

    @property
    def value(self) -> float:
        """What tables and pictures show: milliseconds a token, or rows a second for vectors."""
        return self.rows_per_s if self.length else self.ms_per_token

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "ms_per_token": self.ms_per_token,
            "rows_per_s": self.rows_per_s,
        }

    def to_text(self) -> str:
        """Return the four figures in the scripts' own words, or a line about vectors."""
        if self.length:
            return (
                f"{self.num_rows:>6,} rows of {self.length:>5,} tokens: "
                f"{self.rows_per_s:>10,.1f} rows/s, "
                f"{self.rows_per_s * self.length:>11,.0f} tokens/s"
            )
        return (
            "*** Performance stats:\n"
            f"Arithmetic and weights: {describe_dtypes(self.dtype, self.weight_dtype)}\n"
            f"Throughput per token including tokenize: {self.ms_per_token:.2f} msecs\n"
            f"Start to ready to generate: {self.ready_s:.3f} secs\n"
            f"Tokenize and generate {self.num_tokens} (bs={self.batch_size}) tokens: "
            f"{self.seconds:.3f} secs\n"
            f"Start to finish: {self.ready_s + self.seconds:.3f} secs\n"
        )


@dataclass(slots=True, frozen=True)
class NoRoom:
    """A batch size that does not fit."""

    batch_size: int
    length: int
    needed_kv_tokens: int  # in each pipeline
    num_kv_tokens: int  # that each has
    why: str

    value = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_oom": True}

    def to_text(self) -> str:
        if self.length:
            return f"{self.batch_size:>6,} rows of {self.length:>5,} tokens: oom; {self.why}"
        return (
            f"*** oom (bs={self.batch_size}): {self.why}\n"
            f"It takes a KV cache of {self.needed_kv_tokens:,} tokens; there are "
            f"{self.num_kv_tokens:,}\n"
        )


Row = Figures | NoRoom


@dataclass(slots=True, frozen=True)
class BenchResult:
    """All that was timed, and the memory that it took."""

    title: str
    rows: list[Row]
    ranks: list[RankMemory]

    @property
    def is_timed(self) -> bool:
        """Whether a batch size fitted."""
        return any(isinstance(row, Figures) for row in self.rows)

    @property
    def y_name(self) -> str:
        """The unit of the rows' values."""
        return "rows a second" if self.rows[0].length else "msecs a token"

    @property
    def curves(self) -> dict[str, list[tuple[int, float | None]]]:
        """Batch sizes and their values, by the name of the measure; None: out of memory."""
        curves: dict[str, list[tuple[int, float | None]]] = {}
        for row in self.rows:
            name = f"rows/s of {row.length:,}" if row.length else "msecs a token"
            curves.setdefault(name, []).append((row.batch_size, row.value))
        return curves

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": [row.to_dict() for row in self.rows],
            "ranks": [asdict(each) for each in self.ranks],
        }

    def to_text(self) -> str:
        """Return tables for people."""
        sizes = sorted({row.batch_size for row in self.rows})
        lines = ["batch size        " + "".join(f"{size:>9}" for size in sizes)]
        for name, points in self.curves.items():
            cells = {
                size: "oom" if value is None else f"{value:,.2f}"
                for size, value in points
            }
            lines.append(f"{name:<18}" + "".join(f"{cells[size]:>9}" for size in sizes))
        return "\n".join([*lines, "", *make_memory_table(self.ranks)])


def bench_process(
    run: ProcessContext,
    batch_sizes: Sequence[int],
    new_tokens: int,
    tell: Callable[[str], None],
) -> BenchResult | None:
    """Load the model once, time each batch size, and tell it; ranks other than 0 return None."""

    def lead(plan: RunPlan, compute: Compute) -> BenchResult:
        rows: list[Row] = []
        with closing(start_engine(run, plan, compute)) as engine:
            for row in _Bench(engine, run, batch_sizes, new_tokens).time_all():
                tell(row.to_text())
                rows.append(row)
        facts = engine.facts
        types = describe_dtypes(facts.dtype, facts.weight_dtype)
        place = f"{facts.device}, {with_noun(facts.num_ranks, 'rank')}"
        return BenchResult(
            f"{engine.model_name}: {types} on {place}", rows, engine.memory
        )

    return lead_or_join(run, Opening(run.config, run.role.spread), lead)


class _Bench:
    """Times the batch sizes with one engine."""

    def __init__(
        self,
        engine: Engine,
        run: ProcessContext,
        batch_sizes: Sequence[int],
        new_tokens: int,
    ) -> None:
        self._engine = engine
        self._sizes = batch_sizes
        self._new_tokens = new_tokens
        self._ready_s = run.elapsed_s()
        self._gives_vectors = engine.intake.limits.vectors is not None
        self._kv_tokens = engine.facts.num_kv_blocks * engine.config.block_size
        self._num_pipelines = run.role.spread.num_pipelines
        self._ids = random.Random(0)

    def time_all(self) -> Iterator[Row]:
        """Time every batch, smaller ones first, after a short one to warm up.

        After a batch that ran out of memory, larger ones are not tried: its ranks may be gone.
        """
        lengths = [0]
        if self._gives_vectors:
            most = self._engine.context_length
            lengths = [each for each in LENGTHS if each <= most] or [most]
        sizes = sorted(set(self._sizes))
        pairs = sorted(
            product(lengths, sizes), key=lambda each: (each[0] or 1) * each[1]
        )
        if self._needed_kv_tokens(1, 4) <= self._kv_tokens:
            self._answer(1, 8 * self._gives_vectors, 4)
        failed = ""
        for length, size in pairs:
            needed = self._needed_kv_tokens(size, self._new_tokens)
            no_room = partial(NoRoom, size, length, needed, self._kv_tokens)
            why = TOO_SMALL if needed > self._kv_tokens else failed
            try:
                yield no_room(why) if why else self._time(size, length)
            except OutOfMemoryError as error:
                failed = "a smaller batch ran out of memory"
                yield no_room(str(error))

    def _needed_kv_tokens(self, batch_size: int, new_tokens: int) -> int:
        """Return the KV tokens that so many rows need at once; 0 for vectors."""
        if self._gives_vectors:
            return 0
        prompt = self._engine.tokenizer.encode("Row 000:", with_offsets=False)
        block = self._engine.config.block_size
        return batch_size * -(-(len(prompt.ids) + new_tokens - 1) // block) * block

    def _time(self, batch_size: int, length: int) -> Figures:
        facts = self._engine.facts
        num_rows = batch_size * self._num_pipelines
        return Figures(
            batch_size=batch_size,
            length=length,
            num_rows=num_rows,
            num_tokens=num_rows * (length or self._new_tokens),
            seconds=self._answer(batch_size, length, self._new_tokens),
            ready_s=self._ready_s,
            dtype=facts.dtype,
            weight_dtype=facts.weight_dtype,
        )

    def _answer(self, batch_size: int, length: int, new_tokens: int) -> float:
        """Answer a batch of different rows on each pipeline; return the seconds it took."""
        numbers = range(batch_size * self._num_pipelines)
        if self._gives_vectors:
            size = self._engine.vocab_size
            rows = [
                {"input": [self._ids.randrange(size) for _ in range(length)]}
                for _ in numbers
            ]
        else:
            row: dict[str, Any] = {
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            rows = [row | {"prompt": f"Row {number:03}:"} for number in numbers]
        started = time.perf_counter()
        for record in self._engine.run(rows, read_ahead=len(rows)):
            if record.error is not None:
                raise FminferError(
                    f"a batch of {batch_size} failed: {record.error.message}"
                )
        return time.perf_counter() - started
