"""Lines of files that ask /v1/responses: their shapes, their records, and what reads these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.answers.line_counter import EqualLines
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import AnsweredRecord, Record, readdress_record
from fminfer.files.journal_rows import Row
from fminfer.files.tables.result_columns import make_result_columns, parse_cells
from fminfer.job.report.answer_fields import read_answer
from fminfer.split.grouping import Groups, estimate_length
from tests.conftest import run_files
from tests.vector_models import save_bert

QUESTION = "How do you go from the porch to the den?"
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 6,
    "temperature": 0,
}
ASK: dict[str, Any] = {
    "input": QUESTION,
    "max_output_tokens": 6,
    "temperature": 0,
}
DRAWN = ASK | {"temperature": 2, "max_output_tokens": 30, "min_tokens": 30}
URL = "/v1/responses"


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with closing(fminfer.Engine(dtype="float32", kernels="off")) as engine:
        yield engine


def run(engine: fminfer.Engine, *lines: Any) -> list[Record]:
    return sorted(engine.run(lines), key=lambda record: record.line.number)


def batch_line(body: dict[str, Any], name: str = "a") -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


def test_a_line_of_any_shape_gets_what_a_chat_gets(engine: fminfer.Engine) -> None:
    lines = (ASK, {"request": ASK, "id": 3}, batch_line(ASK), TALK)
    bare, wrapped, batch, chat = run(engine, *lines)
    text = chat.text
    assert text and {bare.text, wrapped.text, batch.text} == {text}
    assert wrapped.to_dict()["id"] == 3
    result = bare.to_dict()["result"]
    names = ["status", "incomplete_details", "output", "request_time", "usage"]
    assert list(result) == names
    body = batch.to_dict()["response"]["body"]
    assert body["object"] == "response" and body["id"].startswith("resp_")
    assert body["output"][0]["content"] == result["output"][0]["content"]
    assert bare.choices[0].fields["finish_reason"] == "stop"
    assert bare.num_completion_tokens == result["usage"]["output_tokens"]


def test_a_model_that_gives_vectors_answers_the_same_line_with_them(
    tmp_path: Path,
) -> None:
    save_bert(tmp_path / "bert")
    with closing(fminfer.Engine(str(tmp_path / "bert"))) as engine:
        bare, batch = run(engine, {"input": "w1 w2"}, batch_line({"input": "w1"}))
    assert len(bare.to_dict()["result"]["data"]) == 1
    assert batch.error is not None and "generates text" in batch.error.message


def test_equal_lines_draw_apart_and_are_counted_without_an_engine(
    engine: fminfer.Engine,
) -> None:
    first, second, seeded, same = run(
        engine, DRAWN, DRAWN, DRAWN | {"seed": 1}, DRAWN | {"seed": 1}
    )
    assert first.text != second.text and seeded.text == same.text
    counter = EqualLines()
    lines = [Line(0, n, json.dumps(DRAWN).encode()) for n in (1, 2)]
    lines.append(Line(0, 3, json.dumps(batch_line(DRAWN)).encode()))
    counts = [counter.count(line, parse_envelope(line)) for line in lines]
    assert counts == [0, 1, 2]


def test_an_answer_is_read_from_its_record(engine: fminfer.Engine) -> None:
    """Tables, reports and later runs read records, whose usage has other names here."""
    bare, batch = run(engine, ASK, batch_line(ASK))
    for record in (bare, batch):
        tokens = (
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_completion_tokens,
        )
        assert AnsweredRecord(b"", record.to_dict()).tokens == tokens
        answer = read_answer(record.to_json())
        assert answer is not None and answer.usage["completion_tokens"] == tokens[2]
        assert answer.choices[0]["message"]["content"] == record.text
    row = Row(1, False, (7, 0, 5), 0, bare.to_json())
    cells = parse_cells(row, make_result_columns({}))
    assert cells["answer"] == bare.text and cells["finish_reason"] == "stop"


def test_an_answer_moves_to_another_line_of_the_same_request(
    engine: fminfer.Engine,
) -> None:
    """Ids of items are of the request, so that a moved record is what a new one would be."""
    first, second = run(engine, batch_line(ASK, "a"), batch_line(ASK, "b"))
    moved = readdress_record(first.to_json(), second.line, second.envelope, first.key)
    expected = second.to_dict()
    found = json.loads(moved.record)
    for record in (expected, found):  # what was cached differs
        record["response"]["body"]["usage"] = None
    assert found == expected


def test_a_killed_run_goes_on_with_the_same_bytes(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    lines = [DRAWN | {"input": f"Way {n % 2}"} for n in range(3)]
    lines += [batch_line(DRAWN, f"r{n}") for n in range(3)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = tmp_path / "whole.jsonl"
    parts = tmp_path / "parts.jsonl"
    run_files(engine, [source], [whole])
    run_files(engine, [source], [parts], limit=4)
    run_files(engine, [source], [parts])
    outputs = [
        [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        for path in (whole, parts)
    ]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    result = record.get("result") or record["response"]["body"]
    for name in ("request_time", "created_at", "usage"):
        result.pop(name, None)
    return record


def test_request_args_have_the_names_of_completions(tmp_path: Path) -> None:
    with closing(
        fminfer.Engine(request_args={"max_tokens": 1, "logprobs": 0})
    ) as engine:
        (record,) = run(engine, ASK)
        assert record.num_completion_tokens == 1
        assert len(record.choices[0].fields["logprobs"]["content"]) == 1
    with closing(fminfer.Engine(request_args={"n": 2})) as engine:
        (record,) = run(engine, ASK)
        assert record.error is not None and record.error.param == "n"


def test_wrong_lines_cost_themselves(engine: fminfer.Engine) -> None:
    wrong = [
        ASK | {"previous_response_id": "resp_1"},
        ASK | {"max_output_tokens": 5000},
        {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": []}]},
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}},
        },
        ASK | {"stream": True},
    ]
    records = run(engine, ASK, *wrong)
    assert records[0].error is None
    params = [record.error and record.error.param for record in records[1:]]
    assert params == [
        "previous_response_id",
        "max_output_tokens",
        "input[1].content",
        "text.format",
        "stream",
    ]


def test_parts_of_split(tmp_path: Path) -> None:
    groups = Groups()
    same = [groups.add(ASK | {"input": text, "instructions": text}) for text in "ab"]
    other = groups.add(ASK | {"max_output_tokens": 9})
    assert same == [0, 0] and other == 1
    assert groups.seen[1].max_tokens == 9
    assert estimate_length({"input": [{"role": "user", "content": "x" * 100}]}) >= 100
