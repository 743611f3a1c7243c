"""Whole engines over a model without weights, drawn by a seed, through all that may
happen to one.

A seed draws the engine (its KV cache, its steps, its stages and ranks), requests of all
kinds, and
events: requests come and are cancelled, runs drain, results come late, memory runs out,
values are spoiled, steps fail, ranks die. What a request is answered depends on none of that.
`Expected` says it without an engine, and the books are proved behind each step.

    scripts/simulate --runs 10000
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import click
import numpy as np

from fminfer.contract.field_table import COLUMNS
from fminfer.contract.request import DEFAULTS, RequestParams, VectorSpec, VectorWish
from fminfer.core.errors import FminferError, RequestError, StepLimitError
from fminfer.core.messages import Mask, make_mask, pack_token_ids
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.blocks import BlockPool
from fminfer.engine.engine_core import BEHIND_ALL, Delta, Event, Failed, Finished
from fminfer.engine.loop import EngineLoop
from fminfer.engine.noise import make_draw_key, make_noise_key, make_step_noise
from fminfer.engine.prefix import PrefixCache, _Node
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PreparedRequest, RequestState, Sequence
from fminfer.engine.start import RequestStarter
from fminfer.pipeline.local import LocalPipeline
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import Tokenizer
from tests.engine.remembering import (
    NAN,
    ModelAlone,
    RememberingPipeline,
    RememberingStage,
    draw_of,
    encode_prompt,
    has_bit,
    logprob_of,
    top_of,
    vector_of,
)
from tests.engine.ring_threads import Death, ThreadRing, wires_are_queues
from tests.streams import check_stream

VOCAB = 128  # one ASCII character each, so that texts need no decoding
EOS = 0
BAD = 127  # a token whose hidden states are nan
RUN_SEED = 1
START_ID = 5  # that a decoder behind an encoder begins with
# meanings of requests with a toy's masks
TOYS = [bytes([number]) * 16 for number in range(1, 4)]
MOST_STEPS = 4000
TOKENIZER = Tokenizer(None)


class ToyMatcher:
    """Masks that hang on the tokens so far: often of one token, seldom with the end."""

    def __init__(self, number: int) -> None:
        self._seen = number
        self.is_complete = True

    @property
    def mask(self) -> Mask:
        seen = hash((self._seen, 1))
        if seen % 9 < 5:
            return make_mask(pack_token_ids([1 + seen % 120], 16))
        if seen % 9 < 7:
            return make_mask(
                pack_token_ids({1 + (seen >> 8) % 120, 1 + (seen >> 20) % 120}, 16)
            )
        return make_mask(
            pack_token_ids({EOS, *range(3, 40)} if seen % 9 == 7 else range(1, 127), 16)
        )

    def advance(self, token_id: int) -> None:
        assert has_bit(self.mask, token_id) and token_id != EOS
        self._seen = hash((self._seen, token_id))


@dataclass(slots=True, frozen=True)
class ToyStarter(RequestStarter):
    """Gives the sequences of some requests a toy's masks, in place of a grammar's."""

    def start_request(self, request_id: int, prepared: PreparedRequest) -> RequestState:
        state = RequestStarter.start_request(self, request_id, prepared)
        if prepared.meaning in TOYS:
            for prompt in state.prompts:
                for sequence in prompt.sequences:
                    matcher: Any = ToyMatcher(TOYS.index(prepared.meaning))
                    sequence.matcher = matcher
                    sequence.update_mask()
        return state


@dataclass(slots=True)
class Choice:
    """A choice as the contract has it, of one sequence that was drawn alone."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    text: str = ""
    num_listed: int = 0
    finish_reason: str = "length"
    stop_reason: str | int | None = None

    @property
    def is_sound(self) -> bool:
        return NAN not in self.seen

    @property
    def mean_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


class Expected:
    """What a request is answered, whatever happens around it. `choices` None: nan."""

    def __init__(self, prepared: PreparedRequest, num_stages: int) -> None:
        self._prepared = prepared
        self._num_stages = num_stages
        self.num_drawn = 0
        prompts = range(len(prepared.prompts))
        listed = [
            self._pooled(i) if prepared.is_pooled else self._drawn(i) for i in prompts
        ]
        self.choices: list[dict[str, Any]] | None = None
        if None not in listed:
            choices = [choice for each in listed for choice in each or []]
            self.choices = [choice | {"index": i} for i, choice in enumerate(choices)]
        if prepared.is_pooled:
            self.usage = {
                "prompt_tokens": sum(len(each.ids) for each in prepared.prompts)
            }
            return
        num_read = sum(len(each.ids) for each in (*prepared.prompts, *prepared.sources))
        num_read -= prepared.num_start * len(prepared.prompts)
        self.usage = {"prompt_tokens": num_read, "completion_tokens": self.num_drawn}

    def _pooled(self, index: int) -> list[dict[str, Any]] | None:
        vector = vector_of(self._encode(self._prepared.prompts[index].ids))
        if np.isnan(vector).any():
            return None
        return [{"object": "embedding", "embedding": vector.tolist()}]

    def _encode(self, ids: list[int]) -> list[int]:
        values = [NAN if token_id == BAD else token_id for token_id in ids]
        for _ in range(self._num_stages):
            values = encode_prompt(values)
        return values

    def _drawn(self, index: int) -> list[dict[str, Any]] | None:
        prepared = self._prepared
        params = self._prepared.params
        memory = (
            tuple(self._encode(prepared.sources[index].ids)) if prepared.sources else ()
        )
        prompt = prepared.prompts[index]
        sequences = list[Choice]()
        scores = list[int]()
        for candidate in range(params.num_candidates):
            model = ModelAlone(self._num_stages, memory)
            num_fed = params.count_fed_tokens(len(prompt.ids))
            seen = [
                model.feed(NAN if each == BAD else each)
                for each in prompt.ids[:num_fed]
            ]
            scores = seen[: len(prompt.ids) - 1]
            sequences.append(self._draw(index, candidate, model, seen))
        copies = params.best_of if len(sequences) == 1 else 1
        self.num_drawn += copies * sum(len(each.ids) for each in sequences)
        is_scored = params.echo and params.logprobs is not None
        if not all(each.is_sound for each in sequences) or (
            is_scored and NAN in scores
        ):
            return None
        if len(sequences) == 1:
            sequences *= params.n
        elif params.best_of > params.n:
            sequences.sort(key=lambda each: each.mean_logprob, reverse=True)
        return [self._show(prompt, each, scores) for each in sequences[: params.n]]

    def _draw(
        self, index: int, candidate: int, model: ModelAlone, seen: list[int]
    ) -> Choice:
        prepared = self._prepared
        params = self._prepared.params
        choice = Choice()
        key = b""
        if not params.is_greedy:
            ids = [each.ids for each in prepared.prompts]
            if prepared.sources:
                ids = [
                    s.ids + own for s, own in zip(prepared.sources, ids, strict=True)
                ]
            seed = RUN_SEED if params.seed is None else params.seed
            request_key = make_draw_key(
                ids, params, seed, prepared.repeat, prepared.meaning
            )
            key = make_noise_key(request_key, index, candidate)
        matcher = (
            ToyMatcher(TOYS.index(prepared.meaning))
            if prepared.meaning in TOYS
            else None
        )
        columns = tuple(
            float(np.dtype(COLUMNS[n]).type(getattr(params, n))) for n in COLUMNS
        )
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        while len(choice.ids) < params.max_tokens:
            mask = None if matcher is None else matcher.mask
            held = ends | {EOS} if len(choice.ids) < params.min_tokens else set()
            token_id = draw_of(
                seen[-1],
                make_step_noise(key, len(choice.ids)) if key else 0,
                columns,
                _edits(params, choice.ids),
                lambda token, held=held, mask=mask: (
                    token not in held and (mask is None or has_bit(mask, token))
                ),
                VOCAB,
            )
            choice.seen.append(seen[-1])
            choice.ids.append(token_id)
            choice.logprobs.append(logprob_of(seen[-1], token_id))
            if not choice.is_sound or self._ends(choice, ends, matcher is not None):
                break
            if matcher is not None:
                matcher.advance(token_id)
            seen.append(model.feed(NAN if token_id == BAD else token_id))
        return choice

    def _ends(self, choice: Choice, ends: set[int], is_constrained: bool) -> bool:
        """Tell whether a choice ends with its newest token; settle its text."""
        params = self._prepared.params
        token_id = choice.ids[-1]
        choice.num_listed = len(choice.ids)
        may_stop = len(choice.ids) > params.min_tokens
        if token_id in ends and (may_stop or is_constrained):
            choice.finish_reason = "stop"
            choice.stop_reason = token_id if token_id in params.stop_token_ids else None
            if not (params.echo or params.include_stop_str_in_output):
                choice.num_listed -= 1
            if not params.include_stop_str_in_output:
                return True
        choice.text += chr(token_id)
        first = len(choice.text) - 1
        hits = [
            (at, stop)
            for stop in params.stop
            if may_stop
            and (at := choice.text.find(stop, max(0, first - len(stop) + 1))) >= 0
        ]
        if hits:
            cut, choice.stop_reason = min(hits, key=lambda hit: hit[0])
            cut += len(choice.stop_reason) if params.include_stop_str_in_output else 0
            choice.text = choice.text[:cut]
            choice.num_listed = min(choice.num_listed, cut)
            choice.finish_reason = "stop"
        return choice.finish_reason == "stop"

    def _show(
        self, prompt: EncodedPrompt, choice: Choice, scores: list[int]
    ) -> dict[str, Any]:
        params = self._prepared.params
        num_start = self._prepared.num_start
        shown: dict[str, Any] = {
            "text": prompt.text * params.echo + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "prompt_token_ids": prompt.ids,
            "token_ids": choice.ids,
        }
        if choice.stop_reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if params.logprobs is None:
            return shown
        ids = choice.ids[: choice.num_listed]
        seen = choice.seen[: choice.num_listed]
        places = [len(prompt.text) + place for place in range(len(ids))]
        seen_before: list[int | None] = [*seen]
        if params.echo:
            ids = prompt.ids + ids
            seen_before = [None, *scores, *seen]
            places = [*prompt.offsets, *places]
        skip = num_start if params.echo else 0
        pairs = [*zip(ids, seen_before, strict=True)][skip:]
        shown["logprobs"] = {
            "tokens": [chr(token_id) for token_id, _ in pairs],
            "token_logprobs": [
                None if value is None else logprob_of(value, token_id)
                for token_id, value in pairs
            ],
            "top_logprobs": None,
            "text_offset": places[skip:],
        }
        if params.logprobs:
            shown["logprobs"]["top_logprobs"] = [
                None
                if value is None
                else _alternatives(value, token_id, params.logprobs)
                for token_id, value in pairs
            ]
        return shown


def _alternatives(seen: int, token_id: int, count: int) -> dict[str, float]:
    shown: dict[str, float] = {}
    for each, logprob in (
        *top_of(seen, count, VOCAB),
        (token_id, logprob_of(seen, token_id)),
    ):
        shown.setdefault(chr(each), logprob)
    return shown


def _edits(
    params: RequestParams, drawn: list[int]
) -> tuple[tuple[int, float, float, float], ...]:
    """Return the changes of logits behind these tokens, by the contract."""
    if not (params.logit_bias or params.has_penalties):
        return ()
    bias = dict(params.logit_bias)
    counts = Counter(drawn) if params.has_penalties else Counter()
    return tuple(
        (
            token_id,
            bias.get(token_id, 0.0),
            1.0,
            params.frequency_penalty * counts[token_id]
            + params.presence_penalty * (counts[token_id] > 0),
        )
        for token_id in sorted({*bias, *counts})
    )


@dataclass(slots=True)
class Engine:
    """One engine of a simulation."""

    loop: EngineLoop
    scheduler: Scheduler
    stages: list[RememberingStage]
    close: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Request:
    """A request of a simulation, and what came of it."""

    prepared: PreparedRequest
    expected: Expected
    priority: int
    is_streamed: bool
    ids: list[int] = field(default_factory=list)  # under which it was added
    events: list[Event] = field(default_factory=list)  # since it was added last
    is_cancelled: bool = False
    is_refused: bool = False

    @property
    def end(self) -> Event | None:
        return next((each for each in self.events if not isinstance(each, Delta)), None)

    @property
    def is_open(self) -> bool:
        return self.end is None and not (self.is_cancelled or self.is_refused)


class Faults:
    """What goes wrong, by chance and so often at most. Stages in threads ask, too."""

    def __init__(self, rng: random.Random) -> None:
        self.share_of_spoiled = rng.choice([0.0, 0.0, 0.0, 0.002, 0.01])
        self.most_spoiled = rng.choice([1, 3])
        self.most_at_once = rng.choice([10**9, 10**9, 1, 3, 7])
        self.share_of_late = rng.choice([0.0, 0.5, 0.9])
        self.share_of_failures = rng.choice([0.0, 0.0, 0.0, 0.03])
        self.num_spoiled = 0
        self._rng = random.Random(rng.random())

    def spoils(self) -> bool:
        is_spoiled = self._rng.random() < self.share_of_spoiled
        is_spoiled = is_spoiled and self.num_spoiled < self.most_spoiled
        self.num_spoiled += is_spoiled
        return is_spoiled

    def has_memory(self, size: int) -> bool:
        return size <= self.most_at_once

    def is_ready(self) -> bool:
        return self._rng.random() >= self.share_of_late

    def fails(self) -> bool:
        return self._rng.random() < self.share_of_failures


# What is for thousands of rows, as small as what is simulated: its name, and values to
# choose from.
CONSTANTS: dict[str, list[int]] = {
    "packing.MIN_SPREAD_ROWS": [1, 3, 64],
    "packing.MIN_MIXED_TOKENS": [4, 128],
    "prefix.MAX_SCORES": [60, 2_000_000],
    "reservation.MIN_ROWS_SEEN": [1, 1, 8],
    "results.MAX_UNFED": [2, 32],
    "scheduler.MAX_LEFT_OUT": [1, 8],
    "scheduler.MAX_LOOKS": [1, 3, 64],
    "waiting.MIN_GAIN": [1, 4, 16],
}


@contextlib.contextmanager
def small_constants(seed: int) -> Iterator[None]:
    """Draw the engine's constants."""
    rng = random.Random(-1 - seed)
    with contextlib.ExitStack() as stack:
        for name, values in CONSTANTS.items():
            patch = mock.patch(f"fminfer.engine.{name}", rng.choice(values))
            stack.enter_context(patch)
        yield


class Interrupt(BaseException):
    """As a user's, at any moment."""


class Simulation:
    """One engine and its requests; `run` raises an AssertionError where something is wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self._rng = random.Random(seed)
        self.kind = rng.choice(["decoder"] * 7 + ["both", "both", "pooled"])
        self.mode = rng.choice(["here"] * 8 + ["thread", "ring"])
        self.num_stages = rng.choice([1, 1, 2, 3])
        self.num_shards = 1
        if self.mode == "ring":
            self.num_shards = rng.choice([1, 1, 2])
            self.num_stages = max(self.num_stages, 3 - self.num_shards)
        self.micro_batches = self.num_stages + rng.choice([0, 1, 1])
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.chunk = rng.choice([3, 8, 16, 40, 200])
        self.max_rows = rng.choice([2, 4, 12])
        self.shares = rng.random() < 0.75
        self.max_steps = rng.choice([None] * 9 + [7])
        self.priorities = rng.choice(
            [[0], [0], [0, 0, 0, 1], [-1, 0, 5], [BEHIND_ALL] * 2 + [0]]
        )
        self.share_of_cancels = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.share_of_interrupts = rng.choice([0.0] * 6 + [0.02])
        self.faults = Faults(rng)
        self.death = (
            rng.choice([None, rng.randrange(60)]) if self.mode == "ring" else None
        )
        self.is_crowd = rng.random() < 0.3  # of rows that are preempted one by one
        num_requests = rng.randint(8, 20) if self.is_crowd else rng.randint(3, 12)
        self.requests = [self._draw_request() for _ in range(num_requests)]
        needed = max(map(self._num_blocks_needed, self.requests), default=1)
        self.num_blocks = max(1, round(needed * rng.choice([0.8, 1, 1, 1.3, 2, 8])))
        if self.is_crowd:
            self.num_blocks = max(1, round(needed * rng.uniform(1.5, 4)))
            self.max_rows = 12
        self._by_id: dict[int, Request] = {}
        self._gone: set[int] = set()  # ids of which nothing may be told any more
        self.counts = Counter[str]()  # of what happened
        self.num_steps = 0
        self.engine = self._open()

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.engine.close()

    def _run(self) -> None:
        rng = self._rng
        waiting = [*self.requests]
        pace = rng.choice([0.1, 0.4, 1.0])
        while waiting:
            while waiting and rng.random() < pace:
                self._add(waiting.pop())
            self._disturb()
            self._step()
        if rng.random() < 0.3:
            self.engine.loop.expect_no_more_requests()
        while self.engine.loop.has_work or any(
            request.is_open for request in self.requests
        ):
            self._disturb()
            self._step()
        self._check_end()

    # What is drawn

    def _open(self) -> Engine:
        pool = BlockPool(self.num_blocks, self.block_size)
        scheduler = Scheduler(
            pool,
            chunk_size=self.chunk,
            max_rows=self.max_rows,
            micro_batches=self.micro_batches,
            num_stages=self.num_stages,
            shares=self.shares,
        )
        shards = [
            [self._stage(stage, shard) for shard in range(self.num_shards)]
            for stage in range(self.num_stages)
        ]
        stages = [each[0] for each in shards]
        here = RememberingPipeline(
            self.block_size, stages, is_ready=self.faults.is_ready
        )
        pipeline: Any = here
        close: Callable[[], None] = lambda: None  # noqa: E731
        if self.mode == "thread":
            pipeline = LocalPipeline(here.run)
            close = pipeline.close
        elif self.mode == "ring":
            ring = ThreadRing(shards, random.Random(self.seed))
            pipeline = ring.pipeline
            close = ring.close
        self._watch(pipeline)
        form = AnswerStyle(TOKENIZER, "auto")
        starter = ToyStarter(TOKENIZER, frozenset({EOS}), RUN_SEED, VOCAB)
        loop = EngineLoop(starter, scheduler, pipeline, form, max_steps=self.max_steps)
        return Engine(loop, scheduler, stages, close)

    def _stage(self, number: int, shard: int) -> RememberingStage:
        # Shards of a stage compute the same here, so that nothing may befall one of them alone.
        faults = self.faults if self.num_shards == 1 else None
        stage = RememberingStage(
            self.block_size,
            is_first=number == 0,
            is_last=number == self.num_stages - 1,
            is_pooled=self.kind == "pooled",
            vocab=VOCAB,
            may_spoil=faults.spoils if faults else lambda: False,
            has_memory=self.faults.has_memory,
            nan_id=BAD,
        )
        forward = stage.forward
        num_ranks = self.num_stages * self.num_shards
        rank = number * self.num_shards + shard
        num_done = 0

        def forward_or_fail(step: Any, hidden: Any) -> Any:
            nonlocal num_done
            num_done += 1
            if (
                self.death is not None
                and rank
                and self.death == num_done * num_ranks + rank
            ):
                self.death = None
                raise Death
            if self.mode != "ring" and rank == 0 and self.faults.fails():
                raise RuntimeError("the stage failed")
            return forward(step, hidden)

        stage.forward = forward_or_fail  # type: ignore[method-assign]
        return stage

    def _watch(self, pipeline: Any) -> None:
        """See that each step keeps to the limits, and interrupt some."""
        submit = pipeline.submit
        collect = pipeline.collect

        def submit_and_check(step: Any) -> None:
            self._check_step(step, pipeline.num_in_flight)
            self._interrupt()
            submit(step)
            self._interrupt()

        def collect_or_fail() -> Any:
            self._interrupt()
            result = collect()
            self._interrupt()
            return result

        pipeline.submit = submit_and_check
        pipeline.collect = collect_or_fail

    def _interrupt(self) -> None:
        if self._rng.random() < self.share_of_interrupts:
            raise Interrupt

    def _draw_request(self) -> Request:
        rng = self._rng
        if not hasattr(self, "_stems"):
            self._stems = [
                [rng.randrange(1, 126) for _ in range(rng.randint(1, 50))] for _ in "ab"
            ]
        params = self._draw_params()
        prompts = [
            self._draw_prompt(params)
            for _ in range(1 if self.is_crowd else rng.choice([1, 1, 1, 2, 3]))
        ]
        meaning = b""
        is_plain = not (params.min_tokens or params.logit_bias or params.has_penalties)
        if self.kind == "pooled":
            params = replace(DEFAULTS, max_tokens=0)
        elif is_plain and rng.random() < 0.2:
            meaning = rng.choice(TOYS)
            params = replace(params, ignore_eos=False)
        prepared = PreparedRequest(
            params, prompts, repeat=rng.choice([0, 1]), meaning=meaning
        )
        if self.kind == "pooled":
            prepared = replace(
                prepared, kind="embeddings", vectors=VectorWish(VectorSpec(2))
            )
        elif self.kind == "both":
            starts = [
                _encoded([START_ID, *rng.choice([[], [9], [9, 8, 7]])], 1)
                for _ in prompts
            ]
            prepared = replace(prepared, prompts=starts, sources=prompts, num_start=1)
        return Request(
            prepared,
            Expected(prepared, self.num_stages),
            priority=rng.choice(self.priorities),
            is_streamed=self.kind != "pooled" and rng.random() < 0.5,
        )

    def _draw_params(self) -> RequestParams:
        rng = self._rng
        n = rng.choice([1] * 9 + [2] if self.is_crowd else [1, 1, 1, 2, 3])
        is_scored = rng.random() < 0.25
        max_tokens = 30 if self.is_crowd else rng.choice([1, 2, 5, 12, 30])
        if rng.random() < 0.15:
            max_tokens = 0
        params = RequestParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 0, min(3, max_tokens)]),
            temperature=rng.choice([0.0, 0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 0, 4]),
            n=n,
            best_of=n + (0 if self.is_crowd else rng.choice([0, 0, 0, 1])),
            logprobs=rng.choice([0, 2])
            if is_scored
            else rng.choice([None, None, 0, 2]),
            echo=is_scored or rng.random() < 0.1,
            stop=rng.choice([(), (), ("a", "bc"), ("ab", "b", "\n")]),
            stop_token_ids=rng.choice(
                [(), (), tuple(range(40, 44)), tuple(range(2, 30))]
            ),
            include_stop_str_in_output=rng.random() < 0.2,
            ignore_eos=rng.random() < 0.3,
            seed=rng.choice([None, 7]),
            return_token_ids=True,
        )
        if rng.random() < 0.15:
            params = replace(
                params, frequency_penalty=0.5, presence_penalty=rng.choice([0.0, 1.0])
            )
        if rng.random() < 0.1:
            params = replace(params, logit_bias=((3, 1.5), (50, -2.0)))
        return params

    def _draw_prompt(self, params: RequestParams) -> EncodedPrompt:
        rng = self._rng
        stem = rng.choice(self._stems)
        ids = stem[: rng.choice([1, len(stem), rng.randint(1, len(stem))])]
        ids = ids + [rng.randrange(1, 4) for _ in range(rng.choice([0, 0, 1, 5, 12]))]
        if rng.random() < 0.02:
            ids = [*ids, BAD, 9]
        return _encoded(ids)

    # What happens

    def _add(self, request: Request) -> None:
        request.events = []
        request.is_cancelled = False
        try:
            request_id = self.engine.loop.add(
                request.prepared,
                priority=request.priority,
                is_streamed=request.is_streamed,
            )
        except RequestError as error:
            assert error.code == "out_of_memory", error
            assert not self._fits(request), "it would fit"
            request.is_refused = True
            self.counts["refused"] += 1
            return
        assert self._fits(request), "it can never run"
        request.ids.append(request_id)
        self._by_id[request_id] = request

    def _fits(self, request: Request) -> bool:
        """Tell whether each prompt, alone, has room in the KV cache and among the rows."""
        if request.prepared.is_pooled:
            return True
        has_rows = request.prepared.params.num_candidates <= self.max_rows
        return has_rows and self._num_blocks_needed(request) <= self.num_blocks

    def _num_blocks_needed(self, request: Request) -> int:
        """Return the blocks that the largest of its prompts takes, at most and alone."""
        prepared = request.prepared
        params = request.prepared.params
        size = self.block_size
        most = 0
        for place, prompt in enumerate(prepared.prompts):
            num_to_feed = params.count_fed_tokens(len(prompt.ids))
            if num_to_feed == 0 or prepared.is_pooled:
                continue
            own = (
                len(prompt.ids) + params.max_tokens - 1
                if params.max_tokens
                else num_to_feed
            )
            shared = num_to_feed // size
            needed = shared + params.num_candidates * (-(-own // size) - shared)
            if prepared.sources:
                needed += -(-len(prepared.sources[place].ids) // size)
            most = max(most, needed)
        return most

    def _disturb(self) -> None:
        rng = self._rng
        loop = self.engine.loop
        if rng.random() < self.share_of_cancels and self._by_id:
            request_id = rng.choice([*self._by_id])
            request = self._by_id[request_id]
            loop.cancel(request_id)
            if request.ids[-1] == request_id and request.is_open:
                request.is_cancelled = True
                self._gone.add(request_id)
                self.counts["cancelled"] += 1
        if rng.random() < 0.02:
            loop.drain()
        elif rng.random() < 0.3:
            loop.start_run()
        if rng.random() < 0.02:
            loop.expect_no_more_requests()
        if rng.random() < 0.05:
            assert 0 <= loop.state.kv_usage <= 1 and loop.num_waiting >= 0

    def _step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < MOST_STEPS, "somebody waits for ever"
        loop = self.engine.loop
        if not loop.has_work:
            loop.start_run()  # perhaps it drains
            if not loop.has_work:
                return
        try:
            events = loop.step()
        except (FminferError, RuntimeError, Interrupt, Death) as error:
            self._begin_again(error)
            return
        for event in events:
            assert event.request_id not in self._gone, (
                "it was cancelled, or answered before"
            )
            request = self._by_id[event.request_id]
            request.events.append(event)
            if not isinstance(event, Delta):
                self._gone.add(event.request_id)
                self._check_answer(request, event)
        self._check_books()

    def _begin_again(self, error: BaseException) -> None:
        """Add all requests without an answer once more, perhaps to another engine."""
        loop = self.engine.loop
        self.counts[f"ended by {type(error).__name__}"] += 1
        assert not loop.has_work and not loop._open and not loop._streams, (
            "all is forgotten"
        )
        self.engine.scheduler.check_books()
        if isinstance(error, StepLimitError):
            assert self.max_steps is not None
            # else the longest never ends
            self.max_steps = loop._max_steps = 2 * self.max_steps
            loop.start_run()
        elif isinstance(error, FminferError | Death):
            assert self.mode == "ring", error
            self._check_dead(error)
            self._count()
            self.engine.close()
            self.engine = self._open()
            self._by_id.clear()
            self._gone.clear()
        is_open = [request for request in self._by_id.values() if request.is_open]
        if not self._by_id:
            is_open = [
                request for request in self.requests if request.ids and request.is_open
            ]
        self._gone.update(self._by_id)
        if self.faults.share_of_failures:
            self.faults.share_of_failures /= 2
        self.share_of_interrupts /= 2
        for request in dict.fromkeys(map(id, is_open)):
            self._add(next(each for each in is_open if id(each) == request))

    def _check_dead(self, error: BaseException) -> None:
        """A ring with a dead rank gives nothing more, and says why each time."""
        loop = self.engine.loop
        probe = Request(self.requests[0].prepared, self.requests[0].expected, 0, False)
        if not self._fits(probe):
            return
        num_before = loop.stats.num_steps
        loop.add(probe.prepared)
        self.share_of_interrupts = 0.0
        try:
            events = loop.step()
        except type(error):
            return
        assert all(isinstance(event, Finished) for event in events), (
            "nothing was computed"
        )
        assert loop.stats.num_steps == num_before or not events

    # What must be so

    def _check_step(self, step: Any, num_in_flight: int) -> None:
        assert num_in_flight < self.micro_batches, "too many steps at once"
        assert step.num_tokens > 0 and (step.lengths > 0).all()
        num_tokens = step.num_tokens
        if step.has_whole_prompts:
            assert num_tokens <= self.chunk or len(step.lengths) == 1, (
                "more than a step may have"
            )
        else:
            assert num_tokens <= self.chunk, "more than a step may have"
            assert len(step.lengths) <= self.max_rows, "more rows than may run"

    def _check_answer(self, request: Request, event: Event) -> None:
        expected = request.expected
        if isinstance(event, Failed):
            assert event.error.code == "nan_logits", event.error
            return
        assert isinstance(event, Finished)
        assert expected.choices is not None, "it has an answer, and its numbers are nan"
        if request.prepared.is_pooled:
            shown = [
                each | {"embedding": each["embedding"].tolist()}
                for each in event.choices
            ]
            assert shown == expected.choices
        else:
            assert event.choices == expected.choices
            if request.is_streamed:
                check_stream(request.events, event.request_id)
        usage = {name: event.usage[name] for name in expected.usage}
        assert usage == expected.usage
        num_cached = event.usage["prompt_tokens_details"]["cached_tokens"]
        num_most = sum(
            len(each.ids)
            for each in (*request.prepared.prompts, *request.prepared.sources)
        )
        assert 0 <= num_cached <= num_most

    def _check_books(self) -> None:
        """Free, idle and held blocks are all blocks; just those hold that run."""
        loop = self.engine.loop
        scheduler = self.engine.scheduler
        pool = scheduler.pool
        running: list[Sequence] = [
            sequence
            for state in loop._open.values()
            for prompt in state.prompts
            for sequence in prompt.sequences
            if sequence.block_table
        ]
        held = Counter(
            block for each in running for block in each.block_table + each.cross_table
        )
        holders = enumerate(pool._num_holders)
        assert {block: count for block, count in holders if count} == dict(held), (
            "holders"
        )
        assert scheduler.kv.num_sequences == len(running) <= self.max_rows
        kept = Counter(
            block for node in _nodes(scheduler.kv.prefixes) for block in node.blocks
        )
        keeps = enumerate(pool._num_cached)
        assert {block: count for block, count in keeps if count} == dict(kept), "keeps"
        free = sorted(pool._free)
        assert free == [
            b for b in range(pool.num_blocks) if not (held[b] or kept[b])
        ], "free"
        assert pool.num_idle == sum(not held[block] for block in kept)
        slots = [each.slot for each in running]
        slots += [each.cross_slot for each in running if each.cross_table]
        all_slots = [*range(len(scheduler.kv.slots._draws))]
        assert sorted(slots + scheduler.kv.slots._free) == all_slots, "slots"

    def _check_end(self) -> None:
        loop = self.engine.loop
        scheduler = self.engine.scheduler
        assert not (loop.has_work or loop._open or loop._streams)
        loop.check_books()
        self._check_books()
        self._count()
        num_failed = 0
        for request in self.requests:
            ends = [each for each in request.events if not isinstance(each, Delta)]
            assert len(ends) == (not (request.is_cancelled or request.is_refused)), (
                "one each"
            )
            self.counts["answered"] += isinstance(request.end, Finished)
            self.counts["nan"] += isinstance(request.end, Failed)
            if isinstance(request.end, Failed):
                num_failed += request.expected.choices is not None
        assert num_failed <= self.faults.num_spoiled, "a fault costs its own request"
        if self.mode == "here" and self.num_stages == 1:
            self._check_kept(scheduler.kv.prefixes)

    def _count(self) -> None:
        stats = self.engine.loop.stats
        self.counts["steps"] += stats.num_steps
        self.counts["tokens drawn"] += stats.num_generated_tokens
        self.counts["prompt tokens fed"] += stats.num_prompt_tokens
        self.counts["found in the prefix cache"] += stats.num_cached_tokens
        self.counts["preempted"] += stats.num_put_back
        self.counts["fed apart"] += stats.num_apart
        for stage in self.engine.stages:
            self.counts["stages that had too little memory"] += stage.max_tokens > 0

    def _check_kept(self, prefixes: PrefixCache) -> None:
        """The tokens of the prefix tree lie in the blocks that it says."""
        cache = self.engine.stages[0].cache
        size = self.block_size
        for node in _nodes(prefixes):
            for place, token_id in enumerate(node.tokens, node.start):
                block = node.blocks[place // size - node.start // size]
                found = cache[block, place % size]
                assert found in (token_id, NAN) or token_id < 0, (
                    "a block holds other tokens"
                )


def _nodes(prefixes: PrefixCache) -> Iterator[_Node]:
    nodes = [*prefixes._root.children.values()]
    for node in nodes:
        yield node
        nodes += node.children.values()
        assert node in prefixes._nodes, "it can never be evicted"


def _encoded(ids: list[int], num_start: int = 0) -> EncodedPrompt:
    """Return a prompt whose first tokens, which no request has given, are not in its text."""
    places = [max(0, place - num_start) for place in range(len(ids))]
    return EncodedPrompt(ids, "".join(map(chr, ids[num_start:])), places)


def simulate(seed: int) -> Counter[str]:
    """Run one simulation; return what happened in it."""
    with wires_are_queues(), small_constants(seed):
        simulation = Simulation(seed)
        simulation.run()
    return simulation.counts + Counter(
        {f"with {simulation.mode}": 1, f"of {simulation.kind}": 1}
    )


@click.command()
@click.option("--runs", default=1000, show_default=True, help="Simulations.")
@click.option("--seed", default=0, show_default=True, help="The seed of the first.")
def main(runs: int, seed: int) -> None:
    """Run simulations of the engine; print the seeds that fail, and why."""
    began_s = time.perf_counter()
    num_failed = 0
    counts = Counter[str]()
    for number in range(seed, seed + runs):
        try:
            counts += simulate(number)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            num_failed += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {str(error)[:200]} ({place.name}: {place.line})"
            print(f"seed {number}: {reason}", flush=True)
    print("; ".join(f"{name}: {count:,}" for name, count in counts.items()))
    print(
        f"{runs} simulations in {time.perf_counter() - began_s:.0f} s; {num_failed} failed"
    )
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
