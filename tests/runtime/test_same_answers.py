"""In float32 the same lines get the same answers, however the work is cut up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.compute.kernels.kernel_build import find_compiler
from tests.conftest import VOCAB, run_files
from tests.forward.test_stages import OPTIONS, Chain, check_same, split_layers
from tests.job.test_resume import stop_after

KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "echo": True},
    {"temperature": 1.2},  # equal lines of it draw by their number in the file
    {"temperature": 0.8, "top_p": 0.9, "n": 3, "best_of": 4},
    {"temperature": 1.0, "top_k": 20, "seed": 11},
    {"max_tokens": 0, "echo": True},
    {
        "temperature": 1.5,
        "min_p": 0.02,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
    },
    {
        "temperature": 1.0,
        "min_tokens": 1,
        "stop": ["e", "7"],
        "logit_bias": {"101": 2.5, "55": 2.5},
    },
    {"temperature": 0, "presence_penalty": 1.0, "min_tokens": 3},
]
HOW: dict[str, dict[str, Any]] = {
    "chunks of 7": {"chunk_size": 7, "block_size": 5},
    "little room": {"budget": 160, "block_size": 16},
    "few rows": {"max_rows": 4, "micro_batches": 3},
    "no prefix cache": {"prefix_cache": False},
    "kernels": {"kernels": "require"},
}


def mixed_lines() -> list[dict[str, Any]]:
    chance = random.Random(3)
    stems = [[chance.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    lines: list[dict[str, Any]] = []
    for index in range(40):
        start = stems[index % 3][: chance.randrange(40)] if index % 2 else []
        ids = start + [chance.randrange(VOCAB) for _ in range(chance.randint(2, 40))]
        how = {"max_tokens": chance.randint(3, 10), "logprobs": 2, "ignore_eos": True}
        lines.append(how | {"prompt": ids} | KINDS[index % len(KINDS)])
    return lines + lines[1::8]


def answers(
    folder: Path, chain: Chain | None = None, **options: Any
) -> list[dict[str, Any]]:
    engine = fminfer.Engine(str(folder), **OPTIONS | options)
    if chain is not None:
        engine.pipeline.stages._run = chain.run
    records = sorted(engine.run(mixed_lines()), key=lambda record: record.line.number)
    engine.close()
    return [record.to_dict()["result"] for record in records]


@pytest.fixture(scope="module")
def expected(llama_checkpoint: tuple[Path, Any]) -> str:
    found = answers(llama_checkpoint[0])
    assert (
        len({choice["text"] for result in found for choice in result["choices"]}) > 40
    )
    return json.dumps(found)


@pytest.mark.parametrize("name", HOW)
def test_however_the_work_is_cut_up(
    name: str, llama_checkpoint: tuple[Path, Any], expected: str
) -> None:
    """Sampled, scored and greedy lines, with penalties, stops, candidates and equal ones."""
    if name == "kernels" and find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    check_same(answers(llama_checkpoint[0], **HOW[name]), json.loads(expected))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_with_several_stages(
    num_stages: int, llama_checkpoint: tuple[Path, Any], expected: str
) -> None:
    folder, model = llama_checkpoint
    num_layers = model.config.num_hidden_layers
    if num_stages > num_layers:
        pytest.skip(f"the model has {num_layers} layers")
    chain = Chain(folder, split_layers(num_layers, num_stages, head_cost=0.8))
    check_same(answers(folder, chain), json.loads(expected))


def test_after_a_run_that_was_broken_off(
    llama_checkpoint: tuple[Path, Any], expected: str, tmp_path: Path
) -> None:
    """Rows are kept that were answered beside others; the rest draws as if it had been there."""
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in mixed_lines()))
    engine = fminfer.Engine(str(llama_checkpoint[0]), **OPTIONS)
    for count in (7, 20):
        stop_after(engine, count, [source], [output])
    summary = run_files(engine, [source], [output])
    engine.close()
    assert summary.num_kept_rows == 27
    found = [json.loads(line)["result"] for line in output.open()]
    check_same(found, json.loads(expected))
