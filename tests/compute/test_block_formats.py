"""Blocks become the numbers that llama.cpp makes of them, and our own forms lose half a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fminfer.compute.formats import block_rows
from fminfer.compute.formats.block_rows import Blocks
from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.gguf_rows import GGUF_FORMATS
from fminfer.compute.formats.joined import Joined, join_formats
from fminfer.compute.formats.own_rows import (
    INT4,
    INT8,
    INT8_32,
    OWN_FORMATS,
    choose_quantized_formats,
)
from fminfer.compute.values.weights import Format, TensorSpec, Use
from fminfer.models.holding import Holding
from fminfer.models.stored.gguf_file import read_gguf
from tests.random_blocks import FORMS, random_blocks, random_weight

CPU = torch.device("cpu")
# with what llama.cpp makes of their bytes
SAMPLES = Path(__file__).parent.parent / "data/gguf"
FLOATS = Dense(torch.float32)
HALVES = Dense(torch.bfloat16)
SYMMETRIC = ("int4-symmetric", "int4-symmetric-128")
of_own_forms = pytest.mark.parametrize("form", OWN_FORMATS, ids=lambda form: form.name)


@pytest.mark.parametrize("form", GGUF_FORMATS, ids=lambda form: form.name)
def test_numbers_are_those_of_llama_cpps_package(form: Blocks) -> None:
    """Bit by bit, for any bytes."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(1)
    packed = random_blocks(form, 256, 4 * form.block)
    # whose first byte is a power of 2; the last ones are beyond float32
    if form.name == "MXFP4":
        packed[:, 0] = torch.arange(256).clamp(0, 250)
        packed[:, :: form.block_bytes].clamp_(0, 250)
    found = form.dequantize((packed,), torch.float32)
    kind = gguf.GGMLQuantizationType[form.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block, form.block_bytes)
    expected = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), kind))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_numbers_are_those_of_llama_cpp() -> None:
    """Of files that its own tools quantized; all that its package cannot write are
    among them."""
    seen = set()
    for path in sorted(SAMPLES.glob("*.gguf")):
        content = path.read_bytes()
        tensors = read_gguf(path)[0].tensors
        values = json.loads(path.with_suffix(".json").read_text()).get("tensors", {})
        for name, told in values.items():
            form = FORMS.get(told["form"])
            (stem, _, leaf) = name.rpartition(".")
            if form is None:
                continue
            seen.add(form.name)
            num_experts = told["shape"][0]
            names = [f"{stem}.{n}.{leaf}" for n in range(num_experts)]
            names = [name] if name in tensors else names
            parts = [tensors[each] for each in names]  # one of each expert
            assert {part.dtype for part in parts} == {form.name}
            stored = b"".join(content[slice(*part.span)] for part in parts)
            packed = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
            packed = packed.view(*told["shape"][:-1], -1)
            found = form.dequantize((packed,), torch.float32)
            assert [*found.shape] == told["shape"]
            expected = torch.tensor(told["values"])
            torch.testing.assert_close(
                found.flatten()[told["at"]], expected, rtol=1e-6, atol=0
            )
    assert len(seen) >= 12
    gguf = pytest.importorskip("gguf")
    for form in GGUF_FORMATS:
        try:
            gguf.quants.quantize(
                np.zeros((1, 256), np.float32), gguf.GGMLQuantizationType[form.name]
            )
        except NotImplementedError:
            assert form.name in seen


MOST = {"int8": 127, "int4": 15}  # steps from 0, or from the least number
LOST = 2.0**-25  # of a scale that is hardly above float16's smallest number


def limits(form: Blocks, packed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return how far each number, (…, blocks, numbers), may be off.

    That is half a step, or what float16 rounds of a tiny scale or of the least number. Symmetric
    forms have 8 steps to one side and 7 to the other, which may lose up to a whole one.
    """
    own = packed.view(*numbers.shape[:-1], -1)
    scale = own[..., :2].contiguous().view(torch.float16).double().abs()
    if form.name in SYMMETRIC:
        most = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
        half = torch.maximum(scale / 2, torch.tensor(8 * LOST))
        beyond = (
            (numbers.abs() - 7 * scale).clamp(0, None).minimum(1.005 * scale + 8 * LOST)
        )
        return torch.where(numbers * most < 0, torch.maximum(half, beyond), half)
    half = torch.maximum(scale / 2, torch.tensor(MOST[form.name[:4]] * LOST))
    if form.name.startswith("int8"):
        return half
    least = own[..., 2:4].contiguous().view(torch.float16).double().abs()
    return half + least * 2.0**-11


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda x: x * 0.05,
    "zeros": lambda x: x * 0,
    "tiny": lambda x: x * 1e-6,
    "less than float16 has": lambda x: x * 1e-12,
    "small": lambda x: x * 1e-3,
    "huge": lambda x: (x * 2e4).clamp(-65000, 65000),
    "one outlier": lambda x: torch.cat([x[..., :-1] * 0.01, x[..., -1:] * 30], -1),
    "negative": lambda x: -x.abs() - 0.1,
    "positive": lambda x: x.abs() + 0.1,
    "far from 0": lambda x: x * 0.01 + 5,
    "constant": lambda x: torch.full_like(x, -0.37),
    "of two signs": lambda x: torch.sign(x) * 0.2,
    "one number": lambda x: (
        torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]) * 0.7
    ),
}


@of_own_forms
@pytest.mark.parametrize("case", CASES)
def test_no_number_is_off_by_more_than_half_a_step(form: Blocks, case: str) -> None:
    torch.manual_seed(2)
    numbers = CASES[case](torch.randn(40, 3 if form.block else 1, form.block or 96))
    packed = form.quantize(numbers.flatten(1))
    found = form.dequantize((packed,), torch.float32).double().view(numbers.shape)
    error = (found - numbers.double()).abs()
    assert (error <= limits(form, packed, numbers.double()) * (1 + 1e-6)).all()
    if case in ("zeros", "one number"):
        torch.testing.assert_close(found, numbers.double(), rtol=1e-3, atol=0)


@of_own_forms
def test_steps_are_as_short_as_can_be(form: Blocks) -> None:
    """The test above takes each scale as it is."""
    numbers = torch.randn(40, 3 if form.block else 1, form.block or 96)
    packed = form.quantize(numbers.flatten(1)).view(*numbers.shape[:-1], -1)
    scale = packed[..., :2].contiguous().view(torch.float16).float().abs().squeeze(-1)
    least, most = numbers.aminmax(dim=-1)
    largest = torch.maximum(most, -least)
    is_of_range = form.name in ("int4", "int4-128")
    exact = (
        (most - least) / 15
        if is_of_range
        else largest / (8 if form.name in SYMMETRIC else 127)
    )
    torch.testing.assert_close(scale, exact, rtol=5e-3, atol=0)


@of_own_forms
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]
)
def test_what_no_scale_holds_is_not_finite(form: Blocks, value: float) -> None:
    """It became 8 million, and its neighbours 0. As nan it is seen in what is computed
    with it."""
    numbers = torch.randn(2, 256)
    numbers[1, 70] = value
    found = form.dequantize((form.quantize(numbers),), torch.float32)
    assert found[0].isfinite().all()
    assert not found[1, 70].isfinite()


@of_own_forms
def test_stacks_and_many_rows_become_what_each_row_does(
    form: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.randn(3, 7, 256).bfloat16()
    whole = form.quantize(numbers)
    monkeypatch.setattr(block_rows, "PACKED_AT_ONCE", 512)
    assert torch.equal(form.quantize(numbers), whole)
    to = torch.zeros_like(whole)
    assert form.quantize(numbers.transpose(0, 1).contiguous().transpose(0, 1), to) is to
    assert torch.equal(to, whole)
    for number, each in enumerate(numbers):
        assert torch.equal(form.quantize(each.float()), whole[number])
        assert torch.equal(form.quantize(each[2:3]), whole[number, 2:3])


def test_our_own_blocks_of_8_bits_are_llama_cpps() -> None:
    packed = INT8_32.quantize(torch.randn(5, 320))
    theirs = FORMS["Q8_0"].dequantize((packed,), torch.float32)
    assert torch.equal(theirs, INT8_32.dequantize((packed,), torch.float32))
    gguf = pytest.importorskip("gguf")
    numbers = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(numbers), theirs)


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_a_weight_has_the_bytes_that_are_foreseen(form: Blocks) -> None:
    for shape in ((6, 512), (2, 6, 512)):
        (tensor,) = form.empty(shape, CPU)
        assert (
            tensor.nbytes == form.num_bytes(shape) and tensor.shape[:-1] == shape[:-1]
        )
        assert tensor.shape == random_blocks(form, *shape).shape
        numbers = form.dequantize((random_blocks(form, *shape),), torch.bfloat16)
        assert numbers.shape == shape and numbers.dtype == torch.bfloat16
    block = form.block or 32
    assert form.fits_inputs(3 * block) and not form.fits_inputs(3 * block + 16)


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("int8", 256, "int8"),
        ("int8", 96, "int8-32"),
        ("int8-32", 256, "int8-32"),
        ("int8-row", 96, "int8-row"),
        ("int8-row", 100, ""),
        ("int4", 96, "int4"),
        ("int4", 48, ""),
        ("int4-128", 256, "int4-128"),
        ("int4-128", 96, "int4"),
        ("int4-symmetric", 96, "int4-symmetric"),
        ("int4-symmetric-128", 384, "int4-symmetric-128"),
        ("int4-symmetric-128", 96, "int4-symmetric"),
        ("int4-symmetric-128", 33, ""),
    ],
)
def test_what_a_matrix_becomes_by_its_rows(
    name: str, inputs: int, expected: str
) -> None:
    """Rows that no form takes stay floats, and so does what is quantized already as it is."""
    holding = Holding(torch.float32, keeps_bfloat16=True, quantized=name)
    for stored in ([], [(FLOATS, 4)], [(HALVES, 3), (FLOATS, 1)]):
        found = holding.choose_format(TensorSpec((4, inputs), "product"), stored)
        assert found == FORMS.get(expected, FLOATS)
    assert holding.choose_format(
        TensorSpec((2, 4, inputs), "product"), [(HALVES, 8)]
    ).name == (expected or "bfloat16")
    assert (
        holding.choose_format(
            TensorSpec((4, 256), "product"), [(FORMS["Q6_K"], 4)]
        ).name
        == "Q6_K"
    )
    for use in ("embedding", "head"):
        held = holding.choose_format(TensorSpec((4, inputs), use), [])
        of_8_bits = "int8" if inputs % 128 == 0 else "int8-32"
        of_8_bits = expected if expected.startswith("int8") else of_8_bits
        assert held == (FORMS[of_8_bits] if inputs % 32 == 0 else FLOATS)
    uses: list[Use] = ["moved", "router", "norm", "bias", "other"]
    assert all(
        holding.choose_format(TensorSpec((4, inputs), use), []) == FLOATS
        for use in uses
    )


def test_only_rows_in_floats_are_quantized() -> None:
    """Queries and keys of a Q3_K_M file stayed in 16 bits, for its values were in Q5_K."""
    holding = Holding(torch.bfloat16, quantized="int4")
    stored: list[tuple[Format, int]] = [
        (FORMS["Q3_K"], 6),
        (FLOATS, 2),
        (FORMS["Q5_K"], 4),
    ]
    assert holding.choose_format(
        TensorSpec((12, 512), "product"), stored
    ) == join_formats([(FORMS["int4"], 8), (FORMS["Q5_K"], 4)])
    assert holding.choose_format(
        TensorSpec((4, 12, 512), "product"), stored * 4
    ) == join_formats([(FORMS["int4"], 8), (FORMS["Q5_K"], 4)])
    plain = Holding(torch.bfloat16).choose_format(
        TensorSpec((12, 512), "product"), stored
    )
    assert plain == join_formats([(HALVES, 8), (FORMS["Q5_K"], 4)])


@pytest.mark.parametrize("name", [form.name for form in OWN_FORMATS])
def test_every_form_has_those_that_take_shorter_rows(name: str) -> None:
    for use in ("product", "head"):
        forms = choose_quantized_formats(name, use)
        assert any(form.fits_inputs(32) for form in forms)
    assert choose_quantized_formats(name, "product")[0].name == name


def test_joined_rows_are_those_of_their_parts() -> None:
    parts: list[tuple[Format, int]] = [
        (FORMS["Q4_K"], 6),
        (FORMS["Q6_K"], 2),
        (HALVES, 4),
    ]
    held = join_formats(parts)
    assert isinstance(held, Joined) and held.name == "Q4_K + Q6_K + bfloat16"
    weight = random_weight(held, 12, 512)
    assert [t.shape for t in held.empty((12, 512), CPU)] == [
        t.shape for t in weight.tensors
    ]
    assert held.num_bytes((12, 512)) == weight.num_bytes
    numbers = weight.dequantize(torch.float32)
    for (form, num), tensor, start in zip(
        parts, weight.tensors, [0, 6, 8], strict=True
    ):
        own = form.dequantize((tensor,), torch.float32)
        assert torch.equal(numbers[start : start + num], own)


def test_neighbours_that_are_alike_are_one_part() -> None:
    same: list[tuple[Format, int]] = [(INT4, 6), (INT4, 2)]
    assert join_formats(same) == INT4
    found: Any = join_formats([*same, (INT8, 1), (INT4, 3)])
    assert (
        found.rows == ((INT4, 8), (INT8, 1), (INT4, 3)) and found.name == "int4 + int8"
    )
    assert join_formats([(INT8, 2), (replace(INT8, name="other"), 2)]) != INT8
    assert join_formats([(HALVES, 6), (HALVES, 2)]) == HALVES
