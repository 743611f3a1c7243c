"""scripts/dist_inference_runner.py takes seed 004's command lines as they are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from fminfer.cli.submit_command import accept_run_flags
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "dist_inference_runner.py"
QUERIES = ROOT / "examples" / "queries" / "plain.jsonl"
# Of the loop in seed 004.
LOOP = (
    "--model-name /data/models/opt-175b-new --model-type opt --seed 42 --fp16 --num-layers 12 "
    "--max-layers 96 --budget 26800 --num-iters 99999999999999 --dist-url tcp://127.0.0.1:9031 "
    "--world-size 8 --pipeline-group-size 8 --data-group-size 1 "
    "--pp-mode pipe_sync_sample_mask_token_pipe --infer-data x.jsonl --cuda-id 3 --rank 3"
)


@pytest.fixture(scope="module")
def runner() -> Any:
    spec = importlib.util.spec_from_file_location("dist_inference_runner", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loops_flags_are_those_of_run(runner: Any) -> None:
    flags, unused = runner.translate(LOOP.split())
    assert flags == LOOP.split() and not unused
    found = accept_run_flags.make_context("run", flags).params
    assert found["max_steps"] == 99999999999999 and found["rank"] == 3
    assert found["dtype"] == "float16"


def test_booleans_take_a_value_and_stop_several(runner: Any) -> None:
    """`--use-cuda true` was an extra argument to click, and `--stop A B` a file called B."""
    words = "--use-cuda false --share-prefix True --echo-prompt false --stop A B --infer-data="
    flags, unused = runner.translate(
        [*words.split(), "--overwrite-request-args", "true"]
    )
    assert flags == [
        "--device",
        "cpu",
        "--prefix-cache",
        "--stop",
        "A",
        "--stop",
        "B",
        "--overwrite-request-args",
    ]
    assert not unused
    assert runner.translate(["--echo-prompt=true", "--use-cuda", "true"])[0] == [
        "--echo-prompt"
    ]
    assert runner.translate(["--output-path", "a.jsonl"])[0] == ["--output", "a.jsonl"]


def test_every_other_flag_is_taken_and_named(runner: Any) -> None:
    words = [word for flag in runner.UNUSED for word in (flag, "1")]
    assert runner.translate(words) == ([], list(runner.UNUSED))
    for flag in runner.SAME:
        assert runner.translate([flag, "1"]) == ([flag, "1"], [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modle-name", "x"], "Did you mean --model-name?"),
        (["x.jsonl"], "is no flag of the old runner"),
        (["--use-cuda", "yes"], "must be true or false"),
        (["--seed"], "--seed needs a value"),
    ],
)
def test_mistakes(words: list[str], says: str, runner: Any) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        runner.translate(words)


@pytest.mark.parametrize("model_type", ["glm", "yalm"])
def test_models_without_a_public_config_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(UsageError, match=rf"--model-type {model_type}: .* glm4 does"):
        EngineConfig(model_type=model_type)


def test_any_old_schedule_is_the_one_there_is() -> None:
    found = accept_run_flags.make_context("run", ["--pp-mode", "pipe_of_tomorrow"])
    assert found.params["pp_mode"] == "pipe_of_tomorrow"
    with pytest.raises(click.BadParameter, match="does not begin with pipe_"):
        accept_run_flags.make_context("run", ["--pp-mode", "gpipe"])


def test_it_answers(tmp_path: Path) -> None:
    source = tmp_path / "request_0.jsonl"
    source.write_text("".join(QUERIES.read_text().splitlines(keepends=True)[:2]))
    words = (
        "--world-size 1 --pipeline-group-size 1 --rank 0 --cuda-id 0 --use-cuda false"
    )
    words += " --dist-url tcp://127.0.0.1:9031 --debug-mem false --cuda-num 1 --seed 42"
    done = subprocess.run(
        [sys.executable, SCRIPT, *words.split(), "--infer-data", source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "Without a meaning here, left out: --debug-mem, --cuda-num, --cuda-id\n"
        in done.stderr
    )
    answers = (tmp_path / "output_request_0.jsonl").read_text().splitlines()
    assert len([json.loads(line)["result"] for line in answers]) == 2
