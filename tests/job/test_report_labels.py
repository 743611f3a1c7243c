"""The labels of a report: how sure they are, and how many are right, as counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.job.report.answer_tally import MAX_NAMES
from fminfer.job.report.label_tally import NO_LABEL, LabelTally, compute_interval
from fminfer.job.report.report_file import write_report
from fminfer.job.report.reported_outputs import find_outputs, read_output
from fminfer.job.report.scanning import NUM_UNSURE, Scan
from tests.job.report_outputs import (
    FLAGS,
    call,
    make_report,
    plain_answer,
    read_page,
    text_of,
    tile,
    write_lines,
)

LABELS = [" bad", " fine", " good"]


def labelled(
    text: str,
    odds: dict[str, float] | None = None,
    names: list[str] | None = None,
    **beside: Any,
) -> bytes:
    """Return a record of a wrapped line that was asked for a label."""
    record = json.loads(plain_answer(1, text))
    record["request"]["structured_outputs"] = {"choice": names or LABELS}
    if odds is not None:
        record["result"]["choices"][0] |= {
            "label_probabilities": odds,
            "label_mass": 0.5,
        }
    return json.dumps({**record, **beside}).encode() + b"\n"


def report_truth(output: Path, truth: str) -> tuple[str, dict[str, Any]]:
    """Write a report that compares labels; return the page and its data."""
    path = output.with_suffix(".html")
    write_report(find_outputs([output]), path, truth=truth)
    return read_page(path)


def scan_output(output: Path, truth: str | None) -> LabelTally:
    scan = Scan(labels=LabelTally(truth))
    scan.add(0, read_output(output))
    return scan.labels


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return answers with each kind of truth, in rows of tables and beside requests."""
    sure = {" good": 0.95, " fine": 0.04, " bad": 0.01}
    unsure = {" bad": 0.5, " good": 0.3, " fine": 0.2}
    records = [
        labelled(" good", sure, row={"text": "a", "truth": "good"}),
        labelled(" good", sure, row={"text": "b", "truth": "  good\n"}),
        labelled(" good", sure, truth="bad"),
        labelled(" bad", unsure, truth="bad"),
        labelled(" bad", unsure, truth="fine"),
        labelled(" good", sure, truth="GOOD"),
        labelled(" good", sure, truth=None),
        labelled(" good", sure, truth=" "),
        labelled(" good", sure),
        labelled(" go", truth="good"),
        plain_answer(2, "free text"),
    ]
    path = tmp_path / "labels.jsonl"
    path.write_bytes(b"".join(records))
    return path


def test_labels_are_counted_and_compared(output: Path) -> None:
    """Outer white space is left out, case is not; a label that nobody got is there, too."""
    tally = scan_output(output, "truth")
    assert dict(tally.counts) == {"bad": 2, "fine": 0, "good": 7, NO_LABEL: 1}
    assert tally.verdicts == {"right": 3, "wrong": 3, "stranger": 1, "missing": 3}
    assert tally.strangers == {"GOOD": 1} and tally.num_unlabelled == 1
    assert tally.pairs == {
        ("good", "good"): 2,
        ("bad", "good"): 1,
        ("bad", "bad"): 1,
        ("fine", "bad"): 1,
        ("good", NO_LABEL): 1,
    }
    low = tally.bins[5]
    high = tally.bins[9]
    assert (low.num_rows, low.num_compared, low.num_right) == (2, 2, 1)
    assert (high.num_rows, high.num_compared, high.num_right) == (7, 3, 2)
    by_hand = (abs(1 - 2 * 0.5) + abs(2 - 3 * 0.95)) / 5
    assert tally.calibration_error == pytest.approx(by_hand)


def test_the_page_says_what_is_compared_and_what_is_not(output: Path) -> None:
    page, data = report_truth(output, "truth")
    assert tile(page, "Rows labelled") == "10" and tile(page, "Rows compared") == "6"
    assert tile(page, "Accuracy") == "50.0 %"
    assert tile(page, "95 % interval") == "18.8 – 81.2 %"
    assert tile(page, "Expected calibration error") == "17.0 %"
    text = text_of(page)
    assert "compared with “truth”. White space around both is left out" in text
    assert "3 rows without a true label: it is missing, null or empty." in text
    assert "1 row with a true label that the request does not allow: “GOOD” (1)" in text
    assert "Counted as wrong, they would make the accuracy 42.9 %." in text
    assert "1 row with an answer that is no label" in text
    assert "1 row without labels" in text

    labels = data["labels"]
    assert labels["names"] == ["bad", "fine", "good", NO_LABEL]
    assert labels["counts"] == [2, 0, 7, 1]
    assert [2, 2, 2] in labels["pairs"] and sum(n for *_, n in labels["pairs"]) == 6
    assert [(place, part["num_rows"]) for place, part, _ in labels["bins"]] == [
        (5, 2),
        (9, 7),
    ]
    row = data["rows"][2]
    assert row["label"] == {"p": 0.95, "truth": "bad", "verdict": "wrong"}
    assert row["choices"][0]["odds"][0] == [" good", 0.95]
    assert row["choices"][0]["mass"] == 0.5
    assert "label" not in data["rows"][-1], "a row that was asked for none"


def test_without_a_truth_nothing_is_compared(output: Path) -> None:
    page, data = make_report(output)
    assert tile(page, "Rows labelled") == "10"
    assert "Accuracy" not in page and "compared with" not in text_of(page)
    assert data["labels"]["pairs"] == [] and len(data["labels"]["bins"]) == 2
    assert data["rows"][0]["label"]["verdict"] is None


def test_a_page_without_labels_has_no_section(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(plain_answer(1, "free") + plain_answer(2, "text"))
    page, data = make_report(output)
    assert 'id="label-tables"' not in page and "Rows labelled" not in page
    assert data["labels"]["names"] == [] and "label" not in data["rows"][0]


def test_a_truth_is_never_the_name_of_no_label(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(labelled(" go", truth=NO_LABEL))
    assert scan_output(output, "truth").verdicts == {"stranger": 1}


@pytest.mark.parametrize(
    "fields, truth, verdict",
    [
        ({"guided_choice": ["4", "5"]}, 5, "right"),
        ({"guided_choice": ["4", "5"]}, 4, "wrong"),
        ({"guided_choice": ["4", "5"]}, 5.0, "stranger"),
        ({"structured_outputs": {"choice": ["5"]}, "echo": True}, "5", "right"),
    ],
)
def test_plain_choices_are_labels(
    tmp_path: Path, fields: dict[str, Any], truth: object, verdict: str
) -> None:
    """They have no probabilities; under echo the prompt is no part of the label."""
    is_echo = "echo" in fields
    record = json.loads(plain_answer(1, "prompt 15" if is_echo else "5", **fields))
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps({**record, "stars": truth}) + "\n")
    tally = scan_output(output, "stars")
    assert tally.counts["5"] == 1 and tally.verdicts == {verdict: 1}
    assert tally.bins == {} and tally.calibration_error == 0


def test_of_several_choices_the_first_counts(tmp_path: Path) -> None:
    record = json.loads(labelled(" good", truth="good"))
    choices = record["result"]["choices"]
    choices.append({**choices[0], "text": " bad", "index": 1})
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps(record) + "\n")
    page, _ = report_truth(output, "truth")
    assert tile(page, "Accuracy") == "100.0 %"
    assert "1 row with several choices: the first choice counts." in text_of(page)


def test_a_chat_and_a_batch_answer_have_labels(tmp_path: Path) -> None:
    """A Batch record tells its labels only where it has their probabilities."""
    chat = json.loads(labelled(" good", {" good": 0.7, " bad": 0.3}))
    choice = chat["result"]["choices"][0]
    choice["message"] = {"role": "assistant", "content": choice.pop("text")}
    response = {"status_code": 200, "body": {"model": "m", **chat["result"]}}
    batch = {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None}
    output = tmp_path / "out.jsonl"
    output.write_text(json.dumps(chat) + "\n" + json.dumps(batch) + "\n")
    tally = scan_output(output, None)
    assert tally.counts == {"good": 2, "bad": 0, "fine": 0}
    assert tally.bins[7].num_rows == 2


def test_the_least_sure_rows_and_the_surest_wrong_ones_are_shown(
    tmp_path: Path,
) -> None:
    """Of many rows, those are chosen that a person should look at."""
    output = tmp_path / "out.jsonl"
    with output.open("wb") as file:
        for number in range(1, 3001):
            p = 0.5 + number / 6100
            truth = "bad" if number % 2 else "good"
            file.write(labelled(" good", {" good": p, " bad": 1 - p}, truth=truth))
    _, data = report_truth(output, "truth")
    unsure = [row["line"] for row in data["rows"] if "unsure" in row["why"]]
    assert unsure == [*range(1, NUM_UNSURE + 1)]
    wrong = [row["line"] for row in data["rows"] if "wrong" in row["why"]]
    assert wrong == [*range(2971, 3001, 2)]
    assert len(data["rows"]) == 200


def test_memory_does_not_grow_with_labels_and_truths(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with output.open("wb") as file:
        for number in range(3 * MAX_NAMES):
            names = [f"label {number}", f"other {number}"]
            beside = {"truth": names[number % 2], f"key {number}": 1}
            file.write(labelled(names[0], names=names, **beside))
            file.write(labelled(names[0], names=names, truth=f"stranger {number}"))
    tally = scan_output(output, "truth")
    assert len(tally.counts) == len(tally.strangers) == MAX_NAMES + 1
    assert tally.counts.total() == 6 * MAX_NAMES and tally.pairs.total() == 300
    assert len(tally.pairs) <= (MAX_NAMES + 1) ** 2
    assert len(tally.columns) <= MAX_NAMES + 1
    assert tally.verdicts == {"right": 150, "wrong": 150, "stranger": 300}


def test_a_column_that_is_not_there_is_refused(output: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no row has this column; there are: "):
        report_truth(output, "label")
    found = call("report", output, "--truth", "label")
    assert found.exit_code == 2 and "text, truth" in found.output
    assert not list(tmp_path.glob("*.html"))

    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(plain_answer(1, "x"))
    with pytest.raises(UsageError, match="no answer is one"):
        report_truth(plain, "label")
    bare = json.loads(labelled(" bad"))
    plain.write_text(json.dumps(bare) + "\n")
    with pytest.raises(UsageError, match=r"requests\. Leave --truth out"):
        report_truth(plain, "label")


@pytest.mark.parametrize(
    "num_right, number, low, high",
    # as statsmodels.stats.proportion.proportion_confint gives them, by method="wilson"
    [
        (8, 10, 0.49016, 0.94332),
        (0, 10, 0.0, 0.27754),
        (10, 10, 0.72246, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(num_right: int, number: int, low: float, high: float) -> None:
    interval = compute_interval(num_right, number)
    assert interval == pytest.approx((low, high), abs=1e-5)
    if 0 < num_right < number:  # its ends solve the equation that defines it
        for end in interval:
            spread = 1.959964 * math.sqrt(end * (1 - end) / number)
            assert abs(num_right / number - end) == pytest.approx(spread)


def test_a_run_compares_labels(tmp_path: Path) -> None:
    """From a real run with probabilities, and with --truth beside --report."""
    choice = {"choice": [" north", " south"], "probabilities": True}
    lines = [
        {
            "request": {"prompt": f"Which way? {n}", "structured_outputs": choice},
            "truth": "north" if n % 2 else "south",
        }
        for n in range(6)
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    page = tmp_path / "r.html"
    refused = call("run", *FLAGS, source, "--truth", "truth")
    assert refused.exit_code == 2 and "Add --report FILE" in refused.output
    assert not (tmp_path / "output_in.jsonl").exists()

    result = call("run", "-q", *FLAGS, source, "--report", page, "--truth", "truth")
    assert result.exit_code == 0, result.output
    text, data = read_page(page)
    answers = (tmp_path / "output_in.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in answers]
    num_right = sum(
        record["result"]["choices"][0]["text"].strip() == record["truth"]
        for record in records
    )
    assert tile(text, "Accuracy") == f"{100 * num_right / 6:.1f} %"
    for row, record in zip(data["rows"], records, strict=True):
        odds = record["result"]["choices"][0]["label_probabilities"]
        assert row["label"]["p"] == max(odds.values())
        assert row["choices"][0]["odds"] == [[*each] for each in odds.items()]

    page.unlink()
    failed = call("run", "-q", *FLAGS, source, "--report", page, "--truth", "lable")
    assert failed.exit_code == 1 and "there are: truth" in failed.output
    assert "The answers are as they were" in failed.output and not page.exists()


def test_a_truth_that_a_table_lacks_is_named_before_the_run(tmp_path: Path) -> None:
    """Otherwise an hour's run ended without its report."""
    table = tmp_path / "rows.csv"
    table.write_text("text,label\na,b\n")
    flags = ["--prompt-template", "{{ text }}", "--truth", "lable"]
    flags += ["--report", str(tmp_path / "page.html")]
    found = CliRunner().invoke(main, ["run", str(table), *flags])
    assert found.exit_code == 2
    assert "--truth lable" in found.output and "text, label" in found.output
    assert not (tmp_path / "output_rows.jsonl").exists()
