"""Runs phases: each in processes of its own, with a limit, and what failed once more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu import results
from benchmarks.gpu.cases import Setting
from benchmarks.gpu.phases import Phase
from benchmarks.gpu.worker import START, Job

ROOT = Path(__file__).resolve().parent.parent.parent
DUMP_S = 2.0  # for processes that are out of time to say where they are
REAP_S = 5.0  # for a driver to let go of a process that was killed
LEAST_S = 1.0  # below which nothing is begun any more
FAILED = ("wrong", "failed", "crashed")
MOST_AGAIN = 8  # cases that run once more: many failures have one cause
AGAIN_S = 10.0  # below which nothing runs once more
Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class Runner:
    """Runs phases one after another.

    Args:
        setting: of all phases but for the seconds.
        log: takes what the processes print.
        end_s: `time.monotonic()` after which nothing runs any more.
    """

    setting: Setting
    log: Path
    end_s: float
    # have imported a module
    _waiting: dict[str, list[Process]] = field(default_factory=dict)

    def run(
        self, phase: Phase, end_s: float | None = None, after: Phase | None = None
    ) -> None:
        """Run a phase, then once more what failed, waiting for each launch.

        Args:
            end_s: `time.monotonic()` at which it is ended, though its own limit is later.
            after: the next phase, whose imports begin meanwhile.
        """
        first_line = len(results.read(self.setting.results))
        started = time.monotonic()
        num = self._num_workers(phase)
        base = Job(phase.number, self.setting, num_places=num)
        jobs = [replace(base, place=place) for place in range(num)]
        self._run_to_end(phase, jobs, {}, end_s, after)
        failed = self._failed(phase, first_line)[:MOST_AGAIN]
        is_time_left = end_s is None or end_s - time.monotonic() > AGAIN_S
        if failed and self.setting.device == "cuda" and is_time_left:
            again = replace(base, only=failed, is_again=True)
            self._run_to_end(phase, [again], {"CUDA_LAUNCH_BLOCKING": "1"}, end_s)
        took = time.monotonic() - started
        results.append(self.setting.results, {"phase": phase.number, "took_s": took})

    def close(self) -> None:
        """End the processes that wait for a phase which does not run."""
        _end(process for each in self._waiting.values() for process in each)
        self._waiting.clear()

    def _num_workers(self, phase: Phase) -> int:
        return phase.num_workers if self.setting.device == "cuda" else 1

    def _run_to_end(
        self,
        phase: Phase,
        jobs: list[Job],
        environ: dict[str, str],
        end_s: float | None,
        after: Phase | None = None,
    ) -> None:
        """Run jobs; the cases that a dead process leaves behind go to the next one."""
        limit = min(self.end_s, end_s or self.end_s, time.monotonic() + phase.limit_s)
        while jobs:
            first_line = len(results.read(self.setting.results))
            processes = self._hand_over(phase, jobs, environ, limit)
            if processes and after is not None and after.module not in self._waiting:
                num = self._num_workers(after)
                self._waiting[after.module] = [
                    self._start(after, {}) for _ in range(num)
                ]
            jobs = self._settle_all(jobs, processes, limit, first_line)

    def _hand_over(
        self, phase: Phase, jobs: list[Job], environ: dict[str, str], limit: float
    ) -> list[Process]:
        """Give each job to a process of its own; none if no time is left."""
        seconds = limit - time.monotonic()
        if seconds < LEAST_S:
            for job in jobs:
                for name in job.only or (START,):
                    self._note(job, name, "not reached", "no time was left")
            return []
        waiting = [] if environ else self._waiting.pop(phase.module, [])
        more = [self._start(phase, environ) for _ in jobs[len(waiting) :]]
        processes = [*waiting, *more]
        for job, process in zip(jobs, processes, strict=True):
            setting = replace(job.setting, seconds=seconds)
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has died: `_settle` says so
                process.stdin.write(
                    replace(job, setting=setting).to_json().encode() + b"\n"
                )
                process.stdin.close()
        return processes

    def _settle_all(
        self, jobs: list[Job], processes: list[Process], limit: float, first_line: int
    ) -> list[Job]:
        """Wait for processes until a time; return jobs for what they left."""
        late = [process for process in processes if not _ends_until(process, limit)]
        for process in late:
            process.send_signal(signal.SIGABRT)  # it writes its stacks into the log
        dumped = time.monotonic() + DUMP_S
        for process in late:
            _ends_until(process, dumped)
        _end(processes)
        lines = results.read(self.setting.results)[first_line:]
        rest = list[Job]()
        for job, process in zip(jobs, processes, strict=False):
            if process.returncode == 0:
                continue
            is_late = process in late
            left = self._settle(job, lines, is_late)
            if left and not is_late:
                rest.append(replace(job, only=left))
        return rest

    def _start(self, phase: Phase, environ: dict[str, str]) -> Process:
        """Start a process, which imports the phase's module and waits for a job."""
        variables = (
            os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | environ
        )
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        if self.setting.device == "cpu":
            variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "benchmarks.gpu.worker", phase.module]
        with self.log.open("ab") as log:
            log.write(
                f"\n--- a process of phase {phase.number} {environ or ''}\n".encode()
            )
            log.flush()
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=variables,
                start_new_session=True,
            )

    def _settle(
        self, job: Job, lines: list[results.Line], is_late: bool
    ) -> tuple[str, ...]:
        """Write down what a dead process was at; return the names of the cases it left."""
        own = [line for line in lines if line.get("worker") == job.place]
        names = next((line["cases"] for line in own if "cases" in line), None)
        if names is None:  # another one would come no further
            self._note(job, START, "crashed", "its process ended; see the log")
            return ()
        begun = {line["case"] for line in own if line.get("state") == "running"}
        done = {
            line["case"] for line in own if line.get("state", "running") != "running"
        }
        left = tuple(name for name in names if name not in begun)
        for name in begun - done:
            state = "out of time" if is_late else "crashed"
            self._note(job, name, state, "its process ended; see the log")
        for name in left if is_late else ():
            self._note(job, name, "not reached", "no time was left")
        return left

    def _note(self, job: Job, name: str, state: str, text: str) -> None:
        """Write down a case that its own process cannot tell of."""
        line: results.Line = {"phase": job.phase, "worker": job.place, "case": name}
        line |= {"state": state, "text": text, "figures": {}}
        results.append(
            self.setting.results, line | ({"again": True} if job.is_again else {})
        )

    def _failed(self, phase: Phase, first_line: int) -> tuple[str, ...]:
        lines = results.read(self.setting.results)[first_line:]
        mine = [
            line for line in lines if line["phase"] == phase.number and "case" in line
        ]
        return tuple(
            line["case"]
            for line in mine
            if line["state"] in FAILED and line["case"] != START
        )


def _ends_until(process: Process, limit: float) -> bool:
    """Wait for a process until a time, and tell whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, limit - time.monotonic()))
    return process.poll() is not None


def _end(processes: Iterable[Process]) -> None:
    """End processes with all that they have started, and what they have left behind."""
    ended = list(processes)
    for process in ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in ended:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        _ends_until(process, time.monotonic() + REAP_S)
