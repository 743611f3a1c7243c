"""The books of the KV cache: which blocks are free, held by sequences, or cached for later.

A block table lists the blocks of a sequence in order. Full blocks of an equal prefix stand in
several tables. With blocks of 4 tokens and two prompts that share their first 8 tokens:

    sequence A   tokens 0 … 9   block_table [5, 2, 7]     blocks, with their holders
    sequence B   tokens 0 … 12  block_table [5, 2, 0, 3]

                 5           2           7               5: A, B and the prefix cache
    A       | a b c d | e f g h | i j . . |              2: A, B and the prefix cache
            |         |         |    0         3         7: A, filled in part
    B       |         |         | k l m n | o . . . |    0: B
                                                         3: B, filled in part

When A and B end, blocks 5 and 2 are idle: the cache holds them until others need the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 … num_blocks-1 with two counts: sequences and cached prefixes that hold them.

    A block with neither is free; one that is only cached is idle, and can be evicted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens a block
        self.max_used_tokens = 0  # most tokens whose blocks were in use at once
        self.clear()

    def clear(self) -> None:
        # A stack: the block freed last is used first, so little memory is ever touched.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._num_holders = [0] * self.num_blocks
        self._num_cached = [0] * self.num_blocks
        self.num_idle = 0  # blocks that are cached and held by no sequence

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The part of the blocks that sequences hold, from 0 to 1. Any thread may ask."""
        # Meanwhile a block may go from one count to the other, and be counted in both.
        return max(0.0, 1 - (len(self._free) + self.num_idle) / self.num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def is_held(self, block: int) -> bool:
        return self._num_holders[block] > 0

    def num_held_only_by(self, tables: Iterable[list[int]]) -> int:
        """Count the blocks that would lose their last holder if the holders of `tables` left."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._num_holders[block] == count for block, count in counts.items())

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one holder."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        num_used = self.num_tokens - len(self._free) * self.block_size
        self.max_used_tokens = max(self.max_used_tokens, num_used)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`."""
        for block in blocks:
            assert not self._is_free(block), (
                f"block {block} is free and cannot be shared"
            )
            self.num_idle -= self._num_holders[block] == 0
            self._num_holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one holder from each of `blocks`."""
        for block in blocks:
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, f"block {block} was released twice"
            if self._num_holders[block] == 0 and self._num_cached[block] > 0:
                self.num_idle += 1
            elif self._num_holders[block] == 0:
                self._free.append(block)

    def mark_cached(self, blocks: list[int]) -> None:
        """Count one more cached prefix in `blocks`, which stay when no sequence holds them."""
        for block in blocks:
            assert not self._is_free(block), (
                f"block {block} is free and cannot be cached"
            )
            self._num_cached[block] += 1

    def unmark_cached(self, blocks: list[int]) -> None:
        """Count one cached prefix less in each of `blocks`."""
        for block in blocks:
            self._num_cached[block] -= 1
            assert self._num_cached[block] >= 0, f"block {block} was dropped twice"
            if self._is_free(block):
                self.num_idle -= 1
                self._free.append(block)

    def check_books(self) -> None:
        """Prove the books when nothing runs: each block is free or idle, and has no holder."""
        assert not any(self._num_holders), "a block has a holder, and nothing runs"
        idle = [block for block, count in enumerate(self._num_cached) if count > 0]
        assert len(idle) == self.num_idle, "idle blocks were miscounted"
        assert sorted(self._free + idle) == list(range(self.num_blocks)), (
            "a block was lost"
        )

    def _is_free(self, block: int) -> bool:
        return self._num_holders[block] == 0 and self._num_cached[block] == 0
