"""Chooses the bodies of attention and of parts of layers: compiled for the device, or plain torch.

It knows devices and compilers, not how anything is computed.
"""

from __future__ import annotations

import ctypes
import re

import torch

from fminfer.attention import AttentionKernel
from fminfer.compute.parts import PartKernels
from fminfer.compute.spec import Model
from fminfer.config import AttentionBody
from fminfer.errors import UsageError
from fminfer.kernel_attention import KernelAttention
from fminfer.kernel_build import KernelBuild, start_build
from fminfer.layer_kernels import LayerKernels

# Compilers, drivers and machines raise others. These say that our own code is wrong.
OUR_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
)
POSITION = re.compile(r"at \d+:\d+:")


def find_library(
    body: AttentionBody, device: torch.device, build: KernelBuild | None = None
) -> ctypes.CDLL | None:
    """Return the CPU's kernels, waiting for their build; None: not the CPU, or all in plain torch.

    Raises:
        UsageError: it is asked for by name and cannot be.
    """
    if body == "eager" or device.type != "cpu":
        return None
    build = build or start_build()
    library = build.library()
    if library is None and body == "compiled":
        raise UsageError(f"attention compiled cannot be: {build.error}; or use auto")
    return library


def find_attention(
    body: AttentionBody,
    library: ctypes.CDLL | None,
    model: Model,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionKernel | None, str]:
    """Return the compiled body of attention, or None and why it is slower than it could be.

    What the GPU's gives on the GPU is compared with plain torch before it is used.

    Args:
        library: the CPU's kernels, as `find_library` gave them.
        model: whose layers attend in one shape.
        block_size: tokens a block of the KV cache.

    Raises:
        UsageError: it is asked for by name and cannot be.
    """
    if library is not None:
        return KernelAttention(library), ""
    if body == "eager":
        return None, ""
    if device.type == "cpu":
        return None, start_build().error
    how = model.layers[0].attention
    try:
        from fminfer import triton_attention  # needs triton, which only torch for CUDA brings

        kernel = triton_attention.try_kernels(
            how.heads,
            *how.cache_shape,
            block_size,
            how.softcap,
            dtype=dtype,
            device=device,
        )
    except Exception as error:
        return None, why_plain(body, "attention", error)
    return kernel, ""


def find_layers(
    body: AttentionBody,
    library: ctypes.CDLL | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PartKernels | None, str]:
    """Return the compiled parts of layers, or None and why they are slower than they could be.

    Args:
        library: the CPU's kernels, as `find_library` gave them.

    Raises:
        UsageError: they are asked for by name and cannot be.
    """
    if library is not None:
        return LayerKernels(library), ""
    if body == "eager" or device.type == "cpu":
        return None, ""  # `find_attention` says why
    try:
        from fminfer import triton_layers

        return triton_layers.try_kernels(dtype, device), ""
    except Exception as error:
        return None, why_plain(body, "norms and activations", error)


def why_plain(body: AttentionBody, what: str, error: BaseException) -> str:
    """Return why plain torch computes something, or raise it if no other body will do.

    Raises:
        UsageError: the kernel is asked for by name, or the GPU's context is broken.
    """
    problem = f"{what}: the kernel cannot be used ({_reason(error)})"
    if body == "compiled":
        raise UsageError(f"attention compiled cannot be: {problem}; or use auto") from error
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError as broken:  # after a wrong access nothing works in this process any more
        raise UsageError(
            f"{problem}, and broke the GPU's context; use --attention eager"
        ) from broken
    return problem


def _reason(error: BaseException) -> str:
    """Return what a compiler or a driver says, in a line; a fault of our own is called one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        text = repr(error)
    elif POSITION.fullmatch(lines[0]):  # triton shows the source first, and the reason last
        text = f"{lines[0]} {lines[-1]}"
    else:
        text = lines[0]
    if isinstance(error, OUR_FAULTS):
        return f"a fault of fminfer's, please report it: {type(error).__name__}: {text}"
    return text
