"""Requests for servers elsewhere, for tests."""

from __future__ import annotations

import json
from typing import Any

from fminfer.client.remote_request import RemoteRequest
from fminfer.contract.endpoints import DRAWING_ENDPOINTS, Endpoint
from fminfer.contract.request import RequestParams, VectorSpec, VectorWish
from fminfer.text.encoded_prompt import EncodedPrompt


def make_request(text: str, endpoint: Endpoint = "completions") -> RemoteRequest:
    fields: dict[str, Any] = {"prompt": text, "max_tokens": 4}
    if endpoint == "chat":
        fields = {"messages": [{"role": "user", "content": text}]}
    elif endpoint != "completions":
        fields = {"input": text}
    kinds: dict[str, Any] = {"completions": "openai"}
    return RemoteRequest(
        params=RequestParams(),
        kind=kinds.get(endpoint, endpoint),
        prompts=[EncodedPrompt([*text.encode()], text, [])],
        vectors=None if endpoint in DRAWING_ENDPOINTS else VectorWish(VectorSpec(1)),
        endpoint=endpoint,
        body=json.dumps(fields).encode(),
    )
