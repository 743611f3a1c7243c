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
from fminfer.compute.shards import ShardGroup

LOWEST = float("-inf")
NUM_BEST = 64  # tokens of a rank that most filtered draws look at; the kernel finds so many at once
MOST_ROWS = 16  # drawn at once from all tokens, whose weights and noise take memory
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
    shards: ShardGroup

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

    def drawer(self, body: Drawer, ranker: Ranker) -> Drawer:
        def draw(logits: torch.Tensor, how: SamplingTensors, rows: torch.Tensor) -> torch.Tensor:
            """Draw from the best tokens where filters leave no others, and else from all."""
            logits, own = _rows_of(logits, rows).float(), how.rows(rows)
            found = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
            left, most = torch.arange(len(rows), device=rows.device), len(rows)
            if bool(how.host.is_filtered.any()):
                found, is_drawn = self._draw_from_best(logits, own, ranker)
                left, most = (~is_drawn).nonzero()[:, 0], MOST_ROWS
            for some in torch.split(left, most) if len(left) else ():
                part = _rows_of(logits, some)
                found[some] = _Drawing(self, body, part, own.rows(some), how.host).draw()
            return found

        return draw

    def _draw_from_best(
        self, logits: torch.Tensor, how: SamplingTensors, ranker: Ranker
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of rows whose filters leave only some of the best, and which these are.

        Filters leave the first of tokens in the order of their logits. Tokens are known in this
        order down to the best one that some rank has not told of.
        """
        num = min(NUM_BEST, logits.shape[-1])
        ranking = ranker(logits, num)
        scale = 1 / how.temperature[:, None].double()
        top = ranking.best[:, :1].double()
        far = (logits - ranking.best[:, :1]).mul_(scale.float())
        mass = far.exp_().sum(-1, keepdim=True).where(top.isfinite(), 0.0)  # a mask may leave none
        last = ranking.best[:, -1:].double()
        if num == logits.shape[-1]:  # there are no others
            last = torch.full_like(last, LOWEST)
        best = _padded(ranking.best, NUM_BEST)
        ids = _padded(ranking.best_ids, NUM_BEST, 0) + self.own.start
        sizes = [1, 1, 1, NUM_BEST, NUM_BEST]
        told = self._share(torch.cat([top, mass, last, best, ids], 1))
        tops, masses, lasts, best, ids = torch.split(told, sizes, -1)
        best, order = _side_by_side(best).sort(stable=True, dim=-1, descending=True)
        ids = _side_by_side(ids).gather(-1, order).long()
        weights = ((best - best[:, :1]) * scale).exp_()
        total = (masses * ((tops - best[:, :1]) * scale).exp_()).sum(0)
        is_kept = best > LOWEST
        top_k = how.top_k[:, None]
        is_kept &= (top_k == 0) | (torch.arange(best.shape[1], device=best.device) < top_k)
        is_kept &= weights >= how.min_p[:, None].double()
        has_others = (how.top_k > 0) | (how.min_p > 0)
        total = torch.where(has_others[:, None], (weights * is_kept).sum(-1, keepdim=True), total)
        is_kept &= weights.cumsum(-1) - weights < how.top_p[:, None].double() * total
        is_whole = (lasts.amax(0) == LOWEST)[:, 0]
        num_known = (best > lasts.amax(0)).sum(-1)
        is_drawn = is_whole | (is_kept.sum(-1) < num_known)
        is_drawn &= how.is_filtered & best[:, 0].isfinite()
        scores = (best * scale + gumbel(how.noise, ids)).masked_fill_(~is_kept, LOWEST)
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0], is_drawn

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
        return self.shards.gather(table.double())


def _rows_of(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows, which ascend; all of them as they are."""
    return table if len(rows) == len(table) else table[rows]


def _padded(table: torch.Tensor, width: int, value: float = LOWEST) -> torch.Tensor:
    """Return (rows, width) numbers; a rank may have fewer tokens than are asked for."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)


def _side_by_side(found: torch.Tensor) -> torch.Tensor:
    """Return what ranks have, (ranks, rows, k), as (rows, ranks * k)."""
    return found.transpose(0, 1).flatten(1)


class _Drawing:
    """The draw of some rows: what filters leave here, and who wins of all.

    A token is in the smallest set of mass >= top_p if those before it have less. So the ranks look
    at the winner of all tokens. If it is not in the set, nor is any token behind it. Those before
    it then race again, with the same noise: it belongs to a token, so a set's best token wins.
    """

    def __init__(
        self,
        tokens: TokenShard,
        body: Drawer,
        logits: torch.Tensor,  # (rows, own tokens) float32
        how: SamplingTensors,
        host: SamplingTensors,  # of these rows and others, in host memory
    ) -> None:
        self._tokens, self._body, self._left, self._how = tokens, body, logits, how
        most_kept = min(int(host.top_k.max()), tokens.size)
        self._has_top_p = bool((host.top_p < 1).any())
        if most_kept > 0 or self._has_top_p or bool((host.min_p > 0).any()):
            self._filter(most_kept)

    def _filter(self, most_kept: int) -> None:
        """Leave what top_k and min_p leave, and weigh it."""
        how, left = self._how, self._left
        best = _padded(left.topk(min(max(1, most_kept), left.shape[-1]), -1)[0], max(1, most_kept))
        best = self._tokens.shards.gather(best)  # (ranks, rows, k)
        if most_kept > 0:
            left = self._keep_top_k(left, best)
        far = (left - best[..., 0].amax(0)[:, None]) / how.temperature[:, None]
        is_out = far < how.min_p.log()[:, None]
        self._left = left.masked_fill(is_out, LOWEST)
        if self._has_top_p:
            self._weights = far.masked_fill(is_out, LOWEST).exp_()
            mass = self._weights.sum(-1)
            self._wanted = self._tokens.total(mass) * how.top_p.double()

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
        left, how = _rows_of(self._left, rows), self._how.rows(rows)
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
        left, limit = self._left[rows], value[:, None].float()
        own = self._tokens.own
        places = torch.arange(own.start, own.stop, device=ids.device)
        is_before = (left > limit) | ((left == limit) & (places < ids[:, None]))
        before = (self._weights[rows] * is_before).sum(-1)
        is_out = (self._tokens.total(before) >= self._wanted[rows]) & (self._how.top_p[rows] < 1)
        self._left[rows[is_out]] = left.masked_fill(~is_before, LOWEST)[is_out]
        return is_out
