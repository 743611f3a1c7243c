"""Mixtures of experts on the CPU: each expert's products packed, its tokens side by side.

transformers makes plain products, grouped or in a loop, which rearrange each expert's weights in
every step. It knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fminfer.fused_layers import PartKernels, is_activation
from fminfer.layer_kernels import GELU_TANH, SILU
from fminfer.module_trial import MISFIT, is_close
from fminfer.packed_linear import Product, can_pack, pack, without_values
from fminfer.product_kernel import ProductKernel

CHECKED_TOKENS = 5


@dataclass(slots=True, frozen=True)
class PackedExperts:
    """What a module of experts computes, as transformers calls it."""

    products: list[tuple[Product, Product]]  # of each expert: gate and up in one, and down
    gate: Callable[[torch.Tensor], torch.Tensor]  # of both halves: activation(first) * second

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of what each token's experts give, (tokens, hidden).

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: (tokens, k) int64, the experts of each token.
            top_k_weights: (tokens, k).
        """
        num_tokens, k = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.products)).tolist()
        parts = torch.split(hidden_states[order // k], counts)
        outs = [
            down(self.gate(gate_up(part)))
            for (gate_up, down), part in zip(self.products, parts, strict=True)
            if len(part)
        ]
        joined = torch.cat(outs)
        out = torch.empty_like(joined)
        out[order] = joined
        weighted = out.view(num_tokens, k, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)


def pack_experts(
    model: nn.Module,
    *,
    is_fast_in_bfloat16: bool,
    kernel: ProductKernel | None = None,
    layers: PartKernels | None = None,
) -> int:
    """Pack the experts of every layer in place, where the result is the module's own.

    As `pack_linears` does, it leaves parameters of nan.

    Args:
        is_fast_in_bfloat16: whether the machine has units for it; otherwise that is not packed.
        kernel, layers: the CPU's, if they could be built.

    Returns:
        How many modules.
    """
    num_packed = 0
    known: dict[Hashable, bool] = {}
    module: Any
    for module in list(model.modules()):
        if _has_experts(module) and can_pack(module.gate_up_proj[0], is_fast_in_bfloat16):
            num_packed += _pack(module, kernel, layers, known)
    return num_packed


def _pack(
    module: Any,
    kernel: ProductKernel | None,
    layers: PartKernels | None,
    known: dict[Hashable, bool],
) -> bool:
    """Pack one module's experts, if that gives its own answer.

    Args:
        known: whether modules of a kind may be packed: the first is looked at.
    """
    kind = (type(module), type(module.act_fn), module.gate_up_proj.shape)
    if not known.get(kind, True):
        return False
    products = [
        (pack(gate_up, None, kernel), pack(down, None, kernel))
        for gate_up, down in zip(
            module.gate_up_proj.detach(), module.down_proj.detach(), strict=True
        )
    ]
    experts = PackedExperts(products, _gate_of(module.act_fn, layers))
    if kind not in known:
        known[kind] = _is_right(experts, module)
    if known[kind]:
        module.forward = experts
        module.gate_up_proj = without_values(module.gate_up_proj)
        module.down_proj = without_values(module.down_proj)
    return known[kind]


def _has_experts(module: Any) -> bool:
    """Tell whether a module has the form of transformers' experts, without biases."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    both, down = own["gate_up_proj"].shape, own["down_proj"].shape
    return len(both) == 3 and down == (both[0], both[2], both[1] // 2)


def _gate_of(
    act: Callable[[torch.Tensor], torch.Tensor], layers: PartKernels | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    for activation in (SILU, GELU_TANH):
        if layers is not None and is_activation(act, layers, activation):
            return partial(layers.gate, activation=activation)

    def gate(both: torch.Tensor) -> torch.Tensor:
        first, second = both.chunk(2, -1)
        return act(first) * second

    return gate


@torch.inference_mode()
def _is_right(experts: PackedExperts, module: Any) -> bool:
    """Compare the experts with the module's own answer, every expert having some tokens."""
    num_experts, _, width = module.gate_up_proj.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((CHECKED_TOKENS * num_experts, width), generator=generator)
    x = x.to(module.gate_up_proj.dtype)
    first = torch.arange(len(x)) % num_experts
    index = torch.stack([first, (first + 1) % num_experts], -1)
    weights = torch.rand(index.shape, generator=generator).to(x.dtype)
    try:
        return is_close(experts(x, index, weights), module(x, index, weights))
    except MISFIT:
        return False
