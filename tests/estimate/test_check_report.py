"""The report of a check: its figures add up, and it says what is true of them only."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fminfer.core.config import EngineConfig
from fminfer.core.quantities import describe_bytes
from fminfer.estimate.check_report import MAX_SHOWN, CheckReport, FirstPrompt, Work
from fminfer.estimate.line_checks import LineCounts
from fminfer.estimate.run_plans import PlannedRun, PlanReport
from fminfer.models.checkpoint import open_model
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan
from fminfer.plan.roofs import KINDS
from fminfer.plan.run_plan import RunPlan

GIB = 1 << 30
COUNTS = LineCounts(
    num_lines=1200,
    num_wrong=2,
    errors_by_code={"invalid_type": 2},
    num_equal=3,
    prompt_tokens=5000,
    max_drawn_tokens=700,
    longest_row=90,
    tokens_to_feed=5000,
    num_counted_tokens=4000,
    num_shared_tokens=1000,
)
WORK = Work(
    num_steps=1,
    max_rows_running=256,
    num_kv_tokens=320,
    seconds=None,
    seconds_range=None,
    why_not="nobody has measured",
    sample_lines=0,
)


def plan_with(room: int = 8 * GIB, device: str = "cpu", **facts: Any) -> RunPlan:
    config = EngineConfig(
        random_init="llama-160m", dtype="float32", kernels="off", device=device
    )
    known = {"free": room} if device == "cpu" else {"device_bytes": room}
    return make_plan(config, open_model(config), Machine(**known | facts))


def report_of(plan: RunPlan, **more: Any) -> CheckReport:
    found = CheckReport(plan, ["a.jsonl"], COUNTS, {}, first=None, work=WORK)
    return replace(found, **more)


@pytest.mark.parametrize("facts", [{}, {"num_stages": 3, "local_size": 3}], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_of_a_process_add_up(device: str, facts: dict[str, int]) -> None:
    """A CPU's cache takes memory block by block, a GPU's all at once."""
    plan = plan_with(16 * GIB, device, **facts)
    memory = report_of(plan).to_dict()["memory"]
    used = WORK.num_kv_tokens if device == "cpu" else plan.num_kv_tokens
    assert used > 0 and len(memory["processes"]) == facts.get("num_stages", 1)
    for process in memory["processes"]:
        cache = used * process["kv_token"]
        parts = process["libraries"] + process["weights"] + process["work"]
        assert process["total"] == parts + cache
    assert sum(process["num_layers"] for process in memory["processes"]) == 12
    assert memory["room"] == 16 * GIB and memory["kv_tokens"] == plan.num_kv_tokens
    assert memory["is_shared"] == (device == "cpu")


def test_the_table_shows_the_same_sizes() -> None:
    plan = plan_with(num_stages=2, local_size=2, num_pipelines=2)
    report = report_of(plan)
    processes = report.to_dict()["memory"]["processes"]
    text = report.to_text()
    for process in processes:
        cells = [process[name] for name in ("libraries", "weights", "work")]
        cells += [320 * process["kv_token"], process["total"]]
        sizes = r"\s+".join(map(re.escape, map(describe_bytes, cells)))
        row = rf"\s{process['rank']}\s+{process['num_layers']}\s+{sizes}"
        assert re.search(row, text), text
    total = 2 * sum(process["total"] for process in processes)
    assert f"all 4 ranks, 2 pipelines of 2 take {describe_bytes(total)}" in text
    assert "8.00 GiB of memory are free here" in text
    assert f"{plan.num_kv_tokens:,} tokens of each pipeline" in text
    assert "use at most 320" in text


def test_one_process_is_not_called_several() -> None:
    text = report_of(plan_with()).to_text()
    assert "ranks take" not in text and "of each pipeline" not in text
    on_gpu = report_of(plan_with(16 * GIB, "cuda")).to_text()
    assert "16.00 GiB for each of 1 ranks" in on_gpu


def test_lines_and_tokens_are_counted() -> None:
    text = report_of(plan_with()).to_text()
    assert "1,198 right, 2 wrong (2 invalid_type); 3 have the answer of an" in text
    assert "5,000 prompt + at most 700 generated = 5,700 reserved" in text
    assert "longest row 90 of 2,048" in text
    assert "1,000 of the first 4,000 prompt tokens (25%) are shared" in text
    assert "1 micro-batch at most, up to 256 rows at once" in text
    counts = report_of(plan_with()).to_dict()["counts"]
    assert counts["reserved_tokens"] == 5700

    plain = replace(
        COUNTS, num_wrong=0, errors_by_code={}, num_equal=0, num_shared_tokens=0
    )
    text = report_of(plan_with(), counts=plain).to_text()
    assert "1,200 right\n" in text and "prefix " not in text


def test_time_is_told_if_it_is_predicted() -> None:
    text = report_of(plan_with()).to_text()
    assert "time      not predicted: nobody has measured" in text
    work = replace(WORK, seconds=30.0, seconds_range=(20.0, 40.0), sample_lines=7)
    text = report_of(plan_with(), work=work).to_text()
    assert "about 30.0 s (20.0 s to 40.0 s, by calibration's own runs)" in text
    assert "estimated from the first 7 lines; loading is not counted" in text


def test_a_run_that_does_not_fit_has_no_steps_and_no_time() -> None:
    plan = plan_with(GIB // 4)
    report = report_of(plan)
    text = report.to_text()
    assert not report.fits and report_of(plan_with()).fits
    assert f"KV cache  none fits: {plan.shortage}" in text
    assert "steps " not in text and "time " not in text
    assert report.to_dict()["memory"]["shortage"] == plan.shortage != ""


def test_a_plan_that_fits_is_enough() -> None:
    short = plan_with(GIB // 4)
    runs = [PlannedRun(short.config, short, "it does not fit: rank 0")]
    plans = PlanReport("h200", runs, KINDS["h200"])
    assert not report_of(short, plans=plans).fits
    fitting = replace(plans, runs=[*runs, PlannedRun(short.config, plan_with())])
    assert report_of(short, plans=fitting).fits
    assert report_of(short, why_no_plan="all lines are wrong").fits


@pytest.mark.parametrize("length", [MAX_SHOWN, MAX_SHOWN + 1, 5000])
def test_of_a_long_prompt_both_ends_are_shown(length: int) -> None:
    prompt = FirstPrompt("a.jsonl", 3, "b" + "x" * (length - 2) + "e", 77)
    text = report_of(plan_with(), first=prompt).to_text()
    told = text.partition("first     a.jsonl:3, 77 tokens:\n")[2]
    assert told.startswith("    bxxx") and told.endswith("xxxe")
    assert told.count("x") == min(length, MAX_SHOWN) - 2
    assert (f"[… {length - MAX_SHOWN:,} characters …]" in told) == (length > MAX_SHOWN)


def test_warnings_say_how_many_rows_they_are_of() -> None:
    text = report_of(plan_with(), warnings={"too long": 1, "odd": 2}).to_text()
    assert "warning   too long (1 row)" in text and "warning   odd (2 rows)" in text
