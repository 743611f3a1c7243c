"""Requests that must have the same answer: one is computed, the others take what it got.

That is so if a request draws nothing or draws greedily, and its prompts and parameters are
another's; or if it is another's byte for byte and carries its own seed. It knows nothing of
scheduling.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from fminfer.engine.noise import digest
from fminfer.engine.sequence import RequestState
from fminfer.request import Request

MAX_FOLLOWERS = 1024  # requests that wait for another's answer; reading is lazy beyond
MAX_KEPT_ENTRIES = 1 << 17  # ids and alternatives of finished answers that are kept, about 25 MB


class EqualRequests:
    """Finds the earlier request whose answer a new one can take, among those of late."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every request."""
        self._leaders: dict[bytes, RequestState] = {}  # being answered
        self._finished: OrderedDict[bytes, RequestState] = OrderedDict()  # oldest use first
        self._num_kept = 0
        self.num_followers = 0  # waiting

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
            state.leader = leader
            leader.followers.append(state)
            self.num_followers += 1
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
        self.num_followers -= len(followers)
        for follower in followers:
            follower.prompts, follower.error = state.prompts, state.error
        return followers


def _key(request: Request) -> bytes | None:
    """Return what requests of one answer have in common; None: chance has a part in it."""
    params = request.params
    if params.is_greedy or params.max_tokens == 0:
        same = repr((request.prompts, replace(params, seed=None)))
        return digest(same.encode("utf-8", "surrogatepass"))
    return None if params.seed is None else digest(request.raw)


def _num_entries(state: RequestState) -> int:
    num = 0
    for prompt in state.prompts:
        num_reports = len(prompt.reports) + sum(len(each.tokens) for each in prompt.sequences)
        num += len(prompt.ids) + num_reports * (1 + prompt.num_top)
    return num
