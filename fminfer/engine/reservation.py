"""The KV blocks of sequences: reserved when a prompt is admitted, shared, copied, freed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fminfer.engine.blocks import BlockPool
from fminfer.engine.packing import BlockCopies, PackedRow, Slots
from fminfer.engine.prefix import Match, PrefixCache, encoder_output_key
from fminfer.engine.sequence import PromptState, Sequence

MIN_ROWS_SEEN = 8  # ended rows before their lengths tell anything
# until then; of chats that may fill a context of 100,000 several run at once
MAX_FIRST_GUESS = 1024
WINDOW = 64  # rows in the moving averages of lengths


class ExpectedLengths:
    """Means and deviations of lengths, for rows of about the same max_tokens."""

    def __init__(self) -> None:
        # rows, mean and mean square
        self._seen: dict[int, tuple[int, float, float]] = {}

    def learn(self, max_tokens: int, length: int) -> None:
        count, mean, square = self._seen.get(max_tokens.bit_length(), (0, 0.0, 0.0))
        share = max(1 / (count + 1), 1 / WINDOW)
        mean += share * (length - mean)
        square += share * (length**2 - square)
        self._seen[max_tokens.bit_length()] = (count + 1, mean, square)

    def predict(self, max_tokens: int) -> int:
        """Return how many tokens to reserve: mean and one deviation, or a first guess."""
        count, mean, square = self._seen.get(max_tokens.bit_length(), (0, 0.0, 0.0))
        if count < MIN_ROWS_SEEN:
            return min(max_tokens, MAX_FIRST_GUESS)
        deviation = math.sqrt(max(0.0, square - mean**2))
        return min(max_tokens, math.ceil(mean + deviation))


class KvReservation:
    """Allocates the blocks of sequences, and frees them.

    Blocks may be freed while a step in flight still reads or writes them. Whoever gets them
    next uses them in later steps, and every stage computes its steps in order. Copies are no
    exception: a step makes them before its rows, and reads all sources before it writes.
    """

    def __init__(self, pool: BlockPool, *, shares: bool) -> None:
        self._pool = pool
        # prefixes, or what an encoder gave; otherwise the cache stays empty
        self.shares = shares
        self.prefixes = PrefixCache(pool)
        self.expected = ExpectedLengths()
        self.slots = Slots()  # of sequences that hold blocks
        self.clear()

    def clear(self) -> None:
        self._pool.clear()
        self.prefixes.clear()
        self._copies: BlockCopies = []  # that the next step makes
        self.slots.clear()

    @property
    def num_sequences(self) -> int:
        return self.slots.num_used

    def fits(self, prompt: PromptState) -> bool:
        """Return whether the pool could hold the prompt if it were alone."""
        return (
            self._num_blocks_needed(prompt, prompt.num_kv_tokens)
            <= self._pool.num_blocks
        )

    def find_prefix(self, prompt: PromptState) -> Match:
        """Find the prefix that need not be fed; for a scored prompt, with its scores."""
        if prompt.is_apart:
            return Match()
        if not prompt.wants_scores:  # the last token is fed to draw from it
            limit = prompt.num_to_feed - 1
            if prompt.branch is not None:  # all that is scored behind must be fed
                limit = prompt.branch.positions[0]
            return self.prefixes.match(prompt.ids_to_feed, limit, None)
        match = self.prefixes.match(prompt.ids, prompt.num_to_feed, prompt.num_top)
        # The last token of the prefix is fed again: what follows it is scored from it.
        match.length = max(0, match.length - 1)
        return match

    def reserve(
        self, prompt: PromptState, match: Match, *, at_all_costs: bool = False
    ) -> bool:
        """Allocate a prompt's blocks behind those that `find_prefix` has found.

        False: there is no room. `at_all_costs` may empty the prefix cache; it succeeds if
        `would_fit` says so.
        """
        num_full, num_rest = divmod(match.length, self._pool.block_size)
        shared = match.blocks[:num_full]
        cross_blocks = self._find_encoder_output(prompt)
        self._pool.share(shared + cross_blocks)
        num_expected = self._num_expected_tokens(prompt)
        num_needed = (
            self._num_blocks_needed(prompt, num_expected) - num_full - len(cross_blocks)
        )
        if not self._free_blocks(num_needed, at_all_costs=at_all_costs):
            self._pool.release(shared + cross_blocks)
            if self.num_sequences > 0 or not match.length:
                return False
            # Nothing runs, and what is in the way is the prefix's own: feed the prompt whole.
            self.prefixes.evict(self._pool.num_blocks)
            return self.reserve(prompt, Match())
        prompt.shares_encoder_output = bool(cross_blocks)
        if prompt.source is not None and not cross_blocks:
            cross_blocks = self._pool.allocate(
                self._pool.num_blocks_for(len(prompt.source.ids))
            )
        self._assign_blocks(
            prompt, shared, self._pool.num_blocks_for(num_expected), cross_blocks
        )
        if num_rest:  # the next block is used in part: this prompt goes on in a copy
            copy = prompt.sequences[0].block_table[num_full]
            self._copies.append((match.blocks[num_full], copy))
        prompt.num_fed = prompt.num_reused = match.length
        if not prompt.ids_to_refeed:
            num_read = len(prompt.ids_to_read) if prompt.shares_encoder_output else 0
            prompt.num_cached = match.length + num_read
            prompt.shared_scores = match.scores
        return True

    def would_fit(
        self, prompt: PromptState, match: Match, leaving: Iterable[Sequence]
    ) -> bool:
        """Return whether the prompt would have room if those sequences freed their blocks."""
        num_full = match.length // self._pool.block_size
        shared = match.blocks[:num_full] + self._find_encoder_output(prompt)
        num_needed = self._num_blocks_needed(
            prompt, self._num_expected_tokens(prompt)
        ) - len(shared)
        self._pool.share(shared)
        num_left = self._pool.num_held_only_by(
            row.block_table + row.cross_table for row in leaving
        )
        num_free = self._pool.num_free + self._pool.num_idle
        self._pool.release(shared)
        return num_needed <= num_free + num_left

    def num_rows_left_beside(self, prompt: PromptState) -> int:
        """Count further rows like a prompt's that find blocks once the prompt has its own."""
        num_blocks = self._num_blocks_needed(prompt, self._num_expected_tokens(prompt))
        num_left = self._pool.num_free + self._pool.num_idle - num_blocks
        return num_left * len(prompt.sequences) // num_blocks

    def allocate_next_block(self, sequence: Sequence) -> bool:
        """Allocate a block for the newest token, if it needs one; False: none is left."""
        while sequence.position >= len(sequence.block_table) * self._pool.block_size:
            if not self._free_blocks(1):
                return False
            sequence.block_table += self._pool.allocate(1)
        return True

    def free_blocks(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and slots."""
        # a copy that was to fill a block of it must not fill the next owner's
        if self._copies:
            freed = set(sequence.block_table)
            self._copies = [copy for copy in self._copies if copy[1] not in freed]
        self._pool.release(sequence.block_table + sequence.cross_table)
        sequence.block_table = []
        sequence.cross_table = []
        sequence.prompt.owner.num_running -= 1
        self.slots.free(sequence)

    def pop_copies(self, rows: list[PackedRow]) -> BlockCopies:
        """Return the copies that a step of `rows` makes; those that it needs come next."""
        copies = self._copies
        self._copies = [
            copy
            for row in rows
            for copy in row.list_copies_after(self._pool.block_size)
        ]
        return copies

    def cache_prefix(self, prompt: PromptState, num_fed: int) -> None:
        """Let later prompts share what was fed, or is fed by the step being formed."""
        if not self.shares or prompt.is_apart or prompt.source is not None:
            return
        reports = prompt.reports if prompt.wants_scores else None
        table = prompt.sequences[0].block_table
        num_tokens = min(num_fed, len(prompt.ids))
        self.prefixes.insert(prompt.ids, num_tokens, table, reports, prompt.num_top)

    def cache_encoder_output(self, prompt: PromptState) -> None:
        """Let later prompts share the encoder output that the step being formed stores."""
        if self.shares and not prompt.is_apart:
            key = encoder_output_key(prompt.ids_to_read)
            self.prefixes.insert(
                key, len(key), prompt.sequences[0].cross_table, None, 0
            )

    def stop_sharing(self, prompt: PromptState) -> bool:
        """Stop sharing a prompt's blocks, which may be spoiled; return whether it shared."""
        if prompt.is_apart:
            return False
        if prompt.source is not None:
            self.prefixes.evict_from(encoder_output_key(prompt.source.ids), 0)
            return prompt.shares_encoder_output
        # The last token of a scored prefix was fed again.
        num_reused = prompt.num_reused + prompt.wants_scores if prompt.num_reused else 0
        self.prefixes.evict_from(prompt.ids, num_reused)
        return num_reused > 0

    def check_books(self) -> None:
        assert self.num_sequences == 0, "a sequence was forgotten"
        assert not self._copies, "a copy is left over"
        self._pool.check_books()

    def _num_blocks_needed(self, prompt: PromptState, num_kv_tokens: int) -> int:
        num_each = self._pool.num_blocks_for(num_kv_tokens)
        num_of_encoder = (
            0
            if prompt.source is None
            else self._pool.num_blocks_for(len(prompt.source.ids))
        )
        num_further = num_each - self._num_common_blocks(prompt)
        return num_each + (len(prompt.sequences) - 1) * num_further + num_of_encoder

    def _find_encoder_output(self, prompt: PromptState) -> list[int]:
        """Return the blocks of a cached encoder output; none: it must be computed."""
        if prompt.source is None or prompt.is_apart:
            return []
        key = encoder_output_key(prompt.source.ids)
        return self.prefixes.match(key, len(key), None).blocks

    def _num_common_blocks(self, prompt: PromptState) -> int:
        """Return how many full blocks of the prompt all its sequences share."""
        return prompt.num_to_feed // self._pool.block_size

    def _num_expected_tokens(self, prompt: PromptState) -> int:
        """Return the tokens of KV cache that each sequence of it is admitted with."""
        # candidates run together, or not at all
        if prompt.ids_to_refeed or len(prompt.sequences) > 1:
            return prompt.num_kv_tokens
        return prompt.num_kv_tokens_for(self.expected.predict(prompt.params.max_tokens))

    def _free_blocks(self, num_blocks: int, *, at_all_costs: bool = False) -> bool:
        """Free so many blocks by evicting prefixes; False: there are not enough."""
        if self._pool.num_free + self._pool.num_idle < num_blocks:
            return False
        self.prefixes.evict(num_blocks)
        # A prefix that goes on in blocks that are held is not evicted, though itself idle.
        if at_all_costs and self._pool.num_free < num_blocks:
            self.prefixes.evict_all()
        return self._pool.num_free >= num_blocks

    def _assign_blocks(
        self,
        prompt: PromptState,
        shared: list[int],
        num_each: int,
        cross_blocks: list[int],
    ) -> None:
        first, *others = prompt.sequences
        first.block_table = shared + self._pool.allocate(num_each - len(shared))
        first.cross_table = cross_blocks
        common = first.block_table[: self._num_common_blocks(prompt)]
        for sequence in others:
            self._pool.share(common + cross_blocks)
            sequence.cross_table = cross_blocks
            sequence.block_table = common + self._pool.allocate(num_each - len(common))
        for sequence in prompt.sequences:
            self.slots.allocate(sequence)
        prompt.owner.num_running += len(prompt.sequences)


def list_preemptible_rows(
    priority: int, sequences: Iterable[Sequence]
) -> list[Sequence]:
    """List the rows that a prompt may preempt: the lowest priority first, then the latest."""
    rows = [
        sequence
        for sequence in sequences
        if sequence.prompt.priority < priority and len(sequence.prompt.sequences) == 1
    ]
    return sorted(
        rows, key=lambda row: (row.prompt.priority, -row.prompt.admission_number)
    )


def choose_victim(sequence: Sequence, ready: Iterable[Sequence]) -> Sequence:
    """Choose the row to preempt when no block is left for a running row: itself or a ready one.

    A row is preempted once, or for one of higher priority.
    """
    rows = [sequence]
    for row in ready:
        prompt = row.prompt
        is_lower = prompt.priority < sequence.prompt.priority
        if len(prompt.sequences) == 1 and (not prompt.ids_to_refeed or is_lower):
            rows.append(row)
    return max(
        rows, key=lambda row: (-row.prompt.priority, row.prompt.admission_number)
    )
