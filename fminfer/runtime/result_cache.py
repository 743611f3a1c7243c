"""Answers that are taken instead of computed: those that must be the same, of this run or another.

That is so if a request draws nothing, draws greedily, or carries its own seed. A key has all that
an answer depends on: what `Intake.prepare` made of the request, and the model.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable

from fminfer.contract.json_object import dump, load
from fminfer.contract.request import SamplingParams
from fminfer.engine.engine_core import Finished
from fminfer.engine.noise import meaning_of
from fminfer.engine.sequence import AnswerKind, Prepared
from fminfer.files.answer_store import AnswerStore
from fminfer.files.cache_place import CachePlace
from fminfer.models.fingerprint import terms_of_answers
from fminfer.runtime.lines.asked import copy_answer
from fminfer.text.encoded_prompt import EncodedPrompt


class RecentAnswers:
    """The answers of the last requests. Any thread may call it.

    Args:
        size: requests whose answers are kept; the one that was not used for longest leaves.
        list_size: answers to a request that chance has a part in; once there are so many, one of
            them is drawn. 1: no such request is answered from here.
    """

    def __init__(self, size: int, list_size: int) -> None:
        self._size, self._list_size = size, list_size
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, list[bytes]] = OrderedDict()  # oldest use first
        self._random = random.SystemRandom()

    @property
    def takes_chance(self) -> bool:
        """Whether requests are answered from here that chance has a part in."""
        return self._list_size > 1

    def find(self, key: bytes, *, is_by_chance: bool) -> bytes | None:
        """Return an answer; None: there is none, or there are not enough to draw one."""
        with self._lock:
            answers = self._answers.get(key)
            if answers is None:
                return None
            self._answers.move_to_end(key)
            if not is_by_chance:
                return answers[0]
            return self._random.choice(answers) if len(answers) >= self._list_size else None

    def keep(self, key: bytes, value: bytes, *, is_by_chance: bool) -> None:
        """Keep an answer, unless there are enough of its request."""
        with self._lock:
            answers = self._answers.setdefault(key, [])
            if len(answers) < (self._list_size if is_by_chance else 1):
                answers.append(value)
            self._answers.move_to_end(key)
            while len(self._answers) > self._size:
                self._answers.popitem(last=False)


NO_REQUEST = -1  # the id of answers that no request of the engine had


class ResultCache:
    """Finds and keeps answers. Any thread may call it.

    Args:
        terms: what an answer depends on beside its request.
        store: on the disk.
        recent: in memory, which is asked first.
    """

    def __init__(
        self, terms: dict[str, str], store: AnswerStore | None, recent: RecentAnswers | None
    ) -> None:
        self._terms = _digest(json.dumps(terms, sort_keys=True).encode())
        self._store, self._recent = store, recent
        self._lock = threading.Lock()  # of the counts
        self.num_asked = self.num_found = 0  # requests that could be, and were, answered from here

    def find(self, prepared: Prepared, *, takes_chance: bool = False) -> Finished | None:
        """Return the answer that a request has in common with an earlier one; None: compute it.

        Args:
            takes_chance: one that chance has a part in can take what others have drawn, too.
        """
        is_by_chance = draws_by_chance(prepared.params)
        if is_by_chance and not (takes_chance and self._keeps_chance):
            return None
        value = self._look_up(key_of(prepared, self._terms), is_by_chance=is_by_chance)
        with self._lock:
            self.num_asked += 1
            self.num_found += value is not None
        return None if value is None else _from_bytes(value, prepared.kind)

    def keep(self, prepared: Prepared, answer: Finished) -> None:
        """Keep what was computed for a request, if another can take it."""
        is_by_chance = draws_by_chance(prepared.params)
        if is_by_chance and not self._keeps_chance:
            return
        key, value = key_of(prepared, self._terms), dump([answer.choices, answer.usage])
        if self._recent is not None:
            self._recent.keep(key, value, is_by_chance=is_by_chance)
        if self._store is not None and not is_by_chance:
            self._store.keep(key, value)

    @property
    def trouble(self) -> str:
        """Why the folder is no longer used, or not all of it; "": it is."""
        return "" if self._store is None else self._store.trouble

    def close(self) -> None:
        """Write what is not written yet."""
        if self._store is not None:
            self._store.close()

    @property
    def _keeps_chance(self) -> bool:
        return self._recent is not None and self._recent.takes_chance

    def _look_up(self, key: bytes, *, is_by_chance: bool) -> bytes | None:
        value = None
        if self._recent is not None:
            value = self._recent.find(key, is_by_chance=is_by_chance)
        if value is None and self._store is not None and not is_by_chance:
            value = self._store.find(key)
            if value is not None and self._recent is not None:
                self._recent.keep(key, value, is_by_chance=False)
        return value


def open_result_cache(
    fingerprint: dict[str, str],
    place: CachePlace | None,
    tell: Callable[[str], None],
    *,
    size: int = 0,
    list_size: int = 1,
) -> ResultCache | None:
    """Return the cache that a run or a server was told to have; None: it has none.

    Args:
        fingerprint: of model and options.
        place: on the disk.
        tell: is called with each warning, from any thread.
        size: answers in memory.
        list_size: answers to a request that chance has a part in, in memory; 1: none is kept.
    """
    if place is None and not size:
        return None
    return ResultCache(
        terms_of_answers(fingerprint),
        None if place is None else AnswerStore(place, tell),
        RecentAnswers(size, list_size) if size else None,
    )


def draws_by_chance(params: SamplingParams) -> bool:
    """Tell whether two equal requests may have different answers."""
    return params.seed is None and params.max_tokens > 0 and not params.is_greedy


def key_of(prepared: Prepared, terms: bytes) -> bytes:
    """Return what requests of one answer have in common.

    `repeat` and `meaning` only tell apart draws without a seed, so they are not in it.
    """
    params = prepared.params
    has_seed = params.max_tokens > 0 and not params.is_greedy
    seed = params.seed if has_seed else None
    head = (prepared.kind, prepared.tool_parser, seed, *["one call"] * prepared.keeps_one_call)
    digest = hashlib.blake2b(terms, digest_size=32)
    digest.update(meaning_of([], params))
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
    ids, offsets = array("q", prompt.ids), array("q", prompt.offsets)
    sizes = [len(ids), len(text), len(offsets), prompt.num_cut, prompt.is_whole_text]
    sizes += [1] * bool(prompt.types)  # as many as ids
    digest.update(repr((*sizes,)).encode())
    for part in (ids.tobytes(), text, offsets.tobytes(), bytes(prompt.types)):
        digest.update(part)


def _from_bytes(value: bytes, kind: AnswerKind) -> Finished:
    choices, usage = load(value)
    return copy_answer(Finished(NO_REQUEST, choices, usage, {}, kind), queue_s=0.0)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
