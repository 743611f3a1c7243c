"""What a run reads and writes, as the command line names it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fminfer.answers.cache_place import CachePlace
from fminfer.contract.envelope import check_model_name, parse_envelope
from fminfer.contract.request import RAW_TOKENS
from fminfer.core.config import ModelOptions
from fminfer.core.errors import RequestError, UsageError
from fminfer.core.option import Options, Seconds, WholeTexts, option, options_of
from fminfer.files.input_folders import (
    describe_left_out,
    find_inputs,
    list_read_folders,
    sort_folder,
)
from fminfer.files.input_models import check_no_models
from fminfer.files.journal_rows import LINE_NUMBERS
from fminfer.files.line_reader import read_lines
from fminfer.files.output_paths import (
    STDOUT,
    OutputPaths,
    describe_use,
    make_output_paths,
    require_parent_folder,
)
from fminfer.files.own_files import PAGE, SUMMARY, TIMELINE, is_device, require_own_file
from fminfer.files.storage import Location, RemoteFolders
from fminfer.files.streams import is_stream
from fminfer.files.tables.row_template import PROMPT_FLAG
from fminfer.files.tables.table_options import TableOptions
from fminfer.files.tables.table_writer import is_table_name
from fminfer.job.synthetic import Synthetic
from fminfer.models.known_sizes import DEMO_NAMES
from fminfer.runtime.launch.processes import ProcessContext

MOST_LOOKED_AT = 100  # files, and lines of each, for one that names a model


_option = partial(option, group="Input and output", commands=("run",))


@dataclass(frozen=True)
class JobOptions(Options):
    """What a run reads and writes."""

    infer_data: tuple[Location, ...] = _option(
        "A .jsonl, .ndjson or .json file of requests, also .gz or .zst. Or a folder of them, "
        "without outputs of earlier runs; a URL of either (s3://…); or - for stdin. May be "
        "repeated.",
        commands=("run", "check"),
    )
    prompts: WholeTexts = _option(
        "Answer this text and print the answer, for a first try. It is the user's "
        "message of a chat if the model has a chat template. Without --temperature the "
        "likeliest tokens are taken. At most 1,024 tokens of a chat and 256 of a "
        "completion, or --generate-seq-length.",
        flags=("--prompt",),
        metavar="TEXT",
    )
    is_raw: bool = _option(
        "Send the text as a completion's prompt, also for a chat model. With --prompt at "
        f"most {RAW_TOKENS} tokens, or --generate-seq-length.",
        commands=("run", "check"),
    )
    output: Location | None = _option(
        "A .jsonl file; a folder, created if its parent is there; a URL of either; or "
        "- for stdout. Errors then go to stderr. For one input table, a .parquet or .csv "
        "file: its columns and those of the answers. Records go to <name>.records.jsonl.  "
        "[default: output_<name>.jsonl beside the input; stdout for stdin]"
    )
    prefix: str | None = _option(
        "Put this text before the names of the columns that a table of answers adds.",
        metavar="TEXT",
    )
    has_line_numbers: bool = _option(
        'Say in each record which line of the input it is of, as "line": 7. Errors always say '
        "it. Records of Batch lines have no place for it.",
        flags=(LINE_NUMBERS,),
    )
    work_dir: Path | None = _option(
        "Folder for local copies and the journal, if inputs or outputs are URLs.  "
        "[default: ~/.cache/fminfer/remote]"
    )
    restart: bool = _option(
        "Answer every line anew. Otherwise a run keeps earlier runs' answers to lines that are "
        "still in the input."
    )
    is_watching: bool = _option(
        "When all files of the folder are answered, wait for more until told to stop.",
        flags=("--watch",),
    )
    limit: int | None = _option(
        "Answer only the first N requests of each input. The same command with a "
        "larger limit, or without one, answers the others."
    )
    deadline_s: Seconds | None = _option(
        "End within this time from the start: 3:50:00, 45m. No request begins in the "
        "last --grace + 5 s.  [default: never]"
    )
    stats: Path | None = _option("Write the summary as JSON.")
    report: Path | None = _option(
        "Write an HTML page about the answers when the run ends, as fminfer report does."
    )
    truth: str | None = _option(
        "With --report: the column with the true labels; of JSON lines, the key beside "
        "`request`. The page shows how many answers are right.",
        metavar="COLUMN",
    )
    trace: Path | None = _option("Write a timeline of each rank, for ui.perfetto.dev.")

    @property
    def prompt(self) -> str | None:
        """The text of --prompt; None: files are answered, or requests that are made up."""
        return next(iter(self.prompts), None)

    def check(self) -> None:
        """Raise a UsageError for several prompts, one that means stdin elsewhere, or --truth
        alone.
        """
        if self.truth is not None and self.report is None:
            raise UsageError(
                "--truth needs --report. Add --report FILE, or leave --truth out"
            )
        if len(self.prompts) > 1:
            raise UsageError(
                f"--prompt is given {len(self.prompts)} times, and answers one text; put each "
                "prompt on a line of a file, and run that"
            )
        if self.prompt == "-":
            raise UsageError(
                '--prompt - reads no stdin; give --prompt "$(cat)" for a text on '
                "stdin, or leave "
                "--prompt out and give - for lines of requests"
            )


@dataclass(frozen=True, kw_only=True)
class JobPaths(JobOptions):
    """What to answer, where to, and how much to say."""

    paths: list[Location]
    is_quiet: bool
    remote: RemoteFolders
    prompt_fields: dict[str, Any] = field(default_factory=dict)  # of its request
    table: TableOptions = TableOptions()  # how inputs are read as rows
    # the requests to make up, in the place of inputs
    synthetic: Synthetic | None = None
    result_cache: CachePlace | None = None  # for answers that other runs may take
    keeps_output: bool = True  # otherwise what is written is of no use after the run

    @property
    def is_shared(self) -> bool:
        """Return whether other runs may answer some of the files: those of a folder."""
        is_one_file = self.output == STDOUT or is_table_name(self.output)
        return not is_one_file and bool(self._folders)

    @property
    def _folders(self) -> list[Path]:
        return [path for path in self.paths if isinstance(path, Path) and path.is_dir()]

    def find_inputs(self) -> list[Path]:
        """List the input files, of which there must be one."""
        local = [file for path in self.paths for file in self.remote.fetch_inputs(path)]
        inputs = find_inputs(
            local, may_be_empty=self.is_watching, has_rows=self.table.has_template
        )
        if not inputs and not self.is_watching:
            raise UsageError(
                "no input; give a .jsonl file, as in: fminfer run requests.jsonl. For "
                "a synthetic run give --batch-size or --input-seq-length"
            )
        return inputs

    def find_output_paths(self) -> OutputPaths:
        """Return the inputs and the output of each, once it is sure that they can be written.

        Where other runs share the work, an input that cannot be answered costs only itself.
        """
        if self.prompt is not None:
            check_no_models(self.paths, f"--prompt {shlex.quote(self.prompt)}")
            return self._make_prompt_paths()
        inputs = [] if self.synthetic is not None else self.find_inputs()
        if self.synthetic is not None and self.result_cache is not None:
            raise UsageError(
                "--result-cache with made-up requests would time answers that are only "
                "looked up; leave it out"
            )
        paths = make_output_paths(inputs, self.remote.find_local_output(self.output))
        for folder in self._folders:
            has_rows = self.table.has_template
            for read_folder in list_read_folders(folder, has_rows=has_rows):
                paths.refused.update(sort_folder(read_folder, has_rows=has_rows).lost)

        others_go_on = self.is_shared and (bool(paths.inputs) or self.is_watching)
        if paths.refused and not others_go_on:
            raise UsageError(next(iter(paths.refused.values())))
        self.remote.prepare_outputs(paths.outputs, paths.table, restart=self.restart)

        self._check_table(paths)
        self._check_further_files(paths)
        if self.is_watching:
            self._check_watching()
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit is {self.limit}; it must be at least 1")
        return paths

    def _check_table(self, paths: OutputPaths) -> None:
        """Raise a UsageError for a table of answers without rows, or a prefix without one."""
        if self.prefix is not None and paths.table is None:
            raise UsageError(
                f"--prefix {self.prefix} names columns of a table, and none is written; give "
                "--output a name that ends in .parquet or .csv, or leave --prefix out"
            )
        if paths.table is not None and not self.table.has_template:
            raise UsageError(
                f"--output {self.output} needs rows, and the input has requests. Add "
                "--prompt-template, or give an --output that ends in .jsonl"
            )
        for path in paths.inputs if paths.table is not None else []:
            if is_stream(path) or not path.is_file():
                raise UsageError(
                    f"{path} is a pipe, and for a table of answers the rows are read again. "
                    "Save them as a file, or give an --output that ends in .jsonl"
                )

    def _check_further_files(self, paths: OutputPaths) -> None:
        """Raise a UsageError if the files of --stats, --trace or --report cannot be written."""
        for flag, (path, kind) in {
            "--stats": (self.stats, SUMMARY),
            "--trace": (self.trace, TIMELINE),
            "--report": (self.report, PAGE),
        }.items():
            if path is None:
                continue
            require_parent_folder(flag, path)
            if path.is_dir():
                raise UsageError(f"{flag} {path} is a folder; give the name of a file")
            if use := describe_use(path, paths):
                raise UsageError(f"{flag} {path} {use}; give another name")
            if kind is PAGE or not is_device(path):  # a page always replaces a file
                require_own_file(path, kind, flag)

        if self.report is not None and STDOUT in paths.outputs:
            raise UsageError(
                f"--report {self.report} is made from the answers, and those on stdout are not "
                "kept; give --output FILE"
            )

    def _check_watching(self) -> None:
        """Raise a UsageError if a run cannot watch its inputs for more files."""
        if not self.is_shared:
            raise UsageError(
                "--watch needs a folder to watch, and an --output that is neither - nor a table"
            )
        if any(isinstance(path, str) for path in (*self.paths, self.output)):
            raise UsageError(
                "--watch works with local files and folders only, not with URLs"
            )
        if self.output is not None and str(self.output).endswith(".jsonl"):
            raise UsageError(
                f"--output {self.output} is one file; --watch needs a folder for many"
            )

    def describe_left_out(self) -> list[str]:
        """Name the folders' files that are left out, a text for each reason."""
        return describe_left_out(self._folders, has_rows=self.table.has_template)

    def _make_prompt_paths(self) -> OutputPaths:
        """Return no paths for a prompt, whose answer is printed; raise if flags name files."""
        option_flags = {
            name: each.told for name, each in options_of(JobOptions).items()
        }
        names = ("output", "is_watching", "limit", "stats", "trace", "report")
        # a --limit 0 is given, too
        values = ((name, getattr(self, name)) for name in names)
        flags = [
            option_flags[name]
            for name, value in values
            if value is not None and value is not False
        ]
        if self.table.has_template:
            flags.append(PROMPT_FLAG)
        if flags := ["the files"] * bool(self.paths) + flags:
            raise UsageError(
                f"--prompt answers one text and prints the answer; leave out {', '.join(flags)}"
            )
        return OutputPaths([], [])

    def with_input(self, path: Path) -> JobPaths:
        """Return the job with the requests that were made up; without --output none is kept."""
        keeps_output = self.output is not None
        return replace(
            self,
            paths=[path],
            output=self.output if keeps_output else path.with_name("answers.jsonl"),
            synthetic=None,
            keeps_output=keeps_output,
        )


def check_no_other_model(
    config: ModelOptions, inputs: Iterable[Path], *, has_rows: bool = False
) -> None:
    """Raise a UsageError if the lines of a run without --model-name are for another model.

    Only the first model that they name counts: the flag was forgotten, so nothing is begun. A
    later line for another model costs only itself. Rows of tables name none.
    """
    is_to_look = config.is_unnamed_demo and not has_rows
    for path in islice(inputs, MOST_LOOKED_AT if is_to_look else 0):
        try:
            # A pipe can be read only once.
            if path.is_file() and _names_demo_model(path):
                return
        except RequestError as error:
            raise UsageError(f"{path}: {error.message}") from None


def _names_demo_model(path: Path) -> bool:
    # of a file that cannot be read: the run says so
    with suppress(UsageError, OSError):
        for line in read_lines(path, 0, limit=MOST_LOOKED_AT):
            items = parse_envelope(line).fields.items()
            fields = {name: value for name, value in items if isinstance(value, str)}
            check_model_name(fields, DEMO_NAMES)
            if fields.get("model") or fields.get("engine"):
                return True
    return False


@dataclass(slots=True, frozen=True)
class RunContext(ProcessContext):
    """A run of the command in one of its processes."""

    job: JobPaths
    # inputs and outputs; None: rank 0 finds them itself, once it is known
    output_paths: OutputPaths | None
