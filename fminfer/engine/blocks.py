"""The books of the KV cache: which block is free, and how many sequences hold each.

It knows no tensor: the ids it hands out are the same on every stage.
"""

from __future__ import annotations


class BlockPool:
    """Blocks 0 … num_blocks-1 with reference counts; a shared prefix is shared blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens a block
        self.clear()

    def clear(self) -> None:
        """Make every block free, whoever held it."""
        # A stack: the block freed last is used first, so little memory is ever touched.
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._num_holders = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free and cannot be shared"
            self._num_holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one holder from each of `blocks`; those without any become free."""
        for block in blocks:
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, f"block {block} was released twice"
            if self._num_holders[block] == 0:
                self._free.append(block)

    def check_idle(self) -> None:
        """Prove the books when nothing runs: every block is free, once, and without holder."""
        assert sorted(self._free) == list(range(self.num_blocks)), "a block was lost or doubled"
        assert not any(self._num_holders), "a block is free but has a holder"
