"""Splits a file of requests into parts of one engine and equal hyperparameters, long prompts first.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fminfer.core.errors import FminferError, OutputError, UsageError
from fminfer.core.quantities import counted
from fminfer.files.input_folders import find_inputs
from fminfer.files.ordered_output import traces
from fminfer.files.output_paths import answers_path, require_parent
from fminfer.files.split_folders import MANIFEST, PART_NAME
from fminfer.files.status_file import status_path
from fminfer.files.streams import A_PIPE, digest_of
from fminfer.split.grouping import Groups, RequestGroup, find_most_varied
from fminfer.split.line_index import BLANK, LineIndex, read_index
from fminfer.split.manifest import (
    Manifest,
    SplitPart,
    folder_name,
    read_paths,
    write_manifest,
)

MAX_NAMED = 10  # folders
MANY_GROUPS, FEW_ROWS = 100, 10  # more groups than that, with fewer rows each, are told


@dataclass(slots=True, frozen=True)
class SplitSummary:
    """What a split did."""

    folder: Path
    manifest: Manifest
    groups: list[RequestGroup]
    num_bad: int  # lines that hold no request
    doubles: list[str]  # custom_ids that an earlier line has, each with its line

    def to_text(self) -> str:
        """Return the summary for people."""
        num_lines, num_groups = self.manifest.num_lines, len(self.groups)
        bad = f", {self.num_bad:,} of them no requests" if self.num_bad else ""
        lines = [
            f"split     {counted(num_lines, 'line')}{bad}",
            f"parts     {counted(len(self.manifest.parts), 'file')} for "
            f"{counted(num_groups, 'set')} of hyperparameters, in {self._folders()}",
        ]
        if num_groups > max(MANY_GROUPS, num_lines / FEW_ROWS):
            name, count = find_most_varied(self.groups)
            lines.append(
                f"note      most parts hold few lines: {name} alone has {count:,} values. fminfer "
                f"run answers {self.manifest.source} without splitting"
            )
        if self.doubles:
            lines.append(
                f"warning   custom_ids of earlier lines come again: {', '.join(self.doubles)}. "
                "A run over the whole file would refuse these lines"
            )
        merge = ["fminfer", "merge", "--input-dir", str(self.folder), "--output", "FILE"]
        return "\n".join([*lines, f"answers   merge them with: {shlex.join(merge)}"])

    def _folders(self) -> str:
        parts = self.manifest.parts
        found = list(dict.fromkeys(str((self.folder / part.path).parent) for part in parts))
        more = len(found) - MAX_NAMED
        return ", ".join(found[:MAX_NAMED]) + (
            f" and {counted(more, 'more folder')}" if more > 0 else ""
        )


STAGING = ".split"  # in the output folder while a split is at work; no engine's folder has a dot
MAX_NAMED_FILES = 3  # files in a message


@dataclass(slots=True, frozen=True)
class SplitOptions:
    """How many requests a part holds: chunk // max(max_tokens, least), at least one."""

    min_generate_token: int
    generate_token_chunk_size: int
    is_flat: bool = False  # parts stand in the output folder itself, for a loop over their numbers

    def num_rows(self, max_tokens: int) -> int:
        least = max(max_tokens, self.min_generate_token, 1)
        return max(1, self.generate_token_chunk_size // least)


def split_file(source: Path, folder: Path, options: SplitOptions) -> SplitSummary:
    """Split a file into `<folder>/<engine>/request_<N>.jsonl`, and write the folder's manifest.

    Raises:
        UsageError: what stands in the folder would be lost, or flat parts are of several engines.
        DamagedInputError: the file breaks off; nothing is changed then.
        OutputError: the disk is full or gone.
    """
    if source.is_dir():
        raise UsageError(f"{source} is a folder; give one file to split")
    (source,) = find_inputs([source])
    old = read_paths(folder)
    if source.resolve() in {(folder / path).resolve() for path in old}:
        raise UsageError(
            f"{source} is a part in {folder}, whose other parts this split would remove; give "
            "another --output-dir"
        )
    require_parent("--output-dir", folder)
    _refuse_unknown(folder, old)
    try:
        with _staging_in(folder) as staging:
            return _split(source, folder, options, old, staging)
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: {error.strerror or error}. The split is not finished; "
            "see that the input can be read and that the folder has room, and repeat the command"
        ) from error


def _split(
    source: Path, folder: Path, options: SplitOptions, old: set[str], staging: Path
) -> SplitSummary:
    groups = Groups()
    copy = staging / "input"
    before = _signature(source)
    digest = digest_of(source)
    index = read_index(source, copy, groups)
    if options.is_flat:
        _refuse_several_engines(source, groups)
    digest = digest_of(copy) if digest == A_PIPE else digest
    parts = list(_stage_parts(index, groups.seen, options, staging))
    if _signature(source) != before:
        raise FminferError(f"{source} changed while it was being split; split it again")
    _refuse_answered(folder, parts, old)
    num_lines = sum(group.num_rows for group in groups.seen)
    sizes = {
        "min_generate_token": options.min_generate_token,
        "generate_token_chunk_size": options.generate_token_chunk_size,
    }
    manifest = Manifest(str(source), digest, sizes, num_lines, parts)
    _publish(folder, staging, manifest, old)
    doubles = index.doubles[:]
    if more := index.num_doubles - len(doubles):
        doubles.append(f"… ({more:,} more)")
    return SplitSummary(folder, manifest, groups.seen, index.num_bad, doubles)


@contextlib.contextmanager
def _staging_in(folder: Path) -> Iterator[Path]:
    """Make an empty folder that is gone afterwards, also what a split that was killed has left."""
    staging = folder / STAGING
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage_parts(
    index: LineIndex, groups: list[RequestGroup], options: SplitOptions, staging: Path
) -> Iterator[SplitPart]:
    """Write one part after the other, group by group."""
    order, num_equal = _order(index), index.num_equal
    counts: Counter[str] = Counter()  # of parts, by folder
    first = 0
    with open(index.path, "rb", buffering=0) as file:
        for group in groups:
            name = "" if options.is_flat else f"{folder_name(group.engine)}/"
            last = first + group.num_rows
            num_rows = options.num_rows(group.max_tokens)
            for start in range(first, last, num_rows):
                rows = order[start : min(start + num_rows, last)]
                path = f"{name}request_{counts[name]}.jsonl"
                counts[name] += 1
                _copy_lines(index, rows.tolist(), file.fileno(), staging / path)
                lines = array("q", (rows + 1).tobytes())
                digest = digest_of(staging / path)
                equal = array("I", (num_equal[row] for row in rows.tolist()))
                equal = equal if any(equal) else array("I")
                yield SplitPart(path, group.engine, group.hyperparameters, digest, lines, equal)
            first = last


def _order(index: LineIndex) -> npt.NDArray[np.int64]:
    """Return lines by group, long prompts first, equal ones as they came; from 0.

    Groups and lengths are given up with that: they are not needed any more.
    """
    lengths = np.frombuffer(index.lengths, np.uint32)
    groups = np.frombuffer(index.groups, np.int32)
    order = np.lexsort((~lengths, groups)).astype(np.int64, copy=False)
    num_blank = int((groups == BLANK).sum())
    index.groups, index.lengths = array("i"), array("I")
    return order[num_blank:]


def _copy_lines(index: LineIndex, rows: list[int], fd: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for row in rows:
            start, end = index.starts[row], index.starts[row + 1]
            raw = os.pread(fd, end - start, start)
            if len(raw) < end - start:
                raise FminferError(f"{index.path} became shorter while it was being split")
            file.write(raw if raw.endswith(b"\n") else raw + b"\n")


def _refuse_several_engines(source: Path, groups: Groups) -> None:
    engines = {group.engine for group in groups.seen if group.engine is not None}
    if len(engines) > 1:
        raise UsageError(
            f"{source} names {len(engines)} engines, whose parts --flat would mix: "
            f"{_name(sorted(engines))}. Leave out --flat; each engine's parts then have a folder"
        )


def _refuse_unknown(folder: Path, old: set[str]) -> None:
    """Refuse a folder with request files that are not an earlier split's.

    Raises:
        UsageError: names them.
    """
    unknown = []
    for path, folders, names in os.walk(folder):
        if Path(path) == folder and STAGING in folders:
            folders.remove(STAGING)
        found = [Path(path, name) for name in names if PART_NAME.fullmatch(name)]
        unknown += [file for file in found if file.relative_to(folder).as_posix() not in old]
    if unknown:
        raise UsageError(
            f"{folder} holds request files that no {MANIFEST} names: {_name(unknown)}. Move them "
            "away, or give another --output-dir"
        )


def _refuse_answered(folder: Path, parts: list[SplitPart], old: set[str]) -> None:
    """Refuse to change parts that were answered, even in part.

    Raises:
        UsageError: names them.
    """
    digests = {path: "" for path in old} | {part.path: part.digest for part in parts}
    found = []
    for path, digest in sorted(digests.items()):
        part = folder / path
        answers = answers_path(part)
        left = [file for file in [*traces(answers), status_path(answers)] if file.exists()]
        if left and digest_of(part) != digest:
            found.append(left[0])
    if found:
        raise UsageError(
            f"{folder} holds answers to parts that this split would change: {_name(found)}. Merge "
            "them (fminfer merge) and remove the folder, or give another --output-dir"
        )


def _publish(folder: Path, staging: Path, manifest: Manifest, old: set[str]) -> None:
    """Move the parts to their places, and remove those of the earlier split that are no more."""
    paths = [part.path for part in manifest.parts]
    stale = sorted(old.difference(paths))
    write_manifest(folder, manifest, unfinished=[*paths, *stale])
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / path, folder / path)
    for path in stale:
        (folder / path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something is in it, as the manifest is in the last
            os.removedirs((folder / path).parent)
    write_manifest(folder, manifest)


def _signature(path: Path) -> tuple[int, int, int] | None:
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _name(paths: Sequence[object]) -> str:
    rest = len(paths) - MAX_NAMED_FILES
    return ", ".join(map(str, paths[:MAX_NAMED_FILES])) + (
        f" and {rest:,} more" if rest > 0 else ""
    )
