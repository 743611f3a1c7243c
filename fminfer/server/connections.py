"""Connections that do not speak: they are closed, so that none holds a socket for ever."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fminfer.core.errors import UsageError

HEAD_S = 30.0  # for the head of a request, after the time that an idle connection has
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
        self._wait_for_head(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; behind an answer that was sent already, only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its route can send nothing any more
            self.cycle.message_event.set()

    def _wait_for_head(self, idle_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(idle_s + HEAD_S, self._close_if_silent)

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


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Load a certificate and its key as the server will, but without asking for a password.

    Raises:
        UsageError: that cannot be.
    """

    def refuse_password() -> str:
        raise UsageError(
            f"ssl_keyfile {key} is encrypted; give it without its password: "
            f"openssl pkey -in {key} -out FILE"
        )

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, refuse_password)
    except OSError as error:  # also of TLS
        raise UsageError(
            f"ssl_certfile {certificate} and ssl_keyfile {key} cannot be used: "
            f"{error.strerror or error}. Give PEM files of a certificate and of its key"
        ) from None
