"""An engine of several processes, made by somebody's program: it starts them, and ends them."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.core.config import EngineConfig
from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine.stopper import REPEAT_CTRL_C_S
from fminfer.pipeline.ranks import RankConfig, RankPlace, Spread
from fminfer.runtime.launch import processes
from fminfer.runtime.launch.role import ChildOptions, Role, Task, find_role
from tests.conftest import more
from tests.faults.torture import is_alive
from tests.forked import Forked

ROWS: list[dict[str, Any]] = [
    {
        "prompt": "Question: How do you go",
        "max_tokens": 12,
        "temperature": t,
        "logprobs": 1,
    }
    for t in (0, 1, 1)
]
WAYS = {
    "type": "array",
    "items": {"enum": ["north", "east"]},
    "minItems": 2,
    "maxItems": 4,
}
ROWS += [row | {"max_tokens": 90, "guided_json": WAYS, "seed": 2} for row in ROWS[:2]]
LONG = {"prompt": "north", "max_tokens": 400, "ignore_eos": True}


def answers(engine: fminfer.Engine) -> list[Any]:
    records = sorted(engine.run(ROWS), key=lambda record: record.line.number)
    return [record.result["choices"][0]["text"] for record in records if record.result]


def own_ranks() -> list[int]:
    """List the ranks that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, children) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    is_forked = Path(f"/proc/{pid}/comm").read_text() == "serve-part\n"
    return is_forked or b"serve-part" in Path(
        f"/proc/{pid}/cmdline"
    ).read_bytes().split(b"\0")


@pytest.fixture
def no_rank_is_left() -> Iterator[None]:
    yield
    assert not own_ranks()


def test_two_ranks_answer_as_one(no_rank_is_left: None) -> None:
    """One engine after another, for torch has one group of ranks in a process."""
    with closing(fminfer.Engine(dtype="float32")) as engine:
        expected = answers(engine)
    assert len(expected) == 5 and all(
        2 <= len(json.loads(text)) <= 4 for text in expected[3:]
    )
    for _ in range(2):
        with closing(fminfer.Engine(dtype="float32", world_size=2)) as engine:
            assert len(own_ranks()) == 1
            assert answers(engine) == expected
            with pytest.raises(UsageError, match="Close the other engine"):
                fminfer.Engine(dtype="float32", world_size=2)
            assert answers(engine) == expected, "the one that is there goes on"


def test_sampling_reaches_the_last_rank(
    llama_checkpoint: tuple[Path, Any], no_rank_is_left: None
) -> None:
    """Texts of two ranks were compared that were all empty."""
    draw = {
        "prompt": [5, 17, 80],
        "max_tokens": 9,
        "n": 4,
        "seed": 3,
        "return_token_ids": True,
    }
    rows = [draw, draw | {"min_p": 0.5}, draw | {"top_k": 3}]
    rows += [
        draw | {"allowed_token_ids": [*range(64, 190)]},
        draw | {"bad_words": ["a", "bc"]},
    ]
    found = []
    for world_size in (1, 2):
        with closing(
            fminfer.Engine(
                str(llama_checkpoint[0]), dtype="float32", world_size=world_size
            )
        ) as engine:
            records = sorted(engine.run(rows), key=lambda record: record.line.number)
        choices = [record.result["choices"] for record in records if record.result]
        found.append([[choice["token_ids"] for choice in each] for each in choices])
    assert found[0] == found[1]
    assert len(found[0]) == 5 and all(
        a != b for a, b in itertools.combinations(found[0], 2)
    )
    assert all(64 <= token_id < 190 for ids in found[0][3] for token_id in ids)


def test_a_closed_engine_leaves_no_connection_and_no_thread(
    no_rank_is_left: None,
) -> None:
    """Two threads and their connections stayed until the collector of garbage came by."""
    gc.collect()
    num_threads = threading.active_count()
    before = _sockets()
    gc.disable()
    try:
        fminfer.Engine(dtype="float32", world_size=2).close()
        until_s = time.monotonic() + 10
        while (_sockets() - before or threading.active_count() > num_threads) and (
            time.monotonic() < until_s
        ):
            time.sleep(0.1)
        assert not _sockets() - before
        assert threading.active_count() <= num_threads, threading.enumerate()
    finally:
        gc.enable()


def _sockets() -> set[str]:
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(each))
    return {each for each in found if each.startswith("socket:")}


def test_mistakes_leave_no_rank(tmp_path: Path, no_rank_is_left: None) -> None:
    with pytest.raises(UsageError, match="a KV cache of"):
        fminfer.Engine(world_size=2, budget=10**12)
    with pytest.raises(UsageError, match="stage 1 has no work"):
        fminfer.Engine(world_size=2, num_layers=99)
    with pytest.raises(fminfer.CheckpointError, match="no config"):
        fminfer.Engine(str(tmp_path), world_size=2)
    with pytest.raises(UsageError, match="world_size 3 is not pipeline_group_size"):
        EngineConfig(world_size=3, data_group_size=2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_is_an_error_of_the_run(
    number: signal.Signals, no_rank_is_left: None
) -> None:
    """The process goes on, and can make another engine. SIGTERM is for rank 0 alone."""
    with closing(fminfer.Engine(dtype="float32", world_size=2)) as engine:
        run = engine.run([LONG | {"max_tokens": 100 + 8 * n} for n in range(40)])
        next(run)
        os.kill(own_ranks()[0], number)
        if number == signal.SIGTERM:
            assert len([*run]) == 39
            return
        with pytest.raises(PipelineError, match=r"rank 1 was ended by SIGKILL"):
            list(run)
    with closing(fminfer.Engine(dtype="float32", world_size=2)) as engine:
        assert len(answers(engine)) == len(ROWS)


def test_a_rank_that_dies_before_it_has_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_rank_is_left: None
) -> None:
    """Rank 0 waited for it until its time was over."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'serve-part' in sys.orig_argv: sys.exit('no rank today')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        PipelineError, match="rank 1 ended by itself, with exit status 1"
    ):
        fminfer.Engine(world_size=2)


# Without `if __name__ == "__main__"`, in a folder of its own, with fminfer found by hand.
PROGRAM = """
import os, sys, time
sys.path.insert(0, {home!r})
import fminfer
print("begun", flush=True)
engine = fminfer.Engine(dtype="float32", world_size=2)
records = list(engine.run([{{"prompt": "north", "max_tokens": 3, "temperature": 0}}]))
print(records[0].result["choices"][0]["text"], flush=True)
{then}
"""


def start_program(folder: Path, then: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(
        PROGRAM.format(home=str(Path(fminfer.__file__).parent.parent), then=then)
    )
    command = [sys.executable, program.name]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("then", "status"),
    [
        pytest.param("engine.close()", 0, marks=more),
        ("", 0),
        pytest.param("raise ValueError('boom')", 1, marks=more),
    ],
)
def test_a_program_is_not_run_again_by_its_ranks(
    then: str, status: int, tmp_path: Path
) -> None:
    """It ends as it would without ranks, whether it closes its engine or not."""
    program = start_program(tmp_path, then)
    out, err = program.communicate(timeout=120)
    assert program.returncode == status, err
    assert out.count("begun") == 1 and len(out.splitlines()) == 2
    assert ("ValueError: boom" in err) == bool(status)


def test_ranks_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    then = "print(*os.popen(f'pgrep -P {os.getpid()} -f serve-part').read().split(), flush=True)"
    program = start_program(tmp_path, then + "\ntime.sleep(100)")
    assert program.stdout is not None
    told = [program.stdout.readline() for _ in range(3)]
    ranks = [*map(int, told[2].split())]
    assert ranks
    program.kill()
    program.wait()
    until_s = time.monotonic() + 20
    while any(map(is_alive, ranks)):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_two_ranks_give_lm_eval_the_numbers_of_one(no_rank_is_left: None) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from fminfer.integrations.lm_eval import FminferLM

    pairs = [
        ("Question: How do you go from the den", text) for text in (" to", " north")
    ]
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    found = []
    for further in ("", ",world_size=2"):
        model = FminferLM.create_from_arg_string(f"dtype=float32{further}")
        found.append(model.loglikelihood(requests, disable_tqdm=True))
        model.engine.close()
    for one, two in zip(*found, strict=True):
        assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]


def start_run(folder: Path, *flags: str) -> Forked:
    """Start a run of two ranks in a process group of its own, and wait until a row is kept."""
    rows = [
        {"prompt": "north", "max_tokens": 100, "ignore_eos": True, "user": str(n)}
        for n in range(24)
    ]
    source = folder / "in.jsonl"
    journal = folder / "out.jsonl.journal"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "run",
        str(source),
        "--output",
        str(folder / "out.jsonl"),
        "--max-rows",
        "2",
    ]
    run = Forked([*words, "--world-size", "2", *flags], is_session=True)
    until_s = time.monotonic() + 90
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert run.poll() is None and time.monotonic() < until_s
        time.sleep(0.05)
    return run


def test_ctrl_c_reaches_all_processes_and_ends_the_run_in_good_order(
    tmp_path: Path,
) -> None:
    """A terminal sends it to every process of its group; ranks leave it to rank 0."""
    run = start_run(tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert (
        run.returncode == 130 and "goes on from there" in err and "Traceback" not in err
    ), err
    assert "rank 1" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--grace", "100", "--rank-timeout", "100")
    (child,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    # so that no row ends in the grace, on any machine
    os.kill(int(child), signal.SIGSTOP)
    os.killpg(run.pid, signal.SIGINT)
    until_s = time.monotonic() + 20
    while "Ctrl-C again" not in run.said():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    time.sleep(REPEAT_CTRL_C_S + 0.1)  # sooner, it would be the same one
    num_kept = (tmp_path / "out.jsonl.journal").read_bytes().count(b"\n") - 1
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=10)
    assert run.returncode == 130 and f"finished and kept: {num_kept}." in err, err


@more  # test_fewer_cores.py stops a command and its ranks
def test_a_run_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z stopped the launcher alone, and its ranks went on."""
    run = start_run(tmp_path, "--rank-timeout", "2")
    os.killpg(run.pid, signal.SIGSTOP)  # SIGTSTP needs a terminal
    time.sleep(0.5)
    num_kept = (tmp_path / "out.jsonl.journal").read_bytes().count(b"\n")
    time.sleep(3)
    assert (tmp_path / "out.jsonl.journal").read_bytes().count(b"\n") == num_kept
    os.killpg(run.pid, signal.SIGCONT)
    _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 24


def test_what_a_process_is_told_arrives_as_it_was() -> None:
    facts = RankPlace(1, 2, "127.0.0.1", 7, parent=9, secret="s", prefix="pipeline 1/")
    config = EngineConfig(
        "a model",
        cuda_ids=(1, 0),
        stage_layers=(3, 4),
        request_args={"stop": ["a", "\ud800"]},
    )
    for task in (
        Task(
            Role("rank", Spread(2, 1, 5.0, 6.0, 4, 3), facts),
            config,
            ChildOptions(1.0, True, True),
        ),
        Task(Role("member", Spread(1, 2), None, 5), EngineConfig(), ChildOptions()),
    ):
        line = task.to_json()
        assert Task.from_json(line) == task and "\n" not in line and json.loads(line)


def test_roles() -> None:
    def role(environ: dict[str, str] | None = None, **flags: Any) -> Role:
        return find_role(RankConfig(**flags), environ or {})

    assert role().kind == "alone" and role().is_first and not role().children
    assert role(world_size=3).children == ["rank 1", "rank 2"]
    team = role(world_size=4, data_group_size=2)
    assert team.kind == "starter" and team.children == ["pipeline 0", "pipeline 1"]
    assert team.spread.num_stages == 2
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "a"}
    apart = role(srun, data_group_size=2)
    assert apart.kind == "apart" and not apart.is_first and not apart.children
    assert (apart.spread.num_stages, apart.spread.num_pipelines) == (2, 2)
    assert role(rendezvous="/shared/job", world_size=2).is_first, "it may become rank 0"


def test_processes_find_the_package_that_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder of the package itself was named, from which `fminfer` is not found."""
    monkeypatch.setattr("sys.prefix", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    places = processes._environ()["PYTHONPATH"].split(os.pathsep)
    assert (
        places[0] == "/elsewhere" and Path(places[1], "fminfer", "__init__.py").exists()
    )
