"""Requests that must have the same answer: one is computed, the others take what it got.

That is so if a request draws nothing, draws greedily, or carries its own seed, and its prompts and
parameters are another's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from fminfer.engine.engine_core import Failed, Finished
from fminfer.runtime.lines.asked import LineRequest

MAX_FOLLOWERS = 1024  # requests that wait for another's answer; with more, reading stops
MAX_FOLLOWERS_OF_FILES = 64  # the same from several files, which stay open
MAX_FOLLOWER_BYTES = 16 << 20  # size of their lines
MAX_KEPT_ENTRIES = 1 << 17  # size of the finished answers that are kept, about 25 MB
ENTRY_BYTES = 200  # memory of a token with its logprob, or of an alternative
BYTES_A_NUMBER = 6  # of a vector, as float32 or as base64
REQUEST_ENTRIES = 16  # a request's fixed size


class EqualRequests:
    """Finds the earlier request whose answer a new one can take, among those of late."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, LineRequest] = {}  # being answered
        self._finished: OrderedDict[bytes, LineRequest] = OrderedDict()  # oldest use first
        self._num_kept = 0
        self._followers: Counter[int] = Counter()  # waiting, by file
        self._follower_bytes = 0  # of their lines

    @property
    def is_full(self) -> bool:
        """Return whether so many wait that no more should be read."""
        most = MAX_FOLLOWERS if len(self._followers) < 2 else MAX_FOLLOWERS_OF_FILES
        is_long = self._follower_bytes >= MAX_FOLLOWER_BYTES
        return is_long or self._followers.total() >= most

    def follow(self, asked: LineRequest) -> LineRequest | None:
        """Return the equal request whose answer this one takes: at once, or when that has it.

        None: there is none, and later requests can follow this one.
        """
        if asked.key is None:
            return None
        leader = self._leaders.get(asked.key)
        if leader is not None:
            leader.followers.append(asked)
            self._followers[asked.line.source] += 1
            self._follower_bytes += len(asked.line.raw)
            return leader
        finished = self._finished.get(asked.key)
        if finished is not None:
            self._finished.move_to_end(asked.key)
            return finished
        self._leaders[asked.key] = asked
        return None

    def finish(self, asked: LineRequest) -> list[LineRequest]:
        """Keep a request's answer for later ones; return those that waited for it."""
        key = asked.key
        if key is None or self._leaders.get(key) is not asked:
            return []
        del self._leaders[key]
        if not isinstance(asked.answer, Failed):
            self._finished[key] = asked
            self._num_kept += _num_entries(asked)
            while self._num_kept > MAX_KEPT_ENTRIES:
                self._num_kept -= _num_entries(self._finished.popitem(last=False)[1])
        followers, asked.followers = asked.followers, []
        for follower in followers:
            self._followers[follower.line.source] -= 1
            self._follower_bytes -= len(follower.line.raw)
        self._followers = +self._followers  # without those that are 0
        return followers


def _num_entries(asked: LineRequest) -> int:
    """Return what a finished request takes, in entries of ENTRY_BYTES."""
    num = REQUEST_ENTRIES + 4 * len(asked.line.raw) // ENTRY_BYTES  # its line is held parsed, too
    if isinstance(asked.answer, Finished):
        usage, params = asked.answer.usage, asked.params
        num_listed = usage.get("completion_tokens", 0) + usage["prompt_tokens"] * params.echo
        num += usage["prompt_tokens"] + num_listed * (1 + (params.logprobs or 0))
        if (wish := asked.prepared.vectors) is not None:
            num += asked.num_prompts * wish.facts.size * BYTES_A_NUMBER // ENTRY_BYTES
    return num
