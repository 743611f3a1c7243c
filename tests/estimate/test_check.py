"""`fminfer check` says what a run would say and do, and reads no weight for it."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import fminfer
from fminfer.cli.app import main
from fminfer.compute.formats.dense import Dense
from fminfer.compute.values.step import SCORE
from fminfer.core.config import EngineConfig
from fminfer.estimate import calibration
from fminfer.estimate import line_checks as check_lines
from fminfer.estimate.cost_model import (
    COSTS,
    SPREAD_COSTS,
    CostModel,
    StepWork,
    find_costs_path,
    fit,
    load_costs,
    write_costs,
)
from fminfer.files.line_reader import read_lines
from fminfer.models.checkpoint import open_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.plan.expected_bytes import HOLE_BYTES
from fminfer.plan.planning import plan_ahead
from fminfer.runtime.lines.runner import WINDOW
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import num_examples
from tests.steps import Row, make_draws, make_step

QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries"
FLAGS = ["--dtype", "float32", "--kernels", "off"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kernels": "off"}
ROW: dict[str, Any] = {
    "prompt": "Question: How do you go from the porch to the den?\nAnswer:"
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep costs away from this user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fminfer"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *FLAGS, *map(str, arguments)])


def check_json(*arguments: object) -> dict[str, Any]:
    found = check("--json", *arguments)
    assert found.exit_code in (0, 3), found.output
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def mixed_rows(count: int, **more: Any) -> list[dict[str, Any]]:
    """Give rows of all kinds: candidates, scored prompts, shared prefixes, equal ones."""
    rng = random.Random(11)
    heads = [rng.choices(range(300), k=90) for _ in range(3)]
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ids = heads[number % 3][: rng.choice([0, 40, 90])] + rng.choices(
            range(300), k=1 + number
        )
        row = {
            "prompt": ids,
            "max_tokens": rng.randint(0, 30),
            "temperature": number % 2,
        }
        row |= {"n": 1 + number % 3} if number % 4 == 0 else {}
        row |= {"echo": True, "logprobs": 2} if number % 5 == 0 else {}
        rows.append(row | more)
    return rows + rows[:4]


@pytest.mark.parametrize(
    "flags", [[], ["--strict", "--max-logprobs", "2", "--budget", "64"]]
)
def test_wrong_lines_are_those_of_a_run(tmp_path: Path, flags: list[str]) -> None:
    path = tmp_path / "all.jsonl"
    parts = [file.read_text() for file in sorted(QUERIES.glob("*.jsonl"))]
    path.write_text(
        "".join(part if part.endswith("\n") else part + "\n" for part in parts)
    )
    run = CliRunner().invoke(main, ["run", "-q", *FLAGS, *flags, str(path)])
    assert run.exit_code == 3, run.output
    errors = (tmp_path / "output_all.errors.jsonl").read_text().splitlines()
    told = [json.loads(error) for error in errors]
    expected = [each["error"] or each["response"]["body"]["error"] for each in told]
    report = check_json(path, *flags)
    names = ("code", "message", "param")
    found = [[error[name] for name in names] for error in report["errors"]]
    assert found == [[error[name] for name in names] for error in expected]
    assert len(found) > 8 + len(flags)
    assert {error["file"] for error in report["errors"]} == {str(path)}
    assert report["counts"]["num_wrong"] == len(expected)


def test_exit_status_and_what_is_told(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [ROW | {"temperature": 0}] * 2)
    found = check(good)
    assert (
        found.exit_code == 0
        and "2 right; 1 have the answer of an equal one" in found.output
    )
    told = (
        "time      not predicted: first time the model's steps on this machine, in "
        "about a minute: "
    )
    assert (
        f"{told}fminfer bench --calibrate --dtype float32 --kernels off" in found.output
    )
    assert "good.jsonl:1, 16 tokens:\n    Question: How do" in found.output
    bad = write(tmp_path / "bad.jsonl", [ROW, *([{"prompt": 5}] * 25)])
    found = check(good, bad)
    assert found.exit_code == 3
    assert (
        found.output.count("prompt is 5") == 1
        and f"{bad}:2: prompt is 5" in found.output
    )
    assert "; 25 lines alike: 2-26\n" in found.output
    assert check(bad, "--all").output.count("prompt is 5") == 25
    assert len(check_json(bad)["errors"]) == 25
    assert check().exit_code == check(tmp_path / "no.jsonl").exit_code == 2
    assert check(good, "--world-size", "0").exit_code == 2


def test_wrong_lines_are_told_by_reason(tmp_path: Path) -> None:
    """100 lines with one fault were 20 equal sentences, and other faults were not shown."""
    hot = [ROW | {"temperature": number} for number in (9, 10, 11)]
    first = write(tmp_path / "a.jsonl", [*hot, ROW, *hot, ROW | {"n": 0}])
    rows = [row for _ in range(20) for row in (ROW | {"n": 500}, ROW)]
    second = write(tmp_path / "b.jsonl", rows)
    output = check(first, second).output
    sentences = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert len(sentences) == 2, output
    assert sentences[0].startswith(f"{first}:1: temperature is 9; ")
    assert sentences[0].endswith("(out_of_range); 6 lines alike: 1-3, 5-7")
    assert sentences[1].startswith(f"{first}:8: n is 0; ")
    places = ", ".join(
        ["8", *(f"{second}:{number}" for number in range(1, 22, 2)), "…"]
    )
    assert sentences[1].endswith(f"(out_of_range); 21 lines alike: {places}")
    assert len(check_json(first, second)["errors"]) == 27
    assert check(first, second, "--all").output.count("(out_of_range)") == 27

    kinds = [{"prompt": "a", "x" * number: 1} for number in range(1, 24)]
    told = check(write(tmp_path / "c.jsonl", kinds), "--strict").output
    assert told.count("c.jsonl:") == 20
    assert "… and 3 lines for other reasons; --all shows each line" in told


def test_an_input_behind_a_url(tmp_path: Path) -> None:
    """The help names URLs: one was looked for as s3:/…, or ended check with a traceback."""
    path = write(tmp_path / "a.jsonl", [ROW, {"prompt": 5}])
    for arguments in ([path.as_uri()], ["--infer-data", path.as_uri()]):
        assert "1 right, 1 wrong" in check(*arguments).output


def test_a_file_without_a_right_line(tmp_path: Path) -> None:
    report = check_json(write(tmp_path / "a.jsonl", [{"prompt": 5}]))
    assert report["first_prompt"] is None and report["work"]["num_steps"] == 0
    assert "1 wrong" in check(tmp_path / "a.jsonl").output
    (tmp_path / "empty.jsonl").touch()
    assert check(tmp_path / "empty.jsonl").exit_code == 0


@pytest.mark.parametrize("weights", [b"", None], ids=["truncated", "absent"])
def test_no_weights_are_needed_to_plan(tmp_path: Path, weights: bytes | None) -> None:
    """A folder that a run refuses passed; of --random-init the config alone is read."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if weights is not None:  # the header alone
        file.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    with pytest.raises(fminfer.FminferError) as error:
        fminfer.Engine(str(folder), **OPTIONS)
    arguments = ["check", str(QUERIES / "plain.jsonl"), "--model-name", str(folder)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1 and str(error.value) in refused.stderr
    report = check_json(QUERIES / "plain.jsonl", "--random-init", folder)
    (process,) = report["memory"]["processes"]
    assert process["weights"] > len(data) and report["counts"]["num_lines"] == 8


@pytest.mark.parametrize(
    "flags", [{}, {"budget": 320, "max_rows": 7}, {"prefix_cache": False}]
)
def test_steps_are_those_of_a_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Every row draws all that it may: nothing that the pretended tokens spell ends a row."""
    path = write(tmp_path / "a.jsonl", mixed_rows(40, ignore_eos=True))
    engine = fminfer.Engine(**OPTIONS, **flags)
    run = engine.runs.start(WINDOW, is_only_run=True)  # as the command starts it
    assert not [r.error for r in run.run(read_lines(path, 0)) if r.error]
    stats = engine.stats
    engine.close()
    names = {"budget": "--budget", "max_rows": "--max-rows"}
    given = [
        str(part)
        for name in flags
        if name in names
        for part in (names[name], flags[name])
    ]
    given += ["--no-prefix-cache"] if "prefix_cache" in flags else []
    report = check_json(path, *given)
    counts = report["counts"]
    work = report["work"]
    assert work["num_steps"] == stats.num_steps > 30
    assert work["max_rows_running"] == stats.max_rows_running
    assert work["sample_lines"] == 0
    assert counts["num_equal"] == stats.num_copied_requests
    assert counts["tokens_to_draw"] == stats.num_generated_tokens
    shared = stats.num_counted_shareable if given[-1:] != ["--no-prefix-cache"] else 0
    assert counts["num_shared_tokens"] == shared
    fed = stats.num_prompt_tokens - stats.num_again_tokens + stats.num_cached_tokens
    assert counts["tokens_to_feed"] == fed


def test_the_cache_is_as_large_as_what_runs_or_is_shared(tmp_path: Path) -> None:
    """A run uses blocks again that none of the waiting prompts shares, once it has read all."""
    rows = [{"prompt": [n % 300] * 64, "max_tokens": 1, "seed": n} for n in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    found = [
        check_json(path, "--max-rows", "4", *flags)["work"]["num_kv_tokens"]
        for flags in ([], ["--no-prefix-cache"])
    ]
    assert found[0] <= 2 * found[1] <= 2000


def test_stops_do_not_shorten_what_is_promised(tmp_path: Path) -> None:
    rows = [
        {"prompt": [n], "max_tokens": 9, "temperature": 1, "stop": ["a"]}
        for n in range(20)
    ]
    stopping = [row | {"stop_token_ids": list(range(300))} for row in rows]
    free = [
        {k: v for k, v in row.items() if k != "stop"} | {"ignore_eos": True}
        for row in rows
    ]
    found = [
        check_json(write(tmp_path / f"{name}.jsonl", each))["work"]
        for name, each in {"stopping": stopping, "free": free}.items()
    ]
    assert found[0] == found[1] and found[0]["num_steps"] >= 9


def test_tokens_are_counted(tmp_path: Path) -> None:
    rows = [
        # one is computed
        {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "n": 5},
        {"prompt": [[1, 2, 3], [9]], "max_tokens": 6, "n": 2, "best_of": 3},
        {"prompt": [7] * 40, "max_tokens": 0, "echo": True, "logprobs": 0},
    ]
    counts = check_json(write(tmp_path / "a.jsonl", rows))["counts"]
    assert counts["num_prompts"] == 4 and counts["num_sequences"] == 1 + 3 + 3 + 1
    assert counts["prompt_tokens"] == 3 + 3 + 1 + 40
    assert counts["max_drawn_tokens"] == 4 + 6 * 3 + 6 * 3
    assert (
        counts["reserved_tokens"]
        == counts["prompt_tokens"] + counts["max_drawn_tokens"]
    )
    assert counts["longest_row"] == 40
    assert counts["num_shared_tokens"] == 2  # of three, the last is fed to draw from


def test_the_first_prompt_shows_its_bos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["<s>", "one", "two", "three"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="one"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    monkeypatch.setattr(
        "fminfer.estimate.checking.load_tokenizer", lambda *_: Tokenizer(hf)
    )
    path = write(tmp_path / "a.jsonl", [{"prompt": 5}, {"prompt": "two three"}])
    first = check_json(path)["first_prompt"]
    assert first == {
        "file": str(path),
        "line": 2,
        "text": "<s> two three",
        "num_ids": 3,
        "closing_tag": None,
        "tool_parser": None,
    }


def test_the_first_prompt_tells_how_its_answer_is_read(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}>{# <think> </think> <tool_call> #}")
    chat = {"messages": [{"role": "user", "content": "den"}]}
    function = {"name": "look", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    path = write(tmp_path / "a.jsonl", [chat | {"tools": tools}])
    flags = ("--chat-template", str(template))
    first = check_json(path, *flags)["first_prompt"]
    assert (first["closing_tag"], first["tool_parser"]) == ("</think>", "hermes")
    text = check(path, *flags).stdout
    assert "; thought up to </think>; calls in the form hermes:\n    " in text
    assert (
        "thought up to" not in check(path, *flags, "--reasoning-parser", "none").stdout
    )


def test_of_a_long_file_only_the_beginning_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"max_tokens": 10, "temperature": 1}
    rows = [row | {"prompt": [n % 300, n // 300, n % 7]} for n in range(2000)]
    path = write(tmp_path / "a.jsonl", rows)
    whole = check_json(path)["work"]
    monkeypatch.setattr(check_lines, "SAMPLE_TOKENS", 5200)
    part = check_json(path)["work"]
    assert part["sample_lines"] == 400 and whole["sample_lines"] == 0
    assert part["num_steps"] == pytest.approx(whole["num_steps"], rel=0.25)
    assert "estimated from the first 400 lines" in check(path).output


@pytest.mark.parametrize("kind", ["one prompt", "one short row"])
def test_steps_of_a_long_file_without_prompts_are_foreseen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all steps of the sample come after the last one that feeds tokens of a prompt."""
    if kind == "one prompt":  # found in the prefix cache but for its last token
        rows = [{"prompt": [*range(60)], "max_tokens": 20, "temperature": 1}] * 2000
    else:  # that ends before the others have come
        rows = [
            {"prompt": [n % 300] * 20, "max_tokens": 40, "seed": n} for n in range(2000)
        ]
        rows[0]["max_tokens"] = 1
    path = write(tmp_path / "a.jsonl", rows)
    whole = check_json(path)["work"]
    monkeypatch.setattr(check_lines, "SAMPLE_TOKENS", 30_000)
    part = check_json(path)["work"]
    assert part["sample_lines"] < 550 and whole["sample_lines"] == 0
    assert part["num_steps"] == pytest.approx(whole["num_steps"], rel=0.25)
    assert set(SPREAD_COSTS) < set(COSTS)


def test_layers_are_spread_over_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ROW])
    (whole,) = check_json(path, "--random-init", "llama-160m")["memory"]["processes"]
    flags = [
        "--random-init",
        "llama-160m",
        "--world-size",
        "3",
        "--stage-layers",
        "5,4,3",
    ]
    report = check_json(path, *flags)
    parts = report["memory"]["processes"]
    assert [part["num_layers"] for part in parts] == [5, 4, 3]
    assert sum(part["weights"] for part in parts) == whole["weights"] > 162e6 * 4
    assert (
        sum(part["kv_token"] for part in parts) == whole["kv_token"] == 2 * 12 * 768 * 4
    )
    assert (
        report["work"]["seconds"] is None
        and "several processes" in report["work"]["why_not"]
    )
    assert check(path, "--stage-layers", "1,2").exit_code == 2


def test_the_weights_are_those_of_an_engine() -> None:
    config = EngineConfig(random_init="llama-160m", dtype="float16", device="cpu")
    plan = plan_ahead(config, open_model(config))
    assert (
        plan.this_rank.takes.weights == 162_417_408 * 2 and plan.dtype not in HOLE_BYTES
    ), "no holes"


@settings(deadline=None, max_examples=num_examples(20))
@given(
    st.lists(st.floats(0, 1e-2), min_size=len(COSTS), max_size=len(COSTS)), st.randoms()
)
def test_costs_are_found_again(seconds: list[float], rng: random.Random) -> None:
    """Whatever the costs are, steps like the measured ones are predicted."""
    truth = CostModel((seconds[0] + 1e-3, *seconds[1:]), 0.0)
    some = [
        StepWork(
            *(
                rng.randrange(limit)
                for limit in (512, 10**5, 10**4, 128, 10**5, 128, 64)
            )
        )
        for _ in range(60)
    ]
    found = fit([(shape, truth.predict_s(shape.counts)) for shape in some])
    assert min(found.seconds) >= 0
    assert found.error < 0.01


def test_a_step_is_measured() -> None:
    rows = [
        Row([5, 6, 7], 10, [0]),  # sees 11, 12 and 13 keys
        Row([5], 31, [1, 2]),
        Row([5], 0, [3]),
    ]
    draws = make_draws([2, 3, 4], temperature=[0.0, 1.0, 0.0])
    step = make_step(
        rows, draws=draws, scores=np.array([(0, 6, 0, -1), (1, 7, 0, -1)], SCORE)
    )
    assert StepWork.of(step) == StepWork(3, 36, 13, 2, 33, 5, 1)


def test_calibrated_costs_are_used_for_that_work_only(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "ENOUGH_S", 0.0)
    monkeypatch.setattr(calibration, "WHOLE_RUNS", calibration.WHOLE_RUNS[-1:])
    monkeypatch.setattr(
        calibration, "TRIALS", calibration.TRIALS[:3] + calibration.TRIALS[-2:]
    )
    found = CliRunner().invoke(main, ["bench", "--calibrate", *FLAGS])
    assert found.exit_code == 0, found.output
    assert "left 0:" in found.stderr and "times what was predicted" in found.stdout
    summary = json.loads(found.stdout.splitlines()[-1])
    assert len(summary["whole_runs"]) == 1
    assert Path(summary["path"]).parent == cache
    path = write(tmp_path / "a.jsonl", mixed_rows(30))
    seconds = check_json(path)["work"]["seconds"]
    assert 0.001 < seconds < 60
    assert "time      about" in check(path).output
    other = CliRunner().invoke(main, ["check", "--dtype", "bfloat16", str(path)])
    assert "not predicted" in other.output
    assert check_json(path, "--max-layers", "1")["work"]["seconds"] is None
    Path(summary["path"]).write_text("{")
    assert check_json(path)["work"]["seconds"] is None


def test_time_is_the_sum_of_the_steps_costs(tmp_path: Path) -> None:
    """One row of 4 tokens that draws 3: a step of 4 tokens, and two of 1 that see 5 and
    6 keys."""
    config = EngineConfig(**OPTIONS)
    path = find_costs_path(plan_ahead(config, open_model(config)), has_kernel=False)
    assert path is not None and load_costs(path) is None
    costs = CostModel(
        (1.0, 10.0, 0.0, 100.0, 0.5, 1e3, 0.0, 0.0, 1e4, 1e6, 1e7, 1e8), 0.5
    )
    write_costs(path, costs, "demo")
    assert load_costs(path) == costs
    row = {"prompt": [1, 2, 3, 4], "max_tokens": 3, "temperature": 1}
    found = check_json(write(tmp_path / "a.jsonl", [row]))["work"]["seconds"]
    assert found == 3 + 40 + 1000 + 2 + 2e3 + 11e4 + 3e6 + 3e7 + 3e8


def test_time_is_an_estimate_with_the_error_that_was_measured(tmp_path: Path) -> None:
    """ "At most 21.5 s" was promised of a run that took 27.6: a sum of fitted steps is
    no bound."""
    config = EngineConfig(**OPTIONS)
    path = find_costs_path(plan_ahead(config, open_model(config)), has_kernel=False)
    assert path is not None
    source = write(tmp_path / "a.jsonl", [{"prompt": [1, 2, 3, 4], "max_tokens": 10}])
    told = "if every row draws all of its max_tokens; loading is not counted"
    for runs, text in {
        (0.9, 1.5, 1.2): "about 12.0 s (9.0 s to 15.0 s, by calibration's own runs)",
        (7.0, 8.0, 2.0): "about 1:10 (20.0 s to 1:20, by calibration's own runs)",
    }.items():
        write_costs(
            path, CostModel((1.0, *[0.0] * (len(COSTS) - 1)), 0.5, runs), "demo"
        )
        output = check(source).output
        assert (
            f"time      {text} {told}" in output
            and "at most 1" not in output.partition("time")[2]
        )
    fields = json.loads(path.read_text())
    del fields["whole_runs"]  # as versions before wrote it
    path.write_text(json.dumps(fields))
    assert "not predicted" in check(source).output


def test_costs_are_those_of_so_many_threads() -> None:
    """`bench --calibrate --threads 1` kept costs where `check --threads 1` did not look."""
    paths = []
    for threads in (1, 2):
        config = EngineConfig(**OPTIONS, threads=threads)
        paths.append(
            find_costs_path(plan_ahead(config, open_model(config)), has_kernel=False)
        )
    assert None not in paths and paths[0] != paths[1]


def test_costs_are_those_of_the_types_of_weights_and_cache() -> None:
    """Half the bytes are read in half the time."""
    paths = set()
    kv_dtypes: list[Any] = ["float32", "bfloat16"]
    for kv_dtype in kv_dtypes:
        config = EngineConfig(**OPTIONS, kv_dtype=kv_dtype)
        plan = plan_ahead(config, open_model(config))
        for held_in in (torch.float32, torch.bfloat16):
            held = replace(plan, formats={**plan.formats, "product": Dense(held_in)})
            paths.add(find_costs_path(held, has_kernel=True))
    assert None not in paths and len(paths) == 4


def test_how_long_calibration_takes_is_known_after_its_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went on for 40 s without a word of how long."""
    monkeypatch.setattr(calibration, "ENOUGH_S", 20.0)
    assert [calibration.rounds_of(seconds) for seconds in (15.0, 2.0, 0.01)] == [
        2,
        10,
        50,
    ]


def test_a_model_of_the_hub_is_fetched_without_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], revision: str | None) -> str:
        asked.append(allow_patterns)
        return str(DEMO_MODEL)

    def list_files(self: Any, name: str, revision: str | None) -> Any:
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename="model.safetensors")]
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", list_files)
    open_model(EngineConfig(model="some/model"), has_weights=False)
    assert not [
        pattern
        for patterns in asked
        for pattern in patterns
        if "safetensors" in pattern
    ]
    open_model(EngineConfig(model="some/model"))
    assert any("safetensors" in pattern for pattern in asked[-1])
