"""The Batch API's program of OpenAI's documentation, with openai-python and another base_url."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

import fminfer
from tests.conftest import run_files
from tests.server.answers import rounded
from tests.server.batch_calls import CHAT, COMPLETIONS, batch_line
from tests.server.running import Running
from tests.server.server_needs import needs_server
from tests.server.test_chat_over_http import CHATS
from tests.server.test_completions import REQUESTS

pytestmark = needs_server(engine={"max_rows": 16}, has_state=True)

OVER = ("completed", "failed", "expired", "cancelled")


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    for _ in range(3000):
        if (batch := client.batches.retrieve(batch.id)).status in OVER:
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def test_the_program_of_the_documentation(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """Its calls are as documented; only the model's name is another."""
    path = tmp_path / "batchinput.jsonl"
    system = {"role": "system", "content": "You are a helpful assistant."}
    user = {"role": "user", "content": "Hello world!"}
    body = {"model": "gpt-3.5-turbo-0125", "messages": [system, user], "max_tokens": 20}
    with path.open("w") as file:
        for number in (1, 2):
            line = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": CHAT,
                "body": body,
            }
            file.write(json.dumps(line) + "\n")

    batch_input_file = client.files.create(file=path.open("rb"), purpose="batch")
    created = client.batches.create(
        input_file_id=batch_input_file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"description": "nightly eval job"},
    )
    batch = wait(client, created)

    assert (
        batch_input_file.filename == path.name and batch_input_file.purpose == "batch"
    )
    assert batch_input_file.bytes == path.stat().st_size
    assert (
        batch.status == "completed"
        and batch.errors is None
        and batch.error_file_id is None
    )
    assert batch.metadata == {"description": "nightly eval job"}
    counts = batch.request_counts
    usage = batch.usage
    assert counts is not None and usage is not None
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
    assert batch.expires_at == batch.created_at + 24 * 3600
    times = batch.in_progress_at, batch.finalizing_at, batch.completed_at
    assert all(each is not None and each >= batch.created_at for each in times)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    text = client.files.content(output.id).text
    assert output.purpose == "batch_output" and output.bytes == len(text.encode())
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["custom_id"] for record in records] == ["request-1", "request-2"]
    for record in records:
        assert record["error"] is None and record["response"]["status_code"] == 200
        body = record["response"]["body"]
        assert (
            body["object"] == "chat.completion"
            and body["model"] == "gpt-3.5-turbo-0125"
        )
        assert body["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(("url", "requests"), [(COMPLETIONS, REQUESTS), (CHAT, CHATS)])
def test_the_output_is_that_of_a_file_run(
    client: openai.OpenAI,
    url: str,
    requests: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Texts, logprobs, ids, order, the errors file: all but the time at which a run began.

    Equal lines without a seed draw by their number in the file, in a batch as in a run.
    """
    unseeded = {"prompt": [40, 41, 42], "max_tokens": 6, "logprobs": 2}
    if url == CHAT:
        unseeded = {"messages": CHATS[0]["messages"], "max_tokens": 6}
    bodies = [*requests, unseeded, unseeded, {"prompt": 5}, unseeded]
    lines = [batch_line(f"r{n}", url, **body) for n, body in enumerate(bodies)]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([*lines, lines[0]]))
    engine = fminfer.Engine(dtype="float32", max_rows=16)
    try:
        run_files(engine, [source], [tmp_path / "out.jsonl"])
    finally:
        engine.close()

    file = client.files.create(file=source, purpose="batch")
    batch = wait(
        client,
        client.batches.create(
            input_file_id=file.id,
            endpoint=url,
            completion_window="24h",  # type: ignore[arg-type]
        ),
    )
    assert batch.output_file_id is not None and batch.error_file_id is not None
    answers = client.files.content(batch.output_file_id).text
    assert plain(answers) == plain((tmp_path / "out.jsonl").read_text())
    assert len(plain(answers)) >= len(requests)
    errors = client.files.content(batch.error_file_id).text
    of_run = (tmp_path / "out.errors.jsonl").read_text()
    assert of_run.endswith(f',"line":{len(lines) + 1}}}\n'), (
        "OpenAI's form has no number"
    )
    assert errors == re.sub(r',"line":\d+\}$', "}", of_run, flags=re.M)
    assert "duplicate_custom_id" in errors


def plain(text: str) -> list[Any]:
    found = []
    for line in text.splitlines():
        record = json.loads(line)
        del record["response"]["body"]["created"]
        # What is cached depends on what ran before.
        del record["response"]["body"]["usage"]["prompt_tokens_details"]
        found.append(rounded(record))
    return found


def test_lists_come_in_pages(client: openai.OpenAI) -> None:
    files = [
        client.files.create(file=(f"{n}.jsonl", batch_line("a")), purpose="batch")
        for n in range(5)
    ]
    newest = [file.id for file in reversed(files)]
    first = client.files.list(limit=2, purpose="batch")
    assert [file.id for file in first.data] == newest[:2] and first.has_more
    second = client.files.list(limit=2, after=newest[1])
    assert [file.id for file in second.data] == newest[2:4]
    assert [file.id for file in client.files.list(limit=2)][:5] == newest, (
        "by pages of two"
    )
    oldest = client.files.list(order="asc", limit=100, purpose="batch").data
    assert [file.id for file in oldest][-5:] == newest[::-1]
    batches = [
        client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="2h"
        )
        for file in files[:3]
    ]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [batches[2].id, batches[1].id]
    assert page.has_more
    assert [b.id for b in client.batches.list(limit=2)][:3] == [
        b.id for b in batches[::-1]
    ]
    for batch in batches:
        assert wait(client, batch).status == "completed"


def test_files_are_deleted(client: openai.OpenAI, server: Running) -> None:
    file = client.files.create(file=("a.jsonl", batch_line("a")), purpose="batch")
    batch = wait(
        client,
        client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="7d"
        ),
    )
    assert batch.output_file_id is not None
    for file_id in (file.id, batch.output_file_id):
        path = server.batches.require_bytes(file_id, "")
        assert client.files.delete(file_id).deleted and not path.exists()
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(file_id)
    assert client.batches.retrieve(batch.id).status == "completed"


def test_cancel(client: openai.OpenAI) -> None:
    line = batch_line("a", prompt=[40, 41], max_tokens=400, ignore_eos=True)
    lines = [line.replace(b'"a"', b'"%d"' % n) for n in range(300)]
    file = client.files.create(file=("a.jsonl", b"\n".join(lines)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
    )
    told = client.batches.cancel(batch.id)
    assert told.status in ("cancelling", "cancelled") and told.cancelling_at is not None
    batch = wait(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    assert batch.completed_at is None
    assert client.batches.cancel(batch.id).status == "cancelled"
