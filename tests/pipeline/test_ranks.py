"""Splitting layers, and knowing one's rank: from flags, torchrun, Slurm and LSF."""

from __future__ import annotations

from pathlib import Path

import pytest

from fminfer.core.errors import UsageError
from fminfer.core.partition import split_layers
from fminfer.pipeline.ranks import (
    RankConfig,
    RankPlace,
    find_first_node,
    find_rank_place,
)


def counts(num_layers: int, num_stages: int, **options: object) -> list[int]:
    parts = split_layers(num_layers, num_stages, **({"head_cost": 0.0} | options))  # type: ignore[arg-type]
    assert [part.first for part in parts] == [0] + [part.last for part in parts[:-1]]
    assert parts[0].is_first and parts[-1].is_last
    return [part.num_layers for part in parts]


def test_layers_are_balanced_with_the_head_counted() -> None:
    assert counts(12, 3) == [4, 4, 4]
    assert counts(70, 8) == [9, 9, 9, 9, 9, 9, 8, 8]
    assert counts(12, 2, head_cost=4) == [8, 4]
    assert counts(24, 4, head_cost=2) == [7, 7, 6, 4], "no stage costs more than 7"
    assert counts(3, 3, head_cost=9) == [1, 1, 1], "each rank has at least one"


def test_the_seeds_split_drops_the_surplus() -> None:
    """8 ranks × 9 layers of a model of 70: the last rank has 7."""
    assert counts(70, 8, each=9, most=70) == [9] * 7 + [7]
    assert counts(24, 2, each=12, most=96) == [12, 12], (
        "--max-layers above the model's is no limit"
    )
    assert counts(24, 2, each=6, most=12) == [6, 6], (
        "the model's upper layers are left out"
    )
    assert counts(24, 2, most=10) == [5, 5]
    assert counts(24, 3, counts=(4, 4, 16)) == [4, 4, 16]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "options", "says"),
    [
        (70, 8, {"each": 12}, "stage 6 has no work"),
        (96, 8, {"each": 9}, "hold 72 of the model's 96"),
        (4, 5, {}, "5 stages share 4 layers"),
        (24, 2, {"counts": (12, 11)}, "adds up to 23"),
        (24, 2, {"counts": (24,)}, "has 1 count; give 2"),
        (24, 2, {"counts": (24, 0)}, "stage 1 has no work"),
        (24, 2, {"counts": (12, 12), "each": 12}, "not both"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    num_layers: int, num_stages: int, options: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        counts(num_layers, num_stages, **options)


def facts(environ: dict[str, str], **options: object) -> RankPlace | None:
    return find_rank_place(RankConfig(**options), environ)  # type: ignore[arg-type]


def test_alone_or_to_be_started_here() -> None:
    assert facts({}) is None
    assert facts({}, world_size=4) is None
    assert facts({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, (
        "a batch script is no rank"
    )
    assert (
        facts({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
        is None
    )


def test_the_seeds_flags() -> None:
    found = facts(
        {}, rank=3, world_size=8, dist_url="tcp://10.0.0.1:9031", pipeline_group_size=8
    )
    assert found == RankPlace(3, 8, "10.0.0.1", 9031)
    first = facts({}, rank=0, world_size=8, dist_url="tcp://10.0.0.1:9031")
    assert first is not None and first.opens_store
    assert facts({}, rank=0, world_size=1, dist_url="tcp://127.0.0.1:9031") is None


def test_torchrun() -> None:
    environ = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }
    found = facts(environ)
    assert found == RankPlace(2, 4, "node1", 29500, source="torchrun")
    agent = facts(environ | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None and agent.agent == "None/None", (
        "its agent has the port already"
    )


def test_slurm_and_lsf(tmp_path: Path) -> None:
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "123456"}
    found = facts(srun | {"SLURM_STEP_NODELIST": "gpu[07-09,12],big1"})
    assert found == RankPlace(1, 2, "gpu07", 20000 + 123456 % 20000, source="srun")
    jsrun = {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6", "LSB_JOBID": "99"}
    hosts = "batch5 1 h36n01 42 h36n02 42"
    found = facts(jsrun | {"LSB_MCPU_HOSTS": hosts})
    assert found == RankPlace(0, 6, "h36n01", 20099, source="jsrun")
    file = tmp_path / "hosts"
    file.write_text("batch5\nh1\nh1\nh2\n")
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    found = facts(mpirun | {"LSB_DJOB_HOSTFILE": str(file), "MASTER_PORT": "7"})
    assert found == RankPlace(1, 2, "h1", 7, source="mpirun")
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        facts(mpirun)
    assert find_first_node("a1,a2") == "a1" and find_first_node("n[3]-ib,x") == "n3-ib"
    assert (
        find_first_node("r1i[0-1]n[0-35],z") == "r1i0n0" and find_first_node("") == ""
    )
    inside = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    inside |= {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8"}
    found = facts(
        inside | {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n2"}
    )
    assert found == RankPlace(6, 8, "n1", 20007, source="mpirun"), (
        "srun started mpirun's helpers"
    )


def test_rendezvous() -> None:
    found = facts({}, rendezvous="node1:4000", world_size=2)
    assert found is not None
    assert (found.rank, found.host, found.port) == (
        None,
        "node1",
        4000,
    ) and found.opens_store
    found = facts({"RANK": "1", "WORLD_SIZE": "2"}, rendezvous="/shared/job7")
    assert found is not None and (found.rank, found.folder) == (1, Path("/shared/job7"))


@pytest.mark.parametrize(
    ("environ", "options", "says"),
    [
        ({}, {"rank": 1}, "--rank needs --world-size"),
        ({}, {"rank": 8, "world_size": 8, "dist_url": "tcp://a:1"}, "from 0 to 7"),
        ({}, {"rank": 1, "world_size": 8}, "needs --dist-url"),
        ({}, {"world_size": 8, "dist_url": "tcp://a:1"}, "needs --rank"),
        ({}, {"rank": 1, "world_size": 8, "dist_url": "a:1"}, "tcp://host:port"),
        ({}, {"rank": 1, "world_size": 8, "dist_url": "tcp://a:x"}, "not host:port"),
        ({}, {"rendezvous": "a:1"}, "needs --world-size"),
        ({}, {"rendezvous": "a:xx", "world_size": 2}, "'a:xx' is not host:port"),
        ({}, {"rendezvous": "a:1", "dist_url": "tcp://a:1"}, "not both"),
        (
            {},
            {"world_size": 8, "pipeline_group_size": 4},
            "is not --pipeline-group-size",
        ),
        ({}, {"data_group_size": 2, "rank": 0}, "--rank needs --world-size"),
        ({}, {"world_size": 0}, "at least 1"),
        ({}, {"join_timeout_s": 0}, "--join-timeout is 0"),
        (
            {"RANK": "1", "WORLD_SIZE": "4"},
            {"world_size": 2},
            "torchrun started 4 ranks",
        ),
        ({"RANK": "1", "WORLD_SIZE": "4"}, {}, "MASTER_ADDR"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, {}, "RANK is 'one' in the environment"),
        ({"RANK": "1", "WORLD_SIZE": "four"}, {}, "WORLD_SIZE is 'four'"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            {},
            "MASTER_PORT is 'x'",
        ),
    ],
)
def test_half_of_what_a_rank_needs_is_refused(
    environ: dict[str, str], options: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        facts(environ, **options)
