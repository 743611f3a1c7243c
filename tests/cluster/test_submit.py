"""`fminfer submit` with a Slurm and an LSF that are folders (tests/fakes), and names of jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fminfer.cli.app import main
from fminfer.cluster.slurm_and_lsf import (
    find_old_job_path,
    is_job_of,
    make_file_job_name,
    make_list_job_name,
    read_list,
)
from fminfer.files.status_file import status_path
from tests.conftest import more
from tests.fakes import cluster
from tests.forked import programs

FAKES = Path(__file__).parent.parent / "fakes"
QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries" / "plain.jsonl"
HOSTILE = [
    "two words",
    "it's",
    'a "b"',
    "$(touch never)",
    "`x`; & |",
    "größe",
    "a\nb",
    "a[1]%j\\",
]
Submit = Callable[..., Result]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake schedulers in PATH, and a quick program in fminfer's place."""
    folder = tmp_path / "queue"
    folder.mkdir()
    monkeypatch.setenv("FAKE_CLUSTER", str(folder))
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(
        "fminfer.cli.submit_command._find_program",
        lambda: [str(FAKES / "stub_fminfer")],
    )
    monkeypatch.setattr("fminfer.cluster.submission.POLL_S", 0.0)
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        (folder / f"request_{number}.jsonl").write_text('{"prompt":"a"}\n')
    return folder


def submit(*arguments: object, fails: int = 0) -> Result:
    result = CliRunner().invoke(main, ["submit", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == fails, result.output
    return result


def names(queue: Path) -> list[str]:
    return [task["name"] for _, task in cluster.tasks()]


def ran(queue: Path) -> list[list[str]]:
    """Return the arguments of each program that jobs have run."""
    path = queue / "ran.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


both = pytest.mark.parametrize("scheduler", ["slurm", "lsf"])


def both_in_modes(*names: str, modes: str = "each array ranks") -> pytest.MarkDecorator:
    """Mark a test of every scheduler in every mode; pairs without a name are more of
    the same."""
    pairs = [
        (scheduler, mode) for scheduler in ("slurm", "lsf") for mode in modes.split()
    ]
    marked = [
        pytest.param(*pair, marks=[] if " ".join(pair) in names else more)
        for pair in pairs
    ]
    return pytest.mark.parametrize(("scheduler", "mode"), marked)


@both
def test_a_job_a_file_under_the_old_tools_name(
    scheduler: str, queue: Path, shards: Path, tmp_path: Path
) -> None:
    model = tmp_path / "my llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    flags = ["--", "--model-name", str(model), "--seed", "7"]
    result = submit(
        "--scheduler", scheduler, "--infer-data", shards, "--time", "4:00:00", *flags
    )
    assert names(queue) == [
        f"lsf_my-llama#{shards}/request_{i}.jsonl" for i in range(4)
    ]
    assert (
        "4 files: 0 finished, 0 already queued or running, 4 jobs sent" in result.stderr
    )
    assert cluster.run_queue() == [0, 0, 0, 0]
    assert ran(queue) == [
        [
            "run",
            "--deadline",
            "3:58:00",
            *flags[1:],
            "--infer-data",
            f"{shards}/request_{i}.jsonl",
        ]
        for i in range(4)
    ]
    assert len(list((shards / "jobs").glob("*.log"))) == 4


@both
def test_an_array_with_a_list_of_its_files(
    scheduler: str, queue: Path, shards: Path
) -> None:
    options = ["--mode", "array", "--gpus", 2, "--queue", "gpu", "--max-running", 3]
    submit(
        "--scheduler", scheduler, "--infer-data", shards, *options, "--directive=-P lab"
    ) if scheduler == "lsf" else submit(
        "--scheduler",
        scheduler,
        "--infer-data",
        shards,
        *options,
        "--directive=--account=lab",
    )
    (name,) = set(names(queue))
    assert is_job_of(name, "demo") and len(names(queue)) == 4
    files = [shards / f"request_{i}.jsonl" for i in range(4)]
    assert read_list(shards / "jobs" / f"{name}.files") == files
    (_, task), *_ = cluster.tasks()
    if scheduler == "slurm":
        expected = {"--array": "1-4%3", "--gpus-per-node": "2", "--partition": "gpu"}
        assert (
            expected.items() <= task["values"].items()
            and task["values"]["--ntasks"] == "1"
        )
    else:
        assert (
            task["values"]["-J"] == f"{name}[1-4]%3"
            and task["values"]["-gpu"] == "num=2"
        )
    assert cluster.run_queue() == [0, 0, 0, 0]
    assert ran(queue) == [
        ["run", "--world-size", "2", "--infer-data", str(f)] for f in files
    ]


@both
def test_a_task_without_a_list_answers_nothing(
    scheduler: str, queue: Path, shards: Path
) -> None:
    """An empty path would be the folder in which the job runs, and all files there."""
    submit("--scheduler", scheduler, "--infer-data", shards, "--mode", "array")
    for path in shards.rglob("*.files"):
        path.unlink()
    statuses = cluster.run_queue()
    assert len(statuses) == 4 and 0 not in statuses and not ran(queue)
    assert (
        "the list has no such line"
        in next(
            (shards / "jobs").glob("*_1.log" if scheduler == "slurm" else "*.1.log")
        ).read_text()
    )


@both
def test_one_job_of_ranks(scheduler: str, queue: Path, shards: Path) -> None:
    model = ["--random-init", "llama-160m"]
    options = ["--mode", "ranks", "--gpus", 4, "--nodes", 2, "--", *model]
    submit("--scheduler", scheduler, "--infer-data", shards, *options)
    ((_, task),) = cluster.tasks()
    wanted = {
        "--nodes": "2",
        "--ntasks": "4",
        "--ntasks-per-node": "2",
        "--gpus-per-node": "2",
    }
    if scheduler == "lsf":
        wanted = {"-n": "4", "-R": "span[ptile=2]", "-gpu": "num=2"}
    assert wanted.items() <= task["values"].items()
    assert (
        submit("--scheduler", scheduler, "--infer-data", shards, *options).stdout == ""
    )
    assert cluster.run_queue() == [0]
    assert ran(queue) == [["run", *model, "--infer-data", str(shards)]] * 4, (
        "a rank a task"
    )


@both_in_modes("slurm each", "lsf array", "slurm ranks")
def test_only_what_is_missing_is_submitted_again(
    scheduler: str, mode: str, queue: Path, shards: Path
) -> None:
    """One is finished, one was broken off, one has never run, one is in the queue."""
    finished, broken = (shards / f"output_request_{i}.jsonl" for i in (0, 1))
    finished.touch()
    broken.touch()
    Path(f"{broken}.journal").touch()  # killed while it finished
    given = ["--scheduler", scheduler, "--infer-data"]
    submit(*given, shards / "request_3.jsonl", "--mode", mode)
    result = submit(*given, shards, "--mode", mode)
    assert (
        "4 files: 1 finished, 1 already queued or running, 1" in result.stderr
        or mode == "each"
    )
    assert submit(*given, shards, "--mode", "each").stdout == "", (
        "in whatever mode it waits"
    )
    assert len(names(queue)) == (2 if mode == "ranks" else 3)
    cluster.run_queue()
    assert "4 finished" in submit(*given, shards, "--mode", mode).stderr
    if mode != "ranks":
        assert sorted(arguments[-1][-7:-6] for arguments in ran(queue)) == [
            "1",
            "2",
            "3",
        ]


def test_an_output_that_was_edited_is_refused(queue: Path, shards: Path) -> None:
    """It counted as finished."""
    output = shards / "output_request_0.jsonl"
    output.touch()
    written = {"output": {"bytes": 7, "blake2b": ""}, "errors": None}
    counts = {"total": 1, "completed": 1, "failed": 0}
    status = {
        "status": "completed",
        "request_counts": counts,
        "fminfer": {"written": written},
    }
    status_path(output).write_text(json.dumps(status))
    found = submit("--scheduler", "slurm", "--infer-data", shards, fails=2)
    assert "output_request_0.jsonl is not as it was written" in found.output
    assert names(queue) == []


@both_in_modes("slurm each", "slurm array", "lsf each", "lsf ranks")
def test_a_job_out_of_time_requeues_itself(
    scheduler: str,
    mode: str,
    queue: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of an array: of Slurm's, the first task's number alone would requeue all."""
    monkeypatch.setenv("STUB_STOPS", "2")
    files = [shards / "request_0.jsonl", shards / "request_1.jsonl"]
    data = [word for file in files for word in ("--infer-data", file)]
    submit("--scheduler", scheduler, *data, "--mode", mode)
    assert cluster.run_queue() == ([75, 75, 0] if mode == "ranks" else [75, 75, 0] * 2)
    assert all((shards / f"output_{file.name}").exists() for file in files)


@both
def test_no_job_requeues_itself_for_ever(
    scheduler: str, queue: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STOPS", "99")
    one = ["--infer-data", shards / "request_0.jsonl", "--scheduler", scheduler]
    submit(*one, "--max-requeues", 3)
    statuses = cluster.run_queue(10)
    assert len(statuses) == 4 and set(statuses[:3]) == {75}
    submit(*one, "--max-requeues", 0)
    assert cluster.run_queue(10) == [75]


@both_in_modes("slurm each", "lsf array", modes="each array")
def test_submit_waits_for_room(
    scheduler: str,
    mode: str,
    queue: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = []

    def run_one(seconds: float) -> None:
        most.append(len(cluster.tasks()))
        cluster.run_queue(1)

    for number in range(4, 10):
        shutil.copy(shards / "request_0.jsonl", shards / f"request_{number}.jsonl")
    monkeypatch.setattr("fminfer.cluster.submission.time.sleep", run_one)
    monkeypatch.setenv("FAKE_BUSY", "")
    cluster.submit(
        "slurm", "other", "#!/bin/bash", str(queue / "a.log"), "", {"--ntasks": "1"}
    )
    options = ["--mode", mode, "--max-queued", 3]
    result = submit("--scheduler", scheduler, "--infer-data", shards, *options)
    cluster.run_queue()
    assert len(ran(queue)) == 10 and max(most) == 4, (
        "three, and another one of this user"
    )
    assert "waiting for room" in result.stderr
    assert len(set(names(queue))) == 0


def test_a_busy_scheduler_is_asked_again(
    queue: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld often times out under load; a submit that waits for days must not end by it."""
    slept = []

    def calm(seconds: float) -> None:
        slept.append(seconds)
        cluster.run_queue(1)
        os.environ["FAKE_BUSY"] = "yes" if len(slept) in (1, 2) else ""

    monkeypatch.setenv("FAKE_BUSY", "")
    monkeypatch.setattr("fminfer.cluster.submission.time.sleep", calm)
    result = submit("--scheduler", "slurm", "--infer-data", shards, "--max-queued", 3)
    assert "Socket timed out" in result.stderr and len(slept) == 3
    cluster.run_queue()
    assert len(ran(queue)) == 4


def test_a_refused_job_names_those_before_it(
    queue: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MAX_JOBS", "2")
    given = ["--scheduler", "slurm", "--infer-data", shards]
    said = submit(*given, fails=1).stderr
    assert "Job violates accounting/QOS policy" in said, "the scheduler's own words"
    assert f"lsf_demo#{shards}/request_2.jsonl was not submitted" in said
    assert "Submitted before it: 101, 102." in said
    monkeypatch.delenv("FAKE_MAX_JOBS")
    assert "2 already queued or running, 2 jobs sent" in submit(*given).stderr


@both
def test_without_a_scheduler(
    scheduler: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = ["--scheduler", scheduler, "--infer-data", shards]
    said = submit(*given, fails=2).stderr
    assert ("squeue" if scheduler == "slurm" else "bjobs") + " is not in PATH" in said
    result = submit(*given, "--dry-run")
    assert result.stdout.count("#!/bin/bash") == 4 and "4 jobs to send" in result.stderr
    assert not (shards / "jobs").exists()


@both_in_modes("slurm each", "lsf array", "lsf ranks")
def test_a_dry_run_prints_what_is_sent(
    scheduler: str, mode: str, queue: Path, shards: Path
) -> None:
    """A shell that carries out what is printed does what submit does."""
    for name in [*HOSTILE, "END_OF_SCRIPT\nEND_OF_SCRIPT_"]:
        (shards / f"{name}.jsonl").write_text('{"prompt":"b"}\n')
    given = [
        "--scheduler",
        scheduler,
        "--infer-data",
        shards,
        "--mode",
        mode,
        "--time",
        "2:00",
    ]
    if mode == "ranks":
        (shards / "a'b").mkdir()
        given += ["--job-dir", shards / "a'b"]
    shown = submit(*given, "--dry-run").stdout_bytes
    submit(*given)
    sent = [task for _, task in cluster.tasks()]
    lists = [path.read_bytes() for path in shards.rglob("*.files")]
    for path in [*queue.iterdir(), *shards.rglob("*.files")]:
        path.unlink()
    subprocess.run(["bash"], input=shown, check=True, stdout=subprocess.DEVNULL)
    assert [task for _, task in cluster.tasks()] == sent and len(sent) in (1, 13)
    assert [path.read_bytes() for path in shards.rglob("*.files")] == lists
    assert len(lists) == (mode != "each")


@both_in_modes("lsf each", "slurm array", modes="each array")
def test_odd_names(
    scheduler: str,
    mode: str,
    queue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "odd $(touch never) '\""
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    not_utf8 = os.fsdecode(b"\xff\xfe")
    for name in [*HOSTILE, not_utf8]:
        (folder / f"{name}.jsonl").write_text('{"prompt":"b"}\n')
    flags = ["--model-name", "$(touch never) 'x'\n\"", "--model-type", "`a`"]
    given = [
        "--scheduler",
        scheduler,
        "--infer-data",
        folder,
        "--mode",
        mode,
        "--",
        *flags,
    ]
    submit(*given)
    assert "9 already queued or running, 0 jobs" in submit(*given).stderr
    assert set(cluster.run_queue()) == {0}
    files = sorted(str(folder / f"{name}.jsonl") for name in [*HOSTILE, not_utf8])
    assert sorted(arguments[-1] for arguments in ran(queue)) == files
    assert all(arguments[1:-2] == flags for arguments in ran(queue))
    assert not list(tmp_path.rglob("never"))
    assert "9 finished" in submit(*given).stderr


def test_a_job_without_a_model_is_not_sent_for_lines_that_name_one(
    queue: Path, shards: Path
) -> None:
    """The demo model answered them in the job, and the job ended well."""
    (shards / "request_0.jsonl").write_text('{"prompt": "a", "engine": "opt-175b"}\n')
    found = submit("--job-name", f"lsf_opt-175b#{shards}", fails=2)
    assert (
        "request_0.jsonl: engine is" in found.output
        and "--model-name demo" in found.output
    )
    submit("--job-name", f"lsf_opt-175b#{shards}", "--", "--model-name", "demo")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "--no-such-flag"], "No such option"),
        (["--", "--infer-data", "x.jsonl"], "before the --"),
        (["x.jsonl"], "before the --"),
        (["--", "--restart"], "--restart would begin anew"),
        (["--", "--output", "-"], "give a folder"),
        (["--", "--output", "x.jsonl"], "there are 4 inputs"),
        (["--", "--rank", "0"], "--mode ranks"),
        (["--", "--stats", "x.json"], "4 jobs would write it"),
        (["--", "--world-size", "9"], "9 stages share 2 layers"),
        (["--gpus", "8"], "8 stages share 2 layers"),
        (["--gpus", "4", "--", "--data-group-size", "1"], "4 stages share 2 layers"),
        (["--", "--pipeline-group-size", "4"], "4 stages share 2 layers"),
        (["--", "--model-name", "/nope"], "/nope: there is no such folder"),
        (["--", "--model-name", "./nope"], "./nope: there is no such folder"),
        (["--", "--model-name", "."], "there is no config.json in it"),
        (["--", "--chunk-size", "0"], "chunk"),
        # It told of a --deadline that the user had not given.
        (["--time", "0:20"], "--time 0:00:20 is too short"),
        (["--time", "soon"], "is no duration"),
        (["--nodes", "2"], "needs --mode ranks"),
        (["--launcher", "x"], "needs --mode ranks"),
        (["--max-running", "2"], "is for --mode array"),
        (["--mode", "ranks", "--gpus", "1", "--nodes", "2"], "cannot be spread evenly"),
        (
            [
                "--mode",
                "ranks",
                "--gpus",
                "6",
                "--nodes",
                "2",
                "--",
                "--tp",
                "2",
                "--data-group-size",
                "3",
            ],
            "3 ranks on each of --nodes 2 are no multiple of --tensor-parallel-size 2",
        ),
        (
            ["--gpus", "3", "--", "--tp", "2"],
            "--gpus 3 is no multiple of --tensor-parallel-size 2",
        ),
        (["--queue", "a\nrm -rf /"], "no line of a script may hold"),
        (["--directive", "-P x\nrm -rf /"], "no line of a script may hold"),
        (["--name", "a#b"], "letters, digits"),
        (["--name", "a\n"], "letters, digits"),
        (["--job-dir", "a%j"], "give --job-dir another folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    arguments: list[str], says: str, queue: Path, shards: Path
) -> None:
    given = ["--scheduler", "slurm", "--infer-data", shards]
    assert says in submit(*given, *arguments, fails=2).stderr
    assert not cluster.tasks()


def test_ranks_that_share_layers_fill_one_node_before_the_next(
    queue: Path, shards: Path
) -> None:
    given = [
        "--scheduler",
        "slurm",
        "--infer-data",
        shards,
        "--mode",
        "ranks",
        "--dry-run",
    ]
    given += ["--nodes", "2", "--gpus"]
    assert "srun --distribution=block " in submit(*given, 4, "--", "--tp", 2).stdout
    assert "--distribution" not in submit(*given, 2).stdout


def test_ranks_of_two_pipelines_are_counted_together(queue: Path, shards: Path) -> None:
    """`--gpus 8` for a model of two layers passed, and failed in each job: it is 4 pipelines."""
    given = ["--scheduler", "slurm", "--infer-data", shards / "request_0.jsonl"]
    submit(*given, "--gpus", 8, "--", "--data-group-size", 4)
    cluster.run_queue()
    ((_, *arguments),) = ran(queue)
    assert arguments[:4] == ["--world-size", "8", "--data-group-size", "4"]


@both
def test_logs_of_an_engine_whose_folder_has_a_percent_sign(
    scheduler: str, queue: Path, tmp_path: Path
) -> None:
    """split wrote `my%20model`, and submit refused to put logs there."""
    source = tmp_path / "requests.jsonl"
    source.write_text('{"engine": "my model", "prompt": "a", "max_tokens": 2}\n')
    parts = tmp_path / "parts"
    arguments = ["split", "--input-file", str(source), "--output-dir", str(parts)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    flags = ["--", "--model-name", "demo"]
    submit("--scheduler", scheduler, "--infer-data", parts / "my%20model", *flags)
    assert cluster.run_queue() == [0]
    assert len(list((parts / "jobs").glob("*.log"))) == 1
    assert len(list((parts / "my%20model").glob("output_*"))) == 1


def test_the_old_tools_way_to_submit(queue: Path, shards: Path) -> None:
    """`--job-name "lsf_X#PATH"` named script and input at once; X stays in the jobs' names."""
    submit("--job-name", f"lsf_opt-175b#{shards}", "--", "--random-init", "llama-160m")
    assert names(queue) == [
        f"lsf_opt-175b#{shards}/request_{i}.jsonl" for i in range(4)
    ]
    assert {task["kind"] for _, task in cluster.tasks()} == {"lsf"}
    assert cluster.run_queue() == [0] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--job-name", "opt#x"], "it must be lsf_NAME#PATH"),
        (["--job-name", "lsf_opt"], "it must be lsf_NAME#PATH"),
        (["--job-name", "lsf_a b#x"], "letters, digits"),
        (["--job-name", "lsf_a#x", "--name", "b"], "leave these out"),
        (["--scheduler", "lsf"], "submit needs --infer-data"),
        (["--infer-data", "."], "submit needs --scheduler"),
    ],
)
def test_half_of_what_submit_needs(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/request_0.jsonl").touch()
    assert says in submit(*arguments, fails=2).stderr


def test_names_of_jobs() -> None:
    assert find_old_job_path({"LSB_JOBNAME": "lsf_opt-175b#/data/a#b c.jsonl"}) == Path(
        "/data/a#b c.jsonl"
    )
    assert find_old_job_path({"SLURM_JOB_NAME": "lsf_x#shards/"}) == Path("shards/")
    for other in ({}, {"LSB_JOBNAME": "lsf_x#"}, {"SLURM_JOB_NAME": "job#/a.jsonl"}):
        assert find_old_job_path(other) is None
    assert find_old_job_path(
        {"LSB_JOBNAME": "x", "SLURM_JOB_NAME": "lsf_y#/z"}
    ) == Path("/z")
    assert make_file_job_name("m", Path("/a[1]\n.jsonl")) == "lsf_m#/a?1??.jsonl"
    one = make_list_job_name("m", [Path("/a"), Path("/b")])
    assert is_job_of(one, "m") and one != make_list_job_name("m", [Path("/a/b")])
    assert (
        not is_job_of(one, "n")
        and not is_job_of("m.1234567", "m")
        and not is_job_of("lsf_mm#/a", "m")
    )


def test_run_finds_its_file_in_the_jobs_name(tmp_path: Path) -> None:
    """As jobs of the old tool's loop did: `bsub -J "lsf_opt#$file" … fminfer run`."""
    path = tmp_path / "a#1.jsonl"
    path.write_text("".join(QUERIES.read_text().splitlines(keepends=True)[:2]))
    environ = {"LSB_JOBNAME": f"lsf_demo#{path}"}
    done = CliRunner().invoke(main, ["run", "--kernels", "off"], env=environ)
    assert done.exit_code == 0, done.output
    assert f"Answering {path}, which is in this job's name." in done.stderr
    assert len((tmp_path / "output_a#1.jsonl").read_text().splitlines()) == 2


def test_ranks_of_a_job_answer_for_real(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of the demo model, as srun's tasks."""
    monkeypatch.setenv("PATH", programs(tmp_path / "programs"))
    monkeypatch.setattr("fminfer.cli.submit_command._find_program", lambda: ["fminfer"])
    shutil.copy(QUERIES, tmp_path / "plain.jsonl")
    options = ["--mode", "ranks", "--", "--world-size", "2", "--kernels", "off"]
    submit("--scheduler", "slurm", "--infer-data", tmp_path / "plain.jsonl", *options)
    assert cluster.run_queue() == [0], (tmp_path / "jobs" / "101.log").read_text()
    assert len((tmp_path / "output_plain.jsonl").read_text().splitlines()) == 8


def test_a_file_that_is_given_without_its_flag_is_named(shards: Path) -> None:
    """The message wanted a FOLDER, and did not say where the file belongs."""
    file = next(iter(sorted(shards.glob("*.jsonl"))))
    done = submit("--scheduler", "slurm", file, fails=2)
    assert f"submit needs --infer-data {file}" in done.output
