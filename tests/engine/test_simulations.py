"""Simulated engines: thousands of seeds are right, and each of some plausible faults is
found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from fminfer.engine import prefix, results
from fminfer.engine.loop import EngineLoop
from fminfer.engine.packing import PackedRow, Slots
from fminfer.engine.prefix import Match, PrefixCache
from fminfer.engine.reservation import KvReservation
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PromptState, Sequence
from fminfer.engine.waiting import PrefillQueue
from fminfer.pipeline.local import QueuedPipeline
from tests.conftest import IS_ALL, more
from tests.engine.simulation import simulate

PARTS = 100  # of all seeds, each a test of its own
NUM_SEEDS = 10_000 if IS_ALL else 150
MOST_TRIED = 400  # seeds until a fault is found
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    "first", range(0, NUM_SEEDS, NUM_SEEDS // PARTS if IS_ALL else 50)
)
def test_simulated_engines_answer_each_request_once_and_right(first: int) -> None:
    for seed in range(
        first, min(NUM_SEEDS, first + (NUM_SEEDS // PARTS if IS_ALL else 50))
    ):
        simulate(seed)


def share_one_token_too_many(patch: Patch) -> None:
    find = KvReservation.find_prefix

    def find_prefix(kv: KvReservation, prompt: PromptState) -> Match:
        match = find(kv, prompt)
        if match.length % kv._pool.block_size and match.length < prompt.num_to_feed - 1:
            match.length += 1
        return match

    patch.setattr(KvReservation, "find_prefix", find_prefix)


def copy_no_unfilled_block(patch: Patch) -> None:
    patch.setattr(PackedRow, "list_copies_after", lambda row, block_size: [])


def fill_blocks_of_former_owners(patch: Patch) -> None:
    def free_blocks(kv: KvReservation, sequence: Sequence) -> None:
        kv._pool.release(sequence.block_table + sequence.cross_table)
        sequence.block_table = []
        sequence.cross_table = []
        kv.slots.free(sequence)

    patch.setattr(KvReservation, "free_blocks", free_blocks)


def forget_a_memorys_slot(patch: Patch) -> None:
    def free(slots: Slots, sequence: Sequence) -> None:
        slots._free.append(sequence.slot)
        slots.num_used -= 1

    patch.setattr(Slots, "free", free)


def feed_more_than_there_is_room_for(patch: Patch) -> None:
    pop_chunk = PrefillQueue.pop_chunk
    patch.setattr(
        PrefillQueue, "pop_chunk", lambda line, room: pop_chunk(line, room + 1)
    )


def feed_a_preempted_row_without_its_newest_token(patch: Patch) -> None:
    preempt = Scheduler._preempt_row

    def cut(line: Scheduler, sequence: Sequence) -> None:
        preempt(line, sequence)
        if len(sequence.prompt.ids_to_refeed) > len(sequence.prompt.ids):
            sequence.prompt.ids_to_refeed.pop()

    patch.setattr(Scheduler, "_preempt_row", cut)


def leave_a_cancelled_row_among_those_that_run(patch: Patch) -> None:
    def cancel(line: Scheduler, prompt: PromptState) -> None:
        running = [sequence for sequence in prompt.sequences if sequence.block_table]
        if not running:
            line.waiting.discard(prompt)
        for sequence in running:
            line.release_sequence(sequence)

    patch.setattr(Scheduler, "cancel", cancel)


def tell_a_cancelled_answer(patch: Patch) -> None:
    """As it was: a request that ended as it was taken in was answered, though it was
    cancelled."""
    update_requests = EngineLoop._update_requests

    def update_requests_twice(loop: EngineLoop) -> None:
        cancelled = loop._cancelled
        loop._cancelled = deque()
        update_requests(loop)
        loop._cancelled = deque(each for each in cancelled if each in loop._open)
        update_requests(loop)

    patch.setattr(EngineLoop, "_update_requests", update_requests_twice)


def lose_the_block_that_is_cut(patch: Patch) -> None:
    split = PrefixCache._split_node

    def split_and_drop(cache: PrefixCache, node: Any, length: int) -> Any:
        upper = split(cache, node, length)
        if upper.end % cache._pool.block_size:
            cache._pool.unmark_cached(upper.blocks[-1:])
        return upper

    patch.setattr(PrefixCache, "_split_node", split_and_drop)


def score_with_too_few_alternatives(patch: Patch) -> None:
    patch.setattr(
        prefix, "_has_scores", lambda node, num_top: num_top is None or node.reports
    )


def believe_a_result_that_is_nan(patch: Patch) -> None:
    patch.setattr(results, "_judge_first_result", lambda prompt, line: False)


def deliver_steps_that_were_dropped(patch: Patch) -> None:
    patch.setattr(
        QueuedPipeline,
        "drop_steps",
        lambda pipeline: setattr(pipeline, "num_in_flight", 0),
    )


SELDOM = (  # after 100 seeds
    fill_blocks_of_former_owners,
    score_with_too_few_alternatives,
    deliver_steps_that_were_dropped,
)
FAULTS: list[Callable[[Patch], None]] = [
    share_one_token_too_many,
    copy_no_unfilled_block,
    fill_blocks_of_former_owners,
    forget_a_memorys_slot,
    feed_more_than_there_is_room_for,
    feed_a_preempted_row_without_its_newest_token,
    leave_a_cancelled_row_among_those_that_run,
    lose_the_block_that_is_cut,
    score_with_too_few_alternatives,
    believe_a_result_that_is_nan,
    deliver_steps_that_were_dropped,
    tell_a_cancelled_answer,
]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[more] if each in SELDOM else []) for each in FAULTS],
)
def test_a_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Each of these was plausible, and none is there."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(MOST_TRIED):
            simulate(seed)
