"""LiteLLM's functions for files and batches; the program and curl's lines of docs/batches.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.batch_calls import COMPLETIONS, batch_line, wait_for_end
from tests.server.running import Running
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 8}, has_state=True)


def test_litellm(litellm: Any, server: Running, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(batch_line(f"r{n}") for n in range(3)))
    to_server: dict[str, Any] = {
        "custom_llm_provider": "openai",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
    }
    file = litellm.create_file(file=path.open("rb"), purpose="batch", **to_server)
    created: Any = litellm.create_batch(
        completion_window="24h",
        endpoint=COMPLETIONS,
        input_file_id=file.id,
        metadata={"name": "value"},
        **to_server,
    )
    for _ in range(1000):
        batch: Any = litellm.retrieve_batch(batch_id=created.id, **to_server)
        if batch.status == "completed":
            break
        time.sleep(0.02)
    assert batch.status == "completed" and batch.metadata == {"name": "value"}
    answer: Any = litellm.file_content(file_id=batch.output_file_id, **to_server)
    records = [json.loads(line) for line in answer.content.splitlines()]
    assert [record["custom_id"] for record in records] == ["r0", "r1", "r2"]
    listed: Any = litellm.list_batches(limit=10, **to_server)
    assert [each.id for each in listed.data] == [created.id]


def blocks() -> list[str]:
    """Return the documentation's blocks of code."""
    text = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
    return text.split("```")[1::2]


def test_the_program_of_the_documentation(
    server: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fetched the output of a batch that was not over, of which there is none."""
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_bytes(batch_line("good") + b"\nno JSON\n")
    (program,) = [
        block.removeprefix("python") for block in blocks() if "import OpenAI" in block
    ]
    exec(
        compile(
            program.replace("http://127.0.0.1:8000", server.url), "batches.md", "exec"
        ),
        {},
    )
    printed = capsys.readouterr().out
    assert (
        printed.startswith("completed")
        and '"good"' in printed
        and '"invalid_json"' in printed
    )


def curl_lines() -> list[str]:
    """Return the lines of the documentation's block that begins with curl's upload."""
    block = next(b for b in blocks() if "curl" in b)
    lines = [line for line in block.splitlines()[1:] if line.strip()]
    assert len(lines) == 5 and all("curl" in line for line in lines)
    return lines


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_lines_of_the_documentation(server: Running, tmp_path: Path) -> None:
    upload, create, look, fetch, cancel = curl_lines()
    (tmp_path / "requests.jsonl").write_bytes(batch_line("a"))

    def run(line: str, **ids: str) -> str:
        line = line.replace("http://127.0.0.1:8000", server.url)
        for name, value in ids.items():
            line = line.replace(f"${name}", value)
        command = ["bash", "-c", line]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True
        ).stdout.decode()

    file = json.loads(run(upload))
    batch = json.loads(run(create, FILE=file["id"]))
    wait_for_end(server, batch)
    batch = json.loads(run(look, BATCH=batch["id"]))
    assert batch["status"] == "completed"
    record = json.loads(run(fetch, OUTPUT=batch["output_file_id"]))
    assert record["custom_id"] == "a"
    assert json.loads(run(cancel, BATCH=batch["id"]))["error"]["code"] == "batch_over"
