"""The command end to end, with the demo model that the package ships, as a user runs it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.models.checkpoint import DEMO_MODEL
from scripts.train_demo_model import HOUSE, all_examples
from tests.conftest import run_files
from tests.forked import run_forked
from tests.line_bench import before_each_record

QUERIES = Path(__file__).parent.parent.parent / "examples" / "queries"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_forked(["run", *arguments])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Answer all example queries in one run; return the output folder and what stderr said."""
    folder = tmp_path_factory.mktemp("answers")
    found = run(
        "--infer-data", QUERIES, "--output", folder, "--stats", folder / "stats.json"
    )
    assert found.returncode == 3, found.stderr
    assert found.stdout == "", "stdout is for records only"
    return folder, found.stderr


def right_answer(prompt: str) -> str:
    return dict(all_examples())[prompt]


def test_plain_answers_are_right(answered: tuple[Path, str]) -> None:
    records = read(answered[0] / "output_plain.jsonl")
    requests = (QUERIES / "plain.jsonl").read_text().splitlines()
    lines = (answered[0] / "output_plain.jsonl").read_text().splitlines()
    assert len(records) == len(requests) == 8
    for record, line, request in zip(records, lines, requests, strict=True):
        assert line.startswith('{"request":' + request + ',"result":{'), (
            "verbatim, in order"
        )
        (choice,) = record["result"]["choices"]
        assert choice["text"] == right_answer(record["request"]["prompt"])
        assert choice["finish_reason"] == "stop"


def test_the_demo_model_is_as_good_as_its_card_says(tmp_path: Path) -> None:
    """At least 90 % of all questions, the held-out ones among them."""
    path = tmp_path / "all.jsonl"
    request = {"max_tokens": 12, "temperature": 0, "stop": "\n"}
    examples = all_examples()
    path.write_text(
        "".join(json.dumps({"prompt": q} | request) + "\n" for q, _ in examples)
    )
    assert run(path).returncode == 0
    records = read(tmp_path / "output_all.jsonl")
    texts = [record["result"]["choices"][0]["text"] for record in records]
    right = sum(
        text == answer for text, (_, answer) in zip(texts, examples, strict=True)
    )
    assert right / len(examples) >= 0.9
    size = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert size <= 4 * 2**20 and sum(len(row) for row in HOUSE) == 24


def test_other_examples(answered: tuple[Path, str]) -> None:
    folder = answered[0]
    for record, k in zip(
        read(folder / "output_logprobs.jsonl"), (0, 1, 5, 1), strict=True
    ):
        found = record["result"]["choices"][0]["logprobs"]
        assert (
            len(found["tokens"])
            == len(found["token_logprobs"])
            == len(found["text_offset"])
        )
        assert (
            "".join(found["tokens"]).replace("Ġ", " ")
            == (record["result"]["choices"][0]["text"])
        )
        assert (found["top_logprobs"] is None) == (k == 0)
    echo = read(folder / "output_echo.jsonl")
    for record in echo:
        choice = record["result"]["choices"][0]
        assert choice["text"].startswith(record["request"]["prompt"])
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets)
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert echo[2]["result"]["choices"][0]["text"] == echo[2]["request"]["prompt"]
    stops = [r["result"]["choices"][0] for r in read(folder / "output_stop.jsonl")]
    assert [stop["text"] for stop in stops[:2]] == [" north", " nor"]
    assert stops[3]["finish_reason"] == "length"
    n = read(folder / "output_n.jsonl")
    assert [len(record["result"]["choices"]) for record in n] == [3, 2, 6]
    ids = read(folder / "output_token_ids.jsonl")
    assert [r["result"]["choices"][0]["text"] for r in ids] == [
        right_answer(prompt) for prompt, _ in all_examples()[:3]
    ]


def test_bad_lines_are_named_with_what_to_do(answered: tuple[Path, str]) -> None:
    errors = read(answered[0] / "output_bad_lines.errors.jsonl")
    assert {error["line"]: error["error"]["code"] for error in errors} == {
        2: "invalid_json",
        3: "invalid_json",
        4: "not_an_object",
        5: "missing_prompt",
        6: "out_of_range",
        7: "invalid_type",
        8: "context_length_exceeded",
        9: "token_out_of_range",
        10: "unsupported_parameter",
        11: "unsupported_parameter",
    }
    assert all(len(error["error"]["message"]) > 30 for error in errors)
    good = read(answered[0] / "output_bad_lines.jsonl")
    assert len(good) == 2, "the lines between are answered"
    assert "demo model" in answered[1] and "10 in error" in answered[1]


def test_stats(answered: tuple[Path, str]) -> None:
    stats = json.loads((answered[0] / "stats.json").read_text())
    assert stats["num_rows"] == 45 and stats["num_errors"] == 10
    assert stats["completion_tokens"] > 50 and stats["start_to_ready_s"] > 0
    assert len(stats["outputs"]) == 12


def test_five_sets_of_hyperparameters_in_one_file(tmp_path: Path) -> None:
    """The seed's users had to split such files; each row must obey its own."""
    prompt = "Question: How do you go from the bathroom to the office?\nAnswer:"
    rows: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 3},
        {"temperature": 0, "stop": "\n", "logprobs": 2},
        {
            "temperature": 1.9,
            "seed": 3,
            "n": 4,
            "max_tokens": 5,
            "prompt": "Once upon a time",
        },
        {"temperature": 2, "top_k": 1, "max_tokens": 4},
        {"temperature": 2, "top_p": 0, "echo": True, "max_tokens": 2},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": prompt} | row) + "\n" for row in rows * 3)
    )
    assert run(path).returncode == 0
    records = read(tmp_path / "output_mixed.jsonl")
    results = [record["result"]["choices"] for record in records]
    whole = right_answer(prompt)
    for i in range(0, 15, 5):
        assert results[i][0]["text"] == " north east east"
        assert results[i + 1][0]["text"] == whole and "logprobs" in results[i + 1][0]
        assert len({choice["text"] for choice in results[i + 2]}) > 1
        assert results[i + 3][0]["text"] == " north east east east"
        assert results[i + 4][0]["text"] == prompt + " north east"
        texts = [choice["text"] for choice in results[i + 2]]
        assert texts == [choice["text"] for choice in results[2]], (
            "equal seeds, equal texts"
        )


def test_the_seeds_own_sample_on_gpt_j(tmp_path: Path) -> None:
    """Done when: the sample request of the seed, made valid JSON, gives the seed's keys."""
    line = (Path(__file__).parent.parent / "data" / "seed_request.jsonl").read_text()
    request = json.loads(line)
    config = transformers.GPTJConfig(
        n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=256, n_positions=2048
    )
    config.save_pretrained(tmp_path)
    path = tmp_path / "request_0.jsonl"
    path.write_text(line)
    found = run("--infer-data", path, "--random-init", tmp_path, "--model-type", "gptj")
    assert found.returncode == 0, found.stderr
    (record,) = read(tmp_path / "output_request_0.jsonl")
    assert record["request"] == request
    assert list(record) == ["request", "result"]
    # The seed's result has choices and request_time; usage is this format's one addition.
    assert list(record["result"]) == ["choices", "request_time", "usage"]
    (choice,) = record["result"]["choices"]
    assert list(choice) == ["text", "index", "logprobs", "finish_reason"]
    assert list(choice["logprobs"]) == [
        "tokens",
        "token_logprobs",
        "top_logprobs",
        "text_offset",
    ]
    assert len(choice["logprobs"]["text_offset"]) == 2
    assert list(record["result"]["request_time"])[:2] == ["batch_time", "batch_size"]


def test_wrong_usage_is_status_2_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    (tmp_path / "b.jsonl").write_text("")
    cases: list[tuple[list[object], str]] = [
        ([], "no input"),
        ([tmp_path / "none.jsonl"], "does not exist"),
        ([path, "--budget", 3], "budget"),
        ([path, "--output", path], "is the input"),
        ([path, "--stats", tmp_path / "no" / "stats.json"], "no folder"),
        ([path, "--seed", 10**40], "64 bits"),
        ([path, "--device", "meta"], "not one that fminfer runs on"),
        (
            [path, tmp_path / "b.jsonl", "--output", tmp_path / "c.jsonl"],
            "give a folder",
        ),
        ([path, "--fp16", "--dtype", "float32"], "contradict"),
        ([path, "--no-such-flag"], "No such option"),
        ([path, "--model-type", "opt"], "clashes"),
    ]
    for arguments, hint in cases:
        found = run(*arguments)
        assert found.returncode == 2, (arguments, found.stderr)
        assert hint in found.stderr and "Traceback" not in found.stderr


def test_an_output_that_exists_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 1}\n')
    assert run(path, "-q").stderr == ""
    before = (tmp_path / "output_a.jsonl").read_text()
    again = run(path)
    assert again.returncode == 0 and "1 kept from earlier runs" in again.stderr
    refused = run(path, "--seed", 7)
    assert refused.returncode == 2, refused.stderr
    assert "--seed was 1, is 7" in refused.stderr and "--restart" in refused.stderr
    assert (tmp_path / "output_a.jsonl").read_text() == before
    assert run(path, "--restart", "--seed", 7).returncode == 0
    (tmp_path / "output_a.status.json").unlink()
    refused = run(path)
    assert (
        refused.returncode == 2 and "nothing tells which run wrote it" in refused.stderr
    )


def test_more_files_than_may_be_open_at_once(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / f"request_{number}.jsonl").write_text(
            '{"prompt": "x", "max_tokens": 1}\n'
        )

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, hard)
    )
    try:
        done = CliRunner().invoke(main, ["run", "-q", str(tmp_path)])
        assert done.exit_code == 0, done.output
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(tmp_path.glob("output_request_*.jsonl"))) == 120
    assert not list(tmp_path.glob("*.journal"))


def test_an_interrupted_run_is_status_130_and_keeps_its_rows(tmp_path: Path) -> None:
    """It used to end in SIGABRT: the stage's thread was inside torch at the
    interpreter's exit."""
    path = tmp_path / "a.jsonl"
    row = '{"prompt": "x", "max_tokens": %d, "ignore_eos": true}\n'
    path.write_text(row % 1 + row % 400 * 3000)
    journal = tmp_path / "output_a.jsonl.journal"
    command = [sys.executable, "-m", "fminfer", "run", str(path), "--max-rows", "8"]
    command += ["--grace", "0.2"]

    # a shell's background jobs are started with SIGINT ignored
    def mind_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=mind_interrupts
    )
    try:
        for _ in range(3000):
            if process.poll() is not None or (
                journal.exists() and journal.read_bytes().count(b"\n") > 1
            ):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert "Interrupted" in said and "terminate" not in said
    assert len(read(journal)) > 1
    assert (
        json.loads((tmp_path / "output_a.status.json").read_text())["status"]
        == "cancelled"
    )


def test_an_empty_file_gives_an_empty_output(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert run(tmp_path / "a.jsonl").returncode == 0
    assert (tmp_path / "output_a.jsonl").read_text() == ""


def test_a_model_that_is_not_there_is_status_1(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    found = run(path, "--model-name", tmp_path)
    assert found.returncode == 1 and "config.json" in found.stderr
    assert not list(tmp_path.glob("output*")), "nothing is left behind"


def test_a_run_that_fails_keeps_what_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ancestor wrote only at the very end; here finished rows are on disk at once."""

    path = tmp_path / "a.jsonl"
    output = tmp_path / "output_a.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 1}\n' * 200)
    engine = fminfer.Engine(max_rows=4)

    def fail_later(count: int) -> None:
        if count == 50:
            raise RuntimeError("the machine caught fire")

    before_each_record(monkeypatch, fail_later)
    with pytest.raises(RuntimeError, match="fire"):
        run_files(engine, [path], [output])
    engine.close()
    assert not output.exists()
    assert len(read(tmp_path / "output_a.jsonl.journal")) == 1 + 50


def test_a_run_says_why_its_attention_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler answers are the same, slower; whoever waits should know.

    With --quiet nothing told it: --stats does.
    """
    monkeypatch.setenv("CXX", "no-such-compiler")
    queries = QUERIES / "plain.jsonl"
    stats = tmp_path / "stats.json"
    found = run(queries, "--output", tmp_path / "out.jsonl", "--stats", stats)
    assert found.returncode == 0, found.stderr
    assert (
        "The run is slower than it could be: there is no C++ compiler" in found.stderr
    )
    assert "there is no C++ compiler" in json.loads(stats.read_text())["why_slower"]
    for record in read(tmp_path / "out.jsonl"):
        assert record["result"]["choices"][0]["text"] == right_answer(
            record["request"]["prompt"]
        )
