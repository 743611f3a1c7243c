"""A model cut into stages gives what the whole one gives, for every family and number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.decode_attention import PartialAttention
from fminfer.messages import Step, StepResult
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.weights import load_model
from fminfer.partition import Part, split_layers
from fminfer.pipeline.stage import Stage
from tests.conftest import FIELDS, make_model, save_byte_tokenizer
from tests.test_oracle import mixed_requests

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention": "eager",
    "chunk_size": 60,
    "block_size": 16,
    "budget": 1024,
}


class Chain:
    """The stages one after the other, in the place of one that has all layers."""

    def __init__(self, folder: Path, parts: list[Part]) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.networks = [
            load_model(checkpoint, dtype=torch.float32, device=CPU, seed=1, part=part)
            for part in parts
        ]
        self.stages = [
            Stage(
                network,
                checkpoint.family,
                dtype=torch.float32,
                device=CPU,
                num_blocks=-(-OPTIONS["budget"] // OPTIONS["block_size"]),
                block_size=OPTIONS["block_size"],
                partial=PartialAttention("eager", CPU),
            )
            for network in self.networks
        ]

    def run(self, step: Step) -> StepResult:
        hidden = None
        for stage in self.stages:
            hidden = stage.forward(step, hidden)
        assert hidden is not None
        sampled, scored = self.stages[-1].finish(step, hidden)
        return StepResult(step.step_id, sampled, scored, [])


def answers(folder: Path, chain: Chain | None) -> list[dict[str, Any]]:
    engine = fminfer.Engine(str(folder), **OPTIONS)
    if chain is not None:
        engine._pipeline._run = chain.run
    records = sorted(engine.run(mixed_requests()), key=lambda record: record.line.number)
    engine.close()
    return [record.to_dict()["result"] for record in records]


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for result, whole in zip(found, expected, strict=True):
        for choice, other in zip(result["choices"], whole["choices"], strict=True):
            assert choice["text"] == other["text"]
            ours, theirs = choice["logprobs"], other["logprobs"]
            assert ours["tokens"] == theirs["tokens"]
            if ours["token_logprobs"][0] is None:
                assert theirs["token_logprobs"].pop(0) is ours["token_logprobs"].pop(0)
            assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-5)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_stages_give_what_one_gives(name: str, tmp_path: Path) -> None:
    model = make_model(name, num_layers=6)
    model.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    expected = answers(tmp_path, None)
    whole = sum(p.numel() for p in model.parameters())
    for num_stages in (2, 3, 5):
        chain = Chain(tmp_path, split_layers(6, num_stages, head_cost=0.8))
        sizes = [sum(p.numel() for p in network.parameters()) for network in chain.networks]
        assert max(sizes) < whole, "a stage holds the whole model"
        check_same([*answers(tmp_path, chain)], [*map(_copy, expected)])


def _copy(result: dict[str, Any]) -> dict[str, Any]:
    import copy

    return copy.deepcopy(result)
