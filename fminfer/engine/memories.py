"""The memories that an encoder has left: for other prompts of the same ids."""

from __future__ import annotations

from collections import OrderedDict

from fminfer.engine.blocks import BlockPool


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
        if self._pool.num_free >= num_free:
            return
        for key in [*self._blocks]:
            if not self._pool.is_held(self._blocks[key][0]):
                self._pool.drop(self._blocks.pop(key))
                if self._pool.num_free >= num_free:
                    return
