"""The scheduler without an engine: priorities, preemption and cancels, and the books at
each step.

The model is one that draws a hash of all tokens it sees in the KV cache: a block that is wrong,
stale or given away too early shows in what a prompt draws.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fminfer.compute.values.step import Step
from fminfer.contract.request import RequestParams
from fminfer.engine.blocks import BlockPool
from fminfer.engine.engine_core import BEHIND_ALL
from fminfer.engine.packing import PlannedStep
from fminfer.engine.reservation import choose_victim
from fminfer.engine.scheduler import MAX_LOOKS, Scheduler
from fminfer.engine.sequence import (
    PreparedRequest,
    PromptState,
    RequestState,
    Sequence,
    TokenReport,
)
from fminfer.engine.waiting import TURN
from fminfer.text.encoded_prompt import EncodedPrompt
from tests.conftest import IS_ALL
from tests.engine.remembering import VOCAB, RememberingPipeline, logprob_of


def make_prompt(
    ids: list[int], priority: int = 0, n: int = 1, **fields: Any
) -> PromptState:
    params = RequestParams(**({"temperature": 0.0, "max_tokens": 8} | fields))
    encoded = EncodedPrompt(ids, "", [])
    owner = RequestState(
        0, PreparedRequest(params, [encoded]), added_s=0.0, priority=priority
    )
    ends = frozenset(params.stop_token_ids)
    prompt = PromptState(owner, 0, encoded, end_ids=ends)
    prompt.sequences = [
        Sequence(prompt, noise_key=b"", detokenizer=None) for _ in range(n)
    ]
    return prompt


def drawn_alone(prompt: PromptState) -> list[int]:
    """Return the tokens that the model draws after a prompt."""
    tokens: list[int] = []
    while len(tokens) < prompt.params.max_tokens and not prompt.end_ids.intersection(
        tokens
    ):
        tokens.append(hash((*prompt.ids, *tokens)) % VOCAB)
    return tokens


def scored_alone(prompt: PromptState) -> list[float]:
    """Return the logprobs of a prompt's tokens from the second on, as the model gives them."""
    if not (prompt.params.echo and prompt.params.logprobs is not None):
        return []
    ids = prompt.ids
    return [logprob_of(hash(tuple(ids[:end])), ids[end]) for end in range(1, len(ids))]


def ids_of(sequence: Sequence) -> list[int]:
    return [token.token_id for token in sequence.tokens]


class Driver:
    """A scheduler, the model, and what an engine does between them."""

    def __init__(
        self,
        *,
        has_cache: bool = False,
        block_size: int = 4,
        num_blocks: int = 20,
        chunk: int = 64,
        max_rows: int = 50,
        num_stages: int = 1,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            chunk_size=chunk,
            max_rows=max_rows,
            micro_batches=num_stages + 1,
            num_stages=num_stages,
            shares=has_cache,
        )
        self.pipeline = RememberingPipeline(block_size)
        self.micro_batches = num_stages + 1
        self.in_flight: deque[PlannedStep] = deque()
        self.prompts: list[PromptState] = []
        # in order, also those that were preempted
        self.admitted: list[PromptState] = []

    def add(self, *prompts: PromptState) -> None:
        for prompt in prompts:
            assert self.scheduler.kv.fits(prompt)
            self.prompts.append(prompt)
            self.scheduler.add(prompt)

    def cancel(self, prompt: PromptState) -> None:
        prompt.owner.is_cancelled = True
        self.scheduler.cancel(prompt)
        assert not any(each.block_table for each in prompt.sequences), (
            "blocks are given back"
        )
        self.check_books()

    def waiting(self) -> list[PromptState]:
        line = self.scheduler.waiting
        return [line[place] for place in range(len(line))]

    def fill(self, *, is_stopping: bool = False) -> None:
        while self.pipeline.num_in_flight < self.micro_batches:
            admitted = self.scheduler.admit(is_stopping=is_stopping)
            self.admitted += admitted
            self.check_books()
            lowest = min((prompt.priority for prompt in admitted), default=10**9)
            for prompt in self.waiting():
                # perhaps: its prefix is being fed
                stands_back = self.scheduler.kv.shares
                assert prompt.priority <= lowest or stands_back or is_stopping
            planned = self.scheduler.schedule()
            if planned is None:
                return
            self.pipeline.submit(planned.step)
            self.in_flight.append(planned)
            self.check_books()

    def collect(self) -> None:
        planned = self.in_flight.popleft()
        result = self.pipeline.collect()
        assert self.scheduler.pop_oldest_step() is planned
        scores = result.logprobs_of("prompt scores").logprobs.tolist()
        for prompt, logprob in zip(planned.scored_prompts, scores, strict=True):
            prompt.copy_shared_scores()
            prompt.reports.append(TokenReport(0, logprob))
            is_whole = len(prompt.reports) == len(prompt.ids) - 1
            if (
                is_whole
                and prompt.params.max_tokens == 0
                and not prompt.owner.is_cancelled
            ):
                self.end(prompt.sequences[0])
        drawn = result.logprobs_of("tokens").ids.tolist()
        for sequence, token_id in zip(planned.sequences, drawn, strict=True):
            if not sequence.prompt.owner.is_cancelled:
                self.take(sequence, token_id)
        self.check_books()

    def take(self, sequence: Sequence, token_id: int) -> None:
        sequence.prompt.copy_shared_scores()
        sequence.tokens.append(TokenReport(token_id, 0.0))
        sequence.num_unfed += 1
        is_last = len(sequence.tokens) == sequence.prompt.params.max_tokens
        if is_last or token_id in sequence.prompt.end_ids:
            self.end(sequence)
        else:
            self.scheduler.resume_sequence(sequence)

    def end(self, sequence: Sequence) -> None:
        sequence.finish_reason = "stop"
        self.scheduler.release_sequence(sequence)

    def step(self) -> None:
        self.fill()
        self.collect()

    def run(self) -> None:
        """Run until all is done, and see that every prompt that was not cancelled is right."""
        for _ in range(10_000):
            self.fill()
            if not self.in_flight:
                break
            self.collect()
        assert self.scheduler.is_idle, "somebody waits for ever"
        self.scheduler.check_books()
        for prompt in self.prompts:
            if not prompt.owner.is_cancelled:
                assert prompt.is_finished
                assert [report.logprob for report in prompt.reports] == scored_alone(
                    prompt
                )
                expected = drawn_alone(prompt)
                assert [ids_of(s) for s in prompt.sequences] == [expected] * len(
                    prompt.sequences
                )

    def check_books(self) -> None:
        """Free, idle and held blocks are all blocks, and just those hold that run."""
        tables = [s.block_table for prompt in self.prompts for s in prompt.sequences]
        held = Counter(block for table in tables for block in table)
        assert self.scheduler.kv.num_sequences == sum(bool(table) for table in tables)
        assert self.scheduler.kv.num_sequences <= self.scheduler.max_rows
        holders = enumerate(self.pool._num_holders)
        assert {block: count for block, count in holders if count} == dict(held)
        assert (
            self.pool.num_free + self.pool.num_idle + len(held) == self.pool.num_blocks
        )


def random_prompt(
    rng: random.Random, stems: list[list[int]], priorities: list[int]
) -> PromptState:
    stem = rng.choice(stems)
    ids = stem[: rng.randint(1, len(stem))] + [rng.randrange(3)] * rng.choice([0, 1, 9])
    max_tokens = rng.choice([0, 1, 2, 30, 60])
    is_scored = max_tokens == 0 or rng.random() < 0.3
    prompt = make_prompt(
        [*ids, 7],
        rng.choice(priorities),
        n=rng.choice([1, 1, 1, 2]) if max_tokens else 1,
        max_tokens=max_tokens,
        echo=is_scored,
        logprobs=0 if is_scored else None,
        stop_token_ids=tuple(range(rng.choice([0, 5, 50]))),
    )
    return prompt


@settings(
    max_examples=450 if IS_ALL else 40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(260, 500),
    chunk=st.integers(1, 40),
    max_rows=st.sampled_from([2, 5, 30]),
    num_stages=st.integers(1, 4),
    has_cache=st.booleans(),
)
def test_every_prompt_draws_what_it_would_alone(
    seed: int,
    block_size: int,
    num_tokens: int,
    chunk: int,
    max_rows: int,
    num_stages: int,
    has_cache: bool,
) -> None:
    """Whatever comes at any time, with whatever priority, and whoever is cancelled."""
    rng = random.Random(seed)
    driver = Driver(
        has_cache=has_cache,
        block_size=block_size,
        num_blocks=-(-num_tokens // block_size),
        chunk=chunk,
        max_rows=max_rows,
        num_stages=num_stages,
    )
    stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(3)
    ]
    priorities = rng.choice(
        [[0], [0, 0, 0, 1], [-1, 0, 5, 9], [BEHIND_ALL, BEHIND_ALL, 0, 1]]
    )
    share_of_cancels = rng.choice([0.0, 0.05, 0.3])
    for _ in range(60):
        while rng.random() < 0.4:
            driver.add(random_prompt(rng, stems, priorities))
        driver.fill()
        while driver.prompts and rng.random() < share_of_cancels:
            driver.cancel(rng.choice(driver.prompts))
        if driver.in_flight:
            driver.collect()
        while driver.prompts and rng.random() < share_of_cancels:
            driver.cancel(rng.choice(driver.prompts))
    driver.run()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("room", ["blocks", "rows"])
def test_the_highest_priority_never_waits_for_lower_rows(
    num_stages: int, room: str
) -> None:
    """It enters as soon as the steps that were in flight are back, though it needs all
    the room."""
    driver = Driver(
        num_blocks=40 if room == "blocks" else 1000,
        max_rows=8 if room == "rows" else 50,
        num_stages=num_stages,
    )
    low = [make_prompt([i], max_tokens=20) for i in range(30)]
    driver.add(*low)
    for _ in range(7):
        driver.step()
    assert driver.scheduler.kv.num_sequences == 8, "there is no room"
    high = make_prompt([99] * 16, priority=1, n=8, max_tokens=17)
    driver.add(high)
    num_waits = 0
    while high not in driver.admitted:
        driver.step()
        num_waits += 1
    assert num_waits <= num_stages + 1
    assert driver.scheduler.kv.num_sequences == 8 and any(
        prompt.ids_to_refeed for prompt in low
    )
    driver.run()
    assert low[0].priority == 0 and driver.admitted.count(high) == 1


def running(driver: Driver, *prompts: PromptState) -> None:
    """Run prompts that fill the pool until each has drawn a token."""
    driver.add(*prompts)
    while not all(prompt.sequences[0].tokens for prompt in prompts):
        driver.step()
    while driver.in_flight:
        driver.collect()


def test_the_lowest_priority_and_the_latest_goes_first_and_no_more_than_needed() -> (
    None
):
    driver = Driver(num_blocks=20)
    first, second, third, fourth = (
        make_prompt([i], priority, max_tokens=20)
        for i, priority in enumerate([1, 0, 0, 1])
    )
    running(driver, first, second, third, fourth)
    driver.add(make_prompt([9], priority=2, max_tokens=20))
    driver.fill()
    assert [bool(p.ids_to_refeed) for p in (first, second, third, fourth)] == [
        False,
        False,
        True,
        False,
    ]
    driver.add(make_prompt([10], priority=2, max_tokens=40))
    driver.run()
    assert [bool(p.ids_to_refeed) for p in (first, second, third, fourth)] == [
        False,
        True,
        True,
        True,
    ]
    order = [
        prompt for prompt in driver.admitted[6:] if prompt in (second, third, fourth)
    ]
    assert order == [fourth, second, third], (
        "by priority; who was preempted last enters first"
    )


def test_nobody_is_preempted_in_vain() -> None:
    """Candidates run together and stay, and without their room it is too little."""
    driver = Driver(num_blocks=20)
    pair = make_prompt([1], n=2, max_tokens=28)
    single = make_prompt([2], max_tokens=20)
    running(driver, pair, single)
    high = make_prompt([3], priority=1, max_tokens=41)
    driver.add(high)
    while not pair.is_finished:
        driver.step()
        assert not single.ids_to_refeed and (
            high not in driver.admitted or pair.is_finished
        )
    driver.run()


def test_a_row_is_preempted_for_priority_again_and_again() -> None:
    driver = Driver(num_blocks=10)
    low = make_prompt([1], max_tokens=37)
    driver.add(low)
    for i in range(5):
        while low not in driver.admitted[-1:] or len(driver.in_flight) < 2:
            driver.fill()
            driver.collect()
            driver.fill()
            if len(low.sequences[0].tokens) % 3 == 2:
                break
        driver.add(make_prompt([50 + i], priority=1, max_tokens=4, n=2))
        driver.add(make_prompt([60 + i], priority=1, max_tokens=37))
        for _ in range(8):
            driver.step()
    driver.run()
    assert driver.admitted.count(low) >= 4


def test_a_step_that_feeds_a_prompt_has_no_rows_behind_all() -> None:
    """A live request's first token waited for the 256 rows of a batch in its own step, too."""
    driver = Driver(num_blocks=100, chunk=8)
    behind = [make_prompt([i], BEHIND_ALL, max_tokens=30) for i in range(4)]
    waiting = make_prompt([7] * 20, BEHIND_ALL, max_tokens=3)
    live = make_prompt([8] * 4, max_tokens=5)
    running(driver, live, *behind)
    driver.add(waiting, late := make_prompt([9] * 12, max_tokens=2))
    driver.fill()
    first, second = driver.in_flight
    assert (
        late.num_unfed == 0 and first.num_prompt_tokens + second.num_prompt_tokens >= 12
    )
    assert [each.prompt for each in first.sequences] == [live], "rows of no batch"
    driver.run()
    assert all(len(prompt.sequences[0].tokens) == 30 for prompt in behind), "they go on"


def test_rows_behind_all_run_beside_many_short_requests() -> None:
    """Each step fed another live prompt, so that a batch stood still for as long as
    they came."""
    driver = Driver(num_blocks=200, chunk=8)
    behind = [make_prompt([i], BEHIND_ALL, max_tokens=30) for i in range(3)]
    running(driver, *behind)
    left_out = []
    for step in range(90):
        if step % 2 == 0:
            driver.add(make_prompt([10 + step] * 12, max_tokens=1))
        before = len(behind[0].sequences[0].tokens)
        driver.step()
        left_out.append(len(behind[0].sequences[0].tokens) == before)
    waits = [
        len(run) for run in "".join("x" if each else " " for each in left_out).split()
    ]
    assert 8 <= max(waits) <= 9 and len(waits) >= 8, waits
    driver.run()
    driver.add(*(make_prompt([200 + i] * 12, max_tokens=1) for i in range(20)))
    for _ in range(20):
        driver.fill()
        assert len(driver.in_flight) == 2, "where none are left, none have a turn"
        driver.collect()
    driver.run()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_rows_behind_all_are_in_one_step_for_each_stage(num_stages: int) -> None:
    """A live request waited for a second step that was full of a batch's prompt tokens."""
    driver = Driver(num_blocks=200, chunk=8, num_stages=num_stages)
    driver.add(*(make_prompt([i] * 30, BEHIND_ALL) for i in range(6)))
    for _ in range(12):
        driver.fill()
        assert len(driver.in_flight) == num_stages
        driver.collect()
    driver.add(live := make_prompt([7] * 4))
    driver.fill()
    assert live.num_unfed == 0, "it is in the next step that can begin"
    driver.fill()
    assert len(driver.in_flight) == num_stages, "no step of the batch behind it"
    driver.run()


def test_what_is_being_fed_makes_room_and_is_fed_later() -> None:
    """The long prompt stood before the urgent one, and its tokens filled every step."""
    driver = Driver(num_blocks=30, chunk=8)
    long = make_prompt([1] * 70)
    urgent = make_prompt([2] * 8, priority=1, max_tokens=1)
    driver.add(long)
    driver.step()
    driver.add(urgent)
    driver.fill()
    assert urgent in driver.admitted and not long.ids_to_refeed, (
        "there is room for both"
    )
    assert urgent.num_unfed == 0 < long.num_unfed
    driver.add(make_prompt([3] * 60, priority=1))
    driver.run()
    assert long.ids_to_refeed and driver.admitted.count(long) == 2


def test_a_prompt_does_not_wait_for_a_prefix_of_lower_priority() -> None:
    """Others of its priority would be fed before that prefix, perhaps without end."""
    driver = Driver(has_cache=True, num_blocks=200, chunk=8)
    stem = list(range(40))
    driver.add(make_prompt([*stem, 1]))
    driver.step()
    same = make_prompt([*stem, 2])
    higher = make_prompt([*stem, 3], priority=1)
    driver.add(same, higher)
    driver.fill()
    assert same not in driver.admitted and higher in driver.admitted
    driver.run()


@pytest.mark.parametrize("max_priority", [3, 0])
def test_idle_blocks_between_a_prefix_and_those_who_go_on_from_it_are_room(
    max_priority: int,
) -> None:
    """Such a block is not evicted as long as a row goes on from it, in a copy of it."""
    driver = Driver(has_cache=True, num_blocks=20, max_rows=3)
    running(driver, make_prompt([*range(6)], max_tokens=1))
    above = make_prompt([*range(6), 9, 9], priority=9, max_tokens=29)
    below = make_prompt([50], max_tokens=36)
    running(driver, above, below)
    assert driver.pool.num_free + driver.pool.num_idle == 2 and driver.pool.num_idle > 0
    high = make_prompt([60], priority=max_priority, max_tokens=11 * 4)
    driver.add(high)
    driver.fill()
    assert (high in driver.admitted) == bool(below.ids_to_refeed) == (max_priority > 0)
    driver.run()


def test_who_is_preempted_may_enter_though_nothing_new_may() -> None:
    """A run that is told to stop lets its rows end: also those that wait behind a new prompt."""
    driver = Driver(num_blocks=10)
    low, high = (
        make_prompt([1], max_tokens=40),
        make_prompt([2], priority=1, max_tokens=40),
    )
    running(driver, low)
    driver.add(high)
    driver.step()
    late = make_prompt([3], priority=5, max_tokens=2)
    assert low.ids_to_refeed and driver.scheduler.waiting.has_preempted
    while not high.is_finished:
        driver.fill(is_stopping=True)
        driver.collect()
    driver.add(late)
    while not low.is_finished:
        driver.fill(is_stopping=True)
        driver.collect()
    assert late not in driver.admitted and not driver.scheduler.waiting.has_preempted
    driver.run()


def test_a_prompt_is_cancelled_wherever_it_is() -> None:
    driver = Driver(has_cache=True, num_blocks=40, chunk=16)
    drawing, fed, waiting = (make_prompt([i] * n) for i, n in enumerate([8, 60, 80]))
    driver.add(drawing, fed, waiting)
    driver.fill()
    driver.collect()
    # the second time it is gone, and nothing happens
    for prompt in (waiting, fed, fed):
        driver.cancel(prompt)
    driver.fill()
    assert len(driver.scheduler.waiting) == 0 and driver.scheduler.kv.num_sequences == 1
    driver.cancel(drawing)
    in_flight = [each for planned in driver.in_flight for each in planned.sequences]
    assert drawing.sequences[0] in in_flight, "it draws in a step in flight"
    while driver.in_flight:
        driver.collect()
    driver.scheduler.check_books()
    driver.cancel(drawing)
    driver.add(make_prompt([0] * 8), make_prompt([1] * 60), make_prompt([2] * 90))
    driver.run()


def test_one_of_two_equal_prompts_is_cancelled() -> None:
    driver = Driver(num_blocks=10)
    first, twin, other = (make_prompt([5] * 20, max_tokens=18) for _ in range(3))
    driver.add(first, twin, other)
    driver.step()
    driver.cancel(twin)
    assert driver.waiting() == [other] and driver.waiting()[0] is other
    driver.run()
    assert driver.admitted == [first, other]


def test_one_of_two_equal_prompts_is_preempted() -> None:
    """Compared by value they were one, if the comparison ended at all."""
    driver = Driver(num_blocks=10)
    first, twin = (make_prompt([5], max_tokens=20) for _ in range(2))
    running(driver, first, twin)
    driver.add(make_prompt([6], priority=1, max_tokens=20))
    driver.run()
    assert twin.ids_to_refeed and not first.ids_to_refeed


def test_who_goes_when_no_block_is_left_for_the_next_token() -> None:
    """The lowest priority, then the latest; once only, or for a row of higher priority."""
    rows = [
        make_prompt([i], priority).sequences[0]
        for i, priority in enumerate([1, 0, 0, 0, 0, 1])
    ]
    for number, row in enumerate(rows):
        row.prompt.admission_number = number
    rows[3].prompt.ids_to_refeed = [3, 3]
    rows[4].prompt.sequences *= 2  # candidates
    higher, lower, middle, again, pair, last = rows
    assert choose_victim(higher, [lower, middle, again, pair, last]) is again
    assert choose_victim(higher, [lower, middle, pair, last]) is middle
    assert choose_victim(lower, [middle, again, pair, last]) is middle
    assert choose_victim(middle, [lower, again, pair, last]) is middle
    assert choose_victim(higher, [pair, last]) is last
    assert choose_victim(last, [higher]) is last


def test_who_waits_for_the_prefix_of_a_cancelled_prompt_goes_on() -> None:
    driver = Driver(has_cache=True, num_blocks=100, chunk=16)
    stem = list(range(80))
    feeding = make_prompt([*stem, 1])
    standing = make_prompt([*stem, 2])
    driver.add(feeding, standing)
    driver.step()
    driver.fill()
    assert standing not in driver.admitted, "it would compute what is being computed"
    driver.cancel(feeding)
    driver.collect()
    driver.fill()
    assert standing in driver.admitted and standing.num_cached == 48, (
        "what was fed is shared"
    )
    driver.run()


def test_scores_of_a_cancelled_prompt_are_complete_for_those_who_share_them() -> None:
    driver = Driver(has_cache=True, num_blocks=100, chunk=16, num_stages=3)
    stem = list(range(80))
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    scored = make_prompt([*stem, 1], **asked)
    sharing = make_prompt([*stem[:40], 2], priority=1, **asked)
    driver.add(scored)
    driver.fill()
    driver.add(sharing)
    driver.collect()
    driver.fill()
    assert sharing.num_cached == 39 and sharing.shared_scores
    driver.cancel(scored)
    in_flight = [
        each for planned in driver.in_flight for each in planned.scored_prompts
    ]
    assert scored in in_flight, "its scores are in flight"
    driver.run()
    assert len(scored.reports) < 80, "what was not fed is not scored"


def test_only_new_blocks_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step told the whole table of each row, which stages knew but for its last block."""
    driver = Driver(num_blocks=100)
    ending = [
        make_prompt([i], max_tokens=30, stop_token_ids=tuple(range(VOCAB)))
        for i in range(9)
    ]
    running(driver, *ending)  # from which it learns that few blocks are enough at first
    steps: list[Step] = []
    submit = driver.pipeline.submit

    def take_note(step: Step) -> None:
        steps.append(step)
        submit(step)

    monkeypatch.setattr(driver.pipeline, "submit", take_note)
    driver.add(prompt := make_prompt([9] * 6, max_tokens=30))
    (sequence,) = prompt.sequences
    tables = list[list[int]]()
    while not prompt.is_finished:
        driver.fill()
        tables.append([*sequence.block_table])
        driver.collect()
    driver.run()
    first, *others = steps
    assert [step.positions.tolist() for step in others] == [
        [each] for each in range(6, 35)
    ]
    assert [step.num_tokens for step in others] == [1] * 29
    new = [step.new_blocks.tolist() for step in steps]
    assert len(new[0]) == 2, "of the prompt's six tokens"
    assert [len(each) for each in new[1:]] == [
        int(place in range(8, 36, 4)) for place in range(6, 35)
    ]
    told = [entry for each in new for entry in each]
    assert told == [[first.slots[0], *each] for each in enumerate(tables[-1])], (
        "each once, in order"
    )


def test_who_runs_again_has_its_table_told_whole() -> None:
    """It has other blocks, and perhaps another slot, of which stages know an older table."""
    driver = Driver(num_blocks=10)
    low, high = (
        make_prompt([1] * 5, max_tokens=30),
        make_prompt([2], priority=1, max_tokens=30),
    )
    running(driver, low)
    driver.add(high)
    driver.fill()
    (sequence,) = low.sequences
    assert low.ids_to_refeed and not sequence.block_table
    while not sequence.block_table:
        driver.collect()
        driver.fill()
    assert driver.in_flight[-1].step.new_blocks.tolist() == [
        [sequence.slot, *each] for each in enumerate(sequence.block_table)
    ]
    driver.run()


def test_cancelled_rows_do_not_teach_how_long_rows_are() -> None:
    driver = Driver(num_blocks=1000)
    prompts = [make_prompt([i], max_tokens=60) for i in range(30)]
    running(driver, *prompts)
    for prompt in prompts[:20]:
        driver.cancel(prompt)
    assert driver.scheduler.kv.expected.predict(60) == 60
    driver.run()


def test_the_verdict_on_a_cancelled_prompt_feeds_and_keeps_nothing() -> None:
    """It came too late: the prompt waited again, or blocks that were others' by then
    were kept."""
    driver = Driver(has_cache=True, num_blocks=40)
    stem = list(range(40))
    running(driver, make_prompt(stem, max_tokens=1))
    for was_apart in (False, True):
        prompt = make_prompt([*stem, 1 + was_apart])
        driver.add(prompt)
        driver.fill()
        assert prompt.num_reused > 0
        if was_apart:  # its first result is nan, and the second one is not
            planned = driver.in_flight.popleft()
            driver.pipeline.collect()
            assert driver.scheduler.pop_oldest_step() is planned
            assert driver.scheduler.requeue_apart(prompt)
            driver.fill()
            assert prompt.is_apart and prompt.num_reused == 0
        driver.cancel(prompt)
        driver.collect()
        if was_apart:
            driver.scheduler.mark_sound(prompt)
        else:
            assert not driver.scheduler.requeue_apart(prompt)
        assert driver.scheduler.is_idle
        driver.scheduler.check_books()
    driver.add(make_prompt([*stem, 1]), make_prompt([*stem, 2]))
    driver.run()


def make_request(num_prompts: int, **fields: Any) -> list[PromptState]:
    """Return the prompts of one request."""
    prompts = [make_prompt([7, place % 5], **fields) for place in range(num_prompts)]
    for place, prompt in enumerate(prompts):
        prompt.owner = prompts[0].owner
        prompt.index = place
    return prompts


def test_requests_take_turns() -> None:
    """Those behind one of 16,384 prompts waited until all of these had begun."""
    driver = Driver(max_rows=4, num_blocks=400)
    many = make_request(100, max_tokens=2)
    for place, prompt in enumerate(many):
        driver.scheduler.add(prompt, place)
    late = make_prompt([9], max_tokens=2)
    driver.scheduler.add(late)
    assert driver.waiting().index(late) == TURN
    latest = make_prompt([8], max_tokens=2)
    driver.scheduler.add(latest)
    assert driver.waiting()[: TURN + 3] == [*many[:TURN], late, latest, many[TURN]]
    driver.cancel(late)
    driver.cancel(many[50])
    assert driver.waiting() == [*many[:TURN], latest, *many[TURN:50], *many[51:]]


@pytest.mark.parametrize(("max_rows", "num_blocks"), [(40, 4000), (400, 80)])
def test_a_request_leaves_rows_and_blocks_to_others(
    max_rows: int, num_blocks: int
) -> None:
    """Others waited for one of its rows to end."""
    driver = Driver(max_rows=max_rows, num_blocks=num_blocks, chunk=1000)
    for place, prompt in enumerate(many := make_request(300, max_tokens=8)):
        driver.scheduler.add(prompt, place)
    driver.scheduler.admit()
    driver.scheduler.schedule()
    driver.scheduler.admit()
    num_running = many[0].owner.num_running
    assert (
        num_running
        == driver.scheduler.kv.num_sequences
        >= 0.85 * min(max_rows, num_blocks / 3)
    )
    late = make_prompt([9], max_tokens=2)
    driver.scheduler.add(late)
    assert driver.scheduler.admit() == [late]


def test_many_requests_that_have_their_share_hide_no_other() -> None:
    """Each of their prompts cost one of the looks, though one tells of all."""
    driver = Driver(max_rows=25, num_blocks=400, chunk=1000)
    requests = [make_request(TURN, max_tokens=8) for _ in range(24)]
    for first, *_ in requests:
        driver.scheduler.add(first)
    assert len(driver.scheduler.admit()) == 24
    for _, *others in requests:
        for place, prompt in enumerate(others, 1):
            driver.scheduler.add(prompt, place)
    assert driver.scheduler.admit() == []
    late = make_prompt([9], max_tokens=2)
    driver.scheduler.add(late)
    assert driver.waiting().index(late) > MAX_LOOKS
    assert driver.scheduler.admit() == [late]


def test_a_request_that_holds_nothing_has_its_turn_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(max_rows=8, num_blocks=400)
    driver.scheduler.add(make_prompt([9], max_tokens=2))
    driver.scheduler.admit()
    wide = make_prompt([5], n=7, max_tokens=2)
    wide.owner.added_s = time.perf_counter()
    driver.scheduler.add(wide)
    assert driver.scheduler.admit() == []
    monkeypatch.setattr("fminfer.engine.scheduler.PATIENCE_S", 0.0)
    assert driver.scheduler.admit() == [wide]
