"""Several pipelines answer one input as one does, and a dead one costs no row."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fminfer.contract.request import RequestParams
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError, UsageError
from fminfer.core.messages import MemoryPeak, RankMemory
from fminfer.engine.engine_core import Delta, Failed, Finished
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.stats import EngineState, EngineStats, ReadWork, StageStats
from fminfer.files.status_file import read_status
from fminfer.models.checkpoint import open_model
from fminfer.models.fingerprint import digest_weight_files
from fminfer.pipeline.ranks import RankConfig
from fminfer.pipeline.watch import Fault
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.load.properties import LoadedPipeline, Measured
from fminfer.runtime.team import team_messages
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_messages import (
    Ask,
    Cancel,
    Report,
    decode,
    encode,
    receive,
    send,
)
from fminfer.runtime.team.team_process import SentRequest, TeamPipeline
from fminfer.text.encoded_prompt import EncodedPrompt
from tests.forked import Forked

QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries"
FILES = ("mixed", "n", "bad_lines", "wrapped", "batch", "mixed", "mixed")
TIMES = ("request_time", "created", "prompt_tokens_details", "id", "request_id")
WAIT_S = 240.0

FAILING = """
from fminfer.engine.start import RequestStarter
start = RequestStarter.start_request
def fail(self, request_id, prepared):
    if prepared.params.max_tokens == 7:
        raise ValueError("boom")
    return start(self, request_id, prepared)
RequestStarter.start_request = fail
"""

SLOW = """
import time
from fminfer.forward.stage import Stage
forward = Stage.forward
def forward_later(*args):
    time.sleep(0.02)
    return forward(*args)
Stage.forward = forward_later
"""


def start(*arguments: object) -> Forked:
    return Forked(["run", *map(str, arguments)])


def finish(run: Forked) -> tuple[int, str]:
    try:
        return run.wait(WAIT_S), run.said()
    finally:
        run.kill()


def plain(value: Any) -> Any:
    """Leave out what may differ from run to run."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def read(path: Path) -> list[Any]:
    return [plain(json.loads(line)) for line in path.read_bytes().splitlines()]


def pipelines_of(run: Forked) -> list[int]:
    """Return the process ids of a run's pipelines, in their order."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    python = Path("/proc/self/exe").resolve()
    found = []
    for pid in children:
        with suppress(OSError):  # one that asked the compiler for its version has ended
            if Path(f"/proc/{pid}/exe").resolve(strict=True) == python:
                found.append(int(pid))
    return sorted(found)


NUM_ROWS = 240  # of a run that is still at work when something befalls it


def start_long_run(
    folder: Path, *more: str, num_done: int = 10, **fields: Any
) -> tuple[Forked, Path]:
    """Return a run of two pipelines that has answered so many of its rows, and its output."""
    source = folder / "long.jsonl"
    output = folder / "out.jsonl"
    row = {
        "prompt": "Question: How do you go",
        "max_tokens": 40,
        "min_tokens": 40,
    } | fields
    source.write_text(
        "".join(json.dumps(row | {"user": str(n)}) + "\n" for n in range(NUM_ROWS))
    )
    flags = [
        "--dtype",
        "float32",
        "--max-rows",
        "2",
        "--data-group-size",
        "2",
        "--output",
        output,
    ]
    run = start(source, *flags, *more)
    deadline = time.monotonic() + WAIT_S
    while "Ready after" not in run.said() or _num_done(output) < num_done:
        assert run.poll() is None and time.monotonic() < deadline, finish(run)
        time.sleep(0.02)
    return run, output


def _num_done(output: Path) -> int:
    """Count the rows of its journal, which are written at once."""
    journal = output.with_name(f"{output.name}.journal")
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_two_pipelines_answer_as_one(tmp_path: Path) -> None:
    """Equal sampled lines draw differently, whichever pipeline has which of them."""
    source = tmp_path / "all.jsonl"
    source.write_bytes(
        b"".join((QUERIES / f"{name}.jsonl").read_bytes() for name in FILES)
    )
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for number, out in enumerate(outs, start=1):
        flags = [
            "--data-group-size",
            number,
            "--dtype",
            "float32",
            "--stats",
            f"{out}.stats",
        ]
        status, err = finish(start(source, "--output", out, *flags))
        assert status == 3, err
    for end in (".jsonl", ".errors.jsonl"):
        one, two = (read(out.with_suffix(end)) for out in outs)
        assert len(one) > 5 and one == two
    stats = json.loads(Path(f"{outs[1]}.stats").read_text())
    assert len(stats["engine"]["stages"]) == 2
    assert all(stage["busy_s"] > 0 for stage in stats["engine"]["stages"])
    single = json.loads(Path(f"{outs[0]}.stats").read_text())
    assert stats["completion_tokens"] == single["completion_tokens"]
    assert stats["warnings"] == single["warnings"]


def test_a_pipeline_that_is_killed_costs_no_row(tmp_path: Path) -> None:
    run, output = start_long_run(tmp_path)
    os.kill(pipelines_of(run)[1], signal.SIGKILL)
    status, err = finish(run)
    assert status == 0, err
    assert "Pipeline 1 ended; the others go on, and answer its " in err
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["request"]["user"] for record in records] == [
        *map(str, range(NUM_ROWS))
    ]
    # Whoever answered it, a row has drawn what it draws in a run of its own.
    texts = [record["result"]["choices"][0]["text"] for record in records]
    assert len(set(texts)) > 75
    alone = tmp_path / "alone.jsonl"
    assert (
        finish(start(tmp_path / "long.jsonl", "--output", alone, "--dtype", "float32"))[
            0
        ]
        == 0
    )
    assert read(alone) == read(output)


def test_when_all_pipelines_are_gone_rows_are_kept(tmp_path: Path) -> None:
    run, output = start_long_run(tmp_path)
    for pid in pipelines_of(run):
        os.kill(pid, signal.SIGKILL)
    status, err = finish(run)
    assert (
        status == 1
        and "every pipeline has ended" in err
        and "goes on from there" in err
    )
    kept = output.with_name("out.jsonl.journal").read_bytes().count(b"\n") - 1
    assert kept >= 10 and not output.exists()
    again = finish(
        start(tmp_path / "long.jsonl", "--output", output, "--dtype", "float32")
    )
    assert again[0] == 0 and f"{kept:,} kept from earlier runs" in again[1]
    assert output.read_bytes().count(b"\n") == NUM_ROWS


def test_it_stops_in_good_order(tmp_path: Path) -> None:
    run, output = start_long_run(tmp_path)
    pids = pipelines_of(run)
    run.send_signal(signal.SIGINT)
    status, err = finish(run)
    assert status == 130 and "goes on from there" in err and "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert (read_status(output) or {})["status"] == "cancelled"


def test_told_twice_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelines that still compute have nothing worth waiting for: not for their grace
    either."""
    # A row takes 8 s: 400 steps of 20 ms.
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    long = {"max_tokens": 400, "min_tokens": 400}
    run, _ = start_long_run(tmp_path, "--grace", "100", num_done=0, **long)
    pids = pipelines_of(run)
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert run.poll() is None, "its rows take longer"
    run.send_signal(signal.SIGINT)
    started = time.monotonic()
    status, err = finish(run)
    assert status == 130 and time.monotonic() - started < 40, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_pipelines_end_with_their_run(tmp_path: Path) -> None:
    run, _ = start_long_run(tmp_path)
    pids = pipelines_of(run)
    assert len(pids) == 2
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pipelines_of_two_ranks(tmp_path: Path) -> None:
    outs = [tmp_path / "one.jsonl", tmp_path / "four.jsonl"]
    source = QUERIES / "mixed.jsonl"
    assert finish(start(source, "--output", outs[0], "--dtype", "float32"))[0] == 0
    flags = [
        "--world-size",
        4,
        "--data-group-size",
        2,
        "--dtype",
        "float32",
        "--output",
        outs[1],
    ]
    status, err = finish(start(source, *flags))
    assert status == 0, err
    assert read(outs[0]) == read(outs[1])


FLAGS = [("--world-size", 2), ("--world-size", 4, "--data-group-size", 2)]


@pytest.mark.parametrize("flags", FLAGS)
def test_what_is_wrong_in_every_process_is_told_once(
    flags: Any, tmp_path: Path
) -> None:
    """Each process said it, then the run of each pipeline, and then the run itself."""
    output = ["--budget", 10**12, "--output", tmp_path / "out.jsonl"]
    status, err = finish(start(QUERIES / "plain.jsonl", *flags, *output))
    assert status == 2 and err.splitlines()[-1].startswith("Error: a KV cache of")
    assert err.count("a KV cache of") == 1 and "Traceback" not in err, err


def test_pipelines_that_fail_differently_are_all_told() -> None:
    """Of several that fail alike as they start, the error that ends the run tells."""
    said: list[str] = []
    pipelines: list[TeamPipeline] = []
    whys = (
        ("no 8 GiB", "UsageError"),
        ("no file", "CheckpointError"),
        ("no 9 GiB", "UsageError"),
    )
    for number, why in enumerate(whys):
        ours, theirs = Pipe()
        pipelines.append(TeamPipeline(number, ours))
        send(theirs, Report(failure=Fault(*why)))
        theirs.close()
    with pytest.raises(UsageError, match="no 9 GiB"):
        Team(
            plan_ahead(EngineConfig(), open_model(EngineConfig())),
            lambda: pipelines,
            said.append,
        )
    assert said == ["Pipeline 1 failed: no file; no other is left."]


def test_a_fault_of_ours_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread that hears what is asked, and the run waited for ever."""
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_text(
        "".join(f'{{"prompt": "x", "max_tokens": {n}}}\n' for n in range(1, 10))
    )
    status, err = finish(start(source, "--output", output, "--data-group-size", "2"))
    assert status == 3, err
    (error,) = read(output.with_suffix(".errors.jsonl"))
    assert (error["line"], error["error"]["code"]) == (7, "internal_error")
    assert len(read(output)) == 8


def test_numbers_that_do_not_fit_are_refused() -> None:
    assert RankConfig(world_size=8, data_group_size=2).configured_stages == 4
    assert RankConfig(data_group_size=2).configured_stages is None
    for wrong in (
        {"world_size": 3, "data_group_size": 2},
        {"world_size": 4, "pipeline_group_size": 4, "data_group_size": 2},
    ):
        with pytest.raises(UsageError, match="data-group-size"):
            RankConfig(**wrong)  # type: ignore[arg-type]


ASK = Ask(
    7,
    PreparedRequest(
        RequestParams(stop=("\ud800", "x"), logit_bias=((5, -1.5),), seed=-(2**63)),
        [EncodedPrompt([*range(20)], "text", [0, 1]), EncodedPrompt([1], "", [])],
        repeat=2,
        meaning=b"\xff\x00",
    ),
    priority=-1,
    is_streamed=True,
    is_counted=False,
)
LOADED = LoadedPipeline(
    Machine(has_library=True, packed_by_torch=("bfloat16",), free=1 << 40),
    num_kv_tokens=64,
    chunk_size=0,
    measured=Measured(2, 100, False, "", "no compiler", disk_speed=1.5),
)
MESSAGES = [
    "go on",
    ASK,
    Cancel(7),
    "drain",
    Report(file_digests={"a.safetensors": "digest"}),
    Report(loaded=LOADED, memory=[RankMemory(0, False, 9, MemoryPeak(7))]),
    Report(failure=Fault("no\nroom", "OutOfMemoryError")),
    Report(
        [
            Delta(
                7,
                1,
                "\ud800",
                [5],
                {"tokens": ["list"], "top_logprobs": None},
                "stop",
                5,
            ),
            Finished(
                7,
                [{"list": {"bytes": -0.1}, "text": "\ud800", "big": 2**70}],
                {"n": 1},
                {},
            ),
        ],
        EngineState(3, 2, 1, 0.1, True, 4, 2, 1),
        EngineStats(
            num_steps=3, stages=[StageStats(0.1, 1e-300, math.inf)], read=ReadWork(4, 5)
        ),
    ),
    Report([Failed(7, RequestError("out_of_range", "n is 0", "n"))], EngineState()),
]


@pytest.mark.parametrize(
    "message", MESSAGES, ids=lambda message: type(message).__name__
)
def test_what_travels_between_processes_arrives_as_it_was(message: Any) -> None:
    again = decode(encode(message))
    assert repr(again) == repr(message) and type(again) is type(message)
    if isinstance(message, Report) and any(
        isinstance(e, Failed) for e in message.events
    ):
        assert vars(again.events[0].error) == vars(message.events[0].error)
    else:
        assert again == message


def find_dataclasses(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a value of a type may have within it."""
    for argument in get_args(hint):
        yield from find_dataclasses(argument)
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
        for each in get_type_hints(hint).values():
            yield from find_dataclasses(each)


@pytest.mark.parametrize("message", [Ask, Cancel, Report])
def test_whatever_a_message_may_hold_travels(message: type) -> None:
    """Each chat of a model that thinks ended a run of several pipelines."""
    names = {each.__name__ for each in find_dataclasses(message)}
    assert names <= team_messages._CLASSES.keys()


def test_the_state_of_an_engine_travels_whole() -> None:
    """Its fields were named one by one in ten files, so that a new one needed all of these."""
    values = {
        each.name: number + 0.5 for number, each in enumerate(fields(EngineState))
    }
    state = EngineState(**values)  # type: ignore[arg-type]
    assert decode(encode(Report(state=state))).state == state
    plan = plan_ahead(EngineConfig(), open_model(EngineConfig()))
    ours, theirs = Pipe()
    reports = (
        Report(file_digests=digest_weight_files(plan.checkpoint)),
        Report(loaded=LOADED),
        Report([], state),
    )
    for message in reports:
        send(theirs, message)
    team = Team(plan, lambda: [TeamPipeline(0, ours)], print)
    team._pipelines[0].requests[0] = SentRequest(ASK)  # so that it listens
    assert team.step() == []
    own = {name: getattr(team, name) for name in ("num_waiting", "num_waiting_behind")}
    assert team.state == replace(state, has_begun=True, **own)
    theirs.close()
    team.close()


def test_no_process_unpickles_what_another_sends() -> None:
    """Whoever could write to the connection could run code in the run's own process."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Connection(ours.detach())) as connection, theirs:
        data = pickle.dumps([1])
        theirs.sendall(struct.pack("!i", len(data)) + data)
        with pytest.raises((struct.error, ValueError)):
            receive(connection)
