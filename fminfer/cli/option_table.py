"""The table of all options: the dataclasses that declare them, those of small commands here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fminfer.answers.cache_place import KeptAnswers
from fminfer.client.remote_options import RemoteOptions
from fminfer.cluster.resources import SubmitOptions
from fminfer.core.config import (
    ComputeOptions,
    GroupSizes,
    MemoryOptions,
    ModelOptions,
    Quantized,
    RankOptions,
    RequestOptions,
)
from fminfer.core.errors import UsageError
from fminfer.core.option import (
    Bytes,
    Command,
    Count,
    Folder,
    Option,
    Options,
    option,
    options_of,
)
from fminfer.files.own_files import PICTURE, require_own_file
from fminfer.files.tables.table_options import TableOptions
from fminfer.job.run_paths import JobOptions
from fminfer.job.synthetic import Hyperparameters
from fminfer.machine.stopper import ProcessOptions
from fminfer.pipeline.ranks import RankConfig
from fminfer.plan.roofs import PlanOptions
from fminfer.server.settings import ServerSettings

_check = partial(option, group="Check", commands=("check",))
_bench = partial(option, group="Bench", commands=("bench",))
_quantize = partial(option, group="Input and output", commands=("quantize",))


@dataclass(frozen=True)
class CheckOptions(Options):
    """How `fminfer check` plans, and what it prints."""

    device_bytes: Bytes | None = _check(
        "Plan for another machine: each rank has a GPU with this much memory (80G). "
        "With --device cpu, each rank has this much RAM.  [default: what is free here]",
        flags=("--device-memory",),
    )
    no_weights: bool = _check(
        "Check a folder without weight files. If it has their index, check the names "
        "of tensors by it."
    )
    is_json: bool = _check("Print one JSON object, with all errors.")
    is_all: bool = _check(
        "Print each wrong line by itself. With --plan, print all plans."
    )


@dataclass(frozen=True)
class BenchOptions(Options):
    """What `fminfer bench` times."""

    batch_sizes: tuple[int, ...] = _bench(
        "Batch sizes to time, smaller ones first: sequences that each pipeline runs at once.",
        default=(1, 8, 16, 32, 64, 128),
    )
    new_tokens: Count = _bench("Tokens to generate for each sequence.", default=100)
    plot: Path | None = _bench(
        "Draw the times and each rank's memory as an SVG picture.", metavar="FILE.svg"
    )
    calibrate: bool = _bench(
        "Instead, time steps of many shapes, and keep the times for the forecasts of "
        "fminfer check."
    )

    def check(self) -> None:
        """Raise for empty batches, and for a picture that could not be written at the end."""
        if min(self.batch_sizes, default=0) < 1:
            raise UsageError(
                f"--batch-sizes is {','.join(map(str, self.batch_sizes)) or 'empty'}; "
                "each must be 1 or more"
            )
        if self.plot is not None and self.plot.suffix != ".svg":
            raise UsageError(
                f"--plot is {self.plot}; the picture's name must end with .svg"
            )
        if self.plot is not None and not self.plot.parent.is_dir():
            raise UsageError(
                f"--plot is {self.plot}, and there is no folder {self.plot.parent}"
            )
        if self.plot is not None:
            require_own_file(self.plot, PICTURE, "--plot")


@dataclass(frozen=True)
class QuantizeOptions(Options):
    """What `fminfer quantize` writes."""

    output: Folder | None = _quantize(
        "The folder to write, new or empty. It is required."
    )
    to: Quantized = _quantize(
        "The format, as in fminfer run --quantize.",
        default="int8",
        flags=("--to", "--quantize"),
    )


# The flags that --help shows; --help-all shows the others, too.
COMMON: dict[str, tuple[str, ...]] = {
    "run": (
        "output",
        "prompts",
        "prompt_template",
        "choices",
        "report",
        "engine",
        "model",
        "quantize",
        "world_size",
        "dtype",
    ),
    "serve": (
        "model",
        "host",
        "port",
        "api_keys",
        "state",
        "engine",
        "quantize",
        "world_size",
        "dtype",
        "max_rows",
    ),
    "check": (
        "model",
        "prompt_template",
        "choices",
        "is_all",
        "is_json",
        "is_plan",
        "device_bytes",
        "quantize",
        "world_size",
        "dtype",
    ),
    "bench": (
        "model",
        "random_init",
        "batch_sizes",
        "new_tokens",
        "plot",
        "calibrate",
        "quantize",
        "world_size",
        "dtype",
        "threads",
    ),
    "submit": (
        "scheduler",
        "infer_data",
        "mode",
        "time_s",
        "queue",
        "gpus",
        "nodes",
        "directives",
        "max_running",
        "dry_run",
    ),
}
# In this order the help shows the options of a group.
TABLES: tuple[type[Options], ...] = (
    SubmitOptions,
    JobOptions,
    TableOptions,
    CheckOptions,
    PlanOptions,
    BenchOptions,
    KeptAnswers,
    RemoteOptions,
    ServerSettings,
    ProcessOptions,
    RequestOptions,
    QuantizeOptions,
    ModelOptions,
    GroupSizes,
    RankOptions,
    RankConfig,
    ComputeOptions,
    MemoryOptions,
    Hyperparameters,
)


def options_for(command: Command) -> Iterator[Option]:
    """Yield the options of a command."""
    for table in TABLES:
        for each in options_of(table, is_own=True).values():
            if command in each.commands:
                yield each
