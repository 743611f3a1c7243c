"""The ranks' common store of keys: held by one process, open to who shows the run's secret.

torch's own TCPStore asks for no secret, and returns every key to whoever asks.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from fminfer.core.errors import FminferError, PipelineError
from fminfer.machine.liveness import wait_until
from fminfer.pipeline.handshake import (
    HolderEndedError,
    NoStoreError,
    WrongSecretError,
    prove_secret,
    receive_exactly,
    verify_peer,
)
from fminfer.pipeline.ranks import HOW_TO_SHARE

POLL_S = 0.05
CONNECT_S = 2.0
REACH_S = 10.0  # for who holds the store
GREET_S = 1.0  # least time for a greeting, even just before the timeout
TELL_AFTER_S = 5.0  # then say that this rank waits for others
PROOF_S = 20.0  # time for a peer to prove that it has the secret
MAX_STRANGERS = 256  # peers that may do so at once
MAX_MESSAGE_BYTES = 64 << 20
STORE_IS_GONE = "rank 0, which holds the ranks together, is gone"


class StoreHolder:
    """Answers every connection that proves the secret, on a thread of its own; drops others."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._secret = secret
        # connections that left the store, by number; see `Store.become_private_connection`
        self.private_connections: dict[int, socket.socket] = {}
        self._values: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._listeners: list[socket.socket] = []
        self._is_closed = False
        self.listen_at(listener)

    def close(self) -> None:
        """Accept no more connections; open ones end with their peers."""
        self._is_closed = True
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which ends an accept() that waits
            listener.close()

    def listen_at(self, listener: socket.socket) -> None:
        """Accept connections there, too."""
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept_connections, args=(listener,), name="door", daemon=True
        ).start()

    def _accept_connections(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                peer, _ = listener.accept()
            except OSError:
                time.sleep(POLL_S)  # no descriptor is free, or the peer is gone already
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(
                    target=self._verify_connection, args=(peer,), daemon=True
                ).start()
            else:
                peer.close()

    def _verify_connection(self, peer: socket.socket) -> None:
        with peer:
            try:
                is_of_run = verify_peer(peer, self._secret, PROOF_S)
            except (OSError, EOFError):
                return
            finally:
                self._strangers.release()
            if is_of_run:
                with suppress(OSError, EOFError, ValueError, TypeError):
                    peer.settimeout(None)
                    self._serve_connection(peer)

    def _serve_connection(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            name, *parts = _receive_parts(peer)
            if name == b"line":
                _send_parts(peer, [])
                self.private_connections[int(parts[0])] = socket.socket(
                    fileno=peer.detach()
                )
                return
            with self._lock:
                answer = self._apply_request(name, parts)
            _send_parts(peer, answer)

    def _apply_request(self, name: bytes, parts: list[bytes]) -> list[bytes]:
        values = self._values
        match name, *parts:
            case b"set", *pairs:
                values.update(zip(pairs[::2], pairs[1::2], strict=True))
            case b"get", *keys if all(key in values for key in keys):
                return [values[key] for key in keys]
            case b"add", key, amount:
                values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
                return [values[key]]
            case b"swap", key, expected, value:
                if values.get(key, b"") == expected:
                    values[key] = value
                return [values.get(key, expected)]
            case b"append", key, value:
                values[key] = values.get(key, b"") + value
            case b"drop", key:
                return [b"%d" % (values.pop(key, None) is not None)]
            case (b"count",):
                return [b"%d" % len(values)]
        return []


class Store(dist.Store):
    """One connection to the store, whose calls wait for each other; gloo and NCCL use it.

    Args:
        prefix: of all its keys; several groups of ranks may share one store.

    Raises:
        OSError, EOFError: nobody answers.
        NoStoreError: another program does.
        WrongSecretError: the holder has another secret.
    """

    def __init__(
        self, host: str, port: int, secret: str, timeout_s: float, prefix: str = ""
    ) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.secret = secret
        self.holder: StoreHolder | None = None  # if it is in this process
        self.has_all = threading.Event()  # nobody else is to come
        self.on_hide: Callable[[], None] = lambda: None
        self._prefix = prefix
        self._why_closed: FminferError | None = None
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), min(CONNECT_S, timeout_s))
        try:
            self._socket.settimeout(timeout_s)
            prove_secret(self._socket, secret)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(None)
            # The addresses of this rank and of the store, as this rank reaches it.
            self.ends = self._socket.getsockname()[0], self._socket.getpeername()[0]
        except BaseException:
            self._socket.close()
            raise

    def open_connection(self, timeout_s: float) -> Store:
        """Open another connection, whose calls do not wait for those on this one."""
        return connect_to_store(
            self.host, self.port, self.secret, timeout_s, self._prefix
        )

    def hide_address(self) -> None:
        """Remove its address, so that no other run finds it."""
        self.has_all.set()
        self.on_hide()

    def close(self, why: FminferError) -> None:
        """Hang up; this error is raised in whoever waits for an answer, or asks later."""
        self._why_closed = why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def disconnect(self) -> None:
        """Hang up once nobody asks any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends a call that waits
        with self._lock:
            self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._send_request(b"set", self._add_prefix(key), value)

    def get(self, key: str) -> bytes:
        """Wait for a key's value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys."""
        names = [*map(self._add_prefix, keys)]
        while len(values := self._send_request(b"get", *names)) < len(keys):
            time.sleep(POLL_S)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        names = map(self._add_prefix, keys)
        pairs = [part for pair in zip(names, values, strict=True) for part in pair]
        self._send_request(b"set", *pairs)

    def add(self, key: str, amount: int) -> int:
        return int(self._send_request(b"add", self._add_prefix(key), str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key if it has the expected value (empty: none); return its value then."""
        return self._send_request(b"swap", self._add_prefix(key), expected, value)[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._send_request(b"append", self._add_prefix(key), value)

    def delete_key(self, key: str) -> bool:
        return self._send_request(b"drop", self._add_prefix(key)) == [b"1"]

    def num_keys(self) -> int:
        return int(self._send_request(b"count")[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return len(self._send_request(b"get", *map(self._add_prefix, keys))) == len(
            keys
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; torch may say for how long at most."""
        timeout_s = (timeout or timedelta.max).total_seconds()
        if not wait_until(lambda: self.check(keys), timeout_s):
            raise PipelineError(f"no rank has said {', '.join(keys)} in {timeout}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: waits of the store end with the run, as the watch sees deaths."""

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        """Return this store: threads of torch may share it, as calls wait for each other."""
        return self

    def become_private_connection(self, number: int) -> socket.socket:
        """Detach this connection from the store; it then joins its two processes alone."""
        self._send_request(b"line", str(number))
        return socket.socket(fileno=self._socket.detach())

    def _add_prefix(self, key: str) -> str:
        return self._prefix + key

    def _send_request(self, name: bytes, *parts: str | bytes) -> list[bytes]:
        texts = [
            part.encode() if isinstance(part, str) else bytes(part) for part in parts
        ]
        try:
            with self._lock:
                _send_parts(self._socket, [name, *texts])
                return _receive_parts(self._socket)
        except (OSError, EOFError, ValueError) as error:
            if self._why_closed is not None:
                raise self._why_closed from None
            raise PipelineError(STORE_IS_GONE) from error


def connect_to_store(
    host: str, port: int, secret: str, timeout_s: float, prefix: str = ""
) -> Store:
    """Connect to a store, which may not be there yet."""
    until_s = time.monotonic() + timeout_s
    tell_at_s = time.monotonic() + TELL_AFTER_S
    has_ended = False  # whoever answered last
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            return Store(host, port, secret, max(left_s, GREET_S), prefix)
        except WrongSecretError as error:
            raise PipelineError(f"{host}:{port}: {error}. {HOW_TO_SHARE}") from None
        except NoStoreError:
            raise PipelineError(
                f"something answers at {host}:{port}, but it is no rank 0 of fminfer; "
                "is another program, or another version, using the port? Give all "
                "ranks another"
            ) from None
        except (OSError, EOFError) as error:  # not yet there, or just gone
            has_ended = isinstance(error, HolderEndedError)
            time.sleep(POLL_S)
        if time.monotonic() > tell_at_s:
            print(f"Waiting for rank 0 at {host}:{port} …", file=sys.stderr, flush=True)
            tell_at_s = until_s
    if has_ended:
        raise PipelineError(
            f"rank 0 at {host}:{port} ended while this rank introduced itself; see what it says"
        )
    why = "is it started, and can this machine reach it?"
    try:
        socket.gethostbyname(host)
    except OSError:
        why = f"this machine knows no host {host}"
    raise PipelineError(
        f"nobody answered at {host}:{port} within {timeout_s:g} s, where rank 0 was to be; {why}"
    )


def hold_store(
    listener: socket.socket, host: str, secret: str, timeout_s: float
) -> Store:
    """Hold the store behind a listening socket; `host` is by what the others reach it."""
    port = listener.getsockname()[1]
    holder = StoreHolder(listener, secret)
    try:
        store = connect_to_store(host, port, secret, min(REACH_S, timeout_s))
    except PipelineError:
        raise PipelineError(
            f"rank 0 cannot reach itself at {host}:{port}; give an address of the "
            "machine that it runs on"
        ) from None
    store.holder = holder
    return store


def _send_parts(peer: socket.socket, parts: list[bytes]) -> None:
    """Send a message: how many parts it has, the size of each, and the parts."""
    sizes = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    peer.sendall(sizes + b"".join(parts))


def _receive_parts(peer: socket.socket) -> list[bytes]:
    (count,) = struct.unpack("<I", receive_exactly(peer, 4))
    _check_message_size(4 * count)
    sizes = struct.unpack(f"<{count}I", receive_exactly(peer, 4 * count))
    _check_message_size(sum(sizes))
    return [receive_exactly(peer, size) for size in sizes]


def _check_message_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
