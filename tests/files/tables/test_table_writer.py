"""Tables of answers: an input's columns with their types, and the answers' beside them."""

from __future__ import annotations

import csv
import datetime as dt
import json
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fminfer.core.errors import OutputError, UsageError
from fminfer.files import ordered_output
from fminfer.files.journal import Journal
from fminfer.files.journal_rows import Row
from fminfer.files.ordered_output import write_ordered_output
from fminfer.files.streams import read_changed_ns
from fminfer.files.tables import table as table_module
from fminfer.files.tables import table_writer
from fminfer.files.tables.result_columns import make_result_columns
from fminfer.files.tables.table import BATCH_ROWS
from fminfer.files.tables.table_file import open_table
from fminfer.files.tables.table_writer import (
    TableOutput,
    TableTask,
    is_own_table,
    is_table_name,
    records_path,
)

LABELS = {"structured_outputs": {"choice": [" good", " bad"], "probabilities": True}}


def answer(number: int, *choices: dict[str, Any]) -> Row:
    """Return the row of an answered line, with its choices."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    record = {"request": {}, "result": {"choices": [*choices], "usage": usage}}
    return Row(number, False, (5, 0, 2), 0, json.dumps(record).encode())


def error(number: int) -> Row:
    """Return the row of a line in error."""
    record = {"line": number, "error": {"code": "too_long", "message": "of 9 tokens"}}
    return Row(number, True, (0, 0, 0), 0, json.dumps(record).encode())


def text(words: str) -> dict[str, Any]:
    return {"text": words, "finish_reason": "stop"}


def label(words: str, **labels: float) -> dict[str, Any]:
    shares = {f" {name}": share for name, share in labels.items()}
    return {**text(words), "label_probabilities": shares, "label_mass": 0.5}


def write(
    source: Path,
    output: Path,
    rows: list[Row],
    fields: dict[str, Any] | None = None,
    *,
    prefix: str = "",
    is_cut: bool = False,
    delimiter: str | None = None,
) -> Path:
    """Write a table of a journal's rows, which come in another order; return where."""
    table = TableOutput(output, make_result_columns(fields or {}, prefix), delimiter)
    table.check_input(open_table(source, delimiter))
    journal = Journal(records_path(output), {"the input": "x"})
    for row in reversed(rows):
        journal.append(row)
    try:
        task = TableTask(table, source, read_changed_ns(source), is_cut)
        write_ordered_output(journal, table=task)
    finally:
        journal.remove()
    return output


TYPES = {
    "id": pa.array([1, None, 3], pa.int8()),
    "share": pa.array([0.1, float("nan"), None], pa.float32()),
    "kind": pa.array(["a", "b", None]).dictionary_encode(),
    "price": pa.array([Decimal("1.50"), None, Decimal("-2.25")], pa.decimal128(9, 2)),
    "day": pa.array([dt.date(2024, 2, 29), None, dt.date(1969, 1, 1)]),
    "zoned": pa.array(
        [dt.datetime(2024, 1, 1, 12), None, None], pa.timestamp("us", "Europe/Berlin")
    ),
    "span": pa.array([dt.timedelta(seconds=3), None, None]),
    "raw": pa.array([b"\xff\x00", None, b""]),
    "tags": pa.array([["x", "y"], [], None]),
    "where": pa.array([{"lat": 1.5, "name": "é"}, None, {"lat": None, "name": "n"}]),
    "big": pa.array(["1", "2", "3"], pa.large_string()),
    "yes": pa.array([True, False, None]),
}


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """A Parquet table of three rows, with a column of each type, and metadata of its own."""
    path = tmp_path / "typed.parquet"
    schema = pa.table(TYPES).schema.with_metadata({"maker": "a test"})
    pq.write_table(pa.table(TYPES).cast(schema), path, row_group_size=2)
    return path


ROWS = [answer(1, text("Yes")), error(2), answer(3, text('No, "never"\n=1+1'))]
ADDED = {
    "answer": ["Yes", None, 'No, "never"\n=1+1'],
    "finish_reason": ["stop", None, "stop"],
    "error": [None, "too_long: of 9 tokens", None],
    "prompt_tokens": [5, None, 5],
    "completion_tokens": [2, None, 2],
}


def test_parquet_keeps_every_type_and_a_row_in_error_its_place(typed: Path) -> None:
    """The input's columns are the same arrays, of the same types, with the same metadata."""
    output = write(typed, typed.with_name("labels.parquet"), ROWS)
    before = pq.read_table(typed)
    after = pq.read_table(output)
    for name in before.column_names:
        assert after.schema.field(name) == before.schema.field(name)
        # as texts, in which nan equals nan
        columns = after.column(name), before.column(name)
        assert repr(columns[0].to_pylist()) == repr(columns[1].to_pylist())
    assert after.select([*ADDED]).to_pydict() == ADDED
    assert after.schema.metadata[b"maker"] == b"a test"
    assert str(after.schema.field("prompt_tokens").type) == "int64"
    assert is_own_table(output) and not is_own_table(typed)


def test_polars_and_pandas_read_the_types_back(typed: Path) -> None:
    output = write(typed, typed.with_name("labels.parquet"), ROWS)
    frame = polars.read_parquet(output)
    assert frame.schema["price"] == polars.Decimal(9, 2)
    assert frame.schema["zoned"] == polars.Datetime("us", "Europe/Berlin")
    assert frame.schema["tags"] == polars.List(polars.String)
    assert frame["answer"].to_list() == ADDED["answer"]
    data = pandas.read_parquet(output)
    assert str(data["zoned"].dtype) == "datetime64[us, Europe/Berlin]"
    assert data["kind"].dtype == "category"
    assert data["error"].dropna().to_list() == ["too_long: of 9 tokens"]


def test_csv_of_types_is_read_back_by_every_reader(typed: Path) -> None:
    """Nulls are empty, lists and objects JSON, bytes base64; the rest as pyarrow spells it."""
    output = write(typed, typed.with_name("labels.csv"), ROWS)
    rows = [*csv.reader(output.open(newline=""))]
    assert rows[0] == [*TYPES, *ADDED]
    first = dict(zip(rows[0], rows[1], strict=True))
    assert (
        first
        | {
            "id": "1",
            "share": "0.1",
            "kind": "a",
            "price": "1.50",
            "day": "2024-02-29",
            "zoned": "2024-01-01 13:00:00.000000+0100",
            "span": "3000000",
            "raw": "/wA=",
            "tags": '["x", "y"]',
            "where": '{"lat": 1.5, "name": "é"}',
            "yes": "true",
            "answer": "Yes",
            "error": "",
        }
        == first
    )
    assert rows[2][-5:] == ["", "", "too_long: of 9 tokens", "", ""]
    assert rows[3][-5] == 'No, "never"\n=1+1'

    data = pandas.read_csv(output)
    assert data["id"].dropna().to_list() == [1, 3]
    assert data["answer"].to_list()[2] == 'No, "never"\n=1+1'
    frame = polars.read_csv(output)
    assert frame.schema["id"] == polars.Int64
    assert frame["answer"].to_list() == ADDED["answer"]
    read = pyarrow.csv.read_csv(
        output, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)
    )
    assert read.column("completion_tokens").to_pylist() == [2, None, 2]
    own = [*open_table(output, None).read_rows()]
    assert isinstance(own[2], dict) and own[2]["answer"] == 'No, "never"\n=1+1'
    assert is_own_table(output)


def test_csv_in_csv_out_keeps_its_texts(tmp_path: Path) -> None:
    """Numbers stay unquoted, so that readers still take them for numbers."""
    source = tmp_path / "in.csv"
    source.write_bytes('\ufeffid;text\n007;" a, b"\n8;"two\nlines"\n9;\n'.encode())
    rows = [answer(number, text("x")) for number in (1, 2, 3)]
    output = write(source, tmp_path / "out.csv", rows, prefix="m_", delimiter=";")
    lines = output.read_text().split("\n", 2)
    assert lines[0] == (
        "id,text,m_answer,m_finish_reason,m_error,m_prompt_tokens,m_completion_tokens"
    )
    assert lines[1] == '007," a, b",x,stop,,5,2'
    frame = polars.read_csv(output)
    assert frame["text"].to_list() == [" a, b", "two\nlines", None]
    assert frame["id"].to_list() == [7, 8, 9]
    assert is_own_table(output)


def test_labels_and_their_probabilities(tmp_path: Path) -> None:
    """Labels are columns without their space; labels that are not told are null."""
    source = tmp_path / "in.csv"
    source.write_text("text\na\nb\nc\n")
    rows = [answer(1, label(" good", good=0.9, bad=0.1)), error(2)]
    rows.append(answer(3, label(" bad", bad=0.75)))
    output = write(source, tmp_path / "out.parquet", rows, LABELS)
    table = pq.read_table(output)
    assert table.column_names[1:] == [
        *ADDED,
        "label_probability",
        "label_mass",
        "good",
        "bad",
    ]
    assert table.column("answer").to_pylist() == [" good", None, " bad"]
    assert table.column("label_probability").to_pylist() == [0.9, None, 0.75]
    assert table.column("label_mass").to_pylist() == [0.5, None, 0.5]
    assert table.column("good").to_pylist() == [0.9, None, None]
    assert table.column("bad").to_pylist() == [0.1, None, 0.75]


def test_several_choices_are_lists(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text\na\nb\n")
    both = answer(
        1, label(" good", good=0.9, bad=0.1), label(" bad", good=0.9, bad=0.1)
    )
    fields = {**LABELS, "n": 2}
    output = write(source, tmp_path / "out.parquet", [both, error(2)], fields)
    table = pq.read_table(output)
    assert table.column("answer").to_pylist() == [[" good", " bad"], None]
    assert table.column("label_probability").to_pylist() == [[0.9, 0.1], None]
    assert table.column("good").to_pylist() == [[0.9, 0.9], None]
    assert table.column("prompt_tokens").to_pylist() == [5, None]
    assert table.schema.field("label_mass").type == pa.list_(pa.float64())
    texts = write(source, tmp_path / "out.csv", [both, error(2)], fields)
    assert pandas.read_csv(texts)["answer"].to_list()[0] == '[" good", " bad"]'


def test_rows_of_many_batches_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer stands beside its row, whatever the sizes of batches and row groups."""
    monkeypatch.setattr(table_writer, "GROUP_ROWS", 50)
    source = tmp_path / "in.parquet"
    words = [f"word {number}" for number in range(1, 801)]
    kinds = pa.array([word[-1] for word in words]).dictionary_encode()
    pq.write_table(pa.table({"text": words, "kind": kinds}), source, row_group_size=90)
    rows = [answer(n, text(word)) for n, word in enumerate(words, 1)]
    output = write(source, tmp_path / "out.parquet", rows)
    table = pq.read_table(output)
    assert table.column("answer").to_pylist() == words
    assert table.column("text").to_pylist() == words
    assert table.column("kind").to_pylist() == [word[-1] for word in words]
    assert 10 < pq.ParquetFile(output).num_row_groups <= 17


def test_groups_count_the_bytes_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with images all bytes were held until there were rows enough for a group.

    A dictionary, which every group holds, does not make the groups small.
    """
    monkeypatch.setattr(table_writer, "GROUP_BYTES", 10_000)
    source = tmp_path / "in.parquet"
    images = [bytes([number]) * 1000 for number in range(100)]
    words = pa.array([f"{number:02000}" for number in range(100)])
    kinds = words.dictionary_encode()
    pq.write_table(pa.table({"image": images, "kind": kinds}), source)
    rows = [answer(number, text("x")) for number in range(1, 101)]
    output = write(source, tmp_path / "out.parquet", rows)
    assert pq.read_table(output).column("image").to_pylist() == images
    assert 10 <= pq.ParquetFile(output).num_row_groups <= 15


@pytest.mark.parametrize("is_cut, num_read", [(True, 1), (False, 2)])
def test_rows_behind_the_last_answer_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool, num_read: int
) -> None:
    """After --limit all that was left of the input was read into memory."""
    source = tmp_path / "in.csv"
    source.write_text("text\n" + "a\n" * 5 * BATCH_ROWS)
    batches = []
    real = table_module.split_batches

    def split(rows: Any) -> Any:
        for batch in real(rows):
            batches.append(len(batch))
            yield batch

    monkeypatch.setattr(table_module, "split_batches", split)
    rows = [answer(number, text("x")) for number in range(1, BATCH_ROWS + 1)]
    with nullcontext() if is_cut else pytest.raises(UsageError, match="was changed"):
        write(source, tmp_path / "out.csv", rows, is_cut=is_cut)
    assert len(batches) == num_read


def test_damaged_parquet_is_no_table_of_a_run(tmp_path: Path) -> None:
    """One such file in a folder ended the run over it with a traceback."""
    path = tmp_path / "bad.parquet"
    size = 40
    path.write_bytes(b"PAR1" + b"\xff" * size + size.to_bytes(4, "little") + b"PAR1")
    assert not is_own_table(path)


def test_only_the_first_rows_and_none(tmp_path: Path) -> None:
    """A run with a limit writes its rows alone; a table without rows has its columns."""
    source = tmp_path / "in.csv"
    source.write_text("text\na\nb\nc\n")
    rows = [answer(1, text("x")), answer(2, text("y"))]
    output = write(source, tmp_path / "out.parquet", rows, is_cut=True)
    assert pq.read_table(output).column("text").to_pylist() == ["a", "b"]
    source.write_text("text\n")
    output = write(source, tmp_path / "none.parquet", [])
    assert pq.read_table(output).column_names == ["text", *ADDED]


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_other_rows_than_the_records_are_refused(tmp_path: Path, num_rows: int) -> None:
    """A table would put answers beside wrong rows; no file appears, also no draft."""
    source = tmp_path / "in.csv"
    source.write_text("text\na\nb\nc\n")
    rows = [answer(n, text("x")) for n in range(1, num_rows + 1)]
    with pytest.raises(UsageError, match=r"in\.csv was changed since its rows"):
        write(source, tmp_path / "out.parquet", rows)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_an_edit_while_the_table_is_written_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text\na\n")
    output = TableOutput(tmp_path / "out.csv", make_result_columns({}))
    journal = Journal(tmp_path / "out.records.jsonl", {})
    journal.append(answer(1, text("x")))
    task = TableTask(output, source, read_changed_ns(source) - 1, False)
    with pytest.raises(UsageError, match="was changed since"):
        write_ordered_output(journal, table=task)
    assert not output.path.exists() and not journal.output.exists()
    journal.remove()


def test_full_disk_keeps_the_journal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """pyarrow's writer met a full disk once more when it was collected, and printed that."""
    source = tmp_path / "in.csv"
    source.write_text("text\na\n")
    monkeypatch.setattr(
        ordered_output._SealedFile,
        "write",
        lambda *given: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(OutputError, match="No space left"):
        write(source, tmp_path / "out.parquet", [answer(1, text("x"))])
    assert not (tmp_path / "out.parquet").exists()
    assert capsys.readouterr().err == ""


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    """--prefix mends names of the input."""
    source = tmp_path / "in.csv"
    source.write_text("text,error\na,b\n")
    with pytest.raises(UsageError, match=r"a column 'error'.* --prefix"):
        write(source, tmp_path / "out.csv", [])
    output = write(source, tmp_path / "out.csv", [answer(1, text("x"))], prefix="m_")
    assert pandas.read_csv(output).columns.to_list()[:3] == [
        "text",
        "error",
        "m_answer",
    ]


def test_what_parquet_cannot_hold_is_refused_before(tmp_path: Path) -> None:
    """An object without members has no columns of its own in Parquet."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a", "empty": {}}\n')
    with pytest.raises(UsageError, match=r"out\.parquet cannot hold column 'empty' of"):
        write(source, tmp_path / "out.parquet", [])
    output = write(source, tmp_path / "out.csv", [answer(1, text("x"))])
    assert pandas.read_csv(output)["empty"].to_list() == ["{}"]


@pytest.mark.parametrize(
    "content, is_own",
    [
        (b"", False),
        (b"text,answer\n", False),
        (b"a,answer,finish_reason,error,prompt_tokens,completion_tokens\n", True),
        (b"manswer,finish_reason,error,prompt_tokens,completion_tokens\n", False),
        (b'"a\n', False),
        (b"PAR1", False),
        (b"PAR1\xff\xff\xff\xffPAR1", False),
        (b"\xff\xfe\0a", False),
    ],
)
def test_own_tables_are_known_by_content(
    tmp_path: Path, content: bytes, is_own: bool
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert is_own_table(path) is is_own


def test_names_of_tables_and_records() -> None:
    assert is_table_name("s3://b/a.parquet") and is_table_name(Path("a.csv"))
    assert not is_table_name(None) and not is_table_name("a.csv.gz")
    assert records_path(Path("d/a.b.parquet")) == Path("d/a.b.records.jsonl")
