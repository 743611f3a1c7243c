"""Job scripts for files of any name and flags of any text: bash must read just what was
meant."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fminfer.cluster.job_scripts import TEMPLATES, ScriptTemplate
from fminfer.cluster.slurm_and_lsf import SCHEDULERS, write_list
from fminfer.cluster.submission import JobSpec, Mode

MODES: tuple[Mode, ...] = ("each", "array", "ranks")
# in the program's place: its arguments, with a NUL after each
PRINT = ("printf", "%s\\0")
INDICES = {"SLURM_ARRAY_TASK_ID": "2", "LSB_JOBINDEX": "2", "LSB_JOBID": "1"}


def check_scripts(folder: Path, name: str, flags: list[str]) -> None:
    """Have bash carry out the script of each scheduler and mode.

    Args:
        name: of a file; neither it nor a flag holds a NUL.
    """
    path = Path(f"/{name}")
    job_dir = folder / 'it\'s $(false) a "folder"'
    job_dir.mkdir(exist_ok=True)
    for scheduler in SCHEDULERS.values():
        values = {"time": "1:00", "queue": "a b", "gpus": 2, "nodes": 1, "tasks": 2}
        values |= {"launcher": ["env"], "directives": ("-P 'x y'",), "max_requeues": 3}
        template = ScriptTemplate(TEMPLATES / scheduler.template)
        for mode in MODES:
            command = (*PRINT, "run", *flags)
            spec = JobSpec(mode, "name", job_dir, (path,), template, values, command)
            job = spec.make_job([path] if mode != "array" else [Path("/other"), path])
            if job.list_path is not None:
                write_list(job.list_path, job.files)
            assert _run(job.script) == ["run", *flags, "--infer-data", str(path)], mode


def _run(script: str) -> list[str]:
    done = subprocess.run(
        ["bash"],
        input=os.fsencode(script),
        env=os.environ | INDICES,
        capture_output=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return os.fsdecode(done.stdout).split("\0")[:-1]
