"""Decides what runs next: who waits, who is admitted, who is preempted, what a step holds.

A prompt is admitted when blocks for it and for the tokens that it will likely draw are
free. A row that draws more gets blocks one by one. When none is left, the latest row
of the lowest priority is preempted. It is fed again later, with room for max_tokens, so
that this does not happen twice. A waiting prompt may preempt rows of lower priority at any time.
Prompts are fed in chunks that fill each step beside the decode rows.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque

from fminfer.engine.blocks import BlockPool
from fminfer.engine.engine_core import BEHIND_ALL
from fminfer.engine.packing import (
    PackedRow,
    PlannedStep,
    StepShape,
    pack_prompts,
    pack_rows,
)
from fminfer.engine.prefix import Match
from fminfer.engine.reservation import (
    KvReservation,
    choose_victim,
    list_preemptible_rows,
)
from fminfer.engine.sequence import Array, PromptState, Sequence, Walk
from fminfer.engine.waiting import TURN, EncoderQueue, PrefillQueue, WaitingQueue

MAX_LOOKS = 64  # waiting prompts that are passed over before a step
SHARE = 16  # a request may hold this many times the rows that it leaves free
PATIENCE_S = 10.0  # after this wait, a request without rows may take all of them
MAX_LEFT_OUT = 8  # steps in a row that leave out the rows behind all others


class Scheduler:
    """Forms steps from waiting and running prompts.

    Args:
        chunk_size: most tokens of a step.
        max_rows: most sequences that run at once.
        micro_batches: steps in flight, at least as many as stages.
        shares: prompts share prefixes, or what an encoder gave for the same ids.
        most_read: tokens of a prompt that an encoder reads, at most.
        has_long_steps: each step streams layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        chunk_size: int,
        max_rows: int,
        micro_batches: int,
        num_stages: int = 1,
        shares: bool = False,
        most_read: int = sys.maxsize,
        has_long_steps: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self.most_read = most_read
        self.pool = pool
        self.kv = KvReservation(pool, shares=shares)
        num_stages = min(num_stages, micro_batches)
        self.shape = StepShape(chunk_size, micro_batches, num_stages, has_long_steps)
        self._num_steps = 0
        self._num_admitted = 0
        self.clear()

    def clear(self) -> None:
        """Forget every prompt and free every block; nothing may be in flight."""
        self.kv.clear()
        self.waiting = WaitingQueue()
        self._prefilling = PrefillQueue()
        self.reading = EncoderQueue()  # for the encoder
        # prompts whose encoder output is soon in the cache, by the ids that are read
        self._being_read: dict[tuple[int, ...], PromptState] = {}
        self._was_whole = False  # the newest step is the encoder's
        # sequences whose newest token can be fed
        self._ready: deque[Sequence] = deque()
        self.in_flight: deque[PlannedStep] = deque()
        self._lowest_priority = math.inf  # of all prompts so far
        # steps since one that had rows behind all others, if there are any
        self._num_left_out = 0

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.reading or self.kv.num_sequences)

    def add(self, prompt: PromptState, place: int = 0) -> None:
        """Queue a prompt that fits; `place` is its place among the prompts of its request."""
        self.waiting.add(prompt, place)
        self._lowest_priority = min(self._lowest_priority, prompt.priority)

    def admit(self, *, is_stopping: bool = False) -> list[PromptState]:
        """Admit prompts in order while blocks for them are free or can be freed; return them.

        Admit no more than the next step can feed: other prompts would hold blocks, and
        so memory, for nothing. A prompt whose prefix is being fed right now waits until
        it is in the cache. With `is_stopping` only rows that ran already may enter.
        """
        admitted: list[PromptState] = []
        place = num_looks = 0
        while place < len(self.waiting) and num_looks < TURN * MAX_LOOKS:
            prompt = self.waiting[place]
            if is_stopping and not prompt.has_run:
                place += 1
                continue
            queues = (self._prefilling, self.reading)
            num_before = sum(
                queue.num_unfed_before(prompt.priority) for queue in queues
            )
            if num_before >= self.shape.chunk_size:
                break
            match = (
                self.kv.find_prefix(prompt)
                if self._leaves_room_for_others(prompt)
                else None
            )
            if match is None or self._waits_for_prefix(prompt, match):
                # A turn of a request that has its share counts as one look.
                place = place + 1
                num_looks = num_looks + (1 if match is None else TURN)
                continue
            # Rows that this preempts are of lower priority: they join the queue behind `place`.
            if not (self._start_feeding(prompt, match) or self._preempt_for(prompt)):
                break
            self.waiting.remove_at(place)
            admitted.append(prompt)
        return admitted

    def schedule(self) -> PlannedStep | None:
        """Form the next step of what can run now, or None. Encoder and decoder take turns."""
        turns = (self._schedule_encoder_step, self._schedule_decoder_step)
        for form in turns[::-1] if self._was_whole else turns:
            if (planned := form()) is not None:
                self._was_whole = planned.step.has_whole_prompts
                self._num_steps += 1
                self.in_flight.append(planned)
                return planned
        return None

    def _schedule_encoder_step(self) -> PlannedStep | None:
        """Form a step of prompts for the encoder."""
        is_ahead = len(self.in_flight) >= self.shape.num_stages
        is_behind = self.reading.first_priority == BEHIND_ALL
        if not self.reading or (is_ahead and is_behind):
            return None
        if is_behind:
            self._num_left_out = 0
        return pack_prompts(
            self._num_steps, self.reading.pop_prompts(self.shape.chunk_size)
        )

    def _schedule_decoder_step(self) -> PlannedStep | None:
        """Form a step of chunks of prompts and of running rows.

        Rows that wait behind all others make nobody wait for more than a step. A step that feeds
        another prompt has none of them, but after MAX_LEFT_OUT of these they have their
        turn: else many short requests would keep them from ever running. Nor has the
        step that is ready before a stage needs it.
        """
        has_behind = self._has_rows_below(BEHIND_ALL + 1)
        is_ahead = len(self.in_flight) >= self.shape.num_stages
        is_their_turn = self._num_left_out >= MAX_LEFT_OUT
        if is_ahead and is_their_turn:
            return None
        feeds_others = self._prefilling.first_priority > BEHIND_ALL
        leaves_behind = has_behind and not is_their_turn and (is_ahead or feeds_others)
        num_drawing = sum(len(planned.sequences) for planned in self.in_flight)
        is_decoding = num_drawing > 0 or len(self._ready) > 0
        rows = self._choose_decode_rows(num_drawing, leaves_behind=leaves_behind)
        num_tokens = sum(len(each.token_ids) for each in rows)
        room = (
            self.shape.choose_max_tokens(num_tokens, is_decoding=is_decoding)
            - num_tokens
        )
        while self._prefilling and room > 0:
            if leaves_behind and self._prefilling.first_priority == BEHIND_ALL:
                break
            prompt, row = self._prefilling.pop_chunk(room)
            # whoever comes after can share it
            self.kv.cache_prefix(prompt, prompt.num_fed)
            if row.encoder_output is not None:
                self.kv.cache_encoder_output(prompt)
                self._forget_reading(prompt)
            room -= row.num_tokens
            rows.append(row)
        if not rows:
            return None
        self._num_left_out = self._num_left_out + 1 if leaves_behind else 0
        rows.sort(key=lambda each: len(each.token_ids) == 1)  # chunks come first
        return pack_rows(self._num_steps, rows, self.kv.pop_copies(rows), self.kv.slots)

    def set_encoder_output(self, prompt: PromptState, hidden: Array) -> None:
        """Store what the encoder computed for a prompt, and let it be fed."""
        prompt.encoder_output = hidden
        self._prefilling.add(prompt)

    def pop_oldest_step(self) -> PlannedStep:
        """Return the oldest step in flight, whose results are there and are used now."""
        return self.in_flight.popleft()

    def resume_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence that drew a token and goes on."""
        self._ready.append(sequence)

    def release_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that is done."""
        self.kv.free_blocks(sequence)
        prompt = sequence.prompt
        if prompt.branch is not None:
            return  # others share it until the search is over
        if not any(other.block_table for other in prompt.sequences):
            self._evict_unshared(prompt.ids)
        if prompt.params.max_tokens > 0 and not prompt.owner.is_cancelled:
            self.kv.expected.learn(prompt.params.max_tokens, len(sequence.tokens))

    def cache_drawn_tokens(self, sequence: Sequence, ids: list[int]) -> None:
        """Let branches share what a sequence drew.

        Args:
            ids: of its prompt, and those that it drew, as far as they were fed.
        """
        if self.kv.shares and sequence.prompt.source is None:
            table = sequence.block_table
            self.kv.prefixes.insert(ids, len(ids), table, None, 0)

    def add_branches(self, branches: list[PromptState]) -> None:
        """Queue branches of a running prompt's labels.

        Of a run's lines they come before all of their priority: the prompt's blocks are warm.
        Those of other requests take turns with other clients.
        """
        for place, branch in enumerate(branches):
            if branch.owner.is_counted:
                self.waiting.add_preempted(branch)
            else:
                self.waiting.add(branch, place)

    def end_walk(self, walk: Walk) -> None:
        """Forget the branches of a search that is over, or given up."""
        for branch in [*walk.running]:
            self.cancel(branch)
            branch.sequences = []
        walk.running.clear()
        # the first ones are the others' beginning
        for ids in reversed(walk.computed_ids):
            self._evict_unshared(ids)
        walk.computed_ids.clear()

    def _evict_unshared(self, ids: list[int]) -> None:
        """Evict the cached blocks of a prompt that no waiting prompt shares."""
        num_wanted = self.waiting.num_shared_tokens(ids)
        if num_wanted is not None:
            self.kv.prefixes.evict_tail(ids, num_wanted)

    def cancel(self, prompt: PromptState) -> None:
        """Forget a prompt, wherever it is; one that is done or unknown is left as it is.

        Its scores of steps in flight still count, for prompts that share them; tokens do not.
        """
        if prompt.walk is not None:
            self.end_walk(prompt.walk)
            return
        for sequence in prompt.sequences:
            if sequence.own_walk is not None:
                self.end_walk(sequence.own_walk)
        if self.waiting.discard(prompt):
            return
        self._remove_from_queues(prompt)
        running = [sequence for sequence in prompt.sequences if sequence.block_table]
        for sequence in running:
            self.release_sequence(sequence)

    def _remove_from_queues(self, prompt: PromptState) -> None:
        """Remove an admitted prompt and its sequences from the queues in which they are."""
        for queue in (self._prefilling, self.reading):
            if prompt in queue.prompts:
                queue.remove(prompt)
        for sequence in prompt.sequences:
            if sequence in self._ready:
                self._ready.remove(sequence)
        self._forget_reading(prompt)

    def mark_sound(self, prompt: PromptState) -> None:
        """Record that a prompt's first result is sound; one fed apart replaces bad blocks."""
        if prompt.is_apart and not prompt.owner.is_cancelled:
            prompt.is_apart = False
            if prompt.source is not None:
                self.kv.cache_encoder_output(prompt)
            self.kv.prefixes.evict_from(prompt.ids, 0)
            self.kv.cache_prefix(prompt, prompt.num_fed)

    def requeue_apart(self, prompt: PromptState) -> bool:
        """Record that a prompt's first result is nan, and stop sharing what it computed.

        If it had taken blocks of others, perhaps it is their fault: it is fed once more, without
        the prefix cache, before all others of its priority. Return whether it is.
        """
        has_taken = self.kv.stop_sharing(prompt)
        if not has_taken or prompt.owner.is_cancelled:
            return False
        for sequence in prompt.sequences:
            self.kv.free_blocks(sequence)
        prompt.reset_results()
        prompt.is_apart = True
        self.waiting.add_preempted(prompt)
        return True

    def check_books(self) -> None:
        """Prove the books: nothing runs, so every block is free."""
        assert (
            self.is_idle
            and not self._ready
            and not self._prefilling
            and not self._being_read
        )
        assert not self.in_flight, "a step in flight was forgotten"
        assert self._prefilling.num_unfed == 0, "a prompt was fed in part"
        self.kv.check_books()

    def _has_rows_below(self, priority: float) -> bool:
        """Return whether rows of lower priority could be in the next step."""
        if self._lowest_priority >= priority:
            return False
        is_feeding = (
            min(self._prefilling.last_priority, self.reading.last_priority) < priority
        )
        return is_feeding or any(row.prompt.priority < priority for row in self._ready)

    def _waits_for_prefix(self, prompt: PromptState, match: Match) -> bool:
        """Return whether the prompt should wait because its prefix will soon be in the cache."""
        if prompt.is_apart or not self.kv.shares:
            return False
        if prompt.source is not None:
            reader = self._being_read.get(tuple(prompt.source.ids))
            return reader is not None and reader.priority >= prompt.priority
        return self._prefilling.will_share(prompt, match.length)

    def _leaves_room_for_others(self, prompt: PromptState) -> bool:
        """Return whether other requests still find rows and blocks once a prompt is admitted.

        A request may hold SHARE times the rows that it leaves free. Rows of lower priority
        count as free: they can be preempted. Lines of a run are exempt: it has no other clients.
        """
        owner = prompt.owner
        num_running = owner.num_running + len(prompt.sequences)
        if (
            owner.is_counted
            or (prompt.has_run and not prompt.is_inner_branch)
            or num_running <= 1
            or not self.kv.num_sequences
        ):
            return True
        num_left = min(
            self.max_rows - self.kv.num_sequences - len(prompt.sequences),
            self.kv.num_rows_left_beside(prompt),
        )
        is_due = (
            not owner.num_running and time.perf_counter() - owner.added_s > PATIENCE_S
        )
        return (
            num_running <= SHARE * num_left
            or is_due
            or self._has_rows_below(prompt.priority)
        )

    def _start_feeding(
        self, prompt: PromptState, match: Match, *, at_all_costs: bool = False
    ) -> bool:
        """Reserve a prompt's blocks and queue it to be fed; False: there is no room."""
        if not prompt.is_pooled:
            if self.kv.num_sequences + len(prompt.sequences) > self.max_rows:
                return False
            if not self.kv.reserve(prompt, match, at_all_costs=at_all_costs):
                return False
            prompt.is_unproven = True
        prompt.admission_number = self._num_admitted
        self._num_admitted += 1
        if prompt.is_pooled or (
            prompt.source is not None and not prompt.shares_encoder_output
        ):
            self.reading.add(prompt)
            if not (prompt.is_pooled or prompt.is_apart):
                self._being_read[tuple(prompt.ids_to_read)] = prompt
        else:
            self._prefilling.add(prompt)
        return True

    def _preempt_for(self, prompt: PromptState) -> bool:
        """Preempt rows of lower priority until a prompt has entered; False: it must wait.

        Rows that draw in a step in flight count as room, too: they are preempted when
        it is back. A prompt that is being scored goes on: its scores come in order, and once.
        """
        if prompt.priority <= self._lowest_priority:
            return False
        prefilling = self._prefilling.prompts
        unscored = [p for p in prefilling if not (p.wants_scores or p.branch)]
        others = [*unscored, *self.reading.prompts]
        fed = [sequence for other in others for sequence in other.sequences]
        between = list_preemptible_rows(prompt.priority, [*self._ready, *fed])
        drawn = (each for planned in self.in_flight for each in planned.sequences)
        drawing = [each for each in drawn if each.block_table]  # others were cancelled
        rows = between + list_preemptible_rows(prompt.priority, drawing)
        num_sequences = self.kv.num_sequences - len(rows) + len(prompt.sequences)
        match = self.kv.find_prefix(prompt)
        if num_sequences > self.max_rows or not self.kv.would_fit(prompt, match, rows):
            return False
        victims = iter(between)
        while not self._start_feeding(prompt, match, at_all_costs=True):
            if (victim := next(victims, None)) is None:
                return False
            self._preempt_row(victim)
        return True

    def _preempt_row(self, sequence: Sequence) -> None:
        """Free a row's blocks; its prompt waits, before all of its priority, to be fed again."""
        prompt = sequence.prompt
        is_unread = prompt in self.reading.prompts
        self._remove_from_queues(prompt)
        self.kv.free_blocks(sequence)
        sequence.num_unfed = 0
        prompt.encoder_output = None
        if not is_unread:  # otherwise it begins anew
            prompt.ids_to_refeed = prompt.ids + [
                token.token_id for token in sequence.tokens
            ]
        self.waiting.add_preempted(prompt)

    def _forget_reading(self, prompt: PromptState) -> None:
        """Let no prompt wait for this one's encoder output any longer."""
        if self._being_read.get(key := tuple(prompt.ids_to_read)) is prompt:
            del self._being_read[key]

    def _allocate_or_preempt(self, sequence: Sequence) -> bool:
        """Allocate a block for a sequence's newest token; False: it was preempted itself."""
        while not self.kv.allocate_next_block(sequence):
            victim = choose_victim(sequence, self._ready)
            self._preempt_row(victim)
            if victim is sequence:
                return False
        return True

    def _choose_decode_rows(
        self, num_drawing: int, *, leaves_behind: bool
    ) -> list[PackedRow]:
        """Choose the running sequences of this step, and pack their rows."""
        ready = self._ready
        if leaves_behind:
            ready = deque(row for row in ready if row.prompt.priority > BEHIND_ALL)
        num_decoding = sum(planned.num_decode_rows > 0 for planned in self.in_flight)
        count = self.shape.choose_num_decode_rows(len(ready), num_drawing, num_decoding)
        rows: list[PackedRow] = []
        room = self.shape.chunk_size
        while ready and len(rows) < count and ready[0].num_unfed <= room:
            sequence = ready.popleft()
            if leaves_behind:
                if sequence not in self._ready:  # an earlier one needed its blocks
                    continue
                self._ready.remove(sequence)
            position = sequence.position
            has_room = position < len(sequence.block_table) * self.pool.block_size
            if not (has_room or self._allocate_or_preempt(sequence)):
                continue
            newest = sequence.tokens[-sequence.num_unfed :]
            sequence.num_unfed = 0
            room -= len(newest)
            ids = [token.token_id for token in newest]
            rows.append(PackedRow(sequence, ids, position + 1 - len(ids), [sequence]))
        return rows
