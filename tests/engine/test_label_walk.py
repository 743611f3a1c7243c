"""The search through labels, over a model without weights: what it finds and computes."""

from __future__ import annotations

import math
import random
from collections import abc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fminfer.contract.request import RequestParams
from fminfer.core.config import Constraint
from fminfer.engine.engine_core import Event, Failed, Finished
from fminfer.engine.label_walk import LabelWalk
from fminfer.engine.results import _end_at_label
from fminfer.engine.sequence import (
    PreparedRequest,
    PromptState,
    RequestState,
    Sequence,
    TokenReport,
)
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.label_trie import LabelTrie
from tests.conftest import IS_ALL
from tests.engine.remembering import (
    ModelAlone,
    RememberingPipeline,
    RememberingStage,
    logprob_of,
)
from tests.engine.test_prefix import Bench

LABELS = Constraint(
    "labels", "[]"
)  # in the place of any: tests give the trie themselves
Path = tuple[int, ...]


class Tries:
    """In the place of a model's grammars: it has one trie."""

    def __init__(self, paths: abc.Sequence[Path]) -> None:
        names = {str(number): path for number, path in enumerate(paths)}
        self._trie = LabelTrie([*names], len(names), lambda name: [*names[name]])

    def find_labels(self, constraint: Constraint) -> LabelTrie:
        return self._trie


def make_paths(rng: random.Random, count: int) -> list[Path]:
    """Draw distinct paths of few tokens, so that many share beginnings or begin others."""
    paths: dict[Path, None] = {}
    while len(paths) < count:
        paths[tuple(rng.choices(range(5), k=rng.randint(1, 5)))] = None
    return [*paths]


def find_expected(
    prompt: list[int], paths: abc.Sequence[Path], stages: int
) -> list[float]:
    """Return each label's own probability, computed label by label."""
    whole = dict[Path, float]()
    for path in paths:
        model = ModelAlone(stages)
        seen = [model.feed(token_id) for token_id in [*prompt, *path]][
            len(prompt) - 1 :
        ]
        logprobs = map(logprob_of, seen, path)
        whole[path] = math.exp(sum(logprobs))
    own = []
    for path in paths:
        longer = [p for p in paths if len(p) > len(path) and p[: len(path)] == path]
        nearest = [
            p
            for p in longer
            if not any(len(q) < len(p) and p[: len(q)] == q for q in longer)
        ]
        own.append(whole[path] - sum(whole[p] for p in nearest))
    return own


def make_request(prompt: list[int], longest: int, **fields: Any) -> PreparedRequest:
    params = RequestParams(
        max_tokens=longest, temperature=0, constraint=LABELS, **fields
    )
    return PreparedRequest(params, [EncodedPrompt(prompt, "", [])])


def run(bench: Bench) -> dict[int, Event]:
    events: dict[int, Event] = {}
    while bench.loop.has_work:
        events |= {event.request_id: event for event in bench.loop.step()}
    bench.loop.check_books()
    return events


@settings(
    max_examples=80 if IS_ALL else 12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(1, 9),
    num_blocks=st.integers(12, 200),
    chunk=st.integers(1, 30),
    max_rows=st.integers(1, 12),
    num_stages=st.integers(1, 3),
    has_cache=st.booleans(),
    is_only_run=st.booleans(),
)
def test_any_shape_of_steps_finds_the_same(
    seed: int, num_stages: int, **shape: Any
) -> None:
    """Rows of other kinds run beside, some of higher priority; some requests are cancelled."""
    rng = random.Random(seed)
    paths = make_paths(rng, rng.randint(1, 30))
    longest = max(map(len, paths))
    bench = Bench(num_stages=num_stages, **shape)
    most = bench.pool.num_tokens - longest
    stems = [rng.choices(range(9), k=rng.randint(1, min(40, most))) for _ in range(4)]
    prompts = [stem[: rng.randint(1, len(stem))] for stem in stems for _ in range(2)]
    cancelled = set[int]()
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        ids = {}
        for prompt in prompts:
            request = make_request(prompt, longest)
            ids[bench.loop.add(request, priority=rng.choice([0, 0, 1]))] = prompt
            if rng.random() < 0.3:
                bench.add(rng.choice([0, 2]), prompt=prompt[:3], max_tokens=3)
            if rng.random() < 0.2:
                cancelled.add(rng.choice([*ids]))
        for number in range(rng.randint(0, 5)):
            if number and bench.loop.has_work:
                bench.loop.step()
        early = [*cancelled]
        for request_id in early:
            bench.loop.cancel(request_id)
        if shape["is_only_run"]:
            bench.loop.expect_no_more_requests()
        events = run(bench)

    for request_id, event in events.items():
        if request_id not in ids:
            continue
        assert isinstance(event, Finished), event
        (choice,) = event.choices
        expected = find_expected(ids[request_id], paths, 1)
        mass = sum(expected)
        assert choice["label_mass"] == pytest.approx(mass, rel=1e-4)
        found = choice["label_probabilities"]
        for label, value in enumerate(expected):
            assert found[str(label)] == pytest.approx(value / mass, abs=1e-4)


def test_the_prompt_is_computed_once_and_shared_beginnings_too() -> None:
    """Fed are the prompt and each inner node of the trie, no token twice."""
    rng = random.Random(4)
    paths = make_paths(rng, 40)
    bench = Bench(has_cache=True, block_size=4, num_blocks=400, chunk=64, max_rows=64)
    prompt = rng.choices(range(9), k=50)
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        patch.setattr("fminfer.engine.label_walk.MIN_SHARE", 1e-300)
        request_id = bench.loop.add(make_request(prompt, 5))
        events = run(bench)
    assert isinstance(events[request_id], Finished)
    inner = {path[:size] for path in paths for size in range(1, len(path))}
    assert bench.loop.stats.num_prompt_tokens == len(prompt) + len(inner)


def walk_through(
    paths: abc.Sequence[Path], logprobs: dict[Path, float]
) -> tuple[LabelWalk, int]:
    """Search with given logprobs of tokens; return the walk and how many branches it has fed."""
    names = {str(number): path for number, path in enumerate(paths)}
    trie = LabelTrie([*names], len(names), lambda name: [*names[name]])
    request = make_request([1, 2], 9)
    state = RequestState(0, request, added_s=0.0)
    walk = LabelWalk(PromptState(state, 0, request.prompts[0]), trie)
    num_fed = 0
    while wave := walk.make_wave():
        for branch in wave:
            num_fed += 1
            assert branch.branch is not None
            for number in branch.branch.scored_nodes:
                path = tuple(
                    trie.nodes[each].token_id for each in trie.list_path(number)
                )
                report = TokenReport(path[-1], logprobs.get(path, -3.0))
                branch.reports.append(report)
            walk.finish_branch(branch)
    return walk, num_fed


def test_branches_that_cannot_reach_a_millionth_of_the_mass_are_left_out() -> None:
    paths = [(0,), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0)]
    logprobs = {(0,): -0.5, (1,): -1.0, (2,): -0.5 - 13.9}  # e^-13.9 is 0.92 e-6
    walk, num_fed = walk_through(paths, logprobs)
    fields = walk.describe_answer()
    assert fields["label_probabilities"]["3"] == 0.0
    assert num_fed == 1 + 1 + 2, "the prompt, token 1, and behind it both"
    _, num_more = walk_through(paths, logprobs | {(2,): -0.5 - 13.5})
    assert num_more == num_fed + 1, "token 2, and neither of those behind it"


def test_a_likely_beginning_without_an_end_leaves_nothing_out() -> None:
    """What counts is the mass of whole labels, and not that of their first tokens."""
    paths = [(0, 0), (1, 0)]
    logprobs = {(0,): -0.1, (0, 0): -30.0, (1,): -20.0, (1, 0): -0.1}
    walk, _ = walk_through(paths, logprobs)
    found = walk.describe_answer()["label_probabilities"]
    assert [*found] == ["1", "0"] and found["1"] > 0.9999


def test_labels_without_any_probability_have_none() -> None:
    walk, _ = walk_through([(0,), (1,)], {(0,): -math.inf, (1,): -math.inf})
    assert walk.describe_answer() == {
        "label_probabilities": {"0": 0.0, "1": 0.0},
        "label_mass": 0.0,
    }


def test_tiny_masses_are_normalized() -> None:
    """Below what a float holds, their relation still counts."""
    walk, _ = walk_through([(0,), (1,)], {(0,): -2000.0, (1,): -2001.0})
    found = walk.describe_answer()
    assert found["label_mass"] == 0.0
    assert found["label_probabilities"]["0"] == pytest.approx(1 / (1 + math.exp(-1)))


def test_nan_in_a_label_is_the_requests_error() -> None:
    """Its other branches are given up; a row beside it is answered."""
    paths = [(0, 8, 0), (0, 1, 0), (2, 1, 0), (3, 3)]
    stage = RememberingStage(4, nan_id=8)
    bench = Bench(has_cache=True, block_size=4, num_blocks=100, chunk=64)
    bench.loop._pipeline = RememberingPipeline(4, [stage])
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        bad = bench.loop.add(make_request([1, 2, 3], 3))
        good = bench.add(prompt=[1, 2, 3, 4], max_tokens=2)
        events = run(bench)
    assert isinstance(events[bad], Failed)
    assert events[bad].error.code == "nan_logits"
    assert isinstance(events[good], Finished)


def test_a_first_token_of_all_labels_is_fed_with_the_prompt() -> None:
    """The first branch goes on into it, and is still the prompt: nothing was put back."""
    paths = [(1, 2, 0), (1, 2, 1), (1, 3)]
    bench = Bench(has_cache=True, block_size=4, num_blocks=100, chunk=64)
    prompt = [1, 2, 3, 4, 5, 6]
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        for _ in range(2):
            request_id = bench.loop.add(make_request(prompt, 3))
            event = run(bench)[request_id]
    assert isinstance(event, Finished)
    assert event.usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert bench.loop.stats.num_cached_tokens == len(prompt) - 1
    assert bench.loop.stats.num_put_back == 0


def test_impossible_labels_cost_no_other_row() -> None:
    """The likeliest of them has tokens that were never computed: a KeyError ended the run."""
    walk, num_fed = walk_through(
        [(0, 1), (0, 2), (1, 3)], {(0,): -math.inf, (1,): -math.inf}
    )
    sequence = Sequence(walk._prompt, b"", None)
    label, reports = walk.choose_label(sequence)
    assert label == "0" and num_fed == 1
    assert [report.logprob for report in reports] == [-math.inf] * 2


@pytest.mark.parametrize("seed", range(12))
def test_a_given_up_branch_of_an_encoder_is_not_fed(seed: int) -> None:
    """Its encoder output came late, and it was fed without blocks: all rows were lost."""
    rng = random.Random(seed)
    paths = [(first, last) for first in (1, 2, 3, 4, 8) for last in (7, 11)]
    num_stages = rng.choice([1, 2, 3])
    block_size = rng.randint(1, 6)
    bench = Bench(
        has_cache=False,
        block_size=block_size,
        num_blocks=200,
        chunk=rng.randint(6, 30),
        num_stages=num_stages,
    )
    stages = [
        RememberingStage(
            block_size,
            is_first=place == 0,
            is_last=place == num_stages - 1,
            nan_id=8 if place == 0 else -1,
        )
        for place in range(num_stages)
    ]
    bench.loop._pipeline = RememberingPipeline(block_size, stages)
    bad = []
    good = []
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        for number in range(3):
            source = [20 + number] + [21] * rng.randint(1, 5)
            start = {"prompts": [EncodedPrompt([5], "", [])], "num_start": 1}
            start["sources"] = [EncodedPrompt(source, "", [])]
            labelled = make_request([5], 2)
            bad.append(bench.loop.add(replace(labelled, **start)))
            drawn = RequestParams(max_tokens=4, temperature=0)
            good.append(bench.loop.add(PreparedRequest(drawn, **start)))
        events = run(bench)
    assert all(isinstance(events[request_id], Failed) for request_id in bad)
    assert all(isinstance(events[request_id], Finished) for request_id in good)


def test_labels_leave_rows_to_other_requests() -> None:
    """A request of another client waited for all labels of those before it."""
    paths = [(first, second, 0) for first in range(40) for second in range(5)]
    bench = Bench(has_cache=True, block_size=4, num_blocks=400, chunk=32, max_rows=12)
    steps = {}
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        patch.setattr("fminfer.engine.label_walk.MIN_SHARE", 1e-300)
        many = [bench.loop.add(make_request([number, 9], 3)) for number in range(5)]
        for _ in range(4):
            bench.loop.step()
        quick = bench.add(prompt=[1, 2, 3], max_tokens=4)
        for number in range(1000):
            for event in bench.loop.step():
                steps[event.request_id] = number
            if not bench.loop.has_work:
                break
    bench.loop.check_books()
    assert steps[quick] < 15 < min(steps[each] for each in many)


def test_tokens_of_labels_are_counted_apart() -> None:
    """The time left was 0 as soon as the prompts were fed."""
    paths = [(first, second, 0) for first in range(4) for second in range(4)]
    bench = Bench(has_cache=True, block_size=4, num_blocks=400, chunk=32)
    with pytest.MonkeyPatch.context() as patch:
        tries = Tries(paths)
        patch.setattr("fminfer.engine.start.find_grammars", lambda *a: tries)
        patch.setattr("fminfer.engine.label_walk.MIN_SHARE", 1e-300)
        bench.loop.add(make_request([1, 2, 3, 4], 3))
        run(bench)
    stats = bench.loop.stats
    assert stats.num_label_tokens == 4 + 16
    assert stats.num_prompt_tokens == 4 + stats.num_label_tokens


class StrippingDecoder:
    """Leaves out a space at the beginning of all text, as sentencepiece does."""

    pieces = {1: " no", 2: "rth"}  # noqa: RUF012

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[each] for each in ids).lstrip(" ")

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        return True


def test_a_choice_is_the_label_that_was_asked_for() -> None:
    """Behind an empty prompt its space was left out, and no probability had its name."""
    trie = LabelTrie([" north"], 1, lambda name: [1, 2])
    request = make_request([], 2)
    state = RequestState(0, request, added_s=0.0)
    prompt = PromptState(state, 0, EncodedPrompt([9], "", []))
    walk = LabelWalk(prompt, trie)
    while wave := walk.make_wave():
        for branch in wave:
            assert branch.branch is not None
            for number in branch.branch.scored_nodes:
                branch.reports.append(TokenReport(trie.nodes[number].token_id, -1.0))
            walk.finish_branch(branch)
    sequence = Sequence(prompt, b"", Detokenizer(StrippingDecoder(), []))
    _end_at_label(sequence, walk)
    assert sequence.text in walk.describe_answer()["label_probabilities"]
    assert [token.offset for token in sequence.tokens] == [0, len(" no")]
