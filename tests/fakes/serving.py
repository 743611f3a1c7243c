"""A server whose answers are written down: for the page, which shows what comes."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from fminfer.server.asgi_app import make_page_routes

# spelling, probability, those of the alternatives
Token = tuple[str, float, dict[str, float]]
Chunk = tuple[str, list[Token]]  # text, tokens

ROUTE = "Question: How do you go from the attic to the den?\nAnswer:"
ANSWERS: dict[str, list[Chunk]] = {
    ROUTE: [
        (" south", [(" south", 0.97, {" south": 0.97, " east": 0.02})]),
        (" south", [(" south", 0.72, {" south": 0.72, " east": 0.2})]),
        (" east", [(" east", 0.31, {" south": 0.6, " east": 0.31})]),
        (" or", [(" or", 0.08, {".": 0.6, "1": 0.12, " or": 0.08})]),
        ("\n", [("\n", 0.01, {".": 0.9, "\n": 0.01})]),
    ],
    "markup": [
        ("<script>", [("<script>", 0.9, {"<script>": 0.9, "<b>": 0.1})]),
        (
            "alert(1)</script>",
            [("alert(1)</script>", 0.5, {"<img src=x onerror=alert(2)>": 0.3})],
        ),
        (
            "<img src=x onerror=alert(3)>",
            [("<img src=x onerror=alert(3)>", 0.5, {"&amp;": 0.3})],
        ),
    ],
    # As the engine sends them: text comes late or early, a character's pieces together;
    # the end's token has no text.
    "pieces": [
        ("a", [("a", 0.9, {"a": 0.9})]),
        ("", []),
        (
            " 🤗",
            [
                (r"bytes: \xf0\x9f", 0.5, {"b": 0.2}),
                (r"bytes:\xa4\x97", 0.5, {"c": 0.1}),
            ],
        ),
        ("", [("ST", 0.6, {"ST": 0.6})]),
        ("STone", [("one", 0.6, {"one": 0.6})]),
        (" of", []),
        ("", [(" of", 0.3, {" of": 0.3})]),
        ("\N{REPLACEMENT CHARACTER}", [(r"bytes:\xff", 0.02, {"d": 0.3})]),
        ("", [("<|endoftext|>", 0.99, {"<|endoftext|>": 0.99})]),
    ],
}


@dataclass(slots=True)
class Fake:
    """What a fake server does and what it was asked."""

    url: str = ""
    key: str | None = None
    has_chat_template: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0  # clients that closed the connection of an endless answer
    num_stats: int = 0


def _completion(chunk: Chunk, reason: str | None) -> dict[str, Any]:
    text, tokens = chunk
    logs = [
        {spelling: math.log(p) for spelling, p in others.items()}
        for _, _, others in tokens
    ]
    listed = {
        "tokens": [spelling for spelling, _, _ in tokens],
        "token_logprobs": [math.log(p) for _, p, _ in tokens],
        "top_logprobs": logs,
        "text_offset": [0 for _ in tokens],
    }
    return {"index": 0, "text": text, "logprobs": listed, "finish_reason": reason}


def _chat(chunk: Chunk, reason: str | None) -> dict[str, Any]:
    text, tokens = chunk

    def entry(spelling: str, p: float) -> dict[str, Any]:
        return {"token": spelling, "logprob": math.log(p), "bytes": None}

    listed = [
        entry(spelling, p)
        | {"top_logprobs": [entry(*other) for other in others.items()]}
        for spelling, p, others in tokens
    ]
    logprobs = {"content": listed, "refusal": None}
    return {
        "index": 0,
        "delta": {"content": text},
        "logprobs": logprobs,
        "finish_reason": reason,
    }


async def _tool_call() -> AsyncIterator[dict[str, Any]]:
    for index, part in enumerate(
        [{"name": "look_up", "arguments": ""}, {"arguments": '{"a": 1}'}]
    ):
        call = {"index": 0, "function": part} | ({"id": "c1"} if not index else {})
        yield {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    yield {"index": 0, "delta": {}, "finish_reason": "tool_calls"}


async def _choices(prompt: str, is_chat: bool) -> AsyncIterator[dict[str, Any]]:
    shape = _chat if is_chat else _completion
    if is_chat:
        yield {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
        }
    if prompt == "tools":
        async for choice in _tool_call():
            yield choice
        return
    for chunk in ANSWERS.get(prompt, []):
        yield shape(chunk, None)
        await asyncio.sleep(0.01)
    while prompt == "endless":
        yield shape((" on", [(" on", 0.5, {" on": 0.5})]), None)
        await asyncio.sleep(0.01)
    if prompt != "breaks":
        yield shape(("", []), "length" if prompt == ROUTE else "stop")


async def _events(fake: Fake, prompt: str, is_chat: bool) -> AsyncIterator[str]:
    def event(data: dict[str, Any]) -> str:
        return f"data: {json.dumps(data)}\n\n"

    yield ": waiting\n\n"
    try:
        async for choice in _choices(prompt, is_chat):
            yield event({"choices": [choice]})
    except asyncio.CancelledError:
        fake.num_left += 1
        raise
    if prompt == "breaks":
        yield event({"error": {"message": "a rank is gone: start the server again"}})
        return
    yield event({"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 5}})
    yield "data: [DONE]\n\n"


def _refuse(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


def fake_app(fake: Fake) -> FastAPI:
    """Return the app: the page's routes, and those that it calls."""
    app = FastAPI(docs_url=None, redoc_url=None)
    app.include_router(make_page_routes())

    def refusal(request: Request) -> Response | None:
        if (
            fake.key is None
            or request.headers.get("authorization") == f"Bearer {fake.key}"
        ):
            return None
        return _refuse("Give the server's API key as a bearer token", 401)

    async def answer(request: Request, is_chat: bool) -> Response:
        body = await request.json()
        if (refused := refusal(request)) is not None:
            return refused
        fake.bodies.append(body)
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if prompt == "too long":
            return _refuse(
                "maximum context length is 8 tokens, and this has <b>9</b>", 400
            )
        return StreamingResponse(
            _events(fake, prompt, is_chat), media_type="text/event-stream"
        )

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer(request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, is_chat=True)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        model = {
            "id": "fake",
            "max_model_len": 8,
            "has_chat_template": fake.has_chat_template,
        }
        return refusal(request) or JSONResponse({"object": "list", "data": [model]})

    @app.get("/stats")
    async def stats(request: Request) -> Response:
        fake.num_stats += 1
        rates = {"prompt_tokens_per_s": 120.0, "generation_tokens_per_s": 34.5}
        counts = {"num_running": 3, "num_waiting": 7, "kv_usage": 0.42, "uptime_s": 5.0}
        return refusal(request) or JSONResponse({"model": "fake"} | counts | rates)

    return app


@contextmanager
def serve_fake(**options: Any) -> Iterator[Fake]:
    """Serve a fake on a free port of this machine, in a thread."""
    fake = Fake(**options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            fake_app(fake), log_level="error", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join()
