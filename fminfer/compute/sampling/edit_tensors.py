"""Changes of a step's logits before tokens are drawn from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fminfer.compute.sampling.masks import MaskTensors, make_masks
from fminfer.compute.step import Step, masks_of
from fminfer.machine.device import send


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

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, vocab)
        """Return changed logits, without masks; the given ones stay, for the reported logprobs.

        The repetition penalty is that of Keskar et al. 2019 (CTRL): a logit above 0 is divided by
        it, another is multiplied.
        """
        if not (len(self.ids) or len(self.banned_ids)):
            return logits
        changed = logits.to(torch.float32, copy=True)
        biased = changed[self.rows, self.ids] + self.bias
        scaled = torch.where(biased > 0, biased / self.factor, biased * self.factor)
        changed[self.rows, self.ids] = scaled - self.minus
        changed[self.banned_rows, self.banned_ids] = float("-inf")
        return changed


class StepEdits:
    """The changes of all draws of a step. `part` puts those of some draws on a device."""

    def __init__(self, step: Step, vocab: int, device: torch.device) -> None:
        self._step, self._device = step, device
        self._is_none = not (len(step.edit_ids) or len(step.banned_ids) or len(step.masks))
        self._masks = make_masks(masks_of(step), [], vocab, device) if len(step.masks) else None

    def part(self, part: slice) -> LogitEditTensors | None:
        """Return the changes of some draws; rows count from the first of them. None: no changes."""
        if self._is_none:
            return None
        step, columns = self._step, list[np.ndarray]()
        for counts in (step.draws["num_edits"], step.draws["num_banned"]):
            first = int(counts[: part.start].sum())
            columns.append(np.arange(first, first + int(counts[part].sum())))
            columns.append(np.repeat(np.arange(len(counts[part])), counts[part]))
        edits, rows, banned, banned_rows = columns
        places = step.draws["mask"][part].astype(np.int64)
        sent = (rows, step.edit_ids[edits], banned_rows, step.banned_ids[banned], places)
        floats = (each[edits] for each in (step.edit_bias, step.edit_factor, step.edit_minus))
        of_edits, ids, of_banned, banned_ids, mask_of, bias, factor, minus = send(
            [*sent, *floats], self._device
        )
        masks = None if self._masks is None else replace(self._masks, mask_of=mask_of)
        return LogitEditTensors(of_edits, ids, bias, factor, minus, of_banned, banned_ids, masks)
