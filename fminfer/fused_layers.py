"""Has parts of transformers' layers computed in fewer passes over memory.

Norms, rotary positions and gated activations become compiled kernels, and products of the same
input become one. What is to replace a module is compared with the module's own answer first, so
that a family that differs in anything keeps transformers' code. It knows no family by name.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fminfer.layer_kernels import GELU_TANH, SILU
from fminfer.memory import is_out_of_memory
from fminfer.module_trial import Forward, KernelFailure, agree, is_close, probe, record

GATED, GATED_IN_ONE = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")

Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each (1, tokens, head_dim)
Known = dict[Hashable, Any]  # whether modules of a kind may be replaced: the first is looked at


class PartKernels(Protocol):
    """Compiled parts of layers: the CPU's layer_kernels or the GPU's triton_layers."""

    device: torch.device
    types: frozenset[torch.dtype]

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor: ...

    def add_and_norm(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def gate(self, both: torch.Tensor, activation: int) -> torch.Tensor: ...

    def gelu(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True, frozen=True)
class Fused:
    """What became of a model's layers."""

    num_modules: int  # that were replaced
    failures: dict[str, BaseException]  # by the class of a module: what our kernels raised there


def fuse_layers(model: nn.Module, kernels: PartKernels) -> Fused:
    """Replace what can be, in place, before linear layers are packed."""
    known: Known = {}
    failures: dict[str, BaseException] = {}
    num_fused = 0

    def is_fused(module: Any, fuse: Callable[[Any, PartKernels, Known], bool]) -> bool:
        name = type(module).__name__
        if name in failures:
            return False
        try:
            return fuse(module, kernels, known)
        except KernelFailure as failure:
            # A traceback would keep the tensors of its frames.
            failures[name] = (failure.__cause__ or failure).with_traceback(None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # There is none for joined weights beside those that they are made of.
        return False

    modules: deque[Any] = deque(model.modules())
    while modules:  # a layer's old weights go as soon as it is done
        if is_fused(modules.popleft(), _fuse):
            num_fused += 1
            if kernels.device.type == "cuda":
                torch.cuda.empty_cache()  # it would keep them, too small for the next joined ones
    num_fused += sum(is_fused(layer, _fuse_layer) for layer in model.modules())
    return Fused(num_fused, failures)


def _fuse(module: Any, kernels: PartKernels, known: Known) -> bool:
    """Replace a module, or what it computes of its own, if that can be."""
    name, weight = type(module).__name__, next(module.parameters(), None)
    if weight is None:
        return "gelu" in name.lower() and _fuse_gelu(module, kernels)
    if weight.dtype not in kernels.types or weight.device.type != kernels.device.type:
        return False
    if name.endswith("RMSNorm"):
        return _fuse_norm(module, kernels)
    if _linears(module, *GATED) or _linears(module, *GATED_IN_ONE):
        return _fuse_gated(module, kernels, known)
    if _linears(module, "q_proj", "k_proj", "v_proj", "o_proj"):
        return _fuse_attention(module, kernels, known)
    return False


def _fuse_gelu(module: nn.Module, kernels: PartKernels) -> bool:
    """Compute in one pass what is written out in operations, or slow in bfloat16."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype in kernels.types and x.dim() == 3:
            return kernels.gelu(x)
        return nn.functional.gelu(x, approximate="tanh")

    x = torch.linspace(-9, 9, 999, device=kernels.device).view(1, 3, -1)
    is_same = agree(module, forward, x)
    if is_same:
        module.forward = forward
    return is_same


def _fuse_norm(module: Any, kernels: PartKernels) -> bool:
    weight = module.weight.detach()
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or weight.dim() != 1:
        return False
    plain = copy.deepcopy(module).float()  # what differs by 1 shows only in float32
    for offset in (0.0, 1.0):  # 1: Gemma's
        norm = partial(kernels.rms_norm, eps=eps, offset=offset)
        x = probe(len(weight), torch.float32, weight.device)
        if agree(plain, partial(norm, weight=weight.float()), x):
            module.forward = partial(norm, weight=weight)
            return True
    return False


def _fuse_gated(module: Any, kernels: PartKernels, known: Known) -> bool:
    """Compute down(act(gate(x)) * up(x)) with one product for gate and up."""
    down = module.down_proj
    if hasattr(module, "gate_up_proj"):
        both, act = module.gate_up_proj, getattr(module, "activation_fn", None)
    else:
        both, act = _join([module.gate_proj, module.up_proj]), getattr(module, "act_fn", None)
    kind = (type(module), type(act), both.weight.shape, both.bias is None)
    for activation in (SILU, GELU_TANH):

        def forward(x: torch.Tensor, activation: int = activation) -> torch.Tensor:
            out: torch.Tensor = down.forward(kernels.gate(both.forward(x), activation))
            return out

        if (kind, activation) not in known:
            x = probe(both.in_features, both.weight.dtype, both.weight.device)
            is_same = is_activation(act, kernels, activation) and agree(module, forward, x)
            known[kind, activation] = is_same
        if known[kind, activation]:
            if not hasattr(module, "gate_up_proj"):
                del module.gate_proj, module.up_proj
                module.gate_up_proj = both
            module.forward = forward
            module.activation = activation
            return True
    return False


def is_activation(act: Any, kernels: PartKernels, activation: int) -> bool:
    """Tell whether a module computes one of the kernels' activations."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return kernels.gate(torch.cat([x, torch.ones_like(x)], -1), activation)

    return agree(act, forward, torch.linspace(-9, 9, 1999, device=kernels.device).view(1, 1, -1))


def _fuse_attention(module: Any, kernels: PartKernels, known: Known) -> bool:
    """Compute q, k and v in one product, and rotary positions in one pass."""
    projections = [module.q_proj, module.k_proj, module.v_proj]
    sizes = [projection.out_features for projection in projections]
    head_dim = getattr(module, "head_dim", 0)
    if not head_dim or any(size % head_dim for size in sizes):
        return False
    product = _join(projections)
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    num_heads = [size // head_dim for size in sizes[:2]]
    parts = [sum(sizes[:2]), sizes[2]]
    settings: dict[str, Any] = {}

    def heads_of(part: torch.Tensor, norm: Any = None) -> torch.Tensor:
        """Return (1, tokens, heads, head_dim), normed, of (1, tokens, heads * head_dim)."""
        if norm is not None and norm.weight.shape[-1] == part.shape[-1]:
            part, norm = norm(part), None
        part = part.view(*part.shape[:-1], -1, head_dim)
        return part if norm is None else norm(part)

    def turned(both: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys of (1, tokens, sizes of both), with their positions."""
        if q_norm is None and k_norm is None:  # in one pass
            query, key = kernels.rotate(heads_of(both), *turn).split_with_sizes(num_heads, 2)
        else:
            query, key = both.split_with_sizes(sizes[:2], -1)
            query = kernels.rotate(heads_of(query, q_norm), *turn)
            key = kernels.rotate(heads_of(key, k_norm), *turn)
        return query.transpose(1, 2), key.transpose(1, 2)

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: Turn,
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        both, value = product.forward(hidden_states).split_with_sizes(parts, -1)
        attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        out, _ = attend(
            module,
            *turned(both, position_embeddings),
            heads_of(value).transpose(1, 2),
            attention_mask,
            **(settings | kwargs),
        )
        return module.o_proj.forward(out.flatten(2)), None

    kind = (type(module), tuple(sizes), _settings_of(module))
    if kind not in known:
        known[kind] = _compare_attention(module, forward, settings, product.weight, head_dim)
    found = known[kind]
    if found is not None:
        settings.update(found)
        del module.q_proj, module.k_proj, module.v_proj
        module.qkv_proj = product
        module.forward = forward
        module.told = settings  # what it tells attention besides tensors
    return found is not None


def _compare_attention(
    module: Any, forward: Forward, settings: dict[str, Any], weight: torch.Tensor, head_dim: int
) -> dict[str, Any] | None:
    """Return what a module tells attention besides tensors; None: `forward` differs from it.

    Args:
        settings: what `forward` tells attention, to be filled in.
        weight: (out, in) of q, k and v.
    """
    x = probe(weight.shape[1], weight.dtype, weight.device)
    found = record(module, module, forward, x, head_dim, settings)
    if len(found) != 2 or not all(map(is_close, *found)):
        return None
    return dict(settings)


def _fuse_layer(layer: Any, kernels: PartKernels, known: Known) -> bool:
    """Add what attention returns, and norm the sum, in one pass; call no module on the way."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if not all(isinstance(getattr(layer, name, None), nn.Module) for name in names):
        return False
    first, attention, second, mlp = (getattr(layer, name) for name in names)
    is_normed = isinstance(first.forward, partial) and isinstance(second.forward, partial)
    is_known = hasattr(attention, "head_dim") and hasattr(attention, "config")
    if not (is_normed and is_known and _linears(attention, "qkv_proj")):
        return False
    how: dict[str, Any] = second.forward.keywords

    def forward(
        hidden_states: torch.Tensor, add_and_norm: Forward = kernels.add_and_norm, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = attention.forward(first.forward(hidden_states), **kwargs)
        kept = getattr(layer, "kept", None)
        if kept is not None:
            hidden_states = hidden_states[:, kept]
        both, normed = add_and_norm(hidden_states, attended, **how)
        out: torch.Tensor = both + mlp.forward(normed)
        return out

    weight, head_dim = attention.qkv_proj.weight, attention.head_dim
    kind = (type(layer), type(mlp), weight.shape, _settings_of(layer))
    if kind not in known:
        x = probe(weight.shape[1], weight.dtype, weight.device)
        in_two = partial(forward, add_and_norm=partial(_add_then_norm, kernels))
        found = record(attention, layer, in_two, x, head_dim, {})
        # To the last bit: beside what a layer adds to, 3 % would hide what it adds. Sum and norm in
        # one may differ by rounding, and are compared by themselves.
        is_same = len(found) == 2 and all(map(torch.equal, *found))
        known[kind] = is_same and _adds_and_norms(kernels, x, how)
    if known[kind]:
        layer.forward = forward
        if "forward" in vars(attention):  # ours, which takes it if attention gives fewer tokens
            layer.kept = None  # those whose output is wanted; None: all
    return bool(known[kind])


def _add_then_norm(
    kernels: PartKernels, x: torch.Tensor, other: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    both = x + other
    return both, kernels.rms_norm(both, **how)


def _adds_and_norms(kernels: PartKernels, x: torch.Tensor, how: dict[str, Any]) -> bool:
    """Tell whether sum and norm in one are, but for rounding, those of two kernels."""
    other = probe(x.shape[-1], x.dtype, x.device, seed=1)

    def in_two(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(_add_then_norm(kernels, x, other, **how))

    def in_one(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(kernels.add_and_norm(x, other, **how))

    return agree(in_two, in_one, x)


def _settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return a module's own settings but for its number, by which its forward may differ."""
    plain = (bool, int, float, str, type(None))
    pairs = ((k, v) for k, v in vars(module).items() if isinstance(v, plain))
    return tuple(pair for pair in pairs if pair[0] != "layer_idx")


def _linears(module: nn.Module, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _join(layers: list[nn.Linear]) -> nn.Linear:
    """Return one linear layer whose output is those of several, side by side."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    joined = nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features, joined.out_features = weight.shape[1], weight.shape[0]
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        parts = [
            weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        joined.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return joined
