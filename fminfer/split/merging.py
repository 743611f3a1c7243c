"""Merges the answers to all parts of a split into one file, in the order of the source.

The answers are read twice: first for the size of each record, from which follows where each will
stand; then part by part, each record written at its place. So memory holds some bytes a line.
"""

from __future__ import annotations

import re
import shlex
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import make_line_id
from fminfer.core.errors import FminferError, OutputError, UsageError
from fminfer.core.quantities import list_few, with_noun
from fminfer.files.claims import claiming_output
from fminfer.files.completed import BATCH_RECORD, read_records
from fminfer.files.disk import write_all
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import INPUT, LINE_NUMBERS
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import errors_path, writing_together
from fminfer.files.output_paths import NO_OUTPUT, answers_path, require_parent_folder
from fminfer.files.status_file import read_sound_status, seals_of, status_path
from fminfer.files.streams import A_PIPE, digest_file
from fminfer.split.manifest import Manifest, SplitPart, read_manifest, sort_line_numbers

_LINE = re.compile(rb'(\A\{\s*"line"\s*:\s*|"error":null,"line":)(\d{1,18})(?=\s*[,}])')


def find_gap(folder: Path, part: SplitPart) -> str:
    """Say why a part has no answers yet; an empty text if it has."""
    answers = answers_path(folder / part.path)
    status = read_sound_status(answers)
    is_there = answers.is_file()
    if is_there and status is not None:
        return "" if status.get("status") == "completed" else "not finished"
    if journal_path(answers).exists():
        return "not finished"
    return "" if is_there else "not answered"


def read_answers(folder: Path, part: SplitPart) -> Iterator[tuple[int, bytes, bool]]:
    """Yield each record of a part with its row, from 0, and whether it is an error.

    Errors come first. They get the numbers that their lines have in the source.

    Raises:
        FminferError: they are not, or not all, of this part.
    """
    path = folder / part.path
    answers = answers_path(path)
    _check_digest(answers, part)
    is_taken = bytearray(len(part.lines))
    for row, record in _read_errors(path, part):
        is_taken[row] = 1
        yield row, record, True
    row = num_answers = 0
    for record in _read_records(answers):
        row = is_taken.find(0, row)
        num_answers += 1
        if row < 0:
            break
        yield row, record, False
        row += 1
    num_errors = is_taken.count(1)
    if num_answers + num_errors != len(part.lines):
        count = "more than" if row < 0 else f"{num_answers + num_errors} of"
        raise FminferError(
            f"{answers} has answers to {count} the {with_noun(len(part.lines), 'line')} "
            f"of {path}, its errors ({num_errors}) counted; answer that part again"
        )


def _check_digest(answers: Path, part: SplitPart) -> None:
    digest = ((read_sound_status(answers) or {}).get("metadata") or {}).get(INPUT)
    if digest is not None and digest != part.digest:
        raise FminferError(
            f"{answers} holds answers to another file than {part.path} of this split: "
            f"{status_path(answers).name} says {digest}, the manifest {part.digest}. Answer "
            "that part again"
        )


def _read_errors(path: Path, part: SplitPart) -> Iterator[tuple[int, bytes]]:
    """Yield each error's row and its record; they stand in the order of the rows."""
    errors = errors_path(answers_path(path))
    before = -1
    # of Batch errors that say no line: old ones
    ids: Iterator[tuple[int, bytes]] | None = None
    for record in _read_records(errors):
        if match := _LINE.search(record):
            row = int(match[2]) - 1
        elif match := BATCH_RECORD.match(record):
            ids = ids or _read_ids(path, part)
            row = next((row for row, record_id in ids if record_id == match[1]), -1)
        else:
            row = -1
        if not before < row < len(part.lines):
            raise FminferError(
                f"{errors} holds an error that is of no line of {path}: "
                f"{_shorten_record(record)}. Answer that part again"
            )
        before = row
        yield row, _LINE.sub(rb"\g<1>%d" % part.lines[row], record, count=1)


def _read_ids(path: Path, part: SplitPart) -> Iterator[tuple[int, bytes]]:
    """Yield each row of a part with the id that its record has in an OpenAI Batch file."""
    if digest_file(path) != part.digest:
        raise FminferError(
            f"{path} is not as it was split, and its errors cannot be told apart "
            "without it; split the file again"
        )
    for row, line in enumerate(read_lines(path, 0)):
        yield row, make_line_id(line, parse_envelope(line)).encode()


def _read_records(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank, each with its newline."""
    return (record + b"\n" for record in read_records(path) if record.strip())


def _shorten_record(record: bytes) -> str:
    text = record.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:57] + "…"


MAX_NAMED = 10  # files, or ranges of lines, in a message
Places = npt.NDArray[np.int64]
# Each part, and where its lines stand among those of all parts in the order of the source.
Ranked = list[tuple[SplitPart, Places]]


@dataclass(slots=True, frozen=True)
class MergeSummary:
    """What a merge wrote."""

    num_parts: int
    num_answers: int
    num_errors: int
    source_change: str  # since the split, for people; an empty text if there is none
    was_there: bool  # an earlier merge had written the same bytes


def merge_parts(folder: Path, output: Path) -> MergeSummary:
    """Write the answers to all parts of a folder into `output`, and their errors beside it.

    Raises:
        UsageError: the manifest is damaged, or the output is there and differs.
        FminferError: lines are not answered, or answers are not of their part; nothing
        is written.
    """
    _check_output(output)
    with claiming_output(output):
        return _merge_answers(folder, output, read_manifest(folder))


def _merge_answers(folder: Path, output: Path, manifest: Manifest) -> MergeSummary:
    was_there = output.exists()
    _check_no_gaps(folder, manifest)
    _check_joinable(folder, manifest)
    numbers = sort_line_numbers(manifest.parts)
    ranked = [(part, np.searchsorted(numbers, part.lines)) for part in manifest.parts]
    try:
        sizes = _read_sizes(folder, ranked, len(numbers))
        _write_records(folder, ranked, sizes, output)
    except OSError as error:
        raise OutputError(
            f"{error.filename or output}: {error.strerror or error}. Nothing is "
            f"merged; see that the answers can be read and that {output.parent} has "
            "room for them, and repeat the command"
        ) from error
    num_errors = int((sizes < 0).sum())
    return MergeSummary(
        num_parts=len(manifest.parts),
        num_answers=len(sizes) - num_errors,
        num_errors=num_errors,
        source_change=_describe_source_change(manifest),
        was_there=was_there,
    )


def _check_joinable(folder: Path, manifest: Manifest) -> None:
    """Raise a UsageError if answers have vectors beside them, or name lines of their parts."""
    for part in manifest.parts:
        status = read_sound_status(answers_path(folder / part.path))
        if LINE_NUMBERS in ((status or {}).get("metadata") or {}):
            raise UsageError(
                f"the answers to {folder / part.path} name lines of the part, and not of "
                f"the whole file; answer parts without {LINE_NUMBERS}"
            )
        if "vectors" in (seals_of(status) or {}):
            raise UsageError(
                f"the vectors of {folder / part.path} are in a .npy file, and merge "
                "joins records alone; answer parts without --embeddings npy"
            )


def _describe_source_change(manifest: Manifest) -> str:
    """Say how the source differs from what was split; nothing if it is gone or was a pipe."""
    source = Path(manifest.source)
    try:
        digest = digest_file(source)
    except UsageError:  # the answers can be merged without it
        return ""
    if digest in (manifest.digest, A_PIPE):
        return ""
    return (
        f"{source} has changed since it was split: it had {manifest.digest}, and has "
        f"{digest} now. The merged answers are those to its lines at the split. For "
        "answers to its lines as they are now, split it into another folder, and "
        "answer that"
    )


def _check_output(output: Path) -> None:
    require_parent_folder("--output", output)
    if output.suffix in NO_OUTPUT or output.name in ("-", "") or output.is_dir():
        raise UsageError(
            f"--output {output}: give the name of a file that ends in .jsonl"
        )


def _check_no_gaps(folder: Path, manifest: Manifest) -> None:
    """Raise a FminferError that names the parts without all of their answers."""
    gaps = {part.path: find_gap(folder, part) for part in manifest.parts}
    missing = [part for part in manifest.parts if gaps[part.path]]
    if not missing:
        return
    num_lines = sum(len(part.lines) for part in missing)
    named = list_few(
        [f"{part.path} ({gaps[part.path]})" for part in missing], MAX_NAMED
    )
    raise FminferError(
        f"{num_lines:,} of {manifest.num_lines:,} lines of {manifest.source} have no "
        f"answer: lines {describe_ranges(missing)}. They are in {named}. Answer each "
        "folder with the model and the flags of its other parts, and merge then:\n"
        + "\n".join(_list_commands(folder, missing))
    )


def _list_commands(folder: Path, parts: list[SplitPart]) -> list[str]:
    """Return the command for each engine's parts; its model is for people to fill in."""
    by_folder: dict[Path, list[SplitPart]] = {}
    for part in parts:
        by_folder.setdefault((folder / part.path).parent, []).append(part)
    commands = []
    for engine_folder, engine_parts in list(by_folder.items())[:MAX_NAMED]:
        inputs = (
            [engine_folder]
            if len(engine_parts) > MAX_NAMED
            else [folder / part.path for part in engine_parts]
        )
        engine = next(
            (f"MODEL of {part.engine}" for part in engine_parts if part.engine), "MODEL"
        )
        words = ["fminfer", "run", *map(str, inputs), "--model-name", engine]
        commands.append(f"  {shlex.join(words)}")
    more = len(by_folder) - MAX_NAMED
    return [*commands, f"  … and of {more:,} more folders"] if more > 0 else commands


def describe_ranges(parts: list[SplitPart]) -> str:
    """Return the line numbers of parts for people: `1-4, 7, 9-12`."""
    numbers = sort_line_numbers(parts)
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.r_[0, breaks + 1]].tolist()
    lasts = numbers[np.r_[breaks, len(numbers) - 1]].tolist()
    ranges = [
        f"{first}" if first == last else f"{first}-{last}"
        for first, last in zip(firsts[:MAX_NAMED], lasts[:MAX_NAMED], strict=True)
    ]
    more = len(firsts) - MAX_NAMED
    return ", ".join(ranges) + (
        f" and {with_noun(more, 'more place')}" if more > 0 else ""
    )


def _read_sizes(folder: Path, ranked: Ranked, num_lines: int) -> Places:
    """Return the size of each line's record, in the order of the source; negative for errors."""
    sizes = np.zeros(num_lines, np.int64)
    wrong = []
    for part, ranks in ranked:
        part_sizes = array("q", bytes(8 * len(ranks)))
        try:
            for row, record, is_error in read_answers(folder, part):
                part_sizes[row] = -len(record) if is_error else len(record)
        except FminferError as error:
            wrong.append(str(error))
        sizes[ranks] = np.frombuffer(part_sizes, np.int64)
    if wrong:
        more = (
            f"\n… and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
        )
        raise FminferError("\n".join(wrong[:MAX_NAMED]) + more)
    return sizes


def _compute_places(sizes: Places) -> Places:
    """Return where each record begins in its file: behind those of all lines before its own."""
    places = np.zeros_like(sizes)
    for is_chosen in (sizes < 0, sizes >= 0):
        chosen = np.abs(sizes[is_chosen])
        places[is_chosen] = np.cumsum(chosen) - chosen
    return places


def _write_records(folder: Path, ranked: Ranked, sizes: Places, output: Path) -> None:
    places = _compute_places(sizes)
    with writing_together(output, errors_path(output), is_new=True) as files:
        for part, ranks in ranked:
            part_places = places[ranks].tolist()
            part_sizes = sizes[ranks].tolist()
            for row, record, is_error in read_answers(folder, part):
                if part_sizes[row] != (-len(record) if is_error else len(record)):
                    raise FminferError(
                        "answers changed while they were being merged; merge them again"
                    )
                write_all(files[is_error].fileno(), record, part_places[row])
