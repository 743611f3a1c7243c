"""Chooses what computes attention, parts of layers, head and draws: a kernel, or plain torch.

A kernel is tried on a small problem beside plain torch first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fminfer.compute.attention.attention_plan import plan_attention
from fminfer.compute.attention.kernel_attention import KernelAttention
from fminfer.compute.attention.paged_attention import AttentionKernel, PagedAttention
from fminfer.compute.kernels.kernel_build import KernelBuild, may_have_library, start_build
from fminfer.compute.layers.bodies import PartKernels, part_pairs
from fminfer.compute.layers.layer_kernels import LayerKernels
from fminfer.compute.sampling.draw_kernel import DrawKernel, ScoreKernel, draw_pairs, rank_pairs
from fminfer.compute.sampling.head_kernel import HeadKernel, head_pairs
from fminfer.compute.sampling.sampler import Drawer, Racer, Ranker, draw, rank
from fminfer.compute.spec import Attention, Model
from fminfer.compute.trial import Limits, Pair, try_body
from fminfer.core.config import Kernels
from fminfer.core.errors import UsageError
from fminfer.core.messages import StepRow
from fminfer.machine.device import start_openmp_threads

CPU = torch.device("cpu")
# Of the largest expected number. 16 bits round weights and results.
ATTENTION_ERRORS: Limits = {torch.float32: 2e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
PART_ERRORS: Limits = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}
HEAD_ERROR = 1e-4
TOKEN_ERROR = 1e-9  # none: the ids must be the same
RANK_ERROR = 1e-5  # of logits and normalizers; ids are whole numbers up to 3,000
# Of the longer row of a trial: more than a split of the GPU's kernel has. And its rows times KV
# heads: more than two for each of a GPU's multiprocessors, where programs merge their splits.
TRIED_KEYS = {"cpu": 67, "cuda": 327}
TRIED_PROGRAMS = {"cpu": 1, "cuda": 400}


def find_library(
    kernels: Kernels, device: torch.device, build: KernelBuild | None = None
) -> ctypes.CDLL | None:
    """Return the CPU's kernels, waiting for their build; None: not the CPU, or all in plain torch.

    Raises:
        UsageError: --kernels require, and there is none or its trial fails.
    """
    if kernels == "off" or device.type != "cpu":
        return None
    build = build or start_build()
    library = build.library()
    start_openmp_threads()
    if library is None and kernels == "require":
        raise UsageError(f"--kernels require: {build.error}. Use --kernels auto")
    return library


def keeps_bfloat16(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether weights that are stored in bfloat16 stay so while `dtype` is computed.

    It does not wait for the kernels' build, and takes for granted that it succeeds.
    """
    has_library = kernels != "off" and device.type == "cpu" and may_have_library()
    return has_library and dtype == torch.float32


def find_attention(
    kernels: Kernels,
    library: ctypes.CDLL | None,
    model: Model,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[AttentionKernel | None, str]:
    """Return the compiled body of attention, or None and why it is slower than it could be.

    What it gives is compared with plain torch before it is used.

    Args:
        library: the CPU's kernels, as `find_library` gave them.
        model: whose layers attend in one shape.
        block_size: tokens a block of the KV cache.
        dtype: of queries, and of new keys and values.
        kv_dtype: of the KV cache; None: the same.

    Raises:
        UsageError: --kernels require, and there is none or its trial fails.
    """
    if kernels == "off":
        return None, ""
    if library is None and device.type == "cpu":
        return None, start_build().error
    how = model.layers[0].attention
    hows = [layer.attention for layer in model.layers]
    kinds = {(each.window is None, each.has_sinks, each.alibi is None): each for each in hows}
    where: Any = {"dtype": dtype, "device": device}

    def make() -> AttentionKernel:
        if library is not None:
            return KernelAttention(library)
        # Triton comes with torch for CUDA only.
        from fminfer.compute.attention import triton_attention

        return triton_attention.TritonAttention(
            how.heads, *how.cache_shape[1:], **where, kv_dtype=kv_dtype
        )

    def pairs(kernel: AttentionKernel) -> Iterator[Pair]:
        num_keys = TRIED_KEYS[device.type]
        for each in kinds.values():  # a GPU compiles for each
            yield attention_pair(kernel, each, block_size, num_keys, **where, kv_dtype=kv_dtype)

    return try_body("attention", kernels, make, pairs, ATTENTION_ERRORS[dtype])


def find_layers(
    kernels: Kernels,
    library: ctypes.CDLL | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PartKernels | None, str]:
    """Return the compiled parts of layers, or None and why they are slower than they could be.

    Args:
        library: the CPU's kernels, as `find_library` gave them.

    Raises:
        UsageError: --kernels require, and their trial fails.
    """
    if kernels == "off" or (library is None and device.type == "cpu"):
        return None, ""  # `find_attention` says why
    if library is not None and dtype not in LayerKernels.types:
        return None, ""

    def make() -> PartKernels:
        if library is not None:
            return LayerKernels(library)
        from fminfer.compute.layers import triton_layers

        return triton_layers.TritonLayers(device)

    def pairs(parts: PartKernels) -> Iterator[Pair]:
        return part_pairs(parts, dtype, device)

    return try_body("norms and activations", kernels, make, pairs, PART_ERRORS[dtype])


def find_head(
    kernels: Kernels, library: ctypes.CDLL | None, dtype: torch.dtype
) -> tuple[HeadKernel | None, str]:
    """Return the CPU's head, or None and why it is slower than it could be.

    Raises:
        UsageError: --kernels require, and there is none or its trial fails.
    """
    if library is None or dtype not in HeadKernel.types:
        return None, ""
    pairs = partial(head_pairs, dtype=dtype)
    return try_body("head", kernels, lambda: HeadKernel(library), pairs, HEAD_ERROR)


def find_drawer(
    kernels: Kernels, library: ctypes.CDLL | None, device: torch.device
) -> tuple[Drawer, str]:
    """Return what draws tokens, and why it is slower than it could be.

    Raises:
        UsageError: --kernels require, and there is none or its trial fails.
    """
    if library is not None:
        compiled: Callable[[], Drawer] = partial(DrawKernel, library)
        found = try_body("draws", kernels, compiled, draw_pairs, TOKEN_ERROR)
        return found[0] or draw, found[1]
    if kernels == "off" or device.type == "cpu":
        return draw, ""
    from fminfer.compute.sampling import triton_draws

    def make() -> Racer:
        return triton_draws.triton_race

    pairs = partial(triton_draws.race_pairs, device=device)
    racer, problem = try_body("draws", kernels, make, pairs, TOKEN_ERROR)
    return draw if racer is None else partial(draw, racer=racer), problem


def find_ranker(kernels: Kernels, library: ctypes.CDLL | None) -> tuple[Ranker, str]:
    """Return what ranks logits, and why it is slower than it could be.

    Raises:
        UsageError: --kernels require, and the kernel's trial fails.
    """
    if library is None:
        return rank, ""
    compiled: Callable[[], Ranker] = partial(ScoreKernel, library)
    found = try_body("scores", kernels, compiled, rank_pairs, RANK_ERROR)
    return found[0] or rank, found[1]


def attention_pair(
    kernel: AttentionKernel,
    how: Attention,
    block_size: int,
    num_keys: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> Pair:
    """Attend as a layer does with a kernel, and in plain torch in float32 on the CPU.

    Nothing is rounded there but what a KV cache of another type rounds.
    """
    types, num_rows = (dtype, kv_dtype or dtype), -(-TRIED_PROGRAMS[device.type] // how.kv_heads)
    found, expected = (
        _attend_some(body, how, block_size, (num_keys, num_rows), types, where)
        for body, where in ((kernel, device), (None, CPU))
    )
    return found, expected


def _attend_some(
    body: AttentionKernel | None,
    how: Attention,
    block_size: int,
    sizes: tuple[int, int],  # keys of the longer row; rows that share a prefix
    types: tuple[torch.dtype, torch.dtype],  # of queries, and of the KV cache
    device: torch.device,
) -> torch.Tensor:  # (tokens, heads, head_dim) float32, on the CPU
    """Attend from two prompts, a chunk of one beside a token of the other, and some that share."""
    heads, (_, kv_heads, head_dim) = how.heads, how.cache_shape
    (num_keys, num_rows), (dtype, kv_dtype) = sizes, types
    given = dtype if body else torch.float32
    count = -(-(num_keys + 3) // block_size)
    shape = (2 * count + num_rows, block_size, kv_heads, head_dim)
    cache = PagedAttention(*shape, dtype=kv_dtype, device=device, kernel=body)
    cache.keys.fill_(float("nan"))  # what others left there must not matter
    cache.values.fill_(float("nan"))
    blocks = list(range(2 * count))
    first, second = blocks[1::2], blocks[-2::-2]
    part, shared = num_keys * 2 // 5, num_keys // block_size
    has_slopes = how.alibi is not None and not how.keeps_bias
    slopes = torch.linspace(0.01, 0.1, heads, device=device) if has_slopes else None
    generator = torch.Generator().manual_seed(0)
    outs = []
    for rows in (
        [StepRow([0] * num_keys, 0, first), StepRow([0] * part, 0, second)],
        [StepRow([0] * (num_keys // 2), part, second), StepRow([0], num_keys, first)],
        [
            StepRow([0], num_keys + 1, first),
            *(
                StepRow([0], shared * block_size, [*first[:shared], 2 * count + number])
                for number in range(num_rows)
            ),
        ],
    ):
        if body is None:
            cache.plan = plan_attention(rows, block_size, kv_heads, device)
        else:
            cache.plan = body.plan(rows, block_size)
        tokens = sum(len(row.token_ids) for row in rows)
        query, key, value = (
            torch.randn((1, num, tokens, head_dim), generator=generator).to(dtype).to(device, given)
            for num in (heads, kv_heads, kv_heads)
        )
        out = cache(
            *(query, key, value),
            scaling=head_dim**-0.5,
            sliding_window=None if how.window is None else num_keys * 5 // 6,
            alibi_slopes=slopes,
            softcap=how.softcap,
            sinks=torch.linspace(-1, 2, heads, device=device) if how.has_sinks else None,
        )
        outs.append(out[0].float().cpu())
    return torch.cat(outs)
