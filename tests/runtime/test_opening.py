"""A process plans its part of a run once, and reads each header of the model once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.cli.app import main
from fminfer.forward.stage import Stage
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.stored import tensor_table
from fminfer.plan import machine_facts, planning
from fminfer.plan.machine_facts import Machine, has_moved
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.load import agreement
from fminfer.runtime.load.agreement import update_plan
from fminfer.runtime.load.properties import Measured, PipelineProperties

GIB = 1 << 30


class Counted:
    """What was planned, and which files had their headers read."""

    def __init__(self) -> None:
        self.plans: list[RunPlan] = []
        self.headers: list[str] = []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    own_plan = planning.make_plan
    own_read = tensor_table.read_safetensors

    def plan(*arguments: Any) -> RunPlan:
        counted.plans.append(own_plan(*arguments))
        return counted.plans[-1]

    def read(path: Path) -> Any:
        counted.headers.append(path.name)
        return own_read(path)

    monkeypatch.setattr(planning, "make_plan", plan)
    monkeypatch.setattr(agreement, "make_plan", plan)
    monkeypatch.setattr(tensor_table, "read_safetensors", read)
    # Other processes of the tests have the memory that is free here.
    monkeypatch.setattr(machine_facts, "measure_free_bytes", lambda device: 4 * GIB)
    monkeypatch.setattr(machine_facts, "measure_free_host_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(machine_facts, "measure_process_bytes", lambda: GIB)
    monkeypatch.setattr(machine_facts, "measure_free_swap_bytes", lambda: 0)
    yield counted


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return the demo model in two files and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in DEMO_MODEL.iterdir():
        if path.suffix == ".json" or path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    homes = {}
    for number, names in enumerate(([*tensors][::2], [*tensors][1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        homes |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    return folder


def test_an_engine_plans_once_and_reads_headers_once(counted: Counted) -> None:
    """Planning and loading each read all headers."""
    with fminfer.Engine(device="cpu") as engine:
        assert engine.pipeline.plan.checkpoint is counted.plans[0].checkpoint
    assert len(counted.plans) == 1
    assert counted.headers == ["model.safetensors"]


def test_each_file_of_a_model_is_read_once(counted: Counted, sharded: Path) -> None:
    with fminfer.Engine(str(sharded), device="cpu") as engine:
        (record,) = engine.run(["How do you go from the den to the porch?"])
    assert record.error is None
    assert len(counted.plans) == 1
    assert sorted(counted.headers) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_run_plans_once_and_reads_headers_once(
    counted: Counted, tmp_path: Path
) -> None:
    """It made two plans, and read every header three times: the fingerprint did, too."""
    source = tmp_path / "r.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 1}\n')
    output = tmp_path / "a.jsonl"
    words = ["run", source, "--output", output, "--device", "cpu", "--quiet"]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert len(counted.plans) == 1
    assert counted.headers == ["model.safetensors"]


def test_a_file_that_was_written_since_is_read_again(
    counted: Counted, sharded: Path
) -> None:
    """A header that is kept would give another file's weights."""
    headers = tensor_table.WeightHeaders()
    path = sharded / "model-00001-of-00002.safetensors"
    before, _ = headers.read(path)
    assert headers.read(path)[0] is before
    save_file({"a": load_file(path).popitem()[1]}, path)
    after, _ = headers.read(path)
    assert [*after.tensors] == ["a"] != [*before.tensors]
    assert len(counted.headers) == 2


def test_a_plan_is_replaced_where_memory_has_moved(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fminfer.Engine(device="cpu") as engine:
        plan = engine.pipeline.plan
    assert update_plan(plan) is plan
    monkeypatch.setattr(machine_facts, "measure_free_bytes", lambda device: 2 * GIB)
    assert update_plan(plan).machine.free == 2 * GIB
    assert len(counted.plans) == 2


def test_a_plan_is_replaced_where_kernels_cannot_be_had(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fminfer.Engine(device="cpu", dtype="float32") as engine:
        plan = engine.pipeline.plan
    monkeypatch.setattr(machine_facts, "may_have_library", lambda: False)
    assert not update_plan(plan).has_kernels
    assert len(counted.plans) == 1 + plan.machine.has_library


def test_what_a_process_has_grown_by_is_counted() -> None:
    """A plan that was made before the tokenizer was there forecast too little by it."""
    planned = Machine(free=4 * GIB, host_free=4 * GIB, process_bytes=GIB)
    assert has_moved(planned, replace(planned, process_bytes=2 * GIB))
    assert not has_moved(planned, replace(planned, process_bytes=GIB + (8 << 20)))
    assert not has_moved(planned, replace(planned, free=4 * GIB - (8 << 20)))
    assert has_moved(planned, replace(planned, free=3 * GIB))
    assert has_moved(planned, replace(planned, swap=GIB))
    assert has_moved(planned, replace(planned, rank=1))
    assert has_moved(Machine(), planned)


def test_the_last_pipeline_of_a_team_is_not_alone() -> None:
    """Its process was taken for somebody else's work on this machine."""
    with fminfer.Engine(device="cpu") as engine:
        assert engine.facts.is_alone
        assert not replace(engine.facts, is_team=True).is_alone


def test_layers_of_random_weights_are_not_streamed() -> None:
    """It was told to take another --offload, which was refused as well."""
    for offload in ("cpu", "disk", "auto"):
        with pytest.raises(fminfer.UsageError, match="random weights have none"):
            fminfer.Engine(random_init="opt-125m", offload=offload, device="cpu")


def test_properties_copy_nothing_of_the_plan() -> None:
    """They had ten fields of the plan, which a new plan would have made wrong."""
    measured = {each.name for each in fields(Measured)}
    assert {each.name for each in fields(PipelineProperties)} == {
        "plan",
        "measured",
        "num_pipelines",
        "is_team",
    }
    assert not measured & {each.name for each in fields(RunPlan)}
    assert len(inspect.signature(Stage).parameters) == 4
