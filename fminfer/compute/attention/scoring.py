"""What attention is called with, and the product of its weights and values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fminfer.compute.values.spec import Attention, Relative

NO_LIMIT = 2**30  # of positions
MOST_RELATIVE = 8192  # tokens of a model whose positions are learned biases by distance


@dataclass(slots=True, frozen=True)
class Scoring:
    """What a layer makes of its scores, at each step.

    A key is seen if -ahead <= query position - key position < window (None: no limit).
    Scores are bent into (-softcap, softcap) before biases and mask (None: left as they
    are). A sink is the score of one key more, which has no value (Xiao et al. 2024; gpt-oss).
    """

    scaling: float
    window: int | None = None
    slopes: torch.Tensor | None = None  # (heads,) float32, of ALiBi
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (heads,) float32
    ahead: int = 0  # keys behind its own that a query sees, at most
    # (heads, 2 * reach + 1) float32: added to scores by query position - key position,
    # from -reach to reach; what is farther has that of the end.
    relative: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """How far `relative` reaches; 0: there is none."""
        return 0 if self.relative is None else self.relative.shape[1] // 2

    def bias_and_mask(
        self, scores: torch.Tensor, distance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bent scores with their biases, (heads, …, keys), and which keys are hidden.

        The distance is query position - key position, (…, keys), with as many
        dimensions as here.
        """
        if self.softcap is not None:
            scores = apply_soft_cap(scores, self.softcap)
        if self.slopes is not None:
            scores = scores - self.slopes.view(-1, *[1] * distance.dim()) * distance
        if self.relative is not None:
            scores = (
                scores
                + self.relative[:, self.reach + distance.clamp(-self.reach, self.reach)]
            )
        is_hidden = distance < -self.ahead
        return scores, is_hidden if self.window is None else is_hidden | (
            distance >= self.window
        )


@dataclass(slots=True)
class AttentionCall:
    """What the attention of a layer is called with in a step."""

    query: torch.Tensor  # (1, heads, tokens, head_dim)
    new_keys: torch.Tensor  # (1, kv_heads, tokens, head_dim)
    new_values: torch.Tensor
    keys: torch.Tensor  # (pool, kv_heads, block_size, head_dim)
    values: torch.Tensor  # the same; or the very keys, where a layer keeps one of both
    layout: Any  # of the step's rows, as the kernel's `lay_out` returns it
    scoring: Scoring


def make_scoring(
    spec: Attention,
    device: torch.device,
    sinks: torch.Tensor | None = None,
    relative: torch.Tensor | None = None,  # (buckets, heads)
) -> Scoring:
    """Return it as a spec says; a bias that keys have themselves is not added."""
    slopes = None
    biases = None
    if spec.alibi is not None and not spec.has_cached_bias:
        slopes = torch.tensor(spec.alibi.slopes, device=device)
    if spec.relative is not None and relative is not None:
        buckets = compute_relative_buckets(spec.relative).to(device)
        biases = relative.float()[buckets].t().contiguous()
    ahead = 0 if spec.is_causal else (spec.window or NO_LIMIT) - 1
    return Scoring(
        spec.scaling, spec.window, slopes, spec.softcap, sinks, ahead, biases
    )


def compute_relative_buckets(spec: Relative) -> torch.Tensor:
    """Return T5's buckets, (2 * reach + 1,) int64, by query position - key position."""
    reach = compute_relative_reach(spec)
    if reach == NO_LIMIT:  # farther keys have the bucket of the largest distance
        reach = spec.max_distance
    distance = torch.arange(reach, -reach - 1, -1)  # of the key behind it
    buckets = spec.buckets
    first = torch.zeros_like(distance)
    if spec.is_causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        first = (distance > 0).long() * buckets
        distance = distance.abs()
    far = _compute_far_buckets(spec, distance, buckets)
    return first + torch.where(distance < spec.num_exact, distance, far)


def _compute_far_buckets(
    spec: Relative, distance: torch.Tensor, buckets: int
) -> torch.Tensor:
    """Return the buckets of distances that share a bucket; below 0: there is no bucket."""
    exact = spec.num_exact
    logs = torch.log(distance.clamp(min=1).float() / exact) / math.log(
        spec.max_distance / exact
    )
    # in transformers' order, to round as it does
    far = exact + (logs * (buckets - exact)).long()
    return far.clamp(max=buckets - 1)


def compute_relative_reach(spec: Relative) -> int:
    """Return the largest distance of a key that has a bucket.

    Buckets of one distance each may reach beyond `max_distance`. From there on the logarithm
    decreases. transformers fails where a bucket would be below 0.
    """
    exact = spec.num_exact
    if exact < spec.max_distance:
        return NO_LIMIT
    if exact == spec.max_distance:  # the steps have no size
        return exact - 1
    buckets = spec.buckets if spec.is_causal else spec.buckets // 2
    far = _compute_far_buckets(spec, torch.arange(exact, MOST_RELATIVE), buckets)
    return exact - 1 + int((far >= 0).sum())


def weigh_values(
    weights: torch.Tensor,  # (…, kv_heads, queries, keys), 0 where hidden
    values: torch.Tensor,  # (…, kv_heads, keys, head_dim)
    is_hidden: torch.Tensor,  # (…, queries, keys) bool
) -> torch.Tensor:  # (…, kv_heads, queries, head_dim)
    """Return weights @ values, with nan where a query sees a value that is nan or infinite.

    A hidden value has the weight 0. But 0 times a nan or an infinity is nan, and so a
    later token, or one that a window has left behind, would reach those that must not see it.
    """
    is_odd = ~values.isfinite()
    if not is_odd.any():
        return weights @ values
    reaches = (~is_hidden).to(weights.dtype) @ is_odd.to(weights.dtype) > 0
    out = weights @ values.masked_fill(is_odd, 0.0)
    return out.masked_fill(reaches, float("nan"))


def make_rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last dimension in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def apply_soft_cap(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Bend values smoothly into (-cap, cap): cap * tanh(values / cap).

    Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """
    return cap * torch.tanh(values / cap)
