"""Small problems on which kernels that draw and rank are tried beside plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fminfer.compute.sampling.sampler import Drawer, Ranker, SamplingTensors, draw, rank
from fminfer.compute.trial import Pair

VOCAB = 3000


def draw_pairs(drawer: Drawer) -> Iterator[Pair]:
    """Draw with a kernel and in plain torch, once by each filter and without any."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((8, VOCAB), generator=generator)
    how = SamplingTensors(
        temperature=torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.7, 1.3]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.8, 1.0]),
        top_k=torch.tensor([0, 0, 0, 0, 20, 0, 50, 0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0]),
        noise=torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator),
    )
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    yield drawer(logits, how, rows), draw(logits, how, rows)


def rank_pairs(ranker: Ranker) -> Iterator[Pair]:
    """Rank logits with a kernel and in plain torch, some of them equal."""
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[1, ::7] = 4.0
    for num_top in (1, 5):
        found, expected = ranker(logits, num_top), rank(logits, num_top)
        yield found.best, expected.best
        yield found.best_ids, expected.best_ids
        yield found.first, expected.first
        yield found.normalizer, expected.normalizer
