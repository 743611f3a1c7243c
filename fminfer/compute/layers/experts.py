"""Mixtures of experts: in plain torch, one expert after another, and compiled for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.kernels.library_calls import ExpertCall
from fminfer.compute.layers import plain
from fminfer.compute.layers.bodies import QUICK_GELU, activations_of
from fminfer.compute.layers.products import (
    Linear,
    PackedPart,
    ProductKernel,
    has_order,
    is_kernel_faster,
)
from fminfer.compute.trial import Candidate, Limits, Pair, Trial
from fminfer.compute.values.spec import Mlp, Moe
from fminfer.compute.values.weights import KERNEL_TYPES, Function, Weight

# (hidden states, chosen experts, their shares) → hidden states; `PackedExperts` says more.
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MAX_ERROR: Limits = {torch.float32: 2e-5, torch.bfloat16: 0.02}  # of the largest result
TRIED_TOKENS = 3


class PlainExperts:
    """The experts of a layer, one after another. The tokens of each are computed together."""

    def __init__(self, spec: Moe, experts: Sequence[Function]) -> None:
        self._spec = spec
        self._experts = experts

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        spec = self._spec
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=spec.num_experts).tolist()
        parts = torch.split(x[order // spec.top_k], counts)
        outs = [
            e(part) for e, part in zip(self._experts, parts, strict=True) if len(part)
        ]
        joined = torch.cat(outs)
        out = torch.empty_like(joined)
        out[order] = joined
        weighted = out.view(len(x), spec.top_k, -1) * shares[..., None]
        return weighted.sum(1).to(x.dtype)


@dataclass(slots=True, frozen=True)
class Mixture:
    """The experts of a layer that are asked for."""

    spec: Moe
    up: Weight  # (experts, outputs, hidden)
    down: Weight  # (experts, hidden, size)
    up_bias: torch.Tensor | None = None  # (experts, outputs)
    down_bias: torch.Tensor | None = None  # (experts, hidden)

    def make_trial(self, dtype: torch.dtype) -> Trial[Mix]:
        """Return how a mixture of hidden states of a dtype is tried; each shape and
        format once."""
        pairs = partial(compute_expert_pairs, mixture=self, dtype=dtype)
        name = f"{self.spec.num_experts} experts of {self.spec.expert.size}"
        key = self.spec, self.up.shape, self.up.format, self.down.format
        return Trial(name, pairs, MAX_ERROR[dtype], key)


def compute_expert_pairs(
    mix: Mix, mixture: Mixture, dtype: torch.dtype
) -> Iterator[Pair]:
    """Mix the experts of one token and of a few, compiled and plain, in float32 between."""
    spec = mixture.spec
    expert = spec.expert
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TRIED_TOKENS, mixture.down.shape[1], generator=generator).to(dtype)
    shares = torch.rand(TRIED_TOKENS, spec.top_k, generator=generator)
    chosen = (
        torch.arange(TRIED_TOKENS * spec.top_k).view(TRIED_TOKENS, -1)
        % spec.num_experts
    )
    act: Function = plain.ACTIVATIONS[expert.activation]
    if expert.is_gated:
        act = partial(plain.gate, activation=expert.activation, limit=expert.limit)

    def compute(part: torch.Tensor, number: int) -> torch.Tensor:
        up, down = (
            Linear(
                weight.expert(number), None if bias is None else bias[number].float()
            )
            for weight, bias in (
                (mixture.up, mixture.up_bias),
                (mixture.down, mixture.down_bias),
            )
        )
        return down(act(up(part)))

    experts = [partial(compute, number=number) for number in range(spec.num_experts)]
    expected = PlainExperts(spec, experts)(x.float(), chosen, shares)
    for tokens in (1, TRIED_TOKENS):
        yield mix(x[:tokens], chosen[:tokens], shares[:tokens]), expected[:tokens]


class Workspace:
    """Memory that calls work in, one after another: it is near, and not had again each time."""

    _bytes: torch.Tensor

    def __init__(self) -> None:
        self.free()

    def allocate(self, size: int) -> torch.Tensor:
        """Return so many bytes; the next call may return the same."""
        if len(self._bytes) < size:
            self.free()  # not both at once
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes

    def free(self) -> None:
        """Give it back."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(slots=True, frozen=True)
class PackedExperts:
    """The MLPs of all experts of a layer."""

    mix: Callable[..., int]  # of the library
    workspace: Workspace  # of all layers, one after another
    spec: Moe
    up: PackedPart  # of all experts, gates first
    down: PackedPart
    up_bias: torch.Tensor | None  # (experts, outputs of `up`) float32
    down_bias: torch.Tensor | None  # (experts, hidden) float32

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of each token's experts, times their shares; as x.

        Args:
            x: (tokens, hidden), of a type that the weights are multiplied by.
            chosen: (tokens, top_k) int64, of which none may be beyond the last expert.
            shares: (tokens, top_k) float32.
        """
        (tokens, top_k) = chosen.shape
        hidden = self.up.inputs
        expert = self.spec.expert
        assert x.is_cpu and x.shape == (tokens, hidden), "hidden states"
        assert chosen.dtype == torch.int64 and shares.dtype == torch.float32, "a choice"
        assert shares.shape == chosen.shape, "a choice"
        x = x.contiguous()
        chosen = chosen.contiguous()
        shares = shares.contiguous()
        out = torch.empty_like(x)
        space = self.workspace.allocate(4 * tokens * top_k * (hidden + expert.size))
        call = ExpertCall(
            x=x.data_ptr(),
            up=self.up.call,
            down=self.down.call,
            chosen=chosen.data_ptr(),
            shares=shares.data_ptr(),
            out=out.data_ptr(),
            space=space.data_ptr(),
            up_bias=None if self.up_bias is None else self.up_bias.data_ptr(),
            down_bias=None if self.down_bias is None else self.down_bias.data_ptr(),
            tokens=tokens,
            top_k=top_k,
            num_experts=self.spec.num_experts,
            hidden=hidden,
            size=expert.size,
            is_gated=expert.is_gated,
            activation=find_activations(expert)[expert.activation],
            x_type=KERNEL_TYPES[x.dtype],
            num_threads=torch.get_num_threads(),
            limit=expert.limit or 0.0,
        )
        if self.mix(ctypes.byref(call)):
            self.workspace.free()  # for the halves of the step
            raise MemoryError("no memory for the experts' working space")
        return out


def find_activations(expert: Mlp) -> dict[str, int]:
    """Return the numbers of activations that the kernel computes in experts."""
    return activations_of(expert) | {"quick_gelu": QUICK_GELU}


def can_mix(spec: Moe) -> bool:
    """Tell whether the kernel computes such experts: it has their activation, and limits
    gates alone."""
    expert = spec.expert
    if expert.limit is not None and not (expert.is_gated and expert.limit > 0):
        return False
    return expert.activation in find_activations(expert)


def _widen_bias(bias: torch.Tensor | None, weight: Weight) -> torch.Tensor | None:
    """Return the biases of all experts' outputs as the kernel adds them."""
    if bias is None:
        return None
    assert bias.shape == weight.shape[:2], "biases of experts"
    return bias.float().contiguous()


def make_expert_candidate(
    library: ctypes.CDLL, dtype: torch.dtype
) -> Candidate[Mixture, Mix]:
    """Return the kernel's mixtures, of hidden states of a dtype."""
    kernel = ProductKernel(library)
    workspace = Workspace()

    def pack_experts(mixture: Mixture) -> PackedExperts:
        expert = mixture.spec.expert
        up = mixture.up
        down = mixture.down
        num_experts, hidden, size = down.shape
        assert (num_experts, size) == (mixture.spec.num_experts, expert.size), (
            "weights of experts"
        )
        assert up.shape == (num_experts, expert.up_size, hidden), "weights of experts"
        return PackedExperts(
            mix=library.fminfer_mix,
            workspace=workspace,
            spec=mixture.spec,
            up=kernel.pack_part(up, 2 if expert.is_gated else 1),
            down=kernel.pack_part(down, 1),
            up_bias=_widen_bias(mixture.up_bias, up),
            down_bias=_widen_bias(mixture.down_bias, down),
        )

    def serves(mixture: Mixture) -> bool:
        weights = (mixture.up, mixture.down)
        is_best = all(
            is_kernel_faster(w.format, dtype)
            and len(w.format.parts) == 1
            and not has_order(w)
            for w in weights
        )
        return (
            is_best
            and can_mix(mixture.spec)
            and all(map(ProductKernel.can_pack, weights))
        )

    return Candidate(pack_experts, partial(Mixture.make_trial, dtype=dtype), serves)
