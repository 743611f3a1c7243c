"""Ranks that share layers answer as one does, however they are started; wrong places
are told."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fminfer
from fminfer.core.errors import UsageError
from fminfer.core.partition import Part
from fminfer.pipeline import shard_group
from fminfer.pipeline.ranks import RankConfig, find_rank_place
from fminfer.runtime.launch.role import find_role
from tests.conftest import more
from tests.pipeline.test_pipeline import (
    FILES,
    finish,
    free_port,
    in_namespace,
    inputs,
    start,
    torchrun,
    two_machines,
)
from tests.runtime.test_own_ranks import own_ranks

__all__ = ["two_machines"]  # a fixture
FLAGS = ["--dtype", "float32"]
TWO_BY_TWO = ["--pipeline-group-size", 2, "--tensor-parallel-size", 2]


def read(folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    found = {}
    for name in FILES:
        lines = (folder / f"output_{name}.jsonl").read_text().splitlines()
        found[name] = [json.loads(line)["result"]["choices"] for line in lines]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    [(status, err)] = finish(start(*inputs(), *FLAGS, "--output", folder))
    assert status == 0, err
    return read(folder)


def check_same(folder: Path, alone: dict[str, Any]) -> None:
    """See that texts are equal, drawn ones too, and logprobs within 1e-5 or their last bits."""

    def compare(found: Any, expected: Any) -> None:
        if isinstance(expected, float):
            assert found == pytest.approx(expected, abs=1e-5, rel=2e-6)
        elif isinstance(expected, list):
            for one, other in zip(found, expected, strict=True):
                compare(one, other)
        elif isinstance(expected, dict):
            assert found.keys() == expected.keys()
            for key in expected:
                compare(found[key], expected[key])
        else:
            assert found == expected

    compare(read(folder), alone)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(["--tp", 2], id="tensor"),
        pytest.param(TWO_BY_TWO, id="both"),
        # As pipelines whose ranks were started apart, and those of two ranks in test_team.py.
        pytest.param(
            ["--world-size", 4, "--data-group-size", 2, "--tp", 2],
            id="data",
            marks=more,
        ),
    ],
)
def test_ranks_that_the_run_starts(
    ranks: list[object], alone: dict[str, Any], tmp_path: Path
) -> None:
    told = ["--output", tmp_path, "--stats", tmp_path / "stats.json"]
    run = start(*inputs(), *FLAGS, *ranks, *told)
    [(status, err)] = finish(run)
    assert status == 0, err
    check_same(tmp_path, alone)
    assert f"{2 if ranks[0] == '--tp' else 4} ranks of 1 thread)" in err, err
    stages = json.loads((tmp_path / "stats.json").read_text())["engine"]["stages"]
    assert len(stages) == (1 if ranks[0] == "--tp" else 2), "of all pipelines"


def test_without_kernels_sums_go_through_gloo(tmp_path: Path) -> None:
    """A draw of which filters left few tokens ended the run: gloo was to send nothing."""
    filtered = tmp_path / "filtered.jsonl"
    line = {"prompt": "How do you go", "seed": 1}
    filters: list[dict[str, float]] = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
    lines = [json.dumps(line | {"temperature": 0.8} | each) for each in filters]
    filtered.write_text("\n".join(lines))
    folders = [tmp_path / "1", tmp_path / "2"]
    off = [*FLAGS, "--kernels", "off"]
    for size, folder in enumerate(folders, start=1):
        [(status, err)] = finish(
            start(*inputs(), filtered, *off, "--tp", size, "--output", folder)
        )
        assert status == 0 and ("2 ranks of" in err) == (size == 2), err
    check_same(folders[1], read(folders[0]))
    drawn = [
        (each / "output_filtered.jsonl").read_text().splitlines() for each in folders
    ]
    choices = [[json.loads(line)["result"]["choices"] for line in own] for own in drawn]
    assert len(choices[0]) == 3 and choices[0] == choices[1]


def test_ranks_by_hand_in_any_order(alone: dict[str, Any], tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    shared = [
        *inputs(),
        *FLAGS,
        "--output",
        tmp_path,
        "--world-size",
        4,
        "--dist-url",
        url,
    ]
    ranks = [start(*shared, "--tp", 2, "--rank", rank) for rank in (3, 1, 2, 0)]
    for status, err in finish(*ranks):
        assert status == 0, err
    check_same(tmp_path, alone)


def test_pipelines_whose_ranks_were_started_apart(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    shared = [
        *inputs(),
        *FLAGS,
        "--output",
        tmp_path,
        "--rendezvous",
        tmp_path / "meet",
    ]
    sizes = ["--world-size", 4, "--data-group-size", 2, "--tp", 2]
    for status, err in finish(*(start(*shared, *sizes) for _ in range(4))):
        assert status == 0, err
    check_same(tmp_path, alone)


@more  # test_pipeline.py has it with stages
def test_torchrun(alone: dict[str, Any], tmp_path: Path) -> None:
    ranks = [*inputs(), *FLAGS, "--output", tmp_path, "--tensor-parallel-size", 2]
    done = torchrun(tmp_path / "programs", *ranks)
    assert done.returncode == 0 and "2 ranks of" in done.stderr, done.stderr
    check_same(tmp_path, alone)


def test_two_machines(
    alone: dict[str, Any], tmp_path: Path, two_machines: None
) -> None:
    """Tensor parallelism inside each, and a stage on each."""
    shared = [*inputs(), *FLAGS, "--output", tmp_path, "--world-size", 4, "--tp", 2]
    shared += ["--dist-url", "tcp://192.168.77.1:4410"]
    places = [(rank, in_namespace(rank // 2)) for rank in range(4)]
    ranks = [start(*shared, "--rank", rank, network=place) for rank, place in places]
    for status, err in finish(*ranks):
        assert status == 0, err
    check_same(tmp_path, alone)


def test_the_same_command_with_other_ranks_does_not_mix_answers(tmp_path: Path) -> None:
    """Sums of other parts round otherwise, so the number of ranks is in the journal."""
    out = ["--output", tmp_path, *FLAGS, "--num-iters", 3]
    [(status, err)] = finish(start(*inputs(), *out, "--tp", 2))
    assert status == 1 and "stopped after 3" in err
    [(status, err)] = finish(start(*inputs(), *out))
    assert status == 2 and "--tensor-parallel-size" in err, err


def test_a_program_has_ranks_that_share_layers() -> None:
    requests = [{"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}] * 2
    found = []
    for size in (1, 2):
        with fminfer.Engine(dtype="float32", tensor_parallel_size=size) as engine:
            found.append([record.result for record in engine.run(requests)])
            assert (engine.facts.num_ranks, engine.facts.num_stages) == (size, 1)
    assert [r["choices"][0]["text"] for r in found[0]] == [
        r["choices"][0]["text"] for r in found[1]
    ]


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_a_program_goes_on_when_a_rank_has_died(pause_s: float) -> None:
    """`close` waited for ever: its stage waited for the dead rank, and nobody watched
    any more."""
    before = {*threading.enumerate()}
    engine = fminfer.Engine(dtype="float32", tensor_parallel_size=2)
    for _ in range(4):
        engine.add({"prompt": [5, 6, 7] * 20, "max_tokens": 400, "ignore_eos": True})
    for _ in range(3):
        engine.step()
    (rank,) = own_ranks()
    os.kill(rank, signal.SIGKILL)
    time.sleep(pause_s)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 10
    names = {"stage-0", "to-rank-1", "from-rank-1"}
    left = {*threading.enumerate()} - before
    while left and time.monotonic() - started < 10:
        left = {each for each in left if each.is_alive() and each.name in names}
    assert not left


def test_a_dead_rank_is_noticed_at_once_by_those_started_apart(tmp_path: Path) -> None:
    """Nobody listened to a rank that only follows: its death was a silence of half a minute."""
    requests = tmp_path / "requests.jsonl"
    fields = {"prompt": [5, 6], "ignore_eos": True}
    lines = [json.dumps(fields | {"max_tokens": most}) for most in (2, *[250] * 60)]
    requests.write_text("\n".join(lines))
    shared = [
        requests,
        "--output",
        tmp_path / "out.jsonl",
        "--world-size",
        2,
        "--tp",
        2,
    ]
    shared += ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--rank"]
    first = start(*shared, 0)
    second = start(*shared, 1)
    journal = tmp_path / "out.jsonl.journal"
    until_s = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert time.monotonic() < until_s, first.poll()
        time.sleep(0.02)
    second.kill()
    started = time.monotonic()
    [(status, err)] = finish(first)
    assert time.monotonic() - started < 8
    assert status == 1 and "rank 1" in err, err


def test_a_model_that_cannot_be_cut_is_refused_by_all(tmp_path: Path) -> None:
    [(status, err)] = finish(start(*inputs(), "--output", tmp_path, "--tp", 64))
    assert status == 2
    assert "--tensor-parallel-size 64: " in err and "cannot be divided among" in err
    assert "Traceback" not in err


def test_a_stage_on_two_machines_is_refused_with_the_remedy() -> None:
    part = Part(0, 2, 0, 1, num_shards=2)
    shard_group._check_one_machine(SimpleNamespace(hosts=["a", "a", "b", "b"]), part)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        group: Any = SimpleNamespace(hosts=["a", "a", "a", "b"])
        shard_group._check_one_machine(group, part)
    for told in ("ranks 2 to 3", "rank 2 on a, rank 3 on b", "--distribution=block"):
        assert told in str(caught.value)


def test_a_lack_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the system cannot give would have ended the process by a signal."""

    def lack(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", lack)
    with pytest.raises(
        UsageError, match="need 3 MiB of shared memory, and the system refuses it"
    ):
        shard_group._allocate_memory(3 << 20)


@pytest.mark.parametrize("told", ["another process", "no such process"])
def test_ranks_map_no_memory_of_another_machine(told: str) -> None:
    """Two machines may have a name in common, and processes of the same number."""
    descriptor, mark = shard_group._allocate_memory(4096)
    path = f"/proc/{os.getpid()}/fd/{descriptor if told == 'another process' else 'x'}"
    group: Any = SimpleNamespace(
        gather=lambda name, value: [[path, "0" * len(mark)]] * 2
    )
    library: Any = SimpleNamespace(
        fminfer_sums_bytes=type("Call", (), {"__call__": lambda self, *_: 4096})()
    )
    why = "is of another process" if told == "another process" else "No such file"
    with pytest.raises(
        UsageError, match=rf"rank 1 cannot map the memory of rank 0 \(.*{why}"
    ):
        shard_group._map_memory(group, Part(0, 1, 0, 1, shard=1, num_shards=2), library)
    os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gloo_adds_up_in_the_order_of_ranks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [torch.randn(3, 5).to(dtype) for _ in range(4)]

    def all_gather(into: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        assert torch.equal(own, parts[1].view(-1).view(torch.uint8))
        for each, part in zip(into, parts, strict=True):
            each.copy_(part.view(-1).view(torch.uint8))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    group: Any = None
    shards = shard_group.TorchGroup(group, 1, 4, is_nccl=False)
    total = ((parts[0].float() + parts[1].float()) + parts[2].float()) + parts[
        3
    ].float()
    assert torch.equal(shards.sum(parts[1]), total.to(dtype))
    assert torch.equal(shards.gather(parts[1]), torch.stack(parts))
    assert shards.gather(parts[1][:0]).shape == (4, 0, 5), (
        "of none there is nothing to send"
    )


@pytest.mark.parametrize(
    ("flags", "kind", "num_stages", "num_ranks"),
    [
        ({"tensor_parallel_size": 2}, "starter", 1, 2),
        ({"tensor_parallel_size": 2, "pipeline_group_size": 3}, "starter", 3, 6),
        (
            {"tensor_parallel_size": 2, "world_size": 8, "data_group_size": 2},
            "starter",
            2,
            4,
        ),
    ],
)
def test_roles(
    flags: dict[str, Any], kind: str, num_stages: int, num_ranks: int
) -> None:
    role = find_role(RankConfig(**flags), {})
    assert (role.kind, role.spread.num_stages, role.spread.num_ranks) == (
        kind,
        num_stages,
        num_ranks,
    )


def test_roles_under_a_launcher() -> None:
    """srun -n 8 fminfer run --tp 4: two stages of four ranks."""
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
    }
    with pytest.raises(
        UsageError, match="--data-group-size 2 × --tensor-parallel-size 8 does not"
    ):
        find_rank_place(RankConfig(tensor_parallel_size=8, data_group_size=2), environ)
    role = find_role(RankConfig(tensor_parallel_size=4), environ)
    assert (role.kind, role.spread.num_stages, role.spread.num_shards) == (
        "apart",
        2,
        4,
    )
    with pytest.raises(
        UsageError,
        match="8 ranks, which --data-group-size 1 × --tensor-parallel-size 3 does",
    ):
        find_rank_place(RankConfig(tensor_parallel_size=3), environ)
    with pytest.raises(
        UsageError, match=r"--world-size 6 is not .* × --tensor-parallel-size 4"
    ):
        RankConfig(tensor_parallel_size=4, world_size=6)


def test_parts_of_ranks() -> None:
    """Ranks of a stage follow each other; only leaders speak to other stages."""
    stage = Part(1, 3, 4, 8, num_shards=2)
    leader, other = stage.shards
    assert (leader.rank, other.rank, [*stage.ranks]) == (2, 3, [2, 3])
    assert (leader.previous_rank, leader.next_rank, other.previous_rank) == (0, 4, 2)
    assert Part(2, 3, 8, 9, num_shards=2).next_rank == 0
