"""Bodies of norms, rotary positions and activations: compiled for what kernels serve,
or plain."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fminfer.compute.kernels.library_calls import RowSizes
from fminfer.compute.layers import plain
from fminfer.compute.trial import Limits, Pair, Trial
from fminfer.compute.values.spec import Mlp, Norm, Rope
from fminfer.compute.values.weights import KERNEL_TYPES, Function

PART_ERRORS: Limits = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}
# The numbers of activations in kernels, as activations.h has them.
SILU = 0
GELU_TANH = 1
RELU = 2
GELU = 3
QUICK_GELU = 4
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# of all kernels
GATES = {"silu": SILU, "swish": SILU} | dict.fromkeys(TANH_GELUS, GELU_TANH)


@dataclass(slots=True, frozen=True)
class NormWeights:
    """A norm that a kernel can compute, with its weight and bias, (width,)."""

    spec: Norm
    weight: Tensor
    bias: Tensor | None


# of rows, and turns as `PartKernels.rotate` has them
Rotate = Callable[[Tensor, Tensor], Tensor]
Sum = tuple[Tensor, Tensor]  # what is added to rows, and where the sum is put


class PartKernels(ABC):
    """The compiled parts of layers. Each passes over memory once, and rounds float32 once."""

    device: torch.device
    # the numbers of those that `gate` and `gelu` compute
    activations: Mapping[str, int]

    @abstractmethod
    def can_norm(self, spec: Norm, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Tell whether `run_norm` computes such a norm."""

    @abstractmethod
    def run_norm(
        self, x: Tensor, norm: NormWeights, out: Tensor, added: Sum | None
    ) -> None:
        """Write the norm of x, or of its sum with what is added, to `out`."""

    @abstractmethod
    def run_rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write x with rotary positions to `out`; cosines and sines are (tokens, turned / 2)."""

    @abstractmethod
    def run_gate(
        self, x: Tensor, second: Tensor | None, activation: int, out: Tensor
    ) -> None:
        """Write the activation of x, times `second` if there is one, to `out`."""

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """Return x normed, (rows, width) or (rows, more rows, width)."""
        self._check_norm(x, norm)
        out = _empty_like(x)
        self.run_norm(x, norm, out, None)
        return out

    def add_and_norm(
        self, x: Tensor, other: Tensor, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        """Return x + other and that normed; all are (rows, width)."""
        assert x.shape == other.shape and x.dtype == other.dtype, "terms of a sum"
        self._check_norm(x, norm)
        both = _empty_like(x)
        out = _empty_like(x)
        self.run_norm(x, norm, out, (other.contiguous(), both))
        return both, out

    def _check_norm(self, x: Tensor, norm: NormWeights) -> None:
        """Check what kernels trust."""
        for each in (norm.weight,) if norm.bias is None else (norm.weight, norm.bias):
            assert each.is_contiguous() and each.shape == x.shape[-1:], (
                "weight of a norm"
            )
            assert each.dtype == x.dtype, "weight of a norm"

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return x with rotary positions (Su et al. 2021), its first half paired with
        its second.

        Args:
            x: (tokens, heads, head_dim).
            turns: (2, tokens, turned / 2) float32: cosines and sines for the first `turned`
                elements of each head.
        """
        half = turns.shape[-1]
        (cos, sin) = turns.contiguous()
        out = _empty_like(x)
        assert turns.shape == (2, len(x), half) and turns.dtype == torch.float32, (
            "cos and sin"
        )
        assert 2 * half <= x.shape[-1], "cos and sin"
        self.run_rotate(x, cos, sin, out)
        return out

    def gate(self, both: Tensor, activation: int) -> Tensor:
        """Return activation(first half) * second half, of (…, 2 * width)."""
        assert both.shape[-1] % 2 == 0, "halves"
        first, second = both.view(-1, both.shape[-1]).chunk(2, -1)
        out = _empty_like(first)
        self.run_gate(first, second, activation, out)
        return out.view(*both.shape[:-1], -1)

    def gelu(self, x: Tensor, activation: int) -> Tensor:
        """Return gelu (Hendrycks and Gimpel 2016) in one of its forms, of (rows, width)."""
        out = _empty_like(x)
        self.run_gate(x, None, activation, out)
        return out

    def row_strides(self, x: Tensor) -> tuple[int, int, int, int]:
        """Return how to walk through x: rows, rows in each, and the steps between them."""
        shape = x.shape
        steps = x.stride()
        assert x.device.type == self.device.type, "device"
        assert len(shape) in (2, 3), "rows of a step"
        assert steps[-1] == 1, "the elements of a row lie side by side"
        inner, inner_step = (shape[1], steps[1]) if len(shape) == 3 else (1, 0)
        return shape[0], inner, steps[0], inner_step


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class CpuPartKernels(PartKernels):
    """The kernels of the CPU."""

    device = torch.device("cpu")
    activations = GATES | {"gelu": GELU}

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def can_norm(self, spec: Norm, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Tell whether it computes such a norm: RMSNorms, and LayerNorms with weight
        and bias."""
        has_both = spec.has_bias != spec.is_rms and not (
            spec.offset and not spec.is_rms
        )
        return spec.has_weight and has_both and weight is not None and weight.dim() == 1

    def run_norm(
        self, x: Tensor, norm: NormWeights, out: Tensor, added: Sum | None
    ) -> None:
        spec = norm.spec
        rows = self._make_row_sizes(x, out)
        weight = norm.weight.data_ptr()
        sums = (
            (None, None)
            if added is None
            else (added[0].data_ptr(), added[1].data_ptr())
        )
        if spec.is_rms:
            self._library.fminfer_rms_norm(rows, weight, spec.eps, spec.offset, *sums)
            return
        assert norm.bias is not None, "bias of a norm"
        self._library.fminfer_layer_norm(
            rows, weight, norm.bias.data_ptr(), spec.eps, *sums
        )

    def run_rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        turns = cos.data_ptr(), sin.data_ptr()
        self._library.fminfer_rotate(
            self._make_row_sizes(x, out), *turns, 2 * cos.shape[-1]
        )

    def run_gate(
        self, x: Tensor, second: Tensor | None, activation: int, out: Tensor
    ) -> None:
        address = None if second is None else second.data_ptr()
        self._library.fminfer_gate(self._make_row_sizes(x, out), address, activation)

    def _make_row_sizes(self, x: Tensor, out: Tensor) -> ctypes._CArgObject:
        outer, inner, outer_step, inner_step = self.row_strides(x)
        rows = RowSizes(
            x=x.data_ptr(),
            out=out.data_ptr(),
            outer=outer,
            inner=inner,
            width=x.shape[-1],
            outer_step=outer_step,
            inner_step=inner_step,
            type=KERNEL_TYPES[x.dtype],
            num_threads=torch.get_num_threads(),
        )
        return ctypes.byref(rows)


def activations_of(mlp: Mlp) -> dict[str, int]:
    """Return the numbers of those that the library computes in an MLP."""
    return CpuPartKernels.activations | ({} if mlp.is_gated else {"relu": RELU})


class WeightedNorm:
    """A norm with its weights, on (…, width)."""

    def __init__(
        self,
        spec: Norm,
        weight: Tensor | None,
        bias: Tensor | None,
        kernels: PartKernels | None,
    ) -> None:
        self._plain = (spec, weight, bias)
        self._kernels = kernels
        self._weights = None
        if (
            kernels is not None
            and weight is not None
            and kernels.can_norm(spec, weight, bias)
        ):
            self._weights = NormWeights(spec, weight.contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is None or self._weights is None:
            return plain.norm(x, *self._plain)
        return self._kernels.norm(x, self._weights)

    def norm_sum(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + more, both (tokens, width), and the norm of that sum."""
        if more is not None and self._kernels is not None and self._weights is not None:
            return self._kernels.add_and_norm(x, more, self._weights)
        x = x if more is None else x + more
        return x, self(x)


class Parts:
    """Makes norms, rotary positions and activations; without kernels all are plain torch."""

    def __init__(self, kernels: PartKernels | None = None) -> None:
        self.kernels = kernels

    def make_norm(
        self, spec: Norm, weight: Tensor | None, bias: Tensor | None
    ) -> WeightedNorm:
        return WeightedNorm(spec, weight, bias, self.kernels)

    def make_rotate(self, spec: Rope) -> Rotate:
        if self.kernels is None or spec.is_interleaved:
            return partial(plain.rotate, spec=spec)
        return self.kernels.rotate

    def make_gate(self, activation: str) -> Function:
        if self.kernels is None or activation not in self.kernels.activations:
            return partial(plain.gate, activation=activation)
        return partial(
            self.kernels.gate, activation=self.kernels.activations[activation]
        )

    def make_activation(self, name: str) -> Function:
        if self.kernels is None or name not in self.kernels.activations:
            return plain.ACTIVATIONS[name]
        return partial(self.kernels.gelu, activation=self.kernels.activations[name])


def make_part_trial(
    _: None, dtype: torch.dtype, device: torch.device
) -> Trial[PartKernels]:
    pairs = partial(compute_part_pairs, dtype=dtype, device=device)
    return Trial("norms and activations", pairs, PART_ERRORS[dtype])


def compute_part_pairs(
    kernels: PartKernels, dtype: torch.dtype, device: torch.device
) -> Iterator[Pair]:
    """Compute small tensors with compiled parts, and with those of plain torch."""
    generator = torch.Generator().manual_seed(0)
    x, other = (
        torch.randn(5, 3, 80, generator=generator).to(device, dtype) for _ in "xy"
    )
    weight = x[0, 0].contiguous()
    row = x[:, 0]
    more = other[:, 0]
    for spec, bias in (
        (Norm(1e-5), None),
        (Norm(1e-5, offset=1.0), None),
        (Norm(1e-5, is_rms=False, has_bias=True), other[0, 0].contiguous()),
    ):
        if kernels.can_norm(spec, weight, bias):
            weights = NormWeights(spec, weight, bias)
            yield kernels.norm(x, weights), plain.norm(x, spec, weight, bias)
            both, normed = kernels.add_and_norm(row, more, weights)
            yield both, row + more
            yield normed, plain.norm(row + more, spec, weight, bias)
    turn = other[:, 0, :24].sin().float()
    table = torch.stack([turn, -turn])
    turned = plain.rotate(x, table, Rope((0.0,) * 24))
    yield kernels.rotate(x, table), turned
    yield kernels.gate(row, SILU), plain.gate(row, "silu")
    yield kernels.gate(row, GELU_TANH), plain.gate(row, "gelu_new")
    yield kernels.gelu(row, GELU_TANH), plain.ACTIVATIONS["gelu_new"](row)
    if "gelu" in kernels.activations:
        yield kernels.gelu(row * 4, GELU), plain.ACTIVATIONS["gelu"](row * 4)
