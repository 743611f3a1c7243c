"""The places of running sequences in a stage's tables, and how each of them draws."""

from __future__ import annotations

import numpy as np

from fminfer.compute.step import DRAW
from fminfer.contract.field_table import COLUMNS
from fminfer.engine.sequence import Sequence


class Slots:
    """Numbers the sequences that hold KV blocks, and keeps what does not change of their draws."""

    def __init__(self) -> None:
        self._draws = np.zeros(0, DRAW)
        self.clear()

    def clear(self) -> None:
        """Make every slot free, whoever had it."""
        self._free = list(range(len(self._draws) - 1, -1, -1))
        self.num_taken = 0

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a slot; stages know nothing of its block table yet."""
        if not self._free:
            size = len(self._draws)
            self._draws = np.concatenate([self._draws, np.zeros(max(16, size), DRAW)])
            self._free = list(range(len(self._draws) - 1, size - 1, -1))
        sequence.slot, sequence.num_sent = self._free.pop(), 0
        self.num_taken += 1
        draw, params = self._draws[sequence.slot], sequence.prompt.params
        for name in COLUMNS:
            draw[name] = getattr(params, name)
        draw["num_top"], draw["mask"] = sequence.prompt.num_top, -1

    def give_back(self, sequence: Sequence) -> None:
        """Take a sequence's slot; a step in flight may still name it."""
        self._free.append(sequence.slot)
        self.num_taken -= 1

    def draws(self, slots: list[int]) -> np.ndarray:
        """Return how sequences draw, one entry of DRAW a slot, without what each step adds."""
        return self._draws[slots]
