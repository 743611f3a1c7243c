"""A template makes a request of each row; a row of which it makes none costs itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import UsageError
from fminfer.files.line_reader import InputFile, count_to_last_line, read_lines
from fminfer.files.tables.row_template import PROMPT_FLAG, SYSTEM_FLAG, RowTemplate
from fminfer.files.tables.table_file import open_table

GOOD = "Is it good? {{ text }}"


def make_template(text: str = GOOD, system: str = "", **terms: Any) -> RowTemplate:
    templates = {PROMPT_FLAG: text} | ({SYSTEM_FLAG: system} if system else {})
    return RowTemplate(templates, **{"text_field": "prompt", **terms})


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_all(path: Path, template: RowTemplate, **limits: Any) -> list[Line]:
    return list(read_lines(path, 7, row_template=template, **limits))


def requests_of(lines: list[Line]) -> list[Any]:
    return [json.loads(line.raw)["request"] for line in lines]


def render(tmp_path: Path, template: str, row: dict[str, Any]) -> str:
    """Return the prompt of a row, or what is wrong with it."""
    path = write_rows(tmp_path / "a.jsonl", [row])
    (line,) = read_all(path, make_template(template))
    request = json.loads(line.raw)["request"]
    return line.fault if request is None else request["prompt"]


def test_each_row_is_a_wrapped_line_with_its_cells(tmp_path: Path) -> None:
    """Lines have the source, the row's number, a request and the row."""
    path = write_rows(
        tmp_path / "a.jsonl", [{"text": "x", "n": 1}, {"text": "ü", "n": 2}]
    )
    lines = read_all(path, make_template(fields={"temperature": 0}))

    assert [(line.source, line.number, line.fault) for line in lines] == [
        (7, 1, ""),
        (7, 2, ""),
    ]
    assert json.loads(lines[1].raw) == {
        "request": {"prompt": "Is it good? ü", "temperature": 0},
        "row": {"text": "ü", "n": 2},
    }
    envelope = parse_envelope(lines[1])
    assert envelope.shape == "wrapped" and envelope.error is None
    assert not envelope.warnings


def test_kinds_of_requests(tmp_path: Path) -> None:
    """A chat has the system's message first; vectors have an input."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x", "who": "judge"}])
    chat = make_template(system="You are a {{ who }}.", text_field="messages")

    assert requests_of(read_all(path, chat)) == [
        {
            "messages": [
                {"role": "system", "content": "You are a judge."},
                {"role": "user", "content": "Is it good? x"},
            ]
        }
    ]
    (request,) = requests_of(read_all(path, make_template(text_field="messages")))
    assert [each["role"] for each in request["messages"]] == ["user"]
    (request,) = requests_of(read_all(path, make_template(text_field="input")))
    assert request == {"input": "Is it good? x"}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ('{{ row["review text"] }}', "fine"),
        ("{{ meta.title }} {{ meta['tags'][1] }}", "T b"),
        ("{{ nothing or 'none' }} {{ nothing | default('d', true) }}", "none d"),
        ("{% if nothing %}yes{% else %}no{% endif %}", "no"),
        ("{% if nothing is none %}null{% endif %}", "null"),
        ("{% if meta.gone is none %}null{% endif %}", "null"),
        ("{% if nothing == none %}null{% endif %}", "null"),
        ("{% for tag in meta.tags %}{{ tag }},{% endfor %}", "a,b,"),
        ("{{ n + 1 }} {{ big }}", "3 123456789012345678901234567890"),
        ("{{ row | tojson | length > 10 }}", "True"),
        ("{{ nothing | default('d') }} {{ absent | d('e') }}", "d e"),
        ("{{ nothing | tojson }} {{ [nothing] | tojson }}", "null [null]"),
        ("{{ meta.items }} {{ meta['keys'] }} {{ row.values }}", "[1] 2 3"),
        ("{% for name, tags in {'a': meta.tags}.items() %}{{ name }}{% endfor %}", "a"),
        ("{{ row['row'] }}", "its own"),
        ("{% if absent is defined %}{{ absent }}{% else %}-{% endif %}", "-"),
    ],
)
def test_what_templates_may_say(tmp_path: Path, template: str, prompt: str) -> None:
    """Columns of any name, nested cells, nulls that are not printed, large numbers."""
    row = {
        "review text": "fine",
        "meta": {
            "title": "T",
            "tags": ["a", "b"],
            "gone": None,
            "items": [1],
            "keys": 2,
        },
        "values": 3,
        "nothing": None,
        "n": 2,
        "big": 123456789012345678901234567890,
        "row": "its own",
    }
    assert render(tmp_path, template, row) == prompt


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ txt }}", "'txt' is undefined. The row's columns are: text, empty, meta"),
        ("{{ row.txt }}", "no attribute 'txt'. The row's columns are: text, empty"),
        ("{{ empty }}", "empty is null, and a null cannot be printed"),
        ("{{ empty | upper }}", "empty is null"),
        ("{{ 'a' ~ empty }}", "empty is null"),
        ("{{ row['empty'] | trim }}", "empty is null"),
        ("{{ meta.gone | upper }}", "gone is null"),
        ("{% for each in meta.list %}{{ each }}{% endfor %}", "the value is null"),
        ("{{ empty | int }}", "empty is null"),
        ("{{ empty | float * 2 }}", "empty is null"),
        ("{{ meta.gone | round }}", "NullCell"),
        ("{{ meta.list | join(',') }}", "the value is null"),
        ("{{ meta.list }} ", "the value is null"),
        ("{{ meta }}", "gone is null"),
        ("{{ [empty] }}", "empty is null"),
        ("{{ row }}", "empty is null"),
        ("{{ none }}", "the value is null"),
        ("{{ meta.items }}", "method cannot be printed"),
        ("{{ self }}", "TemplateReference cannot be printed"),
        ("{{ meta.list | map('trim') }}", "generator cannot be printed"),
        ("{{ text / 2 }}", "TypeError"),
        ("{{ text.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'x' * 10 ** 10 }}", "the template fails: it takes more than"),
        ("{{ 'x' * 20_000_000 }}", "the template fails: it becomes 20,0"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "the template fails: it takes more than 2 s",
        ),
    ],
)
def test_what_costs_a_row(tmp_path: Path, template: str, fault: str) -> None:
    """A missing column, a printed null, and work without bound are the row's error."""
    row = {"text": "x", "empty": None, "meta": {"gone": None, "list": [None]}}
    started_s = time.monotonic()
    assert fault in render(tmp_path, template, row)
    assert time.monotonic() - started_s < 60


def test_a_row_in_error_has_its_cells_in_its_record(tmp_path: Path) -> None:
    """The record of a row without a request says the row's number, error and cells."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x"}, {"text": None}])
    line = read_all(path, make_template())[1]
    envelope = parse_envelope(line)
    record = json.loads(Record(line, envelope, error=envelope.error).to_json())

    assert record["line"] == 2
    assert record["error"]["code"] == "missing_prompt"
    assert record["request"] is None
    assert record["row"] == {"text": None}


def test_a_csv_row_with_too_many_cells_shows_them_all(tmp_path: Path) -> None:
    """A cell without a column would have no name; one without a cell is left out."""
    path = tmp_path / "a.csv"
    path.write_text("text,n\na,1,extra\nb\n")
    rows = [json.loads(line.raw)["row"] for line in read_all(path, make_template())]

    assert rows == ['["a","1","extra"]', {"text": "b"}]


def test_one_bad_row_costs_no_other_of_its_group(tmp_path: Path) -> None:
    """Rows are rendered together; order and numbers stay, also around faults."""
    rows: list[Any] = [{"text": str(number)} for number in range(1, 301)]
    rows[99] = {"text": None}
    rows[149] = [1]
    rows[199] = {"text": "boom"}
    path = write_rows(tmp_path / "a.jsonl", rows)
    template = "{% if text == 'boom' %}{{ 'x' * 10 ** 10 }}{% endif %}{{ text }}"
    lines = read_all(path, make_template(template))

    assert [line.number for line in lines] == list(range(1, 301))
    bad = {line.number: line.fault_code for line in lines if line.fault}
    assert bad == {100: "missing_prompt", 150: "invalid_json", 200: "missing_prompt"}
    good = [line for line in lines if not line.fault]
    assert [int(each["prompt"]) for each in requests_of(good)] == [
        line.number for line in good
    ]
    batches = open_table(path).read_batches()
    assert sum(batch.num_rows for batch in batches) == 300


def test_a_template_without_end_ends_the_run(tmp_path: Path) -> None:
    """Ten rows in turn that take too long are told at once; fewer cost themselves."""
    path = write_rows(tmp_path / "a.jsonl", [{"n": n} for n in range(200)])
    template = "{% if n >= START %}{{ 'x' * 10 ** 10 }}{% endif %}{{ n }}"

    lines = read_lines(
        path, 0, row_template=make_template(template.replace("START", "134"))
    )
    assert [next(lines).number for _ in range(128)] == [*range(1, 129)]
    with pytest.raises(UsageError, match="10 rows in turn: it takes more than"):
        next(lines)
    few = make_template("{% if 60 < n < 70 %}{{ 'x' * 10 ** 10 }}{% endif %}{{ n }}")
    assert sum(bool(line.fault) for line in read_all(path, few)) == 9


def test_long_rows_are_rendered_in_small_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's rows share one limit of time and memory."""
    asked: list[int] = []
    ask = RowTemplate._ask_pool

    def ask_and_note(template: RowTemplate, rows: list[bytes]) -> Any:
        asked.append(len(rows))
        return ask(template, rows)

    monkeypatch.setattr(RowTemplate, "_ask_pool", ask_and_note)
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x" * 1_000_000}] * 11)

    assert len(read_all(path, make_template("{{ text | length }}"))) == 11
    assert asked == [5, 5, 1]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    """Numbers count rows, so that batches of the table have the same ones."""
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "b"}\n\n')
    lines = read_all(path, make_template())

    assert [line.number for line in lines] == [1, 2]
    assert count_to_last_line(path, row_template=make_template()) == (2, 2)
    assert count_to_last_line(path, 1, make_template()) == (1, 1)


def test_columns_set_fields(tmp_path: Path) -> None:
    """Parquet's integers are integers; a null leaves the field out."""
    path = tmp_path / "a.parquet"
    limits = pyarrow.array([3, None], pyarrow.int8())
    table = {"text": ["a", "b"], "limit": limits, "ends": [["x"], None]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    columns = {"max_tokens": "limit", "stop": "ends"}
    lines = read_all(path, make_template(columns=columns, fields={"seed": 1}))

    assert requests_of(lines) == [
        {"prompt": "Is it good? a", "seed": 1, "max_tokens": 3, "stop": ["x"]},
        {"prompt": "Is it good? b", "seed": 1},
    ]


def test_texts_of_a_csv_set_fields(tmp_path: Path) -> None:
    """A number is one; an empty cell leaves the field out; other texts stay texts."""
    path = tmp_path / "a.csv"
    path.write_text('text,limit,user,bias\na,3,"me",\nb,,NaN,"{""5"": 1}"\n')
    columns = {"max_tokens": "limit", "user": "user", "logit_bias": "bias"}

    assert requests_of(read_all(path, make_template(columns=columns))) == [
        {"prompt": "Is it good? a", "max_tokens": 3, "user": "me"},
        {"prompt": "Is it good? b", "user": "NaN", "logit_bias": {"5": 1}},
    ]


def test_what_no_number_can_be_is_a_text(tmp_path: Path) -> None:
    """A number that is too large, and brackets without end, end no run."""
    path = tmp_path / "a.csv"
    path.write_text(f"text,n\na,1e999\nb,{'[' * 3000}\n")
    lines = read_all(path, make_template(columns={"seed": "n"}))

    assert [each["seed"] for each in requests_of(lines)] == ["1e999", "[" * 3000]


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    """It is refused where columns are known, and else costs each row without it."""
    template = make_template(columns={"max_tokens": "limit"})
    table = tmp_path / "a.csv"
    table.write_text("text,n\na,1\n")
    with pytest.raises(UsageError, match=r"no column .*Its columns are: text, n"):
        template.count_rows(table)

    image = tmp_path / "b.parquet"
    columns = {"text": ["a"], "limit": [b"\xff"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), image)
    with pytest.raises(UsageError, match="has the type binary, which is not read"):
        read_all(image, template)

    rows = write_rows(tmp_path / "c.jsonl", [{"text": "a"}, {"text": "b", "limit": 2}])
    first, second = read_all(rows, template)
    assert "--column max_tokens=limit: the row has no such column" in first.fault
    assert json.loads(second.raw)["request"]["max_tokens"] == 2


@pytest.mark.parametrize("text", ["{% if %}", "{{ text", "{% for x in y %}"])
def test_a_template_that_does_not_compile_is_refused(text: str) -> None:
    """It is refused before any row is read, with its flag and line."""
    with pytest.raises(UsageError, match="--prompt-template, line 1"):
        make_template(text).check_syntax()
    make_template().check_syntax()


def test_the_fingerprint_tells_templates_apart() -> None:
    """Each term has a part in it, under the name of its flag."""
    plain = make_template().fingerprint
    assert [*plain] == [PROMPT_FLAG, "--field, --choices and request flags"]
    others = [
        make_template("{{ text }}"),
        make_template(system="S"),
        make_template(fields={"seed": 1}),
        make_template(columns={"seed": "n"}),
        make_template(delimiter=";"),
        make_template(text_field="messages"),
    ]
    assert all(other.fingerprint != plain for other in others)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_edit_during_the_run_is_noticed(
    tmp_path: Path, kind: str, in_place: bool
) -> None:
    """The run ends with an error, unless it has read the old file to its end."""

    def write_table(path: Path, word: str) -> None:
        texts = [f"{word} {number}" for number in range(2000)]
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        else:
            path.write_text("text\n" + "".join(f"{text}\n" for text in texts))

    path = tmp_path / f"a.{kind}"
    write_table(path, "old")
    table = InputFile(path, 0, None, make_template())
    table.count_rows()
    assert table.num_rows == 2000
    lines = table.read_lines()
    next(lines)
    if in_place:
        write_table(path, "new")
    else:
        write_table(tmp_path / "new", "new")
        os.replace(tmp_path / "new", path)
    if kind == "csv" and not in_place:  # the old file is open, and is read to its end
        assert all(b"old" in line.raw for line in lines)
    else:
        with pytest.raises(UsageError, match="was changed while it was being"):
            list(lines)
    unchanged = InputFile(path, 0, None, make_template())
    assert len(list(unchanged.read_lines())) == 2000
    limited = InputFile(path, 0, 5, make_template())
    assert len(list(limited.read_lines())) == 5


def test_a_pipe_gives_each_row_at_once(tmp_path: Path) -> None:
    """Whoever writes a pipe may wait for a row's answer before the next row."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    file = os.open(path, os.O_RDWR)
    lines = read_lines(path, 0, row_template=make_template())
    for text in ("a", "b"):
        os.write(file, json.dumps({"text": text}).encode() + b"\n")
        assert text in json.loads(next(lines).raw)["request"]["prompt"]
    os.close(file)
