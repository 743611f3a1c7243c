"""A run says where it is slower than it could be: by its plan, for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.plan import planning, slowness
from fminfer.plan.slowness import find_slowness
from tests.plan.test_planning import plan_of

EXPERTS = "a GPU computes experts one after another"
BLOCKS = "weights in int8 become floats at each use, for floats do not fit a GPU"
NO_GRAPHS = "there are no CUDA graphs of decode steps with "
TP = f"{NO_GRAPHS}--tensor-parallel-size (copies and stages have them"


@pytest.mark.parametrize(
    ("size", "gib", "options", "reasons"),
    [
        ("llama-8b", 79, {}, []),
        ("llama-8b", 79, {"data_group_size": 2, "pipeline_group_size": 2}, []),
        ("llama-8b", 79, {"quantize": "int8"}, []),
        ("llama-8b", 16, {"quantize": "int8"}, [BLOCKS]),
        ("llama-8b", 79, {"tensor_parallel_size": 2}, [TP]),
        ("llama-8b", 79, {"offload": "cpu"}, [f"{NO_GRAPHS}streamed layers"]),
        ("deepseek-v3", 2000, {}, [EXPERTS, f"{NO_GRAPHS}mixtures of experts"]),
        ("t5-small", 79, {}, [f"{NO_GRAPHS}attention to an encoder"]),
        ("llama-8b", 79, {"tensor_parallel_size": 2, "kernels": "off"}, []),
    ],
)
def test_reasons(
    size: str, gib: float, options: dict[str, Any], reasons: list[str]
) -> None:
    found = find_slowness(plan_of(gib, size, **options))
    assert len(found) == len(reasons), found
    for reason, start in zip(found, reasons, strict=True):
        assert reason.startswith(start)


def test_a_run_and_its_summary_say_them(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures, blocks and --tp on a GPU took many times what they could, and nothing
    said it."""
    monkeypatch.setattr(planning, "_makes_floats", lambda *_: True)
    monkeypatch.setattr(planning, "_has_room", lambda _: False)
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    engine.close()
    assert (
        engine.facts.measured.why_slower == f"weights in float32 {slowness.NO_FLOATS}"
    )
    assert not engine.facts.measured.why_plain, "--quiet asks for faults only"


def test_check_says_them_once(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"prompt": [1, 2], "max_tokens": 3}))
    flags = ["--random-init", "llama-8b", "--device-kind", "h200", "--tp", "2"]

    def check(*more: str) -> str:
        return CliRunner().invoke(main, ["check", str(lines), *flags, *more]).stdout

    for more in ((), ("--plan", "--num-devices", "2")):
        text = check(*more)
        assert text.count(f"slower    {NO_GRAPHS}") == 1, text
    report = json.loads(check("--json"))
    assert len(report["why_slower"]) == 1
