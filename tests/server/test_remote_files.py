"""`fminfer run --engine` over `fminfer serve`: the README line, as without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.client.test_remote_job import run, save_lines
from tests.server.running import Running

README = Path(__file__).parents[2] / "README.md"
QUESTION = "Question: How do you go from the bathroom to the office?\nAnswer:"
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["den", "porch"]}},
    "required": ["room"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "room", "schema": SCHEMA}}
CHAT = [{"role": "user", "content": "How do you go from the den to the porch?"}]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
LINES: list[dict[str, Any]] = [
    {"prompt": QUESTION, "stop": "\n", **GREEDY},
    {"request": {"prompt": QUESTION, "logprobs": 2, **GREEDY}, "id": 7},
    {"prompt": [QUESTION, "Another: "], "n": 2, **GREEDY},
    {"prompt": QUESTION, "echo": True, "logprobs": 1, **GREEDY, "max_tokens": 0},
    {"prompt": "A room: ", "guided_choice": ["den", "porch"], **GREEDY},
    {"prompt": "As JSON: ", "response_format": JSON, **GREEDY, "max_tokens": 90},
    {"messages": CHAT, "logprobs": True, "top_logprobs": 1, **GREEDY},
    {"prompt": QUESTION, "seed": 3, "max_tokens": 8},
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": CHAT, **GREEDY},
    },
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": CHAT, "max_output_tokens": 8, "temperature": 0},
    },
]


def strip(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without times, and without what depends on what is cached."""
    result = record.get("result") or record["response"]["body"]
    for name in ("request_time", "created", "created_at", "model"):
        result.pop(name, None)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        result["usage"].pop(name, None)
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    return [strip(json.loads(line)) for line in path.read_text().splitlines()]


def test_the_line_of_the_readme_answers_as_a_run_without_a_server(
    server: Running, tmp_path: Path
) -> None:
    """Logprobs' tokens alone are spelled in another way."""
    line = re.search(
        r"`fminfer (run requests\.jsonl --engine \S+)`", README.read_text()
    )
    assert line is not None
    save_lines(tmp_path / "requests.jsonl", *LINES)
    words = line[1].replace("http://127.0.0.1:8000", server.url).split()
    status, _, err = run(*words[1:], cwd=tmp_path)
    assert status == 0, err
    elsewhere = read_records(tmp_path / "output_requests.jsonl")
    here = tmp_path / "here.jsonl"
    model = ("--model-name", server.engine.config.model or "demo")
    more = ("--token-format", "text", "--dtype", server.engine.facts.dtype)
    arguments = ("requests.jsonl", "--output", here, *model, *more)
    status, _, err = run(*arguments, cwd=tmp_path)
    assert status == 0, err
    for record, expected in zip(elsewhere, read_records(here), strict=True):
        assert record == expected
