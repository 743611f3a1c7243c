"""Rank and store prove that they have one secret, by digests of two random numbers."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from pathlib import Path

from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine.liveness import create_file_once, wait_until
from fminfer.machine.user_cache import describe_cache_fault, find_cache_path
from fminfer.pipeline.ranks import SECRET

GREETING = b"fminfer store 2\n"
NONCE_BYTES = DIGEST_BYTES = 32
REFUSAL = bytes(DIGEST_BYTES)  # in the place of the proof, for who has another secret
WHOLE_S = 5.0  # time for another process to fill a file that it has created


class WrongSecretError(PipelineError):
    """The other side has another secret, or none."""


class HolderEndedError(ConnectionError):
    """The holder hung up before it said whether the secret is the same."""


class NoStoreError(PipelineError):
    """What answers is another program, or says nothing."""


def verify_peer(peer: socket.socket, secret: str, timeout_s: float) -> bool:
    """Let a peer prove in time that it has the secret, and prove it too; return if it has."""
    until_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    peer.settimeout(timeout_s)
    peer.sendall(GREETING + nonce)
    answer = receive_exactly(peer, NONCE_BYTES + DIGEST_BYTES, until_s)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(
        answer[NONCE_BYTES:], _make_proof(secret, b"rank", nonces)
    ):
        peer.sendall(REFUSAL)
        return False
    peer.sendall(_make_proof(secret, b"store", nonces))
    return True


def prove_secret(holder: socket.socket, secret: str) -> None:
    """Prove to the store's holder that this rank has the secret, and have it prove the same.

    Raises:
        OSError, EOFError: the connection broke; a HolderEndedError if after the greeting.
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
        holder.sendall(nonces[NONCE_BYTES:] + _make_proof(secret, b"rank", nonces))
        proof = receive_exactly(holder, DIGEST_BYTES)
    except (ConnectionError, EOFError) as error:
        raise HolderEndedError(
            "rank 0 ended while this rank introduced itself"
        ) from error
    if not hmac.compare_digest(proof, _make_proof(secret, b"store", nonces)):
        raise WrongSecretError("rank 0 has another secret than this rank")


def receive_exactly(
    peer: socket.socket, count: int, until_s: float | None = None
) -> bytes:
    """Receive so many bytes, until this time of the monotonic clock.

    A peer may send byte by byte.

    Raises:
        EOFError, TimeoutError: the peer hung up, or took longer.
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


def _make_proof(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + nonces, hashlib.sha256)


def read_home_secret() -> str:
    """Read this user's own secret in the cache folder; the first rank to read makes it."""
    if why := describe_cache_fault():
        raise UsageError(
            f"the ranks' common secret has no place: {why}; or set {SECRET} to the "
            "same text for every rank"
        )
    path = find_cache_path() / "ranks.secret"
    try:
        create_file_once(path, secrets.token_hex(32).encode() + b"\n", 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    if not wait_until(lambda: read_private_file(path).strip() != "", WHOLE_S):
        raise UsageError(f"{path} is empty; remove it, and start the ranks again")
    return read_private_file(path).strip()


def read_private_file(path: Path) -> str:
    """Read a file; raise a UsageError if others than this user can read or write it."""
    with path.open() as file:
        status = os.fstat(file.fileno())
        is_ours = status.st_uid == os.getuid() or os.getuid() == 0
        if not is_ours or status.st_mode & 0o077:
            raise UsageError(
                f"{path} holds the ranks' secret and must be yours alone (mode 0600); "
                f"remove it, or set {SECRET} to the same text for every rank"
            )
        return file.read()
