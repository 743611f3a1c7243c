"""What runs next, in plain Python: a token budget, KV blocks, continuous batching.

A prompt enters when blocks for it and for the tokens that it will likely draw are free. A row that
draws more takes blocks one by one; when none is left, the one that came last is put back and fed
again later, at most once, as it then enters with all that it can need. What the prefix cache has of
a prompt is not fed again. Prompts are fed in chunks that fill each step beside the decode rows. It
knows no tensor, no text and no file.
"""

from __future__ import annotations

from collections import deque

from fminfer.engine.blocks import BlockPool
from fminfer.engine.expected import ExpectedLengths
from fminfer.engine.packing import PackedRow, PlannedStep, pack
from fminfer.engine.prefix import Match, PrefixCache, WaitingPrompts
from fminfer.engine.sequence import PromptState, Sequence
from fminfer.messages import StepRow

# Measured on 2 CPU cores, llama of 12 × 768: 16 rows in one micro-batch instead of two took 0.62
# of the time; from about 64 rows on the products, not the weights, set the pace.
MIN_SHARE = 64
# About where products, not the weights, set the pace. Simulated, OPT-175B: stages of 8 A100s work
# 60 % of the time with pieces of 512, 93 % with these; of 8 H200s 61 % and 98 %.
MIXED_STEP = 128
# A prompt waits for another that is being fed if it will find so many more tokens in the cache.
MIN_GAIN = 16
MAX_LOOKS = 64  # waiting prompts that are looked at before a step


class Scheduler:
    """Forms steps from waiting and running prompts.

    Args:
        pool: the KV blocks.
        chunk_size: most tokens of a step.
        max_rows: most sequences that run at once.
        micro_batches: steps in flight, at least as many as stages.
        num_stages: of the pipeline.
        cache: of prompts' prefixes; None: every prompt is fed whole.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        chunk_size: int,
        max_rows: int,
        micro_batches: int,
        num_stages: int = 1,
        cache: PrefixCache | None = None,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._chunk_size = chunk_size
        self._max_rows = max_rows
        self._micro_batches = micro_batches
        self._num_stages = min(num_stages, micro_batches)
        self._num_steps = 0
        self._num_admitted = 0
        self._expected = ExpectedLengths()
        self.clear()

    def clear(self) -> None:
        """Forget every prompt and free every block; nothing may be in flight."""
        self._pool.clear()
        if self._cache is not None:
            self._cache.clear()
        self._waiting: deque[PromptState] = deque()
        self._waiting_ids: WaitingPrompts | None = None  # once no more come
        self._prefilling: deque[PromptState] = deque()
        self._ready: deque[Sequence] = deque()  # sequences whose newest token can be fed
        self._num_unfed = 0  # tokens of admitted prompts that are not yet in a step
        self._num_drawing = 0  # sequences that draw a token in a step in flight
        self._num_decoding = 0  # steps in flight that have decode rows
        self._copies: list[tuple[int, int]] = []
        self.num_running = 0  # sequences that hold blocks

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def between_steps(self) -> list[Sequence]:
        """Running sequences that draw in no step in flight."""
        return [*self._ready, *(s for prompt in self._prefilling for s in prompt.sequences)]

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.num_running)

    def fits(self, prompt: PromptState) -> bool:
        """Tell whether the cache could hold the prompt if it were alone."""
        return self._num_blocks(prompt, prompt.num_kv_tokens) <= self._pool.num_blocks

    def add(self, prompt: PromptState) -> None:
        """Queue a prompt that fits."""
        self._waiting.append(prompt)
        self._waiting_ids = None

    def forget_unshared(self) -> None:
        """Take note that no more prompts come.

        From now on what none of those that wait shares is forgotten when its row ends: its blocks,
        which are warm, are then used again before others.
        """
        if self._cache is not None and self._waiting_ids is None:
            self._waiting_ids = WaitingPrompts(prompt.ids_to_feed for prompt in self._waiting)

    @property
    def has_put_back(self) -> bool:
        """Whether a row that ran waits to run again."""
        return bool(self._waiting) and bool(self._waiting[0].again or self._waiting[0].is_apart)

    def admit(self, *, is_stopping: bool = False) -> list[PromptState]:
        """Let in, in order, prompts whose blocks are free; return those let in.

        No more than the next step can feed: a prompt that could only stand in line inside would
        hold blocks, and so memory, for nothing. One whose prefix is being fed right now stands back
        until it is in the cache.

        Args:
            is_stopping: only rows that ran already may enter.
        """
        admitted: list[PromptState] = []
        stood_back: list[PromptState] = []
        while self._waiting and self._num_unfed < self._chunk_size:
            if is_stopping and not self.has_put_back:
                break
            if len(stood_back) + len(admitted) >= MAX_LOOKS:
                break
            prompt = self._waiting[0]
            match = self._find_prefix(prompt)
            if self._is_being_fed(prompt, match.length):
                stood_back.append(self._waiting.popleft())
            elif self._reserve(prompt, match):
                admitted.append(self._waiting.popleft())
                if self._waiting_ids is not None:
                    self._waiting_ids.remove(prompt.ids_to_feed)
                self._num_unfed += prompt.num_to_feed - prompt.num_fed
                self._prefilling.append(prompt)
            else:
                break
        self._waiting.extendleft(reversed(stood_back))
        return admitted

    def schedule(self) -> PlannedStep | None:
        """Form the next step of whatever can run now, or None."""
        is_decoding = self._num_drawing > 0 or len(self._ready) > 0
        singles = self._decode_rows()
        room = self._step_size(is_decoding, len(singles)) - len(singles)
        chunks: list[PackedRow] = []
        while self._prefilling and room > 0:
            row = self._chunk_row(self._prefilling[0], room)
            room -= len(row.row.token_ids)
            (chunks if len(row.row.token_ids) > 1 else singles).append(row)
        if not (chunks or singles):
            return None
        rows = chunks + singles
        planned = pack(self._num_steps, rows, self._copies)
        self._copies = [copy for row in rows for copy in row.copies_after(self._pool.block_size)]
        self._num_steps += 1
        self._num_drawing += len(planned.sequences)
        self._num_decoding += planned.num_decode_rows > 0
        return planned

    def collect(self, planned: PlannedStep) -> None:
        """Take note that a step is no longer in flight."""
        self._num_decoding -= planned.num_decode_rows > 0

    def resume(self, sequence: Sequence) -> None:
        """Take back a sequence that drew a token and goes on."""
        self._num_drawing -= 1
        self._ready.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that is done."""
        self._take_blocks(sequence)
        prompt = sequence.prompt
        is_done = not any(other.block_table for other in prompt.sequences)
        if self._cache is not None and self._waiting_ids is not None and is_done:
            self._cache.forget(prompt.ids, self._waiting_ids.num_shared(prompt.ids))
        max_tokens = prompt.params.max_tokens
        if max_tokens > 0:
            self._num_drawing -= 1
            self._expected.learn(max_tokens, len(sequence.tokens))

    def vouch(self, prompt: PromptState) -> None:
        """Take note that a prompt's first result is of numbers.

        If it was fed apart, what lay in the prefix cache was spoiled: its own takes that place.
        """
        if prompt.is_apart and self._cache is not None:
            prompt.is_apart = False
            self._cache.withdraw(prompt.ids, 0)
            self._keep_prefix(prompt, min(prompt.num_fed, len(prompt.ids)))

    def put_apart(self, prompt: PromptState) -> bool:
        """Take note that a prompt's first result is nan, and let nobody share what it computed.

        Returns:
            whether it had taken blocks of others: their fault, perhaps, so that it is fed once
            more, without the prefix cache, before all others.
        """
        if self._cache is None or prompt.is_apart:
            return False
        # The last token of a scored prefix was fed again.
        num_taken = prompt.num_taken + prompt.wants_scores if prompt.num_taken else 0
        self._cache.withdraw(prompt.ids, num_taken)
        if not num_taken:
            return False
        for sequence in prompt.sequences:
            self._take_blocks(sequence)
        if prompt.params.max_tokens > 0:
            self._num_drawing -= len(prompt.sequences)
        prompt.forget_results()
        prompt.is_apart = True
        self._wait_first(prompt)
        return True

    def check_idle(self) -> None:
        """Prove the books: nothing runs, so every block is free."""
        assert self.is_idle and not self._ready and not self._prefilling
        assert self._num_drawing == 0, "a sequence in flight was forgotten"
        assert self._num_decoding == 0, "a step in flight was forgotten"
        assert self._num_unfed == 0, "a prompt was fed in part"
        assert not self._copies, "a copy is left over"
        self._pool.check_idle()

    def _step_size(self, is_decoding: bool, num_decode_rows: int) -> int:
        """Return the most tokens of a step.

        Stages wait for each other when a long step comes between short ones; so while rows decode
        in a pipeline of several, prompts come in smaller pieces (docs/pipeline.md has figures).
        """
        if self._num_stages == 1 or not is_decoding:
            return self._chunk_size
        return min(self._chunk_size, max(MIXED_STEP, 2 * num_decode_rows))

    def _take_blocks(self, sequence: Sequence) -> None:
        if self._copies:  # one that was to fill a block of it must not fill the next owner's
            own = set(sequence.block_table)
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        self.num_running -= 1

    def _num_blocks(self, prompt: PromptState, num_kv_tokens: int) -> int:
        each = self._pool.blocks_for(num_kv_tokens)
        return each + (len(prompt.sequences) - 1) * (each - self._num_shared(prompt))

    def _num_expected(self, prompt: PromptState) -> int:
        """Return the tokens of KV cache that each sequence of it enters with."""
        if prompt.again or len(prompt.sequences) > 1:  # candidates run together, or not at all
            return prompt.num_kv_tokens
        return prompt.kv_tokens_for(self._expected.expect(prompt.params.max_tokens))

    def _num_shared(self, prompt: PromptState) -> int:
        """Return how many full blocks of the prompt all its sequences share."""
        return prompt.num_to_feed // self._pool.block_size

    def _find_prefix(self, prompt: PromptState) -> Match:
        """Find what need not be fed; of a scored prompt, the scores of those tokens as well."""
        if self._cache is None or prompt.is_apart:
            return Match()
        if not prompt.wants_scores:  # the last token is fed to draw from it
            return self._cache.match(prompt.ids_to_feed, prompt.num_to_feed - 1, None)
        match = self._cache.match(prompt.ids, prompt.num_to_feed, prompt.num_top)
        # The last token of the prefix is fed again: what follows it is scored from it.
        match.length = max(0, match.length - 1)
        return match

    def _is_being_fed(self, prompt: PromptState, num_found: int) -> bool:
        """Tell whether a prompt that is being fed will soon give MIN_GAIN more tokens of prefix."""
        if self._cache is None or prompt.is_apart:
            return False
        wanted = num_found + MIN_GAIN + prompt.wants_scores
        head = prompt.ids_to_feed[:wanted]
        return prompt.num_to_feed >= wanted and any(
            other.num_fed < wanted <= other.num_to_feed
            and not other.is_apart
            and other.ids_to_feed[:wanted] == head
            and (not prompt.wants_scores or other.num_scored_top >= prompt.num_top)
            for other in self._prefilling
        )

    def _reserve(self, prompt: PromptState, match: Match) -> bool:
        """Give a prompt its blocks, the cached ones first; False if there is no room."""
        if self.num_running + len(prompt.sequences) > self._max_rows:
            return False
        num_full, num_rest = divmod(match.length, self._pool.block_size)
        shared = match.blocks[:num_full]
        self._pool.share(shared)
        num_expected = self._num_expected(prompt)
        if not self._make_room(self._num_blocks(prompt, num_expected) - num_full):
            self._pool.release(shared)
            if self.num_running > 0 or self._cache is None or not match.length:
                return False
            # Nothing runs, and what is in the way is the prefix's own: feed the prompt whole.
            self._cache.evict(self._pool.num_blocks)
            return self._reserve(prompt, Match())
        self._hand_out(prompt, shared, self._pool.blocks_for(num_expected))
        if num_rest:  # the next block is used in part: this prompt goes on in a copy
            copy = prompt.sequences[0].block_table[num_full]
            self._copies.append((match.blocks[num_full], copy))
        prompt.num_fed = prompt.num_taken = match.length
        prompt.is_unproven = True
        if not prompt.again:
            prompt.num_cached = match.length
            prompt.shared_scores = match.scores
        prompt.number = self._num_admitted
        self._num_admitted += 1
        return True

    def _make_room(self, num_blocks: int) -> bool:
        """See that so many blocks are free, at the cost of the prefix cache; False: cannot be."""
        if self._pool.num_free + self._pool.num_idle < num_blocks:
            return False
        if self._cache is not None:
            self._cache.evict(num_blocks)
        return self._pool.num_free >= num_blocks

    def _hand_out(self, prompt: PromptState, shared: list[int], each: int) -> None:
        first, *others = prompt.sequences
        first.block_table = shared + self._pool.allocate(each - len(shared))
        common = first.block_table[: self._num_shared(prompt)]
        for sequence in others:
            self._pool.share(common)
            sequence.block_table = common + self._pool.allocate(each - len(common))
        self.num_running += len(prompt.sequences)

    def _decode_rows(self) -> list[PackedRow]:
        """Take this micro-batch's share of the running sequences.

        They are spread over one micro-batch for each stage: every micro-batch reads all weights.
        They are spread over all if that costs little: in a pipeline of several, whose stages would
        wait for each other, if each has MIN_SHARE rows; of a single stage if one does not take them
        all. What is left over waits for the next micro-batch that comes back.
        """
        num_rows = len(self._ready) + self._num_drawing
        enough = self._micro_batches * MIN_SHARE if self._num_stages > 1 else self._chunk_size + 1
        num_groups = self._micro_batches if num_rows >= enough else self._num_stages
        if self._num_decoding >= num_groups:
            return []
        count = min(len(self._ready), -(-num_rows // num_groups), self._chunk_size)
        rows: list[PackedRow] = []
        while self._ready and len(rows) < count:
            sequence = self._ready.popleft()
            position = sequence.position
            has_room = position < len(sequence.block_table) * self._pool.block_size
            if not (has_room or self._grow(sequence)):
                continue
            row = StepRow([sequence.tokens[-1].token_id], position, sequence.block_table)
            rows.append(PackedRow(row, is_prompt=False, sequences=[sequence]))
        return rows

    def _grow(self, sequence: Sequence) -> bool:
        """See that a sequence has a block for its newest token; False: it was put back itself."""
        while sequence.position >= len(sequence.block_table) * self._pool.block_size:
            if self._make_room(1):
                sequence.block_table += self._pool.allocate(1)
                continue
            others = (s for s in self._ready if self._may_put_back(s.prompt))
            last = max([sequence, *others], key=lambda s: s.prompt.number)
            if last is not sequence:
                self._ready.remove(last)
            self._put_back(last)
            if last is sequence:
                return False
        return True

    @staticmethod
    def _may_put_back(prompt: PromptState) -> bool:
        return len(prompt.sequences) == 1 and not prompt.again

    def _put_back(self, sequence: Sequence) -> None:
        """Take a row's blocks; its prompt waits, before all others, to be fed again."""
        prompt = sequence.prompt
        self._take_blocks(sequence)
        prompt.again = prompt.ids + [token.token_id for token in sequence.tokens]
        self._wait_first(prompt)

    def _wait_first(self, prompt: PromptState) -> None:
        self._waiting.appendleft(prompt)
        if self._waiting_ids is not None:
            self._waiting_ids.add(prompt.ids_to_feed)

    def _keep_prefix(self, prompt: PromptState, num_tokens: int) -> None:
        if self._cache is not None:
            reports = prompt.reports if prompt.wants_scores else None
            table = prompt.sequences[0].block_table
            self._cache.insert(prompt.ids, num_tokens, table, reports, prompt.num_top)

    def _chunk_row(self, prompt: PromptState, room: int) -> PackedRow:
        """Feed the next tokens of a prompt; the last chunk also draws, for every candidate."""
        start, last = prompt.num_fed, min(prompt.num_fed + room, prompt.num_to_feed)
        row = StepRow(prompt.ids_to_feed[start:last], start, prompt.sequences[0].block_table)
        prompt.num_fed = last
        self._num_unfed -= last - start
        draws = last == prompt.num_to_feed and prompt.params.max_tokens > 0
        if last == prompt.num_to_feed:
            self._prefilling.popleft()
        if not prompt.is_apart:  # whoever comes after this step can share it
            self._keep_prefix(prompt, min(last, len(prompt.ids)))
        scored = prompt if prompt.wants_scores else None
        return PackedRow(
            row,
            is_prompt=True,
            sequences=list(prompt.sequences) if draws else [],
            scored=scored,
        )
