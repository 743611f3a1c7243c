"""The state of folders of outputs: progress of each file, its owner, failures, time left."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fminfer.core.errors import UsageError
from fminfer.files.claims import read_claims
from fminfer.files.completed import find_edit, has_input_changed
from fminfer.files.first_lines import holds_requests
from fminfer.files.input_folders import describe_left_out, find_inputs, sort_folder
from fminfer.files.input_models import check_no_models
from fminfer.files.journal import count_rows_from, journal_path
from fminfer.files.line_reader import (
    NAMED_ENDINGS,
    TABLE_ENDINGS,
    count_lines,
    sum_counts,
)
from fminfer.files.ordered_output import errors_path
from fminfer.files.output_paths import answers_path, make_output_paths
from fminfer.files.run_facts import TimeLine, parse_runs, parse_time_line
from fminfer.files.status_file import STATUS, fminfer_fields, read_status, status_path
from fminfer.files.streams import PART_NAME
from fminfer.files.tables.table_file import open_table
from fminfer.files.tables.table_writer import is_table_name, records_path
from fminfer.job.report.answer_fields import read_answer
from fminfer.job.report.reported_outputs import find_output_of, has_readable_rows
from fminfer.job.report.scanning import RowsFile

State = Literal["done", "running", "stopped", "waiting"]
CHANGED = "its input has changed since; the same command answers what is new"
UNLIKE = "none of its first lines is a request; fminfer run reads it all the same"
STATES: tuple[State, ...] = ("done", "running", "stopped", "waiting")


@dataclass(slots=True)
class FileState:
    """One input and its output."""

    output: str
    input: str | None  # None: it is not known here
    state: State
    num_rows: int | None = None  # None: not known yet
    num_answered: int = 0
    num_failed: int = 0
    failed_by_code: dict[str, int] = field(default_factory=dict)
    owner: str | None = None  # of a running one: host and process
    why: str | None = None  # a stopped one ended, or a waiting one may not be answered
    is_edited: bool = False  # its output was complete, and is not as it was written
    # the run that is at work; it may answer several files at once
    run: str | None = None
    rows_per_s: float = 0.0  # of that run, over all its files
    num_in_flight: int = 0  # rows of that run that have begun and not ended
    left_s: float | None = None  # None: not known

    @property
    def num_left(self) -> int | None:
        return (
            None
            if self.num_rows is None
            else self.num_rows - self.num_answered - self.num_failed
        )


@dataclass(slots=True)
class Overview:
    """The state of one folder, or of one output."""

    path: str
    files: list[FileState]
    # what a run passes over, and why
    left_out: dict[str, str] = field(default_factory=dict)

    def count(self, state: State) -> int:
        return sum(file.state == state for file in self.files)

    @property
    def failed_by_code(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for file in self.files:
            total.update(file.failed_by_code)
        return dict(total.most_common())

    @property
    def num_rows(self) -> int | None:
        return sum_counts([file.num_rows for file in self.files])

    @property
    def left_s(self) -> float | None:
        """Return the seconds until all is answered, if as many runs go on as do now."""
        left = [file.num_left for file in self.files if file.state != "done"]
        # of each run, as its newest status has it
        speeds: dict[str, tuple[float, float]] = {}
        for file in self.files:
            name = file.run or file.output
            speed = file.rows_per_s, file.num_in_flight
            speeds[name] = max(speeds.get(name, (0.0, 0.0)), speed)
        rate = sum(rows_per_s for rows_per_s, _ in speeds.values())
        if not left:
            return 0.0
        if None in left or rate <= 0:
            return None
        num_begun = sum(num_in_flight / 2 for _, num_in_flight in speeds.values())
        return max(0.0, sum(n or 0 for n in left) - num_begun) / rate


def find_overviews(path: Path, now_s: float | None = None) -> list[Overview]:
    """Return the state of a folder and those below it, or of one input or output.

    All files of the folder count that a run over it would answer. Those of a folder
    below count if one of them looks like a request file: notes and data sets may lie in others.
    """
    now_s = time.time() if now_s is None else now_s
    if not path.is_dir():
        return [Overview(str(path), [_find_file_state(path, now_s)])]
    overviews = []
    for folder, below, _ in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        pairs = list(_list_files(Path(folder), is_named=Path(folder) == path))
        if Path(folder) == path or any(
            _is_to_answer(source, output) for source, output, _ in pairs
        ):
            files = [
                _read_state(source, output, now_s, trouble)
                for source, output, trouble in pairs
            ]
            overviews += (
                [Overview(folder, files, _find_left_out(Path(folder), files))]
                if files
                else []
            )
    if all(overview.count("waiting") == len(overview.files) for overview in overviews):
        check_no_models([path])
    if not overviews:
        message = f"{path} holds neither requests ({NAMED_ENDINGS}) nor answers"
        raise UsageError("; ".join([message, *describe_left_out([path])]))
    return overviews


def _find_left_out(folder: Path, files: list[FileState]) -> dict[str, str]:
    outputs = {file.output for file in files}
    has_rows = any(map(_is_of_table, map(Path, outputs)))
    return {
        str(path): why
        for why, paths in sort_folder(folder, has_rows=has_rows).left_out.items()
        for path in paths
        if str(path) not in outputs
    }


def _find_file_state(path: Path, now_s: float) -> FileState:
    for output in [path, records_path(path)] if is_table_name(path) else [path]:
        if status_path(output).exists() or journal_path(output).exists():
            return _read_state(None, output, now_s)
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; give a folder, an input, or its output"
        )
    (source,) = find_inputs([path], has_rows=True)
    return _read_state(source, answers_path(source), now_s)


def _list_files(
    folder: Path, *, is_named: bool
) -> Iterator[tuple[Path | None, Path, str | None]]:
    """Yield each input, its output and why it cannot be answered; then other outputs."""
    statuses = [folder / name for name in os.listdir(folder) if name.endswith(STATUS)]
    others = {output for output in map(find_output_of, statuses) if _is_of_run(output)}
    contents = sort_folder(folder, has_rows=any(map(_is_of_table, others)))
    if is_named and not (others or contents.requests):
        contents = sort_folder(folder, has_rows=True)
    plan = make_output_paths(
        [path for path in contents.requests if path not in others], None
    )
    waiting = [*zip(plan.inputs, plan.outputs, strict=True)]
    troubles = plan.refused | contents.lost
    # once an output
    pairs = {answers_path(source): source for source in reversed(troubles)}
    waiting += [(source, output) for output, source in pairs.items()]
    for source, output in sorted(waiting):
        others.discard(output)
        yield source, output, troubles.get(source)
    for output in sorted(others):
        yield None, output, None


def _is_to_answer(source: Path | None, output: Path) -> bool:
    """Tell whether a file was meant for a run: by its run, its name or its first lines."""
    if source is None or _name_state(output, read_status(output) or {}) != "waiting":
        return True
    return bool(PART_NAME.fullmatch(source.name)) or holds_requests(source)


def _is_of_run(output: Path) -> bool:
    """Tell whether the status file beside an output is not another program's."""
    return (read_status(output) or {}).get("object") == "batch" or has_readable_rows(
        output
    )


def _is_of_table(output: Path) -> bool:
    """Tell whether an output has the answers to a table beside it, as those of a folder have."""
    source = Path((read_status(output) or {}).get("input_file_id") or "")
    return (
        source.name.endswith(TABLE_ENDINGS)
        and answers_path(output.with_name(source.name)) == output
    )


def _count_rows(source: Path) -> int | None:
    """Count the rows of an input; None: only a run can, as of a CSV."""
    if not source.name.endswith(TABLE_ENDINGS):
        return count_lines(source)
    with suppress(UsageError):  # the run will say it
        return open_table(source).num_rows
    return None


def _read_state(
    source: Path | None, output: Path, now_s: float, trouble: str | None = None
) -> FileState:
    status = read_status(output) or {}
    counts = status.get("request_counts") or {}
    source = source or (
        Path(status["input_file_id"]) if status.get("input_file_id") else None
    )
    name = _name_state(output, status)
    edit = find_edit(output, status) if name == "done" else None
    is_whole = name == "done" and edit is None
    has_grown = is_whole and source is not None and has_input_changed(source, status)
    state = FileState(
        str(output),
        None if source is None else str(source),
        "stopped" if has_grown or edit is not None else name,
        counts.get("total"),
        int(counts.get("completed") or 0),
        int(counts.get("failed") or 0),
    )
    if source is not None and source.exists() and (state.num_rows is None or has_grown):
        state.num_rows = _count_rows(source)
    # A run writes its status once a second, and its rows at once.
    first = fminfer_fields(status).get("journal_bytes") if status else 0
    if isinstance(first, int):
        newer = count_rows_from(output, first)
        state.num_answered += newer.num_rows - newer.num_errors
        state.num_failed += newer.num_errors
    # how many of them can be taken is not known
    if has_grown and state.num_rows is not None:
        state.num_answered = max(
            0, min(state.num_answered, state.num_rows - state.num_failed)
        )
    if state.num_failed:
        state.failed_by_code = _count_codes(output)
    if state.state == "running":
        _add_run(state, output, status, now_s)
    elif edit is not None:
        state.why = f"{edit.path.name} was edited since: {edit.what}"
        state.is_edited = True
    elif state.state == "stopped":
        state.why = CHANGED if has_grown else _explain_stop(status)
    elif state.state == "waiting":
        is_unlike = (
            source is not None
            and not source.name.endswith(TABLE_ENDINGS)
            and not holds_requests(source)
        )
        state.why = trouble or (UNLIKE if is_unlike else None)
    return state


def _name_state(output: Path, status: dict[str, Any]) -> State:
    if any(not claim.is_dead for claim in read_claims(output, time.time())):
        return "running"
    if output.exists() and not journal_path(output).exists():
        return "done"
    return "stopped" if status or has_readable_rows(output) else "waiting"


def _add_run(
    state: FileState, output: Path, status: dict[str, Any], now_s: float
) -> None:
    """Add the run that answers a file, and its speed."""
    claims = reversed(read_claims(output, time.time()))
    owner = next(
        (claim.owner for claim in claims if claim.owner and not claim.is_dead), None
    )
    state.owner = "?" if owner is None else f"{owner.host}, process {owner.pid}"
    began_s = status.get("in_progress_at")
    if not began_s or now_s <= began_s or state.num_rows is None:
        return
    kept = int(fminfer_fields(status).get("kept_rows") or 0)
    done = state.num_answered + state.num_failed
    state.rows_per_s = max(0, done - kept) / (now_s - began_s)
    last = parse_runs(status)[-1:]
    if last and (line := parse_time_line(last[0].get("time_line"))) is not None:
        _set_rate(state, last[0], line, (began_s, now_s))
    if state.rows_per_s:
        state.left_s = (state.num_rows - done) / state.rows_per_s


def _set_rate(
    state: FileState, run: dict[str, Any], line: TimeLine, span_s: tuple[float, float]
) -> None:
    """Use the rate of the run that is at work, over all of its files.

    One file may wait behind others of the run. Rows in flight count half, but at most as many as
    are done: at first many rows run, and none has ended.

    Args:
        span_s: the times of the file's start and of now.
    """
    began_s, now_s = span_s
    started_s = float(run.get("started_at") or 0)
    num_done = sum(point.num_done for point in line.points)
    if started_s + float(run.get("seconds") or 0) < began_s - 1 or now_s <= started_s:
        return  # an earlier run, which this one follows
    state.run = str(run.get("id"))
    state.num_in_flight = min(line.points[-1].most_running, num_done)
    state.rows_per_s = (num_done + state.num_in_flight / 2) / (now_s - started_s)


def _explain_stop(status: dict[str, Any]) -> str:
    errors = (status.get("errors") or {}).get("data") or []
    if errors:
        return f"failed: {errors[-1].get('message')}"
    named = {"cancelled": "interrupted", "expired": "out of time"}
    return named.get(str(status.get("status")), "its run ended without a word")


def _count_codes(output: Path) -> dict[str, int]:
    """Count an output's errors by code; of one that is not finished, in its journal."""
    rows = RowsFile(journal_path(output), 0, "journal")
    if not rows.path.exists():
        rows = RowsFile(errors_path(output), 0, "errors")
    if not rows.path.exists():
        return {}
    codes: Counter[str] = Counter()
    for _, _, record, is_error in rows.read_rows():
        if is_error:
            answer = read_answer(record)
            error = None if answer is None else answer.error
            codes[str((error or {}).get("code", "?"))] += 1
    return dict(codes.most_common())
