"""Which model the servers of a run serve, and what they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import orjson

from fminfer.client.http_call import import_httpx, make_headers, open_client
from fminfer.client.remote_options import DialectName, RemoteOptions
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_trouble import ServerTroubleError
from fminfer.client.verdicts import make_verdict, quote
from fminfer.core.errors import ServerError, UsageError

ASKING_S = 10.0  # for what a server says of itself
WAITING_S = 2.0  # before servers that nobody could reach are asked again
NOTE_EVERY_S = 30.0
# By `owned_by` of an entry of /v1/models; all others are OpenAI's.
DIALECT_OF_OWNER: dict[str, DialectName] = {
    "fminfer": "fminfer",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-server",
    "library": "ollama",
}
# Where each says its version: a path beside /v1, and the field.
VERSIONS: dict[DialectName, tuple[tuple[str, str], ...]] = {
    "vllm": (("/version", "version"),),
    "sglang": (("/get_server_info", "version"), ("/server_info", "version")),
    "llama-server": (("/props", "build_info"),),
    "ollama": (("/api/version", "version"),),
}
# What an entry has that changes from call to call, or with a restart.
CHANGING_FIELDS = ("created", "permission", "status", "in_cache")
MOST_BYTES = 1 << 24  # of what a server says of itself


def find_servers(
    options: RemoteOptions,
    model_name: str | None,
    key: str,
    print_note: Callable[[str], None],
) -> list[ServerFacts]:
    """Return the servers that can be reached, at least one; wait until there is one.

    Args:
        model_name: the model that requests are for; None: the only one there is.

    Raises:
        UsageError: a URL, the key or the model's name is wrong, or the servers differ.
        ServerError: none was reached within the patience.
    """
    return asyncio.run(_find_all(options, model_name, key, print_note))


async def read_facts(
    client: Any, url: str, options: RemoteOptions, model_name: str | None, key: str
) -> ServerFacts:
    """Return what a server says of itself now.

    Raises:
        ServerTroubleError: it cannot be reached, or says nothing of use.
        UsageError: it refuses the key, or has no such model.
    """
    try:
        return await asyncio.wait_for(
            _read_facts(client, url, options, model_name, key), ASKING_S
        )
    except asyncio.TimeoutError:
        text = f"{url} did not say within {ASKING_S:.0f} s which models it has"
        raise ServerTroubleError(text) from None


async def _find_all(
    options: RemoteOptions,
    model_name: str | None,
    key: str,
    print_note: Callable[[str], None],
) -> list[ServerFacts]:
    httpx = import_httpx()
    ssl_context = httpx.create_ssl_context()
    started_s = noted_s = time.monotonic()
    while True:
        clients = [open_client(httpx, ssl_context) for _ in options.urls]
        results = await asyncio.gather(
            *(
                read_facts(client, url, options, model_name, key)
                for client, url in zip(clients, options.urls, strict=True)
            ),
            return_exceptions=True,
        )
        for client in clients:
            await client.aclose()
        for result in results:
            if isinstance(result, BaseException) and not _is_trouble(result):
                raise result
        servers = [each for each in results if isinstance(each, ServerFacts)]
        troubles = "; ".join(str(each) for each in results if _is_trouble(each))
        if servers:
            for server in servers[1:]:
                check_alike(servers[0], server)
            if troubles:
                print_note(f"{troubles}. The run begins with the other servers")
            return servers
        now_s = time.monotonic()
        if now_s - started_s > options.engine_patience_s:
            raise ServerError(
                f"no server of --engine was reached for {options.engine_patience_s:g} s "
                f"(--engine-patience): {troubles}"
            )
        if noted_s == started_s or now_s - noted_s > NOTE_EVERY_S:
            print_note(f"waiting for a server: {troubles}")
            noted_s = now_s
        await asyncio.sleep(WAITING_S)


def check_alike(first: ServerFacts, other: ServerFacts) -> None:
    """Raise a UsageError if two servers would not give answers of one run."""
    for name in (each.name for each in fields(first) if each.name != "url"):
        values = [getattr(first, name), getattr(other, name)]
        if values[0] != values[1]:
            raise UsageError(
                f"the servers of --engine differ: the {name} of {first.url} is "
                f"{quote(str(values[0]), '')}, and of {other.url} "
                f"{quote(str(values[1]), '')}. Name servers that are alike"
            )


def _is_trouble(result: object) -> bool:
    return isinstance(result, ServerTroubleError)


async def _read_facts(
    client: Any, url: str, options: RemoteOptions, model_name: str | None, key: str
) -> ServerFacts:
    body = await _get(client, f"{url}/models", key, is_needed=True)
    entries = [each for each in body.get("data") or () if isinstance(each, dict)]
    entry = _choose_entry(url, entries, model_name)
    dialect = options.engine_api
    if dialect == "auto":
        dialect = DIALECT_OF_OWNER.get(str(entry.get("owned_by")), "openai")
    root = url.removesuffix("/v1")
    version = ""
    for path, name in VERSIONS.get(dialect, ()):
        body = {} if version else await _get(client, root + path, key)
        version = version or str(body.get(name, ""))
    kept = {name: entry[name] for name in sorted({*entry} - {*CHANGING_FIELDS})}
    return ServerFacts(url, str(entry["id"]), dialect, version, kept)


def _choose_entry(
    url: str, entries: list[dict[str, Any]], model_name: str | None
) -> dict[str, Any]:
    """Return the entry of the model that requests are for."""
    names = [str(each.get("id")) for each in entries]
    listed = ", ".join(names) or "none"
    if model_name is None:
        if len(entries) == 1:
            return entries[0]
        hint = "" if url.endswith("/v1") else ", or write /v1 behind the URL"
        raise UsageError(
            f"{url} lists the models {quote(listed, '')}. Name one with --model-name{hint}"
        )
    if names and model_name not in names:
        raise UsageError(
            f"{url} has no model {model_name!r}, but {quote(listed, '')}. Correct "
            "--model-name"
        )
    return entries[names.index(model_name)] if names else {"id": model_name}


async def _get(
    client: Any, url: str, key: str, *, is_needed: bool = False
) -> dict[str, Any]:
    """Return the JSON object at a URL; an empty one if the server has none there.

    Raises:
        ServerTroubleError: the server cannot be reached, or is in trouble.
        UsageError: it refuses the key, or redirects, and the object is needed.
    """
    httpx = import_httpx()
    body = bytearray()
    try:
        async with client.stream("GET", url, headers=make_headers(key)) as response:
            async for data in response.aiter_bytes():
                body += data
                if len(body) > MOST_BYTES:
                    raise ServerTroubleError(f"{url} sends more than a list of models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        words = quote(f"{type(error).__name__} {error}", key)
        raise ServerTroubleError(f"{url}: {words}") from None
    if key:
        body = bytearray(body.replace(key.encode(), b"[key]"))
    status = response.status_code
    if status not in (200, 404):
        verdict = make_verdict(url, status, dict(response.headers), bytes(body), key)
        if isinstance(verdict, ServerTroubleError):
            raise verdict
        if is_needed:
            raise UsageError(str(verdict))
    try:
        answer = orjson.loads(body) if status == 200 else {}
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) and is_needed:
        raise ServerTroubleError(f"{url} sent no JSON object")
    return answer if isinstance(answer, dict) else {}
