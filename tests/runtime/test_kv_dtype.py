"""A KV cache of its own type: what it changes in answers, memory, reports and resumed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.core.config import EngineConfig
from fminfer.models.checkpoint import open_model
from fminfer.plan.machine_facts import Machine, find_machine
from fminfer.plan.planning import make_plan, plan_ahead

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BODIES: list[Any] = ["off", pytest.param("require", marks=needs_compiler)]
ROOMS = ("den", "porch", "office", "bathroom", "kitchen")
SHARED = "".join(
    f"Question: How do you go from the {a} to the {b}?\nAnswer: north east\n"
    for a in ROOMS
    for b in ROOMS
    if a != b
)


def scores(**options: Any) -> list[float]:
    """Return the logprobs of prompts' tokens and of greedy ones, of rows with a common
    prefix."""
    requests = [
        {
            "prompt": f"{SHARED}Question: How do you go from the {room} to the den?\nAnswer:",
            "max_tokens": 6,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        for room in ROOMS
    ]
    engine = fminfer.Engine(
        **{"dtype": "float32", "device": "cpu", "chunk_size": 96, "budget": 4096}
        | options
    )
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    found = []
    for record in records:
        assert record.result is not None, record.error
        logprobs = record.result["choices"][0]["logprobs"]["token_logprobs"]
        found += [each for each in logprobs if each is not None]
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("kv_dtype", "mean", "largest"),
    [("bfloat16", 0.02, 0.06), ("float16", 0.002, 0.005)],
)
def test_logprobs_are_close_to_those_of_a_cache_of_float32(
    body: str, kv_dtype: str, mean: float, largest: float
) -> None:
    """Computing all in bfloat16 is off by 0.24 at most, and by 0.036 on average."""
    exact = torch.tensor(scores(kernels=body))
    for more in ({}, {"prefix_cache": False}):
        found = torch.tensor(scores(kernels=body, kv_dtype=kv_dtype, **more))
        error = (found - exact).abs()
        assert 0 < error.mean() < mean and error.max() < largest, (
            "near, and yet rounded"
        )


@pytest.mark.parametrize("body", BODIES)
def test_auto_is_the_type_of_hidden_states(body: str) -> None:
    assert scores(kernels=body) == scores(kernels=body, kv_dtype="float32")


@needs_compiler
def test_in_bfloat16_the_cache_may_be_wider() -> None:
    near = torch.tensor(scores(dtype="bfloat16"))
    for kv_dtype in ("float32", "float16"):
        found = torch.tensor(scores(dtype="bfloat16", kv_dtype=kv_dtype))
        assert (found - near).abs().mean() < 0.1


def test_it_takes_half_the_memory() -> None:
    tokens = []
    for kv_dtype in ("auto", "bfloat16"):
        config = EngineConfig(dtype="float32", kv_dtype=kv_dtype, device="cpu")  # type: ignore[arg-type]
        machine = find_machine(config, Machine(device_bytes=1 << 30))
        found = make_plan(config, open_model(config), machine)
        engine = fminfer.Engine(config)
        plan = engine.facts.plan
        assert plan.this_rank.takes.kv_token == found.this_rank.takes.kv_token
        assert engine.dtype == torch.float32
        is_as_weights = kv_dtype == "auto"
        assert plan.kv_dtype == (torch.float32 if is_as_weights else torch.bfloat16)
        tokens.append(plan.this_rank.takes.kv_token)
        engine.close()
    assert tokens[0] == 2 * tokens[1]


def test_the_fingerprint_names_it_only_if_it_is_another() -> None:
    def of(kv_dtype: Any) -> dict[str, str]:
        config = EngineConfig(dtype="float32", kv_dtype=kv_dtype, device="cpu")
        return plan_ahead(config, open_model(config)).fingerprint()

    assert of("auto") == of("float32")
    assert of("bfloat16") == of("auto") | {"--kv-dtype": "bfloat16"}


def test_the_command_shows_it_and_goes_on_only_with_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    stats = tmp_path / "stats.json"
    lines = [{"prompt": "Question: How", "max_tokens": 3, "seed": 1}] * 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [str(path), "--dtype", "float32", "--kernels", "off", "--device", "cpu"]
    narrow = [*flags, "--kv-dtype", "bfloat16"]

    checked = CliRunner().invoke(main, ["check", *narrow])
    assert "(float32, KV cache bfloat16 on cpu)" in checked.output
    assert "--calibrate --dtype float32 --kv-dtype bfloat16" in checked.output
    report = json.loads(CliRunner().invoke(main, ["check", *narrow, "--json"]).stdout)
    assert (report["dtype"], report["kv_dtype"]) == ("float32", "bfloat16")

    found = CliRunner().invoke(
        main, ["run", *narrow, "--limit", "1", "--stats", str(stats)]
    )
    assert found.exit_code == 0, found.output
    assert "fminfer-demo (float32, KV cache bfloat16" in found.output
    assert "with a KV cache in bfloat16 a seed repeats its draws only" in found.output
    assert json.loads(stats.read_text())["kv_dtype"] == "bfloat16"
    same = [*flags, "--output", str(tmp_path / "same.jsonl"), "--stats", str(stats)]
    found = CliRunner().invoke(main, ["run", *same])
    assert json.loads(stats.read_text())["kv_dtype"] == "float32", (
        "it was empty with auto"
    )
    assert "KV cache" not in found.output, "where it is the same"
    other = CliRunner().invoke(main, ["run", *flags])
    assert other.exit_code == 2 and "--kv-dtype" in other.output, other.output
    assert CliRunner().invoke(main, ["run", *narrow]).exit_code == 0


@pytest.mark.parametrize("flag", ["--dtype", "--kv-dtype"])
def test_short_names_and_capitals_are_understood(flag: str) -> None:
    for given, meant in (
        ("bf16", "bfloat16"),
        ("BFLOAT16", "bfloat16"),
        ("FP32", "float32"),
    ):
        found = main.commands["run"].make_context("run", [flag, given])
        assert found.params[flag.strip("-").replace("-", "_")] == meant


def test_another_name_is_refused() -> None:
    found = CliRunner().invoke(main, ["run", "--kv-dtype", "float8", "--prompt", "a"])
    assert (
        found.exit_code == 2
        and "'float8' is not one of 'auto', 'float32'" in found.output
    )
    with pytest.raises(
        fminfer.UsageError, match="kv_dtype is 'float8'; it must be one of auto"
    ):
        EngineConfig(kv_dtype="float8")  # type: ignore[arg-type]
