"""Options of speed and memory: dtypes, device, kernels, and how much is computed at once."""

from __future__ import annotations

from typing import get_args

import click

from fminfer.cli.options.old_options import KernelsOption
from fminfer.cli.options.option_groups import SPEED, in_group
from fminfer.cli.options.value_types import DTypeName
from fminfer.core.config import EngineConfig, Kernels

DEFAULTS = EngineConfig()
ON_CPU, ON_GPU = DEFAULTS.step_sizes("cpu", 1), DEFAULTS.step_sizes("cuda", 1)
_option = in_group(SPEED)

SPEED_OPTIONS = [
    _option(
        "--dtype",
        type=DTypeName(),
        default=DEFAULTS.dtype,
        show_default=True,
        help="Type of the arithmetic. auto: bfloat16 where the machine is fast in it; on a GPU, "
        "float16 checkpoints stay float16. With float32 on a CPU, weights that are stored in "
        "bfloat16 stay bfloat16 in memory, unless --kernels off is set.",
    ),
    _option(
        "--kv-dtype",
        type=DTypeName(),
        default=DEFAULTS.kv_dtype,
        show_default=True,
        help="Type of the KV cache. auto: as --dtype. 16 bits beside float32 take half the memory, "
        "and round keys and values. Answers then repeat only as well as in 16 bits.",
    ),
    _option(
        "--device", default=DEFAULTS.device, show_default=True, help="auto, cpu, cuda, cuda:0, …"
    ),
    _option(
        "--kernels",
        cls=KernelsOption,
        type=click.Choice(get_args(Kernels)),
        default=DEFAULTS.kernels,
        show_default=True,
        help="Use of fminfer's own kernels, which g++ builds for a CPU, and Triton for a GPU. "
        "auto: where they serve the model and pass their trial, plain torch elsewhere. off: plain "
        "torch. require: fail, with the reason, where auto would fall back.",
    ),
    _option(
        "--threads",
        type=int,
        help="Number of computing threads in each rank.  [default: OMP_NUM_THREADS, or the cores "
        "that this process may use, shared by the ranks of the machine]",
    ),
    _option(
        "--budget",
        type=int,
        help="Size of the KV cache in tokens (prompts and new tokens of all rows that run at "
        f"once), rounded up to blocks of {DEFAULTS.block_size}.  [default: what fits in half of "
        "the free RAM, or in a GPU beside weights, a step's work and 1.5 GiB]",
    ),
    _option(
        "--chunk-size",
        type=int,
        help=f"Most tokens of one step.  [default: {ON_CPU.chunk_size}; on a GPU "
        f"{ON_GPU.chunk_size}, divided among the ranks of a pipeline]",
    ),
    _option(
        "--max-rows",
        type=int,
        help="Most sequences that run at once.  "
        f"[default: {ON_CPU.max_rows}; on a GPU {ON_GPU.max_rows}]",
    ),
    _option(
        "--micro-batches",
        type=int,
        help="Steps in flight.  [default: one more than there are ranks]",
    ),
    _option(
        "--prefix-cache/--no-prefix-cache",
        default=DEFAULTS.prefix_cache,
        show_default=True,
        help="Compute once the prefixes that prompts share, and equal greedy requests.",
    ),
]
