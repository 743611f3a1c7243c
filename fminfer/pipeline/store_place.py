"""The ranks' store as one process reaches it: in itself, or at an address."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fminfer.core.errors import PipelineError
from fminfer.pipeline.handshake import HolderEndedError, NoStoreError, WrongSecretError
from fminfer.pipeline.ranks import HOW_TO_SHARE
from fminfer.pipeline.store import Store, StoreHolder

TELL_AFTER_S = 5.0  # then say that this rank waits for others
POLL_S = 0.1
REACH_ITSELF_S = 10.0
GREET_S = 1.0  # least time for a greeting, even just before the timeout


@dataclass(slots=True)
class StorePlace:
    """A connection to the ranks' store, and what other connections to it need."""

    store: Store
    host: str
    port: int
    secret: str = field(repr=False)
    timeout_s: float
    prefix: str = ""  # of this group's keys
    holder: StoreHolder | None = None  # the store, if it is in this process
    has_all: threading.Event = field(default_factory=threading.Event)  # nobody else is to come
    on_leave: Callable[[], None] = lambda: None

    def connect(self) -> Store:
        """Open another connection; calls on one wait for each other."""
        return connect(self.host, self.port, self.secret, self.timeout_s, self.prefix)

    @property
    def is_holder(self) -> bool:
        """Return whether the store is in this process."""
        return self.holder is not None

    def leave(self) -> None:
        """Take this place's address away, so that no other run finds it."""
        self.has_all.set()
        self.on_leave()


def hold(listener: socket.socket, host: str, secret: str, timeout_s: float) -> StorePlace:
    """Hold the store behind a listening socket; `host` is by what the others reach it."""
    port = listener.getsockname()[1]
    holder = StoreHolder(listener, secret)
    try:
        store = connect(host, port, secret, min(REACH_ITSELF_S, timeout_s))
    except PipelineError:
        raise PipelineError(
            f"rank 0 cannot reach itself at {host}:{port}; give an address of the machine that it "
            "runs on"
        ) from None
    return StorePlace(store, host, port, secret, timeout_s, holder=holder)


def connect(host: str, port: int, secret: str, timeout_s: float, prefix: str = "") -> Store:
    """Connect to a store, which may not be there yet."""
    until_s, tell_at_s = time.monotonic() + timeout_s, time.monotonic() + TELL_AFTER_S
    has_ended = False  # whoever answered last
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            return Store(host, port, secret, max(left_s, GREET_S), prefix)
        except WrongSecretError as error:
            raise PipelineError(f"{host}:{port}: {error}. {HOW_TO_SHARE}") from None
        except NoStoreError:
            raise PipelineError(
                f"something answers at {host}:{port}, but it is no rank 0 of fminfer; is another "
                "program using the port? Give all ranks another"
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
    raise PipelineError(_why_nobody(host, port, timeout_s))


def _why_nobody(host: str, port: int, timeout_s: float) -> str:
    text = f"nobody answered at {host}:{port} within {timeout_s:g} s, where rank 0 was to be; "
    try:
        socket.gethostbyname(host)
    except OSError:
        return text + f"this machine knows no host {host}"
    return text + "is it started, and can this machine reach it?"
