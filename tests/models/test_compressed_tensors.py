"""What the package compressed-tensors writes, read as that package reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fminfer.models.published.schemes import parse_scheme

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")

OUTPUTS = 24
INPUTS = 256
SHAPE = (OUTPUTS, INPUTS)
WHOLE = {"type": "int", "dynamic": False}
FLOATS = {"type": "float", "dynamic": False, "symmetric": True}
# The compressor, its `format`, and what is said of weights.
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    f"{bits} bits, {name}, {'symmetric' if symmetric else 'with zeros'}": (
        compressors.PackedQuantizationCompressor,
        "pack-quantized",
        WHOLE | {"num_bits": bits, "symmetric": symmetric} | strategy,
    )
    for bits in (4, 8)
    for symmetric in (True, False)
    for name, strategy in {
        "groups of 32": {"strategy": "group", "group_size": 32},
        "groups of 128": {"strategy": "group", "group_size": 128},
        "rows": {"strategy": "channel"},
    }.items()
} | {
    "int8 of rows": (
        compressors.IntQuantizationCompressor,
        "int-quantized",
        WHOLE | {"num_bits": 8, "symmetric": True, "strategy": "channel"},
    ),
    "e4m3 of rows": (
        compressors.FloatQuantizationCompressor,
        "float-quantized",
        FLOATS | {"num_bits": 8, "strategy": "channel"},
    ),
    "e4m3 of a tensor": (
        compressors.FloatQuantizationCompressor,
        "float-quantized",
        FLOATS | {"num_bits": 8, "strategy": "tensor"},
    ),
    "NVFP4": (
        compressors.NVFP4PackedCompressor,
        "nvfp4-pack-quantized",
        FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
}


def make_state(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a matrix with scales, and zeros where they are asked for."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(SHAPE, generator=generator)
    group = weights.get("group_size", INPUTS)
    grouped = weight.view(OUTPUTS, -1, group)
    most = grouped.abs().amax(-1)
    if weights["strategy"] == "tensor":
        most = most.max().view(1)
    if weights["strategy"] == "tensor_group":
        tensor_scale = torch.tensor([6.0 * 448.0]) / weight.abs().max()
        scale = (most / 6.0 * tensor_scale).to(torch.float8_e4m3fn).float()
        return {
            "weight": weight,
            "weight_scale": scale,
            "weight_global_scale": tensor_scale,
        }
    steps = {"int": 2 ** (weights["num_bits"] - 1) - 1, "float": 448}[weights["type"]]
    state = {"weight": weight, "weight_scale": most / steps}
    if not weights["symmetric"]:
        zeros = torch.randint(-3, 4, most.shape, generator=generator)
        state["weight_zero_point"] = zeros.to(torch.int8)
    return state


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_package(name: str) -> None:
    compressor, layout, weights = CASES[name]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    state = make_state(weights)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    ours = parse_scheme(
        {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
        }
    )
    assert ours is not None

    reader = ours.find_reader("model.layers.0.mlp.up_proj", SHAPE)
    assert reader is not None
    asked = reader.stored("weight", SHAPE, is_transposed=False)
    tensors = {each: stored[each] for each in asked if each in stored}
    found = reader.format.dequantize(
        reader.read(tensors, is_transposed=False), torch.float32
    )

    # the package makes bfloat16 of NVFP4
    error = 2 * torch.finfo(expected.dtype).eps
    assert torch.allclose(found, expected.float(), rtol=error, atol=1e-7)
    for each, tensor in tensors.items():
        sizes = [size for size in asked[each][1] if size > 1]
        assert [size for size in tensor.shape if size > 1] == sizes, each
