"""Submits the jobs of files that are not finished; waits while the queue has enough."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fminfer.cluster.job_scripts import ScriptTemplate
from fminfer.cluster.slurm_and_lsf import (
    Job,
    QueuedTask,
    Scheduler,
    is_job_of,
    make_file_job_name,
    make_list_job_name,
    read_list,
)
from fminfer.core.errors import SchedulerError
from fminfer.core.quantities import with_noun
from fminfer.files.completed import is_complete

Mode = Literal["each", "array", "ranks"]
# tasks: what Slurm (MaxArraySize) and LSF (MAX_JOB_ARRAY_SIZE) allow by default
MAX_ARRAY = 1000
POLL_S = 30.0
MAX_FAILURES = 10  # times in a row that the queue's listing may fail while we wait
LIST = ".files"  # added to a job's name: the names of its files, with a NUL after each


@dataclass(slots=True, frozen=True)
class JobSpec:
    """What the jobs of a submission have in common."""

    mode: Mode
    name: str
    job_dir: Path
    paths: tuple[Path, ...]  # of the input, as the user gave them
    template: ScriptTemplate
    values: dict[str, object]  # for the template, the same for every job
    command: tuple[str, ...]  # `fminfer run` and its flags
    max_running: int | None = None

    def make_job(self, files: Sequence[Path]) -> Job:
        """Return the job that answers these files."""
        if self.mode == "each":
            return Job(
                make_file_job_name(self.name, files[0]),
                self._render_script(files),
                self.job_dir,
            )
        name = make_list_job_name(self.name, files)
        list_path = self.job_dir / f"{name}{LIST}"
        paths = self.paths if self.mode == "ranks" else ()
        return Job(
            name,
            self._render_script(paths, list_path),
            self.job_dir,
            list_path,
            tuple(files),
            is_array=self.mode == "array",
            max_running=self.max_running,
        )

    def find_queued_files(
        self, tasks: Sequence[QueuedTask], files: Sequence[Path]
    ) -> set[Path]:
        """Return those of the files that queued tasks answer."""
        by_name = {make_file_job_name(self.name, file): file for file in files}
        queued: set[Path] = set()
        lists: dict[str, list[Path]] = {}
        for task in tasks:
            if task.name in by_name:
                queued.add(by_name[task.name])
            elif is_job_of(task.name, self.name):
                if task.name not in lists:
                    lists[task.name] = read_list(self.job_dir / f"{task.name}{LIST}")
                listed = lists[task.name]
                queued.update(
                    listed
                    if task.index is None
                    else listed[task.index - 1 : task.index]
                )
        return queued & set(files)

    def _render_script(
        self, paths: Sequence[Path], list_path: Path | None = None
    ) -> str:
        words = [
            *self.command,
            *(word for path in paths for word in ("--infer-data", str(path))),
        ]
        values = self.values | {"mode": self.mode, "job_dir": str(self.job_dir)}
        return self.template.render(
            values | {"command": words, "file_list": str(list_path or "")}
        )


class DryRun:
    """Prints the shell commands that would submit jobs; asks no scheduler."""

    def __init__(
        self, scheduler: Scheduler, print_script: Callable[[str], None]
    ) -> None:
        self._scheduler = scheduler
        self._print_script = print_script

    def list_tasks(self) -> list[QueuedTask]:
        return []

    def submit(self, job: Job) -> str:
        """Print the commands that would submit a job."""
        lines = [f"mkdir -p {shlex.quote(str(job.job_dir))}"]
        if job.list_path is not None:
            names = shlex.join(map(str, job.files))
            lines.append(f"printf '%s\\0' {names} > {shlex.quote(str(job.list_path))}")
        end = "END_OF_SCRIPT"
        while end in job.script:  # a file may be called anything
            end += "_"
        command = shlex.join(self._scheduler.submit_command(job))
        text = job.script.removesuffix("\n")
        self._print_script("\n".join([*lines, f"{command} << '{end}'", text, end, ""]))
        return job.name


@dataclass(slots=True)
class Submission:
    """Submits the jobs of some files, and counts what became of them."""

    sender: Scheduler | DryRun
    spec: JobSpec
    outputs: dict[Path, Path]  # where each file's answers go
    # most jobs of this name in the queue, each task of an array counted
    max_queued: int
    print_note: Callable[[str], None]  # to the user
    poll_s: float = POLL_S  # how long to wait before the queue is asked again
    num_finished: int = 0
    num_queued_before: int = 0
    sent: list[str] = field(default_factory=list)  # jobs' numbers
    _num_queued: int = 0

    @property
    def summary(self) -> str:
        """Say what became of the files, up to the number of jobs."""
        num_jobs = with_noun(len(self.sent), "job")
        return (
            f"{with_noun(len(self.outputs), 'file')}: {self.num_finished} finished, "
            f"{self.num_queued_before} already queued or running, {num_jobs}"
        )

    def run(self) -> None:
        """Submit a job for each file that is neither finished nor under way.

        Raises:
            SchedulerError: a job was not taken; says which were.
            UsageError: there is no scheduler, or an output was edited since it was complete.
        """
        files = [
            file
            for file, output in self.outputs.items()
            if not is_complete(output, file)
        ]
        self.num_finished = len(self.outputs) - len(files)
        if not files:
            return
        tasks = self.sender.list_tasks()
        self._count_queued(tasks)
        queued = self.spec.find_queued_files(tasks, files)
        self.num_queued_before = len(queued)

        remaining = [file for file in files if file not in queued]
        while remaining:
            size = self._wait_for_room(len(remaining))
            self._submit(remaining[:size])
            remaining = remaining[size:]

    def _submit(self, files: list[Path]) -> None:
        job = self.spec.make_job(files)
        try:
            number = self.sender.submit(job)
        except SchedulerError as error:
            before = (
                f"Submitted before it: {', '.join(self.sent)}"
                if self.sent
                else "None was"
            )
            raise SchedulerError(
                f"{error}\n"
                f"{job.name} was not submitted. {before}. The same command goes on "
                "from there"
            ) from None
        self.sent.append(number)
        self._num_queued += len(files) if job.is_array else 1
        size = f", {with_noun(len(files), 'file')}" if job.list_path is not None else ""
        self.print_note(f"Submitted {number}: {job.name}{size}")

    def _wait_for_room(self, num_left: int) -> int:
        """Return of how many files the next job may be, once there is room for it."""
        least = most = 1
        # not one of a single task for each task that ends
        if self.spec.mode == "array":
            most = min(num_left, MAX_ARRAY, self.max_queued)
            least = min(most, (self.max_queued + 1) // 2)
        has_noted = False
        while (room := self.max_queued - self._num_queued) < least:
            if not has_noted:
                jobs = with_noun(self._num_queued, "job")
                files = with_noun(num_left, "file")
                self.print_note(
                    f"{jobs} queued; {files} waiting for room (after Ctrl-C the same "
                    "command goes on)."
                )
                has_noted = True
            time.sleep(self.poll_s)
            self._count_queued(self._list_tasks_patiently())
        return num_left if self.spec.mode == "ranks" else min(most, room)

    def _list_tasks_patiently(self) -> list[QueuedTask]:
        """List the queue; a scheduler may be busy for a while."""
        for _ in range(MAX_FAILURES - 1):
            try:
                return self.sender.list_tasks()
            except SchedulerError as error:
                self.print_note(f"{error} (asked again in {self.poll_s:g} s)")
                time.sleep(self.poll_s)
        return self.sender.list_tasks()

    def _count_queued(self, tasks: Sequence[QueuedTask]) -> None:
        self._num_queued = sum(is_job_of(task.name, self.spec.name) for task in tasks)
