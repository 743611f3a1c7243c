"""`fminfer bench`: what a token takes at several batch sizes, in the figures of the BLOOM scripts.

Those of huggingface/transformers-bloom-inference: greedy generation of 100 tokens a row from inputs
of a few. A model that gives vectors is timed by rows a second, at several lengths.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, UsageError
from fminfer.core.quantities import show_dtypes
from fminfer.runtime.engine_api import Engine

LENGTHS = (16, 64, 256, 512)  # of rows that become vectors


@dataclass(slots=True, frozen=True)
class BatchFigures:
    """What one batch size took."""

    batch_size: int
    num_tokens: int  # generated
    generate_s: float  # tokenizing included
    ready_s: float  # from the process's start until the model could be used
    host_bytes: int  # the most memory that the process has had so far
    gpu_bytes: int
    dtype: str  # of the arithmetic
    weight_dtype: str  # the format of most weights

    @property
    def ms_per_token(self) -> float:
        return self.generate_s / self.num_tokens * 1000

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ms_per_token": self.ms_per_token}

    def to_text(self) -> str:
        """Return the four figures in the scripts' own words."""
        return (
            "*** Performance stats:\n"
            f"Arithmetic and weights: {show_dtypes(self.dtype, self.weight_dtype)}\n"
            f"Throughput per token including tokenize: {self.ms_per_token:.2f} msecs\n"
            f"Start to ready to generate: {self.ready_s:.3f} secs\n"
            f"Tokenize and generate {self.num_tokens} (bs={self.batch_size}) tokens: "
            f"{self.generate_s:.3f} secs\n"
            f"Start to finish: {self.ready_s + self.generate_s:.3f} secs\n"
            f"Memory of the process: CPU {self.host_bytes / 2**30:.2f} GiB, "
            f"GPU {self.gpu_bytes / 2**30:.2f} GiB"
        )


@dataclass(slots=True, frozen=True)
class VectorFigures:
    """What a batch of prompts took that became vectors."""

    batch_size: int
    length: int  # tokens of a row
    rows_per_s: float
    ready_s: float  # from the process's start until the model could be used
    host_bytes: int
    gpu_bytes: int
    dtype: str
    weight_dtype: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        return (
            f"{self.batch_size:>6,} rows of {self.length:>5,} tokens: {self.rows_per_s:>10,.1f} "
            f"rows/s, {self.rows_per_s * self.length:>11,.0f} tokens/s"
        )


def show_table(rows: Sequence[BatchFigures | VectorFigures]) -> list[str]:
    """Return the figures as a table for people."""
    sizes = dict.fromkeys(row.batch_size for row in rows)
    lines = ["batch size        " + "".join(f"{size:>9}" for size in sizes)]
    tokens = [f"{row.ms_per_token:>9.2f}" for row in rows if isinstance(row, BatchFigures)]
    if tokens:
        lines.append("msecs a token     " + "".join(tokens))
    vectors = [row for row in rows if isinstance(row, VectorFigures)]
    for length in dict.fromkeys(row.length for row in vectors):
        cells = (f"{row.rows_per_s:>9,.1f}" for row in vectors if row.length == length)
        lines.append(f"{f'rows/s of {length:,}':<18}" + "".join(cells))
    return lines


def run_bench(
    config: EngineConfig,
    batch_sizes: Sequence[int],
    new_tokens: int,
    elapsed_s: Callable[[], float],
) -> Iterator[BatchFigures | VectorFigures]:
    """Load the model once and time one batch of each size, after a short one to warm up.

    Args:
        elapsed_s: seconds since the process started.

    Raises:
        UsageError: a batch cannot run at once.
        FminferError: the model cannot be loaded, or a row fails.
    """
    if min(batch_sizes, default=0) < 1 or new_tokens < 1:
        raise UsageError("batch sizes and --new-tokens must be 1 or more")
    if config.max_rows is not None and max(batch_sizes) > config.max_rows:
        raise UsageError(
            f"a batch of {max(batch_sizes)} does not run at once: --max-rows is {config.max_rows}"
        )
    engine = Engine(replace(config, max_rows=config.max_rows or max(batch_sizes)))
    try:
        ready_s = elapsed_s()
        if engine.intake.limits.vectors is not None:
            yield from _time_vectors(engine, batch_sizes, ready_s)
            return
        _check_room(engine, max(batch_sizes), new_tokens)
        _generate(engine, 1, 4)
        for batch_size in batch_sizes:
            generate_s = _generate(engine, batch_size, new_tokens)
            num_tokens = batch_size * new_tokens
            own = *_memory(engine.device), engine.facts.dtype, engine.facts.weight_dtype
            yield BatchFigures(batch_size, num_tokens, generate_s, ready_s, *own)
    finally:
        engine.close()


def _time_vectors(
    engine: Engine, batch_sizes: Sequence[int], ready_s: float
) -> Iterator[VectorFigures]:
    """Read batches of random ids of each length."""
    ids = random.Random(0)

    def read(batch_size: int, length: int) -> float:
        size = engine.vocab_size
        asked = [{"input": [ids.randrange(size) for _ in range(length)]} for _ in range(batch_size)]
        started = time.perf_counter()
        for record in engine.run(asked, batch_size):
            if record.error is not None:
                raise FminferError(f"a batch of {batch_size} failed: {record.error.message}")
        return time.perf_counter() - started

    read(2, 8)
    for length in (each for each in LENGTHS if each <= engine.context_length):
        for batch_size in batch_sizes:
            per_s = batch_size / read(batch_size, length)
            own = *_memory(engine.device), engine.facts.dtype, engine.facts.weight_dtype
            yield VectorFigures(batch_size, length, per_s, ready_s, *own)


def _check_room(engine: Engine, batch_size: int, new_tokens: int) -> None:
    """Refuse a batch whose rows could not all run at once."""
    prompt = engine.tokenizer.encode("Row 000:", with_offsets=False)
    size = engine.config.block_size
    each = -(-(len(prompt.ids) + new_tokens - 1) // size) * size
    if batch_size * each > engine.stats.num_kv_tokens:
        raise UsageError(
            f"a batch of {batch_size} takes a KV cache of {batch_size * each} tokens; there are "
            f"{engine.stats.num_kv_tokens}; raise --budget, or take smaller batches"
        )


def _generate(engine: Engine, batch_size: int, new_tokens: int) -> float:
    """Answer a batch of different short prompts; return the seconds."""
    row = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    rows = [row | {"prompt": f"Row {number:03}:"} for number in range(batch_size)]
    started = time.perf_counter()
    for record in engine.run(rows):
        if record.error is not None:
            raise FminferError(f"a batch of {batch_size} failed: {record.error.message}")
    return time.perf_counter() - started


def _memory(device: torch.device) -> tuple[int, int]:
    """Return the most memory that this process has had, in bytes: the host's, the GPU's."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return host, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
