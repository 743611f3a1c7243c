"""Counter-based randomness: a draw belongs to its request and step, to nothing else.

Not to neighbours, order, batch, or how often the run was resumed (contract, section 7).
"""

from __future__ import annotations

import hashlib


def digest(raw: bytes) -> bytes:
    """Return 16 bytes that stand for a request's own bytes."""
    return hashlib.blake2b(raw, digest_size=16).digest()


def noise_key(seed: int, repeat: int, digest: bytes, prompt_index: int, candidate: int) -> bytes:
    """Return the key of one sequence's draws.

    Args:
        seed: the request's own, or the run's.
        repeat: how many equal lines without a seed came before; 0 where the seed is given.
        digest: of the request's bytes.
    """
    numbers = (seed, repeat, prompt_index, candidate)
    head = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    return hashlib.blake2b(head + digest, digest_size=16).digest()


def step_noise(key: bytes, step: int) -> int:
    """Return the 64 random bits of one step, signed; its tokens' noise is made of them."""
    drawn = hashlib.blake2b(step.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(drawn, "little", signed=True)
