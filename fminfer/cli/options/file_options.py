"""Options of input and output: what is read, where answers go, and when a run ends."""

from __future__ import annotations

from pathlib import Path

import click

from fminfer.cli.options.option_groups import INPUT_OUTPUT, in_group
from fminfer.cli.options.value_types import Duration, PathOrUrl
from fminfer.contract.request import RAW_TOKENS

_option = in_group(INPUT_OUTPUT)

INPUT_OPTIONS = [
    _option(
        "--infer-data",
        multiple=True,
        type=PathOrUrl(path_type=Path),
        help="A .jsonl, .ndjson or .json file of requests, also .gz or .zst; a folder of them "
        "(outputs of earlier runs left out); a URL of one or the other (s3://…); or - for stdin. "
        "May be repeated.",
    ),
]
OUTPUT_OPTIONS = [
    _option(
        "--prompt",
        metavar="TEXT",
        help="Answer this text and print the answer, for a first try: as the user's message of a "
        "chat, if the model has a chat template. Without --temperature the likeliest tokens are "
        "taken, at most 1,024 of a chat and 256 of a completion (--generate-seq-length).",
    ),
    _option(
        "--raw",
        "is_raw",
        is_flag=True,
        help="Have the model go on with --prompt as plain text, as completions do; at most "
        f"{RAW_TOKENS} tokens, or --generate-seq-length.",
    ),
    _option(
        "--output",
        type=PathOrUrl(path_type=Path),
        help="A .jsonl file, a folder (made if only it is missing), a URL of one or the other, or "
        "- for stdout (errors then go to stderr).  [default: output_<name>.jsonl beside the input; "
        "stdout for stdin]",
    ),
    _option(
        "--work-dir",
        type=click.Path(path_type=Path),
        help="Folder for local copies and the journal, if inputs or outputs are URLs.  "
        "[default: ~/.cache/fminfer/remote]",
    ),
    _option(
        "--restart",
        is_flag=True,
        help="Answer every line from the start. Otherwise a run keeps what earlier runs "
        "finished, if its lines are still in the input.",
    ),
    _option(
        "--watch",
        "is_watching",
        is_flag=True,
        help="When all files of the folder are answered, wait for more, until told to stop.",
    ),
    _option(
        "--limit",
        type=int,
        help="Answer only the first N requests of each input. The same command with a larger limit "
        "or none answers the others.",
    ),
    _option(
        "--grace",
        "grace_s",
        type=Duration(),
        default="10",
        show_default=True,
        help="Time that running rows have to end once the run is told to stop. A second Ctrl-C "
        "ends the run at once.",
    ),
    _option(
        "--deadline",
        "deadline_s",
        type=Duration(),
        help="End within this time from the start: 3:50:00, 45m. No rows begin in its last "
        "--grace and 5 s.  [default: never]",
    ),
    _option("--stats", type=click.Path(path_type=Path), help="Write the summary as JSON."),
    _option(
        "--report",
        "report_file",
        type=click.Path(path_type=Path),
        help="Write an HTML page about the answers when the run ends, as fminfer report does.",
    ),
    _option(
        "--trace",
        type=click.Path(path_type=Path),
        help="Write a timeline of each rank, for ui.perfetto.dev.",
    ),
    _option("-q", "--quiet", is_flag=True, help="Print only errors, and why a kernel is not used."),
    _option("-v", "--verbose", is_flag=True, help="Show tracebacks and library warnings."),
]
