"""One request to a server over HTTP, and the connections for it.

Each connection has a client of its own: httpx's pool of many costs three times the CPU.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson

from fminfer.client.answer_builder import AnswerBuilder
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.remote_request import RemoteRequest
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_trouble import ServerTroubleError
from fminfer.client.verdicts import make_verdict, quote
from fminfer.contract.endpoints import Endpoint
from fminfer.core.errors import RequestError, ServerError, UsageError
from fminfer.machine.installation import describe_install

STREAMED: tuple[Endpoint, ...] = ("completions", "chat", "responses")
# a response is asked for as the chat that it is made of
PATHS = {"chat": "chat/completions", "responses": "chat/completions"}
# Routes that servers have outside of /v1 as well, or there alone.
OUTSIDE_V1: tuple[Endpoint, ...] = ("score", "rerank", "classify")
MOST_ERROR_BYTES = 1 << 16  # that are read of a response without an answer
CONNECTING_S = 10.0
# below the 5 s after which servers close a connection that is not used
UNUSED_S = 4.0


@dataclass(slots=True)
class HttpCall:
    """What comes back for one request, as it comes. Seconds of `time.perf_counter`."""

    request: RemoteRequest
    builder: AnswerBuilder
    progress_s: float  # when its last data came, or it was sent
    first_data_s: float | None = None
    is_whole: bool = False  # the server says that no more comes

    def count_data(self) -> None:
        self.progress_s = time.perf_counter()
        if self.first_data_s is None:
            self.first_data_s = self.progress_s


def import_httpx() -> Any:
    """Return the module, which is an extra.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise UsageError(
            f"--engine needs httpx ({error}); {describe_install('remote-engine')}"
        ) from None
    return httpx


class HttpServer:
    """A server as one sends requests to it."""

    def __init__(self, facts: ServerFacts, options: RemoteOptions, key: str) -> None:
        self.facts = facts
        self._httpx = import_httpx()
        self._key = key
        self._most_bytes = options.max_answer_bytes
        headers = make_headers(key) | {"Content-Type": "application/json"}
        self._headers = self._httpx.Headers(headers)
        self._urls: dict[Endpoint, Any] = {}
        self._model_names: dict[Endpoint, str] = {}  # that its first answers had
        self._ssl_context = self._httpx.create_ssl_context()  # takes 20 ms
        self._clients: list[Any] = []  # without a request

    async def ask(self, call: HttpCall) -> None:
        """Send a request, and add all that comes back to the call's builder.

        A task that is cancelled here closes the connection.

        Raises:
            RequestError, ServerTroubleError, ServerError: by whose trouble it is.
        """
        is_new = not self._clients
        client = self.open_connection() if is_new else self._clients.pop()
        try:
            try:
                response = await self._send(client, call)
            except (self._httpx.NetworkError, self._httpx.RemoteProtocolError):
                if is_new:
                    raise
                # the server closed the connection while nobody used it
                response = await self._send(client, call)
            try:
                if response.status_code == 200:
                    await self._read_answer(response, call)
                else:
                    raise await self._read_verdict(response)
            finally:
                await response.aclose()
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            if not call.is_whole:
                words = quote(f"{type(error).__name__} {error}", self._key)
                raise ServerTroubleError(f"{self.facts.url}: {words}") from None
        finally:
            self._clients.append(client)

    async def close(self) -> None:
        """Close all connections without a request."""
        for client in self._clients:
            await client.aclose()

    def open_client(self) -> Any:
        """Return a client with one connection."""
        return open_client(self._httpx, self._ssl_context)

    def open_connection(self) -> Any:
        """Return a connection for one request after another."""
        return open_connection(self._httpx, self._ssl_context, self.facts.url)

    async def _send(self, client: Any, call: HttpCall) -> Any:
        """Return the response, of which nothing is read."""
        endpoint = call.request.endpoint
        fields: dict[str, Any] = {"model": self.facts.model}
        if endpoint in STREAMED:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        content = orjson.dumps(fields)[:-1] + b"," + call.request.body[1:]
        url = self._urls.get(endpoint)
        if url is None:
            path = PATHS.get(endpoint, endpoint)
            url = self._urls[endpoint] = self._httpx.URL(f"{self.facts.url}/{path}")
        response = await self._post(client, url, content)
        if response.status_code != 404 or endpoint not in OUTSIDE_V1:
            return response
        other_url = url.copy_with(path=url.path.replace("/v1/", "/"))
        if other_url == url:
            return response
        await response.aclose()
        self._urls[endpoint] = other_url
        return await self._post(client, other_url, content)

    async def _post(self, client: Any, url: Any, content: bytes) -> Any:
        request = self._httpx.Request(
            "POST",
            url,
            headers=self._headers,
            content=content,
            extensions={"timeout": {"connect": CONNECTING_S}},
        )
        return await client.handle_async_request(request)

    async def _read_verdict(self, response: Any) -> Exception:
        body = bytearray()
        async for data in response.aiter_raw():
            body += data
            if len(body) >= MOST_ERROR_BYTES:
                break
        return make_verdict(
            self.facts.url,
            response.status_code,
            dict(response.headers),
            bytes(body),
            self._key,
        )

    async def _read_answer(self, response: Any, call: HttpCall) -> None:
        media_type = response.headers.get("content-type", "").lower()
        is_stream = media_type.startswith("text/event-stream")
        num_bytes = 0
        unread = bytearray()
        async for data in response.aiter_raw():
            num_bytes += len(data)
            if num_bytes > self._most_bytes:
                raise RequestError(
                    "out_of_range",
                    f"the answer has more than {self._most_bytes:,} bytes. Ask for less, "
                    "or raise --max-answer-size",
                )
            unread += data
            if is_stream and b"\n" in data:
                *lines, unread = unread.split(b"\n")
                for line in lines:
                    self._add_line(bytes(line), call)
        if is_stream:
            self._add_line(bytes(unread), call)
        else:
            call.builder.add_whole(self._parse(bytes(unread), call))
            call.is_whole = True

    def _add_line(self, line: bytes, call: HttpCall) -> None:
        """Add a line of a stream. Lines without data are no progress."""
        name, _, payload = line.partition(b":")
        payload = payload.strip()
        # llama-server calls a field `error`
        is_known = name in (b"data", b"error")
        # llama-server begins an answer to several prompts with `null`
        if not is_known or payload in (b"", b"null") or call.is_whole:
            return
        if payload == b"[DONE]":
            call.is_whole = True
            return
        if name == b"error":
            payload = b'{"error":%b}' % payload
        call.builder.add_chunk(self._parse(payload, call))

    def _parse(self, text: bytes, call: HttpCall) -> dict[str, Any]:
        """Return an object of a response; note its model."""
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            words = quote(text[:1000].decode(errors="replace"), self._key)
            raise ServerTroubleError(f"{self.facts.url} sent no JSON object: {words}")
        call.count_data()
        name = str(fields.get("model") or "")
        if name:
            first_name = self._model_names.setdefault(call.request.endpoint, name)
            if name != first_name:
                raise ServerError(
                    f"{self.facts.url} now answers with the model {quote(name, self._key)}; "
                    f"at the start it was {quote(first_name, self._key)}. Serve that one, "
                    "and run the same command again"
                )
        return fields


def make_headers(key: str) -> dict[str, str]:
    """Return the headers of every request."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "fminfer"}
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def open_client(httpx: Any, ssl_context: ssl.SSLContext) -> Any:
    """Return an `httpx.AsyncClient` with one connection; proxies are as httpx has them."""
    return httpx.AsyncClient(
        verify=ssl_context,
        timeout=httpx.Timeout(None, connect=CONNECTING_S),
        limits=httpx.Limits(max_connections=1, keepalive_expiry=UNUSED_S),
        follow_redirects=False,
    )


def open_connection(httpx: Any, ssl_context: ssl.SSLContext, url: str) -> Any:
    """Return a transport with one connection: what a client would use, at half its CPU."""
    parts = urlsplit(url)
    is_direct = proxy_bypass(parts.hostname or "")
    return httpx.AsyncHTTPTransport(
        verify=ssl_context,
        limits=httpx.Limits(max_connections=1, keepalive_expiry=UNUSED_S),
        proxy=None if is_direct else getproxies().get(parts.scheme),
    )
