"""Chat lines in files: run, go on, check, split and merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai.types.chat
import pytest
from click.testing import CliRunner, Result

from fminfer.cli.app import main
from fminfer.files.output_paths import answers_path
from fminfer.split.merging import merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.streams import rounded

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "queries" / "chat.jsonl"
FLAGS = ["--dtype", "float32", "--kernels", "off"]
HEAD = {"method": "POST", "url": "/v1/chat/completions"}


def chat(place: str, **fields: Any) -> dict[str, Any]:
    message = {
        "role": "user",
        "content": f"How do you go from the {place} to the attic?",
    }
    return {"messages": [message], "max_tokens": 12} | fields


def call(*arguments: object) -> Result:
    found = CliRunner().invoke(main, [*map(str, arguments)])
    assert found.exit_code in (0, 1, 2, 3), found.output
    return found


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def choices_of(record: dict[str, Any]) -> Any:
    return (record.get("result") or record["response"]["body"])["choices"]


def test_the_examples(tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    source.write_bytes(EXAMPLES.read_bytes())
    assert call("run", "-q", *FLAGS, source).exit_code == 0
    lines = source.read_bytes().splitlines()
    raw = answers_path(source).read_bytes().splitlines()
    answers = read(answers_path(source))
    assert raw[0].startswith(
        b'{"request":' + lines[0] + b',"result":{"choices":[{"index":0,'
    )
    assert [*answers[0]["result"]] == ["choices", "request_time", "usage"]
    assert choices_of(answers[0])[0]["message"]["content"] == " south"
    assert choices_of(answers[1])[0]["logprobs"]["content"][0]["top_logprobs"][1:]
    body = answers[2]["response"]["body"]
    completion = openai.types.chat.ChatCompletion.model_validate(body)
    assert completion.object == "chat.completion" and completion.id.startswith(
        "chatcmpl-"
    )
    assert (completion.choices[0].message.content or "").split() == ["north"] + [
        "east"
    ] * 5
    assert completion.model == "fminfer-demo" and completion.usage is not None
    strict = openai.types.chat.ChatCompletion.model_json_schema()["required"]
    assert set(strict) <= body.keys()


def test_a_run_that_goes_on_gives_the_same(tmp_path: Path) -> None:
    """Unseeded equal lines are counted, also those that an earlier run has answered."""
    hot = chat("den", temperature=2)
    lines = [hot, hot, chat("porch", n=2, logprobs=True), hot] * 4
    lines += [
        HEAD | {"custom_id": str(i), "body": chat("study", seed=i)} for i in range(4)
    ]
    source = write(tmp_path / "a.jsonl", lines)
    small = [*FLAGS, "--max-rows", 2]
    assert call("run", "-q", *small, "--num-iters", 9, source).exit_code == 1
    assert call("run", "-q", *small, source).exit_code == 0
    whole = tmp_path / "whole.jsonl"
    assert call("run", "-q", *small, source, "--output", whole).exit_code == 0
    found = [
        list(map(choices_of, read(path))) for path in (answers_path(source), whole)
    ]
    assert rounded(found[0]) == rounded(found[1])
    assert len({choices[0]["message"]["content"] for choices in found[0][:16:4]}) > 1


def test_another_template_refuses_to_go_on(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("den"), chat("porch"), chat("study")])
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = [*FLAGS, "--chat-template", template]
    assert call("run", "-q", *flags, "--num-iters", 2, source).exit_code == 1
    refused = call("run", "-q", *FLAGS, source)
    assert refused.exit_code != 0 and "--chat-template" in refused.stderr
    template.write_text("{{ messages[0].content }}!")
    refused = call("run", "-q", *flags, source)
    assert refused.exit_code != 0 and "--chat-template" in refused.stderr
    template.write_text("{{ messages[0].content }}")
    assert call("run", "-q", *flags, source).exit_code == 0


def test_arguments_take_the_place_of_lines_own(tmp_path: Path) -> None:
    fields = {"max_tokens": None, "max_completion_tokens": 9, "temperature": 1}
    source = write(tmp_path / "a.jsonl", [chat("kitchen", **fields), chat("kitchen")])
    flags = ["--overwrite-request-args", "--temperature", 0, "--generate-seq-length", 1]
    assert (
        call("run", "-q", *FLAGS, *flags, "--top-k-per-token", 2, source).exit_code == 0
    )
    first, second = map(choices_of, read(answers_path(source)))
    assert first == second and first[0]["message"]["content"] == " north"
    assert len(first[0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    refused = call("run", "-q", *FLAGS, *flags, "--echo-prompt", source, "--restart")
    assert refused.exit_code == 3
    (record, _) = read(tmp_path / "output_a.errors.jsonl")
    assert record["error"]["param"] == "echo"


def test_check_shows_the_rendered_prompt(tmp_path: Path) -> None:
    wrong = {"messages": [{"role": "user", "content": "x"}], "logprobs": 5}
    body = HEAD | {"custom_id": "a", "body": chat("den", max_tokens=None)}
    source = write(tmp_path / "a.jsonl", [chat("den"), wrong, body])
    found = call("check", *FLAGS, source)
    assert found.exit_code == 3, found.output
    assert '"top_logprobs": 5' in found.stdout
    shown = "    Question: How do you go from the den to the attic?\n    Answer:"
    assert shown in found.stdout


@pytest.mark.parametrize("chunk", [40, 100_000])
def test_split_and_merge(tmp_path: Path, chunk: int) -> None:
    """Chat has parts of its own; long messages come first; merged it is the whole run's."""
    lines = [chat("den", temperature=0), chat("balcony", temperature=0)]
    lines += [
        {"prompt": "Question:", "max_tokens": 12, "temperature": 0},
        {"messages": []},
    ]
    lines += [HEAD | {"custom_id": "a", "body": chat("study", temperature=0)}]
    lines += [HEAD | {"custom_id": "b", "body": {"messages": 5}}]
    source = write(tmp_path / "all.jsonl", lines)
    folder = tmp_path / "parts"
    split_file(source, folder, SplitOptions(1, chunk))
    parts = sorted(folder.rglob("request_*.jsonl"))
    kinds = [
        {"prompt" in line.get("body", line) for line in read(part)} for part in parts
    ]
    assert {True} in kinds and {True, False} not in kinds
    if chunk > 1000:
        (first, *_) = (read(part) for part in parts if "balcony" in part.read_text())
        assert "balcony" in json.dumps(first[0]), "the longest"
    for inputs in ([folder], [source]):
        assert call("run", "-q", *FLAGS, *inputs).exit_code == 3
    summary = merge_parts(folder, tmp_path / "m.jsonl")
    assert (summary.num_answers, summary.num_errors) == (4, 2)
    merged = read(tmp_path / "m.jsonl")
    whole = read(answers_path(source))
    assert list(map(choices_of, merged)) == list(map(choices_of, whole))
    errors = [
        read(tmp_path / "m.errors.jsonl"),
        read(tmp_path / "output_all.errors.jsonl"),
    ]
    assert [each.get("line") for each in errors[0]] == [
        each.get("line") for each in errors[1]
    ]
