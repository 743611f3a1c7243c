"""Ranks of several pipelines, each started by hand or by a cluster's launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.status_file import read_status
from fminfer.pipeline.finding import set_silence_limit
from fminfer.pipeline.ranks import RankConfig, RankPlace, find_rank_place
from fminfer.pipeline.store import Store, StoreHolder
from tests.forked import Forked

ROWS = [
    {"prompt": f"Question: How do you go {n}", "max_tokens": 20, "min_tokens": 20}
    for n in range(40)
]
WAIT_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(source: Path, *flags: object, **variables: object) -> Forked:
    words = [
        source,
        "--dtype",
        "float32",
        "--max-rows",
        "2",
        "--join-timeout",
        "120",
        *flags,
    ]
    environ = os.environ | {name: str(value) for name, value in variables.items()}
    return Forked(["run", *map(str, words)], environ)


def finish(rank: Forked) -> tuple[int | None, str]:
    try:
        err = rank.communicate(timeout=WAIT_S)[1]
        return rank.returncode, err
    finally:
        rank.kill()


def write(folder: Path, num_rows: int) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:num_rows]))
    return path


def texts(path: Path) -> list[str]:
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [record["result"]["choices"][0]["text"] for record in records]


def test_a_dead_pipeline_of_ranks_by_hand_costs_no_row(tmp_path: Path) -> None:
    """--rank with --data-group-size was refused: two pipelines of two ranks, and one
    rank dies."""
    source = write(tmp_path, len(ROWS))
    output = tmp_path / "out.jsonl"
    flags = ["--world-size", 4, "--data-group-size", 2, "--output", output]
    flags += ["--dist-url", f"tcp://127.0.0.1:{free_port()}"]
    ranks = [start(source, *flags, "--rank", rank) for rank in range(4)]
    deadline = time.monotonic() + WAIT_S
    while (read_status(output) or {}).get("request_counts", {}).get("completed", 0) < 4:
        assert ranks[0].poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    ranks[3].send_signal(signal.SIGKILL)  # the second stage of pipeline 1
    ended = [finish(rank) for rank in ranks]
    assert [status for status, _ in ended] == [0, 0, 1, -9], ended
    assert (
        "Pipeline 1 " in ended[0][1]
        and "the others go on, and answer its " in ended[0][1]
    )
    assert "pipeline 1: " in ended[2][1]
    with contextlib.closing(fminfer.Engine(dtype="float32")) as engine:
        alone = {record.line.number: record.result or {} for record in engine.run(ROWS)}
    wanted = [alone[number]["choices"][0]["text"] for number in sorted(alone)]
    assert texts(output) == wanted and len(set(wanted)) > 20


def test_two_tasks_of_srun_are_two_pipelines(tmp_path: Path) -> None:
    source = write(tmp_path, 20)
    output = tmp_path / "out.jsonl"
    variables = {
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_NUM_NODES": 1,
        "MASTER_PORT": free_port(),
    }
    variables |= {"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": 1}
    flags = ["--data-group-size", 2, "--output", output, "--stats", tmp_path / "stats"]
    ranks = [start(source, *flags, SLURM_PROCID=rank, **variables) for rank in range(2)]
    ended = [finish(rank) for rank in ranks]
    assert [status for status, _ in ended] == [0, 0], ended
    assert len(texts(output)) == 20
    stages = json.loads((tmp_path / "stats").read_text())["engine"]["stages"]
    assert len(stages) == 2 and all(stage["busy_s"] > 0 for stage in stages)


def test_pipelines_of_other_options_are_refused(tmp_path: Path) -> None:
    """They would draw rows of one output with two seeds."""
    source = write(tmp_path, 2)
    where = tmp_path / "meet"
    flags = ["--world-size", 2, "--data-group-size", 2, "--rendezvous", where]
    ranks = [start(source, *flags, "--rank", rank, "--seed", rank) for rank in range(2)]
    for status, err in [finish(rank) for rank in ranks]:
        assert status == 1 and "--seed is 1 on rank 1 and 0 on rank 0" in err
    assert not (tmp_path / "output_in.jsonl").exists() and not list(where.iterdir())


@pytest.mark.parametrize("wrong", [[3], [0, 1, 2, 3]])
def test_all_hear_of_what_only_one_rank_finds_wrong(
    tmp_path: Path, wrong: list[int]
) -> None:
    """They waited for --rank-timeout, and rank 0 said that a rank had not answered."""
    source = write(tmp_path, 2)
    where = tmp_path / "meet"
    flags = ["--world-size", 4, "--data-group-size", 2, "--rendezvous", where]
    of_wrong = ["--stage-layers", "1,9"]
    ranks = [
        start(source, *flags, "--rank", rank, *of_wrong * (rank in wrong))
        for rank in range(4)
    ]
    for status, err in [finish(rank) for rank in ranks]:
        assert (
            status == 2 and err.count("Error: rank ") == 1 and "--stage-layers" in err
        ), err
        assert any(f"rank {rank}: " in err for rank in wrong)
    assert not list(where.iterdir())


@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_hear_of_a_run_that_starts_no_pipeline(tmp_path: Path, seed: int) -> None:
    """Rank 0 was gone, and said nothing: the others loaded the model or looked for it for
    --join-timeout, and failed. So ended each repetition of a run that was complete."""
    source = write(tmp_path, 1)
    output = tmp_path / "out.jsonl"
    words = [
        "run",
        str(source),
        "--dtype",
        "float32",
        "--output",
        str(output),
        "--seed",
        "0",
    ]
    assert CliRunner().invoke(main, words).exit_code == 0
    flags = [
        "--world-size",
        3,
        "--data-group-size",
        3,
        "--output",
        output,
        "--seed",
        seed,
    ]
    flags += ["--rendezvous", tmp_path / "meet"]
    ranks = [start(source, *flags, "--rank", rank) for rank in range(3)]
    ended = [finish(rank) for rank in ranks]
    assert [status for status, _ in ended] == [2 * seed] * 3, ended
    assert all(("--seed was 0, is 1" in err) == bool(seed) for _, err in ended), ended


def test_places_among_all_ranks() -> None:
    config = RankConfig(world_size=4, data_group_size=2, rank=3, dist_url="tcp://a:1")
    assert config.configured_stages == 2 and find_rank_place(config, {}) == RankPlace(
        3, 4, "a", 1
    )
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "6", "MASTER_ADDR": "a"}
    found = find_rank_place(RankConfig(data_group_size=3), srun)
    assert found is not None and (found.rank, found.world_size) == (1, 6)
    with pytest.raises(
        UsageError, match="srun started 6 ranks, which --data-group-size 4"
    ):
        find_rank_place(RankConfig(data_group_size=4), srun)
    with pytest.raises(UsageError, match="--world-size is 4, but srun started 6"):
        find_rank_place(RankConfig(pipeline_group_size=2, data_group_size=2), srun)


def test_a_store_of_several_groups_and_its_lines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        holder = StoreHolder(listener, "secret")
        port = listener.getsockname()[1]
        one, two = (
            Store("127.0.0.1", port, "secret", 9, name) for name in ("1/", "2/")
        )
        one.set("a", "x")
        two.multi_set(["a", "b"], ["y", "z"])
        assert (one.get("a"), two.multi_get(["a", "b"])) == (b"x", [b"y", b"z"])
        assert not one.check(["b"]) and one.add("n", 1) == two.add("n", 1) == 1
        assert two.delete_key("b") and not two.check(["b"])
        peer = two.become_private_connection(7)
        while 7 not in holder.private_connections:
            time.sleep(0.01)
        with peer, holder.private_connections[7] as ours:
            peer.sendall(b"rows")
            assert ours.recv(4) == b"rows"
            ours.sendall(b"records")
            assert peer.recv(7) == b"records"
        assert one.get("a") == b"x"


def test_rank_0_may_stop_reading_for_long() -> None:
    """It waits for whoever reads its stdout, or for the disk: pipelines on lines that were full
    for --rank-timeout counted it as dead, and ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
    set_silence_limit(sender, 0.1, is_always_read=False)
    data = bytes(16 << 20)
    found = bytearray()

    def read_late() -> None:
        time.sleep(0.7)
        with contextlib.suppress(OSError):
            while part := reader.recv(1 << 20):
                found.extend(part)

    thread = threading.Thread(target=read_late)
    thread.start()
    with sender:
        sender.sendall(data)
    thread.join()
    reader.close()
    assert found == data
