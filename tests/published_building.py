"""Writes quantized checkpoints as others publish them, and reads them in plain numpy.

Each `store_…` rounds a matrix, (outputs, inputs), and returns its stored tensors by the endings
of their names. Each `read_…` makes floats of these, word for word as the layouts are described.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fminfer.models.checkpoint import Checkpoint
from fminfer.models.origins import Parts, find_stored_model
from tests.conftest import make_model, model_class, save_byte_tokenizer

Stored = dict[str, torch.Tensor]
Store = Callable[[torch.Tensor], Stored]
Read = Callable[[Stored], np.ndarray]
# The output that has the number in each place of a word, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> Any:
    """Pack each row's numbers into words of 32 bits, from the lowest bits on."""
    num = 32 // bits
    padding = -numbers.shape[-1] % num
    padded = np.pad(numbers, ((0, 0), (0, padding))).astype(np.uint64)
    groups = padded.reshape(len(padded), -1, num)
    words = np.zeros(groups.shape[:2], np.uint64)
    for place, which in enumerate(order or range(num)):
        words |= groups[..., which] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def unpack_words(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> Any:
    """Return each row's numbers of words."""
    stored = words.numpy().view(np.uint32)
    num = 32 // bits
    numbers = np.zeros((*stored.shape, num), np.int64)
    for place, which in enumerate(order or range(num)):
        numbers[..., which] = (stored >> np.uint32(bits * place)) & ((1 << bits) - 1)
    return numbers.reshape(len(stored), -1)


def round_groups(
    weight: torch.Tensor,
    bits: int,
    groups: np.ndarray,
    *,
    is_symmetric: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers (outputs, inputs), scales in float16 and zeros (outputs, groups).

    `groups` has the group of each input.
    """
    values = weight.numpy().astype(np.float64)
    most = (1 << bits) - 1
    shape = (len(values), int(groups.max()) + 1)
    scales = np.zeros(shape, np.float16)
    zeros = np.zeros(shape, np.int64)
    numbers = np.zeros(values.shape, np.int64)
    for group in range(shape[1]):
        of_group = groups == group
        part = values[:, of_group]
        least = np.minimum(part.min(1), 0)
        largest = np.maximum(part.max(1), 0)
        if is_symmetric:
            largest = np.abs(part).max(1)
            least = -largest
        scale = ((largest - least) / most + 1e-6).astype(np.float16)
        zero = np.round(-least / scale.astype(np.float64)).clip(1, most)
        if is_symmetric:
            zero[:] = 1 << (bits - 1)
        rounded = np.round(part / scale.astype(np.float64)[:, None] + zero[:, None])
        numbers[:, of_group] = rounded.clip(0, most)
        scales[:, group] = scale
        zeros[:, group] = zero
    return numbers, scales, zeros


def in_order(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs) // (group or inputs)


def drawn_order(inputs: int, group: int, seed: int) -> np.ndarray:
    """Return groups of as many inputs each, which lie anywhere in a row."""
    return np.random.default_rng(seed).permutation(in_order(inputs, group))


def store_gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    version: int = 1,
    seed: int | None = None,
) -> Stored:
    """`seed`: of an order of inputs; None: they lie in order."""
    inputs = weight.shape[1]
    groups = (
        in_order(inputs, group) if seed is None else drawn_order(inputs, group, seed)
    )
    numbers, scales, zeros = round_groups(weight, bits, groups)
    if version == 1:
        zeros = (zeros - 1) % (1 << bits)
    return {
        "qweight": pack_words(numbers, bits).T.contiguous(),
        "qzeros": pack_words(zeros.T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def read_gptq(stored: Stored, bits: int = 4, *, version: int = 1) -> np.ndarray:
    numbers = unpack_words(stored["qweight"].T.contiguous(), bits)
    zeros = unpack_words(stored["qzeros"], bits).T
    zeros = (zeros + (version == 1)) % (1 << bits)
    groups = stored["g_idx"].numpy()
    scales = stored["scales"].float().numpy().T
    zeros = zeros[: len(numbers)]  # a word may have room for more
    return scales[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)


def store_awq(weight: torch.Tensor, group: int = 32) -> Stored:
    numbers, scales, zeros = round_groups(weight, 4, in_order(weight.shape[1], group))
    return {
        "qweight": pack_words(numbers.T, 4, AWQ_ORDER),
        "qzeros": pack_words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }


def read_awq(stored: Stored) -> np.ndarray:
    numbers = unpack_words(stored["qweight"], 4, AWQ_ORDER).T
    zeros = unpack_words(stored["qzeros"], 4, AWQ_ORDER).T
    scales = stored["scales"].float().numpy().T
    groups = in_order(numbers.shape[1], numbers.shape[1] // scales.shape[1])
    return scales[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)


def store_packed(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    is_symmetric: bool = False,
    seed: int | None = None,
) -> Stored:
    """Of compressed-tensors: numbers and zeros have the middle added."""
    outputs, inputs = weight.shape
    groups = (
        in_order(inputs, group) if seed is None else drawn_order(inputs, group, seed)
    )
    numbers, scales, zeros = round_groups(
        weight, bits, groups, is_symmetric=is_symmetric
    )
    stored = {
        "weight_packed": pack_words(numbers, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not is_symmetric:
        stored["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
    if seed is not None:
        stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return stored


def read_packed(stored: Stored, bits: int = 4, group: int = 32) -> np.ndarray:
    outputs, inputs = stored["weight_shape"].tolist()
    numbers = unpack_words(stored["weight_packed"], bits)[:, :inputs]
    scales = stored["weight_scale"].float().numpy()
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if "weight_zero_point" in stored:
        words = stored["weight_zero_point"].T.contiguous()
        zeros = unpack_words(words, bits)[:, :outputs].T
    groups = in_order(inputs, group)
    if "weight_g_idx" in stored:
        groups = stored["weight_g_idx"].numpy()
    return scales[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)


def store_bytes(
    weight: torch.Tensor, group: int = 0, *, is_symmetric: bool = True
) -> Stored:
    """Of compressed-tensors: int8."""
    groups = in_order(weight.shape[1], group)
    numbers, scales, zeros = round_groups(weight, 8, groups, is_symmetric=is_symmetric)
    stored = {
        "weight": torch.from_numpy((numbers - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales).float(),
    }
    if not is_symmetric:
        stored["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return stored


def read_bytes(stored: Stored) -> np.ndarray:
    numbers = stored["weight"].numpy().astype(np.int64)
    scales = stored["weight_scale"].float().numpy()
    zeros = stored.get("weight_zero_point", torch.zeros(scales.shape)).numpy()
    groups = in_order(numbers.shape[1], -(-numbers.shape[1] // scales.shape[1]))
    return scales[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)


def store_float8(
    weight: torch.Tensor,
    tile: tuple[int, int] = (128, 128),
    name: str = "weight_scale_inv",
) -> Stored:
    """`tile`: outputs and inputs that share a scale; 0: all."""
    rows = tile[0] or weight.shape[0]
    columns = tile[1] or weight.shape[1]
    shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    scales = torch.zeros(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            part = _tile_of(weight, row, column, rows, columns)
            scales[row, column] = part.abs().max() / 448
    wide = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    stored_scales = scales.reshape(()) if tile == (0, 0) else scales
    return {"weight": (weight / wide).to(torch.float8_e4m3fn), name: stored_scales}


def _tile_of(
    weight: torch.Tensor, row: int, column: int, rows: int, columns: int
) -> torch.Tensor:
    return weight[
        row * rows : (row + 1) * rows, column * columns : (column + 1) * columns
    ]


def read_float8(stored: Stored, tile: tuple[int, int] = (128, 128)) -> np.ndarray:
    weight = stored["weight"].float()
    (name,) = stored.keys() - {"weight"}
    rows = tile[0] or weight.shape[0]
    columns = tile[1] or weight.shape[1]
    scales = stored[name].float().reshape(-1, -(-weight.shape[1] // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            _tile_of(weight, row, column, rows, columns).mul_(scales[row, column])
    return weight.numpy()


def store_mxfp4(weight: torch.Tensor) -> Stored:
    """Of experts, (experts, outputs, inputs): neighbours in a byte, the first one low."""
    groups = weight.unflatten(-1, (-1, 32))  # type: ignore[no-untyped-call]
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-100, 100)
    numbers = _round_fp4(groups / exponents.exp2()[..., None])
    return {
        "blocks": numbers[..., ::2] | numbers[..., 1::2] << 4,
        "scales": (exponents + 127).to(torch.uint8),
    }


def _round_fp4(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers of 4 bits: a sign, and one of eight values."""
    table = torch.tensor(FP4)
    nearest = (values.abs()[..., None] - table).abs().argmin(-1)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def store_nvfp4(weight: torch.Tensor) -> Stored:
    """Of compressed-tensors: a scale in e4m3 for 16 inputs, divided by one of the tensor."""
    groups = weight.unflatten(-1, (-1, 16))  # type: ignore[no-untyped-call]
    tensor_scale = 448 * 6 / weight.abs().max()
    scales = (groups.abs().amax(-1) / 6 * tensor_scale).to(torch.float8_e4m3fn)
    wide = (scales.float() / tensor_scale).clamp(1e-9)[..., None]
    numbers = _round_fp4(groups / wide).flatten(-2)
    return {
        "weight_packed": numbers[..., ::2] | numbers[..., 1::2] << 4,
        "weight_scale": scales,
        "weight_global_scale": tensor_scale.reshape(1),
    }


def read_nvfp4(stored: Stored) -> np.ndarray:
    packed = stored["weight_packed"].numpy()
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = np.array((*FP4, *(-each for each in FP4)), np.float32)[numbers]
    scales = stored["weight_scale"].float() / stored["weight_global_scale"]
    return values * scales.numpy().repeat(16, 1)


# How a matrix is stored, and read; a name gives None if it stays as it is.
Choose = Callable[[str], tuple[Store, Read] | None]
SKIPPED = ("lm_head", "embed_tokens", "gate.weight", "router", "norm")


def with_each(store: Store, read: Read) -> Choose:
    """Store each matrix of layers so, but routers."""

    def choose(name: str) -> tuple[Store, Read] | None:
        return None if any(each in name for each in SKIPPED) else (store, read)

    return choose


def publish(
    name: str,
    folder: Path,
    quantization: Mapping[str, Any],
    choose: Choose,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Path, Any]:
    """Save FIELDS[name] as a published checkpoint; return it, and the dequantized model."""
    model = make_model(name)
    mine = folder / "published"
    theirs = folder / "floats"
    for each in (mine, theirs):
        model.save_pretrained(each)
    save_byte_tokenizer(mine)
    tensors = load_file(theirs / "model.safetensors")
    published: Stored = {}
    for stored_name, tensor in tensors.items():
        chosen = choose(stored_name) if tensor.dim() == 2 else None
        if chosen is None:
            published[stored_name] = tensor
            continue
        store, read = chosen
        parts = store(tensor)
        stem = stored_name.removesuffix("weight")
        published |= {stem + leaf: part.contiguous() for leaf, part in parts.items()}
        tensors[stored_name] = torch.from_numpy(np.ascontiguousarray(read(parts)))
    save_file(published | dict(extra or {}), mine / "model.safetensors")
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    write_quantization(mine, quantization)
    return mine, load_floats(theirs, model)


def load_floats(folder: Path, like: Any) -> Any:
    """Return transformers' model of a folder in float32."""
    model = model_class(like.config).from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = like.config._attn_implementation
    return model.eval()


def write_quantization(folder: Path, quantization: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": dict(quantization)}
    path.write_text(json.dumps(fields))


def compressed(stored_format: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ_4 = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
W4A16 = compressed(
    "pack-quantized",
    num_bits=4,
    type="int",
    symmetric=False,
    strategy="group",
    group_size=32,
    actorder=None,
    dynamic=False,
    observer="minmax",
)
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
W8 = {"num_bits": 8, "dynamic": False, "symmetric": True}
CASES: dict[str, tuple[Mapping[str, Any], Choose]] = {
    "gptq": (GPTQ_4, with_each(store_gptq, read_gptq)),
    "gptq 8 bits v2": (
        GPTQ_4 | {"bits": 8, "checkpoint_format": "gptq_v2"},
        with_each(
            partial(store_gptq, bits=8, version=2),
            partial(read_gptq, bits=8, version=2),
        ),
    ),
    "gptq of rows": (
        GPTQ_4 | {"group_size": -1, "sym": False},
        with_each(partial(store_gptq, group=0), read_gptq),
    ),
    "gptq in act-order": (
        GPTQ_4 | {"desc_act": True},
        with_each(partial(store_gptq, seed=1), read_gptq),
    ),
    "awq": (AWQ_4, with_each(store_awq, read_awq)),
    "packed": (W4A16, with_each(store_packed, read_packed)),
    "packed 8 bits": (
        compressed("pack-quantized", **W8, type="int", strategy="channel"),
        with_each(
            partial(store_packed, bits=8, group=0, is_symmetric=True),
            partial(read_packed, bits=8, group=0),
        ),
    ),
    "packed in act-order": (
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            symmetric=True,
            strategy="group",
            group_size=32,
            actorder="group",
        ),
        with_each(partial(store_packed, is_symmetric=True, seed=2), read_packed),
    ),
    "int8": (
        compressed("int-quantized", **W8, type="int", strategy="channel"),
        with_each(store_bytes, read_bytes),
    ),
    "int8 with zeros": (
        compressed(
            "int-quantized",
            num_bits=8,
            type="int",
            symmetric=False,
            strategy="group",
            group_size=32,
        ),
        with_each(
            partial(store_bytes, group=32, is_symmetric=False),
            read_bytes,
        ),
    ),
    "fp8": (FP8, with_each(store_float8, read_float8)),
    "fp8 of tensors": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        with_each(
            partial(store_float8, tile=(0, 0), name="weight_scale"),
            partial(read_float8, tile=(0, 0)),
        ),
    ),
    "fp8 of channels": (
        compressed("float-quantized", **W8, type="float", strategy="channel"),
        with_each(
            partial(store_float8, tile=(1, 0), name="weight_scale"),
            partial(read_float8, tile=(1, 0)),
        ),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        with_each(
            partial(store_float8, tile=(1, 0), name="weight_scale"),
            partial(read_float8, tile=(1, 0)),
        ),
    ),
    "nvfp4": (
        compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            symmetric=True,
            strategy="tensor_group",
            group_size=16,
        ),
        with_each(store_nvfp4, read_nvfp4),
    ),
}


def list_stored_formats(checkpoint: Checkpoint) -> dict[str, Parts]:
    """Return the formats in which each tensor is stored, or will be."""
    stored = find_stored_model(checkpoint)
    assert stored is not None, "a model in files"
    return stored.list_formats()
