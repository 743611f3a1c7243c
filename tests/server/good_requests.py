"""Requests that a server must answer right, whatever goes on beside them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

from fminfer import Engine

from .raw_http import Wire, connect, read_events, write_chunked, write_post

PATH = "/v1/completions"
NUM_DIFFERENT = 48
WAYS = ("plain", "streamed", "chunked", "slow sender", "slow reader", "kept connection")


@dataclass(slots=True, frozen=True)
class Good:
    """A request, and the choices that an engine without a server gives it."""

    fields: dict[str, Any]
    choices: list[dict[str, Any]]


def make_fields(rng: random.Random) -> dict[str, Any]:
    """Return a request whose answer must repeat: it is greedy, or has a seed."""
    if rng.random() < 0.3:
        prompt: Any = [rng.randrange(1, 400) for _ in range(rng.randint(1, 200))]
    else:
        prompt = " ".join(
            rng.choice(["the", "Question:", "é", "42", "\n"]) for _ in range(20)
        )
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.3:
        fields["temperature"] = 0
    else:
        fields |= {
            "seed": rng.randrange(2**31),
            "temperature": 0.8,
            "n": rng.randint(1, 3),
        }
    if rng.random() < 0.3:
        fields["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        fields["stop"] = [rng.choice("eaout")]
    return fields


def make_good(seed: int, dtype: str) -> list[Good]:
    """Return requests with their answers, from the demo model."""
    rng = random.Random(seed)
    asked = [make_fields(rng) for _ in range(NUM_DIFFERENT)]
    engine = Engine(dtype=dtype, token_format="text")  # as servers spell tokens
    records = sorted(engine.run(asked), key=lambda record: record.line.number)
    engine.close()
    found = [record.to_dict()["result"]["choices"] for record in records]
    return [Good(fields, choices) for fields, choices in zip(asked, found, strict=True)]


async def ask_good(port: int, good: Good, way: str, rng: random.Random) -> None:
    """Ask in one of the ways.

    Raises:
        AssertionError: the answer is not the engine's.
    """
    is_streamed = way in ("streamed", "slow reader")
    fields = good.fields | {"stream": is_streamed}
    body = json.dumps(fields).encode()
    async with connect(port) as wire:
        for _ in range(3 if way == "kept connection" else 1):
            await _send(wire, body, way, rng)
            if way == "slow reader":
                await asyncio.sleep(rng.uniform(0, 0.5))
            response = await wire.receive()
            assert response.status == 200, f"{response.status} {response.body[:300]!r}"
            if is_streamed:
                found = join_deltas(read_events(response.body))
            else:
                found = response.json["choices"]
            check_choices(good.choices, found)


async def _send(wire: Wire, body: bytes, way: str, rng: random.Random) -> None:
    whole = write_post(PATH, body)
    if way == "chunked":
        middle = rng.randrange(1, len(body))
        whole = write_chunked(PATH, [body[:middle], body[middle:]])
    if way != "slow sender":
        await wire.send(whole)
        return
    cuts = sorted(rng.sample(range(1, len(whole)), 6))
    for first, last in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        await wire.send(whole[first:last])
        await asyncio.sleep(rng.uniform(0, 0.1))


def join_deltas(events: list[Any]) -> list[dict[str, Any]]:
    """Return the choices that a stream's events make together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "error" not in event, event
        for delta in event["choices"]:
            choice = found.setdefault(delta["index"], {"text": "", "logprobs": None})
            choice["text"] += delta["text"]
            choice["finish_reason"] = delta["finish_reason"]
            for name, values in (delta["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values or [])
    return [found[index] for index in sorted(found)]


def check_choices(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Compare an answer with the engine's.

    Raises:
        AssertionError: it is another one.
    """
    for name in ("text", "finish_reason"):
        ours = [c[name] for c in found]
        theirs = [c[name] for c in expected]
        assert ours == theirs, f"{name} is {ours}, not {theirs}"
    for one, other in zip(found, expected, strict=True):
        spelled = one["logprobs"] or {}
        wanted = other.get("logprobs") or {}
        told = f"{spelled} is not {wanted}"
        assert spelled.get("tokens") == wanted.get("tokens"), told
        numbers = (side.get("token_logprobs", []) for side in (spelled, wanted))
        assert all(abs(a - b) < 1e-3 for a, b in zip(*numbers, strict=True)), told
