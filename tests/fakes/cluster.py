"""A cluster that is a folder: what the fake sbatch, squeue, bsub, bjobs … have in common.

$FAKE_CLUSTER holds a JSON file for each task in the queue. The programs refuse every
flag and every line of a script that they do not know. `run_queue` runs the queued
scripts one after the other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

# a flag → what its value must match; None: it takes none
Options = dict[str, str | None]
SLURM_FLAGS: Options = {
    "--parsable": None,
    "--job-name": r"(?s).+",
    "--output": r"/.+\.log",
    "--array": r"1-\d+(%\d+)?",
    "--partition": r".+",
    "--time": r"\d+:[0-5]\d:[0-5]\d",
    "--nodes": r"\d+",
    "--ntasks": r"\d+",
    "--ntasks-per-node": r"\d+",
    "--gpus-per-node": r"\d+",
    "--requeue": None,
    "--open-mode": "append",
    "--account": r"\w+",
}
LSF_FLAGS: Options = {
    "-J": r"(?s).+",
    "-o": r"/.+\.log",
    "-q": r".+",
    "-W": r"\d+:[0-5]\d",
    "-n": r"\d+",
    "-R": r"span\[ptile=\d+\]",
    "-gpu": r"num=\d+",
    "-r": None,
    "-Q": r"\d+",
    "-P": r"\w+",
}


def fail(message: str, status: int = 1) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(status)


def folder() -> Path:
    return Path(os.environ["FAKE_CLUSTER"])


def parse(words: list[str], known: Options) -> dict[str, str]:
    """Return the flags' values; anything else ends the program."""
    found = {}
    words = list(words)
    while words:
        flag = words.pop(0)
        has_value = ""
        value = ""
        if flag.startswith("--"):
            flag, has_value, value = flag.partition("=")
        if flag not in known:
            fail(f"unrecognized option {flag!r}")
        pattern = known[flag]
        if pattern is not None and not has_value:
            if flag.startswith("--") or not words:
                fail(f"option {flag!r} requires an argument")
            value = words.pop(0)
        if (pattern is None and has_value) or (
            pattern and not re.fullmatch(pattern, value)
        ):
            fail(f"invalid value {value!r} of {flag}")
        if flag in found:
            fail(f"{flag} is given twice")
        found[flag] = value
    return found


def read_script(sign: str) -> tuple[str, list[str]]:
    """Return standard input and the words of its #SBATCH or #BSUB lines."""
    data = sys.stdin.buffer.read()
    if not data.startswith(b"#!"):
        fail("This does not look like a batch script")
    if b"\r\n" in data:
        fail("Batch script contains DOS line breaks")
    script = os.fsdecode(data)
    words: list[str] = []
    for line in script.split("\n"):
        if line.startswith(sign):
            words += shlex.split(line.removeprefix(sign))
        elif line and not line.startswith("#"):
            break  # as the real ones do
    return script, words


def submit(
    kind: str, name: str, script: str, log: str, indices: str, values: dict[str, str]
) -> int:
    """Put a job's tasks into the queue; return its number."""
    if not Path(log).parent.is_dir():
        fail(f"there is no folder for {log}")
    numbers = [json.loads(path.read_text())["job"] for path in folder().glob("*.task")]
    most = os.environ.get("FAKE_MAX_JOBS")
    counter = folder() / "counter"
    job = int(counter.read_text()) + 1 if counter.exists() else 101
    if most is not None and len(set(numbers)) >= int(most):
        fail("Batch job submission failed: Job violates accounting/QOS policy")
    counter.write_text(str(job))
    last = re.match(r"1-(\d+)", indices)
    for index in range(1, int(last[1]) + 1) if last else [None]:
        task = {
            "kind": kind,
            "job": job,
            "index": index,
            "name": name,
            "script": script,
        }
        task |= {"log": log, "values": values, "restarts": 0, "state": "PENDING"}
        (folder() / f"{job}_{index or 0:05}.task").write_text(json.dumps(task))
    return job


def tasks() -> list[tuple[Path, dict[str, Any]]]:
    return [
        (path, json.loads(path.read_text())) for path in sorted(folder().glob("*.task"))
    ]


def environment(task: dict[str, Any]) -> dict[str, str]:
    job = str(task["job"])
    index = task["index"]
    values = task["values"]
    if task["kind"] == "lsf":
        name = task["name"] + (f"[{index}]" if index else "")
        hosts = " ".join(["127.0.0.1"] * int(values.get("-n", 1)))
        return {
            "LSB_JOBID": job,
            "LSB_JOBINDEX": str(index or 0),
            "LSB_JOBNAME": name,
        } | {"LSB_HOSTS": hosts}
    own = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": task["name"],
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }
    own |= {"SLURM_NTASKS": values["--ntasks"]}
    if task["restarts"]:
        own |= {"SLURM_RESTART_COUNT": str(task["restarts"])}
    if index:
        own |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(index)}
    return own


def run_queue(most: int = 1000) -> list[int]:
    """Run queued tasks until none is left, or so many have run; return their exit statuses."""
    statuses: list[int] = []
    while len(statuses) < most:
        pending = [(path, task) for path, task in tasks() if task["state"] == "PENDING"]
        if not pending:
            break
        path, task = pending[0]
        path.write_text(json.dumps(task | {"state": "RUNNING"}))
        done = subprocess.run(
            ["bash"],
            input=os.fsencode(task["script"]),
            env=os.environ | environment(task),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        signs = {"%A": task["job"], "%a": task["index"], "%j": task["job"]}
        signs |= {"%J": task["job"], "%I": task["index"]}
        log = task["log"]
        for sign, value in signs.items():
            log = log.replace(sign, str(value))
        with open(log, "ab") as file:
            file.write(done.stdout)
        statuses.append(done.returncode)
        _finish(path, task, done.returncode)
    return statuses


def _finish(path: Path, task: dict[str, Any], status: int) -> None:
    is_requeued = json.loads(path.read_text())["state"] == "REQUEUED"
    if task["kind"] == "lsf":
        is_requeued = str(status) == task["values"].get("-Q")
    if is_requeued:
        again = {"state": "PENDING", "restarts": task["restarts"] + 1}
        path.write_text(json.dumps(task | again))
    else:
        path.unlink()


def run_ranks(command: list[str], num_ranks: int, names: tuple[str, str]) -> NoReturn:
    """Be srun or mpirun: start the ranks, wait for all, and end with the highest status."""
    ranks = [
        subprocess.Popen(
            command, env=os.environ | {names[0]: str(rank), names[1]: str(num_ranks)}
        )
        for rank in range(num_ranks)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
