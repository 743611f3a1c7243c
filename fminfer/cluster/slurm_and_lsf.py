"""Slurm and LSF: names of jobs, commands that submit them and list the queue.

The manuals: https://slurm.schedmd.com/sbatch.html,
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-bsub
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fminfer.core.errors import SchedulerError, UsageError
from fminfer.files.disk import raising_disk_errors, replacing_file


@dataclass(slots=True, frozen=True)
class Job:
    """What is sent: one job, or an array of them."""

    name: str
    script: str
    job_dir: Path  # where its log goes
    list_path: Path | None = None  # where the names of its files are written
    files: tuple[Path, ...] = ()
    is_array: bool = False  # one task a file
    max_running: int | None = None  # tasks of an array at a time

    @property
    def limit(self) -> str:
        """The limit of an array as both schedulers write it: %2, or nothing."""
        return "" if self.max_running is None else f"%{self.max_running}"


@dataclass(slots=True, frozen=True)
class QueuedTask:
    """A job in the queue, waiting or running; of an array each task."""

    name: str
    index: int | None = None


class Slurm:
    """sbatch and squeue."""

    template = "slurm.sh.j2"

    def make_launcher(self, num_ranks: int, *, has_shards: bool = False) -> list[str]:
        """Return what starts the ranks of a job; those of a stage must be on one node."""
        words = ["srun"]  # it knows how many
        if has_shards:
            words.append("--distribution=block")
        return words

    def submit_command(self, job: Job) -> list[str]:
        """Return what sends a job; its script goes to standard input."""
        log = f"{job.job_dir}/{'%A_%a' if job.is_array else '%j'}.log"
        array = [f"--array=1-{len(job.files)}{job.limit}"] if job.is_array else []
        return [
            "sbatch",
            "--parsable",
            f"--job-name={job.name}",
            f"--output={log}",
            *array,
        ]

    def submit(self, job: Job) -> str:
        """Submit a job; return its number."""
        # number;cluster
        return _submit_job(self.submit_command(job), job).strip().partition(";")[0]

    def list_tasks(self) -> list[QueuedTask]:
        """List this user's jobs."""
        user = f"--user={os.getuid()}"
        listing = _run_command(
            ["squeue", "--noheader", "--array", user, "--format=%K %j"]
        )
        parts = [line.partition(" ") for line in listing.split("\n") if line.strip()]
        return [
            QueuedTask(j.strip(), int(k) if k.isdigit() else None) for k, _, j in parts
        ]

    def format_time(self, time_s: float) -> str:
        """Write a limit as H:MM:SS."""
        return format_duration(time_s)


class Lsf:
    """bsub and bjobs."""

    template = "lsf.sh.j2"

    def make_launcher(self, num_ranks: int, *, has_shards: bool = False) -> list[str]:
        return ["mpirun", "-n", str(num_ranks)]  # it fills a node before the next

    def submit_command(self, job: Job) -> list[str]:
        log = f"{job.job_dir}/{'%J.%I' if job.is_array else '%J'}.log"
        array = f"[1-{len(job.files)}]{job.limit}" if job.is_array else ""
        return ["bsub", "-J", job.name + array, "-o", log]

    def submit(self, job: Job) -> str:
        message = _submit_job(self.submit_command(job), job)
        number = re.search(r"Job <(\d+)>", message)
        if number is None:
            raise SchedulerError(f"bsub told no job's number, but {message.strip()!r}")
        return number[1]

    def list_tasks(self) -> list[QueuedTask]:
        try:
            listing = _run_command(["bjobs", "-noheader", "-o", "job_name"])
        except SchedulerError as error:
            if "No unfinished job found" in str(error):
                return []
            raise
        return [
            _parse_lsf_task(line.strip())
            for line in listing.split("\n")
            if line.strip()
        ]

    def format_time(self, time_s: float) -> str:
        """Write a limit as H:MM: bsub -W takes no seconds."""
        minutes = math.ceil(time_s / 60)
        return f"{minutes // 60}:{minutes % 60:02}"


Scheduler = Slurm | Lsf
SCHEDULERS: dict[Literal["lsf", "slurm"], Scheduler] = {"lsf": Lsf(), "slurm": Slurm()}


def format_duration(time_s: float) -> str:
    """Write seconds as H:MM:SS."""
    seconds = int(time_s)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _parse_lsf_task(name: str) -> QueuedTask:
    element = re.fullmatch(r"(.*)\[(\d+)\]", name)
    return (
        QueuedTask(name) if element is None else QueuedTask(element[1], int(element[2]))
    )


def _submit_job(command: list[str], job: Job) -> str:
    """Submit a job, once its folder and its list of files exist; return the command's output."""
    with raising_disk_errors(job.job_dir):
        # without it there would be no logs
        job.job_dir.mkdir(parents=True, exist_ok=True)
        if job.list_path is not None:
            write_list(job.list_path, job.files)
    return _run_command(command, job.script)


def write_list(path: Path, files: Sequence[Path]) -> None:
    """Write the names of files, a NUL after each; whole, or not at all."""
    with replacing_file(path, is_durable=False) as new:
        new.write(b"".join(os.fsencode(file) + b"\0" for file in files))


def read_list(path: Path) -> list[Path]:
    """Read such a list; empty if it is not there: the job was submitted from elsewhere."""
    try:
        names = path.read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
    return [Path(os.fsdecode(name)) for name in names]


def _run_command(command: list[str], text: str = "") -> str:
    """Run a scheduler's command; return its output.

    Raises:
        UsageError: it is not here.
        SchedulerError: it failed.
    """
    try:
        done = subprocess.run(
            command, input=os.fsencode(text), capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            f"{command[0]} is not in PATH; submit from a machine of the cluster on "
            "which it is, or look at what would be sent with --dry-run"
        ) from None
    if done.returncode != 0:
        message = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise SchedulerError(
            f"{command[0]} failed (exit status {done.returncode}): {message}"
        )
    return os.fsdecode(done.stdout)


VARIABLES = ("LSB_JOBNAME", "SLURM_JOB_NAME")  # where LSF and Slurm tell a job its name
OLD_PREFIX = "lsf_"
# What a queue's listing would break at, and the brackets of LSF's arrays.
_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\[\]]")


def find_old_job_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path that this job's name holds, behind its first #; None: it holds none."""
    for variable in VARIABLES:
        parts = split_old_job_name(environ.get(variable, ""))
        if parts is not None:
            return parts[1]
    return None


def split_old_job_name(job_name: str) -> tuple[str, Path] | None:
    """Split `lsf_<name>#<path>`; None: it is no such name."""
    prefix, _, path = job_name.partition("#")
    if not prefix.startswith(OLD_PREFIX) or not path:
        return None
    return prefix.removeprefix(OLD_PREFIX), Path(path)


def make_file_job_name(name: str, path: Path) -> str:
    """Name the job of one file; characters that a scheduler cannot take become `?`."""
    return _ODD.sub("?", f"{OLD_PREFIX}{name}#{path}").strip()


def make_list_job_name(name: str, paths: Sequence[Path]) -> str:
    """Name the job of a list of files; another list has another name."""
    digest = hashlib.blake2b(b"\0".join(map(os.fsencode, paths)), digest_size=4)
    return f"{name}.{digest.hexdigest()}"


def is_job_of(job_name: str, name: str) -> bool:
    """Whether a job was submitted under a name."""
    old = f"{OLD_PREFIX}{name}#"
    return job_name.startswith(old) or bool(
        re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}", job_name)
    )
