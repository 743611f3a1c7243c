"""`fminfer check --plan`: the ways to spread a run over devices, and their predicted times."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open

from fminfer.cli.app import main
from fminfer.core.config import EngineConfig, GroupSizes
from fminfer.estimate.cost_model import COSTS, CostModel, find_costs_path, write_costs
from fminfer.estimate.measured_roofs import measure_roofs
from fminfer.estimate.run_plans import (
    MOST_ROWS,
    PlannedRun,
    PlanReport,
    find_spreads,
    plan_runs,
)
from fminfer.models.checkpoint import open_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan, plan_ahead
from fminfer.plan.roofs import KINDS, Roofs

NODE = ["--device-kind", "a100-80gb", "--num-devices", "8"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep costs away from this user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Have eight different prompts of 20 tokens, each to be continued by 30."""
    rng = random.Random(3)
    path = tmp_path / "a.jsonl"
    lines = [
        {"prompt": rng.choices(range(300), k=20), "max_tokens": 30} for _ in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def plans_of(*arguments: object) -> dict[str, Any]:
    found = check("--json", "--plan", *arguments)
    assert found.exit_code in (0, 1), found.output
    plans: dict[str, Any] = json.loads(found.stdout)["plans"]
    return plans


def roofs_of(num_devices: int, num_nodes: int = 1) -> Roofs:
    return Roofs(
        80 << 30, 1e12, 1e14, 1e11, 1e10, num_devices=num_devices, num_nodes=num_nodes
    )


def test_spreads_use_all_devices_and_keep_shards_on_a_node() -> None:
    found = [*find_spreads(roofs_of(8, 2), GroupSizes())]
    assert len(found) == len(set(found)) == 14
    assert all(d * s * t == 16 and t <= 8 for d, s, t in found)
    assert {*find_spreads(roofs_of(6), GroupSizes())} >= {
        (1, 2, 3),
        (3, 2, 1),
        (6, 1, 1),
    }
    # Three nodes of two: a pipeline of four ranks would lie on one node and a half of the next.
    assert {s * t for _, s, t in find_spreads(roofs_of(2, 3), GroupSizes())} == {
        1,
        2,
        6,
    }
    kept = [*find_spreads(roofs_of(8), GroupSizes(tensor_parallel_size=2))]
    assert {t for _, _, t in kept} == {2} and len(kept) == 3
    ones = [*find_spreads(roofs_of(8), GroupSizes(), {"tensor_parallel_size"})]
    assert {t for _, _, t in ones} == {1} and len(ones) == 4
    assert [*find_spreads(roofs_of(8), GroupSizes(world_size=8))] == [(1, 8, 1)]
    assert not [*find_spreads(roofs_of(8), GroupSizes(world_size=4))], "four of eight"


def test_a_large_model_on_eight_gpus(rows: Path) -> None:
    """A row for each spread and number of bits, the fastest first; no GPU is needed."""
    plans = plans_of(rows, "--random-init", "opt-175b", *NODE)
    fitting = [run for run in plans["runs"] if not run["why_not"]]
    others = [run for run in plans["runs"] if run["why_not"]]
    assert plans["runs"] == fitting + others and plans["is_predicted"]
    together = [run["load_s"] + run["run_s"] for run in fitting]
    assert together == sorted(together)
    assert {run["why_not"] for run in others} == {"more memory is needed"}
    assert all("--offload" not in run["flags"] for run in others), (
        "layers are streamed instead"
    )
    by_flags = {run["flags"]: run for run in fitting}
    streamed = by_flags["--data-group-size 8 --offload auto"]
    assert streamed["streamed"][0]["place"] == "disk" and streamed["bound"] == "disk"
    assert "--tp 8 --offload auto" not in by_flags, "no layer needs it"
    half, whole = (by_flags[f] for f in ("--tp 8 --quantize int8", "--tp 8"))
    assert half["weight_dtype"] == "bfloat16 of int8", "floats fit, and are faster"
    assert half["rank_bytes"] == pytest.approx(whole["rank_bytes"], rel=0.02)
    blocks = by_flags["--data-group-size 2 --tp 4 --quantize int8"]
    assert blocks["weight_dtype"] == "int8" and "at each use" in blocks["why_slower"][0]
    assert 0.9 < blocks["rank_bytes"] / whole["rank_bytes"] < 1.1, (
        "half of twice as much"
    )
    for run in fitting:
        assert run["ms_token"] == pytest.approx(1e3 * run["run_s"] / (8 * 30))
        assert run["rank_bytes"] < KINDS["a100-80gb"].device_bytes


def test_the_table_says_that_it_is_predicted(rows: Path) -> None:
    found = check(
        rows, "--random-init", "opt-175b", "--plan", "--offload", "off", *NODE
    )
    assert found.exit_code == 0, found.output
    assert (
        "PREDICTED for 8 × a100-80gb: 79.00 GiB, 312 TFLOP/s, memory 2,039.0 GB/s"
        in found.output
    )
    assert (
        "\nfastest   --" in found.output
        and "more that fit; --all shows" in found.output
    )
    assert re.search(r"not +\d+ ways: more memory is needed", found.output)
    assert "KV cache  " not in found.output, "no single plan is told"
    two = (*NODE[:2], "--num-devices", "2")
    every = check(rows, "--random-init", "opt-175b", "--plan", "--all", *two)
    assert "  --data-group-size 2: more memory is needed" in every.output


def test_flags_that_are_given_are_kept(rows: Path) -> None:
    plans = plans_of(
        rows,
        "--random-init",
        "opt-175b",
        *NODE,
        "--tp",
        "4",
        "--quantize",
        "int4",
        "--offload",
        "disk",
        "--disk-bandwidth",
        "14G",
    )
    assert plans["roofs"]["disk_rate"] == 14e9
    assert len(plans["runs"]) == 2
    for run in plans["runs"]:
        assert "--tp 4 --quantize int4 --offload disk" in run["flags"]
        assert sum(len(each["numbers"]) for each in run["streamed"]) == 96


def test_nothing_fits(rows: Path) -> None:
    flags = ("--device-memory", "3G", "--no-weights")
    found = check(rows, "--random-init", "opt-30b", "--plan", *NODE[:2], *flags)
    assert found.exit_code == 1 and "fastest" not in found.output
    (nearest,) = [
        line for line in found.output.splitlines() if line.startswith("nearest ")
    ]
    assert (
        "--quantize int4 --offload auto: random opt-30b does not fit: rank 0 would take"
        in nearest
    )


def test_a_cache_too_small_for_a_line_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a", "max_tokens": 1000}) + "\n")
    plans = plans_of(path, "--random-init", "opt-1.3b", *NODE, "--budget", "512")
    assert {run["why_not"].split(" for")[0] for run in plans["runs"]} == {
        "the KV cache is too small"
    }


def test_devices_without_a_kind_are_told_by_flags(rows: Path) -> None:
    flags = ["--random-init", "opt-1.3b", "--device-memory", "24G"]
    found = check(rows, "--plan", *flags, "--memory-bandwidth", "1T")
    assert found.exit_code == 2
    assert "--arithmetic-rate, --link-bandwidth, --host-bandwidth" in found.output
    assert "--device-memory," not in found.output, "it was given"
    found = check(rows, *flags, "--num-devices", "8")
    assert (
        found.exit_code == 2
        and "--num-devices and --num-nodes need --plan" in found.output
    )
    found = check(rows, *flags, "--disk-bandwidth", "2G", "--link-bandwidth", "50G")
    assert (
        found.exit_code == 2
        and "--link-bandwidth, --disk-bandwidth: rates" in found.output
    )
    found = check(rows, *flags, "--offload", "disk", "--disk-bandwidth", "2G")
    assert found.exit_code == 2 and "too little is known of the devices" in found.output
    found = check(rows, "--plan", *flags, "--device-kind", "this")
    assert found.exit_code == 2 and "contradict each other" in found.output
    found = check(rows, "--plan", *flags, "--memory-bandwidth", "fast")
    assert found.exit_code == 2 and "'fast' is no rate" in found.output
    rates = ["--memory-bandwidth", "1T", "--arithmetic-rate", "100T"]
    rates += [
        "--link-bandwidth",
        "50G",
        "--host-bandwidth",
        "25G",
        "--host-memory",
        "64G",
    ]
    slow, fast = (
        plans_of(rows, *flags, *rates, "--disk-bandwidth", d) for d in ("1G", "2.5G")
    )
    assert (
        slow["roofs"]["host_bytes"] == 64 << 30 and slow["roofs"]["memory_rate"] == 1e12
    )
    loads = [plans["runs"][0]["load_s"] - 10 for plans in (slow, fast)]
    assert loads[0] == pytest.approx(2.5 * loads[1])


def test_this_machine_is_measured_and_its_calibration_is_used(rows: Path) -> None:
    """With costs of the very model, the roofs do not count."""
    flags = {"dtype": "float32", "kernels": "off"}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    plans = plans_of(rows, *words, "--num-devices", "2")
    assert plans["kind"] == "this machine's device"
    assert plans["roofs"]["memory_rate"] > 1e8 and plans["roofs"]["disk_rate"] > 1e6
    assert {run["flags"] for run in plans["runs"]} >= {"--tp 2", "--data-group-size 2"}
    assert all(run["run_s"] > 0 for run in plans["runs"] if not run["why_not"])
    config = EngineConfig(dtype="float32", kernels="off")
    path = find_costs_path(plan_ahead(config, open_model(config)), has_kernel=False)
    assert path is not None
    write_costs(path, CostModel((7.0, *[0.0] * (len(COSTS) - 1)), 0.0), "demo")
    runs = {run["flags"]: run for run in plans_of(rows, *words)["runs"]}
    # Seven seconds a step: the prompts' step draws each row's first token, and 29 more follow.
    assert runs[""]["bound"] == "as calibrated" and runs[""]["run_s"] == pytest.approx(
        7 * 30
    )


def test_a_folder_with_an_index_alone_has_plans_here(
    rows: Path, tmp_path: Path
) -> None:
    """Its disk cannot be measured: --plan and --offload asked for weights in spite of
    the flag."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        homes = dict.fromkeys(file.keys(), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": homes})
    )
    plans = plans_of(rows, "--model-name", folder, "--no-weights")
    assert plans["runs"] and plans["roofs"]["disk_rate"] == KINDS["h200"].disk_rate
    assert "its disk is assumed" in plans["kind"]
    told = plans_of(
        rows, "--model-name", folder, "--no-weights", "--disk-bandwidth", "7G"
    )
    assert "assumed" not in told["kind"], "the flag says it"


def test_lines_that_are_all_wrong_have_no_plan(tmp_path: Path) -> None:
    """The fastest of 0 tokens took 0.0 s, with its flags."""
    rows = tmp_path / "wrong.jsonl"
    rows.write_text(json.dumps({"prompt": 5}) + "\n")
    for model in ("opt-125m", "llama-405b"):
        found = check(rows, "--random-init", model, "--plan", *NODE)
        assert found.exit_code == 3
        assert "plans     none: no line is right" in found.output
        assert "fastest" not in found.output and "memory" not in found.output
    rows.write_text("")
    found = check(rows, "--random-init", "opt-125m", "--plan", *NODE, "--json")
    report = json.loads(found.stdout)
    assert found.exit_code == 0 and report["plans"] is None and report["why_no_plan"]


def test_an_encoder_has_no_plan(rows: Path) -> None:
    found = check(rows, "--random-init", "t5-small", "--plan", *NODE)
    assert found.exit_code == 2 and "--plan predicts decoders" in found.output


def test_check_tells_what_offload_does(rows: Path) -> None:
    """--offload tells the streamed layers, and what a pass takes if the devices are known."""
    found = check(rows, "--random-init", "bloom-176b", "--offload", "auto", *NODE[:2])
    assert found.exit_code == 0, found.output
    assert (
        "passes    64 of 70 layers, 294.02 GiB, are read from the disk in each"
        in found.output
    )
    assert re.search(
        r"predicted: \d+\.\d s a full pass, .* bound by disk", found.output
    )
    sizes = ("--device-memory", "80G", "--host-memory", "1T")
    unknown = check(rows, "--random-init", "bloom-176b", "--offload", "auto", *sizes)
    assert "wait in the host's memory" in unknown.output
    assert "  predicted: " not in unknown.output
    here = check(rows, "--offload", "disk", "--dtype", "float32", "--kernels", "off")
    assert "passes    2 of 2 layers" in here.output and "bound by" in here.output
    assert "calibration times no steps with --offload" in here.output
    plain = check(rows, "--random-init", "opt-125m", "--device-kind", "l4")
    assert (
        "passes" not in plain.output and "22.00 GiB for each of 1 ranks" in plain.output
    )


def test_a_cpu_is_measured_in_the_type_that_it_multiplies_in() -> None:
    """Where 16 bits are widened, torch's product of them took minutes, and its rate was told."""
    rates = []
    for dtype in ("float32", "float16"):
        config = EngineConfig(random_init="opt-125m", device="cpu", dtype=dtype)
        plan = plan_ahead(config, open_model(config, has_weights=False))
        rates.append(measure_roofs(plan).arithmetic_rate)
    assert rates[1] > rates[0] / 3


def test_each_node_has_the_memory_of_this_machine(rows: Path) -> None:
    """Two pipelines on two nodes were planned as if both took this one's memory."""
    one, two = (
        plans_of(
            rows, "--device", "cpu", "--random-init", "opt-1.3b", "--num-nodes", number
        )
        for number in (1, 2)
    )
    alone = next(run for run in one["runs"] if run["flags"] == "")
    pair = next(run for run in two["runs"] if run["flags"] == "--data-group-size 2")
    assert pair["kv_tokens"] == pytest.approx(alone["kv_tokens"], rel=0.2)


def test_offload_off_and_a_wide_tp_are_kept(rows: Path) -> None:
    """`--offload off` listed streamed layers; a --tp that cannot be gave a table
    without rows."""
    words = ("--random-init", "llama-70b", "--plan", "--device-kind", "l4")
    streamed = check(rows, *words)
    assert streamed.exit_code == 0 and "--offload auto" in streamed.output
    off = check(rows, *words, "--offload", "off")
    assert off.exit_code == 1 and "more memory is needed" in off.output
    wide = check(rows, *words, "--num-devices", "2", "--tp", "4")
    assert wide.exit_code == 2 and "no way uses 2 devices" in wide.output
    assert "counts a token for each byte" in streamed.output


def test_the_fastest_run_comes_first_and_those_that_do_not_fit_last() -> None:
    """Loading counts as well. What does not fit is tried with streamed layers."""
    asked: list[EngineConfig] = []

    def plan_one(config: EngineConfig) -> PlannedRun:
        asked.append(config)
        if config.quantize is None and config.offload == "off":
            return PlannedRun(config, why_not="it does not fit: rank 0")
        load_s = 100.0 if config.quantize == "int8" else 0.0
        return PlannedRun(config, load_s=load_s, run_s=10.0 * config.num_stages)

    config = EngineConfig(random_init="llama-160m")
    found = plan_runs(config, roofs_of(2), plan_one, kept=())
    assert [(run.config.num_stages, run.config.quantize) for run in found] == [
        (1, None),
        (1, "int4"),
        (1, None),
        (1, "int4"),
        (2, None),
        (2, "int4"),
        (1, "int8"),
        (1, "int8"),
        (2, "int8"),
        *[(1, None), (2, None), (1, None)],
    ]
    assert [bool(run.why_not) for run in found] == [False] * 9 + [True] * 3
    assert [run.config.offload for run in found if run.config.quantize is None] == (
        ["auto"] * 3 + ["off"] * 3
    )
    kept = plan_runs(config, roofs_of(2), plan_one, kept=("offload",))
    assert len(kept) == 9 and all(run.config.offload == "off" for run in kept)

    asked.clear()
    quantized = EngineConfig(random_init="llama-160m", quantize="int4")
    plan_runs(quantized, roofs_of(2), plan_one, kept=())
    assert {each.quantize for each in asked} == {"int4"} and len(asked) == 3


def test_the_flags_of_a_planned_run_give_its_config() -> None:
    config = EngineConfig(
        random_init="llama-8b",
        data_group_size=2,
        pipeline_group_size=3,
        tensor_parallel_size=4,
        quantize="int8",
        offload="auto",
    )
    assert PlannedRun(config).flags == (
        "--data-group-size 2 --pipeline-group-size 3 --tp 4 --quantize int8 --offload auto"
    )
    plain = PlannedRun(EngineConfig(random_init="llama-8b"))
    assert (plain.flags, plain.name) == ("", "one process, without flags")
    assert (plain.rank_bytes, plain.streamed) == (0, [])
    assert plain.to_dict() == {"flags": "", "why_not": ""}


def test_of_many_plans_a_few_are_shown_unless_all_are_asked_for() -> None:
    config = EngineConfig(random_init="llama-160m", dtype="float32", device="cpu")
    plan = make_plan(config, open_model(config), Machine(free=8 << 30))
    fits = PlannedRun(config, plan, load_s=1.0, run_s=2.0, ms_token=3.0, bound="disk")
    short = replace(fits, why_not="it does not fit: rank 0 would take 9 GiB")
    report = PlanReport("h200", [fits] * (MOST_ROWS + 2) + [short] * 3, roofs_of(8))

    few = report.to_text()
    assert few.count(" disk") - few.count("disk 7.0") == MOST_ROWS
    assert "… and 2 more that fit; --all shows them" in few
    assert "not       3 ways: it does not fit" in few and "9 GiB" not in few
    whole = report.to_text(is_all=True)
    assert "more that fit" not in whole and whole.count("would take 9 GiB") == 3
    assert "fastest   one process, without flags" in few and "nearest" not in few

    assert len(report.fitting) == MOST_ROWS + 2
    runs = report.to_dict()["runs"]
    assert len(runs) == MOST_ROWS + 5 and runs[0]["run_s"] == 2.0
    assert runs[0]["kv_tokens"] == plan.num_kv_tokens > 0
    assert runs[0]["rank_bytes"] == plan.this_rank.takes.total(0)
