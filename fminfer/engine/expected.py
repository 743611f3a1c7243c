"""How many tokens a row is likely to draw, learned from finished rows."""

from __future__ import annotations

import math

MIN_SEEN = 8  # ended rows before their lengths tell anything
MOST_UNSEEN = 1024  # until then; of chats that may fill a context of 100,000 several run at once
MEMORY = 64  # about so many of the last rows count


class ExpectedLengths:
    """Means and deviations of lengths, for rows of about the same max_tokens."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float, float]] = {}  # rows, mean and mean square

    def learn(self, max_tokens: int, length: int) -> None:
        """Record the length of a finished row."""
        count, mean, square = self._seen.get(max_tokens.bit_length(), (0, 0.0, 0.0))
        share = max(1 / (count + 1), 1 / MEMORY)
        mean += share * (length - mean)
        square += share * (length**2 - square)
        self._seen[max_tokens.bit_length()] = (count + 1, mean, square)

    def expect(self, max_tokens: int) -> int:
        """Return how many tokens to reserve: mean and one deviation, or a first guess."""
        count, mean, square = self._seen.get(max_tokens.bit_length(), (0, 0.0, 0.0))
        if count < MIN_SEEN:
            return min(max_tokens, MOST_UNSEEN)
        deviation = math.sqrt(max(0.0, square - mean**2))
        return min(max_tokens, math.ceil(mean + deviation))
