"""What of the options a fingerprint has: as it was, so that journals of earlier
versions go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.config import EngineConfig
from fminfer.core.option import option
from fminfer.models.checkpoint import open_model
from fminfer.plan.planning import plan_ahead
from fminfer.plan.run_plan import RunPlan

# Recorded before options were rows of a table.
DEFAULTS = {
    "--check-model": "on without --model-name",
    "--generation-config": "openai",
    "--max-layers": "None",
    "--max-logprobs": "100",
    "--model-name": "fminfer-demo",
    "--on-too-long": "error",
    "--seed": "1",
    "--skip-tokenizer-init": "False",
    "--strict": "False",
    "--token-format": "auto",
    "--tool-call-parser": "auto",
}
RECORDED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"seed": 9, "strict": True}, {"--seed": "9", "--strict": "True"}),
    ({"check_model": True}, {}),
    (
        {"model": "demo", "check_model": True, "max_logprobs": 5},
        {"--check-model": "True", "--max-logprobs": "5"},
    ),
    (
        {"on_too_long": "truncate-left", "max_model_len": 64},
        {"--on-too-long": "truncate-left", "--max-model-len": "64"},
    ),
    (
        {"request_args": {"n": 2, "a": 1}},
        {"--overwrite-request-args": '{"a": 1, "n": 2}'},
    ),
    ({"request_args": {}}, {}),
    (
        {"tool_call_parser": "hermes", "budget": 640, "max_rows": 3, "kernels": "off"},
        {"--tool-call-parser": "hermes"},
    ),
    (
        {"model": "demo", "generation_config": "model"},
        {"--check-model": "False", "--generation-config": "model"},
    ),
    (
        {
            "dtype": "float32",
            "kv_dtype": "bfloat16",
            "max_layers": 1,
            "token_format": "text",
        },
        {"--kv-dtype": "bfloat16", "--max-layers": "1", "--token-format": "text"},
    ),
    ({"skip_tokenizer_init": True}, {"--skip-tokenizer-init": "True"}),
    (
        {"random_init": "llama-160m", "seed": -3},
        {"--check-model": "False", "--model-name": "random llama-160m", "--seed": "-3"},
    ),
    ({"threads": 1, "block_size": 16, "world_size": 2}, {}),
]


def plan_of(config: EngineConfig) -> RunPlan:
    return plan_ahead(config, open_model(config))


def entries(config: EngineConfig) -> dict[str, str]:
    """Return what a fingerprint says of options."""
    found = plan_of(config).fingerprint()
    return {name: value for name, value in found.items() if name.startswith("--")}


@pytest.mark.parametrize(("options", "differs"), RECORDED)
def test_the_entries_are_those_recorded(
    options: dict[str, Any], differs: dict[str, str]
) -> None:
    assert entries(EngineConfig(**options)) == DEFAULTS | differs


def test_of_a_template_its_content_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("{{ messages[0].content }}")
    found = entries(EngineConfig(chat_template=str(path)))
    assert found == DEFAULTS | {"--chat-template": "aff911727d1943ea"}


def test_ranks_compare_what_they_did() -> None:
    shared = plan_of(EngineConfig(budget=640, max_rows=3, seed=7, block_size=16)).shared
    names = ("--budget", "--max-rows", "--seed", "the block size")
    assert {name: shared.pop(name) for name in names} == dict(
        zip(names, (640, 3, 7, 16), strict=True)
    )
    assert [*shared] == [
        "fminfer's version",
        "the model's config",
        "the dtype",
        "--quantize",
        "the KV cache's dtype",
        "the layers of each rank",
        "--same-answers",
        "--offload",
        "--tensor-parallel-size",
    ]


@dataclass(frozen=True)
class Wider(EngineConfig):
    """An engine with an option more."""

    depth: int = option("How deep.", default=2, commands=("run",), alters="answers")
    pace: int = option("How fast.", default=2, commands=("run",), must_agree=True)


def test_an_option_that_is_added_leaves_old_journals_as_they_are() -> None:
    """So long as it has its default; otherwise rows of both would be mixed."""
    assert entries(Wider()) == DEFAULTS
    assert entries(Wider(depth=3, pace=3)) == DEFAULTS | {"--depth": "3"}
    assert plan_of(Wider(pace=3)).shared["--pace"] == 3
