"""`fminfer serve --engine`: files and batches whose lines another server answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fminfer
from fminfer.client.remote_options import RemoteOptions
from fminfer.core.config import EngineConfig
from fminfer.server.batch_engine import BatchEngine
from tests.forked import Forked, run_forked
from tests.server.batch_calls import (
    CHAT,
    QUESTION,
    batch_line,
    content,
    create,
    has_trouble,
    long_lines,
    texts_of,
    wait_for_end,
    wait_until,
)
from tests.server.running import Running, running, until

END_S = 60.0  # for a process that only has to end


@pytest.fixture
def door(server: Running, tmp_path: Path) -> Iterator[Running]:
    """A server of batches, which `server` answers."""
    options = RemoteOptions(engine=f"{server.url}/v1")
    engine: Any = BatchEngine.connect(EngineConfig(), options, lambda text: None)
    try:
        with running(engine, state=tmp_path / "state", api_keys=()) as door:
            yield door
    finally:
        engine.close()


def test_a_batch_has_what_the_server_answers(server: Running, door: Running) -> None:
    """Each line is answered once, in order; a wrong one costs itself."""
    prompts = [f"{number} {QUESTION}" for number in range(40)]
    lines = [batch_line(f"r{n}", prompt=text) for n, text in enumerate(prompts)]
    lines.insert(7, batch_line("wrong", max_tokens=-1))
    batch = wait_for_end(door, create(door, lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 41, "completed": 40, "failed": 1}

    texts = texts_of(door, batch)
    assert [*texts] == [f"r{n}" for n in range(40)], "the input's order"
    for number in (0, 39):
        fields = {"prompt": prompts[number], "max_tokens": 8, "temperature": 0}
        answer = server.post("/v1/completions", fields).json
        assert texts[f"r{number}"] == answer["choices"][0]["text"]
    (error,) = content(door, batch["error_file_id"])
    assert error["custom_id"] == "wrong" and "max_tokens" in json.dumps(error)
    assert batch["usage"]["output_tokens"] > 0


def test_a_batch_of_chats(server: Running, door: Running) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    lines = [batch_line("c", CHAT, messages=messages)]
    batch = wait_for_end(door, create(door, lines, endpoint=CHAT))
    (record,) = content(door, batch["output_file_id"])
    fields = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = server.post(CHAT, fields).json
    body = record["response"]["body"]
    assert body["object"] == "chat.completion"
    assert (
        body["choices"][0]["message"]["content"]
        == answer["choices"][0]["message"]["content"]
    )


def test_other_requests_are_told_where_to_go(server: Running, door: Running) -> None:
    """There is no route that would answer them, nor a page that sends them."""
    for path in ("/v1/completions", CHAT, "/v1/embeddings", "/tokenize", "/run/text"):
        answer = door.post(path, {"prompt": "A", "max_tokens": 1})
        assert answer.status == 404, path
        assert (
            "this server answers batches alone; send other requests to "
            f"{server.url}/v1" in answer.error["message"]
        )
    assert door.get("/health").status == 200
    assert door.get("/docs").status == 200
    assert door.get("/", {"Accept": "text/html"}).status == 404, "no page"
    paths = door.get("/openapi.json").json["paths"]
    assert "/v1/batches" in paths and "/v1/completions" not in paths


def test_it_says_what_it_serves(server: Running, door: Running) -> None:
    (model,) = door.get("/v1/models").json["data"]
    (theirs,) = server.get("/v1/models").json["data"]
    assert model["id"] == model["root"] == theirs["id"]
    wait_for_end(door, create(door, [batch_line("a")]))
    figures = door.get("/metrics").body.decode()
    name = f'model_name="{model["id"]}"'
    assert f'fminfer:batch_rows_total{{kind="answer",{name}}} 1.0' in figures
    drawn = re.search(r"vllm:generation_tokens_total\{.*\} (.*)", figures)
    assert drawn is not None and float(drawn[1]) > 0
    assert "weight_bytes{" not in figures and "kv_cache" not in figures
    assert door.get("/stats").json["model"] == model["id"]


@contextmanager
def serving(url: str, state: Path, *flags: str) -> Iterator[tuple[Forked, Running]]:
    """Start the command; give the process, and what tests call it with."""
    flags = ("--engine", f"{url}/v1", "--state", str(state), "--port", "0", *flags)
    process = Forked(["serve", *flags])
    try:
        until(
            lambda: "Ctrl-C" in process.said() or process.poll() is not None,
            "it serves",
        )
        match = re.search(r"Serving .* at (.*)\n", process.said())
        assert match is not None, process.said()
        thread: Any = SimpleNamespace(url=match[1])
        engine: Any = None
        yield process, Running(engine, thread)
    finally:
        process.kill()
        process.wait()


def test_batches_outlive_servers_that_are_gone(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """The process ends with the reason; the next one answers what is left."""
    lines = long_lines(60, 150)
    with running(engine) as server:
        port = server.address[1]
        url = server.url
        with serving(url, tmp_path, "--engine-patience", "2") as (process, door):
            batch = create(door, lines)
            wait_until(door, batch, lambda b: b["request_counts"]["completed"] > 3)
            server.thread.end()
            assert process.wait(END_S) == 1, process.said()
            assert "no server has answered anything for 2 s" in process.said()
    (journal,) = tmp_path.glob("batches/*/*.journal")
    num_kept = len(journal.read_bytes().splitlines()) - 1
    assert 3 < num_kept < 60
    with (
        running(engine, port=port),
        serving(url, tmp_path, "--engine-patience", "60") as (_, door),
    ):
        batch = wait_for_end(door, batch)
        assert batch["status"] == "completed" and not has_trouble(batch)
        assert [*texts_of(door, batch)] == [f"r{number}" for number in range(60)]


@pytest.mark.parametrize(
    "flags, reason",
    [
        ((), "give --state FOLDER, which keeps them"),
        (("--state", "s", "--dtype", "float32"), "--dtype is of a model"),
        (("--state", "s", "--world-size", "2"), "--world-size is of a model"),
        (("--state", "s", "--engine-api", "other"), "--engine-api"),
    ],
)
def test_flags_that_cannot_be(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    """Nothing is asked for before they are checked."""
    url = "http://127.0.0.1:9/v1"
    command = ["serve", "--port", "0", "--engine", url, *flags]
    done = run_forked(command, folder=tmp_path)
    assert done.returncode == 2 and reason in done.stderr
