"""Where each input's answers go, and that no two go to one place."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.files.disk import fit_file_name
from fminfer.files.input_models import check_no_model_folder
from fminfer.files.line_reader import input_stem
from fminfer.files.ordered_output import draft_path, list_written_files
from fminfer.files.status_file import status_path
from fminfer.files.streams import DEVICES, STDIN, is_stream
from fminfer.files.tables.table_writer import is_table_name, records_path

STDOUT = Path("-")
# Endings of files that are not JSON lines; a folder would hardly have one.
NO_OUTPUT = (
    ".json",
    ".ndjson",
    ".gz",
    ".zst",
    ".txt",
    ".tsv",
    ".xlsx",
    ".xls",
    ".ods",
    ".feather",
    ".arrow",
    ".npy",
)


def answers_path(source: Path) -> Path:
    """Return where an input's answers go if no place is named: beside it."""
    return source.with_name(_make_answers_name(source))


@dataclass(slots=True, frozen=True)
class OutputPaths:
    """Inputs, and the output of each; and which inputs cannot be answered, and why."""

    inputs: list[Path]
    outputs: list[Path]
    refused: dict[Path, str] = field(default_factory=dict)
    table: Path | None = None  # of the only input's answers; `outputs` has its records


def require_output_paths(inputs: list[Path], output: Path | None) -> list[Path]:
    """Return where each input's answers go.

    Args:
        output: a file (for one input), a folder, `-` for stdout, or None for
            `output_<name>.jsonl` beside each input; stdin's answers go to stdout then.

    Raises:
        UsageError: one file for several inputs, or two inputs for one file.
    """
    paths = make_output_paths(inputs, output)
    for reason in paths.refused.values():
        raise UsageError(reason)
    return paths.outputs


def make_output_paths(inputs: list[Path], output: Path | None) -> OutputPaths:
    """Pair inputs with outputs, but for inputs whose answers would meet in one file.

    Raises:
        UsageError: one file for several inputs.
    """
    table = _find_table(output)
    outputs = _name_outputs(inputs, output)
    there = {path.resolve(): path for path in inputs if path != STDIN}
    # whose answers go to a file, and its name
    owners: dict[Path, list[tuple[Path, Path]]] = {}
    for source, path in zip(inputs, outputs, strict=True):
        for trace in [] if path == STDOUT else _list_all_written(path, table):
            owners.setdefault(trace.resolve(), []).append((source, trace))
    refused: dict[Path, str] = {}
    for place, sources in owners.items():
        for source, trace in sources:
            other = next((each for each, _ in sources if each != source), None)
            if place in there:
                whose = f"is the input {there[place]}; give another --output"
            elif other is not None:
                whose = f"also belongs to the answers to {other}; rename one of the two inputs"
            else:
                continue
            refused.setdefault(
                source,
                f"the answers to {source} would be written to {trace}, which {whose}",
            )
    pairs = [
        pair for pair in zip(inputs, outputs, strict=True) if pair[0] not in refused
    ]
    return OutputPaths(
        [source for source, _ in pairs], [path for _, path in pairs], refused, table
    )


def describe_use(path: Path, paths: OutputPaths) -> str:
    """Say what a file is to a run: an input, or one that it writes; an empty text if nothing."""
    place = path.resolve()
    for source in (*paths.inputs, *paths.refused):
        if source != STDIN and place == source.resolve():
            return f"is the input {source}"
    for source, output in zip(paths.inputs, paths.outputs, strict=True):
        if output != STDOUT and place in {
            trace.resolve() for trace in _list_all_written(output, paths.table)
        }:
            return f"belongs to the answers to {source}"
    return ""


def _find_table(output: Path | None) -> Path | None:
    """Return the output if its name is that of a table."""
    if output is None or output.is_dir() or not is_table_name(output):
        return None
    return output


def _list_all_written(output: Path, table: Path | None) -> list[Path]:
    tables = [] if table is None else [table, draft_path(table)]
    return [*list_written_files(output), status_path(output), *tables]


def _name_outputs(inputs: list[Path], output: Path | None) -> list[Path]:
    if output == STDOUT:
        return [STDOUT] * len(inputs)
    if output is None:
        return [STDOUT if is_stream(path) else answers_path(path) for path in inputs]
    _check_no_device(output)
    require_parent_folder("--output", output)
    check_no_model_folder("--output", output)
    is_table = _find_table(output) is not None
    if output.is_file() or output.suffix == ".jsonl" or is_table:
        if len(inputs) > 1:
            raise UsageError(
                f"--output {output} is one file, and there are {len(inputs)} inputs; "
                "give a folder"
            )
        # of a folder that is watched there may be none yet
        return [records_path(output) if is_table else output] * len(inputs)
    if output.suffix in NO_OUTPUT and not output.is_dir():
        raise UsageError(
            f"--output {output}: answers are written as plain JSON lines; give a name "
            "that ends in .jsonl (and compress the file afterwards), or a folder. A table "
            "of answers beside the rows of a table ends in .parquet or .csv"
        )
    return [output / _make_answers_name(path) for path in inputs]


def require_parent_folder(flag: str, path: Path) -> None:
    """Raise a UsageError if a path's folder is not there: it may be a typing error."""
    folder = path.parent
    if not folder.is_dir():
        if str(path).startswith("~"):
            raise UsageError(
                f"{flag} {path}: the shell expands ~ only where a word begins; write "
                "$HOME for ~, or a space in place of ="
            )
        near = next(each for each in folder.absolute().parents if each.is_dir())
        raise UsageError(
            f"{flag} {path}: there is no folder {folder} (the nearest that is there is {near}). "
            f"Mend the path, or make the folder: mkdir -p {shlex.quote(str(folder))}"
        )


def _check_no_device(output: Path) -> None:
    """Raise a UsageError if an output is a pipe or a device, such as /dev/null."""
    is_other = output.exists() and not (output.is_file() or output.is_dir())
    is_system = not {"/proc", "/sys"}.isdisjoint(map(str, output.absolute().parents))
    if is_other or is_system or (output.parent in DEVICES and not output.is_dir()):
        raise UsageError(
            f"--output {output} is no regular file, and a run keeps its journal beside "
            "its output. Give --output - for stdout (to drop the answers: --output - > "
            f"{os.devnull}), the name of a .jsonl file, or a folder"
        )


def _make_answers_name(source: Path) -> str:
    return fit_file_name(f"output_{input_stem(source)}", ".jsonl")
