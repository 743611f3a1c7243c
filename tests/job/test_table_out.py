"""Runs that write a table of an input's rows and their answers beside their records."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.input_folders import sort_folder
from fminfer.files.journal import journal_path
from fminfer.files.status_file import read_status, seals_of
from fminfer.files.tables import row_template
from fminfer.files.tables.result_columns import make_result_columns
from fminfer.files.tables.row_template import PROMPT_FLAG, RowTemplate
from fminfer.files.tables.table_writer import TableOutput, records_path
from fminfer.job.report.reported_outputs import find_outputs
from fminfer.job.run_inputs import open_files
from fminfer.models.checkpoint import open_model
from fminfer.runtime.load.assembly import make_line_counting
from tests.conftest import IS_ALL, run_files
from tests.files.test_journal import kill_at
from tests.job.test_try_again import bury_claims, close_all

ROWS = RowTemplate(
    {PROMPT_FLAG: "{{ text }}"}, "prompt", {"max_tokens": 2, "temperature": 0}
)
TEXTS = ["one", "two", None, "four", "five", "six", "seven"]
NAMES = ["id", "text", "answer", "finish_reason", "error"]


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=4)
    yield engine
    engine.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", TEXTS)


def write_source(path: Path, texts: list[str | None]) -> Path:
    ids = pa.array(range(len(texts)), pa.int16())
    pq.write_table(pa.table({"id": ids, "text": texts}), path, row_group_size=3)
    return path


def make_terms(path: Path, prefix: str = "", **terms: Any) -> dict[str, Any]:
    table = TableOutput(path, make_result_columns(ROWS.fields, prefix))
    return {"table": table, "row_template": ROWS, **terms}


def run(engine: fminfer.Engine, source: Path, table: Path, **terms: Any) -> None:
    """Answer a table into another one, as the command does."""
    run_files(engine, [source], [records_path(table)], **make_terms(table, **terms))


def finish(source: Path, table: Path, **terms: Any) -> bool:
    """Open a run's files; tell whether nothing is left for an engine."""
    values = make_terms(table, **terms)
    output = records_path(table)
    files = open_files([source], [output], RunTerms("fminfer-demo", {}, **values))
    files.abandon(KeyboardInterrupt())
    return files.is_finished


def read_answers(table: Path) -> dict[str, list[Any]]:
    read: dict[str, list[Any]] = pq.read_table(table).select(NAMES).to_pydict()
    return read


def names_beside(table: Path) -> set[str]:
    return {path.name for path in table.parent.iterdir()}


def test_rows_in_order_with_their_own_answers(
    engine: fminfer.Engine, source: Path, tmp_path: Path
) -> None:
    """Each row has the answer of its record, and a row in error nulls and its error."""
    table = tmp_path / "out.parquet"
    run(engine, source, table)
    answers = read_answers(table)
    assert answers["text"] == TEXTS and answers["id"] == [*range(7)]
    assert answers["answer"][2] is None and "null" in answers["error"][2]
    records = map(json.loads, records_path(table).read_text().splitlines())
    texts = {
        each["row"]["text"]: each["result"]["choices"][0]["text"] for each in records
    }
    assert len(texts) == 6
    for text, answer in zip(TEXTS, answers["answer"], strict=True):
        assert text is None or texts[text] == answer
    assert names_beside(table) == {
        "in.parquet",
        "out.parquet",
        "out.records.jsonl",
        "out.records.errors.jsonl",
        "out.records.status.json",
    }


@pytest.fixture
def answered(engine: fminfer.Engine, source: Path, tmp_path: Path) -> Path:
    table = tmp_path / "out.parquet"
    run(engine, source, table)
    return table


def test_a_missing_table_is_written_from_complete_records(
    answered: Path, source: Path
) -> None:
    """No engine is needed; the same bytes come again, also of the records."""
    before = {path: path.read_bytes() for path in answered.parent.glob("*.jsonl")}
    table = pq.read_table(answered)
    answered.unlink()
    assert finish(source, answered)
    assert pq.read_table(answered).equals(table)
    assert {path: path.read_bytes() for path in before} == before
    assert not journal_path(records_path(answered)).exists()


def test_another_prefix_or_form_is_written_from_complete_records(
    answered: Path, source: Path
) -> None:
    """Parquet and CSV beside one set of records know each other as theirs."""
    assert finish(source, answered, prefix="m_")
    assert pq.read_table(answered).column_names[2:4] == ["m_answer", "m_finish_reason"]
    csv = answered.with_suffix(".csv")
    assert finish(source, csv)
    frame = polars.read_csv(csv)
    assert frame["text"].to_list() == TEXTS
    assert frame["answer"].is_null().to_list() == [number == 2 for number in range(7)]

    changed_ns = csv.stat().st_mtime_ns
    assert finish(source, csv) and csv.stat().st_mtime_ns == changed_ns
    assert finish(source, answered) and "answer" in pq.read_table(answered).column_names
    seals = seals_of(read_status(records_path(csv))) or {}
    assert {"out.csv", "out.parquet"} < seals.keys()


def test_an_edited_table_is_not_replaced(answered: Path, source: Path) -> None:
    """A user who corrects labels in the table would lose that; --restart replaces it."""
    csv = answered.with_suffix(".csv")
    assert finish(source, csv)
    edited = csv.read_text().replace("one", "uno")
    csv.write_text(edited)
    for prefix in ("", "m_"):
        with pytest.raises(UsageError, match=r"out\.csv was not written by this run"):
            finish(source, csv, prefix=prefix)
    assert csv.read_text() == edited
    csv.unlink()
    assert finish(source, csv)


def test_a_report_of_a_table_names_its_records(answered: Path) -> None:
    """A report reads records; `fminfer report out.csv` called the table no output."""
    for table in (answered, answered.with_suffix(".csv")):
        with pytest.raises(UsageError, match=r"report .*/out\.records\.jsonl$"):
            find_outputs([table])


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_tables_of_others_are_not_replaced(
    engine: fminfer.Engine, source: Path, ending: str
) -> None:
    """A user's table of the output's name stays, also one that another run has written."""
    table = source.with_name(f"out{ending}")
    other = source.with_name(f"other{ending}")
    shutil.copy(source, table)
    for restart in (False, True):
        with pytest.raises(UsageError, match=f"out{ending} exists and is no table"):
            run(engine, source, table, restart=restart)
    run(engine, source, other)
    shutil.copy(other, table)
    with pytest.raises(UsageError, match="was not written by this run"):
        run(engine, source, table)
    run(engine, source, table, restart=True)
    assert not journal_path(records_path(table)).exists()


def test_more_rows_and_a_limit(
    engine: fminfer.Engine, source: Path, tmp_path: Path
) -> None:
    """The table has the first rows; without the limit all, and those that came since."""
    table = tmp_path / "out.parquet"
    terms = {
        "count_lines": make_line_counting(engine.config, open_model(engine.config))
    }
    run(engine, source, table, limit=4, **terms)
    first = read_answers(table)
    assert first["text"] == TEXTS[:4]
    run(engine, source, table, **terms)
    assert {name: cells[:4] for name, cells in read_answers(table).items()} == first
    write_source(source, ["zero", *TEXTS, "eight"])
    run(engine, source, table, **terms)
    grown = read_answers(table)
    assert grown["text"] == ["zero", *TEXTS, "eight"]
    assert grown["answer"][1:5] == first["answer"]


def test_an_edit_after_the_last_row_was_read(
    engine: fminfer.Engine,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows were read, and then moved before the table was written: it is not."""
    table = tmp_path / "out.parquet"
    real = row_template.RowTemplate.read_lines
    edit: list[Callable[[], Any]] = [
        lambda: write_source(source, ["new", *TEXTS[:-1]]),
    ]

    def read_and_edit(*given: Any) -> Any:
        yield from real(*given)
        edit.pop()()

    monkeypatch.setattr(row_template.RowTemplate, "read_lines", read_and_edit)
    with pytest.raises(UsageError, match=r"in\.parquet was changed"):
        run(engine, source, table)
    assert not table.exists() and journal_path(records_path(table)).exists()


def test_killed_at_any_change_of_a_file(
    engine: fminfer.Engine, source: Path, tmp_path: Path
) -> None:
    """The same command goes on: no row is lost, doubled or moved, and nothing is left over."""
    alone = tmp_path / "alone"
    alone.mkdir()
    run(engine, source, alone / "out.parquet")
    expected = pq.read_table(alone / "out.parquet")
    moment = 0
    patch = pytest.MonkeyPatch()
    for moment in range(0, 400, 1 if IS_ALL else 5):
        folder = tmp_path / f"at {moment}"
        folder.mkdir()
        table = folder / "out.parquet"

        def work(table: Path = table) -> None:
            run(engine, source, table)

        was_killed = kill_at(moment, work, patch)
        if was_killed:
            close_all(journal_path(records_path(table)))
            bury_claims(records_path(table))
            run(engine, source, table)
        assert pq.read_table(table).equals(expected)
        assert names_beside(table) == names_beside(alone / "out.parquet")
        if not was_killed:
            break
    assert moment > 20, "there are so many steps at least"


def test_a_full_disk_ends_the_run_and_keeps_rows(
    engine: fminfer.Engine, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    table = tmp_path / "out.parquet"
    real = os.replace

    def fill(path: Any, name: Any) -> None:
        if str(name).endswith(".parquet"):
            raise OSError(28, "No space left on device")
        real(path, name)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fill)
        with pytest.raises(fminfer.FminferError, match="No space left"):
            run(engine, source, table)
    assert not table.exists()
    close_all(journal_path(records_path(table)))
    assert finish(source, table)
    assert read_answers(table)["text"] == TEXTS


def command(*words: object) -> Result:
    options = ["run", "--kernels", "off", *map(str, words)]
    return CliRunner().invoke(main, options)


TEMPLATE = ("--prompt-template", "{{ text }}", "--raw", "--generate-seq-length", 2)


def test_the_command_names_the_table(source: Path, tmp_path: Path) -> None:
    """A name that the input has is refused; with --prefix it is not."""
    data = pq.read_table(source).append_column("answer", pa.array(["?"] * 7))
    pq.write_table(data, source)
    table = tmp_path / "labels.csv"
    words = (source, *TEMPLATE, "--output", table)
    refused = command(*words)
    assert refused.exit_code == 2 and "--prefix" in refused.stderr
    assert names_beside(table) == {"in.parquet"}
    result = command(*words, "--prefix", "m_", "--line-numbers")
    assert result.exit_code == 3, result.stderr
    assert f"table     {table}" in result.stderr
    assert polars.read_csv(table)["m_answer"].len() == 7
    record = json.loads(records_path(table).read_text().splitlines()[2])
    assert record["line"] == 4 and record["row"]["id"] == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (("in.jsonl", "--output", "a.parquet"), "the input has requests"),
        (("in.jsonl", "--prefix", "a"), "names columns of a table"),
        (("in.parquet", *TEMPLATE, "--output", "in.parquet"), "is the input"),
        (("in.parquet", "b.parquet", *TEMPLATE, "--output", "a.csv"), "is one file"),
        (("in.parquet", *TEMPLATE, "--output", "a.tsv"), "ends in .parquet or .csv"),
        ((".", *TEMPLATE, "--output", "a.csv"), "one file, and there are 3 inputs"),
        (("sub", *TEMPLATE, "--output", "a.csv", "--watch"), "--watch needs a folder"),
    ],
)
def test_what_is_refused(
    source: Path,
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(source.parent)
    Path("in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    Path("sub").mkdir()
    for copy in ("b.parquet", "sub/c.parquet"):
        shutil.copy(source, copy)
    result = command(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not Path("a.csv").exists()


def test_a_table_at_a_url(source: Path, tmp_path: Path) -> None:
    """Records and table are uploaded; the next run, on another machine, has nothing to do."""
    import fsspec

    words = (source, *TEMPLATE, "--output", "memory://tables/labels.parquet")
    result = command(*words, "--work-dir", tmp_path / "work")
    assert result.exit_code == 3, result.stderr
    with fsspec.open("memory://tables/labels.parquet", "rb") as file:
        assert pq.read_table(file).column("text").to_pylist() == TEXTS
    result = command(*words, "--work-dir", tmp_path / "other")
    assert result.exit_code == 3 and "7 kept" in result.stderr
    with fsspec.open("memory://tables/labels.parquet", "rb") as file:
        assert pq.read_table(file).column("text").to_pylist() == TEXTS


def test_a_folder_leaves_its_tables_of_answers_out(
    answered: Path, source: Path
) -> None:
    """The next run over the folder asked about its answers."""
    assert sort_folder(source.parent, has_rows=True).requests == [source]
    assert finish(source, answered.with_suffix(".csv"))
    contents = sort_folder(source.parent, has_rows=True)
    assert contents.requests == [source]
    (left_out,) = contents.left_out.values()
    assert {path.name for path in left_out} == {
        "out.csv",
        "out.parquet",
        "out.records.jsonl",
    }


def test_a_pipe_has_no_table(source: Path, tmp_path: Path) -> None:
    """Stdin lost every row and the run counted as done; a FIFO was waited for for ever."""
    fifo = tmp_path / "rows.jsonl"
    os.mkfifo(fifo)
    for name in ("-", fifo):
        result = command(name, *TEMPLATE, "--output", tmp_path / "labels.csv")
        assert result.exit_code == 2
        assert f"{name} is a pipe" in " ".join(result.stderr.split())
    assert names_beside(source) == {"in.parquet", "rows.jsonl"}


def test_a_table_at_a_url_is_fetched_first(source: Path, tmp_path: Path) -> None:
    """A user's own file there was replaced, and a table that was removed stayed away."""
    remote = tmp_path / "remote"
    remote.mkdir()
    table = remote / "labels.csv"
    url = f"file://{table}"
    words = (source, *TEMPLATE, "--output", url, "--work-dir", tmp_path / "work")

    table.write_text("MY OWN DATA\n")
    for more in ((), ("--restart",)):
        result = command(*words, *more)
        assert result.exit_code == 2 and "is no table" in result.stderr
    assert table.read_text() == "MY OWN DATA\n"

    table.unlink()
    assert command(*words).exit_code == 3
    whole = table.read_text()
    table.write_text(whole.replace("one", "uno"))
    result = command(*words)
    assert result.exit_code == 2 and "was edited since" in result.stderr
    assert "uno" in table.read_text()

    table.unlink()
    result = command(*words)
    assert result.exit_code == 3 and "7 kept" in result.stderr
    assert table.read_text() == whole
    assert "Uploading" not in command(*words).stderr
