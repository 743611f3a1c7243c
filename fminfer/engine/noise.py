"""Counter-based randomness: a draw depends only on its request and step.

Neighbours, order, batch and resumed runs change nothing (contract, section 7).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import fields

from fminfer.contract.field_table import DRAW_FIELDS
from fminfer.contract.request import DEFAULTS, RequestParams
from fminfer.core.bounded_cache import BoundedCache

DEFAULT_VALUES = {each.name: getattr(DEFAULTS, each.name) for each in fields(DEFAULTS)}
# Descriptions of params. Most lines of a file have the same params.
_DESCRIBED: BoundedCache[RequestParams, str] = BoundedCache(256, 8 << 20)


def digest_meaning(prompts: Sequence[str | list[int]], params: RequestParams) -> bytes:
    """Return a digest of 16 bytes of all that a request means, without its seed.

    Requests that mean the same in other bytes (the order of keys, `stream`, 1 for 1.0)
    are equal.
    """
    return digest_described_meaning(prompts, describe_params(params))


def describe_params(params: RequestParams) -> str:
    """Return the part of requests' meaning that their params are, without a seed."""
    if (kept := _DESCRIBED.get(params)) is not None:
        return kept
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    plain = {"seed": None, "logit_bias": tuple(sorted(params.logit_bias))}
    described = repr(_canonical_items(values | plain))
    _DESCRIBED.put(params, described, sys.getsizeof(described))
    return described


def digest_described_meaning(
    prompts: Sequence[str | list[int]], described_params: str
) -> bytes:
    """Return the `digest_meaning` of a request whose params are described already."""
    return _digest(
        f"({list(prompts)!r}, {described_params})".encode("utf-8", "surrogatepass")
    )


def make_draw_key(
    prompts: Sequence[list[int]],
    params: RequestParams,
    seed: int,
    repeat: int,
    meaning: bytes,
) -> bytes:
    """Return the key that the draws of all sequences of a request share.

    With a seed, it depends on the prompts' ids, the seed and the sampling params of a draw. So
    another `n`, `max_tokens` or `logprobs` draws the same. Without one, the run's seed stands in
    its place, and the request's `meaning` and the number of equal ones before it count, too.
    """
    values = {name: getattr(params, name) for name in DRAW_FIELDS}
    values["logit_bias"] = tuple(sorted(params.logit_bias))
    numbers = b"".join(n.to_bytes(16, "little", signed=True) for n in (seed, repeat))
    ids = b"".join(_digest(array("q", prompt).tobytes()) for prompt in prompts)
    return _digest(
        numbers + meaning + _digest(repr(_canonical_items(values)).encode()) + ids
    )


def make_noise_key(draw_key: bytes, prompt_index: int, candidate: int) -> bytes:
    """Return the key of one sequence's draws."""
    numbers = (prompt_index, candidate)
    return _digest(
        draw_key + b"".join(number.to_bytes(8, "little") for number in numbers)
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _canonical_items(values: dict[str, object]) -> list[tuple[str, object]]:
    """Return values in an order of their own, -0.0 as 0.0, and none that is its default.

    So a field that is new to a version changes no draw of requests that do not have it.
    """
    plain = (
        (name, v + 0.0 if isinstance(v, float) else v) for name, v in values.items()
    )
    return sorted((name, v) for name, v in plain if v != DEFAULT_VALUES[name])


def make_step_noise(key: bytes, step: int) -> int:
    """Return the 64 random bits of one step, signed, for the noise of its tokens."""
    drawn = hashlib.blake2b(step.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(drawn, "little", signed=True)
