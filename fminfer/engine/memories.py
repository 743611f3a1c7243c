"""Prompts that an encoder reads: those that wait for it, and the memories that it has left."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict

from fminfer.engine.blocks import BlockPool
from fminfer.engine.sequence import PromptState


class EncodeLine:
    """Prompts that are to be read by the encoder: higher priority first, then by admission."""

    def __init__(self) -> None:
        self._prompts: list[PromptState] = []
        self._num_tokens = 0  # of all of them

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: PromptState) -> bool:
        return prompt in self._prompts

    @property
    def prompts(self) -> list[PromptState]:
        return list(self._prompts)

    @property
    def last_priority(self) -> float:
        """The lowest priority of all; inf: there is none."""
        return self._prompts[-1].priority if self._prompts else math.inf

    @property
    def first_priority(self) -> float:
        """The priority of the prompt that is read next; -inf: there is none."""
        return self._prompts[0].priority if self._prompts else -math.inf

    def add(self, prompt: PromptState) -> None:
        """Queue an admitted prompt behind those of its priority."""
        insort(self._prompts, prompt, key=lambda each: -each.priority)
        self._num_tokens += len(prompt.ids_to_read)

    def remove(self, prompt: PromptState) -> None:
        self._prompts.remove(prompt)
        self._num_tokens -= len(prompt.ids_to_read)

    def num_tokens_before(self, priority: int) -> int:
        """Count the tokens that are read before those of a new prompt of that priority."""
        if not self._prompts or self._prompts[-1].priority >= priority:
            return self._num_tokens
        return sum(len(p.ids_to_read) for p in self._prompts if p.priority >= priority)

    def take(self, most: int) -> list[PromptState]:
        """Take the first prompts, of so many tokens together; the first one in any case."""
        num, room = 0, most
        for prompt in self._prompts:
            room -= len(prompt.ids_to_read)
            if num and room < 0:
                break
            num += 1
        taken, self._prompts = self._prompts[:num], self._prompts[num:]
        self._num_tokens -= sum(len(prompt.ids_to_read) for prompt in taken)
        return taken


class MemoryCache:
    """Keeps the blocks of memories in the pool, to be found by prompts of the same ids.

    An encoder's tokens see each other, so that only whole prompts are alike. Those that were used
    longest ago are evicted first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.clear()

    def clear(self) -> None:
        """Forget everything; the pool's books are the caller's to clear."""
        self._blocks: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()

    def find(self, ids: list[int]) -> list[int]:
        """Return the blocks of a prompt's memory; none: it is not here."""
        key = tuple(ids)
        if key not in self._blocks:
            return []
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def keep(self, ids: list[int], blocks: list[int]) -> None:
        """Keep a memory, which is written by now."""
        if tuple(ids) not in self._blocks:
            self._pool.keep(blocks)
            self._blocks[tuple(ids)] = blocks

    def forget(self, ids: list[int]) -> None:
        """Forget a memory, as it may be spoiled."""
        blocks = self._blocks.pop(tuple(ids), None)
        if blocks is not None:
            self._pool.drop(blocks)

    def evict(self, num_free: int) -> None:
        """Forget memories until the pool has so many free blocks, or none is left to forget."""
        for key in [*self._blocks]:
            if self._pool.num_free >= num_free:
                return
            if not self._pool.is_held(self._blocks[key][0]):
                self._pool.drop(self._blocks.pop(key))
