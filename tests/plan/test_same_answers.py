"""Whether answers depend on other rows: a plan says why, and --same-answers on refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.answers.answer_index import answer_terms
from fminfer.cli.app import main
from fminfer.compute.attention.kernel_attention import CpuAttention
from fminfer.compute.formats.dense import Dense, make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.products import is_kernel_faster
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.forward.registry import Registry
from fminfer.machine import processor
from fminfer.models.checkpoint import open_model
from fminfer.plan import machine_facts
from fminfer.plan.planning import make_plan, plan_ahead
from fminfer.plan.run_plan import RunPlan
from fminfer.plan.same_answers import TILES
from tests.compute.test_trial import make_wrong
from tests.conftest import built_library
from tests.machine.test_processor import GREATEST
from tests.plan.test_planning import plan_of

CPU = torch.device("cpu")
HALVES = torch.bfloat16
needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


def plan_demo(**options: Any) -> RunPlan:
    config = EngineConfig(**{"device": "cpu"} | options)
    return plan_ahead(config, open_model(config))


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has all that this one has, without tiles."""
    units = processor._read_units() - {"amx_bf16"}
    monkeypatch.setattr(
        processor, "_read_cpuinfo", lambda: f"flags : {' '.join(units)}"
    )


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has tiles (AMX), which this process may use."""
    monkeypatch.setenv("FMINFER_CPU", "native")
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: GREATEST)


@needs_compiler
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"dtype": "float32"}, ""),
        ({"dtype": "bfloat16"}, ""),
        ({"dtype": "float32", "kv_dtype": "float16", "quantize": "int8"}, ""),
        ({"dtype": "float16"}, "torch computes in float16"),
        ({"kernels": "off"}, "--kernels off"),
    ],
)
def test_a_plan_says_why(options: dict[str, Any], reason: str, no_tiles: None) -> None:
    assert plan_demo(**options).dependence == reason
    if not reason:
        assert not plan_demo(same_answers="on", **options).dependence
        return
    with pytest.raises(
        UsageError, match=f"^--same-answers on: .* here: {reason}. It needs"
    ):
        plan_demo(same_answers="on", **options)


def test_gpus_are_refused() -> None:
    assert plan_of(79).dependence == "a GPU computes"
    with pytest.raises(UsageError, match=r"here: a GPU computes\. It needs a CPU"):
        plan_of(79, same_answers="on")


def test_a_machine_without_a_compiler_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_facts, "may_have_library", lambda: False)
    assert plan_demo().dependence == "there are no compiled kernels"
    with pytest.raises(UsageError, match=r"no compiled kernels.*which g\+\+ builds"):
        plan_demo(same_answers="on")


@needs_compiler
def test_tiles_are_used_until_it_is_on(tiles: None) -> None:
    """They sum few rows in another order than many, and so does oneDNN."""
    assert plan_demo().dependence == TILES
    assert plan_demo(quantize="int8").dependence == TILES, "attention has tiles, too"
    assert not plan_demo(dtype="float32").dependence
    assert not is_kernel_faster(Dense(HALVES), HALVES)

    plan = plan_demo(same_answers="on")
    assert plan.dtype == HALVES and not plan.dependence
    assert plan.packed_by == "kernels" and is_kernel_faster(Dense(HALVES), HALVES)
    assert "-march=native" not in processor.choose_compiler_flags()


@needs_compiler
def test_weights_that_the_kernels_cannot_multiply_are_named(
    tmp_path: Path, no_tiles: None
) -> None:
    shape = open_model(EngineConfig(random_init="llama-160m")).config.to_dict()
    shape |= {"num_hidden_layers": 1, "intermediate_size": 33, "vocab_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    odd = {"random_init": str(path), "model": None}
    says = "torch multiplies with 0.down.weight, 768 × 33 in bfloat16"
    plan = plan_demo(dtype="bfloat16", **odd)
    assert plan.dependence == says
    with pytest.raises(UsageError, match=r"768 × 33 in bfloat16\. It needs"):
        plan_demo(dtype="bfloat16", same_answers="on", **odd)
    assert not plan_demo(dtype="float32", kernels="auto", **odd).dependence


@needs_compiler
def test_a_registry_notes_what_torch_multiplies(no_tiles: None) -> None:
    registry = Registry("auto", built_library(), HALVES, CPU)
    for inputs in (32, 0):
        weight = make_dense_weight(torch.ones(7, inputs, dtype=HALVES), "product")
        registry.choose_product(weight, None)
    assert registry.why_dependent == ""
    for outputs in (9, 11):
        weight = make_dense_weight(torch.ones(outputs, 33, dtype=HALVES), "product")
        registry.choose_product(weight, None)
    assert registry.why_dependent == "torch computes products of 9 × 33 in bfloat16"

    registry = Registry("auto", built_library(), HALVES, CPU)
    registry.choose_head(make_dense_weight(torch.ones(9, 33).bfloat16(), "head"), None)
    assert registry.why_dependent == "torch computes products of 9 × 33 in bfloat16"


@needs_compiler
def test_a_kernel_that_fails_its_trial_is_refused(
    no_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wrong(CpuAttention, "__call__", monkeypatch)
    with fminfer.Engine(device="cpu", budget=1024) as engine:
        assert "the kernel cannot be used" in engine.facts.measured.why_dependent
    with pytest.raises(UsageError, match=r"here: attention: the kernel cannot be used"):
        fminfer.Engine(device="cpu", budget=1024, same_answers="on")


def test_a_build_that_fails_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fminfer.compute.kernels import kernel_build
    from fminfer.runtime.load import builder

    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ntest "$1" = --version\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(kernel_build, "_build", None)
    monkeypatch.setattr(builder, "open_weights", None)
    with pytest.raises(UsageError, match="here: the compiler failed"):
        fminfer.Engine(device="cpu", same_answers="on", dtype="float32")


@needs_compiler
@pytest.mark.parametrize("spread", [{"world_size": 2}, {"data_group_size": 2}])
def test_all_ranks_agree(spread: dict[str, int], no_tiles: None) -> None:
    options: dict[str, Any] = {"device": "cpu", "budget": 1024, "dtype": "float32"}
    with fminfer.Engine(same_answers="on", **spread, **options) as engine:
        assert engine.facts.measured.why_dependent == ""
    with fminfer.Engine(kernels="off", **spread, **options) as engine:
        assert engine.facts.measured.why_dependent == "--kernels off"


@needs_compiler
def test_fingerprints_say_which(no_tiles: None) -> None:
    auto = plan_demo().fingerprint()
    on = plan_demo(same_answers="on").fingerprint()
    assert "--same-answers" not in auto
    assert on == auto | {"--same-answers": "on"}
    # kept answers: those of older versions are found, and only its own if it is on
    assert answer_terms(on) == answer_terms(auto) | {"--same-answers": "on"}


@needs_compiler
def test_check_says_it(tmp_path: Path, no_tiles: None) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"prompt": [1, 2], "max_tokens": 3}))
    command = ["check", str(lines), "--device", "cpu"]

    def check(*flags: str) -> str:
        return CliRunner().invoke(main, [*command, *flags]).output

    assert "other rows" not in check()
    assert "answers   may depend on other rows: --kernels off" in check(
        "--kernels", "off"
    )
    report = json.loads(check("--kernels", "off", "--json"))
    assert report["why_dependent"] == "--kernels off"
    refused = check("--kernels", "off", "--same-answers", "on")
    assert "--same-answers on: answers may depend on other rows here: --k" in refused


def test_other_values_are_refused() -> None:
    wrong: Any = "off"
    with pytest.raises(
        UsageError, match="same_answers is 'off'; it must be one of auto, on"
    ):
        EngineConfig(same_answers=wrong)


@needs_compiler
def test_a_run_says_it(tmp_path: Path, no_tiles: None) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"prompt": [1, 2], "max_tokens": 3}))
    stats = tmp_path / "stats.json"
    command = ["run", str(lines), "--device", "cpu", "--stats", str(stats), "--restart"]
    for flags, is_same in (
        (["--same-answers", "on"], True),
        ([], True),
        (["--kernels", "off"], False),
    ):
        done = CliRunner().invoke(main, [*command, *flags])
        assert done.exit_code == 0, done.output
        assert ("answers   the same whatever rows" in done.output) == is_same
        assert ("answers may depend on other rows: --k" in done.output) != is_same
        assert json.loads(stats.read_text())["same_answers"] == is_same
        status = json.loads((tmp_path / "output_a.status.json").read_text())
        assert status["fminfer"]["runs"][-1]["same_answers"] == is_same


def test_a_plan_is_made_with_the_machine_that_is_given() -> None:
    plan = plan_demo(dtype="float32")
    machine = replace(plan.machine, has_library=False)
    assert make_plan(plan.config, plan.checkpoint, machine).dependence
