"""The queues of prompts: those that wait to be admitted, and those that wait to be fed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Protocol, TypeVar

from fminfer.contract.request import RequestParams
from fminfer.engine.packing import PackedRow
from fminfer.engine.prefix import count_equal_tokens
from fminfer.engine.sequence import PromptState

MIN_SHARED = 32  # first tokens that must be equal for prompts to run together
TURN = 4  # prompts of a request before other requests have their turn
MAX_LATER = 64  # prompts of later turns that are searched when a prompt is added


class PromptLike(Protocol):
    """What can be ordered by its prompt."""

    @property
    def ids(self) -> list[int]:
        """Its tokens."""

    @property
    def params(self) -> RequestParams:
        """The params of its request."""


T = TypeVar("T", bound=PromptLike)


def order_prompts(prompts: Sequence[T]) -> list[T]:
    """Order prompts.

    Groups that share their first tokens are ordered by their longest row, and a group's
    prompts so that those which share more are neighbours.
    """
    if len(prompts) < 2:
        return list(prompts)
    ordered: list[T] = []
    groups: dict[tuple[int, ...] | int, list[T]] = {}
    for place, prompt in enumerate(prompts):
        head = tuple(prompt.ids[:MIN_SHARED])
        groups.setdefault(head if len(head) == MIN_SHARED else place, []).append(prompt)
    for group in groups.values():
        group.sort(key=lambda prompt: prompt.ids)
        group.sort(key=_max_draws, reverse=True)
    for group in sorted(
        groups.values(), key=lambda group: _max_draws(group[0]), reverse=True
    ):
        ordered += group
    return ordered


def _max_draws(prompt: PromptLike) -> int:
    return prompt.params.max_tokens


class WaitingQueue:
    """Waiting prompts: higher priority first, then those that ran before, then by arrival.

    Requests of many prompts take turns with others, TURN prompts each time. A
    request that has run, and has no row now, has its next turn before requests that come later.
    """

    def __init__(self) -> None:
        # Sorted: (-priority, turn, order, prompt). Turns are counted on from the first prompt's.
        self._entries: list[tuple[int, int, int, PromptState]] = []
        # the key of each entry
        self._keys: dict[PromptState, tuple[int, int, int]] = {}
        self._orders = count(1)
        # of all, sorted, once no more prompts come
        self._ids: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: int) -> PromptState:
        return self._entries[place][3]

    @property
    def has_preempted(self) -> bool:
        return any(prompt.has_run for *_, prompt in self._entries)

    def num_from_priority(self, priority: int) -> int:
        """Count the prompts of this priority and below. Any thread may ask."""
        entries = self._entries
        # A key would be Python's code, within which another thread could change the list.
        return len(entries) - bisect_left(entries, (-priority,))

    def add(self, prompt: PromptState, place: int = 0) -> None:
        """Put a new prompt behind all of its priority and turn.

        Args:
            place: its place among the prompts of its request.
        """
        self._insert(
            prompt,
            place // TURN or self._is_turn_over(-prompt.priority),
            next(self._orders),
        )
        self._ids = None

    def add_preempted(self, prompt: PromptState) -> None:
        """Put a prompt that ran before all of its priority."""
        self._insert(prompt, 0, -next(self._orders))
        if self._ids is not None:
            insort(self._ids, prompt.ids_to_feed)

    def _find_first_turn(self, lowest: int) -> int:
        """Return the turn of the first waiting prompt of a priority, which is negated here."""
        first = bisect_left(self._entries, (lowest,))
        entries = self._entries[first : first + 1]
        return next((turn for priority, turn, *_ in entries if priority == lowest), 0)

    def _is_turn_over(self, lowest: int) -> bool:
        """Return whether a request without rows waits for a later turn: new ones come last."""
        later = bisect_left(self._entries, (lowest, self._find_first_turn(lowest) + 1))
        return any(
            prompt.owner.times and not prompt.owner.num_running
            for *_, prompt in self._entries[later : later + MAX_LATER]
        )

    def _insert(self, prompt: PromptState, num_turns: int, order: int) -> None:
        num_turns += self._find_first_turn(-prompt.priority)
        self._keys[prompt] = key = (-prompt.priority, num_turns, order)
        insort(self._entries, (*key, prompt))

    def remove_at(self, place: int) -> None:
        prompt = self._entries.pop(place)[3]
        del self._keys[prompt]
        if self._ids is not None:
            place = bisect_left(self._ids, prompt.ids_to_feed)
            assert self._ids[place] == prompt.ids_to_feed, "a prompt that did not wait"
            del self._ids[place]

    def discard(self, prompt: PromptState) -> bool:
        """Remove a prompt if it waits; return whether it did."""
        key = self._keys.get(prompt)
        if key is not None:
            self.remove_at(bisect_left(self._entries, key))
        return key is not None

    def expect_no_more_prompts(self) -> None:
        """Note that no new prompts come: from now on `num_shared_tokens` has an answer."""
        if self._ids is None:
            self._ids = sorted(prompt.ids_to_feed for *_, prompt in self._entries)

    def num_shared_tokens(self, ids: list[int]) -> int | None:
        """Return how many first tokens of `ids` a waiting prompt shares; None: more may come."""
        if self._ids is None:
            return None
        # none has more in common than its neighbours
        place = bisect_left(self._ids, ids)
        neighbours = self._ids[max(0, place - 1) : place + 1]
        return max(
            (count_equal_tokens(o, ids, 0, min(len(o), len(ids))) for o in neighbours),
            default=0,
        )


# A prompt waits for one that is being fed if it then finds at least so many more tokens cached.
MIN_GAIN = 16


class AdmittedQueue:
    """Admitted prompts that are to be fed: higher priority first, then by admission."""

    def __init__(self) -> None:
        self.prompts: deque[PromptState] = deque()
        self.num_unfed = 0  # tokens of them that are not yet in a step

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def first_priority(self) -> float:
        """The priority of the prompt that is fed next; -inf: there is none."""
        return self.prompts[0].priority if self.prompts else -math.inf

    @property
    def last_priority(self) -> float:
        """The lowest priority of all; inf: there is none."""
        return self.prompts[-1].priority if self.prompts else math.inf

    def add(self, prompt: PromptState) -> None:
        """Queue an admitted prompt behind those of its priority."""
        insort(self.prompts, prompt, key=lambda each: -each.priority)
        self.num_unfed += self.count_unfed(prompt)

    def remove(self, prompt: PromptState) -> None:
        self.prompts.remove(prompt)
        self.num_unfed -= self.count_unfed(prompt)

    def num_unfed_before(self, priority: int) -> int:
        """Count the tokens that are fed before those of a new prompt of that priority."""
        if not self.prompts or self.prompts[-1].priority >= priority:
            return self.num_unfed
        return sum(
            self.count_unfed(each) for each in self.prompts if each.priority >= priority
        )

    def count_unfed(self, prompt: PromptState) -> int:
        """Return a prompt's tokens that are not yet in a step."""
        return prompt.num_unfed


class EncoderQueue(AdmittedQueue):
    """Prompts that the encoder reads, each of them whole."""

    def count_unfed(self, prompt: PromptState) -> int:
        return len(prompt.ids_to_read)

    def pop_prompts(self, most: int) -> list[PromptState]:
        """Pop the first prompts, of so many tokens together; the first one in any case."""
        popped: list[PromptState] = []
        while self.prompts and (
            not popped or self.count_unfed(self.prompts[0]) <= most
        ):
            popped.append(self.prompts.popleft())
            most -= self.count_unfed(popped[-1])
            self.num_unfed -= self.count_unfed(popped[-1])
        return popped


class PrefillQueue(AdmittedQueue):
    """Prompts that are fed in chunks."""

    def will_share(self, prompt: PromptState, num_found: int) -> bool:
        """Return whether a prompt will soon find MIN_GAIN more tokens of its prefix cached.

        Prompts of lower priority do not count: others might be fed before it without end.
        """
        wanted = num_found + MIN_GAIN + prompt.wants_scores
        head = prompt.ids_to_feed[:wanted]
        return prompt.num_to_feed >= wanted and any(
            other.num_fed < wanted <= other.num_to_feed
            and other.priority >= prompt.priority
            and not other.is_apart
            and other.ids_to_feed[:wanted] == head
            and (
                not prompt.wants_scores
                or (other.wants_scores and other.num_top >= prompt.num_top)
            )
            for other in self.prompts
        )

    def pop_chunk(self, room: int) -> tuple[PromptState, PackedRow]:
        """Pop up to `room` tokens of the first prompt; its last chunk draws for all choices."""
        prompt = self.prompts[0]
        encoder_output = prompt.encoder_output
        prompt.encoder_output = None
        start = prompt.num_fed
        last = min(prompt.num_fed + room, prompt.num_to_feed)
        ids = prompt.ids_to_feed[start:last]
        prompt.num_fed = last
        self.num_unfed -= last - start
        is_drawn = prompt.branch is None and prompt.params.max_tokens > 0
        draws = last == prompt.num_to_feed and is_drawn
        if last == prompt.num_to_feed:
            self.prompts.popleft()
        return prompt, PackedRow(
            prompt.sequences[0],
            ids,
            start,
            list(prompt.sequences) if draws else [],
            is_prompt=True,
            encoder_output=encoder_output,
        )
