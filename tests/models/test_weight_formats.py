"""A format of 8 bits that is defined here alone: from a checkpoint to tokens.

What a real one needs is what this file has: a class, and a row in `FORMATS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.compute.formats.dense import Dense
from fminfer.compute.values.weights import RowFormat, Shape, TensorSpec, Weight
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.holding import FORMATS, Holding, StoredPart
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.models.origins import check_tensors, find_stored_model, read_origins
from fminfer.models.tensor_specs import stage_specs
from fminfer.plan.planning import plan_ahead
from tests.conftest import make_model, save_byte_tokenizer
from tests.forward.test_transformer import MAX_ERROR, error_of, logits_of, one_stage
from tests.shard_threads import cut_engine

CPU = torch.device("cpu")
# Joined, of heads in turns, of experts one by one and in one parameter, transposed, moved, tied.
NAMES = [
    "llama",
    "gpt_neox",
    "mixtral",
    "gpt2",
    "gpt_oss",
    "bloom",
    "deepseek_v3",
    "qwen3_moe",
]


@dataclass(slots=True, frozen=True)
class RowsOfInt8(RowFormat):
    """int8, with a scale in float32 for each output: `….weight` and `….weight_scale`."""

    name: str = "int8"
    types: tuple[str, ...] = ("I8",)

    num_tensors = 2

    @property
    def format(self) -> RowsOfInt8:
        return self

    def num_bytes(self, shape: Shape) -> int:
        return math.prod(shape) + 4 * math.prod(shape[:-1])

    def empty(self, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
        values = torch.empty(shape, dtype=torch.int8, device=device)
        return values, torch.empty(shape[:-1], device=device)

    def dequantize(
        self, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        values, scales = tensors
        return (values * scales[..., None]).to(dtype)

    def fill(self, tensors: tuple[torch.Tensor, ...], numbers: torch.Tensor) -> None:
        raise AssertionError("it is only read")

    def cut_inputs(
        self, tensors: tuple[torch.Tensor, ...], inputs: range
    ) -> tuple[torch.Tensor, ...]:
        values, scales = tensors
        return values[..., inputs.start : inputs.stop], scales

    def stored(
        self, name: str, shape: Shape, *, is_transposed: bool
    ) -> Mapping[str, StoredPart]:
        of_values = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        return {
            name: (("I8",), of_values),
            f"{name}_scale": (("F32",), shape[:-1]),
        }

    def read(
        self, stored: Mapping[str, torch.Tensor], *, is_transposed: bool
    ) -> tuple[torch.Tensor, ...]:
        values, scales = stored.values()
        return (values.mT if is_transposed else values), scales


@pytest.fixture
def int8() -> Iterator[RowsOfInt8]:
    FORMATS.append(row := RowsOfInt8())
    yield row
    FORMATS.remove(row)


def quantize(folder: Path, *, is_stored_so: bool) -> None:
    """Round every matrix of a checkpoint to int8, and store it so or as the floats that
    it is."""
    checkpoint = open_checkpoint(str(folder))
    path = folder / "model.safetensors"
    _, origins = read_origins(checkpoint, folder)
    tensors = load_file(path)
    for origin in origins.values():
        for name in [n for piece in origin.pieces for n in piece.stored]:
            if origin.spec.use in ("product", "moved", "head", "embedding"):
                _round(
                    tensors,
                    name,
                    -2 if origin.layout.is_transposed else -1,
                    is_stored_so=is_stored_so,
                )
    save_file(tensors, path, metadata={"format": "pt"})


def _round(
    tensors: dict[str, torch.Tensor], name: str, inputs: int, *, is_stored_so: bool
) -> None:
    weight = tensors[name].float()
    scale = weight.abs().amax(inputs, keepdim=True) / 127
    values = (weight / scale).round()
    tensors[name] = values.to(torch.int8) if is_stored_so else values * scale
    if is_stored_so:
        tensors[f"{name}_scale"] = scale.squeeze(inputs)


def save_both(name: str, folder: Path) -> tuple[Path, Any]:
    """Save a checkpoint in int8; return transformers' model of the same numbers in float32."""
    mine = folder / "int8"
    theirs = folder / "floats"
    for each in (mine, theirs):
        make_model(name).save_pretrained(each)
        save_byte_tokenizer(each)
        quantize(each, is_stored_so=each == mine)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        theirs, dtype=torch.float32
    )
    return mine, model.eval()


def open_source(folder: Path) -> LayerSource:
    checkpoint = open_checkpoint(str(folder))
    (part,) = one_stage()
    return open_weights(
        checkpoint, part, holding=Holding(torch.float32), device=CPU, seed=0
    )


def weights_of(source: LayerSource) -> list[Weight]:
    entry = source.load_entry()
    groups = [entry, *source.load_layers(), source.load_exit(entry)]
    return [*{id(each): each for group in groups for each in group.values()}.values()]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantized_weights(
    name: str, tmp_path: Path, int8: RowsOfInt8
) -> None:
    """Reading knew plain floats alone, and each place that holds a weight knew its dtype."""
    folder, model = save_both(name, tmp_path)
    assert error_of(logits_of(folder, one_stage()), model) < MAX_ERROR
    assert (
        error_of(logits_of(folder, split_layers(3, 2, head_cost=0.0)), model)
        < MAX_ERROR
    )


@pytest.mark.parametrize("name", NAMES)
def test_they_are_held_as_they_are_stored(
    name: str, tmp_path: Path, int8: RowsOfInt8
) -> None:
    """A weight that is moved when its layer is made is not; a forecast counts the same bytes."""
    folder, _ = save_both(name, tmp_path)
    source = open_source(folder)
    found = weights_of(source)
    for each in found:
        assert each.format == (int8 if each.spec.is_widened else Dense(torch.float32))
    num_bytes = sum(weight.num_bytes for weight in found)
    assert num_bytes == source.num_bytes
    checkpoint = open_checkpoint(str(folder))
    config = EngineConfig(model=str(folder), dtype="float32", budget=512)
    specs = stage_specs(checkpoint.model, one_stage()[0])
    for name, parts in find_stored_model(checkpoint).list_formats().items():
        is_matrix = specs[name].use in ("product", "moved", "head", "embedding")
        assert {each for each, _ in parts} == {
            int8 if is_matrix else Dense(torch.float32)
        }, name
    foreseen = plan_ahead(config, checkpoint).this_rank.takes
    assert foreseen.weights >= num_bytes >= foreseen.held_weights


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("place", ["memory", "disk", "two ranks"])
def test_a_run_answers_with_them(
    name: str, place: str, tmp_path: Path, int8: RowsOfInt8
) -> None:
    """Both tensors are joined, stacked, cut by outputs and inputs, and read at each pass."""
    folder, model = save_both(name, tmp_path)
    prompts = [[3 + (7 * i + n) % 200 for i in range(9 + n)] for n in range(3)]
    options: Any = {"dtype": "float32", "budget": 1024}
    if place == "disk":
        options["offload"] = "disk"
    if place == "two ranks":
        engine = cut_engine(folder, 2, **options)
    else:
        engine = fminfer.Engine(str(folder), **options)
    rows = [
        {"prompt": ids, "max_tokens": 6, "temperature": 0, "logprobs": 0}
        for ids in prompts
    ]
    rows = [row | {"return_token_ids": True, "ignore_eos": True} for row in rows]
    records = sorted(engine.run(rows), key=lambda record: record.line.number)
    engine.close()
    for ids, record in zip(prompts, records, strict=True):
        (choice,) = record.to_dict()["result"]["choices"]
        for token, logprob in zip(
            choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
        ):
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert token == int(logprobs.argmax())
            assert logprob == pytest.approx(float(logprobs.max()), abs=1e-4)
            ids = [*ids, token]


def test_layers_may_be_asked_for_again_and_in_any_order(tmp_path: Path) -> None:
    """Layers were an iterator that could be read once."""
    make_model("llama").save_pretrained(tmp_path)
    source = open_source(tmp_path)
    kept = [*source.load_layers()]
    later = source.load_layers()
    first = next(later)
    drawn = open_weights(
        open_random_checkpoint("llama-160m"),
        one_stage()[0],
        holding=Holding(torch.float32),
        device=CPU,
        seed=0,
    )
    for number in (2, 0, 2, 1):
        again = source.load_layer(number)
        assert again.keys() == kept[number].keys()
        assert all(weight.equals(kept[number][name]) for name, weight in again.items())
        mine = drawn.load_layer(number)
        other = drawn.load_layer(number)
        assert all(weight.equals(other[name]) for name, weight in mine.items())
    assert all(weight.equals(kept[0][name]) for name, weight in first.items())
    assert [len(each) for each in later] == [len(each) for each in kept[1:]]


def test_int8_without_a_row_or_without_scales_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A type that no format has, and one whose other tensors are not there."""
    make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    quantize(tmp_path, is_stored_so=True)
    refused = (
        r"stores '\S+weight' as I8: quantized weights run if a quantization_config says how. "
        r"Take a checkpoint in 16"
    )
    with pytest.raises(CheckpointError, match=refused):
        check_tensors(open_checkpoint(str(tmp_path)))
    request.getfixturevalue("int8")
    check_tensors(open_checkpoint(str(tmp_path)))
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    scales = tensors.pop(f"{name}_scale")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=f"{name}' as I8: quantized weights run if"
    ):
        check_tensors(open_checkpoint(str(tmp_path)))
    save_file(
        tensors | {f"{name}_scale": scales[1:].clone()}, path, metadata={"format": "pt"}
    )
    with pytest.raises(
        CheckpointError, match=rf"{name}_scale' has shape \(127,\).*\(128,\)"
    ):
        check_tensors(open_checkpoint(str(tmp_path)))


def test_in_which_format_a_tensor_is_held(int8: RowsOfInt8) -> None:
    """One function decides it, for loading and for forecasts."""
    floats = Dense(torch.float32)
    halves = Dense(torch.bfloat16)
    stored: list[Any]
    for use, stored, keeps, expected in (
        ("product", [halves], True, halves),
        ("product", [halves], False, floats),
        ("product", [halves, floats], True, floats),
        ("product", [int8], False, int8),
        ("embedding", [int8, halves], True, floats),
        ("moved", [int8], True, floats),
        ("norm", [halves], True, floats),
        ("head", [], True, floats),
    ):
        spec: Any = TensorSpec((4, 4), use)  # type: ignore[arg-type]
        parts = [(each, 4 // len(stored)) for each in stored]
        assert (
            Holding(torch.float32, keeps_bfloat16=keeps).choose_format(spec, parts)
            == expected
        )
    router = TensorSpec((4, 4), "router")
    assert Holding(torch.bfloat16).choose_format(router, [(halves, 4)]) == floats
