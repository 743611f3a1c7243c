"""Phase 2: the GPU's norms, rotary positions and gates beside float64."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from benchmarks.gpu import references
from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, expect
from benchmarks.gpu.processes import END_S, run_within
from fminfer.compute.attention.kernel_attention import (
    StageAttention,
    make_attention_trial,
)
from fminfer.compute.attention.triton_attention import TritonAttention
from fminfer.compute.layers.bodies import GELU_TANH, SILU, NormWeights, make_part_trial
from fminfer.compute.layers.triton_layers import TritonPartKernels, race_in_triton
from fminfer.compute.sampling.draw_kernel import TOKEN_ERROR, compute_draw_pairs
from fminfer.compute.sampling.sampler import draw_tokens
from fminfer.compute.trial import compare_pairs
from fminfer.compute.values.spec import Attention, Norm

WIDTHS = {"cuda": (64, 80, 4096, 5120, 14336), "cpu": (64, 80)}
TOKENS = {"cuda": (1, 7, 512), "cpu": (1, 3)}
TYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.float32, torch.float16),
}
# of a head, of it turned
HEAD_DIMS = ((64, 64), (80, 80), (128, 128), (256, 256), (80, 20))
EPS = 1e-5
# Of the largest number; the second is what rounding once gives, and a half more.
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TOOL = "compute-sanitizer"
TOOL_FOLDER = "/usr/local/cuda/bin"  # where it is without being on the PATH
TORCHS = "_ZN2at"  # begins the names of torch's kernels, which are left out


def cases(setting: Setting) -> Iterator[Case]:
    kind = setting.device
    for dtype in TYPES[kind]:
        for width in WIDTHS[kind]:
            name = f"norms and gates of {width} {str(dtype)[6:]}"
            yield Case(name, partial(check_width, kind, width, dtype))
        yield Case(
            f"rotary positions {str(dtype)[6:]}", partial(check_turns, kind, dtype)
        )
    end_s = time.monotonic() + setting.seconds
    yield Case(TOOL, partial(watch_accesses, setting, end_s))


@torch.inference_mode()
def check_width(kind: str, width: int, dtype: torch.dtype) -> Figures:
    """Compare norms, a sum with its norm, and gated activations."""
    device = torch.device(kind)
    kernels = TritonPartKernels(device)
    errors = list[float]()
    is_equal = True  # whether a sum and its norm are the same in one kernel and in two
    torch.manual_seed(0)
    for tokens in TOKENS[kind]:
        x, other = (
            torch.randn(tokens, width, device=device).to(dtype) for _ in ("x", "y")
        )
        weight = torch.randn(width, device=device).to(dtype)
        for offset in (0.0, 1.0):
            own = NormWeights(Norm(EPS, offset=offset), weight, None)
            normed = kernels.norm(x, own)
            errors.append(_error(normed, references.rms_norm(x, weight, EPS, offset)))
            both, in_one = kernels.add_and_norm(x, other, own)
            errors.append(_error(both, (x + other).double()))
            errors.append(
                _error(in_one, references.rms_norm(both, weight, EPS, offset))
            )
            is_equal &= torch.equal(in_one, kernels.norm(both, own))
        pair = torch.cat([x, other], -1)
        wide = x.double()
        second = other.double()
        errors.append(_error(kernels.gate(pair, SILU), silu(wide) * second))
        bent = gelu(wide, approximate="tanh")
        errors.append(_error(kernels.gate(pair, GELU_TANH), bent * second))
        errors.append(_error(kernels.gelu(x, GELU_TANH), bent))
    return _judge(errors, dtype) | {"one kernel equals two": is_equal}


@torch.inference_mode()
def check_turns(kind: str, dtype: torch.dtype) -> Figures:
    """Compare rotary positions of whole heads and of parts of them."""
    device = torch.device(kind)
    kernels = TritonPartKernels(device)
    errors = list[float]()
    torch.manual_seed(0)
    for width, turned in HEAD_DIMS if kind == "cuda" else HEAD_DIMS[-2:]:
        for tokens in TOKENS[kind]:
            x = torch.randn(tokens, 3, width + 5, device=device).to(dtype)[..., :width]
            angles = torch.randn(tokens, turned // 2, device=device)
            turns = torch.stack([angles.cos(), angles.sin()])
            expected = references.rotate(x, *turns.repeat(1, 1, 2))
            errors.append(_error(kernels.rotate(x, turns), expected))
    return _judge(errors, dtype)


def watch_accesses(setting: Setting, end_s: float) -> Figures:
    """Run our kernels under NVIDIA's tool, which sees every access outside of an allocation."""
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=TOOL_FOLDER)
    command = [sys.executable, "-m", __spec__.name]
    environ = {**os.environ}
    if not setting.is_tiny:
        if tool is None:
            raise Skipped(f"no {TOOL} on the PATH or in {TOOL_FOLDER}")
        how = ["--error-exitcode", "9", "--kernel-name-exclude", f"kns={TORCHS}"]
        # torch and Triton ask for symbols that may be missing
        how += ["--report-api-errors", "no"]
        command = [tool, "--tool", "memcheck", *how, *command]
        # Each tensor has an allocation of its own then, so that one's end is seen.
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    limit = end_s - time.monotonic() - END_S
    found = run_within(command, limit, environ)
    told = found.out + found.err
    if found.status is None:
        raise Skipped(f"not done after {limit:.0f} s: {told[-500:]}")
    if "Device not supported" in told:
        raise Skipped(f"{TOOL}: Device not supported")
    expect(found.status == 0, told[-3000:])
    return {"told": found.out.strip().splitlines()[-1]}


@torch.inference_mode()
def try_kernels(device: torch.device) -> None:
    """Compare each kernel with plain torch at small sizes.

    Raises:
        ValueError: one gives something else.
    """
    dtype = torch.float16
    how = Attention(heads=4, kv_heads=2, head_dim=64, scaling=0.125)
    attention = TritonAttention(
        how.heads, *how.cache_shape[1:], dtype=dtype, device=device
    )
    kinds = (how, replace(how, window=8, has_sinks=True))
    of_attention = make_attention_trial(StageAttention(kinds, 16, dtype), dtype, device)
    compare_pairs(of_attention.pairs(attention), of_attention.limit)
    of_parts = make_part_trial(None, dtype, device)
    compare_pairs(of_parts.pairs(TritonPartKernels(device)), of_parts.limit)
    compare_pairs(
        compute_draw_pairs(partial(draw_tokens, racer=race_in_triton), device),
        TOKEN_ERROR,
    )


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def _judge(errors: list[float], dtype: torch.dtype) -> Figures:
    figures: Figures = {"error": max(errors), "allowed": MAX_ERROR[dtype]}
    is_small = all(error < MAX_ERROR[dtype] for error in errors)  # nan is not
    expect(is_small, "off by more than the trial allows", figures)
    return figures


if __name__ == "__main__":
    try_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print("each kernel gives what plain torch gives")
