"""The command line: flags in, exit status out. Heavy imports wait until a run needs them."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import click

from fminfer import __version__
from fminfer.config import EngineConfig
from fminfer.errors import FminferError, UsageError
from fminfer.input.lines import find_inputs

STARTED_S = time.perf_counter()
EXIT_FAILED, EXIT_USAGE, EXIT_SOME_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130
DEFAULTS = EngineConfig()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fminfer")
def main() -> None:
    """Answer files of OpenAI-completions requests with a language model, offline.

    \b
    fminfer run requests.jsonl                      answers in output_requests.jsonl
    fminfer run --help                              everything that a run can be told
    """


@main.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--infer-data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A .jsonl or .json file of requests, also .gz or .zst; a folder of them (outputs of "
    "earlier runs left out); or - for stdin. May be repeated.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A .jsonl file, a folder, or - for stdout (errors then go to stderr).  "
    "[default: output_<name>.jsonl beside the input; stdout for stdin]",
)
@click.option(
    "--model-name",
    "--model",
    "model",
    help="A local folder or hub id.  [default: the demo model of the package]",
)
@click.option("--model-type", help="Checked against the model's config (opt, bloom, gptj, …).")
@click.option(
    "--random-init",
    metavar="CONFIG_OR_SIZE",
    help="Random weights of a config.json or a known size (llama-160m, …), for benches.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default=DEFAULTS.dtype,
    show_default=True,
    help="auto: bfloat16 where the machine is fast in it.",
)
@click.option("--fp16", is_flag=True, help="The same as --dtype float16.")
@click.option("--device", default=DEFAULTS.device, show_default=True, help="auto, cpu, cuda:0, …")
@click.option(
    "--budget",
    type=int,
    help="Tokens of KV cache for all rows that run at once, prompt and max_tokens counted, "
    "rounded up to blocks of 32.  "
    "[default: half of the free memory]",
)
@click.option(
    "--chunk-size",
    type=int,
    default=DEFAULTS.chunk_size,
    show_default=True,
    help="Most tokens of one step.",
)
@click.option(
    "--max-rows",
    type=int,
    default=DEFAULTS.max_rows,
    show_default=True,
    help="Most sequences that run at once.",
)
@click.option(
    "--micro-batches",
    type=int,
    default=DEFAULTS.micro_batches,
    show_default=True,
    help="Steps in flight.",
)
@click.option(
    "--attention",
    type=click.Choice(["auto", "eager", "compiled"]),
    default=DEFAULTS.attention,
    show_default=True,
    help="Decode attention on the CPU; auto compiles it once a job is long enough.",
)
@click.option(
    "--seed",
    type=int,
    default=DEFAULTS.seed,
    show_default=True,
    help="For requests without a seed of their own.",
)
@click.option(
    "--max-logprobs",
    type=int,
    default=DEFAULTS.max_logprobs,
    show_default=True,
    help="Largest logprobs that a request may ask for.",
)
@click.option(
    "--on-too-long",
    type=click.Choice(["error", "truncate-left", "truncate-right"]),
    default=DEFAULTS.on_too_long,
    show_default=True,
    help="What becomes of a prompt that leaves no room for max_tokens; cuts are told.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=DEFAULTS.prefix_cache,
    show_default=True,
    help="Compute a prefix that prompts share only once.",
)
@click.option(
    "--token-format",
    type=click.Choice(["auto", "vocab", "text"]),
    default=DEFAULTS.token_format,
    show_default=True,
    help="Spelling of logprobs.tokens: vocabulary pieces, or text. auto: text for Batch lines.",
)
@click.option(
    "--strict",
    is_flag=True,
    default=DEFAULTS.strict,
    help="Unknown parameters, best_of below n and the like are errors of their line.",
)
@click.option(
    "--check-model",
    is_flag=True,
    default=DEFAULTS.check_model,
    help="A line whose model or engine is not --model-name, or its last part, is an error.",
)
@click.option("--restart", is_flag=True, help="Answer again what is already answered.")
@click.option("--stats", type=click.Path(path_type=Path), help="Write the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and library warnings.")
def run(
    paths: tuple[Path, ...],
    infer_data: tuple[Path, ...],
    output: Path | None,
    fp16: bool,
    restart: bool,
    stats: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Answer every line of the given files.

    \b
    fminfer run requests.jsonl
    fminfer run --infer-data shards/ --model-name /models/llama --output answers/
    fminfer run requests.jsonl --random-init llama-160m --stats stats.json
    zstdcat requests.jsonl.zst | fminfer run -q - > answers.jsonl 2> errors.jsonl

    Each line is one request, {"request": {…}, …} or an OpenAI Batch line, and is answered in its
    own shape, in the order of the input. A line that cannot be answered stands in
    <output>.errors.jsonl with what is wrong and what to do, and costs no other line. The output's
    name appears when it is complete; <output>.status.json says how far it is.

    \b
    Exit status: 0 every line answered; 1 the run failed; 2 wrong usage;
    3 finished, some lines are in the errors file; 130 interrupted.
    """
    if fp16:
        if options["dtype"] not in ("auto", "float16"):
            raise click.UsageError(f"--fp16 and --dtype {options['dtype']} contradict each other")
        options["dtype"] = "float16"
    try:
        config = EngineConfig(**options)
        inputs = find_inputs([*infer_data, *paths])
        if not inputs:
            raise UsageError("no input; give a .jsonl file, as in: fminfer run requests.jsonl")
        status = _run(config, inputs, output, restart, stats, quiet, verbose)
    except UsageError as error:
        _fail(error, EXIT_USAGE, verbose)
    except FminferError as error:
        _fail(error, EXIT_FAILED, verbose)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # quiet at exit, too
        _fail(FminferError("whoever read the answers stopped reading"), EXIT_FAILED, verbose)
    except KeyboardInterrupt:
        click.echo("Interrupted. Finished rows are in the .partial files.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        _fail(error, EXIT_FAILED, verbose=True)
    sys.exit(status)


def _run(
    config: EngineConfig,
    inputs: list[Path],
    output: Path | None,
    restart: bool,
    stats: Path | None,
    is_quiet: bool,
    is_verbose: bool,
) -> int:
    from dataclasses import asdict

    import transformers

    from fminfer.job import run_job
    from fminfer.output.places import plan_outputs
    from fminfer.output.progress import LoadingBar
    from fminfer.worker import Engine

    if not is_verbose:
        transformers.logging.set_verbosity_error()
    outputs = plan_outputs(inputs, output, restart=restart)
    if stats is not None and not stats.parent.is_dir():
        raise UsageError(f"--stats {stats}: there is no folder {stats.parent}")
    if config.model is None and config.random_init is None and not is_quiet:
        click.echo(
            "Using the demo model, which knows only the way between rooms; "
            "--model-name gives another.",
            err=True,
        )
    loading = LoadingBar(is_quiet=is_quiet)
    engine = Engine(on_progress=loading, **asdict(config))
    loading.close()
    ready_s = time.perf_counter() - STARTED_S
    try:
        summary = run_job(engine, inputs, outputs, start_to_ready_s=ready_s, is_quiet=is_quiet)
    finally:
        engine.close()
    if stats is not None:
        stats.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    if not is_quiet:
        click.echo(summary.to_text(), err=True)
    return EXIT_SOME_ERRORS if summary.num_errors else 0


def _fail(error: Exception, status: int, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error)
    click.echo(f"Error: {error}", err=True)
    sys.exit(status)
