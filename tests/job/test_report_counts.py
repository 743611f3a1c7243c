"""The numbers of a report are those that one counts by hand from the output."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fminfer.files.output_paths import answers_path
from fminfer.job.report.answer_fields import cut_choice
from fminfer.job.report.charts import count_lengths, find_ticks, make_histogram
from fminfer.job.report.plain_text import make_visible
from fminfer.job.report.reported_outputs import find_outputs, read_output
from fminfer.job.report.scanning import NUM_SHOWN, Place, RowChoice, Scan
from tests.job.report_outputs import (
    ASK,
    FLAGS,
    PLACES,
    call,
    make_report,
    mixed_lines,
    plain_answer,
    read_records,
    result_of,
    said,
    scored_answer,
    text_of,
    tile,
    write_lines,
)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the answers to lines of all shapes."""
    source = write_lines(
        tmp_path_factory.mktemp("mixed") / "mixed.jsonl", mixed_lines()
    )
    assert call("run", "-q", *FLAGS, source).exit_code == 3
    return answers_path(source)


@pytest.fixture(scope="module")
def scan(output: Path) -> Scan:
    scan = Scan()
    scan.add(0, read_output(output))
    return scan


def logprobs_by_hand(record: dict[str, Any]) -> list[float]:
    """Return the logprobs of all drawn tokens of a record."""
    found = []
    request = record.get("request", {})
    for choice in result_of(record)["choices"]:
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            found += [entry["logprob"] for entry in logprobs["content"]]
        elif logprobs:
            start = 0
            if request.get("echo"):
                prompts = request["prompt"]
                prompts = prompts if isinstance(prompts, list) else [prompts]
                prompt = prompts[choice["index"] // request.get("n", 1)]
                offsets = logprobs["text_offset"]
                start = sum(offset < len(prompt) for offset in offsets)
            found += logprobs["token_logprobs"][start:]
    return found


def test_rows_ends_and_errors(output: Path, scan: Scan) -> None:
    records = read_records(output)
    tally = scan.tally
    errors = read_records(output.with_name("output_mixed.errors.jsonl"))
    assert tally.num_answers == len(records) == 6 * len(PLACES) + 3
    assert tally.num_errors == len(errors) == 6 and tally.num_unread == 0
    choices = [choice for record in records for choice in result_of(record)["choices"]]
    assert tally.finish_reasons == Counter(
        choice["finish_reason"] for choice in choices
    )
    codes = Counter(
        dict(invalid_type=2, out_of_range=2, duplicate_custom_id=1, invalid_utf8=1)
    )
    assert tally.error_codes == codes


def test_lengths_and_extremes(output: Path, scan: Scan) -> None:
    records = read_records(output)
    tally = scan.tally
    usages = [result_of(record)["usage"] for record in records]
    assert tally.prompt_lengths == Counter(usage["prompt_tokens"] for usage in usages)
    assert tally.completion_lengths == Counter(
        usage["completion_tokens"] for usage in usages
    )
    means = [
        statistics.fmean(each)
        for record in records
        if (each := logprobs_by_hand(record))
    ]
    assert len(means) == 4 * len(PLACES) + 2
    assert -scan.choice.extremes["unlikely"].sort_rows()[0][0] == pytest.approx(
        min(means)
    )
    times = [
        r["result"]["request_time"]["batch_time"] for r in records if "result" in r
    ]
    assert scan.choice.extremes["slow"].sort_rows()[0][0] == max(times)


def test_the_page_has_these_numbers(output: Path) -> None:
    page, data = make_report(output)
    records = read_records(output)
    usages = [result_of(record)["usage"] for record in records]
    assert tile(page, "Rows answered") == f"{len(records):,}"
    assert tile(page, "Rows in error") == "6"
    assert (
        tile(page, "Prompt tokens")
        == f"{sum(each['prompt_tokens'] for each in usages):,}"
    )
    drawn = [usage["completion_tokens"] for usage in usages]
    assert tile(page, "Answer tokens") == f"{sum(drawn):,}"
    text = text_of(page)
    mean = f"mean {statistics.fmean(drawn):.3g}"
    longest = f"longest {max(drawn)}"
    assert (
        f"{mean}, median {statistics.median_low(drawn)}, 99 % up to" in text
        and longest in text
    )
    assert "temperature is 9; it must be from 0 to 2 show" in text
    assert "float32" in text and "Device cpu" in text and "--kernels off" in text
    choices = [choice for record in records for choice in result_of(record)["choices"]]
    num_whole = sum(choice["finish_reason"] == "length" for choice in choices)
    assert f"{num_whole} length" in text
    assert f"Rows {len(data['rows'])} of {len(data['rows'])}" in text, (
        "all of a small output"
    )


def test_every_row_shows_what_was_asked_and_answered(output: Path) -> None:
    """Texts are whole, with and without tokens, and Batch requests come from the input."""
    _, data = make_report(output)
    records = read_records(output)
    shown = {row["line"]: row for row in data["rows"] if "choices" in row}
    lines = {
        line["custom_id"]: line
        for line in reversed(mixed_lines())
        if "custom_id" in line
    }
    for number, record in enumerate(records, start=1):
        row = shown[number]
        for choice, told in zip(
            result_of(record)["choices"], row["choices"], strict=True
        ):
            text = (
                choice["message"]["content"] if "message" in choice else choice["text"]
            )
            assert said(told) == make_visible(text)
            has_logprobs = bool((choice.get("logprobs") or {}).get("tokens")) or bool(
                (choice.get("logprobs") or {}).get("content")
            )
            assert bool(told.get("pieces")) == has_logprobs
        request = record.get("request") or lines[record["custom_id"]]["body"]
        asked = "".join(each.get("text", "") for each in row["asked"])
        if "messages" in request:
            assert (
                asked == request["messages"][0]["content"]
                and row["asked"][0]["who"] == "user"
            )
        elif isinstance(request["prompt"], str) and request["prompt"].startswith(
            "Question"
        ):
            assert asked == request["prompt"]
        assert ("others" in row) == ("no" in record)
        if "others" in row:
            assert json.loads(row["others"]["text"]) == {"no": record["no"]}
    ids = [row for row in shown.values() if row["asked"][0].get("is_ids")]
    assert [row["asked"][0]["text"] for row in ids] == ["5 6 7"] and "ids" in ids[0][
        "choices"
    ][0]


def test_echoed_tokens_are_marked_as_given(output: Path) -> None:
    _, data = make_report(output)
    row = next(row for row in data["rows"] if ["echo", "true"] in row["params"])
    pieces = row["choices"][0]["pieces"]
    given = "".join(piece[0] for piece in pieces if len(piece) == 4)
    assert given == row["asked"][0]["text"] and pieces[0][1] is None
    drawn = [piece for piece in pieces if len(piece) == 3]
    assert (
        len(drawn) == row["completion_tokens"] or row["choices"][0]["reason"] == "stop"
    )
    for text, logprob, listed in drawn:
        (only,) = listed
        chosen = [each for each in only if each[2]]
        assert len(chosen) == 1 and chosen[0][0] == text and chosen[0][1] == logprob


def test_a_scored_prompt_is_shown_once_with_its_score(tmp_path: Path) -> None:
    """It stood there as a prompt and again as an answer, and no chart or row told its score."""
    output = tmp_path / "out.jsonl"
    output.write_bytes(
        scored_answer("a b c") + scored_answer("a b c", prompt=[4, 5, 6])
    )
    _, data = make_report(output)
    by_text, by_ids = data["rows"]
    assert by_text["asked"] == [] and said(by_text["choices"][0]) == "a b c"
    assert by_ids["asked"][0]["text"] == "4 5 6", "which the answer does not tell"
    assert [row["choices"][0]["logprobs"] for row in data["rows"]] == [[-3.5, 2]] * 2
    assert [row["why"] for row in data["rows"]] == [["sample"], ["sample"]]


def test_an_input_that_has_changed_is_told_and_not_believed(tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 1, "seed": 77}
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in "ab"
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert call("run", "-q", *FLAGS, source).exit_code == 0
    output = answers_path(source)
    _, data = make_report(output)
    assert [row["asked"][0]["text"] for row in data["rows"]] == ["x", "x"]
    assert (
        data["rows"][1]["input_line"] == 2
        and ["seed", "77"] in data["rows"][1]["params"]
    )
    lines[0]["body"] = body | {"prompt": "something else"}
    write_lines(source, lines)
    page, data = make_report(output)
    assert [bool(row["asked"]) for row in data["rows"]] == [False, True]
    assert "was changed since it was answered" in text_of(page)
    source.unlink()
    page, data = make_report(output)
    assert not any(row["asked"] for row in data["rows"])
    assert "its input is not known or not there any more" in text_of(page)


def test_several_outputs_are_counted_together(tmp_path: Path) -> None:
    for name, number in (("a", 3), ("b", 5)):
        rows = [plain_answer(i, name) for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(rows))
    error = {
        "line": 9,
        "custom_id": None,
        "error": {"message": "m", "code": "out_of_range"},
    }
    error |= {"retryable": False, "request": {}}
    (tmp_path / "b.errors.jsonl").write_text(json.dumps(error) + "\n")
    page, data = make_report(tmp_path)
    assert tile(page, "Rows answered") == "8" and len(data["rows"]) == 9
    assert data["files"] == ["a.jsonl", "b.jsonl", "b.errors.jsonl"]
    assert [each.path.name for each in find_outputs([tmp_path])] == [
        "a.jsonl",
        "b.jsonl",
    ]


def test_the_sample_is_fixed_and_has_the_extremes() -> None:
    def choose() -> RowChoice:
        choice = RowChoice()
        for number in range(1, 20_001):
            choice.add_answer(
                Place(0, number, 0, 1),
                number % 977,
                number * 7919 % 20_011,
                -number / 9,
            )
        choice.add_error(("code", "kind"), Place(1, 1, 0, 1))
        return choice

    chosen = choose().choose_rows()
    assert chosen == choose().choose_rows() and len(chosen) == NUM_SHOWN
    assert [*chosen] == sorted(chosen)
    reasons = Counter(reason for each in chosen.values() for reason in each)
    assert (
        reasons["slow"] == reasons["long"] == reasons["unlikely"] == 15
        and reasons["error"] == 1
    )
    numbers = [place.number for place, why in chosen.items() if why == {"sample"}]
    assert {place.number for place, why in chosen.items() if "unlikely" in why} == {
        *range(19_986, 20_001)
    }
    for tenth in range(10):  # from everywhere in the file
        assert (
            10
            <= sum(tenth * 2000 < number <= tenth * 2000 + 2000 for number in numbers)
            <= 25
        )


def test_rows_that_are_all_alike_do_not_stand_out() -> None:
    choice = RowChoice()
    for number in range(1, 41):
        choice.add_answer(Place(0, number, 0, 1), 2 + (number == 30), 0.5, -1.0)
    chosen = choice.choose_rows()
    assert len(chosen) == 40
    assert [place.number for place, why in chosen.items() if why != {"sample"}] == [30]
    assert {"long"} in chosen.values()


def test_scores_have_no_drawn_tokens(tmp_path: Path) -> None:
    lines = [
        {"prompt": ASK.format(each), "max_tokens": 0, "logprobs": 0} for each in PLACES
    ]
    source = write_lines(
        tmp_path / "in.jsonl", [line | {"echo": True} for line in lines]
    )
    assert call("run", "-q", *FLAGS, source).exit_code == 0
    _, data = make_report(answers_path(source))
    assert all(
        row["choices"][0]["logprobs"][0] < 0 and not row["asked"]
        for row in data["rows"]
    )
    assert not any("long" in row["why"] for row in data["rows"])


@pytest.mark.parametrize(
    "values, is_wider",
    [
        ([3], False),
        ([0, 1], False),
        ([1, 7, 9], False),
        ([-5, 120], False),
        ([1, 5, 900], True),
        ([0, 2, 70_000], True),
        ([8, 9, 500], True),
        ([1, 10**18], True),
    ],
)
def test_bars_hold_every_number_once(values: list[int], is_wider: bool) -> None:
    bars = count_lengths(Counter(values))
    assert (len({bar.end - bar.first for bar in bars}) > 1) == is_wider and len(
        bars
    ) <= 64
    assert all(a.end == b.first and a.first < a.end for a, b in pairwise(bars))
    for bar in bars:
        assert bar.heights == [sum(bar.first <= value < bar.end for value in values)]
    assert sum(bar.heights[0] for bar in bars) == len(values)


def test_a_bar_of_one_number_is_named_by_it() -> None:
    def labels(*values: int) -> list[str]:
        return re.findall(
            r'y="177" text-anchor="\w+">(.*?)<', make_histogram("t", Counter(values))
        )

    assert labels(2, 2) == ["2"]
    assert labels(1, 3) == ["1", "2", "3"]
    assert labels(0, 40)[:2] == ["0", "10"], (
        "bars of two numbers are named by where they begin"
    )


@pytest.mark.parametrize("most", [1, 3, 9, 25, 70])
def test_counts_have_whole_ticks(most: int) -> None:
    """The axis of a chart had 7.5 rows, and one with a single row had 0.25."""
    ticks = find_ticks(most)
    assert all(tick == int(tick) for tick in ticks) and ticks[-2] < most <= ticks[-1]
    assert find_ticks(0.9) == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_parts_of_a_character_are_one_piece() -> None:
    def entry(raw: bytes) -> dict[str, Any]:
        return {"token": "t", "logprob": -1.0, "bytes": [*raw], "top_logprobs": []}

    raw = "é🎉".encode()
    choice = {
        "logprobs": {
            "content": [entry(raw[:1]), entry(raw[1:4]), entry(raw[4:]), entry(b"\xf0")]
        }
    }
    pieces = cut_choice(choice, None)
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [
        ("é🎉", 3),
        ("\ufffd", 1),
    ]
