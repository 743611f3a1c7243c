"""Chooses the experts of each token, and the weights of what they give."""

from __future__ import annotations

import torch

from fminfer.compute.spec import Moe


def route(
    how: Moe, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, float32, and numbers of each token's experts, (tokens, top_k).

    Args:
        logits: (tokens, experts) float32, of the router.
        bias: (experts,) float32, added to scores for the choice alone.
    """
    if how.scores == "sparsemixer":
        return _mix_sparsely(how, logits)
    scores = logits.sigmoid() if how.scores == "sigmoid" else logits.softmax(-1)
    rated = scores if bias is None else scores + bias
    if how.groups > 1:
        rated = _best_groups(how, rated)
    chosen = rated.topk(how.top_k).indices
    weights = scores.gather(1, chosen)
    if how.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * how.scale, chosen


def _best_groups(how: Moe, rated: torch.Tensor) -> torch.Tensor:
    """Return the ratings of experts, -inf outside the best groups."""
    grouped = rated.view(len(rated), how.groups, -1)
    best = grouped.topk(how.rated_by).values.sum(-1).topk(how.top_groups).indices
    is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=rated.device)
    is_out.scatter_(1, best, False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def _mix_sparsely(how: Moe, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as SparseMixer does (Liu et al. 2023): one expert, then one of the others, and so on.

    The weight of each is its part in a softmax over those whose scores are near to its own.
    """
    weights, chosen, left = [], [], logits
    for _ in range(how.top_k):
        best, number = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * how.mixer_eps
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        weights.append(near.gather(1, number))
        chosen.append(number)
        left = left.scatter(1, number, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)
