"""How a rank and the holder of the ranks' store prove to each other that they have one secret.

The secret never travels: each side sends a digest of two random numbers, one from either side.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from fminfer.core.errors import PipelineError

GREETING = b"fminfer store 1\n"
NONCE_BYTES = DIGEST_BYTES = 32
REFUSAL = bytes(DIGEST_BYTES)  # in the place of the proof, for who has another secret


class WrongSecretError(PipelineError):
    """The other side has another secret, or none."""


class HolderEndedError(ConnectionError):
    """The holder hung up before it said whether the secret is the same."""


class NoStoreError(PipelineError):
    """What answers is another program, or says nothing."""


def greet(peer: socket.socket, secret: str, timeout_s: float) -> bool:
    """Let a peer prove that it has the secret, and prove it as well; return whether it has.

    Raises:
        OSError, EOFError: it hung up, or took longer.
    """
    until_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    peer.settimeout(timeout_s)
    peer.sendall(GREETING + nonce)
    answer = receive_exactly(peer, NONCE_BYTES + DIGEST_BYTES, until_s)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(secret, b"rank", nonces)):
        peer.sendall(REFUSAL)
        return False
    peer.sendall(_proof(secret, b"store", nonces))
    return True


def introduce(holder: socket.socket, secret: str) -> None:
    """Prove to the store's holder that this rank has the secret, and have it prove the same.

    Raises:
        OSError, EOFError: the connection broke before a greeting.
        HolderEndedError: it broke after the greeting; an OSError, too.
        NoStoreError: another greeting came, or none.
        WrongSecretError: the two secrets differ.
    """
    try:
        greeting = receive_exactly(holder, len(GREETING) + NONCE_BYTES)
    except TimeoutError:
        greeting = b""
    if not greeting.startswith(GREETING):
        raise NoStoreError("what answers is no rank 0 of fminfer")
    nonces = greeting[len(GREETING) :] + secrets.token_bytes(NONCE_BYTES)
    try:
        holder.sendall(nonces[NONCE_BYTES:] + _proof(secret, b"rank", nonces))
        proof = receive_exactly(holder, DIGEST_BYTES)
    except (ConnectionError, EOFError) as error:
        raise HolderEndedError("rank 0 ended while this rank introduced itself") from error
    if not hmac.compare_digest(proof, _proof(secret, b"store", nonces)):
        raise WrongSecretError("rank 0 has another secret than this rank")


def receive_exactly(peer: socket.socket, count: int, until_s: float | None = None) -> bytes:
    """Receive so many bytes.

    Args:
        until_s: when all must be here, by the monotonic clock; a peer may send byte by byte.

    Raises:
        EOFError: the peer hung up.
        TimeoutError: it took longer.
    """
    parts = bytearray()
    while len(parts) < count:
        if until_s is not None:
            peer.settimeout(max(until_s - time.monotonic(), 1e-3))
        part = peer.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _proof(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + nonces, hashlib.sha256)
