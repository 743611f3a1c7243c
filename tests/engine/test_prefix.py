"""The prefix cache: books, matches, shared scores; nothing of it may show in an answer."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.contract.request import RequestParams
from fminfer.engine.blocks import BlockPool
from fminfer.engine.prefix import PrefixCache, SharedTokens
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PreparedRequest, PromptState, RequestState
from fminfer.engine.waiting import WaitingQueue
from fminfer.text.encoded_prompt import EncodedPrompt
from tests.conftest import IS_ALL
from tests.engine.remembering import VOCAB, RememberingPipeline
from tests.line_bench import LineBench


class Bench(LineBench):
    """An engine loop over the remembering pipeline."""

    def __init__(
        self,
        *,
        has_cache: bool,
        block_size: int,
        num_blocks: int,
        chunk: int,
        max_rows: int = 12,
        num_stages: int = 1,
        is_only_run: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        scheduler = Scheduler(
            self.pool,
            chunk_size=chunk,
            max_rows=max_rows,
            micro_batches=num_stages + 1,
            num_stages=num_stages,
            shares=has_cache,
        )
        super().__init__(
            RequestLimits(200, VOCAB),
            scheduler,
            RememberingPipeline(block_size),
            is_only_run=is_only_run,
        )

    def answers(self, requests: list[dict[str, Any]]) -> list[Any]:
        lines = [
            Line(0, i, json.dumps(r).encode()) for i, r in enumerate(requests, start=1)
        ]
        records = sorted(self.run_lines(lines), key=lambda record: record.line.number)
        assert [record.line.number for record in records] == list(
            range(1, len(requests) + 1)
        )
        return [_shown(record) for record in records]


def _shown(record: Record) -> Any:
    return record.error.code if record.error else record.to_dict()["result"]["choices"]


def random_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Draw requests whose prompts share prefixes of all lengths, repeats among them."""
    rng = random.Random(seed)
    stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(3)
    ]
    requests: list[dict[str, Any]] = []
    for _ in range(count):
        stem = rng.choice(stems)
        ids = stem[: rng.randint(1, len(stem))]
        ids = ids + [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 5, 20]))]
        request: dict[str, Any] = {
            "prompt": ids,
            "max_tokens": rng.choice([0, 1, 4, 9]),
        }
        request["temperature"] = rng.choice([0, 1])
        request["logprobs"] = rng.choice([None, 0, 2, 5])
        request["echo"] = rng.random() < 0.5
        request["n"] = rng.choice([1, 1, 3])
        requests.append(request)
    return requests


# Shrinking a seed would shrink nothing; the same examples each time, so that CI never wavers.
@settings(
    max_examples=60 if IS_ALL else 8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(1, 9),
    num_blocks=st.integers(60, 400),
    chunk=st.integers(1, 40),
    num_stages=st.integers(1, 3),
)
def test_answers_are_the_same_with_the_cache_on_or_off(
    seed: int, block_size: int, num_blocks: int, chunk: int, num_stages: int
) -> None:
    requests = random_requests(seed, 25)
    shape = {"block_size": block_size, "num_blocks": num_blocks, "chunk": chunk}
    shape["num_stages"] = num_stages
    plain = Bench(has_cache=False, **shape)
    cached = Bench(has_cache=True, **shape)
    forgetful = Bench(has_cache=True, is_only_run=True, **shape)
    expected = plain.answers(requests)
    assert forgetful.answers(requests) == expected
    forgetful.pool.check_books()
    assert cached.answers(requests) == expected
    assert cached.answers(requests) == expected, (
        "and on what the first run left in the cache"
    )
    fed = plain.loop.stats.num_prompt_tokens
    cached_fed = cached.loop.stats.num_prompt_tokens
    assert cached_fed + cached.loop.stats.num_cached_tokens == 2 * fed


def test_a_cache_larger_than_the_file_saves_what_a_trie_would() -> None:
    """All but the token that must be fed to draw from, and MIN_GAIN tokens where rows race."""
    bench = Bench(has_cache=True, block_size=8, num_blocks=2000, chunk=64)
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(100)]
    requests = [
        {"prompt": stem + [rng.randrange(VOCAB) for _ in range(30)], "max_tokens": 1}
        for _ in range(100)
    ]
    bench.answers(requests)
    stats = bench.loop.stats
    assert stats.num_counted_shareable >= 99 * 100
    assert stats.num_cached_tokens >= 0.99 * stats.num_counted_shareable
    assert stats.num_prompt_tokens == 100 * 130 - stats.num_cached_tokens


def keeping_and_forgetting(max_rows: int) -> list[Bench]:
    """Return an engine that keeps all it can, and one that forgets what nobody waits for."""
    shape = {"block_size": 4, "num_blocks": 4000, "chunk": 32, "max_rows": max_rows}
    return [Bench(has_cache=True, is_only_run=flag, **shape) for flag in (False, True)]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_forgotten_that_a_waiting_prompt_shares(seed: int) -> None:
    """Of many prompts, few of which run at once, no less is found than when all is kept."""
    keeping, forgetting = keeping_and_forgetting(max_rows=3)
    requests = random_requests(seed, 60)
    assert forgetting.answers(requests) == keeping.answers(requests)
    cached = [bench.loop.stats.num_cached_tokens for bench in (keeping, forgetting)]
    # one more where a prefix without scores stood in the way of one
    assert cached[1] >= cached[0]
    assert forgetting.pool.num_idle == 0 < keeping.pool.num_idle, "nobody waits"


def test_blocks_that_nobody_shares_are_used_again_before_others() -> None:
    num_used = []
    for bench in keeping_and_forgetting(max_rows=1):
        used: set[int] = set()
        bench.loop.on_step = lambda trace, used=used: used.update(
            trace.step.new_blocks[:, 2].tolist()
        )
        bench.answers([{"prompt": [i] * 30, "max_tokens": 1} for i in range(30)])
        num_used.append(len(used))
    assert num_used[0] == 30 * 8 and num_used[1] <= 8 + 4


def test_how_much_a_waiting_prompt_shares() -> None:
    rng = random.Random(3)
    waiting = WaitingQueue()
    assert waiting.num_shared_tokens([1]) is None, "more may come"
    waiting.expect_no_more_prompts()
    prompts: list[PromptState] = []
    for _ in range(400):
        ids = [rng.randrange(2) for _ in range(rng.randrange(9))]
        lengths = range(len(ids), -1, -1)
        shared = [
            next(n for n in lengths if other.ids[:n] == ids[:n]) for other in prompts
        ]
        assert waiting.num_shared_tokens(ids) == max(shared, default=0)
        if prompts and rng.random() < 0.4:
            waiting.discard(prompts.pop(rng.randrange(len(prompts))))
        else:
            encoded = EncodedPrompt(ids, "", [])
            owner = RequestState(
                0, PreparedRequest(RequestParams(), [encoded]), added_s=0.0
            )
            prompts.append(PromptState(owner, 0, encoded))
            waiting.add_preempted(prompts[-1])


def test_scores_of_a_shared_prefix_are_computed_once() -> None:
    bench = Bench(has_cache=True, block_size=8, num_blocks=2000, chunk=64)
    stem = list(range(100))
    asked = {"max_tokens": 0, "echo": True, "logprobs": 2}
    requests = [{"prompt": [*stem, 7 * i, i], **asked} for i in range(20)]
    bench.answers(requests)
    # 99 of the stem's tokens: the last is fed again, for the token after it is scored from it.
    assert bench.loop.stats.num_cached_tokens == 19 * 99
    alone = Bench(has_cache=False, block_size=8, num_blocks=2000, chunk=64)
    assert bench.answers(requests) == alone.answers(requests)


def test_scores_with_more_alternatives_are_not_taken_from_fewer() -> None:
    bench = Bench(has_cache=True, block_size=8, num_blocks=2000, chunk=64)
    asked = {"prompt": list(range(50)), "max_tokens": 0, "echo": True}
    alone = Bench(has_cache=False, block_size=8, num_blocks=2000, chunk=64)
    for k, num_cached in [(1, 0), (5, 0), (3, 48), (0, 48), (5, 48)]:
        before = bench.loop.stats.num_cached_tokens
        assert bench.answers([asked | {"logprobs": k}]) == alone.answers(
            [asked | {"logprobs": k}]
        )
        assert bench.loop.stats.num_cached_tokens - before == num_cached


def test_cached_blocks_make_room_and_the_prompts_own_prefix_never_blocks_it() -> None:
    """A prefix that is kept twice, cut in a block, must not stand in the way of its own
    prompt."""
    bench = Bench(has_cache=True, block_size=4, num_blocks=10, chunk=64)
    first = list(range(22))
    for ids in (
        first,
        [*first[:10], 99, 98],
        first[:10],
        [*first, *range(100, 116)],
        first,
    ):
        (choices,) = bench.answers([{"prompt": ids, "max_tokens": 1}])
        assert choices[0]["finish_reason"] == "length"
    bench.pool.check_books()


def test_a_block_given_on_is_not_filled_for_its_former_owner() -> None:
    """A candidate that ended at once left its copy behind, for the block of the next prompt.

    Both copies went into one block in one step, and threads decided which of them won.
    """
    stem = list(range(10))
    ending = {
        "prompt": stem,
        "max_tokens": 2,
        "n": 2,
        "stop_token_ids": list(range(VOCAB)),
    }
    after = {"prompt": [*stem, 77, 78, 79], "max_tokens": 3, "n": 2, "logprobs": 0}
    found = []
    for has_cache in (True, False):
        bench = Bench(
            has_cache=has_cache, block_size=4, num_blocks=40, chunk=64, max_rows=2
        )
        found.append(bench.answers([ending, after]))
    assert found[0] == found[1]


def test_kept_scores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are Python objects beside the KV cache; prompts used longest ago go first."""
    monkeypatch.setattr("fminfer.engine.prefix.MAX_SCORES", 500)
    bench = Bench(has_cache=True, block_size=4, num_blocks=4000, chunk=64)
    asked = {"max_tokens": 0, "echo": True, "logprobs": 4}
    requests = [{"prompt": [i, *range(50)], **asked} for i in range(40)]
    alone = Bench(has_cache=False, block_size=4, num_blocks=4000, chunk=64)
    assert bench.answers(requests) == alone.answers(requests)
    assert 0 < bench.scheduler.kv.prefixes._num_scores <= 500
    bench.pool.check_books()


def test_many_matches_do_not_pile_up() -> None:
    pool = BlockPool(8, block_size=4)
    cache = PrefixCache(pool)
    table = pool.allocate(2)
    cache.insert(list(range(8)), 8, table, None, 0)
    pool.release(table)
    for _ in range(5000):
        cache.match(list(range(8)), 8, None)
    assert len(cache._nodes) == 1
    cache.evict(8)
    assert pool.num_free == 8


def test_shared_tokens_are_those_of_a_trie() -> None:
    shared = SharedTokens()
    found = [
        shared.add(ids) for ids in ([1, 2, 3], [1, 2, 4], [2], [1, 2, 3, 4], [1, 2, 3])
    ]
    assert found == [0, 2, 0, 3, 3]


@pytest.mark.parametrize("has_cache", [True, False])
def test_cached_tokens_are_told(has_cache: bool) -> None:
    bench = Bench(has_cache=has_cache, block_size=4, num_blocks=100, chunk=64)
    line = Line(
        0, 1, json.dumps({"prompt": list(range(30)), "max_tokens": 2, "n": 2}).encode()
    )
    told = []
    for _ in range(2):
        (record,) = bench.run_lines([line])
        told.append(
            record.to_dict()["result"]["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
        )
    assert told == ([0, 29] if has_cache else [0, 0])


def steps_of(num_stages: int, num_rows: int) -> list[tuple[int, int]]:
    """Run short prompts and, once they decode, one of 150 tokens; return each step's
    token counts.

    Returns:
        (prompt tokens, decode rows) a step.
    """
    bench = Bench(
        has_cache=False,
        block_size=8,
        num_blocks=2000,
        chunk=512,
        max_rows=num_rows,
        num_stages=num_stages,
    )
    steps: list[tuple[int, int]] = []
    bench.loop.on_step = lambda s: steps.append(
        (s.num_prompt_tokens, s.num_decode_rows)
    )
    rows = [{"prompt": [i % VOCAB], "max_tokens": 12 + i % 2} for i in range(num_rows)]
    bench.answers([*rows, {"prompt": [1] * 150, "max_tokens": 2}])
    return steps


def test_running_rows_are_spread_over_the_stages() -> None:
    """One micro-batch for each stage: fewer leave a stage idle, more read all weights again."""
    for num_stages, share in ((1, 12), (2, 6), (3, 4)):
        steps = steps_of(num_stages, 12)
        largest = max(num_rows for _, num_rows in steps)
        assert largest <= share + 1
        decoding = [num_rows for _, num_rows in steps if num_rows]
        assert sum(decoding) / len(decoding) > 0.7 * share, (
            "no micro-batch of leftovers"
        )


def test_many_rows_of_one_stage_run_together() -> None:
    """Two halves in turns would read all weights twice; a pipeline keeps a third micro-batch."""
    for num_stages, share in ((1, 200), (2, 67)):
        decoding = [num_rows for _, num_rows in steps_of(num_stages, 200) if num_rows]
        assert statistics.median(decoding) == pytest.approx(share, abs=1)


def test_in_a_pipeline_prompts_come_in_pieces_while_rows_decode() -> None:
    """A long step between short ones makes every stage wait; alone, one rank has nobody
    to wait."""
    assert max(tokens for tokens, _ in steps_of(1, 12)) == 150
    assert max(tokens for tokens, _ in steps_of(2, 12)) <= 128
