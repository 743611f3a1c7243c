"""The admitted prompts whose tokens are still to be fed, and the chunks that are cut from them."""

from __future__ import annotations

import math
from collections import deque

from fminfer.engine.packing import PackedRow
from fminfer.engine.sequence import PromptState

# A prompt waits for one that is being fed if it then finds at least so many more tokens cached.
MIN_GAIN = 16


class PrefillLine:
    """Sorted: higher priority first, then by admission."""

    def __init__(self) -> None:
        self._prompts: deque[PromptState] = deque()
        self.num_unfed = 0  # tokens of them that are not yet in a step

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: PromptState) -> bool:
        return prompt in self._prompts

    @property
    def prompts(self) -> list[PromptState]:
        return list(self._prompts)

    @property
    def first_priority(self) -> float:
        """The priority of the prompt that is fed next; -inf: there is none."""
        return self._prompts[0].priority if self._prompts else -math.inf

    @property
    def last_priority(self) -> float:
        """The lowest priority of all; inf: there is none."""
        return self._prompts[-1].priority if self._prompts else math.inf

    def add(self, prompt: PromptState) -> None:
        """Queue an admitted prompt behind those of its priority."""
        place = len(self._prompts)
        while place > 0 and self._prompts[place - 1].priority < prompt.priority:
            place -= 1
        self._prompts.insert(place, prompt)
        self.num_unfed += prompt.num_unfed

    def remove(self, prompt: PromptState) -> None:
        """Feed no more of a prompt."""
        self._prompts.remove(prompt)
        self.num_unfed -= prompt.num_unfed

    def num_unfed_before(self, priority: int) -> int:
        """Count the tokens that are fed before those of a new prompt of that priority."""
        if not self._prompts or self._prompts[-1].priority >= priority:
            return self.num_unfed
        return sum(other.num_unfed for other in self._prompts if other.priority >= priority)

    def will_share(self, prompt: PromptState, num_found: int) -> bool:
        """Return whether one of them will soon give a prompt MIN_GAIN more tokens of prefix.

        One of lower priority does not count: others might be fed before it without end.
        """
        wanted = num_found + MIN_GAIN + prompt.wants_scores
        head = prompt.ids_to_feed[:wanted]
        return prompt.num_to_feed >= wanted and any(
            other.num_fed < wanted <= other.num_to_feed
            and other.priority >= prompt.priority
            and not other.is_apart
            and other.ids_to_feed[:wanted] == head
            and (not prompt.wants_scores or other.num_scored_top >= prompt.num_top)
            for other in self._prompts
        )

    def next_chunk(self, room: int) -> tuple[PromptState, PackedRow]:
        """Feed the next tokens of the first prompt; the last chunk also draws, of all candidates.

        Args:
            room: most tokens of the chunk.
        """
        prompt = self._prompts[0]
        start, last = prompt.num_fed, min(prompt.num_fed + room, prompt.num_to_feed)
        ids = prompt.ids_to_feed[start:last]
        prompt.num_fed = last
        self.num_unfed -= last - start
        draws = last == prompt.num_to_feed and prompt.params.max_tokens > 0
        if last == prompt.num_to_feed:
            self._prompts.popleft()
        return prompt, PackedRow(
            prompt.sequences[0],
            ids,
            start,
            list(prompt.sequences) if draws else [],
            is_prompt=True,
            scored=prompt if prompt.wants_scores else None,
        )
