"""Compares what is to replace a module with what the module itself gives.

A module of another form than expected is left alone, and nobody needs to know. A kernel of ours
that fails on the way is another matter: that is a `KernelFailure`, which the run tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fminfer.memory import is_out_of_memory

# Of the largest element.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
CHECKED_TOKENS = 3
MISFIT = Exception  # whatever a module of another form raises when it is tried
_RECORDER = "fminfer_recorder"

Forward = Callable[..., Any]


class KernelFailure(Exception):
    """What a kernel of ours raised when it was tried in a module's place; `__cause__` is that."""


@torch.inference_mode()
def agree(module: Forward, forward: Forward, x: torch.Tensor) -> bool:
    """Tell whether `forward` gives what the module gives.

    Raises:
        KernelFailure: `forward` fails where the module does not.
    """
    try:
        own = module(x)
    except MISFIT:
        return False
    ours = _try_ours(forward, x)
    return ours is not None and is_close(ours, own)


def is_close(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Tell whether a result is the model's own but for rounding."""
    if ours.shape != own.shape or ours.dtype != own.dtype:
        return False
    limit = MAX_ERROR[own.dtype] * float(own.abs().amax().nan_to_num())
    return torch.allclose(ours, own, rtol=0.0, atol=limit, equal_nan=True)


def probe(width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return (1, tokens, width) of random numbers, the process's own left as they are."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, CHECKED_TOKENS, width)
    return torch.randn(size, generator=generator, device="cpu").to(device, dtype)


@torch.inference_mode()
def record(
    attention: Any,
    own: Forward,
    ours: Forward,
    x: torch.Tensor,
    head_dim: int,
    settings: dict[str, Any],
) -> list[tuple[torch.Tensor, ...]]:
    """Return what each function gives to attention, q, k and v, and then returns itself.

    Of a module that cannot be called so nothing is returned.

    Args:
        attention: the module that will be called by them, or that they are.
        own, ours: the module's own forward, and what is to replace it.
        settings: filled with what else attention is told.

    Raises:
        KernelFailure: ours fails where the module's own does not.
    """
    recorded: list[tuple[torch.Tensor, ...]] = []

    def attend(
        _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **how: Any
    ) -> tuple[torch.Tensor, None]:
        recorded.append((query, key, value))
        settings.update(how)
        return query.transpose(1, 2), None

    angles = probe(head_dim // 2, torch.float32, x.device).repeat(1, 1, 2)
    turn = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    given = {"position_embeddings": turn, "attention_mask": None, "past_key_values": None}
    ALL_ATTENTION_FUNCTIONS.register(_RECORDER, attend)
    before = attention.config._attn_implementation
    attention.config._attn_implementation = _RECORDER
    try:
        try:
            outs = [own(x, **given)]
        except MISFIT:
            return []
        outs.append(_try_ours(ours, x, **given))
    finally:
        attention.config._attn_implementation = before
    if len(recorded) != 2 or outs[1] is None:
        return []
    outs = [out[0] if isinstance(out, tuple) else out for out in outs]
    return [(*inputs, out) for inputs, out in zip(recorded, outs, strict=True)]


def _try_ours(forward: Forward, x: torch.Tensor, **given: Any) -> Any:
    """Return what a replacement gives; None: there is no memory for it."""
    try:
        return forward(x, **given)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise KernelFailure from error
