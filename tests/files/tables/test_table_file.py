"""Tables are read right, row by row and in batches, or refused by name."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pyarrow.parquet.encryption
import pytest

from fminfer.core.errors import UsageError
from fminfer.files.streams import Digest, digest_file
from fminfer.files.tables import delimited_table
from fminfer.files.tables.table_file import RowFault, open_table

ROWS = [{"text": "good", "stars": 5}, {"text": None, "stars": 1}]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def write_text(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read_all(path: Path, delimiter: str | None = None) -> list[Any]:
    return list(open_table(path, delimiter).read_rows())


def read_batch_rows(path: Path) -> list[Any]:
    return [
        row
        for batch in open_table(path, None).read_batches()
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.ndjson.gz"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    """Rows, batches, columns and types do not depend on the kind of file."""
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if name == "a.parquet":
        write_parquet(path, {"text": ["good", None], "stars": [5, 1]})
    elif name == "a.json":
        write_text(path, json.dumps(ROWS, indent=1))
    else:
        data = lines.encode()
        write_text(path, gzip.compress(data) if name.endswith("gz") else data)

    table = open_table(path, None)

    assert list(table.read_rows()) == ROWS
    assert read_batch_rows(path) == ROWS
    assert table.columns == ("text", "stars")
    assert table.schema.types == [pyarrow.string(), pyarrow.int64()]
    assert table.num_rows == (2 if name == "a.parquet" else None)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_csv_has_texts_with_quotes_and_line_breaks(
    tmp_path: Path, ending: str
) -> None:
    """A byte order mark, quoted line breaks and delimiters, doubled quotes, blank lines."""
    text = '\ufeffid,review text\n1,"a, ""b""\nc"\n\n2,\n3,ü'.replace("\n", ending)
    path = write_text(tmp_path / "a.csv", text)

    expected = [
        {"id": "1", "review text": f'a, "b"{ending}c'},
        {"id": "2", "review text": ""},
        {"id": "3", "review text": "ü"},
    ]
    assert read_all(path) == expected
    assert read_batch_rows(path) == expected
    assert open_table(path, None).columns == ("id", "review text")


def test_bad_csv_rows_cost_themselves(tmp_path: Path) -> None:
    """A ragged row, one with a wrong quote, and one that is no UTF-8 are faults in place."""
    data = b'a,b\n1,2\n3\n4,5,6\n"7"x,8\n9,\xff\n10,11\n'
    rows = read_all(write_text(tmp_path / "a.csv", data))

    assert [row for row in rows if isinstance(row, dict)] == [
        {"a": "1", "b": "2"},
        {"a": "10", "b": "11"},
    ]
    faults = {
        number: row for number, row in enumerate(rows, 1) if isinstance(row, RowFault)
    }
    assert [*faults] == [2, 3, 4, 5]
    assert "1 cell, and the header has 2 columns (a, b)" in faults[2].message
    assert "written twice" in faults[4].message
    assert "not UTF-8 (byte 0xff" in faults[5].message
    batches = read_batch_rows(tmp_path / "a.csv")
    assert batches[1:4] == [
        {"a": "3", "b": None},
        {"a": "4", "b": "5"},
        {"a": None, "b": None},
    ]
    assert len(batches) == len(rows)


def test_a_quote_without_an_end_costs_its_line(tmp_path: Path) -> None:
    """The lines behind it are read again, whether another quote or the end tells of it."""
    text = 'id,text\n1,a\n2,"oops\n3,b\n4,c\n5,"hello"\n6,"x\ny"\n7,"z\n8,\xe4\n'
    rows = read_all(write_text(tmp_path / "a.csv", text))

    assert [row["id"] for row in rows if isinstance(row, dict)] == list("134568")
    faults = {n: row for n, row in enumerate(rows) if isinstance(row, RowFault)}
    assert {n: row.raw for n, row in faults.items()} == {1: b'2,"oops', 6: b'7,"z'}
    assert not any(row.is_damage for row in faults.values())
    assert "line 3 of the file" in faults[1].message
    assert "line 9 of the file is no CSV: a quote of this row" in faults[6].message
    assert len(read_batch_rows(tmp_path / "a.csv")) == len(rows)


def test_many_quotes_without_an_end_do_not_cost_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each line opens one, the file is given up; its digest is that of all bytes."""
    monkeypatch.setattr(delimited_table, "MAX_BYTES_AGAIN", 5000)
    path = write_text(tmp_path / "a.csv", "a,b\n" + 'x","y\n' * 10_000)
    digest = Digest()
    rows = list(open_table(path).read_rows(digest))

    assert [row.is_damage for row in rows] == [True]
    assert "as many before it" in rows[0].message
    assert str(digest) == digest_file(path)


@pytest.mark.parametrize("kind", ["line", "quote"])
def test_a_row_without_end_is_not_held(tmp_path: Path, kind: str) -> None:
    """It costs its line, and the file has not changed for that."""
    piece = b"x" * 999 + (b"x" if kind == "line" else b"\n")
    start = b'a,b\n1,2\n"' if kind == "quote" else b"a,b\n1,2\n"
    path = write_text(tmp_path / "a.csv", start + piece * 40_000 + b"\n3,4")
    digest = Digest()
    rows = list(open_table(path).read_rows(digest))

    assert [row for row in rows if isinstance(row, dict)] == [
        {"a": "1", "b": "2"},
        {"a": "3", "b": "4"},
    ]
    assert "see whether a quote is not closed" in rows[1].message
    assert len(rows) == (3 if kind == "line" else 40_002)
    assert str(digest) == digest_file(path)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_cr_outside_quotes_is_named(tmp_path: Path, ending: str) -> None:
    """In a cell it costs the row; a file of CR lines with one LF is refused."""
    text = f'a,b{ending}1,"x\ry"{ending}1,x\ry{ending}2,3{ending}'
    rows = read_all(write_text(tmp_path / "a.csv", text))

    assert rows[0] == {"a": "1", "b": "x\ry"}
    assert "it has a CR outside quotes" in rows[1].message
    assert rows[2] == {"a": "2", "b": "3"}
    with pytest.raises(UsageError, match=r"the header .* CR outside quotes"):
        open_table(write_text(tmp_path / "b.csv", f"a,b\r1,2\r2,3{ending}"))


def test_a_nul_is_text_or_costs_its_row(tmp_path: Path) -> None:
    """Python's reader refuses it before 3.11."""
    rows = read_all(write_text(tmp_path / "a.csv", "a,b\n\0,1\n2,3\n"))

    if sys.version_info >= (3, 11):
        assert rows[0] == {"a": "\0", "b": "1"}
    assert rows[1] == {"a": "2", "b": "3"}


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    """Python's limit of 131,072 characters a cell is none here."""
    path = write_text(tmp_path / "a.csv", f"a,b\n{'x' * 200_000},1\n2,3\n")

    assert [len(row["a"]) for row in read_all(path)] == [200_000, 1]


def test_delimiters(tmp_path: Path) -> None:
    """A .tsv has tabs; others are typed; a wrong one is noticed by the header."""
    tabs = write_text(tmp_path / "a.tsv", "a\tb\n1\t2\n")
    semicolons = write_text(tmp_path / "b.csv", "a;b\n1;2\n")
    typed_tabs = write_text(tmp_path / "c.csv", "a\tb\n1\t2\n")

    expected = [{"a": "1", "b": "2"}]
    assert read_all(tabs) == expected
    assert read_all(semicolons, ";") == expected
    assert read_all(typed_tabs, "\\t") == expected
    with pytest.raises(UsageError, match="Add --delimiter ';'"):
        open_table(semicolons, None)
    with pytest.raises(UsageError, match="one character"):
        open_table(semicolons, ";;")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", "a,a,b\n1,2,3\n", "several columns named 'a'"),
        ("a.csv", "a,b\r1,2\r", "CR alone"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "UTF-16"),
        ("a.csv", b"a,\xff\n1,2\n", "the header of .* not UTF-8"),
        ("a.csv", b"PAR1", "Parquet"),
        ("a.parquet", b"PAR1 cut", "cannot be read as Parquet"),
        ("a.parquet", b"a,b\n1,2\n", "cannot be read as Parquet"),
        ("b.csv", None, "is a pipe or a folder"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, name: str, data: str | bytes | None, message: str
) -> None:
    """What cannot be read as the table that its name promises is refused by name."""
    if data is None:
        (tmp_path / name).mkdir()
    else:
        write_text(tmp_path / name, data)
    with pytest.raises(UsageError, match=message):
        open_table(tmp_path / name, None)


def test_an_empty_csv_has_no_rows(tmp_path: Path) -> None:
    """It costs a folder's other files nothing."""
    assert read_all(write_text(tmp_path / "a.csv", "")) == []


def test_parquet_types_become_those_of_json(tmp_path: Path) -> None:
    """Dates, times and decimals are texts; nested and dictionary-encoded cells stay values."""
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)
    zoned = pyarrow.array([moment], pyarrow.timestamp("ns", "Europe/Berlin"))
    fraction = pyarrow.array([1_500_000_001], pyarrow.timestamp("ns"))
    columns = {
        "decimal": [Decimal("1.50")],
        "date": [moment.date()],
        "time": [moment.time()],
        "timestamp": [moment],
        "zoned": zoned,
        "fraction": fraction,
        "duration": [datetime.timedelta(seconds=2)],
        "word": pyarrow.array(["x"]).dictionary_encode(),
        "nested": [{"day": moment.date(), "tags": ["a", None]}],
        "large": pyarrow.array([2**64 - 1], pyarrow.uint64()),
        "nan": [float("nan")],
        "infinities": [[float("inf"), 1.5]],
        "pairs": pyarrow.array(
            [[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())
        ),
        "nothing": [None],
        "a.b": [True],
        "image": [b"\xff"],
        "images": [{"bytes": b"\xff", "path": "x"}],
    }
    path = write_parquet(tmp_path / "a.parquet", columns)

    (row,) = read_all(path)

    assert row == {
        "decimal": "1.50",
        "date": "2024-01-02",
        "time": "03:04:05",
        "timestamp": "2024-01-02 03:04:05",
        "zoned": "2024-01-02 04:04:05+0100",
        "fraction": "1970-01-01 00:00:01.500000001",
        "duration": 2_000_000,
        "word": "x",
        "nested": {"day": "2024-01-02", "tags": ["a", None]},
        "large": 2**64 - 1,
        "nan": "NaN",
        "infinities": ["Infinity", 1.5],
        "pairs": [("k", 1)],
        "nothing": None,
        "a.b": True,
    }
    table = open_table(path, None)
    assert [*table.unread_columns] == ["image", "images"]
    assert table.columns == tuple(columns)
    (batch,) = table.read_batches()
    assert batch.schema == table.schema


def test_a_large_row_group_is_read_in_batches(tmp_path: Path) -> None:
    """One row group of many rows gives batches of few, in order."""
    path = write_parquet(tmp_path / "a.parquet", {"n": list(range(3000))})

    batches = list(open_table(path, None).read_batches())

    assert len(batches) > 10
    assert [n for batch in batches for n in batch["n"].to_pylist()] == [*range(3000)]
    assert [row["n"] for row in read_all(path)] == [*range(3000)]


def write_damaged(path: Path, columns: dict[str, Any], damaged: str) -> Path:
    """Write a table of three row groups; in the second one a column's page is damaged."""
    fields = [
        pyarrow.field(name, pyarrow.array(cells).type, nullable=False)
        for name, cells in columns.items()
    ]
    pyarrow.parquet.write_table(
        pyarrow.table(columns, pyarrow.schema(fields)),
        path,
        row_group_size=300,
        compression="none",
        use_dictionary=False,
    )
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    start = metadata.row_group(1).column([*columns].index(damaged)).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 30] = b"\xff" * 30
    path.write_bytes(data)
    return path


def test_damaged_parquet_keeps_the_rows_before(tmp_path: Path) -> None:
    """A damaged page ends the file with a fault, and with a row of nulls in batches.

    The row groups before it are whole, and a column that forbids nulls has one.
    """
    texts = [f"{n:08}" for n in range(900)]
    path = write_damaged(tmp_path / "a.parquet", {"n": texts}, "n")
    rows = read_all(path)

    assert [row["n"] for row in rows[:-1]] == texts[:300]
    assert rows[-1].is_damage
    assert read_batch_rows(path) == [*rows[:-1], {"n": None}]


def test_damage_of_a_column_that_is_not_read_costs_no_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its cells are null from there on, and a warning says so."""
    columns = {"n": [*range(900)], "image": [b"%08d" % n for n in range(900)]}
    path = write_damaged(tmp_path / "a.parquet", columns, "image")
    rows = read_batch_rows(path)

    assert len(read_all(path)) == 900
    assert [row["n"] for row in rows] == columns["n"]
    images = [row["image"] for row in rows]
    assert images == columns["image"][:300] + [None] * 600
    assert "from row 301 on" in caplog.text and "image" in caplog.text


def test_a_time_without_a_text_costs_its_row(tmp_path: Path) -> None:
    """pyarrow would write what is no time."""
    zoned = pyarrow.array([0, 2**62, 0], pyarrow.timestamp("ms", "Europe/Berlin"))
    far = pyarrow.array([2**62, 0, None], pyarrow.timestamp("ms"))
    columns = {"far": far, "zoned": zoned, "text": ["<value out of range: "] * 3}
    rows = read_all(write_parquet(tmp_path / "a.parquet", columns))

    assert "column 'far' has a date or time" in rows[0].message
    assert "column 'zoned' has a date or time" in rows[1].message
    assert rows[2]["far"] is None


class PlainKeys(pyarrow.parquet.encryption.KmsClient):  # type: ignore[misc]
    """Keeps keys as they are."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64decode(key)


@pytest.mark.parametrize("has_plain_footer", [True, False])
def test_encrypted_parquet_is_refused(tmp_path: Path, has_plain_footer: bool) -> None:
    """It is named, also where only its columns are encrypted."""
    encryption = pyarrow.parquet.encryption
    properties = encryption.CryptoFactory(PlainKeys).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"k": ["a"]}, plaintext_footer=has_plain_footer
        ),
    )
    path = tmp_path / "a.parquet"
    write_parquet(path, {"a": ["x"]}, encryption_properties=properties)

    with pytest.raises(UsageError, match="is encrypted"):
        read_all(path)


def test_json_rows_keep_large_numbers_and_cost_themselves(tmp_path: Path) -> None:
    """A large integer stays exact; a line that is no object, or NaN, is a fault."""
    lines = (
        '{"n": 123456789012345678901234567890}\n[1]\n{"n": NaN}\n{"n": 1\n{"n": 2}\n'
        '{"n": [-1e400]}\n' + '{"n": %s}\n' % ("9" * 5000)
    )
    rows = read_all(write_text(tmp_path / "a.jsonl", lines))

    assert rows[0] == {"n": 123456789012345678901234567890}
    assert rows[4] == {"n": 2}
    assert "JSON list; a row is an object" in rows[1].message
    assert "NaN is not JSON" in rows[2].message
    assert isinstance(rows[3], RowFault)
    assert "the number -1e400 is too large" in rows[5].message
    assert isinstance(rows[6], RowFault)


def test_a_column_of_mixed_cells_becomes_json_text(tmp_path: Path) -> None:
    """Numbers widen; texts beside numbers are written as JSON; missing cells are null."""
    lines = '{"a": 1, "b": 1}\n{"a": 1.5, "b": "x"}\nbad\n{"c": [1]}\n'
    path = write_text(tmp_path / "a.jsonl", lines)

    assert read_batch_rows(path) == [
        {"a": 1.0, "b": "1", "c": None},
        {"a": 1.5, "b": '"x"', "c": None},
        {"a": None, "b": None, "c": None},
        {"a": None, "b": None, "c": [1]},
    ]


@pytest.mark.parametrize("is_nested", [True, False])
def test_large_integers_before_fractions_stay_exact(
    tmp_path: Path, is_nested: bool
) -> None:
    """A later batch with a fraction makes JSON texts of a column whose floats would differ."""
    numbers = [2**53 + 1] * 256 + [1.5]
    cells = [{"b": [number]} if is_nested else number for number in numbers]
    small = [*range(256), 1.5]
    rows = [
        {"a": cell, "n": n, "id": 2**60} for cell, n in zip(cells, small, strict=True)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = write_text(tmp_path / "a.jsonl", lines)
    found = read_batch_rows(path)

    assert [json.loads(row["a"]) for row in found] == cells
    assert [row["n"] for row in found] == small
    assert {row["id"] for row in found} == {2**60}


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    """In a cell it becomes JSON text; in a column's name it is refused for a table."""
    cell = write_text(tmp_path / "a.jsonl", '{"a": "\\ud800"}\n')
    name = write_text(tmp_path / "b.jsonl", '{"\\ud800": 1}\n')

    assert read_batch_rows(cell) == [{"a": '"\\ud800"'}]
    assert read_all(name) == [{"\ud800": 1}]
    with pytest.raises(UsageError, match=r"a column '.ud800': half"):
        read_batch_rows(name)


def test_cut_gzip_tells_where_it_ends(tmp_path: Path) -> None:
    """The rows before the cut are there."""
    packed = gzip.compress(
        b"a,b\n" + b"".join(b"%d,%d\n" % (n, n * n) for n in range(9999))
    )
    path = write_text(tmp_path / "a.csv.gz", packed[:-9000])

    rows = read_all(path)

    assert rows[0] == {"a": "0", "b": "0"}
    assert rows[-1].is_damage
    assert "cut off" in rows[-1].message
