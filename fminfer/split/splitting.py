"""Splits a file of requests into parts of one engine and equal hyperparameters.

Lines with long prompts stand first in a part.
All parts are written in a folder of their own, and moved to their places once it is sure that no
answers would lose their requests. A split that is killed can be repeated at any moment.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fminfer.answers.line_counter import EqualLines
from fminfer.answers.seen_counts import SeenCounts
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.fields import describe_value
from fminfer.contract.json_object import join_lines
from fminfer.core.errors import DamagedInputError, FminferError, OutputError, UsageError
from fminfer.core.quantities import list_few, with_noun
from fminfer.files.claims import claiming_output
from fminfer.files.disk import sync_folder, sync_tree
from fminfer.files.input_folders import find_inputs
from fminfer.files.input_models import check_no_model_folder
from fminfer.files.json_values import CutValue
from fminfer.files.line_reader import TABLE_ENDINGS, holds_plain_lines, read_lines
from fminfer.files.numbered_values import UTF8_BOM, split_lines
from fminfer.files.ordered_output import list_written_files
from fminfer.files.output_paths import answers_path, require_parent_folder
from fminfer.files.status_file import status_path
from fminfer.files.streams import A_PIPE, MANIFEST, PART_NAME, digest_file, read_chunks
from fminfer.split.grouping import (
    Groups,
    RequestGroup,
    estimate_length,
    find_most_varied,
)
from fminfer.split.manifest import (
    Manifest,
    SplitPart,
    make_folder_name,
    read_part_paths,
    write_manifest,
)

BLANK = -1  # instead of a group
MAX_DOUBLES = 5  # lines in a message


class LineIndex:
    """Where each line of a file stands, how long its prompt is, and to which group it belongs.

    It has 20 bytes for each line, blank ones too. A file that cannot be read at any
    place (packed ones, stdin, arrays) is copied to a plain one as it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path  # of the plain file
        self.groups = array("i")
        self.lengths = array("I")  # of prompts
        self.starts = array("q")  # and, once all are read, the end of the last
        # equal ones before each in the file that count, for draws
        self.num_equal = array("I")
        self.num_bad = 0  # lines that hold no request
        self.num_doubles = 0  # lines with a custom_id that an earlier one has
        self.doubles: list[str] = []  # the first few of them, for people

    def __len__(self) -> int:
        return len(self.groups)

    def add(
        self, start: int, group: int = BLANK, length: int = 0, num_equal: int = 0
    ) -> None:
        self.starts.append(start)
        self.num_equal.append(num_equal)
        self.groups.append(group)
        self.lengths.append(length)


def build_index(path: Path, copy: Path, groups: Groups) -> LineIndex:
    """Read all lines of a file, and fill the groups; `copy` is where a plain copy goes.

    Raises:
        DamagedInputError: the file breaks off.
    """
    is_plain = holds_plain_lines(path)
    index = LineIndex(path if is_plain else copy)
    equal = EqualLines()
    ids = SeenCounts()
    end = 0
    for line, start, stop in (
        _read_plain(path) if is_plain else _read_copied(path, copy)
    ):
        while len(index) < line.number - 1:
            index.add(end)  # blank lines between
        envelope = parse_envelope(line)
        if envelope.error is not None:
            index.num_bad += 1
        name = envelope.custom_id_text
        fields = envelope.fields
        is_double = name is not None and bool(ids.add_text(name))
        index.num_doubles += is_double
        if is_double and index.num_doubles <= MAX_DOUBLES:
            index.doubles.append(f"{describe_value(name)} of line {line.number}")
        num_equal = 0 if is_double else equal.count(line, envelope)
        index.add(start, groups.add(fields), estimate_length(fields), num_equal)
        end = stop
    index.starts.append(end)
    return index


def _read_plain(path: Path) -> Iterator[tuple[Line, int, int]]:
    """Yield lines that are not blank, each with the places where it begins and ends."""
    place = 0
    size = path.stat().st_size
    for number, value in split_lines(read_chunks(path), passes_blank=False):
        if isinstance(value, CutValue):
            raw = value.head
            num_bytes = value.num_bytes
            fault = value.fault
        else:
            raw = value
            num_bytes = len(value)
            fault = ""
        start = place
        place = min(place + num_bytes + 1, size)
        if number == 1 and raw.startswith(UTF8_BOM):
            start = len(UTF8_BOM)
            raw = raw[len(UTF8_BOM) :]
        if raw.strip():
            yield Line(0, number, raw, fault=fault, is_cut=bool(fault)), start, place


def _read_copied(path: Path, copy: Path) -> Iterator[tuple[Line, int, int]]:
    place = 0
    with copy.open("wb") as file:
        for line in read_lines(path, 0):
            if line.damage:
                raise DamagedInputError(
                    f"{path} breaks off at line {line.number}, and its rest would be "
                    f"lost: {line.damage.partition('. What stands')[0]}. Mend the "
                    "file, and split it then"
                )
            if line.is_cut:
                raise DamagedInputError(f"line {line.number} of {path}: {line.fault}")
            raw = _join_line(line) + b"\n"
            file.write(raw)
            start = place
            place = place + len(raw)
            yield line, start, place


def _join_line(line: Line) -> bytes:
    """Return a line's bytes; a value that is spread over lines, as a run would write it."""
    if b"\n" not in line.raw:
        return line.raw
    if parse_envelope(line).error is None:
        return join_lines(line.raw.strip())
    # What is no request must not become one where its pieces meet.
    return line.raw.strip().replace(b"\r", b" ").replace(b"\n", b" ")


MAX_NAMED = 10  # folders
MANY_GROUPS = 100
FEW_ROWS = 10  # more groups than that, with fewer rows each, are told


@dataclass(slots=True, frozen=True)
class SplitSummary:
    """What a split did."""

    folder: Path
    manifest: Manifest
    groups: list[RequestGroup]
    index: LineIndex

    def to_text(self) -> str:
        """Return the summary for people."""
        parts = self.manifest.parts
        index = self.index
        num_lines = self.manifest.num_lines
        num_groups = len(self.groups)
        folders = list(
            dict.fromkeys(str((self.folder / part.path).parent) for part in parts)
        )
        bad = f", {index.num_bad:,} of them no requests" if index.num_bad else ""
        lines = [
            f"split     {with_noun(num_lines, 'line')}{bad}",
            f"parts     {with_noun(len(parts), 'file')} for {with_noun(num_groups, 'set')} of "
            f"hyperparameters, in {list_few(folders, MAX_NAMED, 'folder')}",
        ]
        if num_groups > max(MANY_GROUPS, num_lines / FEW_ROWS):
            name, count = find_most_varied(self.groups)
            lines.append(
                f"note      most parts hold few lines: {name} alone has {count:,} "
                f"values. fminfer run answers {self.manifest.source} without splitting"
            )
        if index.doubles:
            more = index.num_doubles - len(index.doubles)
            lines.append(
                f"warning   custom_ids of earlier lines come again: {', '.join(index.doubles)}"
                f"{f', … ({more:,} more)' if more else ''}. "
                "A run over the whole file would refuse these lines"
            )
        merge = [
            "fminfer",
            "merge",
            "--input-dir",
            str(self.folder),
            "--output",
            "FILE",
        ]
        return "\n".join([*lines, f"answers   merge them with: {shlex.join(merge)}"])


# in the output folder while a split is at work; no engine's folder has a dot
STAGING = ".split"
MAX_NAMED_FILES = 3  # files in a message


@dataclass(slots=True, frozen=True)
class SplitOptions:
    """How many requests a part holds: chunk // max(max_tokens, least), at least one."""

    min_generate_token: int
    generate_token_chunk_size: int
    # parts stand in the output folder itself, for a loop over their numbers
    is_flat: bool = False

    def choose_num_rows(self, max_tokens: int) -> int:
        least = max(max_tokens, self.min_generate_token, 1)
        return max(1, self.generate_token_chunk_size // least)


def split_file(source: Path, folder: Path, options: SplitOptions) -> SplitSummary:
    """Split a file into `<folder>/<engine>/request_<N>.jsonl`, and write the folder's manifest.

    Raises:
        UsageError: files in the folder would be lost, or flat parts are of several engines.
        DamagedInputError: the file breaks off; nothing is changed then.
    """
    if source.is_dir():
        raise UsageError(f"{source} is a folder; give one file to split")
    if source.name.endswith(TABLE_ENDINGS):
        raise UsageError(
            f"{source} is a table, and is not split. Run it as it is, with "
            "--prompt-template; several runs share a folder of tables"
        )
    (source,) = find_inputs([source])
    old = read_part_paths(folder)
    if source.resolve() in {(folder / path).resolve() for path in old}:
        raise UsageError(
            f"{source} is a part in {folder}, whose other parts this split would remove; give "
            "another --output-dir"
        )
    require_parent_folder("--output-dir", folder)
    check_no_model_folder("--output-dir", folder)
    _check_parts_known(folder, old)
    try:
        folder.mkdir(exist_ok=True)
        with claiming_output(folder / MANIFEST), _making_staging(folder) as staging:
            return _split_source(source, folder, options, old, staging)
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: {error.strerror or error}. The split is not finished; "
            "see that the input can be read and that the folder has room, and repeat the command"
        ) from error


def _split_source(
    source: Path, folder: Path, options: SplitOptions, old: set[str], staging: Path
) -> SplitSummary:
    groups = Groups()
    copy = staging / "input"
    before = _read_signature(source)
    digest = digest_file(source)
    index = build_index(source, copy, groups)
    if options.is_flat:
        _check_one_engine(source, groups)
    digest = digest_file(copy) if digest == A_PIPE else digest
    parts = list(_stage_parts(index, groups.seen, options, staging))
    if _read_signature(source) != before:
        raise FminferError(f"{source} changed while it was being split; split it again")
    _check_none_answered(folder, parts, old)
    manifest = Manifest(
        source=str(source),
        digest=digest,
        options={
            "min_generate_token": options.min_generate_token,
            "generate_token_chunk_size": options.generate_token_chunk_size,
        },
        num_lines=sum(group.num_rows for group in groups.seen),
        parts=parts,
    )
    _publish_parts(folder, staging, manifest, old)
    return SplitSummary(folder, manifest, groups.seen, index)


@contextlib.contextmanager
def _making_staging(folder: Path) -> Iterator[Path]:
    """Make an empty folder, and remove it at the end; a killed split may have left one."""
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage_parts(
    index: LineIndex, groups: list[RequestGroup], options: SplitOptions, staging: Path
) -> Iterator[SplitPart]:
    """Write one part after the other, group by group."""
    order = _order_lines(index)
    num_equal = index.num_equal
    counts: Counter[str] = Counter()  # of parts, by folder
    first = 0
    with open(index.path, "rb", buffering=0) as file:
        for group in groups:
            name = "" if options.is_flat else f"{make_folder_name(group.engine)}/"
            last = first + group.num_rows
            num_rows = options.choose_num_rows(group.max_tokens)
            for start in range(first, last, num_rows):
                rows = order[start : min(start + num_rows, last)]
                path = f"{name}request_{counts[name]}.jsonl"
                counts[name] += 1
                _copy_lines(index, rows.tolist(), file.fileno(), staging / path)
                equal = array("I", (num_equal[row] for row in rows.tolist()))
                yield SplitPart(
                    path=path,
                    engine=group.engine,
                    hyperparameters=group.hyperparameters,
                    digest=digest_file(staging / path),
                    lines=array("q", (rows + 1).tobytes()),
                    num_equal=equal if any(equal) else array("I"),
                )
            first = last


def _order_lines(index: LineIndex) -> npt.NDArray[np.int64]:
    """Return lines from 0 by group, long prompts first.

    It frees the index's groups and lengths.
    """
    lengths = np.frombuffer(index.lengths, np.uint32)
    groups = np.frombuffer(index.groups, np.int32)
    order = np.lexsort((~lengths, groups)).astype(np.int64, copy=False)
    num_blank = int((groups == BLANK).sum())
    index.groups = array("i")
    index.lengths = array("I")
    return order[num_blank:]


def _copy_lines(index: LineIndex, rows: list[int], fd: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for row in rows:
            start, end = index.starts[row], index.starts[row + 1]
            raw = os.pread(fd, end - start, start)
            if len(raw) < end - start:
                raise FminferError(
                    f"{index.path} became shorter while it was being split"
                )
            file.write(raw if raw.endswith(b"\n") else raw + b"\n")


def _check_one_engine(source: Path, groups: Groups) -> None:
    engines = {group.engine for group in groups.seen if group.engine is not None}
    if len(engines) > 1:
        raise UsageError(
            f"{source} names {len(engines)} engines, whose parts --flat would mix: "
            f"{list_few(sorted(engines), MAX_NAMED_FILES)}. Leave out --flat; each "
            "engine's parts then have a folder"
        )


def _check_parts_known(folder: Path, old: set[str]) -> None:
    """Raise a UsageError if a folder has request files that are not an earlier split's."""
    unknown = []
    for path, folders, names in os.walk(folder):
        if Path(path) == folder and STAGING in folders:
            folders.remove(STAGING)
        parts = [Path(path, name) for name in names if PART_NAME.fullmatch(name)]
        unknown += [
            file for file in parts if file.relative_to(folder).as_posix() not in old
        ]
    if unknown:
        raise UsageError(
            f"{folder} holds request files that no {MANIFEST} names: "
            f"{list_few(unknown, MAX_NAMED_FILES)}. Move them away, or give another --output-dir"
        )


def _check_none_answered(folder: Path, parts: list[SplitPart], old: set[str]) -> None:
    """Raise a UsageError if answered parts would change."""
    digests = {path: "" for path in old} | {part.path: part.digest for part in parts}
    answered = []
    for path, digest in sorted(digests.items()):
        part = folder / path
        answers = answers_path(part)
        left = [
            file
            for file in [*list_written_files(answers), status_path(answers)]
            if file.exists()
        ]
        if left and digest_file(part) != digest:
            answered.append(left[0])
    if answered:
        raise UsageError(
            f"{folder} holds answers to parts that this split would change: "
            f"{list_few(answered, MAX_NAMED_FILES)}. Merge them (fminfer merge) and remove the "
            "folder, or give another --output-dir"
        )


def _publish_parts(
    folder: Path, staging: Path, manifest: Manifest, old: set[str]
) -> None:
    """Move the parts to their places, and remove stale parts of the earlier split."""
    paths = [part.path for part in manifest.parts]
    stale = sorted(old.difference(paths))
    sync_tree(staging)
    write_manifest(folder, manifest, unfinished=[*paths, *stale])
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / path, folder / path)
    for path in stale:
        (folder / path).unlink(missing_ok=True)
        # something is in it, as the manifest is in the last
        with contextlib.suppress(OSError):
            os.removedirs((folder / path).parent)
    for folder_to_sync in {
        parent for path in paths for parent in (folder / path).parents
    }:
        if folder_to_sync.is_relative_to(folder):
            sync_folder(folder_to_sync)
    write_manifest(folder, manifest)


def _read_signature(path: Path) -> tuple[int, int, int] | None:
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
