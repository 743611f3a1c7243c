"""Calls the compiled norms, rotary positions and gated activations of the CPU."""

from __future__ import annotations

import ctypes

import torch

from fminfer.compute.kernels.calls import RowSizes
from fminfer.compute.layers.bodies import GATES, GELU, RELU, NormWeights, PartKernels, parts_trial
from fminfer.compute.spec import Mlp, Norm
from fminfer.compute.trial import Candidate
from fminfer.compute.weights import KERNEL_TYPES


class LayerKernels(PartKernels):
    """The kernels of one built library."""

    device = torch.device("cpu")
    activations = GATES | {"gelu": GELU}

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def can_norm(self, how: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
        """Tell whether it computes such a norm: RMSNorms, and LayerNorms with weight and bias."""
        has_both = how.has_bias != how.is_rms and not (how.offset and not how.is_rms)
        return how.has_weight and has_both and weight is not None and weight.dim() == 1

    def run_norm(
        self,
        x: torch.Tensor,
        norm: NormWeights,
        out: torch.Tensor,
        added: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        how, rows, weight = norm.how, self._rows(x, out), norm.weight.data_ptr()
        sums = (None, None) if added is None else (added[0].data_ptr(), added[1].data_ptr())
        if how.is_rms:
            self._library.fminfer_rms_norm(rows, weight, how.eps, how.offset, *sums)
            return
        assert norm.bias is not None, "bias of a norm"
        self._library.fminfer_layer_norm(rows, weight, norm.bias.data_ptr(), how.eps, *sums)

    def run_rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        turns = cos.data_ptr(), sin.data_ptr()
        self._library.fminfer_rotate(self._rows(x, out), *turns, cos.shape[-1])

    def run_gate(
        self, x: torch.Tensor, second: torch.Tensor | None, activation: int, out: torch.Tensor
    ) -> None:
        address = None if second is None else second.data_ptr()
        self._library.fminfer_gate(self._rows(x, out), address, activation)

    def _rows(self, x: torch.Tensor, out: torch.Tensor) -> ctypes._CArgObject:
        outer, inner, *steps = self.walk(x)
        kind, num_threads = KERNEL_TYPES[x.dtype], torch.get_num_threads()
        sizes = (outer, inner, x.shape[-1], *steps, kind, num_threads)
        return ctypes.byref(RowSizes(x.data_ptr(), out.data_ptr(), *sizes))


def activations_of(mlp: Mlp) -> dict[str, int]:
    """Return the numbers of those that the library computes in an MLP."""
    return LayerKernels.activations | ({} if mlp.is_gated else {"relu": RELU})


def parts_candidate(library: ctypes.CDLL, dtype: torch.dtype) -> Candidate[None, PartKernels]:
    """Return the CPU's parts, of hidden states of a dtype."""
    return Candidate(
        lambda _: LayerKernels(library),
        lambda _: parts_trial(dtype, LayerKernels.device),
        lambda _: dtype in KERNEL_TYPES,
    )
