"""From logits to tokens: drawing with each row's own parameters, and logprobs in float32.

The logprob is of the raw logits, before temperature and filters. A row's draw depends on its own
logits, parameters and noise only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fminfer.compute.sampling.masks import LogitEditTensors, MaskTensors, find_likeliest
from fminfer.compute.values.step import DRAW, TokenLogprobs
from fminfer.machine.device import send_columns

# Factors and shifts of lowbias32, found by search for a mixer of 32 bits that has little bias:
# Wellons 2018, https://nullprogram.com/blog/2018/07/31/. As signed numbers, which torch has.
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - 2**32


def compute_token_bits(noise: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each row and token id, (rows, tokens) int32.

    Two rounds of a mixer of 32 bits: one with the lower half of a row's noise, one with
    the upper. One round would give two rows whose halves are near each other the same
    numbers at other ids.
    """
    lower = (noise << 32 >> 32).to(torch.int32)[:, None]
    upper = (noise >> 32).to(torch.int32)[:, None]
    return _mix_bits(_mix_bits(ids.to(torch.int32) ^ lower).bitwise_xor_(upper))


def compute_gumbel_noise(
    noise: torch.Tensor,  # (rows,) int64, 64 random bits each
    ids: torch.Tensor,  # (tokens,) or (rows, tokens)
) -> torch.Tensor:
    """Return noise of the standard Gumbel distribution, (rows, tokens) float64.

    The few that win have uniform numbers near 0, and need all 32 bits, which float64 holds.
    """
    # 1 - u, where u is (bits + 0.5) / 2^32. Flipped like this, signed bits are 2^31 - 1
    # - unsigned.
    flipped = compute_token_bits(noise, ids).bitwise_xor_(0x7FFFFFFF)
    rest = flipped.double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return rest.log_().neg_().log_().neg_()


def _mix_bits(bits: torch.Tensor) -> torch.Tensor:
    """Mix in place. Products wrap around; shifts are of unsigned numbers."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= FIRST
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= SECOND
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


TOP_P_CANDIDATES = 256  # tried before the whole vocabulary is sorted


def copy_to_host(logprobs: TokenLogprobs) -> TokenLogprobs:
    """Return tensors as arrays, by one copy in float64: a GPU is waited for at each."""
    columns = [logprobs.ids, logprobs.logprobs, logprobs.top_ids, logprobs.top_logprobs]
    if not logprobs.ids.is_cpu:
        table = torch.cat(
            [logprobs.ids[:, None].double(), logprobs.logprobs[:, None], *columns[2:]],
            1,
        ).cpu()
        sent = [*table[:, :2].unbind(1), *table[:, 2:].chunk(2, 1)]
        columns = [
            each.to(like.dtype) for each, like in zip(sent, columns, strict=True)
        ]
    return TokenLogprobs(*(column.numpy() for column in columns))


@dataclass(slots=True, frozen=True)
class Ranking:
    """The normalizer of raw logits, and the best of them, best first."""

    # (rows,) float32: the log of the sum of exponentials; nan where a logit is nan or +inf
    normalizer: torch.Tensor
    best: torch.Tensor  # (rows, k) float32, the logits
    best_ids: torch.Tensor  # (rows, k) int64; of equals the lowest come first

    def select(self, rows: torch.Tensor) -> Ranking:
        """Return the ranking of some rows, which may come several times."""
        return Ranking(self.normalizer[rows], self.best[rows], self.best_ids[rows])


Ranker = Callable[[torch.Tensor, int], Ranking]  # of (rows, vocab) logits and k >= 1


def rank_logits(logits: torch.Tensor, num_top: int) -> Ranking:
    """Rank in plain torch; of equal logits the lowest ids come first."""
    logits = logits.float()
    if num_top == 1:
        best, best_ids = logits.max(-1, keepdim=True)
    else:
        best, best_ids = find_top_logits(logits, num_top)
    normalizer = logits.logsumexp(-1)
    normalizer = normalizer.masked_fill(normalizer == float("inf"), float("nan"))
    return Ranking(normalizer, best, best_ids)


def find_top_logits(
    logits: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best logits and their ids, (rows, k) each, in the order of (-logit, id).

    torch's topk has no fixed order of equals, nor does it say which of them it leaves out.
    """
    # One more than is asked for tells whether an equal is left out.
    best, ids = logits.topk(min(num_top + 1, logits.shape[-1]), -1)
    is_cut = (best[:, num_top - 1 : num_top] == best[:, num_top:]).any(-1)
    best = best[:, :num_top]
    ids = ids[:, :num_top]
    last = best[:, -1:]
    for row in is_cut.nonzero()[:, 0].tolist():
        equal = (logits[row] == last[row]).nonzero()[:, 0]
        num_above = int((best[row] > last[row]).sum())
        ids[row, num_above:] = equal[: num_top - num_above]
    ids = torch.sort(ids, -1)[0]
    best, order = logits.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
    return best, ids.gather(-1, order)


@dataclass(slots=True, frozen=True)
class SamplingTensors:
    """How each row draws: the columns of `DRAW` that have these names."""

    temperature: torch.Tensor  # (rows,) float32; 0: greedy
    top_p: torch.Tensor  # (rows,) float32; 0: greedy
    top_k: torch.Tensor  # (rows,) int64; 0: off
    min_p: torch.Tensor  # (rows,) float32; 0: off
    noise: torch.Tensor  # (rows,) int64, 64 random bits
    # The same in host memory, so that reading them waits for no GPU; None: these are there.
    on_host: SamplingTensors | None = field(default=None, kw_only=True)
    first_id: int = field(default=0, kw_only=True)  # the token of the first logit

    @classmethod
    def from_draws(cls, draws: np.ndarray, device: torch.device) -> SamplingTensors:
        """Put some draws, (rows,) of `DRAW`, on a device."""
        columns = [draws[name].copy() for name in _LARGE_FIRST]
        tensors: dict[str, Any] = dict(
            zip(_LARGE_FIRST, send_columns(columns, device), strict=True)
        )
        on_host = (
            None if device.type == "cpu" else cls.from_draws(draws, torch.device("cpu"))
        )
        return cls(**tensors, on_host=on_host)

    def select(self, rows: torch.Tensor) -> SamplingTensors:
        """Return some rows, without the copy in host memory."""
        return SamplingTensors(*(getattr(self, name)[rows] for name in _DRAWN_BY))

    @property
    def host(self) -> SamplingTensors:
        return self.on_host or self

    @property
    def is_random(self) -> torch.Tensor:  # (rows,) bool; others are greedy
        return (self.temperature > 0) & (self.top_p > 0) & (self.top_k != 1)

    @property
    def is_filtered(self) -> torch.Tensor:  # (rows,) bool
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


_DRAWN_BY = tuple(each.name for each in fields(SamplingTensors) if not each.kw_only)
# as `send_columns` asks
_LARGE_FIRST = sorted(_DRAWN_BY, key=lambda name: -DRAW[name].itemsize)


# Of (rows, vocab) scaled logits, of the rows' noise and of the first logit's token: the
# places that win, int64.
Racer = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# Of (rows, vocab) logits, and which rows draw: the places of their tokens, int64.
Drawer = Callable[[torch.Tensor, SamplingTensors, torch.Tensor], torch.Tensor]


def race_tokens(
    scaled: torch.Tensor,
    noise: torch.Tensor,
    first_id: int = 0,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the places of the highest sums of scaled logit and noise, in plain torch.

    The logits are of tokens from `first_id` on, or of `ids`, (rows, tokens).
    """
    if ids is None:
        ids = torch.arange(first_id, first_id + scaled.shape[-1], device=scaled.device)
    return compute_gumbel_noise(noise, ids).add_(scaled).argmax(-1)


def draw_tokens(
    logits: torch.Tensor,
    # of all rows; temperature and top_p above 0 in those that draw
    sampling: SamplingTensors,
    rows: torch.Tensor,
    racer: Racer = race_tokens,  # or a compiled body of it
) -> torch.Tensor:  # as many places as rows, int64
    """Draw by Gumbel-max from what top_k, min_p and top_p leave, as `Drawer`."""
    # to see which filters are used; a filter leaves other rows as they are
    host = sampling.host
    most_kept = int(host.top_k.max())
    has_min_p = bool((host.min_p > 0).any())
    has_top_p = bool((host.top_p < 1).any())
    logits = logits[rows].float()
    sampling = replace(sampling.select(rows), first_id=sampling.first_id)
    largest, first = logits.max(-1, keepdim=True)
    scaled = (logits - largest) / sampling.temperature[:, None]
    if most_kept > 0:
        scaled = _filter_top_k(scaled, sampling.top_k, most_kept)
    if has_min_p:  # the likeliest token stands at 0 here; log(0) keeps all
        scaled = scaled.masked_fill(
            scaled < sampling.min_p.log()[:, None], float("-inf")
        )
    if has_top_p:
        probs = _filter_top_p(torch.softmax(scaled, -1), sampling.top_p)
        scaled = scaled.masked_fill(probs == 0, float("-inf"))
    places = racer(scaled, sampling.noise, sampling.first_id)
    # Of a row with nan or +inf the first such token: its logprob is nan, whichever is drawn.
    return torch.where(largest.isfinite(), places[:, None], first)[:, 0]


def _filter_top_k(scaled: torch.Tensor, top_k: torch.Tensor, most: int) -> torch.Tensor:
    """Set all but each row's top_k best, at most `most`, to -inf; ties go to the lowest ids."""
    vocab = scaled.shape[-1]
    counts = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    best = scaled.topk(min(most, vocab), -1)[0]
    last = best.gather(-1, (counts - 1).clamp(max=best.shape[-1] - 1)[:, None])
    keep = _mark_first(scaled, last, counts)
    return scaled.masked_fill(~keep & (counts < vocab)[:, None], float("-inf"))


def _filter_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of mass >= top_p, at least one; ties go to the
    lowest ids."""
    is_limited = top_p < 1
    candidates = min(TOP_P_CANDIDATES, probs.shape[-1])
    best = probs.topk(candidates, -1)[0]
    last, counts = _find_smallest_set(best, top_p)
    is_short = is_limited & (best.double().sum(-1) < top_p.double())
    short = is_short.nonzero()[:, 0]
    if len(short):  # the set is larger than the candidates: sort all of the row
        best = probs[short].sort(-1, descending=True)[0]
        last[short], counts[short] = _find_smallest_set(best, top_p[short])
    keep = _mark_first(probs, last, counts)
    return probs.masked_fill(~keep & is_limited[:, None], 0.0)


def _find_smallest_set(
    best: torch.Tensor,  # (rows, k): probabilities, best first
    top_p: torch.Tensor,  # (rows,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, of the smallest sets of mass >= top_p, the last value, (rows, 1), and the
    sizes."""
    mass_before = best.double().cumsum(-1) - best
    counts = (mass_before < top_p.double()[:, None]).sum(-1).clamp(min=1)
    return best.gather(-1, counts[:, None] - 1), counts


def _mark_first(
    values: torch.Tensor,  # (rows, vocab)
    last: torch.Tensor,  # (rows, 1): the smallest value that is kept
    counts: torch.Tensor,  # (rows,): how many are kept
) -> torch.Tensor:  # (rows, vocab) bool
    """Keep what is above `last`, and of its equals the first, `counts` in all."""
    above = values > last
    is_equal = values == last
    num_equal = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (is_equal & (is_equal.cumsum(-1) <= num_equal))


@dataclass(slots=True, frozen=True)
class TokenSpan:
    """The tokens that logits belong to: all. `sharded.TokenShard` has those of one rank."""

    size: int  # of the whole vocabulary
    ranker: Ranker = field(default=rank_logits, kw_only=True)  # of the logits here
    drawer: Drawer = field(default=draw_tokens, kw_only=True)

    @property
    def local_ids(self) -> range:
        """The tokens whose logits are here."""
        return range(self.size)

    @property
    def max_local_tokens(self) -> int:
        """Most tokens whose logits any rank has."""
        return self.size

    def rank_logits(self, logits: torch.Tensor, num_top: int) -> Ranking:
        """Rank the whole vocabulary, and find `num_top` of it, or at least the best."""
        return self.ranker(logits, max(1, min(num_top, self.size)))

    def draw_tokens(
        self, logits: torch.Tensor, sampling: SamplingTensors, rows: torch.Tensor
    ) -> torch.Tensor:
        """Draw ids from the whole vocabulary, as `Drawer`."""
        return self.drawer(logits, sampling, rows)

    def find_likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the id of each row's highest logit; of equals the lowest."""
        return find_likeliest(logits)

    def logits_of(
        self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logit of each id, (ids,) float32.

        Args:
            rows: whose logits, one an id; None: each row has one id.
        """
        if rows is not None:
            return logits[rows, ids].float()
        return logits.gather(-1, ids[:, None])[:, 0].float()

    def join_few(self, few: torch.Tensor) -> torch.Tensor:
        """Return logits of the same few tokens everywhere; -inf stands for those elsewhere."""
        return few

    def join_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the log of the whole sum of exponentials of which each rank has a part."""
        return sums


def sample_tokens(
    logits: torch.Tensor,
    sampling: SamplingTensors,
    num_top: int,  # alternatives to report
    # the logprobs are those of the logits without them
    edits: LogitEditTensors | None = None,
    # that the logits belong to; None: the whole vocabulary
    tokens: TokenSpan | None = None,
) -> TokenLogprobs:
    """Draw one token a row of logits, (rows, vocab), of any floating dtype."""
    tokens = tokens or TokenSpan(logits.shape[-1])
    ranking = tokens.rank_logits(logits, num_top)
    edited = logits if edits is None else edits.apply(logits)
    masks = None if edits is None else edits.masks
    # The likeliest token; ties go to the lowest id.
    ids = (
        ranking.best_ids[:, 0].clone()
        if edited is logits
        else tokens.find_likeliest(edited)
    )
    # Noise is by token id, so a draw without the mask is the masked one wherever it is allowed.
    # Filters count what the mask leaves, so rows that have both draw with it at once.
    is_drawn = sampling.host.is_random
    if masks is not None:
        is_drawn = is_drawn & ~(
            masks.has_mask.to(is_drawn.device) & sampling.host.is_filtered
        )
    drawn = is_drawn.nonzero()[:, 0]
    if len(drawn):
        rows = drawn.to(ids.device, non_blocking=True)
        ids[rows] = tokens.draw_tokens(edited, sampling, rows)
    if masks is not None:
        is_held_back = (sampling.host.is_random & ~is_drawn).to(ids.device)
        _draw_masked(
            edited, sampling, masks, is_held_back | ~masks.is_allowed(ids), ids, tokens
        )
    return _make_logprobs(logits, ids, num_top, ranking, tokens)


def _draw_masked(
    logits: torch.Tensor,  # (rows, vocab)
    sampling: SamplingTensors,
    masks: MaskTensors,
    is_out: torch.Tensor,  # (rows,) bool: these rows are drawn
    ids: torch.Tensor,  # (rows,) int64, which are changed
    tokens: TokenSpan,
) -> None:
    """Draw some rows with their masks."""
    kinds = torch.where(
        is_out, 1 + sampling.is_random.int() + 2 * masks.has_few.int(), 0
    ).tolist()
    for kind in sorted({*kinds} - {0}):
        places = [row for row, other in enumerate(kinds) if other == kind]
        rows = torch.tensor(places, device=logits.device)
        row_masks = masks.select(rows)
        draw_rows = tokens.draw_tokens
        find = tokens.find_likeliest
        if kind > 2:
            left, few = row_masks.gather_few(logits, rows)
            left = tokens.join_few(left)
            find = find_likeliest
            draw_rows = partial(draw_tokens, racer=partial(race_tokens, ids=few))
        else:
            left = row_masks.mask_logits(logits, rows)
        every = torch.arange(len(rows), device=logits.device)
        drawn = (
            find(left) if kind % 2 else draw_rows(left, sampling.select(rows), every)
        )
        if kind > 2:
            drawn = few.gather(-1, drawn[:, None])[:, 0]
        ids[rows] = row_masks.correct_draws(drawn)


def score_tokens(
    logits: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
    tokens: TokenSpan | None = None,
    rows: torch.Tensor | None = None,
    masks: MaskTensors | None = None,
) -> TokenLogprobs:
    """Return the logprob of each given id, (ids,) int64, and the best alternatives.

    Args:
        rows: the row of logits of each id, (ids,) int64; None: each row has one id.
        masks: one for each id, or none. With a mask, the score is the logprob of all allowed
            tokens.
    """
    tokens = tokens or TokenSpan(logits.shape[-1])
    ranking = tokens.rank_logits(logits, num_top)
    scores = _make_logprobs(logits, ids, num_top, ranking, tokens, rows)
    if masks is not None and masks.has_mask.any():
        masked = masks.has_mask.nonzero()[:, 0]
        masked_rows = masked if rows is None else rows[masked]
        scores.logprobs[masked] = (
            _sum_masked(logits, masks.select(masked), masked_rows, tokens)
            - ranking.normalizer[masked_rows]
        )
    return scores


def _sum_masked(
    logits: torch.Tensor, masks: MaskTensors, rows: torch.Tensor, tokens: TokenSpan
) -> torch.Tensor:
    """Return the log of the sum of exponentials that each mask leaves of its row, (masks,)."""
    few = masks.has_few.nonzero()[:, 0]
    many = (~masks.has_few).nonzero()[:, 0]
    sums = logits.new_empty(len(rows), dtype=torch.float32)
    few_logits, _ = masks.select(few).gather_few(logits, rows[few])
    sums[few] = few_logits.logsumexp(-1)
    for place in torch.split(many, 1) if len(many) else ():  # each is a row of logits
        left = masks.select(place).mask_logits(logits, rows[place])
        sums[place] = left.logsumexp(-1)
    return tokens.join_sums(sums)


def _make_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
    ranking: Ranking,
    tokens: TokenSpan,
    rows: torch.Tensor | None = None,
) -> TokenLogprobs:
    if rows is not None:
        ranking = ranking.select(rows)
    logprobs = tokens.logits_of(logits, ids, rows) - ranking.normalizer
    # A chosen token that is also among the best has the very same float there.
    best = ranking.best[:, :num_top] - ranking.normalizer[:, None]
    return TokenLogprobs(ids, logprobs, ranking.best_ids[:, :num_top], best)
