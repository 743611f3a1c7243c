"""Connections that do not speak: they are closed, so that none holds a socket for ever."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # for the head of a request, from the connection or the answer before it
UNREAD_S = 60.0  # that a client may leave what it was sent unread


class Connection(H11Protocol):
    """One connection, closed if no request's head comes in time. uvicorn makes it."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait_for_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket of an address, which does not listen yet.

    A client that does not read loses its connection after a while; systems other than Linux
    cannot tell.

    Raises:
        OSError: the address cannot be had.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, kind, proto)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # connections inherit it
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        found.bind(address)
    except BaseException:
        found.close()
        raise
    return found
