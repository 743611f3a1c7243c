"""Wrong fields of thoughts are refused alike in files, over HTTP and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fminfer
from tests.server.batch_calls import CHAT, content, create, wait_for_end
from tests.server.running import running
from tests.server.server_needs import needs_server

pytestmark = needs_server(has_state=True)

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
}
PAST: dict[str, Any] = {"role": "assistant", "content": "Yes", "reasoning": []}
BUDGET = "thinking_token_budget"
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": ({BUDGET: "a"}, "invalid_type", BUDGET),
    "negative": ({BUDGET: -2}, "out_of_range", BUDGET),
    "fraction": ({BUDGET: 1.5}, "invalid_type", BUDGET),
    "yes": ({BUDGET: True}, "invalid_type", BUDGET),
    "too large": ({BUDGET: 12}, "out_of_range", BUDGET),
    "number": ({"include_reasoning": 3}, "invalid_type", "include_reasoning"),
    "list": (
        {"messages": [*HELLO["messages"], PAST, *HELLO["messages"]]},
        "invalid_type",
        "messages[1].reasoning",
    ),
}
TEMPLATES = {
    "thinks": "{{ messages[0].content }}{{ messages[-1].reasoning }}<think>",
    "has no tags": "{{ messages[0].content }}{{ messages[-1].reasoning }}",
}


def answer_everywhere(
    wrong: dict[str, dict[str, Any]], template: str, folder: Path
) -> dict[str, list[tuple[str, str, str]]]:
    """Return code, field and message of each error: of a file, a server, and a batch."""
    file = folder / "template.jinja"
    file.write_text(template)
    bodies = {name: HELLO | fields for name, fields in wrong.items()}
    lines = [
        json.dumps(
            {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
        ).encode()
        for name, body in bodies.items()
    ]
    with fminfer.Engine(dtype="float32", chat_template=str(file)) as engine:
        records = sorted(
            engine.run([*bodies.values()]), key=lambda record: record.line.number
        )
        errors = [record.to_dict()["error"] for record in records]
        with running(engine, state=folder / "state") as server:
            answers = [server.post(CHAT, body) for body in bodies.values()]
            streams = [
                server.post(CHAT, body | {"stream": True}) for body in bodies.values()
            ]
            assert {answer.status for answer in (*answers, *streams)} == {400}
            batch = wait_for_end(server, create(server, lines, endpoint=CHAT))
            rows = content(server, batch["error_file_id"])
    rows.sort(key=lambda row: [*bodies].index(row["custom_id"]))
    found = {
        "file": errors,
        "server": [answer.error for answer in answers],
        "stream": [answer.error for answer in streams],
        "batch": [row["response"]["body"]["error"] for row in rows],
    }
    return {
        place: [(each["code"], each["param"], each["message"]) for each in errors]
        for place, errors in found.items()
    }


def check_alike(found: dict[str, list[tuple[str, str, str]]]) -> list[tuple[str, str]]:
    """See that all places say the same; return codes and fields."""
    expected = found["file"]
    assert found == dict.fromkeys(found, expected)
    return [(code, field) for code, field, _ in expected]


def test_wrong_fields_of_a_model_that_thinks(tmp_path: Path) -> None:
    wrong = {name: fields for name, (fields, _, _) in WRONG.items()}
    found = answer_everywhere(wrong, TEMPLATES["thinks"], tmp_path)
    assert check_alike(found) == [(code, field) for _, code, field in WRONG.values()]


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_for_a_model_without_tags(budget: int, tmp_path: Path) -> None:
    wrong = {"budget": {BUDGET: budget}}
    found = answer_everywhere(wrong, TEMPLATES["has no tags"], tmp_path)
    assert check_alike(found) == [("unsupported_parameter", BUDGET)]
    assert "--reasoning-parser" in found["file"][0][2]
