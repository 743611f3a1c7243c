"""Clients that leave before they have their answer, or never read it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from typing import Any

from .good_requests import PATH
from .raw_http import HOST, connect, write_post

WAYS = ("at once", "while it waits", "in the stream", "in the body", "half closed")


def make_long(rng: random.Random) -> dict[str, Any]:
    """Return a request that runs for a while."""
    prompt = [rng.randrange(1, 400) for _ in range(rng.randint(1, 300))]
    return {"prompt": prompt, "max_tokens": rng.randint(100, 700), "ignore_eos": True}


async def leave(port: int, way: str, rng: random.Random) -> None:
    """Ask, and leave at a moment that the way and chance say."""
    fields = make_long(rng) | {"stream": way == "in the stream" or rng.random() < 0.5}
    data = write_post(PATH, json.dumps(fields).encode())
    async with connect(port) as wire:
        if way == "in the body":
            await wire.send(data[: rng.randrange(1, len(data))])
            await asyncio.sleep(rng.uniform(0, 0.05))
            return
        await wire.send(data)
        if way == "while it waits":
            await asyncio.sleep(rng.uniform(0, 0.1))
        elif way == "half closed":
            wire.writer.write_eof()
            await asyncio.sleep(rng.uniform(0, 0.05))
        elif way == "in the stream":
            with contextlib.suppress(asyncio.TimeoutError, asyncio.IncompleteReadError):
                wanted = rng.randrange(1, 5000)
                await asyncio.wait_for(
                    wire.reader.readexactly(wanted), rng.uniform(0.05, 1)
                )


def open_unread(port: int, rng: random.Random) -> socket.socket:
    """Ask for a long stream on a connection that nobody reads, and return it open."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    wire.connect((HOST, port))
    fields = make_long(rng) | {"stream": True, "logprobs": 5, "n": 4, "max_tokens": 700}
    wire.sendall(write_post(PATH, json.dumps(fields).encode()))
    return wire
