"""What a plan decides: on a GPU, blocks become floats as they are read, where floats fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from fminfer.compute.formats.dense import Dense
from fminfer.compute.values.weights import Format
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part
from fminfer.models.checkpoint import open_checkpoint, open_model
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.models.tensor_specs import Weights
from fminfer.plan import machine_facts, planning
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import make_plan, share_among
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.load import builder
from tests.conftest import make_model, save_byte_tokenizer
from tests.gguf_building import SAMPLES

GIB = 1 << 30
CPU = torch.device("cpu")
BFLOAT16 = Dense(torch.bfloat16)
FLOAT32 = Dense(torch.float32)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kernels": "off",
    "device": "cpu",
    "budget": 1024,
}
LINES = [
    {
        "prompt": [3 + (7 * n + i) % 17 for i in range(9 + n)],
        "max_tokens": 5,
        "logprobs": 1,
    }
    for n in range(4)
]


def plan_of(gib: float, size: str = "llama-8b", **options: Any) -> RunPlan:
    """Plan for a GPU of so much memory."""
    config = EngineConfig(random_init=size, dtype="bfloat16", **options)
    machine = Machine(
        device_bytes=int(gib * GIB),
        num_stages=config.num_stages,
        num_shards=config.tensor_parallel_size,
        local_size=config.num_stages * config.tensor_parallel_size,
    )
    return make_plan(config, open_model(config, has_weights=False), machine)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_blocks_become_floats_where_these_fit_a_gpu(quantize: Any) -> None:
    """Each use made floats of them: 19 to 42 bytes were moved for each number."""
    large, small = (plan_of(gib, quantize=quantize) for gib in (40, 16))
    assert large.held_in == f"bfloat16 of {quantize}" and not large.has_blocks
    assert large.formats["product"] == BFLOAT16
    assert large.formats["head"] == FLOAT32, "logits are products in float32"
    assert large.formats["embedding"].name == "int8", "its rows are looked up alone"
    assert small.held_in == quantize and small.has_blocks
    plain = plan_of(40)
    head = 2 * 128256 * 4096  # the second half of float32
    assert large.this_rank.takes.weights == pytest.approx(
        plain.this_rank.takes.weights + head, rel=0.04
    )
    assert small.this_rank.takes.weights < 0.6 * plain.this_rank.takes.weights


def test_floats_leave_room_for_the_cache_that_a_run_needs() -> None:
    """A row that fits beside blocks must not be refused for floats."""
    takes = plan_of(40, quantize="int8").this_rank.takes
    longest = max(planning.LEAST_KV_TOKENS, 8192)
    just, less = (takes.total(longest) / GIB + more for more in (0.01, -0.01))
    assert not plan_of(just, quantize="int8").has_blocks
    assert plan_of(less, quantize="int8").has_blocks
    assert not plan_of(less, quantize="int8", budget=8192).has_blocks, "a smaller cache"
    assert plan_of(just, quantize="int8", budget=65536).has_blocks, "a larger one"
    assert plan_of(just, quantize="int8").num_kv_tokens >= longest


def test_layers_are_streamed_as_blocks_and_never_for_floats() -> None:
    explicit = plan_of(40, quantize="int8", offload="cpu")
    assert explicit.this_rank.streamed is not None and explicit.held_in == "int8"
    chosen = plan_of(16, quantize="int8", offload="auto")
    assert chosen.this_rank.streamed is None and chosen.held_in == "int8", "blocks fit"


def test_a_tied_embedding_is_held_as_the_head_needs_it() -> None:
    plan = plan_of(40, "bloom-560m", quantize="int8")
    assert plan.held["embed.weight"] == plan.held["head.weight"] == FLOAT32


def test_a_gpu_of_several_ranks_has_room_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them alone would have found room for its floats."""
    config = EngineConfig(
        random_init="llama-160m", dtype="bfloat16", quantize="int8", device="cuda"
    )
    checkpoint = open_model(config, has_weights=False)
    alone = Machine(num_gpus=2, free=4 * GIB)
    needed = make_plan(config, checkpoint, alone).this_rank.takes.total(
        planning.LEAST_KV_TOKENS
    )
    engines = {"num_engines": 2, "free": int(1.5 * needed)}
    found = [
        make_plan(
            config, checkpoint, replace(alone, num_gpus=num, **engines)
        ).has_blocks
        for num in (1, 2)
    ]
    assert found == [True, False]


def test_ranks_cut_floats_where_they_cut_blocks() -> None:
    """One rank may have room for floats, and another not: their shards must fit each other."""
    large, small = (
        plan_of(gib, quantize="int4", tensor_parallel_size=2) for gib in (40, 4)
    )
    assert [large.has_blocks, small.has_blocks] == [False, True]
    assert [rank.share for rank in large.ranks] == [rank.share for rank in small.ranks]


def test_on_a_cpu_nothing_changes() -> None:
    config = EngineConfig(random_init="llama-160m", quantize="int8", device="cpu")
    plan = make_plan(config, open_model(config), Machine(free=64 * GIB))
    assert plan.held_in == "int8" and not plan.has_blocks


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a device that has no kernels for blocks, and much memory; the CPU computes."""

    def makes_floats(device: torch.device, held: Mapping[str, Format]) -> bool:
        return any(not isinstance(each, Dense) for each in held.values())

    monkeypatch.setattr(planning, "_makes_floats", makes_floats)
    monkeypatch.setattr(machine_facts, "measure_free_bytes", lambda _: 64 * GIB)


def answers(model: Path, **options: Any) -> tuple[list[Any], Any]:
    engine = fminfer.Engine(str(model), **OPTIONS | options)
    records = sorted(engine.run(LINES), key=lambda record: record.line.number)
    engine.close()
    return [
        record.to_dict()["result"]["choices"][0] for record in records
    ], engine.facts


def check_same(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["text"] == theirs["text"]
        values = [
            [*map(float, each["logprobs"]["token_logprobs"])] for each in (ours, theirs)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


# Joined, experts in one parameter with biases, transposed and tied, latent.
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "gpt2", "deepseek_v3"])
def test_floats_answer_as_blocks_that_become_floats_at_each_use(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make_model(name).bfloat16().save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    expected, facts = answers(tmp_path, quantize="int4")
    assert facts.weight_dtype.startswith("int")
    request.getfixturevalue("pretended_gpu")
    found, floats = answers(tmp_path, quantize="int4")
    assert floats.weight_dtype.startswith("float32 of int")
    assert floats.measured.weight_bytes > 2 * facts.measured.weight_bytes
    check_same(found, expected)


# Several formats in one weight, and one in all.
@pytest.mark.parametrize(
    "name", ["kforms-q4_k_m", "fallback-q4_k_m", "legacy-q5_1", "kforms-q8_0"]
)
def test_a_gguf_file_answers_the_same(
    name: str, request: pytest.FixtureRequest
) -> None:
    expected, facts = answers(SAMPLES / f"{name}.gguf")
    assert "Q" in facts.weight_dtype
    request.getfixturevalue("pretended_gpu")
    found, facts = answers(SAMPLES / f"{name}.gguf")
    assert facts.weight_dtype.startswith("float32 of Q")
    check_same(found, expected)


def every_weight(source: LayerSource) -> Weights:
    layers = {
        f"{n}.{name}": w
        for n in source.numbers
        for name, w in source.load_layer(n).items()
    }
    entry = source.load_entry()
    return layers | entry | source.load_exit(entry)


@pytest.mark.parametrize("shard", [0, 1])
def test_each_shard_holds_the_floats_of_its_blocks(shard: int, tmp_path: Path) -> None:
    make_model("llama").bfloat16().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    part = Part(0, 1, 0, len(checkpoint.model.layers), shard=shard, num_shards=2)
    config = EngineConfig(str(tmp_path), quantize="int4", dtype="float32", device="cpu")
    plan = make_plan(config, checkpoint, Machine())
    share = share_among(checkpoint.model, 2, plan.made)[shard]
    blocks = Holding(torch.float32, quantized="int4")
    floats = replace(blocks, floats=("product", "head"))
    both = [
        every_weight(
            open_weights(checkpoint, part, holding=h, device=CPU, seed=1, share=share)
        )
        for h in (blocks, floats)
    ]
    assert both[0].keys() == both[1].keys()
    for name, weight in both[0].items():
        held = both[1][name]
        assert held.is_plain == (name != "embed.weight")
        assert torch.equal(
            held.dequantize(torch.float32), weight.dequantize(torch.float32)
        ), name


@pytest.mark.parametrize("has_blocks", [False, True])
def test_what_becomes_floats_at_each_use_is_not_captured(
    has_blocks: bool,
    llama_checkpoint: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph would have had a node for each kernel that makes floats of a piece."""
    captured = []

    def make_graphs(cache: Any) -> None:
        captured.append(cache)

    monkeypatch.setattr(builder, "choose_graphs", lambda *_: make_graphs)
    monkeypatch.setattr(planning, "_makes_floats", lambda *_: has_blocks)
    monkeypatch.setattr(planning, "_has_room", lambda _: False)
    answers(llama_checkpoint[0])
    assert bool(captured) == (not has_blocks)
