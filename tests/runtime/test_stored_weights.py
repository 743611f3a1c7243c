"""Weights stay bfloat16, as they are stored, while the CPU computes in float32.

The numbers are those of the same weights in float32, and memory holds half.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.compute.formats.dense import Dense, make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.layers import products
from fminfer.compute.layers.products import PackedProduct, make_library_candidates
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part, split_layers
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.registry import Registry
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.tensor_specs import Weights, layer_specs
from fminfer.plan import expected_bytes
from fminfer.plan.planning import plan_ahead
from tests.conftest import (
    built_library,
    make_model,
    plain_registry,
    save_byte_tokenizer,
)
from tests.forked import run_forked
from tests.forward.test_transformer import logits_of, one_stage

CPU = torch.device("cpu")
NAMES = ["llama", "llama-biases", "bloom", "opt-350m", "gpt2", "gpt2-untied", "mixtral"]
NAMES += ["qwen3_moe", "gemma2"]
needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


@pytest.fixture(scope="module", params=NAMES)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Give a checkpoint of bfloat16, and one of the same values in float32."""
    return save_both(request.param, tmp_path_factory.mktemp("stored"))


def save_both(name: str, folder: Path) -> list[Path]:
    model = make_model(name).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        found.append(folder / str(dtype))
        model.to(dtype).save_pretrained(found[-1])
        save_byte_tokenizer(found[-1])
    return found


def load(folder: Path, part: Part | None = None, *, keeps: bool = True) -> LayerSource:
    return open_weights(
        open_checkpoint(str(folder)),
        part or one_stage()[0],
        holding=Holding(torch.float32, keeps_bfloat16=keeps),
        device=CPU,
        seed=0,
    )


def groups_of(source: LayerSource) -> list[Weights]:
    entry = source.load_entry()
    return [entry, *source.load_layers(), source.load_exit(entry)]


@needs_compiler
@pytest.mark.parametrize("num_stages", [1, 2])
def test_logits_are_those_of_float32(folders: list[Path], num_stages: int) -> None:
    """Bit for bit: only where a weight is widened is another."""

    parts = split_layers(3, num_stages, head_cost=0.0)
    holding = Holding(torch.float32, keeps_bfloat16=True)
    kept, widened = (
        logits_of(folder, parts, holding=holding, bodies=packing_bodies)
        for folder in folders
    )
    for ours, expected in zip(kept, widened, strict=True):
        assert torch.equal(ours, expected)


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_packed_head_is_kept_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was multiplied as it is stored, at half of the speed of a packed weight.

    Its part of the file is left to others, and an embedding that is the same is found in it.
    """
    folder, _ = save_both(name, tmp_path)
    dropped: list[str] = []
    monkeypatch.setattr(
        TensorFiles, "free_pages", lambda files, name: dropped.append(name)
    )
    checkpoint = open_checkpoint(str(folder))
    source = load(folder)
    entry = source.load_entry()
    outside = source.load_exit(entry)
    is_tied = outside["head.weight"] is entry["embed.weight"]
    assert is_tied == (name == "gemma2")
    embed = entry["embed.weight"].plain
    head = outside["head.weight"].plain
    network = Transformer(checkpoint.model, source, builder=packing_bodies())
    assert network.head is not None and network.head.packed is not None
    assert network.head.packed.parts[0].format == Dense(torch.bfloat16)
    looked_up_in = getattr(network._look_up, "__self__", None)
    assert (looked_up_in is network.head.packed) == is_tied, "kept once"
    assert ("model.embed_tokens.weight" if is_tied else "lm_head.weight") in dropped
    ids = torch.tensor([7, 299, 7, 0])
    x = torch.randn(3, head.shape[1])
    scale = torch.tensor(checkpoint.model.embed_scale)
    assert torch.equal(network.embed(ids, torch.arange(4)), embed[ids].float() * scale)
    torch.testing.assert_close(
        network.head(x), x @ head.float().t(), atol=1e-4, rtol=1e-4
    )


def packing_bodies() -> PartBuilder:
    return PartBuilder(
        Registry("auto", built_library(), torch.float32, torch.device("cpu")), 256
    )


@needs_compiler
def test_answers_are_those_of_float32(folders: list[Path]) -> None:
    """With all that a run uses, bit for bit."""
    rows: list[dict[str, Any]] = [
        {"prompt": [3 + (7 * i + n) % 200 for i in range(9 + n)], "max_tokens": 6}
        | {"temperature": 0, "logprobs": 2, "echo": True}
        for n in range(3)
    ]
    found = []
    for folder in folders:
        engine = fminfer.Engine(str(folder), dtype="float32", budget=1024)
        records = sorted(engine.run(rows), key=lambda record: record.line.number)
        assert (
            not any(record.error for record in records)
            and not engine.facts.measured.why_plain
        )
        engine.close()
        choices = [record.to_dict()["result"]["choices"][0] for record in records]
        found.append([choice["logprobs"] for choice in choices])
    for ours, expected in zip(*found, strict=True):
        assert ours["tokens"] == expected["tokens"]
        assert ours["token_logprobs"] == expected["token_logprobs"]


def test_what_is_multiplied_or_looked_up_stays_as_it_is_stored(
    folders: list[Path],
) -> None:
    stored = load(folders[0])
    cast = load(folders[0], keeps=False)
    stays = {"embed", "head", "qkv", "out", "up", "down", "experts.up", "experts.down"}
    for mine, other in zip(groups_of(stored), groups_of(cast), strict=True):
        for name, weight in mine.items():
            module, _, leaf = name.rpartition(".")
            is_kept = leaf == "weight" and module in stays
            assert weight.plain.dtype == (
                torch.bfloat16 if is_kept else torch.float32
            ), name
            assert torch.equal(weight.dequantize(torch.float32), other[name].plain)
    assert 0.5 <= stored.num_bytes / cast.num_bytes < 0.6
    assert load(folders[1]).num_bytes == cast.num_bytes, "stored in float32"


def test_progress_counts_what_is_held(tmp_path: Path) -> None:
    folder, _ = save_both("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    found = open_weights(
        open_checkpoint(str(folder)),
        one_stage()[0],
        holding=Holding(torch.float32, keeps_bfloat16=True),
        device=CPU,
        seed=0,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    weights = {
        id(weight): weight for group in groups_of(found) for weight in group.values()
    }
    assert found.num_bytes == sum(weight.num_bytes for weight in weights.values())
    assert seen[-1] == (found.num_bytes, found.num_bytes)


def test_a_head_that_is_stored_twice_is_kept_once(tmp_path: Path) -> None:
    folder, _ = save_both("llama-biases", tmp_path)
    found = load(folder)
    entry = found.load_entry()
    assert found.load_exit(entry)["head.weight"] is entry["embed.weight"]


@needs_compiler
def test_the_forecast_is_of_what_is_held(tmp_path: Path) -> None:
    folder, _ = save_both("llama", tmp_path)
    checkpoint = open_checkpoint(str(folder))
    held = {}
    for kernels in ("auto", "off"):
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            kernels=kernels,
            budget=1024,
        )
        plan = plan_ahead(config, checkpoint)
        found = plan.this_rank.takes
        of_weights = torch.bfloat16 if kernels == "auto" else torch.float32
        assert (plan.dtype, plan.formats["product"]) == (
            torch.float32,
            Dense(of_weights),
        )
        engine = fminfer.Engine(config)
        held[kernels] = engine.facts.measured.weight_bytes
        assert engine.facts.weight_dtype == str(of_weights).removeprefix("torch.")
        engine.close()
        assert found.weights >= held[kernels] >= found.held_weights
    assert 0.5 <= held["auto"] / held["off"] < 0.55


@needs_compiler
def test_the_forecast_counts_packed_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of what is packed leave memory; they counted beside it, as they stayed there."""
    none = dict.fromkeys(expected_bytes.HOLE_BYTES, 0)
    monkeypatch.setattr(expected_bytes, "HOLE_BYTES", none)
    folder, _ = save_both("llama", tmp_path)
    tensors = load(folder)
    layers = list(tensors.load_layers())
    model = open_checkpoint(str(folder)).model
    specs = layer_specs(model.layers[0], model.hidden_size)
    packed = sum(
        w.num_bytes
        for each in layers
        for n, w in each.items()
        if specs[n].use == "product"
    )
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", budget=1024)
    checkpoint = open_checkpoint(str(folder))
    found = plan_ahead(config, checkpoint).this_rank.takes
    assert packed > 0 and found.weights == tensors.num_bytes
    assert packed <= found.held_weights < found.weights


@needs_compiler
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_run_says_how_weights_are_held(kernels: str, tmp_path: Path) -> None:
    folder, _ = save_both("llama", tmp_path)
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "a", "max_tokens": 2}\n')
    flags = [
        str(rows),
        "--model-name",
        str(folder),
        "--dtype",
        "float32",
        "--budget",
        "1024",
    ]
    for command in ("check", "run"):
        found = CliRunner().invoke(main, [command, *flags, "--kernels", kernels])
        says = (
            "float32 with bfloat16 weights" if kernels == "auto" else "(float32 on cpu"
        )
        assert found.exit_code == 0 and says in found.output, found.output


@pytest.mark.parametrize("flags", [[], ["--data-group-size", "2"]])
def test_a_run_whose_kernels_could_not_be_built_says_what_it_holds(
    flags: list[str], tmp_path: Path
) -> None:
    """It said "with bfloat16 weights", as was foreseen before the build failed."""
    folder, _ = save_both("llama", tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ntest "$1" = --version\n')
    compiler.chmod(0o755)
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "a", "max_tokens": 2}\n')
    command = [
        "run",
        rows,
        "--model-name",
        folder,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    environ = os.environ | {"CXX": str(compiler)}
    done = run_forked([*command, "--budget", "1024", *flags], environ=environ)
    assert done.returncode == 0 and "the compiler failed" in done.stderr, done.stderr
    assert "(float32 on cpu" in done.stdout + done.stderr.partition("Ready")[2]


def test_weights_of_another_type_than_rows_are_widened() -> None:
    weight = torch.randn(70, 40).bfloat16()
    bias = torch.randn(70)
    x = torch.randn(5, 40)
    expected = torch.nn.functional.linear(x, weight.float(), bias)
    # a processor with units for bfloat16 packed it, for such rows
    for is_fast in (False, True):
        packed = plain_registry()
        packed.of_products += make_library_candidates(torch.float32, is_fast=is_fast)
        for registry in (packed, plain_registry()):
            found = registry.choose_product(make_dense_weight(weight, "product"), bias)(
                x
            )
            torch.testing.assert_close(found, expected)


@needs_compiler
@pytest.mark.parametrize("has_tiles", [False, True])
def test_the_kernel_packs_them_as_they_are(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every processor: oneDNN's products of tiles have no rows of float32."""
    monkeypatch.setattr(products, "has_unit", lambda name: has_tiles)
    registry = Registry("auto", built_library(), torch.float32, CPU)

    def pack(weight: torch.Tensor) -> Any:
        return registry.choose_product(make_dense_weight(weight, "product"), bias)

    weight = torch.randn(70, 40).bfloat16()
    bias = torch.randn(70)
    x = torch.randn(5, 40)
    product = pack(weight)
    assert isinstance(product, PackedProduct)
    assert [part.format for part in product.parts] == [Dense(torch.bfloat16)]
    assert torch.equal(product(x), pack(weight.float())(x))
    odd = torch.randn(70, 33).bfloat16()  # inputs that it does not serve
    x = torch.randn(5, 33)
    torch.testing.assert_close(pack(odd)(x), x @ odd.float().t() + bias)
    assert not registry.why_plain
