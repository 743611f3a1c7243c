"""The GPU's kernels: what they give on a GPU, or in triton's interpreter where there is none,
and that they compile for GPUs. `scripts/try_gpu` is for the day when there is a GPU."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fminfer.compute.attention import triton_attention
from fminfer.compute.attention.kernel_attention import (
    StageAttention,
    compute_attention_pairs,
)
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.attention.triton_attention import TileShape, TritonAttention
from fminfer.compute.layers import triton_layers
from fminfer.compute.layers.bodies import PART_ERRORS, compute_part_pairs
from fminfer.compute.layers.triton_layers import (
    TOKENS,
    TritonPartKernels,
    race_in_triton,
)
from fminfer.compute.sampling.draw_kernel import TOKEN_ERROR, compute_draw_pairs
from fminfer.compute.sampling.masks import LogitEditTensors, make_mask_tensors
from fminfer.compute.sampling.sampler import SamplingTensors, draw_tokens, sample_tokens
from fminfer.compute.trial import compare_pairs
from fminfer.compute.values.spec import Alibi
from fminfer.compute.values.step import Rows, make_draws
from fminfer.core.config import Kernels
from fminfer.core.errors import UsageError
from fminfer.engine.noise import make_step_noise
from fminfer.forward.registry import Registry
from fminfer.models.checkpoint import open_random_checkpoint
from fminfer.runtime.load import builder
from tests.compute.test_attention import (
    check_every_kind_of_row,
    check_odd_values,
    check_rows_that_share,
    make_kernel,
)
from tests.compute.test_distribution import mask_of
from tests.conftest import (
    IS_ALL,
    make_model,
    more,
    save_byte_tokenizer,
    span,
    triton_device,
    try_triton,
)
from tests.models.test_oracle import Oracle, check_all, mixed_requests

DEVICE = triton_device()
NO_RESERVE = 0x4000  # Linux; mmap names it from Python 3.13 on
NO_GPU = "CUDA|NVIDIA"  # what torch names that has CUDA, or has not


# The interpreter takes milliseconds for what a GPU does in microseconds: it has shorter rows and
# fewer requests, and what other tests show already is for `scripts/test --all`.
IS_SLOW = DEVICE.type == "cpu" and not IS_ALL
PIECE = 64  # keys at a time, at most
LESS: Any = {"piece": PIECE, "before": 100 if IS_SLOW else 0}
HEADS = 2 if IS_SLOW else 4
FEW_HEADS: Any = {"heads": HEADS, "kv_heads": HEADS // 2}
SHARED: Any = {
    "heads": 4,
    "kv_heads": 2,
    "dim": 16,
    "block": 8,
    "num_rows": 6 if IS_SLOW else 38,
}
SLOW = more if IS_SLOW else []
interpreted = pytest.mark.usefixtures("interpreter")
SHAPES = [
    (4, 2, 16, 8),
    (71, 1, 32, 32),  # falcon-7b: more heads on one than a product of 64 rows has
    (3, 3, 65, 8),  # falcon's ALiBi models
    pytest.param(7, 1, 24, 16, marks=SLOW),  # 7 heads on one: no power of two
]


@interpreted
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), SHAPES)
def test_every_kind_of_row(heads: int, kv_heads: int, dim: int, block: int) -> None:
    shape: Any = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block": block}
    if not IS_SLOW or heads == SHAPES[0][0]:  # below each part is alone for one shape
        check_every_kind_of_row("triton", **shape, **LESS)
    together: Any = {
        "window": 11,
        "slopes": torch.rand(heads),
        "softcap": 0.7,
        "tolerance": 1e-4,
    }
    check_every_kind_of_row("triton", **shape, **LESS, **together)


@interpreted
@pytest.mark.parametrize(
    "how",
    [
        {"window": 6},
        {"softcap": 0.7},
        {"slopes": torch.rand(HEADS)},
        {"sinks": torch.rand(HEADS) * 4},
        {"is_shared": True},
    ],
)
def test_windows_caps_and_slopes_alone(how: dict[str, Any]) -> None:
    check_every_kind_of_row("triton", **how, **LESS, **FEW_HEADS)


@interpreted
def test_a_cache_of_16_bits() -> None:
    """The interpreter multiplies no bfloat16."""
    for dtype in (torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])):
        how: Any = {"dtype": dtype, "tolerance": 0.03, **LESS}
        check_every_kind_of_row("triton", **how)
        check_every_kind_of_row("triton", **how, window=9, heads=12, dim=64)


@interpreted
def test_a_cache_of_another_type() -> None:
    """It rounds keys and values as torch does, and they are read as queries' type."""
    types_of_all = [
        (torch.float32, torch.bfloat16, 5e-5),
        (torch.float16, torch.float32, 0.03),
        (torch.float32, torch.float16, 5e-5),
        (torch.float16, torch.bfloat16, 0.03),
    ]
    for dtype, kv_dtype, tolerance in types_of_all[: 2 if IS_SLOW else None]:
        types: Any = {"dtype": dtype, "kv_dtype": kv_dtype, "tolerance": tolerance}
        check_every_kind_of_row("triton", **types, **LESS, **FEW_HEADS, window=9)
        check_rows_that_share("triton", **SHARED, **types)


@interpreted
@pytest.mark.parametrize(("odd", "window"), [("nan", None), ("inf", None), ("nan", 4)])
def test_a_value_that_is_no_number(odd: str, window: int | None) -> None:
    """It reached earlier tokens of its row, and those whose window had left it behind."""
    check_odd_values("triton", float(odd), window, **FEW_HEADS)


@interpreted
def test_rows_that_share() -> None:
    check_rows_that_share("triton", **SHARED)


def test_tiles() -> None:
    """Chunks are cut where a product's rows are full; a row of one token has a tile of
    its own."""
    kernel = TritonAttention(8, 2, 128, dtype=torch.float16, device=DEVICE)
    rows = Rows.from_tables((10, 35, [7, 3, 9, 8]), (16, 1, [5, 2]))
    plan = kernel.lay_out(rows, 16)
    longest_first = [[32, 3, 42, 0, 45], [16, 16, 26, 0, 45], [0, 16, 10, 0, 45]]
    assert plan.prompt_tiles.tolist() == longest_first, (
        "short ones fill the end of a step"
    )
    assert plan.decode_tiles.tolist() == [[35, 1, 16, 3, 17]]
    assert plan.blocks.tolist() == [7, 3, 9, 5, 2], "only those that hold keys"
    assert plan.slots.tolist()[:7] == [122, 123, 124, 125, 126, 127, 48]
    assert plan.slots.tolist()[-1] == 32


def test_padded_tiles() -> None:
    """A graph's plan is that of its rows, and behind them tiles and slots of no token."""
    kernel = TritonAttention(8, 2, 64, dtype=torch.float16, device=DEVICE)
    rows = Rows.from_tables((16, 1, [5, 2, 8]), (3, 1, [9]), (31, 1, [1, 7]))
    right = kernel.lay_out(rows, 16)
    numbers = torch.cat(
        [torch.from_numpy(each) for each in kernel.lay_out_decode_numbers(rows, 16, 8)]
    )
    found = kernel.make_decode_layout(numbers.to(DEVICE), 8)
    assert not len(found.prompt_tiles)
    assert torch.equal(found.decode_tiles[:3], right.decode_tiles)
    assert torch.equal(found.slots[:3], right.slots)
    assert torch.equal(found.blocks, right.blocks)
    assert found.decode_tiles[3:].tolist() == [
        [place, 0, 0, 0, 0] for place in range(3, 8)
    ]
    assert (found.slots[3:] == -1).all()


# Their attention differs: windows and soft caps, grouped heads, ALiBi, one KV head.
@interpreted
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(pytest.param(each, marks=SLOW) for each in ("llama", "bloom", "falcon")),
    ],
)
def test_greedy_equals_transformers_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)

    requests = mixed_requests()[:12]
    if DEVICE.type == "cpu":
        _interpret(monkeypatch)
        requests = [
            requests[number] | {"max_tokens": min(requests[number]["max_tokens"], 3)}
            for number in (1, 4, 7, 9, 10)
        ]
    options = {"block_size": 16, "kernels": "require", "device": DEVICE.type}
    engine = check_all(tmp_path, Oracle(model), requests, options)
    # Plain torch answers as well, and in silence: the kernels must have been at work.
    assert engine.facts.measured.has_kernel and not engine.facts.measured.why_slower


def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the GPU's kernels used on the CPU, in triton's interpreter."""

    def open_interpreted(
        kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> Registry:
        registry = Registry(kernels, None, dtype, device)
        registry.add_triton()
        registry.of_draws.clear()
        return registry

    monkeypatch.setattr(builder, "open_registry", open_interpreted)


def try_parts(dtype: torch.dtype) -> TritonPartKernels:
    kernels = TritonPartKernels(DEVICE)
    compare_pairs(compute_part_pairs(kernels, dtype, DEVICE), PART_ERRORS[dtype])
    return kernels


def test_triton_is_tested_on_a_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests passed tensors of the CPU, so that on a GPU they showed nothing of its
    kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        triton_attention, "TritonAttention", lambda *shape, **where: where
    )
    kernel, device = make_kernel("triton", 4, 2, 16, torch.float16)
    assert device == torch.device("cuda") and kernel == {
        "dtype": torch.float16,
        "device": device,
    }


@interpreted
def test_draws_are_those_of_the_cpu() -> None:
    """The same tokens, also beside what is hidden or no number."""
    draws = partial(draw_tokens, racer=race_in_triton)
    count = 12
    for vocab in (1, 700, TOKENS, 2 * TOKENS + 3):
        logits = torch.randn(count, vocab) * 3
        logits[1, ::2] = float("-inf")
        logits[2, vocab // 2] = float("nan")
        logits[3] = 1.0
        noise = torch.tensor(
            [-1, 0, 2**63 - 1, *(make_step_noise(b"rows", i) for i in range(count - 3))]
        )
        ways = make_draws(
            range(count),
            temperature=torch.linspace(0.3, 2, count),
            top_p=[1.0, 0.9, 0.5] * 4,
            top_k=[0, 0, 0, 30] * 3,
            min_p=[0.0] * 10 + [0.1] * 2,
            noise=noise,
        )
        how, moved = (
            SamplingTensors.from_draws(ways, each)
            for each in (torch.device("cpu"), DEVICE)
        )
        rows = torch.arange(count)
        found = draws(logits.to(DEVICE), moved, rows.to(DEVICE)).cpu()
        assert torch.equal(found, draw_tokens(logits, how, rows)), vocab


@interpreted
def test_masked_rows_draw_as_on_the_cpu() -> None:
    vocab = TOKENS + 3
    count = 6
    logits = torch.randn(count, vocab) * 3
    bits = mask_of(range(0, vocab, 3))
    few = mask_of([5, 700, vocab - 1])
    places = [0, 1, 1, 0, 1, -1]
    found = []
    for device in (torch.device("cpu"), DEVICE):
        rows, ids = (torch.tensor([2, 4], device=device) for _ in range(2))
        bias, factor, minus = (torch.ones(2, device=device) for _ in range(3))
        edits = LogitEditTensors(
            rows,
            ids,
            bias,
            factor,
            minus,
            rows,
            ids,
            masks=make_mask_tensors([bits, few], places, vocab, device),
        )
        ways = make_draws(
            range(count),
            temperature=[0.0, 1.0, 1.0, 0.7, 1.0, 1.0],
            top_p=[1.0, 1.0, 0.9, 1.0, 1.0, 0.5],
            top_k=[0, 0, 0, 30, 5, 0],
            noise=[make_step_noise(b"rows", i) for i in range(count)],
        )
        how = SamplingTensors.from_draws(ways, device)
        drawer = (
            draw_tokens
            if device.type == "cpu" and not found
            else partial(draw_tokens, racer=race_in_triton)
        )
        draws = sample_tokens(
            logits.to(device), how, 1, edits, tokens=span(logits, drawer=drawer)
        )
        found.append((draws.ids.cpu(), draws.logprobs.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.allclose(
        found[0][1], found[1][1]
    )
    for place, token_id in zip(places, found[0][0].tolist(), strict=True):
        assert place < 0 or (bits, few)[place].bits[token_id >> 3] >> (token_id & 7) & 1


@interpreted
def test_a_race_that_gives_something_else_is_refused() -> None:
    compare_pairs(
        compute_draw_pairs(partial(draw_tokens, racer=race_in_triton), DEVICE),
        TOKEN_ERROR,
    )
    wrong = partial(draw_tokens, racer=lambda *given: race_in_triton(*given) ^ 1)
    with pytest.raises(ValueError, match="off by"):
        compare_pairs(compute_draw_pairs(wrong, DEVICE), TOKEN_ERROR)


@interpreted
def test_blocks_behind_2_to_31_elements() -> None:
    """70,000 blocks of llama-8B's keys have 2.3 thousand million elements: too many for
    32 bits."""
    pool = 70_000
    kv_heads = 8
    block = 32
    dim = 128
    assert pool * kv_heads * block * dim > 2**31
    kernel = TritonAttention(
        kv_heads, kv_heads, dim, dtype=torch.float16, device=DEVICE
    )
    # Only the pages that are written to become memory.
    size = 2 * pool * kv_heads * block * dim
    maps = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | NO_RESERVE) for _ in "kv"]
    keys, values = (
        torch.frombuffer(each, dtype=torch.float16)
        .view(pool, kv_heads, block, dim)
        .to(DEVICE)
        for each in maps
    )
    table = [pool - 1, 3, pool - 2]
    query, key, value = (
        torch.randn(1, kv_heads, 2 * block + 5, dim).half() for _ in range(3)
    )
    rows = kernel.lay_out(Rows.from_tables((0, query.shape[2], table)), block)
    asked = (query.to(DEVICE), key.to(DEVICE), value.to(DEVICE))
    found = (
        kernel(AttentionCall(*asked, keys, values, rows, Scoring(dim**-0.5)))[0]
        .cpu()
        .transpose(0, 1)
    )
    expected = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True
    )[0]
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.01)
    last = keys[pool - 1].cpu()
    assert torch.equal(last, key[0, :, :block]), (
        "the first block's keys are where they belong"
    )


@interpreted
def test_a_kernel_that_gives_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a compiler's fault on some GPU would: one number of all is off.

    The fixture has tried the right one.
    """
    attend = TritonAttention.__call__

    def attend_wrong(*args: Any, **how: Any) -> torch.Tensor:
        out = attend(*args, **how)
        out[0, -1, 1, 5] += 0.01
        return out

    monkeypatch.setattr(TritonAttention, "__call__", attend_wrong)
    with pytest.raises(ValueError, match=r"off by 0\.00"):
        try_triton(torch.float32)

    def attend_to_nan(kernel: object, call: AttentionCall) -> Any:
        return torch.full_like(call.query.transpose(1, 2), torch.nan)

    monkeypatch.setattr(TritonAttention, "__call__", attend_to_nan)
    with pytest.raises(ValueError, match="off by nan"):
        try_triton(torch.float32)


@pytest.mark.parametrize("name", ["norm", "add_and_norm", "rotate", "gate", "gelu"])
def test_a_part_of_a_layer_that_gives_something_else_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_parts(torch.float16)
    compute = getattr(TritonPartKernels, name)

    def compute_wrong(*args: Any) -> Any:
        found = compute(*args)
        part = found[-1] if isinstance(found, tuple) else found
        part[..., -1] *= 1.02
        return found

    monkeypatch.setattr(TritonPartKernels, name, compute_wrong)
    with pytest.raises(ValueError, match="off by"):
        try_parts(torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_the_kernel_cannot_be_tried_plain_torch_attends() -> None:
    how = open_random_checkpoint("llama-160m").model.layers[0].attention
    kinds: dict[str, Callable[[Registry], Any]] = {
        "attention": lambda registry: registry.choose_attention(
            [how], 32, torch.float16
        ),
        "norms and activations": lambda registry: registry.parts.kernels,
        "draws": lambda registry: registry.choose_drawer(),
    }
    for name, find in kinds.items():
        plain = draw_tokens if name == "draws" else None
        registry = on_gpu("auto")
        assert find(registry) is plain
        assert re.search(f"{name}: .*({NO_GPU})", registry.why_plain)
        registry = on_gpu("off")
        assert find(registry) is plain and registry.why_plain == ""
        with pytest.raises(
            UsageError, match=f"--kernels require: {name}: .*({NO_GPU})"
        ):
            find(on_gpu("require"))


def on_gpu(kernels: Kernels, dtype: torch.dtype = torch.float16) -> Registry:
    """Return the registry of a GPU, which need not be there."""
    return Registry(kernels, None, dtype, torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_trial_that_breaks_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an access to wrong memory plain torch would fail as well, and say nothing of why."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(
        UsageError, match=r"norms and activations: .* Use --kernels off"
    ):
        _ = on_gpu("auto").parts


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("CUDA error: no kernel image\nFor debugging consider"),
            r"no kernel image\)",
        ),
        (
            RuntimeError("at 3:12:\n    x = y + z\n    ^\ninvalid operands"),
            "at 3:12: invalid operands",
        ),
        (
            AssertionError("keys of a step"),
            "a fault of fminfer's, please report it: AssertionError: keys",
        ),
        (
            KeyError(torch.float8_e5m2),
            "a fault of fminfer's, please report it: KeyError",
        ),
    ],
)
def test_why_a_kernel_is_not_used_is_told(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Triton's errors only the place was told, and our own faults looked like a machine's."""

    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(triton_layers, "TritonPartKernels", fail)
    registry = on_gpu("auto")
    assert registry.parts.kernels is None and re.search(told, registry.why_plain)
    with pytest.raises(UsageError, match=told):
        _ = on_gpu("require").parts


COMPILE = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fminfer.compute.attention import triton_attention
from fminfer.compute.attention.triton_attention import TritonAttention
from fminfer.compute.layers.triton_layers import TOKENS
from fminfer.compute.kernels.triton_kernels import attend_kernel, gate_kernel, join_kernel
from fminfer.compute.kernels.triton_kernels import norm_kernel, race_kernel, rotate_kernel
from fminfer.compute.kernels.triton_kernels import store_kernel

STRIDES = ["query_head", "query_token", "key_head", "key_token", "value_head", "value_token"]
OPTIONS = ["num_warps", "num_stages", "enable_fp_fusion"]
names = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
room, capability, count = map(int, sys.argv[1:])
found = []
triton_attention._find_shared_bytes = lambda device: room << 10

def add(source, options):
    made = compile(source, GPUTarget("cuda", capability, 32), options)
    found.append([len(made.asm["cubin"]), made.metadata.shared])

SHAPES = (
    (32, 8, 128, torch.bfloat16, torch.bfloat16), (3, 3, 65, torch.float16, torch.float16),
    (8, 1, 256, torch.float32, torch.bfloat16), (12, 12, 64, torch.float16, torch.float16),
    (3, 3, 65, torch.float32, torch.float32), (8, 1, 256, torch.float32, torch.float32),
    (32, 8, 128, torch.bfloat16, torch.float32), (8, 4, 256, torch.bfloat16, torch.bfloat16),
)
for heads, kv_heads, dim, dtype, kv_dtype in SHAPES[:count]:
    kernel = TritonAttention(
        heads, kv_heads, dim, dtype=dtype, kv_dtype=kv_dtype, device=torch.device("cpu")
    )
    data = dict.fromkeys(["query", "out"], names[dtype])
    data |= dict.fromkeys(["keys", "values", "new_keys", "new_values"], names[kv_dtype])
    data |= dict.fromkeys(["parts", "marks"], "*fp32")
    has = {"HAS_SINKS": dim < 128, "HAS_WINDOW": dim == 65}  # llama's, as most, has none
    attended = {"HAS_CAP": dim < 128, "HAS_SLOPES": dim == 65, **has}
    attended["HAS_RELATIVE"] = dim == 65 or dtype != kv_dtype
    jobs = [
        (store_kernel, {**kernel.shape_constants(32), "num_warps": 1}),
        (join_kernel, {**kernel.join_constants(), **has}),
        (attend_kernel, {**kernel.attend_constants(32, is_one=False), **attended}),
        (attend_kernel, {**kernel.attend_constants(32, is_one=True), **attended}),
    ]
    for function, constants in jobs:
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        types = {name: "i32" for name in function.arg_names}
        types |= {"scaling": "fp32", "softcap": "fp32"} if function is attend_kernel else {}
        pointers = data | dict.fromkeys(["slots", "tiles", "blocks"], "*i32")
        pointers |= dict.fromkeys(["slopes", "sinks", "relative"], "*fp32")
        types |= {name: kind for name, kind in pointers.items() if name in types}
        types |= dict.fromkeys(constants, "constexpr")
        # As at a launch: torch's memory is aligned, and so are rows of 16 numbers.
        aligned = [*data, *(STRIDES if dim % 16 == 0 else [])]
        numbers = [i for i, name in enumerate(function.arg_names) if name in aligned]
        attrs = {(i,): [["tt.divisibility", 16]] for i in numbers}
        add(ASTSource(function, types, constants, attrs), options)
norm_numbers = {"eps": "fp32", "offset": "fp32"}
for name in ("*bf16", "*fp32", "*fp16")[:count]:
    for function, constants, numbers in (
        (norm_kernel, {"WIDTH": 4096, "SIZE": 4096, "ADDS": True}, norm_numbers),
        (norm_kernel, {"WIDTH": 80, "SIZE": 128, "ADDS": False}, norm_numbers),
        (rotate_kernel, {"WIDTH": 128, "TURNED": 128, "SIZE": 64, "REST": 0}, {}),
        (rotate_kernel, {"WIDTH": 80, "TURNED": 20, "SIZE": 16, "REST": 64}, {}),
        (gate_kernel, {"IS_SILU": True, "GATES": True, "SIZE": 1024}, {}),
        (gate_kernel, {"IS_SILU": False, "GATES": False, "SIZE": 1024}, {}),
    ):
        data = ["x", "other", "both", "out", "weight", "cos", "sin", "second"]
        types = {each: name if each in data else "i32" for each in function.arg_names}
        types |= numbers | dict.fromkeys(constants, "constexpr")
        add(ASTSource(function, types, constants, {}), {"num_warps": 4})
types = {"scaled": "*fp32", "noise": "*i64", "scores": "*fp64", "winners": "*i64"}
types |= {"vocab": "i32", "first_id": "i32"}
race = ASTSource(race_kernel, types | {"SIZE": "constexpr"}, {"SIZE": TOKENS}, {})
add(race, {"num_warps": 8})
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("capability", "room", "count"),  # shapes and types, at most
    [
        (90, 163, 3),
        *(
            pytest.param(*each, 8, marks=more)
            for each in ((80, 163), (86, 99), (90, 163))
        ),
    ],
)
def test_the_kernels_compile_for_gpus(
    capability: int, room: int, count: int, tmp_path: Path
) -> None:
    """Programs fit the KB of A100, of small Amperes and Adas, and of Hopper."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-c", COMPILE, *map(str, (room, capability, count))]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    found = json.loads(said.stdout)
    assert len(found) == 4 * count + 6 * min(count, 3) + 1
    for number, (size, shared) in enumerate(found):
        assert size > 1000 and shared <= room << 10, (number, shared)


def test_tiles_are_as_large_as_registers_and_shared_memory_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With four warps a program of 64 queries of 256 elements spilled 2.4 KB of registers."""
    cpu = torch.device("cpu")
    for dim, dtype, room, prompt, decode in (
        (64, torch.bfloat16, 163, TileShape(128, 64, 4, 2), TileShape(16, 32, 2, 3)),
        (128, torch.bfloat16, 163, TileShape(64, 64, 4, 2), TileShape(16, 32, 2, 3)),
        (128, torch.bfloat16, 99, TileShape(64, 64, 4, 1), TileShape(16, 32, 2, 3)),
        (256, torch.float16, 163, TileShape(64, 64, 8, 1), TileShape(16, 32, 4, 2)),
        (256, torch.float16, 99, TileShape(64, 32, 8, 1), TileShape(16, 32, 4, 2)),
        (128, torch.float32, 99, TileShape(16, 32, 4, 1), TileShape(16, 32, 4, 2)),
    ):
        monkeypatch.setattr(
            triton_attention, "_find_shared_bytes", lambda device, kb=room: kb << 10
        )
        kernel = TritonAttention(8, 2, dim, dtype=dtype, device=cpu)
        assert (kernel.prompt, kernel.decode) == (prompt, decode), (dim, dtype, room)


@interpreted
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"window": 170, "sinks": True, "slopes": True},
        *(
            pytest.param(each, marks=SLOW)
            for each in ({"slopes": True, "softcap": 0.7},)
        ),
    ],
)
def test_a_row_has_the_same_result_in_any_number_of_programs(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: alone its splits are in programs of their own, beside many others in one."""
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    monkeypatch.setattr(triton_attention, "SPLITS", 4)
    monkeypatch.setattr(triton_attention, "_count_processors", lambda device: 4)
    kernel = TritonAttention(4, 2, 24, dtype=torch.float32, device=DEVICE)
    lengths = [180, 300, 64, 65]
    block = 16
    count = 3 + kernel.full_rows
    tables = [
        [*range(20 * row, 20 * row + -(-size // block))]
        for row, size in enumerate(lengths)
    ]
    long = ((len_ - 1, 1, table) for len_, table in zip(lengths, tables, strict=True))
    rows = Rows.from_tables(
        *long, *((number % 16, 1, [80 + number]) for number in range(count))
    )
    torch.manual_seed(0)
    keys, values = (torch.randn(80 + count, 2, block, 24).to(DEVICE) for _ in "kv")
    query, key, value = (
        torch.randn(1, heads, len(rows), 24).to(DEVICE) for heads in (4, 2, 2)
    )
    names = {
        name: torch.rand(4).to(DEVICE) for name in ("slopes", "sinks") if name in limits
    }
    how = Scoring(0.2, **(limits | names))

    def attend(picked: list[int]) -> torch.Tensor:
        new = (each[:, :, picked] for each in (query, key, value))
        plan = kernel.lay_out(rows.select(picked), block)
        return kernel(AttentionCall(*new, keys, values, plan, how))[0]

    joins: list[int] = []
    count_joins(monkeypatch, joins)
    together = attend([*range(len(rows))])
    assert not joins, "one program walks all splits"
    for number in range(len(lengths)):
        alone = attend([number])[0]
        assert torch.equal(alone, together[number]), lengths[number]
    assert len(joins) == len(lengths)
    # The split row is right, too.
    seen = (
        cache[tables[1]].transpose(0, 1).flatten(1, 2)[:, :300]
        for cache in (keys, values)
    )
    if not limits:
        expected = scaled_dot_product_attention(
            query[0, :, 1:2],
            *(each.repeat_interleave(2, 0) for each in seen),
            scale=0.2,
        )
        torch.testing.assert_close(together[1], expected[:, 0], atol=1e-5, rtol=1e-5)


def count_joins(monkeypatch: pytest.MonkeyPatch, joins: list[int]) -> None:
    """Note each launch of `join_kernel`, with its tiles."""
    kernel = triton_attention.join_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            joins.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(triton_attention, "join_kernel", Counted())


@interpreted
def test_a_tile_without_tokens_reads_and_writes_nothing() -> None:
    """CUDA graphs have as many tiles as their bucket; those that no row needs have no tokens."""
    kernel = TritonAttention(4, 2, 16, dtype=torch.float32, device=DEVICE)
    block = 16
    keys, values = (torch.randn(4, 2, block, 16).to(DEVICE) for _ in "kv")
    given = [torch.randn(1, heads, 2, 16).to(DEVICE) for heads in (4, 2, 2)]
    how = Scoring(0.25)
    rows = Rows.from_tables((20, 1, [1, 2]), (5, 1, [3]))
    expected = kernel(
        AttentionCall(*given, keys, values, kernel.lay_out(rows, block), how)
    )
    for size in (3, 2 + kernel.full_rows):
        plan = kernel.lay_out(rows, block)
        padded = plan.decode_tiles.new_zeros(size, 5)
        padded[:2] = plan.decode_tiles
        padded[2:, 2:] = torch.tensor(
            [10**9, 2**30, 10**9]
        )  # a row far away, which would be a fault
        padded_plan = replace(plan, decode_tiles=padded)
        found = kernel(AttentionCall(*given, keys, values, padded_plan, how))
        assert torch.equal(found, expected), size


def test_keys_too_wide_for_a_gpu_are_refused_at_once() -> None:
    """DeepSeek's, of 576 elements, compiled for minutes, and then did not fit."""
    how = open_random_checkpoint("deepseek-v3").model.layers[0].attention
    registry = on_gpu("auto", torch.bfloat16)
    assert registry.choose_attention([how], 32, torch.bfloat16) is None
    problem = registry.why_plain
    assert "keys of 576 elements" in problem and "up to 256" in problem


def test_models_are_tried_only_with_what_their_layers_have() -> None:
    """A GPU compiled attention with windows, slopes and sinks, of which most models
    have none."""
    tried: list[tuple[bool, ...]] = []

    class Kernel:
        def lay_out(self, rows: Any, block_size: int) -> str:
            return "of this kernel"

        def __call__(self, call: AttentionCall) -> Any:
            how = call.scoring
            of_layer = (how.window, how.slopes, how.sinks, how.softcap)
            tried.append(tuple(each is not None for each in of_layer))
            return call.query.transpose(1, 2)

    where: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    plain = open_random_checkpoint("llama-160m").model.layers[0].attention
    for limits, expected in (
        ([{}], {(False, False, False, False)}),
        ([{"alibi": Alibi((0.1,) * 12)}], {(False, True, False, False)}),
        (
            [{"softcap": 5.0, "window": 8}, {"softcap": 5.0}],
            {(True, False, False, True), (False, False, False, True)},
        ),
        (
            [{"has_sinks": True, "window": 8}, {"has_sinks": True}],
            {(True, False, True, False), (False, False, True, False)},
        ),
    ):
        tried.clear()
        kinds = tuple(replace(plain, **each) for each in limits)
        asked = StageAttention(2 * kinds, 32, torch.float32)
        list(compute_attention_pairs(Kernel(), asked, 67, **where))
        assert set(tried) == expected and len(tried) == 3 * len(limits), limits
