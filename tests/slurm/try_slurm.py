"""`fminfer submit` with a real Slurm, which scripts/try_slurm starts here on this machine.

An array of five files; a job that is out of time and goes back into the queue by
itself; one that Slurm ends at its time limit. Steps of the latter two are slowed down
(sitecustomize.py) until they are submitted again; every row that was finished before
must come out as it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fminfer.files.journal import journal_path
from tests.faults.torture import kept_records
from tests.slurm.node import is_empty, is_gone, job_field, one_node, wait_until

NAMES = [
    "plain",
    "two words",
    "it's $(touch never)",
    'a "quoted"; & | name',
    "größe % \\ [1]\nend",
]
NUM_SLOW = 100
SLOW_TOKENS = 20  # one at a time, these are not done within two minutes
STEP_S = 0.1
HERE = Path(__file__).parent
QUERIES = HERE.parent.parent / "examples" / "queries" / "plain.jsonl"
STARTED_S = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED_S:5.0f} s  {text}", flush=True)


def submit(
    folder: Path, *arguments: str, flags: list[str], is_slow: bool = False
) -> str:
    """Submit; return the number of the one job, or of the last."""
    command = [sys.executable, "-m", "fminfer", "submit", "--scheduler", "slurm"]
    command += ["--infer-data", str(folder), *arguments, "--", *flags]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    slow = {"STEP_S": str(STEP_S), "PYTHONPATH": path} if is_slow else {}
    environ = os.environ | slow  # Slurm hands it on to the job
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    say(done.stderr.strip().splitlines()[-1])
    numbers = re.findall(r"^Submitted (\d+)", done.stderr, re.MULTILINE)
    return numbers[-1] if numbers else ""


def write_slow(folder: Path) -> Path:
    """Write rows that take long; return where their answers go."""
    folder.mkdir()
    request = {"max_tokens": SLOW_TOKENS, "temperature": 0, "ignore_eos": True}
    rows = [{"prompt": [5 + number] * 8, **request} for number in range(NUM_SLOW)]
    (folder / "slow.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "output_slow.jsonl"


def try_array(folder: Path) -> None:
    """Five files of odd names: a job each that waits, then an array, and one job of two
    ranks."""
    folder.mkdir()
    lines = QUERIES.read_text().splitlines(keepends=True)
    for number, name in enumerate(NAMES):
        (folder / f"{name}.jsonl").write_text("".join(lines[number : number + 4]))
    submit(folder, "--directive=--hold", flags=[])
    assert submit(folder, "--mode", "array", flags=[]) == "", (
        "each is known by its job's name"
    )
    subprocess.run(["scancel", "--state=PENDING", f"--user={os.getuid()}"], check=True)
    wait_until(is_empty, 30, "the jobs that were taken back")
    job = submit(
        folder, "--mode", "array", "--max-running", "2", "--time", "5:00", flags=[]
    )
    ranks = folder.parent / "ranks"  # srun's tasks, with answers of their own
    flags = ["--world-size", "2", "--output", str(ranks)]
    ranks_job = submit(folder, "--mode", "ranks", "--name", "ranks", flags=flags)
    wait_until(
        lambda: is_gone(job) and is_gone(ranks_job), 120, "the array and the ranks"
    )
    for number, name in enumerate(NAMES):
        records = (folder / f"output_{name}.jsonl").read_text().splitlines()
        assert len(records) == 4, (name, records)
        for record, line in zip(records, lines[number:], strict=False):
            assert record.startswith('{"request":' + line.strip()), "in order, verbatim"
        assert len((ranks / f"output_{name}.jsonl").read_text().splitlines()) == 4
    assert not Path("never").exists() and not (folder / "never").exists()
    assert submit(folder, "--mode", "array", flags=[]) == "", "all is finished"
    say(
        "an array of five, and two ranks of srun: every file answered, whatever its name"
    )


def check_complete(output: Path, kept: set[bytes]) -> None:
    """See that every row is there, and the earlier ones as they were."""
    records = output.read_bytes().splitlines()
    assert len(records) == NUM_SLOW and not journal_path(output).exists()
    assert kept <= set(records), "a finished row has changed"
    for number, record in enumerate(records):
        fields = json.loads(record)
        assert fields["request"]["prompt"][0] == 5 + number, "out of order"
        assert fields["result"]["usage"]["completion_tokens"] == SLOW_TOKENS


def try_limits(folder: Path) -> None:
    """A job that is out of time, and one that Slurm ends; both are submitted again."""
    late = write_slow(folder / "late")
    limited = write_slow(folder / "limited")
    late_flags = ["--max-rows", "1", "--grace", "0", "--deadline", "30s"]
    late_job = submit(late.parent, "--time", "10:00", flags=late_flags, is_slow=True)
    # fminfer is given a deadline that is none, so that it is Slurm who ends it.
    limited_flags = ["--max-rows", "1", "--deadline", "1h"]
    limited_job = submit(
        limited.parent, "--time", "1:00", flags=limited_flags, is_slow=True
    )
    wait_until(
        lambda: job_field(late_job, "Restarts") == "1", 90, "a job to be requeued"
    )
    say("a job that was out of time has put itself back into the queue")
    wait_until(
        lambda: job_field(late_job, "JobState") == "RUNNING", 60, "its second turn"
    )
    first_turn = kept_records(late)
    assert first_turn, "it has done nothing"
    wait_until(lambda: len(kept_records(late)) > len(first_turn), 60, "it to go on")
    subprocess.run(["scancel", late_job], check=True)
    wait_until(
        lambda: is_gone(late_job) and is_gone(limited_job), 120, "the time limit"
    )
    assert job_field(limited_job, "JobState") == "TIMEOUT", job_field(
        limited_job, "JobState"
    )
    kept = {output: kept_records(output) for output in (late, limited)}
    for output, rows in kept.items():
        assert 0 < len(rows) < NUM_SLOW and not output.exists(), len(rows)
    assert first_turn < kept[late]
    say(f"Slurm has ended a job at its limit; {len(kept[limited])} rows are kept")
    jobs = [submit(output.parent, "--time", "10:00", flags=[]) for output in kept]
    wait_until(lambda: all(map(is_gone, jobs)), 120, "the rest")
    for output, rows in kept.items():
        check_complete(output, rows)
    say("both files are complete, with every row that was finished before")


def main() -> None:
    # and clean up
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("Out of time."))
    with tempfile.TemporaryDirectory(prefix="slurm") as name, one_node(Path(name)):
        say("Slurm is there")
        try:
            try_array(Path(name) / "array")
            try_limits(Path(name))
        except BaseException:
            for path in Path(name).rglob("*.log"):
                print(
                    f"==== {path}\n{path.read_text(errors='replace')[-1500:]}",
                    flush=True,
                )
            raise


if __name__ == "__main__":
    main()
