"""What is left of logits before tokens are drawn: masks of rows, and changes of single
logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from fminfer.compute.values.step import Step, unpack_masks
from fminfer.core.messages import Mask
from fminfer.machine.device import send_columns

# What each byte of a mask leaves of 8 logits, as the most that they may be. On the CPU,
# numpy takes a tenth of torch's time for this: its one thread waits for no other.
HIGHEST = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    > 0,
    np.float32("inf"),
    np.float32("-inf"),
)
# Columns of few tokens at least: torch sums fewer of a row in another order than more.
LEAST_FEW = 16


@dataclass(slots=True, frozen=True)
class MaskTensors:
    """The masks of a step. One more stands behind them: it allows all, for rows that
    have none."""

    # (masks + 1, vocab / 8) uint8: bit i % 8 of byte i // 8 is of token i
    bits: torch.Tensor
    # (masks + 1, k) int64: allowed ids in order, then -1; all -1: not few
    few: torch.Tensor
    first: torch.Tensor  # (masks + 1,) int64: the lowest allowed id
    # (rows,) int64: the place of each row's; -1, the last: it has none
    mask_of: torch.Tensor
    first_id: int = 0  # the token of the first logit, a multiple of 8

    def select(self, part: torch.Tensor | slice) -> MaskTensors:
        """Return the masks of some rows."""
        return replace(self, mask_of=self.mask_of[part])

    @property
    def has_mask(self) -> torch.Tensor:  # (rows,) bool
        return self.mask_of >= 0

    @property
    def has_few(self) -> torch.Tensor:  # (rows,) bool: few tokens are allowed
        return self.few[self.mask_of, 0] >= 0

    def is_allowed(self, ids: torch.Tensor) -> torch.Tensor:  # (rows,) bool
        """Say whether each row may draw its id, of (rows,) int64."""
        return self.bits[self.mask_of, ids >> 3] >> (ids & 7) & 1 > 0

    def gather_few(
        self, logits: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of few tokens, (rows, k) float32, and their ids.

        Behind a row's last token stand -inf and -1. Nothing draws them: where all are -inf, the
        first is taken. Tokens whose logits are elsewhere have -inf as well.
        """
        ids = self.few[self.mask_of]
        places = torch.where(ids < 0, -1, ids - self.first_id)
        is_away = (places < 0) | (places >= logits.shape[-1])
        few_logits = logits[rows[:, None], places.masked_fill(is_away, 0)].float()
        return few_logits.masked_fill(is_away, float("-inf")), ids

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits of rows, (rows, vocab) float32, with -inf where a token is not allowed.

        An allowed nan becomes +inf: either makes all probabilities nan.
        """
        size = logits.shape[-1]
        first = self.first_id // 8
        bits = self.bits[self.mask_of, first : first + -(-size // 8)]
        if logits.is_cpu:
            kept = HIGHEST.take(bits.numpy(), 0).reshape(len(bits), -1)[:, :size]
            for row, left in zip(rows.tolist(), kept, strict=True):
                np.fmin(logits[row].float().numpy(), left, out=left)
            return torch.from_numpy(kept)
        highest = torch.from_numpy(HIGHEST).to(logits.device)
        left_of = highest.index_select(0, bits.flatten().int()).view(len(bits), -1)
        return logits[rows].float().fmin(left_of[:, :size])

    def correct_draws(self, ids: torch.Tensor) -> torch.Tensor:
        """Return drawn ids, and the first allowed one where all that is allowed is -inf."""
        return torch.where(self.is_allowed(ids), ids, self.first[self.mask_of])


def find_likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's highest logit, of (rows, vocab) float32; of equals
    the lowest."""
    return (
        torch.from_numpy(logits.numpy().argmax(-1))
        if logits.is_cpu
        else logits.argmax(-1)
    )


def make_mask_tensors(
    masks: Sequence[Mask], mask_of: Sequence[int], vocab: int, device: torch.device
) -> MaskTensors:
    """Put a step's masks on a device, and the place of each row's; -1: it has none."""
    size = -(-vocab // 8)
    filler = [b"\xff" if mask.bits[-1] > 127 else b"\0" for mask in masks]
    rows = [
        mask.bits[:size].ljust(size, end)
        for mask, end in zip(masks, filler, strict=True)
    ]
    few = [torch.tensor(mask.few or [-1]) for mask in masks]
    bits = bytearray().join([*rows, b"\xff" * size])
    return MaskTensors(
        torch.frombuffer(bits, dtype=torch.uint8).view(-1, size).to(device),
        pad_sequence(
            [*few, torch.full((LEAST_FEW,), -1)], batch_first=True, padding_value=-1
        ).to(device),
        torch.tensor([*map(_find_first_id, rows), 0], device=device),
        torch.tensor(mask_of, dtype=torch.int64, device=device),
    )


def _find_first_id(bits: bytes) -> int:
    """Return the lowest id whose bit is set."""
    place = len(bits) - len(bits.lstrip(b"\0"))
    assert place < len(bits), "a mask allows no token"
    return 8 * place + (bits[place] & -bits[place]).bit_length() - 1


@dataclass(slots=True, frozen=True)
class LogitEditTensors:
    """Changes of single logits before tokens are drawn; entries are (row, token id).

    `rows` and `ids` have each entry at most once. An entry may be banned, too.
    """

    rows: torch.Tensor  # (entries,) int64
    ids: torch.Tensor  # (entries,) int64
    bias: torch.Tensor  # (entries,) float32, added first
    factor: torch.Tensor  # (entries,) float32: repetition penalty, 1 changes nothing
    minus: torch.Tensor  # (entries,) float32, subtracted last
    banned_rows: torch.Tensor  # (banned,) int64
    banned_ids: torch.Tensor  # (banned,) int64
    masks: MaskTensors | None = None
    has_others: bool = False  # a change is for a token of another rank

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, vocab)
        """Return changed logits, without masks; the given ones stay, for the reported logprobs.

        The repetition penalty is that of Keskar et al. 2019 (CTRL).
        """
        if not (self.has_others or len(self.ids) or len(self.banned_ids)):
            return logits
        changed = logits.to(torch.float32, copy=True)
        biased = changed[self.rows, self.ids] + self.bias
        scaled = torch.where(biased > 0, biased / self.factor, biased * self.factor)
        changed[self.rows, self.ids] = scaled - self.minus
        changed[self.banned_rows, self.banned_ids] = float("-inf")
        return changed


class StepEdits:
    """The changes of all draws of a step. `part` puts those of some draws on a device."""

    def __init__(
        self,
        step: Step,
        vocab: int,  # all tokens
        device: torch.device,
        local_ids: range | None = None,  # the tokens whose logits are here; None: all
    ) -> None:
        self._step = step
        self._device = device
        self._local_ids = local_ids or range(vocab)
        self._is_none = not (
            len(step.edit_ids) or len(step.banned_ids) or len(step.masks)
        )
        self._masks = None
        if len(step.masks):
            masks = make_mask_tensors(unpack_masks(step), [], vocab, device)
            self._masks = replace(masks, first_id=self._local_ids.start)

    def make_tensors(self, part: slice) -> LogitEditTensors | None:
        """Return the changes of some draws; rows count from the first of them. None: no
        changes."""
        if self._is_none:
            return None
        step = self._step
        columns = list[np.ndarray]()
        has_others = False
        for name, ids in (
            ("num_edits", step.edit_ids),
            ("num_banned", step.banned_ids),
        ):
            counts = step.draws[name]
            first = int(counts[: part.start].sum())
            entries = np.arange(first, first + int(counts[part].sum()))
            rows = np.repeat(np.arange(len(counts[part])), counts[part])
            places = ids[entries] - self._local_ids.start
            is_own = (places >= 0) & (places < len(self._local_ids))
            columns += [rows[is_own], places[is_own], entries[is_own]]
            has_others |= not is_own.all()
        edits = columns.pop(2)
        sent = (*columns[:4], step.draws["mask"][part].astype(np.int64))
        floats = (
            each[edits] for each in (step.edit_bias, step.edit_factor, step.edit_minus)
        )
        of_edits, ids, of_banned, banned_ids, mask_of, bias, factor, minus = (
            send_columns([*sent, *floats], self._device)
        )
        masks = None if self._masks is None else replace(self._masks, mask_of=mask_of)
        changes = (of_edits, ids, bias, factor, minus, of_banned, banned_ids)
        return LogitEditTensors(*changes, masks, bool(has_others))

    def make_score_masks(self) -> MaskTensors | None:
        """Return the masks of the step's scores; None: none of them has one."""
        places = self._step.scores["mask"].astype(np.int64)
        if self._masks is None or (places < 0).all():
            return None
        return replace(self._masks, mask_of=torch.from_numpy(places).to(self._device))
