"""Requests that must have the same answer: one is computed, the others take what it got.

That is so if a request draws nothing or draws greedily, and its prompts and parameters are
another's; or if it is another's byte for byte and carries its own seed. It knows nothing of
scheduling.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace

from fminfer.engine.noise import digest
from fminfer.engine.sequence import RequestState
from fminfer.request import Request

MAX_FOLLOWERS = 1024  # requests that wait for another's answer; reading is lazy beyond
MAX_FOLLOWERS_OF_FILES = 64  # if they are of several files, which are then open
MAX_FOLLOWER_BYTES = 16 << 20  # of their lines
MAX_KEPT_ENTRIES = 1 << 17  # of finished answers that are kept, about 25 MB
ENTRY_BYTES = 200  # what a token with its logprob takes, or an alternative
REQUEST_ENTRIES = 16  # what a request takes whatever its size


class EqualRequests:
    """Finds the earlier request whose answer a new one can take, among those of late."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every request."""
        self._leaders: dict[bytes, RequestState] = {}  # being answered
        self._finished: OrderedDict[bytes, RequestState] = OrderedDict()  # oldest use first
        self._num_kept = 0
        self._followers: Counter[int] = Counter()  # waiting, by file
        self._follower_bytes = 0  # of their lines

    @property
    def is_full(self) -> bool:
        """Tell whether so many wait that no more should be read."""
        most = MAX_FOLLOWERS if len(self._followers) < 2 else MAX_FOLLOWERS_OF_FILES
        is_long = self._follower_bytes >= MAX_FOLLOWER_BYTES
        return is_long or self._followers.total() >= most

    def follow(self, state: RequestState) -> bool:
        """Give a request the answer of an equal one: at once, or when that has it.

        Returns:
            whether there is one; otherwise later requests can follow this one.
        """
        state.equal_key = key = _key(state.request)
        if key is None:
            return False
        leader = self._leaders.get(key)
        if leader is not None:
            state.leader, state.prompts = leader, leader.prompts
            leader.followers.append(state)
            self._followers[state.line.source] += 1
            self._follower_bytes += len(state.line.raw)
            return True
        finished = self._finished.get(key)
        if finished is not None:
            self._finished.move_to_end(key)
            state.leader, state.prompts = finished, finished.prompts
            return True
        self._leaders[key] = state
        return False

    def finish(self, state: RequestState) -> list[RequestState]:
        """Hand a finished request's answer to those that wait for it, and return them."""
        key = state.equal_key
        if key is None or self._leaders.get(key) is not state:
            return []
        del self._leaders[key]
        if state.error is None:
            self._finished[key] = state
            self._num_kept += _num_entries(state)
            while self._num_kept > MAX_KEPT_ENTRIES:
                self._num_kept -= _num_entries(self._finished.popitem(last=False)[1])
        followers, state.followers = state.followers, []
        for follower in followers:
            follower.error = state.error
            self._followers[follower.line.source] -= 1
            self._follower_bytes -= len(follower.line.raw)
        self._followers = +self._followers  # without those that are 0
        return followers


def _key(request: Request) -> bytes | None:
    """Return what requests of one answer have in common; None: chance has a part in it."""
    params = request.params
    if params.is_greedy or params.max_tokens == 0:
        same = repr((request.prompts, replace(params, seed=None)))
        return digest(same.encode("utf-8", "surrogatepass"))
    return None if params.seed is None else digest(request.raw)


def _num_entries(state: RequestState) -> int:
    num = REQUEST_ENTRIES + 4 * len(state.line.raw) // ENTRY_BYTES  # its line is held parsed, too
    for prompt in state.prompts:
        num_reports = len(prompt.reports) + sum(len(each.tokens) for each in prompt.sequences)
        num += len(prompt.ids) + num_reports * (1 + prompt.num_top)
    return num
