"""Which options each command has: `fminfer run` and `serve`, and what others share with them."""

from __future__ import annotations

import click

from fminfer.cli.options.file_options import INPUT_OPTIONS, OUTPUT_OPTIONS
from fminfer.cli.options.model_options import (
    LAYOUT_OPTIONS,
    MODEL_OPTIONS,
    RANK_OPTIONS,
    RESULT_CACHE_OPTIONS,
    SERVED_CACHE_OPTIONS,
)
from fminfer.cli.options.old_options import OLD_MODEL_OPTIONS, OLD_RUN_OPTIONS
from fminfer.cli.options.old_serve_options import OLD_SERVE_OPTIONS
from fminfer.cli.options.option_groups import BENCH, CHECK, CONFIG, in_group, with_options
from fminfer.cli.options.request_options import (
    CHECK_MODEL_OPTION,
    MADE_UP_OPTIONS,
    REQUEST_OPTIONS,
    SEED_OPTION,
)
from fminfer.cli.options.serve_options import SERVED_REQUEST_OPTIONS, SERVER_OPTIONS
from fminfer.cli.options.speed_options import SPEED_OPTIONS
from fminfer.cli.options.value_types import ByteSize, Numbers

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
