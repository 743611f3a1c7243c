"""The index of earlier answers: every key at its place, in any order, and what nobody
asked for."""

from __future__ import annotations

import random
import time

from fminfer.answers.earlier_answers import KeyIndex


def test_keys_are_found_in_any_order() -> None:
    """Also keys that have a half in common, and equal ones."""
    source = random.Random(3)
    halves = [source.randbytes(8) for _ in range(40)]
    keys = [source.choice(halves) + source.choice(halves) for _ in range(600)]
    index = KeyIndex()
    for place, key in enumerate(keys):
        index.add(key, place)
    for asked in (keys, keys[::-1], source.sample(keys, 600)):
        for key in asked:
            place = index.find(key)
            assert place is not None and keys[place] == key
    absent = [a + b for a in halves for b in halves if a + b not in set(keys)]
    assert absent and all(index.find(key) is None for key in absent)
    assert index.find(bytes(16)) is None and KeyIndex().find(bytes(16)) is None


def test_answers_that_nobody_asked_for_are_counted() -> None:
    """One of several equal ones is not left out: another of them was taken."""
    index = KeyIndex()
    keys = [bytes([n % 3]) * 16 for n in range(9)] + [b"x" * 16]
    for place, key in enumerate(keys):
        index.add(key, place)
    assert index.count_unused() == 10
    index.find(keys[4])
    assert index.count_unused() == 7
    for key in keys:
        index.find(key)
    assert index.count_unused() == 0


def test_keys_in_another_order_are_found_fast() -> None:
    """Each takes some microseconds, however many there are."""
    source = random.Random(3)
    index = KeyIndex()
    keys = [source.randbytes(16) for _ in range(200_000)]
    for place, key in enumerate(keys):
        index.add(key, place)
    asked = source.sample(range(len(keys)), 20_000)
    index.find(keys[asked[0]])  # which puts them in order
    started_s = time.thread_time()
    assert [index.find(keys[place]) for place in asked] == asked
    assert time.thread_time() - started_s < 0.3, "copying the order took 0.7 s"
