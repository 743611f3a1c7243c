"""What is kept of clients' texts, within two bounds."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from fminfer.core.bounded_cache import BoundedCache


def test_the_least_used_entries_go_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2, 100)
    assert cache.put("a", 1, 10) == [] and cache.put("b", 2, 10) == []
    assert cache.get("a") == 1
    assert cache.put("c", 3, 10) == [2], "b was used least"
    assert "b" not in cache and cache.get("b") is None
    assert cache.get("a") == 1 and cache.get("c") == 3 and cache.num_bytes == 20


def test_bytes_are_bounded() -> None:
    cache: BoundedCache[str, str] = BoundedCache(1000, 100)
    for name in "abcd":
        assert cache.put(name, name, 25) == []
    assert cache.put("e", "e", 50) == ["a", "b"] and cache.num_bytes == 100
    assert cache.put("f", "f", 101) == ["c", "d", "e", "f"], "it alone is too large"
    assert len(cache) == cache.num_bytes == 0


def test_an_equal_key_replaces_its_value() -> None:
    cache: BoundedCache[str, int] = BoundedCache(10, 100)
    assert cache.put("a", 1, 90) == []
    assert cache.put("a", 2, 80) == [1]
    assert cache.get("a") == 2 and cache.num_bytes == 80 and len(cache) == 1


def test_threads_share_it() -> None:
    cache: BoundedCache[int, int] = BoundedCache(50, 1000)

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3000):
            key = draw.randrange(200)
            if draw.random() < 0.5:
                cache.put(key, key, key)
            else:
                assert cache.get(key) in (key, None)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    kept = [key for key in range(200) if key in cache]
    assert cache.num_bytes == sum(kept) <= 1000 and len(kept) <= 50
