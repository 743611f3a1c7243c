"""Ranks and draws from logits that are spread over ranks. None of them sees all logits.

Each finds the best of its own, and they share those few numbers. Then all of them decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fminfer.compute.sampling.masks import likeliest
from fminfer.compute.sampling.sampler import (
    Drawer,
    Ranker,
    Ranking,
    SamplingTensors,
    TokenSpan,
    gumbel,
)
from fminfer.compute.shards import Shards

LOWEST = float("-inf")
# What a draw without filters finds in host memory.
NO_FILTER = SamplingTensors(
    *(torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1)),
    torch.zeros(1, dtype=torch.int64),
)


@dataclass(slots=True, frozen=True)
class TokenShard(TokenSpan):
    """The tokens of one rank, among those of all ranks of its stage.

    Args:
        parts: the tokens of each rank, in their order.
    """

    parts: tuple[range, ...]
    shards: Shards

    @property
    def own(self) -> range:
        return self.parts[self.shards.index]

    @property
    def most_own(self) -> int:
        return max(map(len, self.parts))

    def ranker(self, body: Ranker) -> Ranker:
        def rank(logits: torch.Tensor, num_top: int) -> Ranking:
            """Rank the whole vocabulary by the best of each rank's."""
            found = body(logits, min(num_top, logits.shape[-1]))
            best, ids = _padded(found.best, num_top), _padded(found.best_ids, num_top, 0)
            table = torch.cat([found.normalizer[:, None], best, ids + self.own.start], 1)
            normalizers, best, ids = torch.split(self._share(table), [1, num_top, num_top], -1)
            # Of equals the first stay first: of one rank the lower ids, of two the lower rank.
            best, order = _side_by_side(best).sort(stable=True, dim=-1, descending=True)
            ids = _side_by_side(ids).gather(-1, order)[:, :num_top].long()
            normalizer = normalizers[..., 0].logsumexp(0).float()
            return Ranking(normalizer, best[:, :num_top].float(), ids, ids[:, 0])

        return rank

    def drawer(self, body: Drawer) -> Drawer:
        def draw(logits: torch.Tensor, how: SamplingTensors, rows: torch.Tensor) -> torch.Tensor:
            return _Drawing(self, body, logits[rows].float(), how, rows).draw()

        return draw

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        places = likeliest(logits)[:, None]
        values = logits.gather(-1, places)
        return self.winner(values, places)[:, 0].long()

    def logits_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places = ids - self.own.start
        is_own = (places >= 0) & (places < len(self.own))
        found = logits.gather(-1, places.where(is_own, 0)[:, None])[:, 0].float()
        return self._share(found.where(is_own, 0.0)).sum(0).float()

    def join(self, few: torch.Tensor) -> torch.Tensor:
        return self._share(few).amax(0).float()

    def winner(
        self, scores: torch.Tensor, places: torch.Tensor, *more: torch.Tensor
    ) -> torch.Tensor:
        """Return the id with the highest score of all ranks, and more of it: (rows, 1 + more).

        Args:
            scores, places, more: (rows, 1), of the best one here.
        """
        table = torch.cat([scores.double(), places + self.own.start, *more], 1)
        found = self._share(table)
        best = found[..., 0].argmax(0)  # of equals the lowest rank's
        return found[best, torch.arange(len(best), device=best.device), 1:]

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, float64."""
        return self._share(sums).sum(0)

    def _share(self, table: torch.Tensor) -> torch.Tensor:
        return self.shards.share(table.double())


def _padded(table: torch.Tensor, width: int, value: float = LOWEST) -> torch.Tensor:
    """Return (rows, width) numbers; a rank may have fewer tokens than are asked for."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)


def _side_by_side(found: torch.Tensor) -> torch.Tensor:
    """Return what ranks have, (ranks, rows, k), as (rows, ranks * k)."""
    return found.transpose(0, 1).flatten(1)


class _Drawing:
    """The draw of some rows: what filters leave here, and who wins of all.

    A token is in the smallest set of mass >= top_p if those before it have less. So the winner of
    all tokens is looked at. If it is not in the set, nor is any token behind it, and those before
    it race again: noise belongs to a token, and the winner of a set is its best.
    """

    def __init__(
        self,
        tokens: TokenShard,
        body: Drawer,
        logits: torch.Tensor,  # (rows, own tokens) float32
        how: SamplingTensors,
        rows: torch.Tensor,
    ) -> None:
        self._tokens, self._body, self._left = tokens, body, logits
        self._how, host = how.rows(rows), how.host
        most_kept = min(int(host.top_k.max()), tokens.size)
        self._has_top_p = bool((host.top_p < 1).any())
        if most_kept > 0 or self._has_top_p or bool((host.min_p > 0).any()):
            self._filter(most_kept)

    def _filter(self, most_kept: int) -> None:
        """Leave what top_k and min_p leave, and weigh it."""
        how, left = self._how, self._left
        best = _padded(left.topk(min(max(1, most_kept), left.shape[-1]), -1)[0], max(1, most_kept))
        best = self._tokens.shards.share(best)  # (ranks, rows, k)
        if most_kept > 0:
            left = self._keep_top_k(left, best)
        far = (left - best[..., 0].amax(0)[:, None]) / how.temperature[:, None]
        is_out = far < how.min_p.log()[:, None]
        self._left = left.masked_fill(is_out, LOWEST)
        if self._has_top_p:
            self._weights = far.masked_fill(is_out, LOWEST).exp().double()
            self._wanted = self._tokens.total(self._weights.sum(-1)) * how.top_p.double()

    def _keep_top_k(self, left: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Set all but each row's top_k best to -inf; ties go to the lowest ids. 0 keeps all."""
        size, top_k = self._tokens.size, self._how.top_k
        counts = torch.where(top_k > 0, top_k, size).clamp(max=size)
        ordered = _side_by_side(best).sort(dim=-1, descending=True)[0]
        last = ordered.gather(-1, (counts - 1).clamp(max=ordered.shape[-1] - 1)[:, None])
        num_above = (best > last).sum((0, 2))
        num_before = (best[: self._tokens.shards.index] == last).sum((0, 2))
        is_equal = left == last
        is_first = is_equal.cumsum(-1) <= (counts - num_above - num_before)[:, None]
        keep = (left > last) | (is_equal & is_first) | (counts == size)[:, None]
        return left.masked_fill(~keep, LOWEST)

    def draw(self) -> torch.Tensor:
        """Return the rows' tokens, int64."""
        found = torch.empty(len(self._left), dtype=torch.int64, device=self._left.device)
        rows = torch.arange(len(found), device=found.device)
        while len(rows):
            found[rows], value = self._race(rows)
            if not self._has_top_p:
                break
            rows = rows[self._is_out(rows, found[rows], value)]
        return found

    def _race(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the winners of what is left of some rows, and their logits."""
        left, how = self._left[rows], self._how.rows(rows)
        whole = replace(
            how,
            top_p=torch.ones_like(how.top_p),
            top_k=torch.zeros_like(how.top_k),
            min_p=torch.zeros_like(how.min_p),
            on_host=NO_FILTER,
            first_id=self._tokens.own.start,
        )
        every = torch.arange(len(rows), device=rows.device)
        places = self._body(left, whole, every)[:, None]
        values = left.gather(-1, places).double()
        noise = gumbel(how.noise, places + self._tokens.own.start)
        scores = values / how.temperature[:, None].double() + noise
        ids, logits = self._tokens.winner(scores, places, values).unbind(-1)
        return ids.long(), logits

    def _is_out(self, rows: torch.Tensor, ids: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Tell which winners are not among the top_p, and leave only tokens before them."""
        left = self._left[rows].double()
        own = self._tokens.own
        places = torch.arange(own.start, own.stop, device=ids.device)
        is_before = (left > value[:, None]) | ((left == value[:, None]) & (places < ids[:, None]))
        mass = self._tokens.total((self._weights[rows] * is_before).sum(-1))
        is_out = (mass >= self._wanted[rows]) & (self._how.top_p[rows] < 1)
        self._left[rows[is_out]] = left.float().masked_fill(~is_before, LOWEST)[is_out]
        return is_out
