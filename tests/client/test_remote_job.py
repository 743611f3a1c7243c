"""`fminfer run --engine` as users type it, over a stand-in in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.client.stand_in import StandIn

KEY = "sk-9876543210-secret"
ROOT = Path(__file__).parents[2]
PRICES = ("--price-in", "1", "--price-out", "2")


def start(
    *arguments: object, cwd: Path, command: str = "run", **env: str
) -> subprocess.Popen[str]:
    environ = {
        name: value for name, value in os.environ.items() if "FMINFER" not in name
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fminfer", command, *map(str, arguments)],
        cwd=cwd,
        env=environ | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *arguments: object, cwd: Path, command: str = "run", **env: str
) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of a command."""
    process = start(*arguments, cwd=cwd, command=command, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def save_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_if_there(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def make_lines(number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"text {n}", "max_tokens": 2, "temperature": 0}
        for n in range(number)
    ]


def read_texts(path: Path) -> list[str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["result"]["choices"][0]["text"] for record in records]


def test_lines_are_answered_in_their_order_and_wrong_ones_by_themselves(
    tmp_path: Path,
) -> None:
    lines = [*make_lines(50), {"prompt": "a", "temperature": 3}, *make_lines(3)]
    path = save_lines(
        tmp_path / "in.jsonl", *lines, {"prompt": "b", "decoder_prompt": "c"}
    )
    with StandIn("--service-s", "0.002") as server:
        status, _, err = run(path, "--engine", server.url, cwd=tmp_path)
        counts = server.read_counts()
    assert status == 3, err
    texts = [f"<text {n}>" for n in (*range(50), *range(3))]
    assert read_texts(tmp_path / "output_in.jsonl") == texts
    errors = (tmp_path / "output_in.errors.jsonl").read_text().splitlines()
    codes = [(json.loads(e)["line"], json.loads(e)["error"]["code"]) for e in errors]
    assert codes == [(51, "out_of_range"), (55, "unsupported_parameter")]
    assert counts["requests"] == 50, "equal lines are asked once, wrong ones never"
    assert "3 requests had the answer of an equal one" in err
    assert "not exact" in err and "vllm 1.0" in err and server.url in err


def test_a_run_brings_no_torch(tmp_path: Path) -> None:
    modules = (
        "fminfer.job.remote_answering, fminfer.cli.app, fminfer.client.remote_check"
    )
    program = (
        f"import {modules}, sys; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "set()\n"


def test_a_key_stands_in_no_file_and_in_no_message(tmp_path: Path) -> None:
    path = save_lines(
        tmp_path / "in.jsonl",
        *make_lines(8),
        {"prompt": "!echo-key!"},
        {"prompt": "!500!"},
    )
    more = ("--report", "report.html", "--stats", "stats.json", "-v")
    with StandIn("--key", KEY) as server:
        arguments = (path, "--engine", server.url, *more)
        process = start(*arguments, cwd=tmp_path, FMINFER_ENGINE_KEY=KEY)
        shown = [Path(f"/proc/{process.pid}/cmdline").read_text()]
        end_s = time.monotonic() + 60
        journal = tmp_path / "output_in.jsonl.journal"
        # the server's words, which had the key in them, are a record by then
        while time.monotonic() < end_s and "[key]" not in read_if_there(journal):
            time.sleep(0.1)
        shown += [read_if_there(each) for each in tmp_path.rglob("*") if each.is_file()]
        process.terminate()
        shown += process.communicate(timeout=60)
        shown += run(*arguments, cwd=tmp_path, FMINFER_ENGINE_KEY=f"{KEY}x")[1:]
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert {"output_in.status.json"} < {each.name for each in files}
    shown += [each.read_text(errors="replace") for each in files]
    assert any("[key]" in text for text in shown), "the server's words are shown"
    assert not [text for text in shown if KEY in text]


def test_costs_are_of_all_runs_and_a_limit_ends_one(tmp_path: Path) -> None:
    path = save_lines(tmp_path / "in.jsonl", *make_lines(400))
    with StandIn("--service-s", "0.01") as server:
        arguments = (path, "--engine", server.url, *PRICES, "--stats", "stats.json")
        limited = (*arguments, "--stop-at-cost", "0.0005")
        status, _, err = run(*limited, cwd=tmp_path)
        assert status == 75, err
        assert "--stop-at-cost is 0.0005" in err and "kept" in err
        num_before = server.read_counts()["requests"]
        assert 40 <= num_before < 400
        status, _, err = run(*limited, cwd=tmp_path)
        assert status == 75 and server.read_counts()["requests"] == num_before, err
        status, _, err = run(*arguments, "--stop-at-cost", "9", cwd=tmp_path)
        assert status == 0, err
        num_requests = server.read_counts()["requests"]
    assert num_requests == 400
    assert read_texts(tmp_path / "output_in.jsonl") == [
        f"<text {n}>" for n in range(400)
    ]
    cost = json.loads((tmp_path / "stats.json").read_text())["cost"]
    assert "all runs of these outputs" in cost and f"cost      {cost}" in err


def test_a_killed_run_and_a_killed_server_lose_nothing(tmp_path: Path) -> None:
    path = save_lines(tmp_path / "in.jsonl", *make_lines(300))
    with StandIn("--capacity", "4", "--service-s", "0.02") as server:
        arguments = (path, "--engine", server.url)
        for _ in range(3):
            process = start(*arguments, cwd=tmp_path)
            time.sleep(1.5)
            process.kill()
            process.communicate()
            server.kill()
            server.start()
        status, _, err = run(*arguments, cwd=tmp_path)
    assert status == 0, err
    assert read_texts(tmp_path / "output_in.jsonl") == [
        f"<text {n}>" for n in range(300)
    ]


def test_another_version_of_the_server_goes_on_with_no_ones_rows(
    tmp_path: Path,
) -> None:
    path = save_lines(tmp_path / "in.jsonl", *make_lines(4))
    with StandIn("--version", "1") as first:
        assert run(path, "--engine", first.url, cwd=tmp_path)[0] == 0
    with StandIn("--version", "1") as same:
        assert run(path, "--engine", same.url, cwd=tmp_path)[0] == 0
        assert same.read_counts()["requests"] == 0, "the URL may be another"
    with StandIn("--version", "2") as other:
        status, _, err = run(path, "--engine", other.url, cwd=tmp_path)
    assert status == 2 and "vllm 1" in err and "vllm 2" in err


def test_a_line_for_another_model_is_refused_unless_the_model_is_named(
    tmp_path: Path,
) -> None:
    lines = [{"prompt": "a", "model": "other"}, {"prompt": "b", "model": "stand-in"}]
    path = save_lines(tmp_path / "in.jsonl", *lines)
    with StandIn() as server:
        host = server.url.removesuffix("/v1")  # which is added
        status, _, err = run(path, "--engine", host, cwd=tmp_path)
        assert status == 3 and "1 answered, 1 in error" in err
        named = ("--model-name", "stand-in", "--output", "all.jsonl")
        status, _, err = run(path, "--engine", host, *named, cwd=tmp_path)
    assert status == 0 and "2 answered" in err


def test_a_run_goes_on_at_many_lines_that_are_refused_alike(tmp_path: Path) -> None:
    lines = [*make_lines(3), *[{"prompt": f"!400! {n}", "seed": n} for n in range(25)]]
    path = save_lines(tmp_path / "in.jsonl", *lines)
    with StandIn() as server:
        arguments = (path, "--engine", server.url)
        assert run(*arguments, "--limit", "3", cwd=tmp_path)[0] == 0
        status, _, err = run(*arguments, cwd=tmp_path)
    assert status == 3 and "25 in error (25 refused_by_server)" in err


def test_a_check_tries_each_set_of_fields_once(tmp_path: Path) -> None:
    seeded = [{"prompt": f"seed {n}", "seed": n} for n in range(5)]
    wrong = {"prompt": "a", "decoder_prompt": "b"}
    path = save_lines(tmp_path / "in.jsonl", *make_lines(5), *seeded, wrong)
    with StandIn() as server:
        arguments = (path, "--engine", server.url)
        status, out, err = run(*arguments, command="check", cwd=tmp_path)
        assert server.read_counts()["requests"] == 2
        assert status == 3 and "decoder_prompt" in out, err
        assert "2 requests" in out and "11, 1 wrong" in out
        status, out, _ = run(*arguments, "--json", command="check", cwd=tmp_path)
    report = json.loads(out)
    assert report["num_requests"] == 2 and len(report["errors"]) == 1
    assert [each["num_lines"] for each in report["sets"]] == [5, 5]


def test_labels_of_a_table_are_asked_without_probabilities(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n<b>\n")
    template = ("in.csv", "--raw", "--prompt-template", "{{ text }}")
    with StandIn() as server:
        arguments = (*template, "--engine", server.url)
        for command in ("run", "check"):
            more = ("--choices", "<a>,<b>")
            status, _, err = run(*arguments, *more, command=command, cwd=tmp_path)
            assert status == 2 and "vLLM does not tell" in err and "--field" in err
        choices = 'structured_outputs={"choice": ["<a>", "<b>"]}'
        status, _, err = run(*arguments, "--field", choices, cwd=tmp_path)
    assert status == 3 and "1 answered" in err
    error = json.loads((tmp_path / "output_in.errors.jsonl").read_text())
    assert error["line"] == 2 and error["error"]["code"] == "constraint_broken"


# What their documents list for both endpoints; any other field is refused here.
SGLANG = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}
SGLANG |= {"model", "stream", "stream_options", "prompt", "messages", "regex", "n"}
SGLANG |= {"json_schema", "response_format", "ebnf", "min_tokens", "no_stop_trim"}
OLLAMA = {"model", "stream", "stream_options", "prompt", "messages", "temperature"}
OLLAMA |= {"top_p", "max_tokens", "stop", "seed", "response_format"}


@pytest.mark.parametrize(
    "owner, fields, num_wrong", [("sglang", SGLANG, 0), ("library", OLLAMA, 2)]
)
def test_a_server_that_knows_only_documented_fields_gets_no_others(
    tmp_path: Path, owner: str, fields: set[str], num_wrong: int
) -> None:
    """What it has no name for is an error before anything is sent."""
    text = {"max_tokens": 4, "temperature": 0}
    lines: list[dict[str, Any]] = [
        {"prompt": "a", **text},
        {"messages": [{"role": "user", "content": "b"}], **text},
        {"prompt": "c", "top_k": 3, "include_stop_str_in_output": True},
        {"prompt": "d", "guided_choice": ["<d>", "e"], **text},
    ]
    path = save_lines(tmp_path / "in.jsonl", *lines)
    with StandIn("--owned-by", owner, "--fields", ",".join(sorted(fields))) as server:
        status, _, err = run(path, "--engine", server.url, cwd=tmp_path)
        assert server.read_counts()["requests"] == len(lines) - num_wrong
    assert f"{len(lines) - num_wrong} answered, {num_wrong} in error" in err
    assert status == (3 if num_wrong else 0) and "refused_by_server" not in err


@pytest.mark.parametrize("name", ["in.jsonl", "-"])
def test_answers_may_go_to_stdout(tmp_path: Path, name: str) -> None:
    path = save_lines(tmp_path / "in.jsonl", *make_lines(6))
    with StandIn("--service-s", "0.01") as server:
        command = [sys.executable, "-m", "fminfer", "run", "-q", name, "--output", "-"]
        out = subprocess.check_output(
            [*command, "--engine", server.url],
            cwd=tmp_path,
            input=path.read_text(),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
    texts = [
        json.loads(line)["result"]["choices"][0]["text"] for line in out.splitlines()
    ]
    assert texts == [f"<text {n}>" for n in range(6)]
