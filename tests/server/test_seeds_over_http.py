"""Lines of curl that users of older servers type, and what comes back: that of a file run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.server.answers import answer_file
from tests.server.running import Running

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl is not installed"
)

QUANTUM = "However, there are still immense benefits to learning quantum computing."
QUESTION = "Question: How do you go from the porch to the den?\nAnswer:"
JSON = ("-H", "Content-Type: application/json")
TEST_JSON: dict[str, Any] = {
    "prompt": QUANTUM,
    "top_p": 0.90,
    "top_k": 40,
    "max_new_tokens": 60,
}
Expected = dict[str, list[str]]


def echoed(prompt: str | list[str], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "echo": True, **fields}


FILE: dict[str, dict[str, Any]] = {
    "sampled": echoed(QUANTUM, 60, top_p=0.9, top_k=40, seed=11),
    "greedy": echoed(QUESTION, 64, temperature=0),
    "short": echoed(QUESTION, 7, temperature=0),
    "tempered": echoed(QUESTION, 12, temperature=1.5, seed=2),
    "two": {"prompt": [QUESTION, "den"], "max_tokens": 10, "temperature": 0},
    "several": {"prompt": QUANTUM, "max_tokens": 10, "seed": 3, "n": 2, "top_p": 0.8},
    "whole": echoed(QUESTION, 4, seed=3),
}


@pytest.fixture(scope="module")
def expected() -> Expected:
    """The texts of a file's answers."""
    bodies = answer_file(
        [("/v1/completions", body) for body in FILE.values()], dtype="float32"
    )
    texts = [[choice["text"] for choice in body["choices"]] for body in bodies]
    return dict(zip(FILE, texts, strict=True))


def curl(server: Running, path: str, *arguments: str) -> Any:
    """Call curl, and return the JSON of a response that is a success."""
    command = ["curl", "-sS", "--fail-with-body", *arguments, f"{server.url}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    return curl(server, path, "-X", "POST", *JSON, "-d", json.dumps(body))


def test_bloom_with_the_file_of_its_readme(
    server: Running, expected: Expected, tmp_path: Path
) -> None:
    """Sampled, since top_p and top_k are sent; a seed repeats it, and without one it differs."""
    (tmp_path / "test.json").write_text(json.dumps(TEST_JSON, indent=4))
    line = ("-X", "POST", *JSON, "-d", f"@{tmp_path / 'test.json'}")
    found = [curl(server, "/generation", *line) for _ in range(2)]
    assert all(
        set(each) == {"text"} and each["text"].startswith(QUANTUM) for each in found
    )
    assert found[0] != found[1]
    seeded = post(server, "/generation", TEST_JSON | {"seed": 11})
    assert seeded == {"text": expected["sampled"][0]}


def test_opt_with_max_tokens(server: Running, expected: Expected) -> None:
    assert post(server, "/generation", {"prompt": QUESTION}) == {
        "text": expected["greedy"][0]
    }
    short = {"prompt": QUESTION, "max_tokens": 7}
    assert post(server, "/generation", short) == {"text": expected["short"][0]}
    tempered = {"prompt": QUESTION, "max_tokens": 12, "temperature": 1.5, "seed": 2}
    assert post(server, "/generation", tempered) == {"text": expected["tempered"][0]}


def test_the_latency_server(server: Running, expected: Expected) -> None:
    asked: dict[str, Any] = {
        "inputs": [QUESTION, "den"],
        "parameters": {"do_sample": False},
    }
    assert post(server, "/", asked) == expected["two"]
    asked["inputs"] = QUESTION
    assert post(server, "/", asked) == expected["two"][:1]
    several = {"num_return_sequences": 2, "seed": 3, "top_p": 0.8}
    assert (
        post(server, "/", {"inputs": QUANTUM, "parameters": several})
        == expected["several"]
    )
    whole = {
        "return_full_text": True,
        "max_new_tokens": 4,
        "seed": 3,
        "temperature": 1.0,
    }
    assert (
        post(server, "/", {"inputs": QUESTION, "parameters": whole})
        == expected["whole"]
    )
    sampled = {tuple(post(server, "/", {"inputs": QUANTUM})) for _ in range(3)}
    assert len(sampled) == 3


def run_of(server: Running, text: str, most: int) -> list[str]:
    """Return the file's answer to a text, by a server that was asked for tokens in all."""
    count = server.post("/tokenize", {"prompt": text}).json["count"]
    body = echoed(text, most - count, temperature=0)
    found = server.post("/v1/completions", body).json
    return [choice["text"] for choice in found["choices"]]


def test_gpt2_as_its_readme_asks_it(server: Running) -> None:
    line = ("-X", "GET", "-H", "accept: application/json")
    found = curl(server, "/run_hf_gpt2/I%20do%20not?max_seq_length=16", *line)
    (body,) = answer_file(
        [("/v1/completions", echoed("I do not", 16 - 5, temperature=0))],
        dtype="float32",
    )
    assert server.post("/tokenize", {"prompt": "I do not"}).json["count"] == 5
    assert found == [body["choices"][0]["text"]] == run_of(server, "I do not", 16)
    assert curl(server, "/run/I%20do%20not?max_seq_length=16") == found
    assert curl(server, "/run_gpt/I%20do%20not") == run_of(server, "I do not", 64)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("north/south", "north/south"),
        ("north%2Fsouth", "north/south"),
        ("north%252Fsouth", "north%2Fsouth"),
        ("/north//", "/north//"),
        ("a/../b/./c", "a/../b/./c"),
        (quote("Wörter, 東 🙂"), "Wörter, 東 🙂"),
        (quote("why? #1 & 2+2=4;\n"), "why? #1 & 2+2=4;\n"),
        (quote(QUESTION), QUESTION),
        ("run_b/c", "run_b/c"),
    ],
)
def test_any_text_can_stand_in_a_path(server: Running, path: str, text: str) -> None:
    """Lines of it, too: a text with a line break was not found, and one at the end was lost."""
    for route in ("/run/", "/run_opt.125m-x/"):
        found = curl(server, f"{route}{path}?max_seq_length=40", "--path-as-is")
        assert found == run_of(server, text, 40) and found[0].startswith(text)


def test_a_path_that_is_no_text(server: Running) -> None:
    """The bytes of a broken character were replaced, and answered without a word."""
    answer = server.get("/run/caf%E9")
    assert answer.status == 400 and answer.error["code"] == "invalid_utf8"
    assert "byte 0xe9" in answer.error["message"]


def test_a_text_that_fills_what_it_may(server: Running) -> None:
    answer = server.get("/run/I%20do%20not?max_seq_length=5")
    assert answer.status == 400 and answer.error["param"] == "max_seq_length"
    assert "the text alone has 5 tokens" in answer.error["message"]


def test_a_stream_by_curl(server: Running, expected: Expected) -> None:
    body = {
        "prompt": QUESTION,
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "echo": True,
    }
    command = [
        "curl",
        "-sSN",
        *JSON,
        "-d",
        json.dumps(body),
        f"{server.url}/v1/completions",
    ]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected["short"][0]
    )
