"""The page of a report: safe whatever texts say, small whatever outputs hold, honest
about gaps."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import OutputError, UsageError
from fminfer.files.journal_rows import Row
from fminfer.files.status_file import status_path
from fminfer.job.report.plain_text import make_visible
from fminfer.job.report.report_file import write_report
from fminfer.job.report.report_page import make_safe
from fminfer.job.report.reported_outputs import find_outputs, read_output
from fminfer.job.report.scanning import OutOfTimeError
from fminfer.job.report.shown_rows import MAX_SHOWN, make_previews
from tests.job.report_outputs import (
    ASK,
    FLAGS,
    HOSTILE,
    PLACES,
    call,
    make_report,
    plain_answer,
    read_page,
    text_of,
    tile,
    write_lines,
)


class Elements(HTMLParser):
    """Notes every element, and those attributes that could load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.risky: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "style", "action", "data")
        self.risky += [(n, v) for n, v in attrs if n in names or n.startswith("on")]


def elements_of(page: str) -> Elements:
    found = Elements()
    found.feed(page)
    return found


@pytest.fixture()
def hostile(tmp_path: Path) -> Path:
    """Return an output whose every text is hostile, its file's name too."""
    name = "a<script>&\"'.jsonl"
    output = tmp_path / name
    lines = [plain_answer(1, HOSTILE, stop=HOSTILE, **{HOSTILE: 1})]
    message = {"role": HOSTILE, "content": HOSTILE, "tool_calls": _calls(HOSTILE)}
    request = {
        "messages": [message, "\ud83d alone"],
        "tools": [{"function": {"name": HOSTILE}}],
    }
    choice = {
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": _calls(HOSTILE),
        },
        "finish_reason": HOSTILE,
        "stop_reason": HOSTILE,
        "logprobs": {"content": [_entry(HOSTILE), _entry("\udc00")]},
    }
    result = {
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    record = {"request": request, "result": result, HOSTILE: HOSTILE}
    lines.append(json.dumps(record).encode() + b"\n")
    output.write_bytes(b"".join(lines))
    error = {"message": HOSTILE, "type": HOSTILE, "param": HOSTILE, "code": HOSTILE}
    record = {
        "line": 3,
        "custom_id": HOSTILE,
        "error": error,
        "retryable": False,
        "request": HOSTILE,
    }
    output.with_name(name.replace(".jsonl", ".errors.jsonl")).write_text(
        json.dumps(record) + "\n"
    )
    status = {
        "status": "completed",
        "model": HOSTILE,
        "input_file_id": HOSTILE,
        "request_counts": {"total": 3, "completed": 2, "failed": 1},
        "metadata": {"the dtype": HOSTILE, "--seed": HOSTILE},
        "fminfer": {
            "runs": [{"id": HOSTILE, "device": HOSTILE, "settings": {HOSTILE: HOSTILE}}]
        },
    }
    status_path(output).write_text(json.dumps(status))
    return output


def _calls(text: str) -> list[dict[str, Any]]:
    return [
        {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    ]


def _entry(text: str) -> dict[str, Any]:
    top = [{"token": text, "logprob": -0.5}]
    return {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": top}


def test_no_text_is_markup(hostile: Path) -> None:
    """Neither the page's own parts nor the rows' JSON give an element to what others wrote."""
    plain = hostile.with_name("plain.jsonl")
    plain.write_bytes(plain_answer(1, "x"))
    page, data = make_report(hostile)
    found = elements_of(page)
    assert found.tags.count("script") == 2 and "img" not in found.tags
    allowed = re.compile(r"data:image/svg.*|#row-\d+")
    assert [each for each in found.risky if not allowed.fullmatch(each[1] or "")] == []
    inner = page.split('id="data">')[1].split("</script>")[0]
    assert not re.search(r"[<>&\u2028\u2029]", inner)
    assert len(data["rows"]) == 3
    for char in "\x00\x07\x1b\u202e\u2028\ud83d\udc00":
        assert char not in page, f"U+{ord(char):04X}"
    assert "␀␇␛[31m‹U+202E›evil" in text_of(page)


def test_safe_json_means_the_same() -> None:
    value = {"a": HOSTILE, "b": "&lt;&amp;", "c": "<!--"}
    assert (
        json.loads(make_safe(json.dumps(value, ensure_ascii=False).encode())) == value
    )


def test_texts_of_any_language_stay_what_they_are() -> None:
    text = "tab\tline\nשלום مرحبا 日本 🎉 é \u200d"
    assert make_visible(text) == text
    assert make_visible("a\r\nb\rc\x7f\ud800") == "a\nb␍c␡\\ud800"


def test_the_policy_allows_the_page_alone(hostile: Path) -> None:
    page, _ = make_report(hostile)
    (policy,) = re.findall(
        r'http-equiv="Content-Security-Policy" content="(.*?)"', page
    )
    policy = html.unescape(policy)
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)[-1]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy


def test_many_long_rows_stay_small(tmp_path: Path) -> None:
    """Long prompts are cut in the middle, and the page says so; every number is of the whole."""
    output = tmp_path / "long.jsonl"
    logprobs = {
        "tokens": ["Ġword"] * 500,
        "token_logprobs": [-0.25] * 500,
        "top_logprobs": [{"Ġword": -0.25, "Ġother": -1.5, "Ġthird": -3.0}] * 500,
        "text_offset": [*range(0, 2500, 5)],
    }
    choice = {
        "text": " word" * 500,
        "index": 0,
        "logprobs": logprobs,
        "finish_reason": "length",
    }
    with output.open("wb") as file:
        for number in range(400):
            result = {
                "choices": [choice],
                "usage": {"prompt_tokens": 9000, "completion_tokens": 500},
            }
            prompt = f"start {number} " + "x" * 40_000 + " the end"
            file.write(
                json.dumps({"request": {"prompt": prompt}, "result": result}).encode()
                + b"\n"
            )
    page, data = make_report(output)
    assert len(page.encode()) < 2_000_000 and len(data["rows"]) == 200
    asked = data["rows"][0]["asked"][0]
    assert asked["text"].startswith("start ") and asked["tail"].endswith(" the end")
    prompt_length = len(asked["text"]) + asked["left_out"] + len(asked["tail"])
    assert 40_000 < prompt_length < 40_100
    assert "characters are cut in the middle" in text_of(page)
    assert tile(page, "Answer tokens") == "200,000"


SHOTS = "Good or bad?\nReview: It was broken when it came, and nobody helped me. → negative\n"
REVIEWS = [
    f"Review: The {x} died after {y} days. →" for x in ("lens", "case") for y in "23"
]


def test_previews_tell_what_differs() -> None:
    """They begin with a line, a sentence or a word, before what no other text has."""
    assert make_previews([SHOTS + each for each in REVIEWS]) == [
        f"…{each}" for each in REVIEWS
    ]
    scored = [f"{each} {word}" for each in REVIEWS for word in ("positive", "negative")]
    assert make_previews([SHOTS + each for each in scored]) == [
        f"…{each}" for each in scored
    ]
    chat = [
        "You judge reviews that people wrote of goods. Say what you think. " + x
        for x in "ab"
    ]
    assert make_previews(chat) == ["…Say what you think. a", "…Say what you think. b"]
    same = "the same prompt " * 20
    assert make_previews([same, same]) == [f"{same[:MAX_SHOWN]}…"] * 2
    assert make_previews(["short a", "", "short  \n b"]) == ["short a", "", "short b"]
    one_word = [f"{'x' * 300}{number}" for number in range(3)]
    assert make_previews(one_word) == [f"…{'x' * 60}{number}" for number in range(3)]
    found = make_previews(["y" * 5000, "y" * 9000])
    assert [len(each) for each in found] == [61, MAX_SHOWN + 2]


def test_the_list_tells_rows_apart(tmp_path: Path) -> None:
    """An echoed prompt does not stand in the answer's place again, be it a text or ids."""

    def record(number: int, prompt: object, text: str, **logprobs: Any) -> bytes:
        answer = json.loads(plain_answer(number, text, echo=True))
        answer["request"]["prompt"] = prompt
        answer["result"]["choices"][0] |= logprobs
        return json.dumps(answer).encode() + b"\n"

    tokens = {
        "tokens": ["a", "b", " c"],
        "token_logprobs": [None, -1, -1],
        "text_offset": [0, 1, 2],
    }
    output = tmp_path / "out.jsonl"
    output.write_bytes(
        b"".join(
            record(n, SHOTS + each, f"{SHOTS}{each} so")
            for n, each in enumerate(REVIEWS)
        )
        + record(5, [[1, 2], [3]], "ab c", logprobs=tokens)
        + record(6, ["first", "second"], "first")
    )
    message = {"role": "user", "content": SHOTS + REVIEWS[0] + " or?"}
    chat = {"request": {"messages": [{"role": "system", "content": "s"}, message]}}
    calls = [{"function": {"name": "look", "arguments": "{}"}}]
    chat["result"] = {"choices": [{"message": {"content": None, "tool_calls": calls}}]}
    request = {"prompt": ["x", "y"], "echo": True}
    odd = {"request": request, "result": {"choices": [{"text": "odd", "index": "?"}]}}
    with output.open("a") as file:
        file.write(json.dumps(chat) + "\n" + json.dumps(odd) + "\n")
    _, data = make_report(output)
    *starts, ids, several, called, last = [row["start"] for row in data["rows"]]
    assert starts == [[f"…{each}", "so"] for each in REVIEWS]
    assert (ids, several) == (["1 2", "c"], ["first", ""])
    assert called == [f"…{REVIEWS[0]} or?", "look{}"]
    assert last[0].startswith('{"request"') and last[1] == ""


def test_the_same_output_gives_the_same_page(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(plain_answer(n, f"answer {n}") for n in range(1, 3000)))
    first = make_report(output)
    second = make_report(output)
    assert first[1] == second[1] and len(first[1]["rows"]) == 200
    slow = [row["line"] for row in first[1]["rows"] if "slow" in row["why"]]
    assert slow == [*range(2985, 3000)]


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """Outputs of `merge`, of older versions and of other programs have no times, or no
    status."""
    output = tmp_path / "merged.jsonl"
    output.write_bytes(plain_answer(1, "x") + b'{"no": "record"}\nnot json\n\n')
    page, data = make_report(output)
    text = text_of(page)
    assert "merged.jsonl: there is no status file" in text and "Model not known" in text
    assert "the settings and the speed are not known" in text
    assert "older version" not in text, "perhaps it was fetched from a server"
    assert "2 lines could not be read as records" in text
    assert (
        tile(page, "Time of answering")
        == tile(page, "Tokens/s computed")
        == "not known"
    )
    assert len(data["rows"]) == 1
    counts = {"total": 1, "completed": 1, "failed": 0}
    old = {"status": "completed", "model": "old model", "request_counts": counts}
    old["fminfer"] = {
        "written": {"output": {"bytes": 7, "blake2b": ""}, "errors": None}
    }
    status_path(output).write_text(json.dumps(old))
    text = text_of(make_report(output)[0])
    assert "Model old model" in text and "was edited since the run wrote it" in text
    assert "an older version wrote it" in text
    assert "speed, time line and device are not known" in text


@pytest.mark.parametrize(
    "runs",
    [
        "text",
        [
            5,
            {
                "time_line": 3,
                "stats": [],
                "settings": 7,
                "seconds": "x",
                "started_at": None,
            },
        ],
        [
            {
                "id": 1,
                "seconds": 2,
                "time_line": {"every_s": 1, "fed": "1 x", "drawn": "", "done": ""},
            }
        ],
        [
            {
                "id": 1,
                "time_line": {
                    "every_s": 0,
                    "fed": "1",
                    "drawn": "1",
                    "done": "1",
                    "running": "1",
                },
            }
        ],
        [
            {
                "id": 1,
                "time_line": {
                    "every_s": 1,
                    "fed": "",
                    "drawn": "",
                    "done": "",
                    "running": "",
                },
            }
        ],
        [
            {
                "id": 1,
                "time_line": {
                    "every_s": 1,
                    "fed": "0",
                    "drawn": "0",
                    "done": "0",
                    "running": "0",
                },
            }
        ],
    ],
)
def test_an_odd_status_file_makes_no_odd_report(tmp_path: Path, runs: object) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(plain_answer(1, "x"))
    counts = {"total": 1, "completed": 1, "failed": 0}
    status = {
        "status": "completed",
        "request_counts": counts,
        "fminfer": {"runs": runs},
    }
    status_path(output).write_text(json.dumps(status))
    assert tile(make_report(output)[0], "Rows answered") == "1"


def journal_of(rows: list[Row]) -> bytes:
    head = json.dumps({"fminfer_journal": 1, "fingerprint": {}}).encode() + b"\n"
    return head + b"".join(row.to_line() for row in rows)


def rows_of_a_journal() -> Iterator[Row]:
    def row(
        number: int, record: bytes, *, is_error: bool = False, is_ours: bool = False
    ) -> Row:
        return Row(number, is_error, (3, 0, 2), 7, record.rstrip(b"\n"), is_ours)

    fault = {
        "line": 0,
        "custom_id": None,
        "error": {"message": "m", "code": "nan_logits"},
    }
    failed = json.dumps(
        fault | {"retryable": True, "request": {"prompt": "x"}}
    ).encode()
    yield row(7, plain_answer(7, "seven"))
    yield row(2, failed, is_error=True, is_ours=True)
    yield row(3, failed, is_error=True, is_ours=True)
    yield row(2, plain_answer(2, "two, later"))
    yield row(7, plain_answer(7, "seven, once more"))


def test_an_unfinished_output_is_shown_from_its_journal(tmp_path: Path) -> None:
    """A row that was tried again counts once; what is torn or damaged does not."""
    output = tmp_path / "out.jsonl"
    whole = journal_of([*rows_of_a_journal()])
    damaged = Row(9, False, (1, 0, 1), 7, plain_answer(9, "nine").rstrip()).to_line()
    torn = whole + damaged.replace(b"nine", b"NINE") + damaged[:-9]
    output.with_name("out.jsonl.journal").write_bytes(torn)
    page, data = make_report(output)
    assert (tile(page, "Rows answered"), tile(page, "Rows in error")) == ("2", "1")
    texts = {
        row["line"]: row["choices"][0]["text"]
        for row in data["rows"]
        if "choices" in row
    }
    assert texts == {7: "seven", 2: "two, later"}
    assert [row["line"] for row in data["rows"] if "error" in row] == [3]
    text = text_of(page)
    assert (
        "out.jsonl is not complete (status: not known)" in text and "nan_logits" in text
    )
    assert "The same command of fminfer run tries these rows again." in text


def test_a_record_with_odd_values_is_shown_as_it_stands(tmp_path: Path) -> None:
    """Nobody knows what other programs write into an output."""
    output = tmp_path / "out.jsonl"
    odd: list[dict[str, Any]] = [
        {
            "text": "x",
            "logprobs": {"tokens": ["x"], "token_logprobs": ["?"], "text_offset": [0]},
        },
        {"text": 5, "finish_reason": ["x"]},
        {
            "message": {"content": {"a": 1}, "tool_calls": [5]},
            "logprobs": {"content": [1]},
        },
        {
            "text": "x",
            "logprobs": {
                "tokens": ["x"],
                "token_logprobs": [-1.0],
                "text_offset": ["a"],
            },
        },
    ]
    lines = [
        {"request": {"prompt": "x"}, "result": {"choices": [each]}} for each in odd
    ]
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, data = make_report(output)
    assert "could not be read as records" in text_of(page) and data["rows"]
    last = data["rows"][-1]
    assert last["line"] == 4 and "text_offset" in last["asked"][0]["text"]


def test_values_that_are_too_large_or_too_deep(tmp_path: Path) -> None:
    """A request may hold them: an unknown field is only warned of."""
    rows = [json.loads(plain_answer(number, "x")) for number in range(12)]
    for number, row in enumerate(rows):
        row["request"]["huge"] = 10**400 + number
    rows[0]["result"]["request_time"] = {"batch_time": 1.0, "queue_time": "long"}
    rows[1]["result"]["usage"]["prompt_tokens"] = 10**400
    lines = [json.dumps(row).encode() for row in rows]
    deep = b'"request": {"deep": ' + b"[" * 990 + b"]" * 990 + b", "
    lines.append(plain_answer(12, "x").strip().replace(b'"request": {', deep, 1))
    output = tmp_path / "large.jsonl"
    output.write_bytes(b"".join(line + b"\n" for line in lines))
    page, data = make_report(output)
    assert tile(
        page, "Rows answered"
    ) == "12" and "1 line could not be read" in text_of(page)
    assert "1000000000" in str(data["rows"][0])
    assert "nested too deep" in str(data["rows"][-1])


def test_a_choice_without_rows_and_an_empty_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"")
    page, data = make_report(output)
    assert data["rows"] == [] and "No row is answered." in text_of(page)
    (tmp_path / "only.errors.jsonl").write_text("{}\n")
    assert "is not there; only its errors file is" in text_of(
        make_report(tmp_path / "only.jsonl")[0]
    )


def test_a_report_that_takes_too_long_is_not_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    path = tmp_path / "r.html"
    output.write_bytes(plain_answer(1, "x"))
    with pytest.raises(OutOfTimeError):
        write_report([read_output(output)], path, end_s=0.0)
    assert not path.exists()


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    path = tmp_path / "r.html"
    output.write_bytes(plain_answer(1, "x"))
    path.write_text("<!doctype html>old")

    def refuse(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OutputError, match=r"No space left.*answers are not touched"):
        write_report([read_output(output)], path)
    assert path.read_text() == "<!doctype html>old" and sorted(tmp_path.iterdir()) == [
        output,
        path,
    ]


def test_the_command_finds_outputs_and_names_its_page(tmp_path: Path) -> None:
    source = tmp_path / "q.jsonl"
    source.write_text('{"prompt": "x"}\n')
    found = call("report", source)
    assert (
        found.exit_code == 2 and "output_q.jsonl has no answers to them" in found.output
    )
    output = tmp_path / "output_q.jsonl"
    other = tmp_path / "other.txt"
    output.write_bytes(plain_answer(1, "x"))
    other.write_text("{}\n")
    for asked, name in (
        (output, "output_q.report.html"),
        (source, "output_q.report.html"),
        (tmp_path, "report.html"),
    ):
        found = call("report", asked)
        page = tmp_path / name
        kilobytes = round(page.stat().st_size / 1000)
        shown = f"1 row of 1 output, 1 of them shown, {kilobytes} KB"
        assert found.exit_code == 0 and shown in found.output
        page.unlink()
    for older in ("", "<!DOCTYPE HTML><p>older"):
        (tmp_path / "b.html").write_text(older)
        assert (
            call("report", output, source, "--out", tmp_path / "b.html").exit_code == 0
        )
    for arguments, text in (
        ([output, source], "2 outputs go into one report: give --out"),
        ([tmp_path / "no.jsonl"], "no.jsonl does not exist; give an output"),
        # a page of 0 rows was written
        ([tmp_path / "b.html"], "b.html is no output of a run"),
        ([other], "other.txt is no output of a run"),
        ([output, "--out", output], "holds rows of the report"),
        ([output, "--out", other], "exists and is no HTML page"),
        ([output, "--out", tmp_path / "no" / "r.html"], "there is no folder"),
        ([tmp_path / "empty"], "hold no answers"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        found = call("report", *arguments)
        assert found.exit_code == 2 and text in found.output, found.output
    assert output.read_bytes() == plain_answer(1, "x") and other.read_text() == "{}\n"


def test_a_split_folder_gives_the_answers_to_its_parts(tmp_path: Path) -> None:
    source = tmp_path / "q.jsonl"
    parts = tmp_path / "parts"
    lines = [
        {"prompt": ASK.format(place), "max_tokens": 1, "engine": engine}
        for engine in ("a", "b")
        for place in PLACES
    ]
    write_lines(source, lines)
    assert call("split", "--input-file", source, "--output-dir", parts).exit_code == 0
    for engine in "ab":
        flags = [*FLAGS, "--model-name", "demo"]
        assert call("run", "-q", *flags, parts / engine).exit_code == 0
    found = call("report", parts)
    assert found.exit_code == 0 and "16 rows of 2 outputs" in found.output, found.output
    page, data = read_page(parts / "report.html")
    assert data["files"] == ["a/output_request_0.jsonl", "b/output_request_0.jsonl"]
    assert tile(page, "Rows answered") == "16"


def test_an_output_is_found_once_by_all_its_names(tmp_path: Path) -> None:
    output = tmp_path / "output_q.jsonl"
    output.write_bytes(plain_answer(1, "x"))
    assert [each.path for each in find_outputs([output, tmp_path])] == [output]
    with pytest.raises(UsageError, match="does not exist"):
        find_outputs([tmp_path / "x.jsonl"])
