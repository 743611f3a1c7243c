"""The prefix cache: which KV blocks hold prefixes, with scores, or encoder outputs.

Prefixes are in a radix tree over prompts, exact to the token. If prompts part in the middle of a
block, the second one gets a copy of it. When blocks are needed, the least recently used
leaves are evicted first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fminfer.engine.blocks import BlockPool
from fminfer.engine.sequence import ReportSlice, TokenReport

MAX_SCORES = 2_000_000  # logprobs kept with prefixes, 20 to 130 bytes each
# distinct prefixes over which the optimum is counted; about 40 MB
MAX_COUNTED_TOKENS = 500_000


@dataclass(slots=True)
class Match:
    """The longest prefix that is in the cache."""

    length: int = 0  # tokens
    blocks: list[int] = field(default_factory=list)  # the last one may be used in part
    # of tokens 1 … length - 1, if asked
    scores: list[ReportSlice] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Node:
    """An edge of the tree: tokens [start, start + len(tokens)) of every prompt below it."""

    parent: _Node | None
    start: int
    tokens: list[int]
    # those that the tokens lie in; the first may be shared with the parent's end
    blocks: list[int]
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token
    # of a whole prompt: [i] is of its token i + 1
    reports: list[TokenReport] | None = None
    num_top: int = 0  # alternatives in each of the reports

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_scores(self) -> int:
        """Logprobs that are kept for its tokens, alternatives counted."""
        return 0 if self.reports is None else len(self.tokens) * (1 + self.num_top)


class PrefixCache:
    """Holds blocks of prompts in the pool, to be found by later prompts."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.clear()

    def clear(self) -> None:
        """Forget everything; the pool's books are the caller's to clear."""
        self._root = _Node(None, 0, [], [])
        # In the order in which they were used last; each stands behind those below it.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        self._num_scores = 0  # of all nodes

    def match(self, ids: list[int], limit: int, num_top: int | None) -> Match:
        """Find the longest cached prefix of `ids`, of at most `limit` tokens.

        With `num_top` only what was scored with so many alternatives or more is found.
        """
        match = Match()
        node = self._root
        for child, num_equal in self._walk_path(ids, limit):
            if not _has_scores(child, num_top):
                break
            first = match.length // self._pool.block_size
            last = self._pool.num_blocks_for(match.length + num_equal)
            match.blocks[first:] = child.blocks[: last - first]
            if child.reports is not None and num_top is not None:
                start, end = max(0, match.length - 1), match.length + num_equal - 1
                match.scores.append((child.reports, start, end))
            match.length += num_equal
            node = child
        self._mark_used(node)
        return match

    def _walk_path(self, ids: list[int], end: int) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes on the way of ids[:end], and how many of a node's tokens are equal."""
        node = self._root
        depth = 0
        while depth < end and (child := node.children.get(ids[depth])) is not None:
            num_equal = count_equal_tokens(
                child.tokens, ids, depth, min(child.end, end)
            )
            is_whole = num_equal == len(child.tokens)
            node = child
            depth = child.end
            yield child, num_equal
            if not is_whole:
                return

    def insert(
        self,
        ids: list[int],
        end: int,
        block_table: list[int],
        reports: list[TokenReport] | None,
        num_top: int,
    ) -> None:
        """Cache the first `end` tokens of a prompt, which lie in `block_table`.

        `reports` is the list that its scores with `num_top` alternatives are in, or will be.
        """
        node = self._root
        for child, num_equal in self._walk_path(ids, end):
            if num_equal < len(child.tokens):
                if child.start + num_equal == end:
                    return
                child = self._split_node(child, num_equal)
            if reports is not None and not _has_scores(child, num_top):
                self._num_scores -= child.num_scores
                child.reports = reports
                child.num_top = num_top
                self._num_scores += child.num_scores
            node = child
        if node.end < end:
            tokens = ids[node.end : end]
            first = node.end // self._pool.block_size
            blocks = block_table[first : self._pool.num_blocks_for(end)]
            leaf = _Node(
                node, node.end, tokens, blocks, reports=reports, num_top=num_top
            )
            self._pool.mark_cached(blocks)
            self._num_scores += leaf.num_scores
            node.children[tokens[0]] = leaf
            self._mark_used(leaf)
            self._evict_while(lambda: self._num_scores > MAX_SCORES)

    def evict(self, num_free: int) -> None:
        """Evict the leaves used longest ago until the pool has `num_free` blocks, if it can."""
        self._evict_while(lambda: self._pool.num_free < num_free)

    def evict_tail(self, ids: list[int], num_wanted: int) -> None:
        """Evict a prompt behind its first tokens, unless a row or another prompt needs it."""
        steps = self._walk_path(ids, len(ids))
        path = [node for node, num_equal in steps if num_equal == len(node.tokens)]
        for node in reversed(path):
            is_held = self._pool.is_held(node.blocks[-1])
            if node.children or node.end <= num_wanted or is_held:
                break
            if node.start < num_wanted:
                self._split_node(
                    node, num_wanted - node.start
                )  # leaves it the lower part
            self._remove_leaf(node)

    def evict_from(self, ids: list[int], start: int) -> None:
        """Evict a prompt from token `start` on, and all behind it; rows keep their blocks."""
        for node, num_equal in self._walk_path(ids, len(ids)):
            if node.start + num_equal > start:
                if node.start < start:
                    self._split_node(
                        node, start - node.start
                    )  # leaves it the lower part
                below = [node]
                for parent in below:
                    below += parent.children.values()
                for leaf in reversed(below):
                    self._remove_leaf(leaf)
                return

    def evict_all(self) -> None:
        """Evict every prefix. Rows that hold their blocks keep them."""
        for node in [*self._nodes]:
            self._remove_leaf(node)

    def _evict_while(self, is_too_full: Callable[[], bool]) -> None:
        in_use: list[_Node] = []
        while is_too_full() and self._nodes:
            node, _ = self._nodes.popitem(last=False)
            if node.children or self._pool.is_held(node.blocks[-1]):
                in_use.append(node)
            else:
                self._remove_leaf(node)
        for node in reversed(in_use):
            self._nodes[node] = None
            self._nodes.move_to_end(node, last=False)

    def _mark_used(self, node: _Node | None) -> None:
        """Note that a node is used, and those above it."""
        while node is not None and node is not self._root:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            node = node.parent

    def _split_node(self, node: _Node, length: int) -> _Node:
        """Cut a node after `length` of its tokens; return the upper part."""
        assert node.parent is not None and 0 < length < len(node.tokens)
        cut = node.start + length
        num_upper = self._pool.num_blocks_for(cut) - node.start // self._pool.block_size
        upper = _Node(
            node.parent,
            node.start,
            node.tokens[:length],
            node.blocks[:num_upper],
            {node.tokens[length]: node},
            node.reports,
            node.num_top,
        )
        node.parent.children[upper.tokens[0]] = upper
        self._mark_used(upper)
        if cut % self._pool.block_size:  # both parts lie in the block that was cut
            self._pool.mark_cached(upper.blocks[-1:])
            num_upper -= 1
        node.parent = upper
        node.start = cut
        node.tokens = node.tokens[length:]
        node.blocks = node.blocks[num_upper:]
        return upper

    def _remove_leaf(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        self._nodes.pop(leaf, None)  # it is not there while it is evicted
        self._num_scores -= leaf.num_scores
        self._pool.unmark_cached(leaf.blocks)


def _has_scores(node: _Node, num_top: int | None) -> bool:
    return num_top is None or (node.reports is not None and node.num_top >= num_top)


def count_equal_tokens(tokens: list[int], ids: list[int], start: int, end: int) -> int:
    """Count how many of `tokens` equal those of ids[start:end], from the first on."""
    others = ids[start:end]
    if tokens[: len(others)] == others:
        return len(others)
    return next(
        i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b
    )


def encoder_output_key(ids: list[int]) -> list[int]:
    """Return the path in the tree of a prompt's encoder output.

    An encoder's tokens see each other, so that only whole prompts are alike: one number below 0,
    which no token has, stands for each of them.
    """
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()
    return [-1 - int.from_bytes(digest, "little")] * len(ids)


class SharedTokens:
    """Counts the prompt tokens that the best possible prefix cache, a trie, would not compute.

    Only the first MAX_COUNTED_TOKENS distinct prefixes are counted: it bounds the memory.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def is_full(self) -> bool:
        return len(self._seen) >= MAX_COUNTED_TOKENS

    def add(self, ids: list[int]) -> int:
        """Return how many leading tokens of a prompt came before at the same place."""
        key = 0
        num_shared = 0
        for index, token_id in enumerate(ids):
            key = hash((key, token_id))
            if key in self._seen:
                num_shared = index + 1
            else:
                self._seen.add(key)
        return num_shared
