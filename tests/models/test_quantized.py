"""Quantized models beside transformers in float32 with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fminfer
from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.own_rows import OWN_FORMATS, find_unpacking
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers.products import PackedPart, ProductKernel
from fminfer.compute.values.weights import Weight
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.partition import split_layers
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.registry import Registry
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from fminfer.models.origins import read_origins
from fminfer.plan.planning import plan_ahead
from tests import conftest
from tests.conftest import (
    FIELDS,
    STORED,
    built_library,
    in_turns,
    make_model,
    model_class,
    more,
    save_byte_tokenizer,
)
from tests.forward.test_transformer import MAX_ERROR, error_of, logits_of, one_stage
from tests.random_blocks import PUBLISHED_FORMATS

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)
# Sizes that make rows, so that all are whole blocks; four heads of 16 are as many.
ROW_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
)


def widened(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config's fields with rows of whole blocks."""
    sizes = {name: fields[name] for name in ROW_SIZES if fields.get(name)}
    wider = {name: -(-size // 32) * 32 for name, size in sizes.items()}
    return fields | wider | ({"v_head_dim": 16} if "v_head_dim" in fields else {})


def save_both(
    name: str, quantized: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Any, Any]:
    """Save a checkpoint; return it, transformers' model, and the same of dequantized weights."""
    monkeypatch.setitem(conftest.FIELDS, name, widened(FIELDS[name]))
    mine = folder / "floats"
    theirs = folder / "dequantized"
    model = make_model(name)
    for each in (mine, theirs):
        model.save_pretrained(each)
    save_byte_tokenizer(mine)
    round_weights(theirs, quantized)
    rounded = (
        model_class(model.config).from_pretrained(theirs, dtype=torch.float32).eval()
    )
    rounded.config._attn_implementation = model.config._attn_implementation
    return mine, model, rounded


def round_weights(folder: Path, quantized: str) -> None:
    """Make each stored matrix what its blocks stand for; a row of ours is a row of a
    stored one."""
    checkpoint = open_checkpoint(str(folder))
    path = folder / "model.safetensors"
    files, origins = read_origins(checkpoint, folder)
    tensors = load_file(path)
    holding = Holding(torch.float32, quantized=quantized)
    for origin in origins.values():
        held = holding.choose_format(origin.spec, origin.stored_formats(files.types))
        for name in [n for piece in origin.pieces for n in piece.stored]:
            if isinstance(held, Blocks):
                is_turned = origin.layout.is_transposed
                weight = tensors[name].mT.contiguous() if is_turned else tensors[name]
                rounded = held.dequantize((held.quantize(weight),), torch.float32)
                tensors[name] = (rounded.mT if is_turned else rounded).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def kernel_bodies() -> PartBuilder:
    return PartBuilder(Registry("require", built_library(), torch.float32, CPU), 256)


def share_of_blocks(folder: Path, holding: Holding) -> float:
    """Return how many of the numbers that can be quantized are."""
    source = open_weights(
        open_checkpoint(str(folder)),
        one_stage()[0],
        holding=holding,
        device=CPU,
        seed=0,
    )
    entry = source.load_entry()
    groups = [entry, *source.load_layers(), source.load_exit(entry)]
    weights = {id(each): each for group in groups for each in group.values()}.values()
    assert sum(weight.num_bytes for weight in weights) == source.num_bytes
    sizes: dict[bool, int] = {False: 0, True: 0}
    for weight in weights:
        if weight.spec.is_widened:
            sizes[not weight.is_plain] += weight.spec.size
        else:
            assert weight.format == Dense(torch.float32)
    return sizes[True] / sum(sizes.values())


@pytest.mark.parametrize(("name", "quantized"), in_turns(("int8", "int4"), STORED))
def test_logits_are_those_of_the_dequantized_weights(
    name: str, quantized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one stage in plain torch, and by two with whatever kernels there are."""
    folder, model, rounded = save_both(name, quantized, tmp_path, monkeypatch)
    holding = Holding(torch.float32, quantized=quantized)
    assert share_of_blocks(folder, holding) == 1.0
    found = logits_of(folder, one_stage(), holding=holding)
    assert error_of(found, rounded) < MAX_ERROR
    assert error_of(found, model) > 100 * MAX_ERROR, "nothing was quantized"
    if find_compiler() is not None:
        parts = split_layers(3, 2, head_cost=0.0)
        in_two = logits_of(folder, parts, holding=holding, bodies=kernel_bodies)
        assert error_of(in_two, rounded) < 2 * MAX_ERROR, "relu² makes more of it"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("mixtral", "bfloat16"),
        ("gpt2", "float32"),
        *(pytest.param(name, "bfloat16", marks=more) for name in ("llama", "gpt2")),
        pytest.param("mixtral", "float32", marks=more),
    ],
)
def test_a_run_answers_with_them(
    name: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, which every product of a layer and the head are given to."""
    folder, _, rounded = save_both(name, "int4", tmp_path, monkeypatch)
    prompts = [[3 + (7 * i + n) % 200 for i in range(9 + n)] for n in range(3)]
    packed = []
    pack_part = ProductKernel.pack_part

    def spy(self: ProductKernel, weight: Weight, *rest: Any) -> PackedPart:
        packed.append(weight.format.name)
        return pack_part(self, weight, *rest)

    monkeypatch.setattr(ProductKernel, "pack_part", spy)
    engine = fminfer.Engine(
        str(folder), dtype=dtype, quantize="int4", kernels="require", budget=1024
    )
    routers = {"mixtral": {dtype}}.get(name, set())  # stay as they are
    assert {*packed} == {"int4", "int8-32"} | routers
    assert packed.count("int4") == 3 * 4
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    records = sorted(
        engine.run([{"prompt": ids} | asked for ids in prompts]),
        key=lambda record: record.line.number,
    )
    engine.close()
    for ids, record in zip(prompts, records, strict=True):
        (choice,) = record.to_dict()["result"]["choices"]
        found = torch.tensor(choice["logprobs"]["token_logprobs"][1:])
        with torch.no_grad():
            logprobs = rounded(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        limit = 1e-4 if dtype == "float32" else 0.1
        torch.testing.assert_close(found, expected, atol=limit, rtol=0)


@needs_compiler
@pytest.mark.parametrize(
    "quantized", ["int8", "int4", "int4-symmetric-128", "int8-row"]
)
def test_a_forecast_is_of_what_is_held(
    quantized: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *_ = save_both("llama", quantized, tmp_path, monkeypatch)
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        quantize=quantized,
        budget=1024,
    )
    plan = plan_ahead(config, open_checkpoint(str(folder)))
    assert plan.holding == Holding(
        torch.float32, keeps_bfloat16=True, quantized=quantized
    )
    assert isinstance(plan.formats["product"], Blocks)
    assert all(
        isinstance(plan.held[name], Blocks) for name in ("1.qkv.weight", "head.weight")
    )
    assert plan.held["1.before_mlp.weight"] == Dense(torch.float32)
    source = open_weights(
        open_checkpoint(str(folder)),
        one_stage()[0],
        holding=plan.holding,
        device=CPU,
        seed=0,
    )
    assert (
        plan.this_rank.takes.weights
        >= source.num_bytes
        >= plan.this_rank.takes.held_weights
    )
    floats = plan_ahead(
        EngineConfig(model=str(folder), dtype="float32", device="cpu", budget=1024),
        open_checkpoint(str(folder)),
    )
    most = 0.45 if quantized.startswith("int8") else 0.35  # the head keeps 8 bits
    assert source.num_bytes < most * floats.this_rank.takes.weights


def test_bits_as_a_dtype_are_those_of_quantize() -> None:
    bits: Any
    for bits in ("int8", "int4"):
        assert EngineConfig(dtype=bits).quantized_to == bits
        assert EngineConfig(dtype=bits, quantize=bits).quantized_to == bits
        with pytest.raises(
            UsageError, match=f"--dtype {bits} and --quantize int8-row contradict"
        ):
            EngineConfig(dtype=bits, quantize="int8-row")
    assert EngineConfig(dtype="float32", quantize="int8-row").quantized_to == "int8-row"
    assert EngineConfig().quantized_to == ""


def test_random_weights_are_quantized_too(tmp_path: Path) -> None:
    """Of a model that is stored nowhere: the floats that are drawn, rounded."""
    conftest.family_config("llama").save_pretrained(tmp_path)
    checkpoint = open_random_checkpoint(str(tmp_path))
    part = one_stage()[0]
    floats, blocks = (
        open_weights(checkpoint, part, holding=holding, device=CPU, seed=3).load_layer(
            1
        )
        for holding in (
            Holding(torch.float32),
            Holding(torch.float32, quantized="int4"),
        )
    )
    for name, weight in blocks.items():
        own = floats[name].plain
        if isinstance(weight.format, Blocks):
            own = weight.format.dequantize(
                (weight.format.quantize(own),), torch.float32
            )
        assert torch.equal(weight.dequantize(torch.float32), own)
    assert sum(isinstance(weight.format, Blocks) for weight in blocks.values()) == 4


class Counting(TorchDispatchMode):
    """Counts what is launched, and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.endswith("_unsafe_view"):
            self.num_kernels += 1
            tensors = [
                each
                for each in tree_leaves((args, out))
                if isinstance(each, torch.Tensor)
            ]
            self.num_bytes += sum(each.numel() * each.itemsize for each in tensors)
        return out


@pytest.mark.parametrize(
    "form",
    [each for each in (*GGUF_FORMATS, *OWN_FORMATS, *PUBLISHED_FORMATS) if each.kind],
    ids=lambda form: form.name,
)
def test_what_making_floats_takes(form: Blocks) -> None:
    """Plans count with these figures: a GPU has no kernels for blocks, and does it at
    each use."""
    kernels, moved_bytes = find_unpacking(form.name)
    weights = form.empty((256, 4096), CPU)
    with Counting() as counts:
        form.dequantize(weights, torch.bfloat16)
    assert counts.num_kernels == kernels
    assert counts.num_bytes / (256 * 4096) == pytest.approx(moved_bytes, rel=0.02)
