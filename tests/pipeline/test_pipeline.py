"""Several ranks answer as one does; they find each other in every way that there is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fminfer
from fminfer.core.errors import StoppedError
from fminfer.pipeline import finding
from fminfer.pipeline.finding import machine_id, open_store
from fminfer.pipeline.group import Meeting
from fminfer.pipeline.ranks import RankPlace
from tests.conftest import VOCAB, more, save_byte_tokenizer
from tests.forked import Forked, programs

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUERIES = EXAMPLES / "queries"
FILES = ("mixed", "echo", "logprobs", "n")


def start(*arguments: object, network: str | None = None, **variables: str) -> Forked:
    given = ["run", *map(str, arguments)]
    return Forked(given, os.environ | variables, network=network)


def finish(*ranks: Forked, timeout: float = 90) -> list[tuple[int, str]]:
    """Wait for all and return each one's exit status and stderr."""
    try:
        ended = [
            (rank.communicate(timeout=timeout)[1], rank.returncode) for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()
    return [(status, err) for err, status in ended]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def inputs() -> list[Path]:
    return [QUERIES / f"{name}.jsonl" for name in FILES]


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the choices of each record of each file, logprobs rounded."""
    found = {}
    for name in FILES:
        lines = (folder / f"output_{name}.jsonl").read_text().splitlines()
        found[name] = [
            _rounded(json.loads(line)["result"]["choices"]) for line in lines
        ]
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) + 0.0
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alone")
    [(status, err)] = finish(start(*inputs(), "--output", folder))
    assert status == 0, err
    return read(folder)


def test_ranks_that_the_run_starts(alone: dict[str, Any], tmp_path: Path) -> None:
    told = ["--stats", tmp_path / "stats.json", "--trace", tmp_path / "trace.json"]
    run = start(*inputs(), "--output", tmp_path, "--world-size", 2, *told)
    [(status, err)] = finish(run)
    assert status == 0, err
    assert read(tmp_path) == alone
    assert "stages busy" in err and "bubble" in err and "MB sent" in err
    stages = json.loads((tmp_path / "stats.json").read_text())["engine"]["stages"]
    assert len(stages) == 2 and all(stage["busy_s"] > 0 for stage in stages)
    assert all(stage["sent_bytes"] > 1000 for stage in stages)
    check_trace(json.loads((tmp_path / "trace.json").read_text()), num_ranks=2)


def check_trace(events: list[dict[str, Any]], num_ranks: int) -> None:
    names = {
        e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    assert names == {rank: f"rank {rank}" for rank in range(num_ranks)}
    spans = [event for event in events if event.get("ph") == "X"]
    assert {span["name"] for span in spans} >= {"prefill", "decode"}
    steps = [
        [s["args"]["step"] for s in spans if s["tid"] == r] for r in range(num_ranks)
    ]
    assert steps[0] == sorted(steps[0]) and all(ids == steps[0] for ids in steps)
    for rank in range(num_ranks):
        own = [span for span in spans if span["tid"] == rank]
        ends = [span["ts"] + span["dur"] for span in own]
        assert all(end <= s["ts"] + 50 for end, s in zip(ends, own[1:], strict=False))
    first, last = ([s for s in spans if s["tid"] == r] for r in (0, num_ranks - 1))
    for before, after in zip(first, last, strict=True):
        assert before["ts"] + before["dur"] <= after["ts"] + 50, (
            "a stage began before its input"
        )


def test_ranks_by_hand_in_any_order(alone: dict[str, Any], tmp_path: Path) -> None:
    """As the seed's shell loop starts them, last rank first."""
    shared = ["--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port()}"]
    shared += [
        "--pp-mode",
        "pipe_sync_sample_mask_token_pipe",
        "--num-iters",
        99999999999999,
    ]
    shared += [*inputs(), "--output", tmp_path]
    second = start(*shared, "--rank", 1)
    first = start(*shared, "--rank", 0)
    (status, err), (other, _) = finish(first, second)
    assert (status, other) == (0, 0), err
    assert read(tmp_path) == alone


def test_why_another_rank_is_slow_is_told(tmp_path: Path) -> None:
    shared = ["--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port()}"]
    shared += [QUERIES / "plain.jsonl", "--output", tmp_path / "out.jsonl"]
    second = start(*shared, "--rank", 1, CXX="no-such-compiler")
    (status, err), _ = finish(start(*shared, "--rank", 0), second)
    assert status == 0 and "slower than it could be: there is no C++ compiler" in err


def torchrun(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    command += [
        "--master-port",
        free_port(),
        "--no-python",
        "fminfer",
        "run",
        *arguments,
    ]
    environ = os.environ | {"PATH": programs(folder)}
    options: dict[str, Any] = {"env": environ, "capture_output": True, "text": True}
    return subprocess.run([*map(str, command)], timeout=120, **options)


def test_torchrun(alone: dict[str, Any], tmp_path: Path) -> None:
    done = torchrun(tmp_path / "programs", *inputs(), "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == alone


def leave_dead_address(file: Path) -> None:
    """Write what a run leaves that is killed."""
    fields = {
        "machine": machine_id(),
        "hosts": ["127.0.0.1"],
        "port": free_port(),
        "secret": "s",
    }
    file.write_text(json.dumps(fields))
    file.chmod(0o600)


def test_a_folder_where_they_meet(alone: dict[str, Any], tmp_path: Path) -> None:
    """Nobody is told a rank, and a killed run's address lies in the folder."""
    place = tmp_path / "meet"
    place.mkdir()
    leave_dead_address(place / "fminfer-rendezvous-000003.json")
    shared = ["--world-size", 2, "--rendezvous", place, *inputs(), "--output", tmp_path]
    (status, err), (other, err2) = finish(start(*shared), start(*shared))
    assert (status, other) == (0, 0), err + err2
    assert read(tmp_path) == alone
    assert not list(place.iterdir()), "the address is removed"
    broken = [
        *shared[:4],
        "--model-name",
        tmp_path / "nothing",
        *inputs(),
        "--output",
        tmp_path,
    ]
    for status, err in finish(*[start(*broken, "--restart") for _ in range(2)]):
        assert status == 1, err
    assert not list(place.iterdir()), "also by a run that failed"


def test_many_that_find_a_dead_address_agree_on_one_store(tmp_path: Path) -> None:
    for turn in range(5):
        folder = tmp_path / str(turn)
        folder.mkdir()
        leave_dead_address(folder / "fminfer-rendezvous-000000.json")
        facts = RankPlace(None, 8, folder=folder)
        with ThreadPoolExecutor(8) as threads:
            places = list(threads.map(lambda _, f=facts: open_store(f, 20), range(8)))
        orders = [place.add("order", 1) for place in places]
        assert sorted(orders) == list(range(1, 9)), "each counts in the same store"
        assert sum(place.holder is not None for place in places) == 1
        assert len({place.port for place in places}) == 1


def test_an_address_that_cannot_be_read_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "TORN_S", 0.5)
    torn = tmp_path / "fminfer-rendezvous-000000.json"
    torn.write_text("{torn")
    torn.chmod(0o600)
    assert open_store(RankPlace(None, 2, folder=tmp_path), 20).add("order", 1) == 1


def test_two_loopback_addresses(alone: dict[str, Any], tmp_path: Path) -> None:
    """A host:port where they meet; one machine's address is not the other's."""
    shared = ["--world-size", 2, "--rendezvous", f"127.0.0.2:{free_port()}"]
    shared += [*inputs(), "--output", tmp_path]
    (status, err), (other, err2) = finish(start(*shared), start(*shared))
    assert (status, other) == (0, 0), err + err2
    assert read(tmp_path) == alone


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    shared = [*inputs(), "--output", tmp_path, "--world-size", 3, "--dist-url", url]
    shared += ["--join-timeout", 5]
    ranks = [start(*shared, "--rank", rank) for rank in (0, 2)]
    for status, err in finish(*ranks):
        assert status == 1
        assert (
            "rank 1 did not come within 5 s" in err and "2 of 3 ranks are here" in err
        ), err


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--dtype", "the dtype"),
        pytest.param("--kv-dtype", "the KV cache's dtype", marks=more),
    ],
)
def test_ranks_that_differ(flag: str, told: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    shared = [*inputs(), "--output", tmp_path, "--world-size", 2, "--dist-url", url]
    dtypes = ["float32", "bfloat16"]
    ranks = [start(*shared, "--rank", i, flag, dtype) for i, dtype in enumerate(dtypes)]
    for status, err in finish(*ranks):
        assert status == 1
        assert f"{told} is bfloat16 on rank 1 and float32 on rank 0" in err, err


def test_mistakes_are_wrong_usage_whichever_rank_finds_them_first(
    tmp_path: Path,
) -> None:
    run = start(*inputs(), "--output", tmp_path, "--world-size", 2, "--num-layers", 99)
    [(status, err)] = finish(run)
    assert status == 2 and "stage 1 has no work" in err, err
    [(status, err)] = finish(start(tmp_path / "none.jsonl", "--world-size", 2))
    assert status == 2 and "none.jsonl" in err, "told before any rank is started"


def test_what_rank_0_refuses_is_told_to_all_at_once(tmp_path: Path) -> None:
    """The others waited for it until --join-timeout."""
    url = f"tcp://127.0.0.1:{free_port()}"
    shared = [tmp_path / "none.jsonl", "--world-size", 2, "--dist-url", url]
    ranks = [start(*shared, "--rank", rank, "--join-timeout", 600) for rank in (0, 1)]
    for status, err in finish(*ranks):
        assert status == 2 and "none.jsonl does not exist" in err, err


def test_a_wrong_model_is_told_before_the_others_come(tmp_path: Path) -> None:
    """Rank 0 waited for them until --join-timeout before it looked for the model."""
    shared = [QUERIES / "plain.jsonl", "--output", tmp_path, "--world-size", 2]
    shared += [
        "--dist-url",
        f"tcp://127.0.0.1:{free_port()}",
        "--model-name",
        tmp_path / "none",
    ]
    first = start(*shared, "--rank", 0)
    deadline = time.monotonic() + 60
    while not first.said().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert first.said().startswith("Error: ") and str(tmp_path / "none") in first.said()
    time.sleep(2)  # it heard of its own fault, said it again and left
    assert first.poll() is None, "it stays, so that others hear it"
    for status, err in finish(first, start(*shared, "--rank", 1, "--join-timeout", 60)):
        assert status == 1 and err.count("Error: ") <= 1, err


def test_a_port_of_another_program(tmp_path: Path) -> None:
    """torch waited in it for ever, deaf to every signal."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        shared = [*inputs(), "--output", tmp_path, "--world-size", 2, "--dist-url", url]
        [(status, err)] = finish(start(*shared, "--rank", 1, "--join-timeout", 3))
        assert status == 1 and "it is no rank 0 of fminfer" in err, err


def test_copies_of_a_model_and_world_sizes_that_differ(tmp_path: Path) -> None:
    """Each machine may have its own copy; a rank of another run may not join."""
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    copies = [tmp_path / "model", tmp_path / "copy"]
    for copy in copies:
        copy.mkdir()
        config.save_pretrained(copy)
    url = f"tcp://127.0.0.1:{free_port()}"
    shared = [QUERIES / "plain.jsonl", "--output", tmp_path, "--dist-url", url]
    ranks = [
        start(*shared, "--world-size", 2, "--rank", rank, "--random-init", copy)
        for rank, copy in enumerate(copies)
    ]
    for status, err in finish(*ranks):
        assert status == 0, err
    shared += ["--join-timeout", 6, "--restart", "--random-init", copies[0]]
    ranks = [
        start(*shared, "--world-size", 2 + rank, "--rank", rank) for rank in (0, 1)
    ]
    (first, second) = finish(*ranks)
    assert first[0] == second[0] == 1
    assert "started with --world-size 3, another with 2" in second[1] or (
        "started with --world-size 2, another with 3" in first[1]
    )


def wait_until_heard(number: signal.Signals, pid: int, seconds: float = 90) -> None:
    """Wait until a process has a handler for a signal: starting takes it 3 to 15 s."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1:
            return
        time.sleep(0.1)
    raise AssertionError(
        f"process {pid} has no handler for {number.name} after {seconds} s"
    )


def test_ctrl_c_while_ranks_join(tmp_path: Path) -> None:
    shared = [*inputs(), "--output", tmp_path, "--world-size", 2]
    shared += ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--rank"]
    for rank in (0, 1):  # one waits in the store that it has opened, one for a store
        run = start(*shared, rank)
        wait_until_heard(signal.SIGTERM, run.pid)
        time.sleep(1)
        assert run.poll() is None, finish(run)
        run.send_signal(signal.SIGTERM)
        [(status, err)] = finish(run)
        assert status == 143 and "Terminated" in err, err


def test_a_signal_while_rank_0_prepares() -> None:
    """It was told to the others as a mistake: exit status 1, after up to a minute."""
    meeting = object.__new__(Meeting)
    meeting.rank = 0
    meeting._is_holder = True

    def prepare(rank: int) -> None:
        raise StoppedError("Terminated.", "terminated")

    with pytest.raises(StoppedError, match="Terminated"):
        meeting._prepare(prepare)


def test_a_rank_that_dies_while_rank_0_waits_for_stdin() -> None:
    stdin, rows = os.pipe()
    flags = ["--world-size", "2", "--rank-timeout", "3"]
    run = Forked(["run", "-", *flags], files=(stdin, None, None))
    os.close(stdin)
    try:
        os.write(rows, b'{"prompt": [5, 6], "max_tokens": 2}\n')
        until_s = time.monotonic() + 90
        while "Ready after " not in run.said():  # both have met
            assert time.monotonic() < until_s, run.said()
            time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSTOP)
        assert run.wait(20) == 1
        assert "rank 1 has not answered" in run.said()
    finally:
        os.close(rows)
        run.kill()


def in_namespace(number: int) -> str:
    return f"fminfer-test-{os.getpid()}-{number}"


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two network namespaces with a cable between; it takes root, and iproute2."""
    # of an engine in this very process
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    names = [in_namespace(0), in_namespace(1)]
    ends = [f"fm{os.getpid() % 99999}{e}" for e in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {ends[0]} type veth peer name {ends[1]}"]
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        commands += [
            f"ip link set {end} netns {name}",
            f"ip -n {name} address add 192.168.77.{number + 1}/24 dev {end}",
            f"ip -n {name} link set {end} up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr}")
        yield
    except FileNotFoundError:
        pytest.skip("no program `ip`")
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.parametrize("how", ["folder", "address"])
def test_two_machines(
    how: str, alone: dict[str, Any], tmp_path: Path, two_machines: None
) -> None:
    where = tmp_path / "meet" if how == "folder" else "192.168.77.1:4400"
    shared = [*inputs(), "--output", tmp_path, "--world-size", 2, "--rendezvous", where]
    ranks = [start(*shared, network=in_namespace(number)) for number in (0, 1)]
    (status, err), (other, err2) = finish(*ranks)
    assert (status, other) == (0, 0), err + err2
    assert read(tmp_path) == alone


def test_num_iters_stops_and_says_so(tmp_path: Path) -> None:
    [(status, err)] = finish(start(*inputs(), "--output", tmp_path, "--num-iters", 3))
    assert status == 1
    assert "stopped after 3 micro-batches" in err
    assert not list(tmp_path.glob("output_*.jsonl"))


def test_the_seeds_loop(tmp_path: Path) -> None:
    """Eight ranks by hand with the old tool's flags, in examples/run_shards.sh; shard 1
    is done."""
    model = tmp_path / "model"
    shards = tmp_path / "shards"
    shards.mkdir()
    size = {"hidden_size": 32, "n_layer": 15, "n_head": 4, "vocab_size": VOCAB}
    config = transformers.AutoConfig.for_model("bloom", bos_token_id=None, **size)
    transformers.BloomForCausalLM(config).save_pretrained(model)
    save_byte_tokenizer(model)
    request = {"prompt": [5, 17, 80, 33, 200], "max_tokens": 6, "temperature": 0}
    for index in (0, 1):
        (shards / f"request_{index}.jsonl").write_text(json.dumps(request) + "\n")
    (shards / "output_request_1.jsonl").write_text("done")
    loop = subprocess.run(
        [
            EXAMPLES / "run_shards.sh",
            shards,
            "--model-name",
            model,
            "--model-type",
            "bloom",
        ],
        env=os.environ
        | {
            "NUM_LAYERS": "2",
            "MAX_LAYERS": "15",
            "MAX_ID": "3",
            "PORT": str(free_port()),
        }
        | {"PATH": programs(tmp_path / "programs")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert loop.returncode == 0, loop.stderr
    assert (shards / "output_request_1.jsonl").read_text() == "done"
    record = json.loads((shards / "output_request_0.jsonl").read_text())
    engine = fminfer.Engine(str(model), dtype="float32")
    (alone,) = engine.run([request])
    engine.close()
    assert alone.result is not None
    assert record["result"]["choices"] == alone.result["choices"]
    assert "There is no GPU here" in loop.stderr or torch.cuda.is_available()
