"""Requests that must have the same answer: one is computed, the others take what it got."""

from __future__ import annotations

from collections import Counter

from fminfer.answers.answer_index import RecentAnswers, copy_answer
from fminfer.engine.engine_core import Failed, Finished
from fminfer.runtime.lines.line_intake import Answer, LineRequest

# requests that wait for another's answer; with more, reading stops
MAX_FOLLOWERS = 1024
MAX_FOLLOWERS_OF_FILES = 64  # the same from several files, which stay open
MAX_FOLLOWER_BYTES = 16 << 20  # size of their lines
MAX_KEPT_ENTRIES = 1 << 17  # size of the finished answers that are kept, about 25 MB
ENTRY_BYTES = 200  # memory of a token with its logprob, or of an alternative
BYTES_A_NUMBER = 6  # of a vector, as float32 or as base64
REQUEST_ENTRIES = 16  # a request's fixed size


class EqualRequests:
    """Finds the earlier request of a run whose answer a new one can take, by their keys.

    Args:
        is_on: otherwise it finds none.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        # of requests that are being answered
        self._followers: dict[bytes, list[LineRequest]] = {}
        self._num_followers: Counter[int] = Counter()  # by file
        self._follower_bytes = 0  # of their lines
        self._finished: RecentAnswers[Finished] = RecentAnswers(MAX_KEPT_ENTRIES)

    @property
    def is_full(self) -> bool:
        """Return whether so many wait that no more should be read."""
        most = MAX_FOLLOWERS if len(self._num_followers) < 2 else MAX_FOLLOWERS_OF_FILES
        return (
            self._follower_bytes >= MAX_FOLLOWER_BYTES
            or self._num_followers.total() >= most
        )

    def find(self, request: LineRequest) -> Finished | None:
        """Return what a request gets from an equal one that is finished; None: there is none."""
        answer = (
            self._finished.find(request.key) if self._is_on and request.key else None
        )
        return None if answer is None else copy_answer(answer, request.read_s)

    def follow(self, request: LineRequest) -> bool:
        """Let a request wait for an equal one; False: later ones can wait for this."""
        if not (self._is_on and request.key):
            return False
        if (followers := self._followers.get(request.key)) is None:
            self._followers[request.key] = []
            return False
        followers.append(request)
        self._num_followers[request.line.source] += 1
        self._follower_bytes += len(request.line.raw)
        return True

    def finish(
        self, request: LineRequest, answer: Answer
    ) -> list[tuple[LineRequest, Answer]]:
        """Keep a request's answer for later ones; return those that waited, each with
        its own."""
        if not (self._is_on and request.key):
            return []
        followers = self._followers.pop(request.key)
        if isinstance(answer, Finished):
            self._finished.add(request.key, answer, size=_num_entries(request, answer))
        for follower in followers:
            self._num_followers[follower.line.source] -= 1
            self._follower_bytes -= len(follower.line.raw)
        self._num_followers = +self._num_followers  # without those that are 0
        if isinstance(answer, Failed):
            return [(follower, answer) for follower in followers]
        return [
            (follower, copy_answer(answer, follower.read_s)) for follower in followers
        ]


def _num_entries(request: LineRequest, answer: Finished) -> int:
    """Return what an answer takes, in entries of ENTRY_BYTES."""
    usage = answer.usage
    params = request.prepared.params
    num_prompt = usage["prompt_tokens"] if params.echo or params.return_token_ids else 0
    num_listed = usage.get("completion_tokens", 0) + num_prompt
    num: int = REQUEST_ENTRIES + num_listed * (1 + (params.logprobs or 0))
    if (wish := request.prepared.vectors) is not None:
        num += request.num_prompts * wish.facts.size * BYTES_A_NUMBER // ENTRY_BYTES
    return num
