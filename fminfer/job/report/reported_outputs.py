"""The outputs that a report is about, and the runs that their status files hold."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fminfer.core.errors import UsageError
from fminfer.files.completed import Edit, find_edit
from fminfer.files.disk import path_beside
from fminfer.files.first_lines import holds_answers, holds_requests
from fminfer.files.input_models import check_no_models
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import ENDINGS
from fminfer.files.ordered_output import errors_path
from fminfer.files.output_paths import answers_path
from fminfer.files.run_facts import TimeLine, parse_runs, parse_time_line
from fminfer.files.status_file import (
    STATUS,
    read_sound_status,
    read_status,
    status_path,
)
from fminfer.files.tables.table_writer import is_table_name, records_path
from fminfer.job.report.answer_fields import as_dict


@dataclass(slots=True, frozen=True)
class ReportedOutput:
    """An output: complete, or as far as its journal has it."""

    path: Path
    status: dict[str, Any] | None  # None: there is no status file
    is_unfinished: bool  # its rows are in its journal

    @property
    def edit(self) -> Edit | None:
        """Return which of its files is not as it was written; None: nothing is known of that."""
        if self.is_unfinished or not self.path.exists():
            return None
        return find_edit(self.path, self.status or {})

    @property
    def files(self) -> list[Path]:
        """List what belongs to it: rows, errors, journal, status and input."""
        others = [
            errors_path(self.path),
            journal_path(self.path),
            status_path(self.path),
        ]
        return [self.path, *others, *([self.source] if self.source else [])]

    @property
    def source(self) -> Path | None:
        """Return the input; None: it is not known."""
        name = (self.status or {}).get("input_file_id")
        return Path(name) if isinstance(name, str) else None


def find_outputs(paths: Sequence[Path]) -> list[ReportedOutput]:
    """Return the outputs that paths name: outputs, inputs that have one, or folders of them."""
    outputs: dict[Path, ReportedOutput] = {}
    for path in paths:
        for output in _find_in_folder(path) if path.is_dir() else [_find_named(path)]:
            outputs.setdefault(output.resolve(), read_output(output))
    return list(outputs.values())


def read_output(path: Path) -> ReportedOutput:
    """Return an output with its status; raise a UsageError if that cannot be read."""
    return ReportedOutput(
        path, read_sound_status(path), is_unfinished=journal_path(path).exists()
    )


def has_readable_rows(output: Path) -> bool:
    """Tell whether rows of an output can be read: all of them, or those of its journal."""
    return output.exists() or journal_path(output).exists()


def name_files(paths: Sequence[Path]) -> list[str]:
    """Return short names of files: without the folders that all of them have in common."""
    places = [path.absolute() for path in paths]
    common = os.path.commonpath([place.parent for place in places]) if places else ""
    return [str(place.relative_to(common)) for place in places]


def _find_in_folder(folder: Path) -> list[Path]:
    """List a folder's outputs; if it has none, those of folders below, such as of a split."""
    if outputs := _list_outputs(folder):
        return outputs
    for below, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        outputs += _list_outputs(Path(below))
    if not outputs:
        raise UsageError(
            f"{folder} and the folders below hold no answers; give an output of fminfer run"
        )
    return outputs


def _list_outputs(folder: Path) -> list[Path]:
    """List a folder's own outputs: those with a status file, and other files of answers."""
    by_status = {find_output_of(each) for each in folder.glob(f"*{STATUS}")}
    by_name = {
        path
        for path in folder.glob("*.jsonl")
        if not path.name.endswith(".errors.jsonl") and holds_answers(path)
    }
    return sorted(path for path in by_status | by_name if has_readable_rows(path))


def find_output_of(status: Path) -> Path:
    """Return the output beside which a status file stands."""
    output = path_beside(status, ".jsonl", without=STATUS)
    # A long name is cut in another place.
    noted = ((read_status(output) or {}).get("fminfer") or {}).get("output")
    return (
        status.with_name(noted) if noted and Path(str(noted)).name == noted else output
    )


def _find_named(path: Path) -> Path:
    """Return the output that a path names: its own, or that of an input."""
    check_no_models([path])
    if is_table_name(path) and has_readable_rows(records_path(path)):
        raise UsageError(
            f"{path} is a table of answers; a report reads its records. Type: fminfer "
            f"report {shlex.quote(str(records_path(path)))}"
        )
    is_input = (
        path.name.endswith(ENDINGS)
        and path.exists()
        and not journal_path(path).exists()
    )
    if is_input and holds_requests(path) and not holds_answers(path):
        output = answers_path(path)
        if has_readable_rows(output):
            return output
        raise UsageError(
            f"{path} holds requests, and {output} has no answers to them; give the output of "
            "fminfer run"
        )
    if not has_readable_rows(path):
        if errors_path(path).exists():
            return path
        raise UsageError(f"{path} does not exist; give an output of fminfer run")
    if not (path.suffix == ".jsonl" or read_status(path) or holds_answers(path)):
        raise UsageError(
            f"{path} is no output of a run; give one, as in output_requests.jsonl"
        )
    return path


@dataclass(slots=True)
class ReportedRun:
    """One run. What its status does not hold is 0 or empty."""

    started_at: float
    seconds: float
    device: str
    num_threads: int
    ready_s: float
    settings: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0  # computed: of prompts, and drawn
    time_line: TimeLine = field(default_factory=TimeLine)
    num_before: int = 0  # older runs, of which only the number is known
    # whether answers did not depend on other rows; None: it is not known
    same_answers: bool | None = None
    allowed: str = ""  # what constraints left of the model's probability

    def list_widths(self) -> list[float]:
        """Return the seconds of each point of the time line; the last one may be cut."""
        width_s = self.time_line.width_s
        number = len(self.time_line.points)
        last_s = min(width_s, max(self.seconds - width_s * (number - 1), width_s / 100))
        return [width_s] * (number - 1) + [last_s] * (number > 0)


def find_runs(outputs: Iterable[ReportedOutput]) -> list[ReportedRun]:
    """Return the runs of all outputs, each once and in its latest state, the oldest first."""
    runs: dict[str, dict[str, Any]] = {}
    for output in outputs:
        for run in parse_runs(output.status):
            key = str(run.get("id"))
            if key not in runs or _find_number(run, "seconds") > _find_number(
                runs[key], "seconds"
            ):
                runs[key] = run
    return sorted(map(_make_run, runs.values()), key=lambda run: run.started_at)


def _make_run(fields: dict[str, Any]) -> ReportedRun:
    settings = as_dict(fields.get("settings"))
    stats = as_dict(fields.get("stats"))
    answers = fields.get("same_answers")
    return ReportedRun(
        started_at=_find_number(fields, "started_at"),
        seconds=_find_number(fields, "seconds"),
        device=str(fields.get("device") or ""),
        num_threads=int(_find_number(fields, "num_threads")),
        ready_s=_find_number(fields, "ready_s"),
        settings={str(name): str(value) for name, value in settings.items()},
        num_tokens=int(
            _find_number(stats, "num_prompt_tokens")
            + _find_number(stats, "num_generated_tokens")
        ),
        time_line=parse_time_line(fields.get("time_line")) or TimeLine(),
        num_before=int(_find_number(fields, "runs_before")),
        same_answers=answers if isinstance(answers, bool) else None,
        allowed=str(fields.get("allowed") or ""),
    )


def _find_number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
