"""Chooses the bodies of attention and of parts of layers: compiled for the device, or plain torch.

It knows devices and compilers, not how anything is computed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fminfer.attention import AttentionKernel
from fminfer.config import AttentionBody
from fminfer.errors import UsageError
from fminfer.fused_layers import PartKernels
from fminfer.kernel_attention import KernelAttention
from fminfer.kernel_build import KernelBuild, start_build
from fminfer.layer_kernels import LayerKernels
from fminfer.pipeline.stage import kv_shape


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
    config: Any,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionKernel | None, str]:
    """Return the compiled body of attention, or None and why it is slower than it could be.

    What the GPU's gives on the GPU is compared with plain torch before it is used.

    Args:
        library: the CPU's kernels, as `find_library` gave them.
        config: transformers' config of the model.
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
    kv_heads, head_dim = kv_shape(config)
    try:
        from fminfer import triton_attention  # needs triton, which only torch for CUDA brings

        kernel = triton_attention.try_kernels(
            config.num_attention_heads,
            kv_heads,
            head_dim,
            block_size,
            getattr(config, "attn_logit_softcapping", None),
            dtype=dtype,
            device=device,
        )
    except Exception as error:
        return None, _why_not(body, "attention", error)
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
        return None, _why_not(body, "norms and activations", error)


def _why_not(body: AttentionBody, what: str, error: Exception) -> str:
    """Return the reason that a compiler or a driver gives, or raise it if no other body will do."""
    reason = (str(error).strip() or repr(error)).partition("\n")[0]
    problem = f"{what}: the kernel cannot be used ({reason})"
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
