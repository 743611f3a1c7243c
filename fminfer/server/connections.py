"""Connections that do not speak are closed; those that only listen still get their answer."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from heapq import nsmallest
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fminfer.contract.json_object import dump_json
from fminfer.core.errors import UsageError
from fminfer.server.http_errors import JSON, HttpError, describe_error
from fminfer.server.settings import ServerSettings

HEAD_S = 30.0  # for the head of a request, after the time that an idle connection has
CLOSE = [(b"connection", b"close")]
# first and longest pause between looks for a client that may have left
PROBE_S = 0.02, 10.0
UNREAD_S = 60.0  # that a client may leave what it was sent unread
MOST_CONNECTIONS = 4096
MOST_ACCEPTED = 64  # at once, before others have their turn
LEAST_CHUNK = 16  # bytes that chunks of a body have on average
LENT_BYTES = 60_000  # by which the chunks of a body may fall short of that
_BARE_LINE_END = re.compile(rb"(?<!\r)\n")


class _StrictParser(h11.Connection):
    """Refuses requests that other parsers of HTTP, such as a proxy's, may read differently."""

    _num_spare = LENT_BYTES  # bytes of a body beyond those that its chunks need

    def next_event(self) -> Any:
        """Return the next event."""
        is_idle = self.their_state is h11.IDLE
        if is_idle and _BARE_LINE_END.search(
            self.trailing_data[0].partition(b"\r\n\r\n")[0]
        ):
            raise h11.RemoteProtocolError(
                "a line of its head ends in LF, and not in CR LF"
            )
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_spare = LENT_BYTES
            if {b"transfer-encoding", b"content-length"} <= dict(event.headers).keys():
                raise h11.RemoteProtocolError(
                    "it has Content-Length and Transfer-Encoding"
                )
        if isinstance(event, h11.Data):
            self._num_spare += len(event.data) - LEAST_CHUNK * event.chunk_start
            if self._num_spare < 0:
                raise h11.RemoteProtocolError(
                    "its chunks have few bytes; send larger ones"
                )
        return event


class Connection(H11Protocol):
    """One connection, closed if no request's head comes in time. uvicorn makes it."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.conn = _StrictParser(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; of too many connections, close the oldest silent ones."""
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > find_max_connections():
            connections = [
                connection
                for connection in self.connections
                if isinstance(connection, Connection)
            ]
            oldest = nsmallest(
                1 + len(connections) // 64,
                connections,
                key=lambda connection: connection.patience,
            )
            for (
                connection
            ) in oldest:  # several at once, as looking for them takes a while
                if connection is oldest[0] or connection.is_silent:
                    self.connections.discard(
                        connection
                    )  # its turn in the loop comes later
                    connection.transport.abort()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._wait_for_head(self.timeout_keep_alive)

    @property
    def patience(self) -> tuple[bool, bool, float]:
        """Its place among those to close: first silent ones, then those that send a body."""
        return not self.is_silent, self.has_whole_request, self._silent_s

    @property
    def is_silent(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_whole_request(self) -> bool:
        """Whether a request that is open has come whole."""
        return not (self.is_silent or self.cycle.more_body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a whole request, though its client sends no more; drop all others.

        TLS cannot be closed by half. A client of HTTP/1.0 cannot be told from one that has left,
        and proxies that speak it do not close by half.
        """
        if (
            not self.has_whole_request
            or self.scheme == "https"
            or self.scope["http_version"] != "1.1"
        ):
            return False
        # and so in the response
        self.scope["headers"] = [*self.scope["headers"], *CLOSE]
        self.cycle.keep_alive = False
        self._set_timer(PROBE_S[0], self._probe_client, PROBE_S[0])
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; behind an answer that was sent already, only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = HttpError(
                400, f"this is no HTTP request: {sys.exc_info()[1] or msg}"
            )
            head = h11.Response(
                status_code=400, headers=[(b"content-type", JSON.encode()), *CLOSE]
            )
            for event in (
                head,
                h11.Data(dump_json(describe_error(error))),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its route can send nothing any more
            self.cycle.message_event.set()

    def _probe_client(self, wait_s: float) -> None:
        """Write "100 Continue"; the second write to a client that has left fails."""
        if self.cycle.response_started:
            return
        event = h11.InformationalResponse(
            status_code=100, headers=[], reason=b"Continue"
        )
        self.transport.write(self.conn.send(event))
        self._set_timer(wait_s, self._probe_client, min(2 * wait_s, PROBE_S[1]))

    def _wait_for_head(self, idle_s: float = 0.0) -> None:
        self._silent_s = self.loop.time()
        self._set_timer(idle_s + HEAD_S, self._close_if_silent)

    def _set_timer(self, wait_s: float, act: Callable[..., None], *args: float) -> None:
        """Call something later, in place of what was to be called."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(wait_s, act, *args)

    def _close_if_silent(self) -> None:
        if self.is_silent:
            self.transport.abort()


def raise_file_limit() -> None:
    """Let the process open as many files as the system allows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # a sandbox may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_max_connections() -> int:
    """Return how many connections may be open: half as many as files."""
    # Without a limit it is -1.
    return min(
        MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 64) // 2
    )


def open_socket(settings: ServerSettings) -> socket.socket:
    """Open a socket on the server's address, which does not listen yet.

    Raises:
        UsageError: it cannot be had, or the certificate is none.
    """
    if settings.ssl_certfile is not None:
        check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    with ExitStack() as failed:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                settings.host,
                settings.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )[0]
            opened = failed.enter_context(socket.socket(family, kind, proto))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # connections inherit it: clients that do not read end
            if sys.platform == "linux":
                opened.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000)
                )
            opened.bind(address)
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"{settings.host}:{settings.port} cannot be listened on: {error}. Give another "
                "--port or --host"
            ) from None
        failed.pop_all()  # it stays open
    return opened


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Load a certificate and its key as the server will, but without asking for a password."""

    def raise_encrypted() -> str:
        raise UsageError(
            f"ssl_keyfile {key} is encrypted; give it without its password: "
            f"openssl pkey -in {key} -out FILE"
        )

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, raise_encrypted)
    except OSError as error:  # also of TLS
        raise UsageError(
            f"ssl_certfile {certificate} and ssl_keyfile {key} cannot be used: "
            f"{error.strerror or error}. Give PEM files of a certificate and of its key"
        ) from None
