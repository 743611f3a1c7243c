"""The tokens that each row may draw: where rows have masks, and what masks leave of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fminfer.core.messages import Mask


@dataclass(slots=True, frozen=True)
class MaskTensors:
    """The masks of a step. One more stands behind them: it allows all, for rows that have none."""

    bits: torch.Tensor  # (masks + 1, vocab / 8) uint8: bit i % 8 of byte i // 8 is of token i
    few: torch.Tensor  # (masks + 1, k) int64: allowed ids in order, then -1; all -1: not few
    first: torch.Tensor  # (masks + 1,) int64: the lowest allowed id
    mask_of: torch.Tensor  # (rows,) int64: the place of each row's; -1, the last: it has none

    def part(self, part: slice | torch.Tensor) -> MaskTensors:
        """Return the masks of some rows."""
        return replace(self, mask_of=self.mask_of[part])

    @property
    def has_mask(self) -> torch.Tensor:  # (rows,) bool
        return self.mask_of >= 0

    @property
    def has_few(self) -> torch.Tensor:  # (rows,) bool: few tokens are allowed
        return self.few[self.mask_of, 0] >= 0

    def allow(self, ids: torch.Tensor) -> torch.Tensor:  # (rows,) bool
        """Say whether each row may draw its id, of (rows,) int64."""
        return self.bits[self.mask_of, ids >> 3] >> (ids & 7) & 1 > 0

    def gather(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of few tokens, (rows, k) float32, and their ids.

        Behind a row's last token stand -inf and -1. Nothing draws them: where all are -inf, the
        first is taken.

        Args:
            logits: (all rows, vocab).
            rows: those of these masks, (rows,) int64.
        """
        ids = self.few[self.mask_of]
        found = logits[rows[:, None], ids.clamp(min=0)].float()
        return found.masked_fill(ids < 0, float("-inf")), ids

    def keep(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits of rows, (rows, vocab) float32, with -inf where a token is not allowed.

        An allowed nan becomes +inf: either makes all probabilities nan.
        """
        # What each byte of a mask leaves of 8 logits. Filling by a bool mask takes twice as long.
        ids = torch.arange(256, device=logits.device)
        highest = torch.where(ids[:, None] >> ids[:8] & 1 > 0, float("inf"), float("-inf"))
        bits = self.bits[self.mask_of]
        kept = highest.index_select(0, bits.flatten().int()).view(len(bits), -1)
        kept = kept[:, : logits.shape[-1]]
        return torch.fmin(logits[rows].float(), kept, out=kept).contiguous()

    def settle(self, ids: torch.Tensor) -> torch.Tensor:
        """Return drawn ids, and the first allowed one where all that is allowed is -inf."""
        return torch.where(self.allow(ids), ids, self.first[self.mask_of])


def make_masks(
    masks: Sequence[Mask], mask_of: Sequence[int], vocab: int, device: torch.device
) -> MaskTensors:
    """Put a step's masks on a device.

    Args:
        mask_of: the place of each row's mask; -1: it has none.
    """
    size = -(-vocab // 8)
    filler = [b"\xff" if mask.bits[-1] > 127 else b"\0" for mask in masks]
    rows = [mask.bits[:size].ljust(size, end) for mask, end in zip(masks, filler, strict=True)]
    most = max((len(mask.few) for mask in masks if mask.few is not None), default=1)
    few = torch.full((len(masks) + 1, max(1, most)), -1)
    for place, mask in enumerate(masks):
        if mask.few is not None:
            few[place, : len(mask.few)] = torch.tensor(mask.few)
    bits = bytearray().join([*rows, b"\xff" * size])
    return MaskTensors(
        torch.frombuffer(bits, dtype=torch.uint8).view(-1, size).to(device),
        few.to(device),
        torch.tensor([*map(_first, rows), 0], device=device),
        torch.tensor(mask_of, dtype=torch.int64, device=device),
    )


def _first(bits: bytes) -> int:
    """Return the lowest id whose bit is set."""
    place = len(bits) - len(bits.lstrip(b"\0"))
    assert place < len(bits), "a mask allows no token"
    return 8 * place + (bits[place] & -bits[place]).bit_length() - 1
