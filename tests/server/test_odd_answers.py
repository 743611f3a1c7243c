"""Answers that once lacked something, or were of another request than the one that was sent."""

from __future__ import annotations

from typing import Any

import pytest

import fminfer
from tests.server.running import running
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"check_model": True})

PROMPTS: dict[str, Any] = {
    "prompt": [[5, 6, 7], [8, 9]],
    "max_tokens": 4,
    "n": 2,
    "seed": 1,
}
CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
    "n": 2,
    "seed": 1,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_tells_token_ids_if_they_are_asked_for(
    engine: fminfer.Engine, path: str
) -> None:
    """It ignored return_token_ids."""
    request = (CHAT if "chat" in path else PROMPTS) | {"return_token_ids": True}
    with running(engine) as server:
        whole = server.post(path, request).json["choices"]
        events = server.post(path, request | {"stream": True}).events
        plain = server.post(
            path, request | {"stream": True, "return_token_ids": None}
        ).events
    prompts: dict[int, list[int]] = {}
    drawn: dict[int, list[int]] = {choice["index"]: [] for choice in whole}
    for choice in (choice for event in events for choice in event["choices"]):
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts, "once for each choice"
            prompts[choice["index"]] = choice["prompt_token_ids"]
        drawn[choice["index"]] += choice.get("token_ids", [])
    assert prompts == {choice["index"]: choice["prompt_token_ids"] for choice in whole}
    assert drawn == {choice["index"]: choice["token_ids"] for choice in whole}
    assert not any(
        "token_ids" in choice for event in plain for choice in event["choices"]
    )


def test_a_stream_without_a_tokenizer_tells_token_ids() -> None:
    """It told nothing at all."""
    engine = fminfer.Engine(dtype="float32", skip_tokenizer_init=True)
    with running(engine) as server:
        events = server.post(
            "/v1/completions", PROMPTS | {"n": 1, "stream": True}
        ).events
    engine.close()
    ids = [
        id
        for event in events
        for choice in event["choices"]
        for id in choice["token_ids"]
    ]
    assert len(ids) == 8


def test_older_routes_check_the_model_too(engine: fminfer.Engine) -> None:
    with running(engine, served_model_names=("m1",)) as server:
        asked = {"prompt": "x", "max_new_tokens": 1}
        assert server.post("/generation", asked | {"model": "m2"}).status == 404
        assert server.post("/generation", asked | {"model": "m1"}).status == 200
        assert server.post("/generation", asked).status == 200
