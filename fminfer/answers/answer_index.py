"""The answers of other requests: those in memory first, then those on the disk.

Requests of one key have one answer, unless chance has a part in it
(`RequestParams.is_by_chance`).
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from fminfer.answers.answer_store import AnswerStore
from fminfer.answers.cache_place import CachePlace
from fminfer.contract.json_object import dump_json, parse_json
from fminfer.core.bounded_cache import BoundedCache
from fminfer.core.config import EngineConfig
from fminfer.core.option import options_of
from fminfer.engine.engine_core import Finished
from fminfer.engine.noise import digest_meaning
from fminfer.engine.sequence import PreparedRequest
from fminfer.text.encoded_prompt import EncodedPrompt

NO_REQUEST = -1  # the id of answers that no request of the engine had
Value = TypeVar("Value")
# Kept answers do not depend on these. A prepared request shows them (its ids, its params),
# or they decide whether there is an answer at all, or they stand around it.
NOT_OF_ANSWERS = frozenset(
    each.told for each in options_of(EngineConfig).values() if each.alters == "requests"
) | {"--model-name"}


def make_answer_key(prepared: PreparedRequest, terms: bytes = b"") -> bytes:
    """Return 32 bytes for all that a request's answer depends on, and the form of the answer.

    `repeat` and `meaning` only tell apart draws without a seed, so they are not in it.
    """
    params = prepared.params
    # What few requests have is left out of the others', so that their keys stay.
    calls = ["one call"] * prepared.keeps_one_call
    calls += ["named call"] * (prepared.call_mode == "one")
    # the types of a call's arguments come from them
    calls += [json.dumps(prepared.tools)] * bool(prepared.tools)
    head = (prepared.kind, prepared.tool_parser, params.effective_seed, *calls)
    digest = hashlib.blake2b(terms, digest_size=32)
    digest.update(digest_meaning([], params))
    others = prepared.sources, prepared.num_start, prepared.vectors
    if any(others):
        head += (repr(others[1:]), len(prepared.sources))
    digest.update(repr((*head, len(prepared.prompts))).encode())
    for prompt in (*prepared.prompts, *prepared.sources):
        _add_prompt(digest, prompt)
    return digest.digest()


def _add_prompt(digest: hashlib.blake2b, prompt: EncodedPrompt) -> None:
    """Add a prompt: its ids, and its text, which may be another one of the same ids."""
    text = prompt.text.encode("utf-8", "surrogatepass")
    ids = array("q", prompt.ids)
    offsets = array("q", prompt.offsets)
    sizes = [len(ids), len(text), len(offsets), prompt.num_cut, prompt.is_whole_text]
    sizes += [1] * bool(prompt.types)  # as many as ids
    digest.update(repr((*sizes,)).encode())
    for part in (ids.tobytes(), text, offsets.tobytes(), bytes(prompt.types)):
        digest.update(part)


class RecentAnswers(Generic[Value]):
    """The answers of the last requests, of `max_size` together. Any thread may call it.

    A request by chance draws one of `list_size` answers, once there are so many; 1:
    none of these.
    """

    def __init__(self, max_size: int, list_size: int = 1) -> None:
        self._list_size = list_size
        self._lock = threading.Lock()  # guards the lists
        self._answers: BoundedCache[bytes, list[Value]] = BoundedCache(
            max_size, max_size
        )
        # Whether requests that draw without a seed are answered from here, too.
        self.takes_chance = max_size > 0 and list_size > 1

    def find(self, key: bytes, *, is_by_chance: bool = False) -> Value | None:
        """Return an answer; None: there is none, or there are not enough to draw one."""
        answers = self._answers.get(key)
        if answers is None:
            return None
        if not is_by_chance:
            return answers[0]
        return random.SystemRandom().choice(answers) if self._is_full(answers) else None

    def add(
        self, key: bytes, value: Value, *, size: int = 1, is_by_chance: bool = False
    ) -> None:
        """Add an answer, unless there are enough of its request."""
        with self._lock:
            answers = self._answers.get(key)
            if answers is None:
                self._answers.put(key, [value], size)
            elif is_by_chance and not self._is_full(answers):
                answers.append(value)

    def _is_full(self, answers: list[Value]) -> bool:
        return len(answers) >= self._list_size


class AnswerIndex:
    """Finds and keeps answers under `terms`, in memory first. Any thread may call it."""

    def __init__(
        self,
        terms: dict[str, str],
        store: AnswerStore | None,
        recent: RecentAnswers[bytes],
    ) -> None:
        text = json.dumps(terms, sort_keys=True)
        self._terms = hashlib.blake2b(text.encode(), digest_size=32).digest()
        self._store = store
        self._recent = recent
        self._lock = threading.Lock()  # of the counts
        # requests that could be, and were, answered from here
        self.num_asked = self.num_found = 0

    def find(
        self, prepared: PreparedRequest, *, takes_chance: bool = False
    ) -> Finished | None:
        """Return the answer that a request has in common with an earlier one; None: compute it.

        With `takes_chance`, one by chance can take what others have drawn, too.
        """
        is_by_chance = prepared.params.is_by_chance
        if is_by_chance and not (takes_chance and self._recent.takes_chance):
            return None
        key = make_answer_key(prepared, self._terms)
        value = self._recent.find(key, is_by_chance=is_by_chance)
        if value is None and self._store is not None and not is_by_chance:
            value = self._store.find(key)
            if value is not None:
                self._recent.add(key, value)
        with self._lock:
            self.num_asked += 1
            self.num_found += value is not None
        if value is None:
            return None
        choices, usage = parse_json(value)
        return copy_answer(Finished(NO_REQUEST, choices, usage, {}, prepared.kind))

    def add(self, prepared: PreparedRequest, answer: Finished) -> None:
        """Add the answer to a request, if equal requests can use it."""
        is_by_chance = prepared.params.is_by_chance
        if is_by_chance and not self._recent.takes_chance:
            return
        key, value = (
            make_answer_key(prepared, self._terms),
            dump_json([answer.choices, answer.usage]),
        )
        self._recent.add(key, value, is_by_chance=is_by_chance)
        if self._store is not None and not is_by_chance:
            self._store.add(key, value)

    @property
    def trouble(self) -> str:
        """Why the folder is no longer used, or not all of it; "": it is."""
        return "" if self._store is None else self._store.trouble

    def close(self) -> None:
        """Write what is not written yet."""
        if self._store is not None:
            self._store.close()


def answer_terms(fingerprint: dict[str, str]) -> dict[str, str]:
    """Return what of a fingerprint the answer to a prepared request with a seed depends on."""
    return {
        name: value for name, value in fingerprint.items() if name not in NOT_OF_ANSWERS
    }


def open_answer_index(
    fingerprint: dict[str, str],
    place: CachePlace | None,
    warn: Callable[[str], None],
    *,
    size: int = 0,
    list_size: int = 1,
) -> AnswerIndex | None:
    """Return the answers that a run or a server was told to keep; None: it keeps none.

    Any thread may `warn` a warning. `size` and `list_size` are of answers in memory.
    """
    if place is None and not size:
        return None
    store = None if place is None else AnswerStore(place, warn)
    return AnswerIndex(answer_terms(fingerprint), store, RecentAnswers(size, list_size))


def copy_answer(answer: Finished, asked_s: float | None = None) -> Finished:
    """Return an answer for a request that waited since `asked_s`: no time, and no token fed."""
    cached = {"cached_tokens": answer.usage["prompt_tokens"]}
    details = answer.usage["prompt_tokens_details"] | cached
    queue_s = 0.0 if asked_s is None else time.perf_counter() - asked_s
    times = {
        "batch_time": 0.0,
        "batch_size": 1.0,
        "queue_time": queue_s,
        "prefill_time": 0.0,
        "decode_time": 0.0,
    }
    return replace(
        answer, usage=answer.usage | {"prompt_tokens_details": details}, times=times
    )
