"""The summary of a run: every line of it, where there is something to say, and only there."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import RequestError
from fminfer.core.messages import ConstraintMass
from fminfer.engine.stats import EngineStats, StageStats
from fminfer.files.ordered_output import errors_path, vectors_path
from fminfer.files.output_paths import STDOUT
from fminfer.job.run_summary import JobSummary


def engine_of(num_stages: int = 1, **counts: Any) -> dict[str, Any]:
    return (
        asdict(EngineStats(stages=[StageStats() for _ in range(num_stages)])) | counts
    )


def summary_of(**facts: Any) -> JobSummary:
    return JobSummary("m", "float32", [Path("in.jsonl")], [Path("out.jsonl")], **facts)


def test_a_run_that_had_nothing_to_do() -> None:
    summary = summary_of(num_kept_rows=1200, num_kept_errors=2, engine=engine_of())
    assert summary.to_text().splitlines() == [
        "model     m (float32)",
        "rows      0 answered, 0 in error; 1,200 kept from earlier runs, 2 of them in error",
        "output    out.jsonl",
    ]


def test_every_line(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for path in (errors_path(output), vectors_path(output)):
        path.touch()
    stage = {
        "num_passes": 3,
        "read_bytes": 2**32,
        "read_s": 2.0,
        "slowest_read": 2.0**29,
    }
    stage |= {"waited_s": 6.0, "busy_s": 8.0, "max_tokens": 64, "sent_bytes": 2_500_000}
    engine = engine_of(
        num_prompt_tokens=9000,
        num_generated_tokens=1000,
        num_again_tokens=500,
        num_cached_tokens=1500,
        num_counted_tokens=10_000,
        num_counted_cached=750,
        num_counted_shareable=1000,
        num_put_back=1,
        num_apart=2,
        num_cut_off=1,
        num_open_thoughts=2,
        num_ended_thoughts=1,
        num_truncated_thoughts=3,
        num_kept_requests=4,
        num_copied_requests=1,
        stages=[stage, stage | {"busy_s": 4.0, "num_passes": 0, "slowest_read": 0.0}],
    )
    engine["read"]["num_seeded"] = 1
    facts: dict[str, Any] = {
        **{"kv_dtype": "bfloat16", "device": "cpu", "num_threads": 2, "num_ranks": 4},
        **{
            "cpu_limit": "avx2",
            "start_to_ready_s": 1.25,
            "num_rows": 5,
            "num_errors": 3,
        },
        **{
            "limit": 1,
            "num_changed_inputs": 1,
            "num_taken_rows": 1,
            "num_left_out_rows": 2,
        },
        **{"num_damaged_rows": 1, "num_tried_rows": 7, "num_files_elsewhere": 2},
        **{
            "completed_elsewhere": ["o.jsonl"],
            "refused": {"x.jsonl": "no"},
            "prompt_tokens": 10_500,
        },
        **{
            "errors_by_code": {"out_of_memory": 2, "invalid_json": 1},
            "completion_tokens": 1100,
        },
        **{
            "wall_s": 10.0,
            "other_work_s": 3.0,
            "other_work_share": 0.25,
            "cache_trouble": "full",
        },
        **{
            "is_beside_other_work": True,
            "warnings": {"odd": 2},
            "result_cache": "cache",
        },
        **{"report": "r.html", "made_up": "5 rows", "has_npy": True, "engine": engine},
        "constraint_mass": ConstraintMass(58, 0.958, {"line 3": 0.0042, "line 9": 0.5}),
    }
    summary = JobSummary("m", "float32", [Path("in.jsonl")], [output, output], **facts)
    assert summary.to_text().splitlines() == [
        (
            "model     m (float32, KV cache bfloat16 on cpu, 4 ranks of 2 threads, "
            "FMINFER_CPU=avx2)"
        ),
        (
            "rows      5 answered, 3 in error (2 out_of_memory, 1 invalid_json); 7 had "
            "failed before"
        ),
        "changed   1 input has changed: 1 earlier answer taken, 2 left out because "
        "their lines are gone",
        "made up   5 rows",
        "tokens    10,500 prompt + 1,100 generated",
        "prefix    1,500 of 10,000 prompt tokens were shared and not computed again; "
        "75.0% of what a trie over the file allows",
        "put back  1 row lost their KV cache to others and 2 rows gave nan after a "
        "shared prefix; fed again: 500 tokens",
        "cut off   1 answer by max_tokens, before what was asked for was complete: raise it",
        "thoughts  2 answers without text, as max_tokens ended the thought: raise it, or give "
        "--thinking-budget",
        "thoughts  1 answer without text, as the model ended within its thought; with "
        "--thinking-budget it cannot end there before a constrained answer",
        "thoughts  3 answers whose thought a budget ended",
        "cache     4 requests had an answer in cache",
        "copied    1 request had the answer of an equal one, which was computed once",
        "speed     1,000 tokens/s computed, of them 100 generated (1,160 with those that were "
        "shared); stages busy 80%, 40% (bubble 40%); 5.0 MB sent",
        "time      ready after 1.2 s, then 10.0 s",
        "allowed   constraints left 96% of the model's probability (median of 58 "
        "measured rows); least: line 3 (0.42%), line 9 (50%)",
        "offload   3 passes of stage 0, 4.00 GiB read at 2.00 GiB/s by each rank; it waited for "
        "layers 75% of the time: bringing layers set the pace",
        "warning   the disk of stage 0 was slow at times: one pass read at 512 MiB/s, "
        "all together at 2.00 GiB/s",
        *(
            f"warning   memory ran out on rank {rank}: it computes 64 tokens at once now; a "
            "smaller --chunk-size or --budget would avoid that"
            for rank in (0, 1)
        ),
        "warning   other work slowed this run: threads stood in line for it 3.0 s, 25% "
        "of the time of their cores; run it alone, or keep other work off these cores",
        "warning   --result-cache was given up: full",
        "warning   damaged on the disk, and answered again: 1 row of earlier runs",
        "note      with a KV cache in bfloat16 a seed repeats its draws only beside "
        "the same rows and with the same options; in float32 (--kv-dtype) it does so "
        "nearly always",
        "warning   odd (2 rows)",
        "elsewhere other runs are answering 2 files",
        "elsewhere o.jsonl was completed by another run, which took it over",
        "limit     only the first 1 request of each input (--limit); the same command "
        "without it answers the others and keeps these",
        "refused   x.jsonl: no",
        f"output    {output}",
        f"vectors   {vectors_path(output)}",
        f"errors    {errors_path(output)}",
        "report    r.html",
        "again     the same command tries 2 failed rows again",
    ]


def test_records_are_counted_by_their_codes() -> None:
    summary = summary_of()
    line = Line(0, 1, b'{"prompt": "a"}')
    envelope = parse_envelope(line)
    for code in ("invalid_json", "out_of_memory", "invalid_json"):
        error = RequestError(code, "it failed")  # type: ignore[arg-type]
        summary.count_record(Record(line, envelope, error=error))
    answer = Record(
        line, envelope, result={}, num_prompt_tokens=3, num_completion_tokens=2
    )
    summary.count_record(answer)
    summary.count_record(answer)
    assert (summary.num_rows, summary.num_errors, summary.has_errors) == (2, 3, True)
    assert summary.errors_by_code == {"invalid_json": 2, "out_of_memory": 1}
    assert (summary.prompt_tokens, summary.completion_tokens) == (6, 4)
    assert not summary_of().has_errors and summary_of(num_kept_errors=1).has_errors


def test_the_same_command_is_named_where_it_helps() -> None:
    facts: dict[str, Any] = {
        "errors_by_code": {"out_of_memory": 1},
        "engine": engine_of(),
    }
    again = "again     the same command tries 1 failed row again"
    assert summary_of(**facts).to_text().splitlines()[-1] == again
    other = summary_of(errors_by_code={"invalid_json": 1}, engine=engine_of())
    piped = JobSummary("m", "float32", [Path("in.jsonl")], [STDOUT], **facts)
    for summary in (other, piped):
        assert "again" not in summary.to_text()
    assert piped.to_text().splitlines()[-1] == "output    stdout"


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "said"),
    [
        ("float32", "", ""),
        ("float32", "float32", ""),
        (
            "bfloat16",
            "",
            "in bfloat16 a seed repeats .* in float32 \\(--dtype\\) it does",
        ),
        (
            "float32",
            "bfloat16",
            "with a KV cache in bfloat16 a seed .* \\(--kv-dtype\\) it does",
        ),
        (
            "bfloat16",
            "bfloat16",
            "in bfloat16 a seed .* \\(--dtype and --kv-dtype\\) it does",
        ),
    ],
)
def test_what_a_seed_repeats(dtype: str, kv_dtype: str, said: str) -> None:
    engine = engine_of()
    assert (
        "a seed"
        not in JobSummary("m", dtype, [], [], kv_dtype, engine=engine).to_text()
    )
    engine["read"]["num_seeded"] = 1
    text = JobSummary("m", dtype, [], [], kv_dtype, engine=engine).to_text()
    assert re.search(f"note      {said}", text) if said else "a seed" not in text


def test_whether_answers_depend_on_other_rows() -> None:
    """Nothing said that 14 of 96 texts change with --max-rows. Seeds then repeat, or not."""
    engine = engine_of()
    engine["read"]["num_seeded"] = 1
    facts: dict[str, Any] = {"kv_dtype": "bfloat16", "device": "cpu", "engine": engine}

    same = summary_of(same_answers=True, **facts)
    assert "\nanswers   the same whatever rows were beside them\n" in same.to_text()
    assert "a seed" not in same.to_text() and "may depend" not in same.to_text()
    assert same.to_dict()["same_answers"] and not same.to_dict()["why_dependent"]

    other = summary_of(why_dependent="--kernels off", **facts)
    assert (
        "note      answers may depend on other rows: --kernels off" in other.to_text()
    )
    assert "a seed" in other.to_text() and "\nanswers " not in other.to_text()
    assert other.to_dict()["why_dependent"] == "--kernels off"


def test_as_json() -> None:
    facts = {"prompt_tokens": 30, "completion_tokens": 20, "wall_s": 2.0}
    engine = engine_of(num_prompt_tokens=20, num_generated_tokens=10)
    found = summary_of(engine=engine, **facts).to_dict()
    assert (found["inputs"], found["outputs"]) == (["in.jsonl"], ["out.jsonl"])
    assert (
        found["tokens_per_s"],
        found["generated_per_s"],
        found["answered_per_s"],
    ) == (15, 5, 25)
    empty = summary_of().to_dict()
    assert {
        name: empty[name]
        for name in ("result_cache", "report", "why_slower", "cpu_limit")
    } == {**{"result_cache": "", "report": "", "why_slower": "", "cpu_limit": ""}}
    assert (empty["num_ranks"], empty["warnings"], empty["limit"]) == (1, {}, None)
    assert empty["answered_per_s"] == 0.0
