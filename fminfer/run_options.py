"""The options of the commands, each with its help. Defaults come from the configs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, get_args

import click

from fminfer.config import DType, EngineConfig
from fminfer.ranks import RankConfig
from fminfer.stopping import parse_duration

DEFAULTS = EngineConfig()
RANK_DEFAULTS = RankConfig()


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not whole numbers with commas between them", param, ctx)


class PipelineMode(click.ParamType):  # type: ignore[type-arg]
    """The old tool's name for one of its schedules."""

    name = "pipe_…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).startswith("pipe_"):
            self.fail(f"{value!r} does not begin with pipe_", param, ctx)
        return str(value)


class DTypeName(click.Choice):  # type: ignore[type-arg]
    """A dtype, also in the short names that others give them."""

    SHORT: ClassVar = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

    def __init__(self) -> None:
        super().__init__(get_args(DType), case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(self.SHORT.get(str(value).lower(), value), param, ctx)


class PathOrUrl(click.Path):
    """A path, or a URL as it stands: a path would lose one of its slashes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_url = isinstance(value, str) and "://" in value
        return value if is_url else super().convert(value, param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or hours, minutes and seconds."""

    name = "H:MM:SS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return value if isinstance(value, float) else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ByteSize(click.ParamType):  # type: ignore[type-arg]
    """Bytes, with a letter for their unit."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", str(value), re.IGNORECASE)
        size = int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2].upper()))) if found else 0
        if size == 0:
            self.fail(
                f"{value!r} is no size; give a number and K, M, G or T, as in 80G", param, ctx
            )
        return size


INPUT = [
    click.option(
        "--infer-data",
        multiple=True,
        type=PathOrUrl(path_type=Path),
        help="A .jsonl or .json file of requests, also .gz or .zst; a folder of them (outputs of "
        "earlier runs left out); a URL of one or the other (s3://…); or - for stdin. May be "
        "repeated.",
    ),
]
FILES = [
    click.option(
        "--prompt",
        metavar="TEXT",
        help="Answer this text and print the answer, for a first try.",
    ),
    click.option(
        "--output",
        type=PathOrUrl(path_type=Path),
        help="A .jsonl file, a folder, a URL of one or the other, or - for stdout (errors then go "
        "to stderr).  [default: output_<name>.jsonl beside the input; stdout for stdin]",
    ),
    click.option(
        "--work-dir",
        type=click.Path(path_type=Path),
        help="Folder for local copies and the journal, if inputs or outputs are URLs.  "
        "[default: ~/.cache/fminfer/remote]",
    ),
    click.option(
        "--restart",
        is_flag=True,
        help="Answer all from the start; otherwise what earlier runs finished is kept.",
    ),
    click.option(
        "--watch",
        "is_watching",
        is_flag=True,
        help="Wait for more files in the folder when all are answered, until told to stop.",
    ),
    click.option(
        "--limit",
        type=int,
        help="Answer only the first N requests of each input; later, with a larger limit or none, "
        "the others.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=Duration(),
        default="10",
        show_default=True,
        help="How long running rows may go on once the run is told to stop. A second Ctrl-C ends "
        "it at once.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=Duration(),
        help="End within this time from the start: 3:50:00, 45m. Rows are told to end --grace "
        "and 5 s earlier.  [default: never]",
    ),
    click.option("--stats", type=click.Path(path_type=Path), help="Write the summary as JSON."),
    click.option(
        "-q", "--quiet", is_flag=True, help="Say nothing but errors, and why a kernel is not used."
    ),
    click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and library warnings."),
]
# Of a synthetic run; Hyperparameters has a field for each.
HYPERPARAMETERS = [
    click.option(
        "--overwrite-request-args",
        "is_overwriting",
        is_flag=True,
        help="With input: the hyperparameters that follow replace each line's own.",
    ),
    click.option(
        "--input-seq-length",
        type=click.IntRange(min=1),
        help="Without input: make prompts up, each of this many random tokens.  [default: 128]",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        help="Without input: made-up requests that run at once; --num-iters counts such batches, "
        "5 if left out.  [default: 8]",
    ),
    click.option(
        "--generate-seq-length",
        type=click.IntRange(min=1),
        help="max_tokens of made-up requests; no end token ends them earlier.  [default: 32]",
    ),
    click.option(
        "--temperature", type=float, help="Of made-up requests (0 if left out), or of --prompt."
    ),
    click.option("--top-p", type=float, help="Of made-up requests, or of --prompt."),
    click.option("--top-k", type=int, help="Of made-up requests, or of --prompt."),
    click.option("--num-completions", type=int, help="Of made-up requests, or of --prompt: n."),
    click.option(
        "--best-of",
        type=int,
        help="Of made-up requests, or of --prompt: candidates, of which the best n are given.",
    ),
    click.option(
        "--stop", multiple=True, help="Of made-up requests, or of --prompt. May be repeated."
    ),
    click.option("--echo-prompt", is_flag=True, help="Of made-up requests, or of --prompt: echo."),
    click.option(
        "--top-k-per-token", type=int, help="Of made-up requests, or of --prompt: logprobs."
    ),
]
MODEL = [
    click.option(
        "--model-name",
        "--model",
        "model",
        help="A local folder or hub id.  [default: the demo model of the package]",
    ),
    click.option("--model-type", help="Checked against the model's config (opt, bloom, gptj, …)."),
    click.option(
        "--random-init",
        metavar="CONFIG_OR_SIZE",
        help="Random weights, for benches, in the shape of a config.json, a hub id's, or a known "
        "size (llama-160m, bloom-176b, …).",
    ),
    click.option(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="A tokenizer from elsewhere: a local folder or hub id.  [default: the model's own]",
    ),
    click.option(
        "--model-config",
        metavar="CONFIG_OR_SIZE",
        help="A config from elsewhere: a config.json, its folder, a hub id or a known size.  "
        "[default: the model's own]",
    ),
    click.option(
        "--revision",
        help="Of a model of the hub: a branch, tag or commit.  [default: its main branch]",
    ),
    click.option(
        "--dtype",
        type=DTypeName(),
        default=DEFAULTS.dtype,
        show_default=True,
        help="Of the arithmetic. auto: bfloat16 where the machine is fast in it. In float32 on a "
        "CPU, weights that are stored in bfloat16 stay so in memory, but for --attention eager.",
    ),
    click.option("--fp16", is_flag=True, help="The same as --dtype float16."),
    click.option(
        "--kv-dtype",
        type=DTypeName(),
        default=DEFAULTS.kv_dtype,
        show_default=True,
        help="Of the KV cache. auto: as --dtype. 16 bits beside float32 take half the memory. They "
        "round keys and values, and answers repeat only as they do in 16 bits.",
    ),
    click.option(
        "--device", default=DEFAULTS.device, show_default=True, help="auto, cpu, cuda, cuda:0, …"
    ),
    click.option(
        "--attention",
        type=click.Choice(["auto", "eager", "compiled"]),
        default=DEFAULTS.attention,
        show_default=True,
        help="compiled: own kernels, built once by g++ for a CPU, by Triton for a GPU. eager: "
        "plain torch. auto: compiled where that works, else eager.",
    ),
]
ENGINE = [
    click.option(
        "--budget",
        type=int,
        help="Tokens of KV cache for all rows that run at once, prompt and max_tokens counted, "
        "rounded up to blocks of 32.  "
        "[default: what fits in half of the free RAM, or in a GPU beside weights, a step's work "
        "and 1.5 GiB]",
    ),
    click.option(
        "--chunk-size",
        type=int,
        help="Most tokens of one step.  [default: 512; on a GPU 4096, divided among the ranks of a "
        "pipeline]",
    ),
    click.option(
        "--max-rows",
        type=int,
        help="Most sequences that run at once.  [default: 256; on a GPU 1024]",
    ),
    click.option(
        "--threads",
        type=int,
        help="Threads that compute, in each rank.  [default: OMP_NUM_THREADS, or the cores that "
        "this process may use, shared by the ranks of the machine]",
    ),
    click.option(
        "--micro-batches",
        type=int,
        default=DEFAULTS.micro_batches,
        help="Steps in flight.  [default: one more than there are ranks]",
    ),
    click.option(
        "--seed",
        type=int,
        default=DEFAULTS.seed,
        show_default=True,
        help="For requests without a seed of their own.",
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=DEFAULTS.prefix_cache,
        show_default=True,
        help="Compute once the prefixes that prompts share, and equal greedy requests.",
    ),
]
CONTRACT = [
    click.option(
        "--max-model-len",
        type=int,
        help="Most tokens of a prompt and its completion together.  [default: the model's context]",
    ),
    click.option(
        "--max-logprobs",
        type=int,
        default=DEFAULTS.max_logprobs,
        show_default=True,
        help="Largest logprobs that a request may ask for.",
    ),
    click.option(
        "--on-too-long",
        type=click.Choice(["error", "truncate-left", "truncate-right"]),
        default=DEFAULTS.on_too_long,
        show_default=True,
        help="What to do with a prompt that leaves no room for max_tokens: refuse it, or cut its "
        "left or right end, with a warning.",
    ),
    click.option(
        "--token-format",
        type=click.Choice(["auto", "vocab", "text"]),
        default=DEFAULTS.token_format,
        show_default=True,
        help="Spelling of logprobs.tokens: vocabulary pieces, or text. auto: text for Batch lines.",
    ),
    click.option(
        "--skip-tokenizer-init",
        is_flag=True,
        default=DEFAULTS.skip_tokenizer_init,
        help="Load no tokenizer: prompts must be token ids, and so are answers.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        default=DEFAULTS.strict,
        help="Refuse lines with unknown parameters, best_of below n and the like; otherwise they "
        "are answered with a warning.",
    ),
    click.option(
        "--check-model",
        is_flag=True,
        default=DEFAULTS.check_model,
        help="Refuse lines whose model or engine is neither --model-name nor its last part.",
    ),
]
SPLIT = [
    click.option(
        "--world-size",
        type=int,
        help="Ranks: processes that share the model's layers.  [default: 1]",
    ),
    click.option(
        "--num-layers",
        type=int,
        help="Layers of each rank; the last one may have fewer.  [default: balanced by cost]",
    ),
    click.option("--max-layers", type=int, help="Use only the model's first N layers."),
    click.option("--stage-layers", type=Numbers(), help="Layers of each rank: 9,9,8."),
]
GROUPS = [
    click.option(
        "--pipeline-group-size",
        type=int,
        help="Stages of the pipeline.  [default: the world's size]",
    ),
    click.option(
        "--data-group-size",
        type=int,
        default=RANK_DEFAULTS.data_group_size,
        show_default=True,
        help="Pipelines, each with the whole model, that share one input as they get free.",
    ),
]
RANKS = [
    click.option("--rank", type=int, help="Be one rank; the others are started apart."),
    click.option(
        "--dist-url",
        metavar="tcp://HOST:PORT",
        help="Where rank 0 listens for ranks that are started apart.",
    ),
    click.option(
        "--rendezvous",
        metavar="HOST:PORT|FOLDER",
        help="Where ranks that are started apart, in any order, find each other; without --rank "
        "they are counted as they come.",
    ),
    click.option(
        "--cuda-id",
        "cuda_ids",
        type=Numbers(),
        default=(),
        help="The GPUs of this machine's ranks, in their order: 0,1,2.  [default: all]",
    ),
    click.option(
        "--join-timeout",
        "join_timeout_s",
        type=float,
        default=RANK_DEFAULTS.join_timeout_s,
        show_default=True,
        help="Seconds that a rank may take to come.",
    ),
    click.option(
        "--rank-timeout",
        "rank_timeout_s",
        type=float,
        default=RANK_DEFAULTS.rank_timeout_s,
        show_default=True,
        help="Seconds that a rank may be silent before the run ends.",
    ),
    click.option(
        "--trace",
        type=click.Path(path_type=Path),
        help="Write what each rank did when, for ui.perfetto.dev.",
    ),
    click.option(
        "--pp-mode",
        type=PipelineMode(),
        help="For old command lines: any name that begins with pipe_. There is one schedule.",
    ),
    click.option(
        "--num-iters",
        "max_steps",
        type=int,
        help="Stop after this many micro-batches, with exit status 1 if rows are left.  "
        "[default: no limit]",
    ),
]


BENCH = [
    click.option(
        "--batch-sizes",
        type=Numbers(),
        default=(1, 8, 16, 32, 64, 128),
        help="Rows at once, one batch after another.  [default: 1,8,16,32,64,128]",
    ),
    click.option(
        "--new-tokens", default=100, show_default=True, help="Tokens to generate for each row."
    ),
    click.option(
        "--calibrate",
        "is_calibration",
        is_flag=True,
        help="Instead, time steps of many shapes, and keep their costs for fminfer check.",
    ),
]


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `fminfer run`."""
    return _with(
        INPUT + FILES + MODEL + ENGINE + SPLIT + GROUPS + RANKS + CONTRACT + HYPERPARAMETERS,
        command,
    )


def check_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command those options of `fminfer run` that decide what a run meets and takes."""
    return _with(INPUT + MODEL + ENGINE + SPLIT + GROUPS + CONTRACT, command)


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `fminfer bench`."""
    return _with(BENCH + MODEL + ENGINE, command)


def dtype_name(fp16: bool, dtype: str) -> str:
    """Return the dtype that --fp16 and --dtype ask for together."""
    if fp16 and dtype not in ("auto", "float16"):
        raise click.UsageError(f"--fp16 and --dtype {dtype} contradict each other")
    return "float16" if fp16 else dtype


def _with(options: list[Any], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
