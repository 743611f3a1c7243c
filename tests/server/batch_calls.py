"""Small calls of `/v1/files` and `/v1/batches`, and lines to send."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.server.running import Answer, Running

Fields = dict[str, Any]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
QUESTION = "Question: How do you go from the den to the porch?\nAnswer:"
BOUNDARY = "aBoundary"
WAIT_S = 60.0
OVER = ("completed", "failed", "expired", "cancelled")


class Clock:
    """The time of files and batches, which tests can put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def batch_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    """Return a line; without other fields it asks the demo model the way."""
    if not body.keys() & {"prompt", "messages"}:
        body["prompt"] = QUESTION
    body = {"max_tokens": 8, "temperature": 0} | body
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode()


def long_lines(num: int, num_tokens: int = 200) -> list[bytes]:
    """Return lines that take a while."""
    return [
        batch_line(
            f"r{n}", prompt=f"{n} {QUESTION}", max_tokens=num_tokens, ignore_eos=True
        )
        for n in range(num)
    ]


def form_of(
    data: bytes, filename: str = "in.jsonl", purpose: str = "batch"
) -> tuple[bytes, dict[str, str]]:
    """Return an upload's body and its headers."""
    name = filename.replace('"', "%22")
    body = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return body + data + f"\r\n--{BOUNDARY}--\r\n".encode(), headers


def try_upload(
    server: Running, data: bytes, headers: dict[str, str] | None = None, **form: str
) -> Answer:
    """Upload bytes, and return what came back."""
    body, own = form_of(data, **form)
    return server.call("POST", "/v1/files", body, own | (headers or {}))


def upload(
    server: Running, lines: list[bytes], headers: dict[str, str] | None = None
) -> str:
    """Upload lines; return the file's id."""
    answer = try_upload(server, b"\n".join(lines) + b"\n", headers)
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def create(
    server: Running,
    lines: list[bytes],
    headers: dict[str, str] | None = None,
    *,
    endpoint: str = COMPLETIONS,
    window: str = "24h",
) -> Fields:
    """Upload lines and start a batch of them."""
    wish = {"endpoint": endpoint, "completion_window": window}
    wish["input_file_id"] = upload(server, lines, headers)
    answer = server.post("/v1/batches", wish, headers)
    assert answer.status == 200, answer.body
    batch: Fields = answer.json
    return batch


def get(
    server: Running, batch: Fields, headers: dict[str, str] | None = None
) -> Fields:
    """Return a batch as it is now."""
    answer = server.get(f"/v1/batches/{batch['id']}", headers)
    assert answer.status == 200, answer.body
    found: Fields = answer.json
    return found


def wait_until(
    server: Running, batch: Fields, is_so: Callable[[Fields], bool]
) -> Fields:
    """Ask until something is so of a batch."""
    deadline = time.monotonic() + WAIT_S
    while not is_so(found := get(server, batch)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def has_trouble(batch: Fields) -> bool:
    return batch["errors"] is not None


def wait_for_end(server: Running, batch: Fields) -> Fields:
    """Ask until a batch is over."""
    return wait_until(server, batch, lambda found: found["status"] in OVER)


def content(server: Running, file_id: str | None) -> list[Fields]:
    """Return the lines of a file; None: there is no such file, and no line."""
    if file_id is None:
        return []
    answer = server.get(f"/v1/files/{file_id}/content")
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


def texts_of(server: Running, batch: Fields) -> dict[str, str]:
    """Return the text of each answer, by custom_id; no id is there twice."""
    records = content(server, batch["output_file_id"])
    found = {
        r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records
    }
    assert len(found) == len(records)
    return found
