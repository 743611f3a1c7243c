"""Runs phases: each in processes of its own, with a limit, and what failed once more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu import results
from benchmarks.gpu.cases import Setting
from benchmarks.gpu.phases import Phase
from benchmarks.gpu.worker import Job

ROOT = Path(__file__).resolve().parent.parent.parent
DUMP_S = 2.0  # for a process that is out of time to say where it is
LEAST_S = 1.0  # below which nothing is begun any more
FAILED = ("wrong", "failed", "crashed")
MOST_AGAIN = 8  # cases that run once more: many failures have one cause
START = "start"  # of a process that ends before it has a case


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

    def run(self, phase: Phase) -> None:
        """Run a phase, then once more what failed, waiting for each launch."""
        first_line = len(results.read(self.setting.results))
        started = time.monotonic()
        num = phase.num_workers if self.setting.device == "cuda" else 1
        base = Job(phase.number, phase.module, self.setting, num_places=num)
        self._run_to_end(phase, [replace(base, place=place) for place in range(num)], {})
        failed = self._failed(phase, first_line)[:MOST_AGAIN]
        if failed and self.setting.device == "cuda":
            again = replace(base, only=failed, is_again=True)
            self._run_to_end(phase, [again], {"CUDA_LAUNCH_BLOCKING": "1"})
        took = time.monotonic() - started
        results.append(self.setting.results, {"phase": phase.number, "took_s": took})

    def _run_to_end(self, phase: Phase, jobs: list[Job], environ: dict[str, str]) -> None:
        """Run jobs; the cases that a dead process leaves behind go to the next one."""
        limit = min(self.end_s, time.monotonic() + phase.limit_s)
        while jobs:
            jobs = self._run_jobs(jobs, environ, limit)

    def _run_jobs(self, jobs: list[Job], environ: dict[str, str], limit: float) -> list[Job]:
        """Run processes beside each other until a time; return jobs for what they left."""
        first_line = len(results.read(self.setting.results))
        if limit - time.monotonic() < LEAST_S:
            for job in jobs:
                for name in job.only or (START,):
                    self._note(job, name, "not reached", "no time was left")
            return []
        seconds = limit - time.monotonic()
        jobs = [replace(job, setting=replace(job.setting, seconds=seconds)) for job in jobs]
        processes = [self._start(job, environ) for job in jobs]
        rest: list[Job] = []
        for job, process in zip(jobs, processes, strict=True):
            is_late = _wait(process, limit)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that it has left behind
            if process.returncode == 0:
                continue
            lines = results.read(self.setting.results)[first_line:]
            left = self._settle(job, lines, is_late)
            if left and not is_late:
                rest.append(replace(job, only=left))
        return rest

    def _start(self, job: Job, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.setting.scratch / f"job-{job.phase}-{job.place}.json"
        path.write_text(job.to_json())
        variables = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | environ
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        if self.setting.device == "cpu":
            variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "benchmarks.gpu.worker", str(path)]
        with self.log.open("ab") as log:
            log.write(f"\n--- phase {job.phase}, process {job.place} {environ or ''}\n".encode())
            log.flush()
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, start_new_session=True
            )

    def _settle(self, job: Job, lines: list[results.Line], is_late: bool) -> tuple[str, ...]:
        """Write down what a dead process was at; return the names of the cases it left."""
        own = [line for line in lines if line.get("worker") == job.place]
        names = next((line["cases"] for line in own if "cases" in line), None)
        if names is None:  # another one would come no further
            self._note(job, START, "crashed", "its process ended; see the log")
            return ()
        begun = {line["case"] for line in own if line.get("state") == "running"}
        done = {line["case"] for line in own if line.get("state", "running") != "running"}
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
        results.append(self.setting.results, line | ({"again": True} if job.is_again else {}))

    def _failed(self, phase: Phase, first_line: int) -> tuple[str, ...]:
        lines = results.read(self.setting.results)[first_line:]
        mine = [line for line in lines if line["phase"] == phase.number and "case" in line]
        return tuple(line["case"] for line in mine if line["state"] in FAILED)


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a process until a time, then end it; tell whether it was late."""
    try:
        process.wait(max(0.0, limit - time.monotonic()))
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it writes its stacks into the log
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DUMP_S)
    process.kill()
    process.wait()
    return True
