"""Which options each command has: `fminfer run` and `serve`, and what others share with them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from fminfer.cli.options.model_options import (
    LAYOUT_OPTIONS,
    MODEL_OPTIONS,
    RANK_OPTIONS,
    RESULT_CACHE_OPTIONS,
    SERVED_CACHE_OPTIONS,
)
from fminfer.cli.options.old_options import OLD_MODEL_OPTIONS, OLD_RUN_OPTIONS, KernelsOption
from fminfer.cli.options.old_serve_options import OLD_SERVE_OPTIONS
from fminfer.cli.options.option_groups import (
    BENCH,
    CHECK,
    CONFIG,
    INPUT_OUTPUT,
    SPEED,
    in_group,
    with_options,
)
from fminfer.cli.options.request_options import (
    CHECK_MODEL_OPTION,
    MADE_UP_OPTIONS,
    REQUEST_OPTIONS,
    SEED_OPTION,
)
from fminfer.cli.options.serve_options import SERVED_REQUEST_OPTIONS, SERVER_OPTIONS
from fminfer.cli.options.value_types import ByteSize, DTypeName, Duration, Numbers, PathOrUrl
from fminfer.contract.request import RAW_TOKENS
from fminfer.core.config import EngineConfig, Kernels

_file_option = in_group(INPUT_OUTPUT)

INPUT_OPTIONS = [
    _file_option(
        "--infer-data",
        multiple=True,
        type=PathOrUrl(path_type=Path),
        help="A .jsonl, .ndjson or .json file of requests, also .gz or .zst; a folder of them "
        "(outputs of earlier runs left out); a URL of one or the other (s3://…); or - for stdin. "
        "May be repeated.",
    ),
]
OUTPUT_OPTIONS = [
    _file_option(
        "--prompt",
        metavar="TEXT",
        help="Answer this text and print the answer, for a first try: as the user's message of a "
        "chat, if the model has a chat template. Without --temperature the likeliest tokens are "
        "taken, at most 1,024 of a chat and 256 of a completion (--generate-seq-length).",
    ),
    _file_option(
        "--raw",
        "is_raw",
        is_flag=True,
        help="Have the model go on with --prompt as plain text, as completions do; at most "
        f"{RAW_TOKENS} tokens, or --generate-seq-length.",
    ),
    _file_option(
        "--output",
        type=PathOrUrl(path_type=Path),
        help="A .jsonl file, a folder (made if only it is missing), a URL of one or the other, or "
        "- for stdout (errors then go to stderr).  [default: output_<name>.jsonl beside the input; "
        "stdout for stdin]",
    ),
    _file_option(
        "--work-dir",
        type=click.Path(path_type=Path),
        help="Folder for local copies and the journal, if inputs or outputs are URLs.  "
        "[default: ~/.cache/fminfer/remote]",
    ),
    _file_option(
        "--restart",
        is_flag=True,
        help="Answer every line from the start. Otherwise a run keeps what earlier runs "
        "finished, if its lines are still in the input.",
    ),
    _file_option(
        "--watch",
        "is_watching",
        is_flag=True,
        help="When all files of the folder are answered, wait for more, until told to stop.",
    ),
    _file_option(
        "--limit",
        type=int,
        help="Answer only the first N requests of each input. The same command with a larger limit "
        "or none answers the others.",
    ),
    _file_option(
        "--grace",
        "grace_s",
        type=Duration(),
        default="10",
        show_default=True,
        help="Time that running rows have to end once the run is told to stop. A second Ctrl-C "
        "ends the run at once.",
    ),
    _file_option(
        "--deadline",
        "deadline_s",
        type=Duration(),
        help="End within this time from the start: 3:50:00, 45m. No rows begin in its last "
        "--grace and 5 s.  [default: never]",
    ),
    _file_option("--stats", type=click.Path(path_type=Path), help="Write the summary as JSON."),
    _file_option(
        "--report",
        "report_file",
        type=click.Path(path_type=Path),
        help="Write an HTML page about the answers when the run ends, as fminfer report does.",
    ),
    _file_option(
        "--trace",
        type=click.Path(path_type=Path),
        help="Write a timeline of each rank, for ui.perfetto.dev.",
    ),
    _file_option("-q", "--quiet", is_flag=True, help="Print errors, and why a kernel is not used."),
    _file_option("-v", "--verbose", is_flag=True, help="Show tracebacks and library warnings."),
]


DEFAULTS = EngineConfig()
ON_CPU, ON_GPU = DEFAULTS.step_sizes("cpu", 1), DEFAULTS.step_sizes("cuda", 1)
_speed_option = in_group(SPEED)

SPEED_OPTIONS = [
    _speed_option(
        "--dtype",
        type=DTypeName(),
        default=DEFAULTS.dtype,
        show_default=True,
        help="Type of the arithmetic. auto: bfloat16 where the machine is fast in it; on a GPU, "
        "float16 checkpoints stay float16. With float32 on a CPU, weights that are stored in "
        "bfloat16 stay bfloat16 in memory, unless --kernels off is set.",
    ),
    _speed_option(
        "--kv-dtype",
        type=DTypeName(),
        default=DEFAULTS.kv_dtype,
        show_default=True,
        help="Type of the KV cache. auto: as --dtype. 16 bits beside float32 take half the memory, "
        "and round keys and values. Answers then repeat only as well as in 16 bits.",
    ),
    _speed_option(
        "--device", default=DEFAULTS.device, show_default=True, help="auto, cpu, cuda, cuda:0, …"
    ),
    _speed_option(
        "--kernels",
        cls=KernelsOption,
        type=click.Choice(get_args(Kernels)),
        default=DEFAULTS.kernels,
        show_default=True,
        help="Use of fminfer's own kernels, which g++ builds for a CPU, and Triton for a GPU. "
        "auto: where they serve the model and pass their trial, plain torch elsewhere. off: plain "
        "torch. require: fail, with the reason, where auto would fall back.",
    ),
    _speed_option(
        "--threads",
        type=int,
        help="Number of computing threads in each rank.  [default: OMP_NUM_THREADS, or the cores "
        "that this process may use, shared by the ranks of the machine]",
    ),
    _speed_option(
        "--budget",
        type=int,
        help="Size of the KV cache in tokens (prompts and new tokens of all rows that run at "
        f"once), rounded up to blocks of {DEFAULTS.block_size}.  [default: what fits in half of "
        "the free RAM, or in a GPU beside weights, a step's work and 1.5 GiB]",
    ),
    _speed_option(
        "--chunk-size",
        type=int,
        help=f"Most tokens of one step.  [default: {ON_CPU.chunk_size}; on a GPU "
        f"{ON_GPU.chunk_size}, divided among the ranks of a pipeline]",
    ),
    _speed_option(
        "--max-rows",
        type=int,
        help="Most sequences that run at once.  "
        f"[default: {ON_CPU.max_rows}; on a GPU {ON_GPU.max_rows}]",
    ),
    _speed_option(
        "--micro-batches",
        type=int,
        help="Steps in flight.  [default: one more than there are ranks]",
    ),
    _speed_option(
        "--prefix-cache/--no-prefix-cache",
        default=DEFAULTS.prefix_cache,
        show_default=True,
        help="Compute once the prefixes that prompts share, and equal greedy requests.",
    ),
]


MAX_TOLD = 20  # wrong lines that `fminfer check` prints, unless all are asked for
_check_option, _bench_option = in_group(CHECK), in_group(BENCH)

ENGINE_OPTIONS = [*MODEL_OPTIONS, *SPEED_OPTIONS, *OLD_MODEL_OPTIONS]
CHECK_OPTIONS = [
    _check_option(
        "--device-memory",
        "device_bytes",
        type=ByteSize(),
        help="Plan for another machine: each rank has a GPU with this much memory (80G). With "
        "--device cpu, each rank has this much RAM.  [default: what is free here]",
    ),
    _check_option(
        "--no-weights",
        is_flag=True,
        help="Need no weights: the folder may hold only the small files. If there is an index, "
        "check the names of tensors by it.",
    ),
    _check_option(
        "--json", "is_json", is_flag=True, help="Print one JSON object, all errors in it."
    ),
    _check_option(
        "--all", "is_all", is_flag=True, help=f"Print all errors, not the first {MAX_TOLD}."
    ),
]
BENCH_OPTIONS = [
    _bench_option(
        "--batch-sizes",
        type=Numbers(),
        default=(1, 8, 16, 32, 64, 128),
        help="Rows at once, one batch after another.  [default: 1,8,16,32,64,128]",
    ),
    _bench_option(
        "--new-tokens", default=100, show_default=True, help="Tokens to generate for each row."
    ),
    _bench_option(
        "--calibrate",
        "is_calibration",
        is_flag=True,
        help="Instead, time steps of many shapes, and keep their costs for fminfer check.",
    ),
]

CONFIG_OPTION = in_group(CONFIG)(
    "--config",
    metavar="FILE",
    expose_value=False,  # `ConfiguredCommand` reads it
    help="A TOML file of flags by their names, as in: port = 8000. Tables [run] and [serve] are of "
    "one command; check and bench take those of run. FMINFER_PORT and so on go before the file, "
    "and the command line goes before both. Paths in it are relative to the working directory.",
)

RUN_OPTIONS = [
    *(*INPUT_OPTIONS, *OUTPUT_OPTIONS, *RESULT_CACHE_OPTIONS, *REQUEST_OPTIONS, *ENGINE_OPTIONS),
    *(*LAYOUT_OPTIONS, *RANK_OPTIONS, *MADE_UP_OPTIONS, CONFIG_OPTION, *OLD_RUN_OPTIONS),
]
_OF_RUN = (SEED_OPTION, CHECK_MODEL_OPTION)
SERVE_OPTIONS = [
    *(*SERVER_OPTIONS, *RESULT_CACHE_OPTIONS, *SERVED_CACHE_OPTIONS, *SERVED_REQUEST_OPTIONS),
    *[option for option in REQUEST_OPTIONS if option not in _OF_RUN],
    *(*ENGINE_OPTIONS, *LAYOUT_OPTIONS, *RANK_OPTIONS, CONFIG_OPTION, *OLD_SERVE_OPTIONS),
]
run_options, serve_options = with_options(RUN_OPTIONS), with_options(SERVE_OPTIONS)
# Those options of `fminfer run` that decide what a run meets and takes, and the check's own.
check_options = with_options(
    [
        *(*INPUT_OPTIONS, *CHECK_OPTIONS, *REQUEST_OPTIONS, *ENGINE_OPTIONS, *LAYOUT_OPTIONS),
        CONFIG_OPTION,
    ]
)
bench_options = with_options([*BENCH_OPTIONS, SEED_OPTION, *ENGINE_OPTIONS, CONFIG_OPTION])


def dtype_name(fp16: bool, dtype: str) -> str:
    """Return the dtype that --fp16 and --dtype ask for together."""
    if fp16 and dtype not in ("auto", "float16"):
        raise click.UsageError(f"--fp16 and --dtype {dtype} contradict each other")
    return "float16" if fp16 else dtype
