"""Ranks and draws from logits that are spread over ranks.

Each finds the best of its own, and they share those few numbers. Then all of them
decide the same. Logits are gathered of the few rows alone whose filters leave more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fminfer.compute.sampling.masks import find_likeliest
from fminfer.compute.sampling.sampler import (
    Ranking,
    SamplingTensors,
    TokenSpan,
    compute_gumbel_noise,
)
from fminfer.compute.shards import ShardGroup

LOWEST = float("-inf")
# tokens of a rank that most filtered draws look at; the kernel finds so many at once
NUM_BEST = 64
PIECE = 1 << 14  # numbers of a row; torch divides the sum of more between threads
MOST_ROWS = 16  # whose logits of all tokens are gathered at once


@dataclass(slots=True, frozen=True)
class TokenShard(TokenSpan):
    """The tokens of one rank, among those of all ranks of its stage."""

    parts: tuple[range, ...]  # the tokens of each rank, in their order
    shards: ShardGroup

    @property
    def local_ids(self) -> range:
        return self.parts[self.shards.index]

    @property
    def max_local_tokens(self) -> int:
        return max(map(len, self.parts))

    def rank_logits(self, logits: torch.Tensor, num_top: int) -> Ranking:
        """Rank the whole vocabulary by the best of each rank's."""
        num_top = max(1, min(num_top, self.size))
        local = self.ranker(logits, min(num_top, logits.shape[-1]))
        best = _pad_columns(local.best, num_top)
        ids = _pad_columns(local.best_ids, num_top, 0)
        table = torch.cat(
            [local.normalizer[:, None], best, ids + self.local_ids.start], 1
        )
        normalizers, best, ids = torch.split(
            self._gather_ranks(table), [1, num_top, num_top], -1
        )
        # Of equals the first stay first: of one rank the lower ids, of two the lower rank.
        best, order = _join_ranks(best).sort(stable=True, dim=-1, descending=True)
        ids = _join_ranks(ids).gather(-1, order)[:, :num_top].long()
        # Over lines, each of them is summed for itself.
        normalizer = normalizers[..., 0].t().contiguous().logsumexp(-1).float()
        return Ranking(normalizer, best[:, :num_top].float(), ids)

    def draw_tokens(
        self, logits: torch.Tensor, sampling: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        logits = _select_rows(logits, rows).float()
        row_sampling = sampling.select(rows)
        if not sampling.host.is_filtered.any():
            return self._race_tokens(
                logits, replace(row_sampling, on_host=sampling.on_host)
            )
        ids = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        for is_part, draw_part in (
            (~row_sampling.is_filtered, self._race_tokens),
            (row_sampling.is_filtered, self._draw_filtered),
        ):
            part = is_part.nonzero()[:, 0]
            if len(part):
                ids[part] = draw_part(
                    _select_rows(logits, part), row_sampling.select(part)
                )
        return ids

    def _race_tokens(
        self, logits: torch.Tensor, sampling: SamplingTensors
    ) -> torch.Tensor:
        """Draw rows without filters: each rank's winner races with those of others."""
        local_sampling = replace(sampling, first_id=self.local_ids.start)
        places = self.drawer(logits, local_sampling, _all_rows(logits))[:, None]
        noise = compute_gumbel_noise(sampling.noise, places + self.local_ids.start)
        scores = (
            logits.gather(-1, places).double() / sampling.temperature[:, None].double()
            + noise
        )
        return self._find_winners(scores, places)

    def _draw_filtered(
        self, logits: torch.Tensor, sampling: SamplingTensors
    ) -> torch.Tensor:
        """Draw from the best tokens where filters leave no others, and else from all."""
        ids, is_drawn = self._draw_from_best(logits, sampling)
        left = (~is_drawn).nonzero()[:, 0]
        for some in torch.split(left, MOST_ROWS) if len(left) else ():
            padded = self.shards.gather(
                _pad_columns(logits[some], self.max_local_tokens)
            )
            whole = torch.cat(
                [
                    table[:, : len(part)]
                    for table, part in zip(padded, self.parts, strict=True)
                ],
                1,
            )
            ids[some] = self.drawer(whole, sampling.select(some), _all_rows(whole))
        return ids

    def _draw_from_best(
        self, logits: torch.Tensor, sampling: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of rows whose filters leave only some of the best, and
        which these are.

        Tokens are known in the order of their logits, down to the best that a rank has not told.
        """
        num = min(NUM_BEST, logits.shape[-1])
        ranking = self.ranker(logits, num)
        scale = 1 / sampling.temperature[:, None].double()
        top = ranking.best[:, :1].double()
        far = (logits - ranking.best[:, :1]).mul_(scale.float())
        pieces = torch.split(far.exp_(), PIECE, -1)
        mass = torch.stack([piece.sum(-1) for piece in pieces], -1).sum(
            -1, keepdim=True
        )
        # a mask may leave none
        mass = mass.where(top.isfinite(), 0.0)
        last = ranking.best[:, -1:].double()
        if num == logits.shape[-1]:  # there are no others
            last = torch.full_like(last, LOWEST)
        best = _pad_columns(ranking.best, NUM_BEST)
        ids = _pad_columns(ranking.best_ids, NUM_BEST, 0) + self.local_ids.start
        sizes = [1, 1, 1, NUM_BEST, NUM_BEST]
        table = self._gather_ranks(torch.cat([top, mass, last, best, ids], 1))
        tops, masses, lasts, best, ids = torch.split(table, sizes, -1)
        best, order = _join_ranks(best).sort(stable=True, dim=-1, descending=True)
        ids = _join_ranks(ids).gather(-1, order).long()
        weights = ((best - best[:, :1]) * scale).exp_()
        total = (masses * ((tops - best[:, :1]) * scale).exp_()).sum(0)
        is_kept = best > LOWEST
        top_k = sampling.top_k[:, None]
        is_kept &= (top_k == 0) | (
            torch.arange(best.shape[1], device=best.device) < top_k
        )
        is_kept &= weights >= sampling.min_p[:, None].double()
        has_others = (sampling.top_k > 0) | (sampling.min_p > 0)
        num_left = is_kept.sum(-1)
        total = torch.where(
            has_others[:, None], (weights * is_kept).sum(-1, keepdim=True), total
        )
        is_kept &= (
            weights.cumsum(-1) - weights < sampling.top_p[:, None].double() * total
        )
        is_whole = (lasts.amax(0) == LOWEST)[:, 0]
        num_known = (best > lasts.amax(0)).sum(-1)
        # Of a total of known tokens alone, top_p takes a part of too little.
        is_weighed = ~has_others | (num_left < num_known)
        is_drawn = is_whole | (is_weighed & (is_kept.sum(-1) < num_known))
        is_drawn &= best[:, 0].isfinite()
        scores = (
            best * scale + compute_gumbel_noise(sampling.noise, ids)
        ).masked_fill_(~is_kept, LOWEST)
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0], is_drawn

    def find_likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        places = find_likeliest(logits)[:, None]
        return self._find_winners(logits.gather(-1, places), places)

    def logits_of(
        self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        places = ids - self.local_ids.start
        is_own = (places >= 0) & (places < len(self.local_ids))
        local_logits = TokenSpan.logits_of(self, logits, places.where(is_own, 0), rows)
        return self._gather_ranks(local_logits.where(is_own, 0.0)).sum(0).float()

    def join_few(self, few: torch.Tensor) -> torch.Tensor:
        return self._gather_ranks(few).amax(0).float()

    def join_sums(self, sums: torch.Tensor) -> torch.Tensor:
        return self._gather_ranks(sums).logsumexp(0).float()

    def _find_winners(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the id with the highest score of all ranks, int64, of each one's best,
        (rows, 1).

        Of equals the lowest rank's wins.
        """
        scores, ids = self._gather_ranks(
            torch.cat([scores.double(), places + self.local_ids.start], 1)
        ).unbind(-1)
        return ids.gather(0, scores.argmax(0, keepdim=True))[0].long()

    def _gather_ranks(self, table: torch.Tensor) -> torch.Tensor:
        return self.shards.gather(table.double())


def _select_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows, which ascend; all of them as they are."""
    return table if len(rows) == len(table) else table[rows]


def _pad_columns(
    table: torch.Tensor, width: int, value: float = LOWEST
) -> torch.Tensor:
    """Return (rows, width) numbers; a rank may have fewer tokens than are asked for."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=value)


def _join_ranks(tables: torch.Tensor) -> torch.Tensor:
    """Return what ranks have, (ranks, rows, k), as (rows, ranks * k)."""
    return tables.transpose(0, 1).flatten(1)


def _all_rows(table: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(table), device=table.device)
