"""Each layout by numbers worked out by hand, and what is refused as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fminfer.core.errors import CheckpointError
from fminfer.models.holding import StoredFormat
from fminfer.models.published.schemes import parse_scheme
from tests.published_building import (
    AWQ_4,
    CASES,
    FP8,
    GPTQ_4,
    W4A16,
    Stored,
    compressed,
    drawn_order,
    read_float8,
    read_gptq,
    store_float8,
    store_gptq,
)

MODULE = "model.layers.0.mlp.up_proj"
# Eight numbers of 4 bits, from the lowest bits on: 1, 2, 3, 4, 5, 6, 7, 8.
ONE_TO_EIGHT = 0x87654321 - (1 << 32)
SYMMETRIC = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
)


def find_reader(quantization: Mapping[str, Any], *shape: int) -> StoredFormat:
    scheme = parse_scheme(dict(quantization))
    assert scheme is not None
    reader = scheme.find_reader(MODULE, shape)
    assert reader is not None
    return reader


def read(quantization: Mapping[str, Any], stored: Stored, *shape: int) -> torch.Tensor:
    """Return the floats of a matrix that is stored so, after what it asks for was checked."""
    reader = find_reader(quantization, *shape)
    parts = reader.stored(f"{MODULE}.weight", shape, is_transposed=False)
    named = {}
    for part, (types, part_shape) in parts.items():
        names = [name.removeprefix(f"{MODULE}.") for name in part.split("|")]
        leaves = [name for name in names if name in stored]
        assert leaves or "" in types
        for leaf in leaves:
            assert tuple(stored[leaf].shape) == part_shape or stored[leaf].numel() == 1
            named[f"{MODULE}.{leaf}"] = stored[leaf]
    tensors = reader.read(named, is_transposed=False)
    return reader.format.dequantize(tensors, torch.float32)


def words(rows: int, columns: int, value: int = 0) -> torch.Tensor:
    return torch.full((rows, columns), value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("version", "zeros", "zero"),
    [
        ("gptq", 0x77777777, 8),
        ("gptq_v2", 0x77777777, 7),
        ("gptq", -1, 0),  # 15 + 1 is 0 in 4 bits
    ],
)
def test_gptq_packs_inputs_from_the_lowest_bits_on(
    version: str, zeros: int, zero: int
) -> None:
    qweight = words(4, 8)
    qweight[1, 2] = ONE_TO_EIGHT
    scales = torch.full((1, 8), 0.25)
    scales[0, 2] = 0.5
    stored = {"qweight": qweight, "qzeros": words(1, 1, zeros), "scales": scales.half()}
    found = read(GPTQ_4 | {"checkpoint_format": version}, stored, 8, 32)
    expected = torch.full((8, 32), -0.25 * zero)
    expected[2] = -0.5 * zero
    expected[2, 8:16] = (torch.arange(1.0, 9) - zero) * 0.5
    assert torch.equal(found, expected)
    (rows,) = find_reader(GPTQ_4, 8, 32).read(
        {f"{MODULE}.{leaf}": tensor for leaf, tensor in stored.items()},
        is_transposed=False,
    )
    # a float32 scale, a float16 zero, and 32 numbers of 4 bits
    assert rows.shape == (8, 4 + 2 + 16)


def test_gptq_of_8_bits_has_a_byte_for_each_input() -> None:
    qweight = words(8, 4)
    qweight[0, 1] = 0x04030201
    qzeros = words(1, 1, 0x7F7F7F7F)
    stored = {"qweight": qweight, "qzeros": qzeros, "scales": torch.ones(1, 4)}
    found = read(GPTQ_4 | {"bits": 8}, stored, 4, 32)
    assert found[1, :5].tolist() == [-127.0, -126.0, -125.0, -124.0, -128.0]
    assert found[0].eq(-128).all()


def test_awq_packs_outputs_in_an_order_of_its_own() -> None:
    qweight = words(32, 1)
    qweight[3, 0] = ONE_TO_EIGHT
    stored = {
        "qweight": qweight,
        "qzeros": words(1, 1, ONE_TO_EIGHT),
        "scales": torch.full((1, 8), 2.0).half(),
    }
    found = read(AWQ_4, stored, 8, 32)
    # places 0 to 7 of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7
    numbers = torch.tensor([1.0, 5, 2, 6, 3, 7, 4, 8])
    assert torch.equal(found[:, 3], torch.zeros(8)), "each number is its zero"
    assert torch.equal(found[:, 0], -2 * numbers)


def test_compressed_tensors_packs_along_rows_with_the_middle_added() -> None:
    packed = words(8, 4)
    packed[5, 0] = ONE_TO_EIGHT
    scales = torch.full((8, 1), 0.5).bfloat16()
    symmetric = read(
        SYMMETRIC, {"weight_packed": packed, "weight_scale": scales}, 8, 32
    )
    assert symmetric[5, :9].tolist() == [-3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, -4]
    stored = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_zero_point": words(1, 1, ONE_TO_EIGHT),  # of outputs 0 to 7
    }
    found = read(W4A16, stored, 8, 32)
    assert found[5, :9].tolist() == [-2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, -3]
    assert found[:, 31].tolist() == [-0.5, -1, -1.5, -2, -2.5, -3, -3.5, -4]


def test_numbers_of_8_bits_that_are_stored_as_bytes() -> None:
    weight = torch.zeros(2, 32, dtype=torch.int8)
    weight[0, :3] = torch.tensor([-128, 127, 1])
    stored = {"weight": weight, "weight_scale": torch.tensor([[0.5], [1.0]])}
    config = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    found = read(config, stored, 2, 32)
    assert found[0, :4].tolist() == [-64.0, 63.5, 0.5, 0.0]
    config = compressed(
        "naive-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    )
    stored["weight_zero_point"] = torch.tensor([[1], [-2]], dtype=torch.int8)
    found = read(config, stored, 2, 32)
    assert found[0, :4].tolist() == [-64.5, 63.0, 0.0, -0.5]
    assert found[1].eq(2).all()


def test_act_order_sorts_inputs_by_their_group() -> None:
    """Even inputs are of group 1. Rows are sorted, and each place knows its input."""
    stored = {
        "qweight": words(8, 8, 0x22222222),
        "qzeros": words(2, 1),
        "scales": torch.tensor([[1.0], [3.0]]).expand(2, 8).half(),
        "g_idx": (torch.arange(64) + 1).int() % 2,
    }
    config = GPTQ_4 | {"desc_act": True}
    found = read(config, stored, 8, 64)
    assert found[0, :4].tolist() == [3.0, 1.0, 3.0, 1.0]  # 2 - (0 + 1) = 1
    reader = find_reader(config, 8, 64)
    assert reader.format.name == "whole4-32 in act-order"
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in stored.items()}
    _, order = reader.read(named, is_transposed=False)
    assert order.tolist() == [*range(1, 64, 2), *range(0, 64, 2)]


def test_float8_has_tiles_that_the_edges_cut() -> None:
    """1.0 is 0x38 in e4m3, so that each weight is the scale of its tile."""
    weight = torch.full((130, 160), 0x38, dtype=torch.uint8)
    # 2, -1, the least number, the largest, -448
    weight[0, :5] = torch.tensor([0x40, 0xB8, 0x01, 0x7E, 0xFE])
    stored = {
        "weight": weight.view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    found = read(FP8, stored, 130, 160)
    assert found[0, :6].tolist() == [2.0, -1.0, 2.0**-9, 448.0, -448.0, 1.0]
    assert found[127, [127, 128]].tolist() == [1.0, 2.0]
    assert found[129, [0, 127, 128, 159]].tolist() == [3.0, 3.0, 4.0, 4.0]
    assert find_reader(FP8, 130, 160).format.name == "float8-32"
    assert find_reader(FP8, 130, 256).format.name == "float8-128"


def test_float8_with_one_scale_or_one_a_row() -> None:
    weight = torch.full((2, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    of_tensor = {"quant_method": "fp8"}
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.5).bfloat16()
        stored = {"weight": weight, "weight_scale": scale}
        assert read(of_tensor, stored, 2, 32).eq(0.5).all()
    powers = torch.tensor([[127], [129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stored = {"weight": weight, "weight_scale": powers}
    found = read({"quant_method": "fbgemm_fp8"}, stored, 2, 32)
    assert found[:, 0].tolist() == [1.0, 4.0]


def test_mxfp4_has_neighbours_in_a_byte() -> None:
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 1, 0, :3] = torch.tensor([0x21, 0xF7, 0x80])
    scales = torch.tensor([[[127], [128]]], dtype=torch.uint8)
    reader = find_reader({"quant_method": "mxfp4"}, 1, 2, 32)
    stored = {"x_blocks": blocks, "x_scales": scales}
    tensors = reader.read(stored, is_transposed=True)
    found = reader.format.dequantize(tensors, torch.float32)
    assert found.shape == (1, 2, 32)
    # twice 0.5, 1, 6, -6, 0 and -0
    assert found[0, 1, :7].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0, 0.0, 0.0]
    with pytest.raises(CheckpointError, match="'x_scales' has scales that are nan"):
        reader.read(stored | {"x_scales": scales + 127}, is_transposed=True)


def test_nvfp4_divides_by_the_scale_of_the_tensor() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x21, 0xF7])
    scales = torch.tensor([[0x40, 0x38]], dtype=torch.uint8)  # 2 and 1
    stored = {
        "weight_packed": packed,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
    }
    config, _ = CASES["nvfp4"]
    found = read(config, stored, 1, 32)
    assert found[0, :5].tolist() == [0.25, 0.5, 3.0, -3.0, 0.0]
    with pytest.raises(CheckpointError, match="global_scale' is 0"):
        read(config, stored | {"weight_global_scale": torch.zeros(1)}, 1, 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_groups_of_any_size_have_the_numbers_of_a_plain_reader(
    bits: int, group: int, is_ordered: bool
) -> None:
    """Blocks are held where they fit; other groups become floats."""
    torch.manual_seed(group + bits)
    seed = 3 if is_ordered else None
    stored = store_gptq(torch.randn(16, 192), bits=bits, group=group, seed=seed)
    config = GPTQ_4 | {"bits": bits, "group_size": group or -1, "desc_act": is_ordered}
    found = read(config, stored, 16, 192)
    expected = torch.from_numpy(read_gptq(stored, bits))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(130, 160), (128, 100), (40, 256), (7, 33)])
@pytest.mark.parametrize("tile", [(128, 128), (0, 0), (1, 0), (64, 32)])
def test_tiles_of_any_size_have_the_numbers_of_transformers(
    shape: tuple[int, int], tile: tuple[int, int]
) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    torch.manual_seed(1)
    stored = store_float8(torch.randn(shape), tile)
    size = [*tile] if any(tile) else None
    config = {"quant_method": "fp8", "weight_block_size": size}
    if tile == (1, 0):
        config = {"quant_method": "fbgemm_fp8"}
        stored = {
            "weight": stored["weight"],
            "weight_scale": stored["weight_scale_inv"],
        }
    found = read(config, stored, *shape)
    assert torch.equal(found, torch.from_numpy(read_float8(stored, tile)))
    if tile[1]:
        theirs = _dequantize_fp8_weight(
            stored["weight"], stored["weight_scale_inv"], size, torch.float32
        )
        torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-7)


def of_group(group: int) -> torch.Tensor:
    return torch.from_numpy(drawn_order(64, 32, 1).astype(np.int32)).clamp(0, group)


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        ({"scales": torch.full((2, 8), torch.nan)}, {}, r"scales' has .* nan or inf"),
        ({"scales": torch.full((2, 8), torch.inf)}, {}, r"scales' has .* nan or inf"),
        (
            {"g_idx": of_group(1) + 1},
            {},
            r"g_idx' puts inputs into groups 1 to 2, .*0 to 1",
        ),
        ({"g_idx": of_group(1) - 1}, {}, r"g_idx' puts inputs into groups -1 to 0"),
        ({"g_idx": of_group(0)}, {}, r"g_idx' .* 0 to 0, .*each with 32 inputs, any"),
        (
            {"g_idx": of_group(1)},
            {"desc_act": False},
            r"g_idx' .*0 to 1, .*one group after the",
        ),
    ],
)
def test_values_that_cannot_be_right_are_refused(
    change: Stored, config: dict[str, Any], named: str
) -> None:
    stored = store_gptq(torch.randn(8, 64), seed=1)
    with pytest.raises(CheckpointError, match=f"'{MODULE}.{named}"):
        read(GPTQ_4 | {"desc_act": True} | config, stored | change, 8, 64)
