"""Phase 2: the GPU's norms, rotary positions and gates beside float64."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from benchmarks.gpu import references
from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, expect
from benchmarks.gpu.processes import run_within
from fminfer.compute.layers.layer_kernels import GELU_TANH, SILU
from fminfer.compute.layers.triton_layers import TritonLayers
from fminfer.compute.spec import Norm

WIDTHS = {"cuda": (64, 80, 4096, 5120, 14336), "cpu": (64, 80)}
TOKENS = {"cuda": (1, 7, 512), "cpu": (1, 3)}
TYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.float32, torch.float16),
}
HEAD_DIMS = ((64, 64), (80, 80), (128, 128), (256, 256), (80, 20))  # of a head, of it turned
EPS = 1e-5
# Of the largest number; the second is what rounding once gives, and a half more.
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Small sizes of each kernel, for a tool that watches every access.
WATCHED = """
import torch
from fminfer.compute.kernel_choice import find_attention, find_layers
from fminfer.models.checkpoint import open_random
where = {"dtype": torch.float16, "device": torch.device("cuda")}
find_attention("require", None, open_random("llama-160m").model, 16, **where)
find_layers("require", None, **where)
"""


def cases(setting: Setting) -> Iterator[Case]:
    kind = setting.device
    for dtype in TYPES[kind]:
        for width in WIDTHS[kind]:
            name = f"norms and gates of {width} {str(dtype)[6:]}"
            yield Case(name, partial(check_width, kind, width, dtype))
        yield Case(f"rotary positions {str(dtype)[6:]}", partial(check_turns, kind, dtype))
    yield Case("compute-sanitizer", partial(watch_accesses, setting))


@torch.inference_mode()
def check_width(kind: str, width: int, dtype: torch.dtype) -> Figures:
    """Compare norms, a sum with its norm, and gated activations."""
    device = torch.device(kind)
    kernels, errors = TritonLayers(device), list[float]()
    is_equal = True  # whether a sum and its norm are the same in one kernel and in two
    torch.manual_seed(0)
    for tokens in TOKENS[kind]:
        x, other = (torch.randn(tokens, width, device=device).to(dtype) for _ in ("x", "y"))
        weight = torch.randn(width, device=device).to(dtype)
        for offset in (0.0, 1.0):
            how = Norm(EPS, offset=offset)
            normed = kernels.norm(x, how, weight, None)
            errors.append(_error(normed, references.rms_norm(x, weight, EPS, offset)))
            both, in_one = kernels.add_and_norm(x, other, how, weight, None)
            errors.append(_error(both, (x + other).double()))
            errors.append(_error(in_one, references.rms_norm(both, weight, EPS, offset)))
            is_equal &= torch.equal(in_one, kernels.norm(both, how, weight, None))
        pair = torch.cat([x, other], -1)
        wide, second = x.double(), other.double()
        errors.append(_error(kernels.gate(pair, SILU), silu(wide) * second))
        bent = gelu(wide, approximate="tanh")
        errors.append(_error(kernels.gate(pair, GELU_TANH), bent * second))
        errors.append(_error(kernels.gelu(x), bent))
    return _judge(errors, dtype) | {"one kernel equals two": is_equal}


@torch.inference_mode()
def check_turns(kind: str, dtype: torch.dtype) -> Figures:
    """Compare rotary positions of whole heads and of parts of them."""
    device = torch.device(kind)
    kernels, errors = TritonLayers(device), list[float]()
    torch.manual_seed(0)
    for width, turned in HEAD_DIMS if kind == "cuda" else HEAD_DIMS[-2:]:
        for tokens in TOKENS[kind]:
            x = torch.randn(tokens, 3, width + 5, device=device).to(dtype)[..., :width]
            angles = torch.randn(tokens, turned, device=device)
            turn = angles.cos(), angles.sin()
            errors.append(_error(kernels.rotate(x, *turn), references.rotate(x, *turn)))
    return _judge(errors, dtype)


def watch_accesses(setting: Setting) -> Figures:
    """Run tiny shapes under NVIDIA's tool, which sees every access outside of an allocation."""
    tool = shutil.which("compute-sanitizer")
    if setting.is_tiny or tool is None:
        raise Skipped("it needs a GPU, and compute-sanitizer on the PATH")
    # Each tensor has an allocation of its own then, so that one's end is seen.
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", WATCHED]
    limit = setting.seconds * 0.8
    found = run_within(command, limit, environ)
    if found.status is None:
        raise Skipped(f"not done after {limit:.0f} s")
    expect(found.status == 0, (found.out + found.err)[-3000:])
    return {"told": found.out.strip().splitlines()[-1]}


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def _judge(errors: list[float], dtype: torch.dtype) -> Figures:
    figures: Figures = {"error": max(errors), "allowed": MAX_ERROR[dtype]}
    is_small = all(error < MAX_ERROR[dtype] for error in errors)  # nan is not
    expect(is_small, "off by more than the trial allows", figures)
    return figures
