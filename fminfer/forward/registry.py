"""Chooses what computes each part of a model as it loads: a kernel, or plain torch.

The first candidate that serves a request is tried beside plain torch, once for all that are
like it; if it fails, the next is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property, partial

import torch

from fminfer.compute.attention.kernel_attention import (
    CpuAttention,
    StageAttention,
    make_attention_trial,
)
from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.formats.dense import Dense
from fminfer.compute.kernels.kernel_build import KernelBuild, start_build
from fminfer.compute.layers.bodies import (
    CpuPartKernels,
    PartKernels,
    Parts,
    make_part_trial,
)
from fminfer.compute.layers.experts import Mix, Mixture, make_expert_candidate
from fminfer.compute.layers.products import (
    Linear,
    OrderedProduct,
    PackedProduct,
    make_head_candidate,
    make_items_candidate,
    make_library_candidates,
    make_product_candidate,
    multiply_items,
)
from fminfer.compute.sampling.draw_kernel import (
    RANKS_TRIAL,
    DrawKernel,
    ScoreKernel,
    make_draw_trial,
)
from fminfer.compute.sampling.sampler import Drawer, Ranker, draw_tokens, rank_logits
from fminfer.compute.trial import (
    Candidate,
    Kernel,
    Target,
    compare_pairs,
    explain_failure,
)
from fminfer.compute.values.spec import Attention
from fminfer.compute.values.weights import KERNEL_TYPES, Format, Function, Weight
from fminfer.core.config import Kernels
from fminfer.core.errors import UsageError
from fminfer.machine.device import is_fast_in_bfloat16, start_openmp_threads
from fminfer.machine.out_of_memory import is_out_of_memory


def find_library(
    kernels: Kernels, device: torch.device, build: KernelBuild | None = None
) -> ctypes.CDLL | None:
    """Return the CPU's kernels, waiting for their build; None: not the CPU, or no kernels.

    Raises:
        UsageError: --kernels require, and there is none.
    """
    if kernels == "off" or device.type != "cpu":
        return None
    build = build or start_build()
    library = build.wait_for_library()
    start_openmp_threads()
    if library is None and kernels == "require":
        raise UsageError(f"--kernels require: {build.error}. Use --kernels auto")
    return library


def open_registry(
    kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Registry:
    """Return a registry of what this machine has, waiting for the build of its kernels.

    Raises:
        UsageError: --kernels require, and there are none.
    """
    registry = Registry(kernels, find_library(kernels, device), dtype, device)
    if kernels != "off" and device.type == "cpu" and registry.library is None:
        registry.reasons[None] = start_build().error
    return registry


class Registry:
    """What computes the parts of a model; the candidates of each kind stand in `of_…`."""

    def __init__(
        self,
        mode: Kernels,  # "require": a kernel that fails its trial ends the run
        # the CPU's kernels; None: there are none, or they are off
        library: ctypes.CDLL | None,
        dtype: torch.dtype,  # of hidden states
        device: torch.device,
    ) -> None:
        self.mode = mode
        self.library = library
        self.dtype = dtype
        self.device = device
        # why each candidate failed first; None: no library
        self.reasons: dict[object, str] = {}
        # the first product that torch computes in a kernel's place; "": none
        self._torch_product = ""
        # by candidate and trial's key
        self._passed: dict[tuple[object, Hashable], bool] = {}
        self.of_attention: list[Candidate[StageAttention, AttentionKernel]] = []
        self.of_parts: list[Candidate[None, PartKernels]] = []
        self.of_products: list[Candidate[Linear, Function]] = []
        self.of_experts: list[Candidate[Mixture, Mix]] = []
        self.of_heads: list[Candidate[Linear, PackedProduct]] = []
        self.of_items: list[Candidate[torch.Tensor, Function]] = []
        self.of_draws: list[Candidate[None, Drawer]] = []
        self.of_ranks: list[Candidate[None, Ranker]] = []
        self._try_attention = partial(make_attention_trial, dtype=dtype, device=device)
        self._try_parts = partial(make_part_trial, dtype=dtype, device=device)
        self._try_draws = partial(make_draw_trial, device=device)
        if library is not None and device.type == "cpu":
            self._add_library(library)
        if device.type == "cpu":
            self.of_products += make_library_candidates(
                dtype, is_fast=is_fast_in_bfloat16(device)
            )
        elif mode != "off":
            self.add_triton()

    def _add_library(self, library: ctypes.CDLL) -> None:
        """Add the CPU's kernels."""
        dtype = self.dtype
        self.of_attention.append(
            Candidate(lambda _: CpuAttention(library), self._try_attention)
        )
        if dtype in KERNEL_TYPES:
            self.of_parts.append(
                Candidate(lambda _: CpuPartKernels(library), self._try_parts)
            )
        self.of_products.append(make_product_candidate(library, dtype))
        self.of_experts.append(make_expert_candidate(library, dtype))
        self.of_heads.append(make_head_candidate(library, dtype))
        self.of_items.append(make_items_candidate(library, dtype))
        self.of_draws.append(Candidate(lambda _: DrawKernel(library), self._try_draws))
        self.of_ranks.append(
            Candidate(lambda _: ScoreKernel(library), lambda _: RANKS_TRIAL)
        )

    def add_triton(self) -> None:
        """Add the GPU's kernels. Triton comes with torch for CUDA only, and is imported late."""
        dtype = self.dtype
        device = self.device

        def attend(layers: StageAttention) -> AttentionKernel:
            from fminfer.compute.attention.triton_attention import TritonAttention

            shape = (layers.spec.heads, *layers.spec.cache_shape[1:])
            return TritonAttention(
                *shape, dtype=dtype, device=device, kv_dtype=layers.kv_dtype
            )

        def make_parts(_: None) -> PartKernels:
            from fminfer.compute.layers.triton_layers import TritonPartKernels

            return TritonPartKernels(device)

        def make_drawer(_: None) -> Drawer:
            from fminfer.compute.layers.triton_layers import race_in_triton

            return partial(draw_tokens, racer=race_in_triton)

        self.of_attention.append(Candidate(attend, self._try_attention))
        self.of_parts.append(Candidate(make_parts, self._try_parts))
        self.of_draws.append(Candidate(make_drawer, self._try_draws))

    def choose_attention(
        self, specs: Sequence[Attention], block_size: int, kv_dtype: torch.dtype
    ) -> AttentionKernel | None:
        """Return the attention kernel of layers whose keys have one shape; None: plain torch."""
        return self.find(
            self.of_attention, StageAttention(tuple(specs), block_size, kv_dtype)
        )

    @cached_property
    def parts(self) -> Parts:
        """What makes norms, rotary positions and activations."""
        return Parts(self.find(self.of_parts, None))

    def choose_product(self, weight: Weight, bias: torch.Tensor | None) -> Function:
        """Return x·Wᵀ + b of x, (…, inputs), packed once where that is faster."""
        linear = Linear(weight, bias)
        product = self.find(self.of_products, linear) or linear
        if not isinstance(product, PackedProduct | OrderedProduct):
            self._note_torch_product(weight.shape, weight.format)
        return product

    def choose_experts_kernel(self, mixture: Mixture) -> Mix | None:
        """Return the kernel of a layer's experts; None: each expert is made by itself."""
        return self.find(self.of_experts, mixture)

    def choose_head(
        self, weight: Weight, bias: torch.Tensor | None
    ) -> PackedProduct | None:
        """Return the head, packed, for `PackedProduct.multiply_unrounded`; None: plain torch."""
        head = self.find(self.of_heads, Linear(weight, bias))
        if head is None:
            self._note_torch_product(weight.shape, weight.format)
        return head

    def _note_torch_product(self, shape: Sequence[int], held: Format) -> None:
        """Note a product whose sums may depend on other rows; one of nothing has no sums."""
        if math.prod(shape) and not self._torch_product:
            sizes = " × ".join(map(str, shape))
            self._torch_product = f"torch computes products of {sizes} in {held.name}"

    def choose_steady_product(
        self, weight: Weight, bias: torch.Tensor | None
    ) -> Function:
        """Return x·Wᵀ + b of few outputs. With a kernel no row's bits depend on other rows."""
        summed_bias = None if bias is None else bias.float()
        return self.choose_head(weight, summed_bias) or Linear(weight, bias)

    def choose_items_product(self, weight: torch.Tensor) -> Function:
        """Return `multiply_items` with (items, inputs, outputs), packed if it can be."""
        product = self.find(self.of_items, weight)
        if product is None:
            self._note_torch_product(weight.shape, Dense(weight.dtype))
        return product or partial(multiply_items, weight=weight)

    def choose_drawer(self) -> Drawer:
        """Return what draws tokens."""
        return self.find(self.of_draws, None) or draw_tokens

    def choose_ranker(self) -> Ranker:
        """Return what ranks logits."""
        return self.find(self.of_ranks, None) or rank_logits

    @property
    def why_plain(self) -> str:
        """Why plain torch computes what a kernel should; "": it does not."""
        return "; ".join(dict.fromkeys(filter(None, self.reasons.values())))

    @property
    def why_dependent(self) -> str:
        """Why the CPU's sums may depend on other rows: torch computes some; "": they do not."""
        return self.why_plain or self._torch_product

    def find(
        self, candidates: Iterable[Candidate[Target, Kernel]], request: Target
    ) -> Kernel | None:
        """Return the first body that serves and passes its trial; None: plain torch computes.

        Raises:
            UsageError: --kernels require and one fails, or the GPU's context is broken.
        """
        for candidate in candidates:
            if candidate.serves(request):
                body = self._build_candidate(candidate, request)
                if body is not None:
                    return body
        return None

    def _build_candidate(
        self, candidate: Candidate[Target, Kernel], request: Target
    ) -> Kernel | None:
        trial = candidate.trial(request)
        key = candidate, trial.key
        if key in self._passed:
            return candidate.make(request) if self._passed[key] else None
        body = None
        is_sure = True
        try:
            body = candidate.make(request)
            with torch.inference_mode():
                is_sure = compare_pairs(trial.pairs(body), trial.limit)
        except Exception as error:
            if is_out_of_memory(error):  # that says nothing of the body
                raise
            body = None
            self.reasons.setdefault(
                candidate, explain_failure(self.mode, trial.name, error)
            )
        # what is nan could not be compared: the next of its key is tried, too
        if is_sure:
            self._passed[key] = body is not None
        return body
