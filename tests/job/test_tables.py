"""Runs over tables: requests of rows are answered, kept and refused as lines are."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

import fminfer
from fminfer.cli.app import main
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.files.journal import journal_path
from fminfer.files.tables.row_template import PROMPT_FLAG, RowTemplate
from fminfer.job.overview import find_overviews
from fminfer.models.checkpoint import open_model
from fminfer.runtime.load.assembly import make_line_counting
from tests.conftest import run_files
from tests.job.test_grown import stop_after

TEXTS = [f"way {number}" for number in range(40)]
ASK = "Question: {{ text }}?"
FLAGS = ["--generate-seq-length", "3", "--dtype", "float32", "--kernels", "off"]


def write_parquet(path: Path, texts: list[Any] = TEXTS) -> Path:
    columns = {"text": texts, "n": list(range(len(texts)))}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def write_csv(path: Path, texts: list[str] = TEXTS) -> Path:
    rows = [f"{text},{number}\n" for number, text in enumerate(texts)]
    path.write_text("text,n\n" + "".join(rows))
    return path


def invoke(command: str, *words: Any, **facts: Any) -> Result:
    return CliRunner().invoke(main, [command, *map(str, words)], **facts)


def ask(*words: Any) -> Result:
    """Run over tables with the template."""
    return invoke("run", "-q", *words, "--prompt-template", ASK, *FLAGS)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def choices_of(path: Path) -> list[Any]:
    return [record["result"]["choices"] for record in read(path)]


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=4)
    yield engine
    engine.close()


@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_a_table_is_answered_as_lines_that_say_the_same(
    tmp_path: Path, flags: list[str]
) -> None:
    """Parquet, CSV and JSONL give the answers of requests, as chats and completions."""
    write_parquet(tmp_path / "a.parquet")
    write_csv(tmp_path / "b.csv")
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ask(tmp_path, *flags, "--temperature", "1.5")
    assert found.exit_code == 0, found.output

    records = read(tmp_path / "output_a.jsonl")
    assert [record["row"]["n"] for record in records] == [*range(40)]
    fields = {"max_tokens": 3, "temperature": 1.5}
    prompts = [f"Question: {text}?" for text in TEXTS]
    lines = [
        {"prompt": text} | fields
        if flags
        else {"messages": [{"role": "user", "content": text}]} | fields
        for text in prompts
    ]
    assert [record["request"] for record in records] == lines
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert invoke("run", "-q", plain, *FLAGS[2:]).exit_code == 0
    answers = choices_of(plain / "output_d.jsonl")
    assert len({json.dumps(answer) for answer in answers}) > 1
    for name in ("a", "b", "c"):
        assert choices_of(tmp_path / f"output_{name}.jsonl") == answers


def test_a_stopped_run_goes_on_and_a_grown_table_keeps_its_answers(
    tmp_path: Path, engine: fminfer.Engine
) -> None:
    """Parquet is written anew to grow; rows that were there keep their answers."""
    counting = make_line_counting(engine.config, open_model(engine.config))
    row_template = RowTemplate(
        {PROMPT_FLAG: ASK}, "prompt", {"max_tokens": 3, "temperature": 0}
    )
    table = write_parquet(tmp_path / "a.parquet")
    output = tmp_path / "a.jsonl"
    terms = {"count_lines": counting, "row_template": row_template}
    stop_after(engine, 9, table, output, **terms)
    assert journal_path(output).exists()

    summary = run_files(engine, [table], [output], **terms)
    assert 0 < summary.num_kept_rows < 40
    assert summary.num_kept_rows + summary.num_rows == 40
    before = read(output)

    write_parquet(table, [None, *TEXTS])
    summary = run_files(engine, [table], [output], **terms)
    assert (summary.num_taken_rows, summary.num_rows) == (40, 0)
    assert summary.num_errors == 1
    after = read(output)
    assert [record["row"]["n"] for record in after] == [*range(1, 41)]
    assert [each["result"]["choices"] for each in after] == [
        each["result"]["choices"] for each in before
    ]

    write_parquet(table, TEXTS[:5])
    limited = run_files(engine, [table], [output], **terms, limit=2, restart=True)
    assert limited.num_rows == 2
    run_files(engine, [table], [output], **terms)
    assert len(read(output)) == 5


def test_another_template_is_another_run(tmp_path: Path) -> None:
    """It is refused by the flag's name, for a file and for a folder; no answer is lost."""
    table = write_csv(tmp_path / "a.csv")
    assert ask(table, "--limit", 3).exit_code == 0
    before = (tmp_path / "output_a.jsonl").read_bytes()
    for place in (table, tmp_path):
        found = invoke(
            "run", "-q", place, "--prompt-template", "{{ text }}", *FLAGS, "--limit", 3
        )
        assert found.exit_code == 2, found.output
        assert "belongs to a run that differs: it had another --prompt-template" in (
            found.stderr
        )
    assert (tmp_path / "output_a.jsonl").read_bytes() == before


def test_rows_in_error_are_told_with_their_numbers(tmp_path: Path) -> None:
    """A printed null, a ragged row and a bad field cost themselves alone."""
    table = tmp_path / "a.csv"
    table.write_text("text,limit\na,2\nb\nc,-1\nd,\n")
    found = ask(table, "--column", "min_tokens=limit")
    assert found.exit_code == 3, found.output
    assert [each["row"]["text"] for each in read(tmp_path / "output_a.jsonl")] == [
        "a",
        "d",
    ]
    errors = read(tmp_path / "output_a.errors.jsonl")
    codes = [(error["line"], error["error"]["code"]) for error in errors]
    assert codes == [(2, "invalid_json"), (3, "out_of_range")]
    assert errors[0]["row"] == {"text": "b"}


def test_a_folder_costs_no_more_than_the_table_that_is_wrong(tmp_path: Path) -> None:
    """A CSV with another delimiter is left out and named; an empty one has no rows."""
    write_csv(tmp_path / "a.csv", TEXTS[:3])
    (tmp_path / "b.csv").write_text("text;n\nx;1\n")
    (tmp_path / "c.csv").write_text("")
    (tmp_path / "d.CSV").write_text("text\nx\n")
    found = ask(tmp_path)
    assert "b.csv has one column" in found.stderr
    assert len(read(tmp_path / "output_a.jsonl")) == 3
    assert read(tmp_path / "output_c.jsonl") == []
    assert not (tmp_path / "output_b.jsonl").exists()
    again = invoke("run", tmp_path, "--prompt-template", ASK, *FLAGS)
    assert "3 kept from earlier runs" in again.stderr
    assert "an ending in capitals" in again.stderr


def test_status_of_tables(tmp_path: Path) -> None:
    """A table that is not yet answered was not counted, and one of answers not found."""
    write_csv(tmp_path / "a.csv", TEXTS[:3])
    assert "1 waiting" in invoke("status", tmp_path).stdout
    assert ask(tmp_path / "a.csv").exit_code == 0
    write_csv(tmp_path / "b.csv")
    write_parquet(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_text("no Parquet")
    (overview,) = find_overviews(tmp_path)
    found = {
        Path(file.output).name: (file.state, file.num_rows, file.why)
        for file in overview.files
    }
    assert found == {
        "output_a.jsonl": ("done", 3, None),
        "output_b.jsonl": ("waiting", None, None),
        "output_c.jsonl": ("waiting", 40, None),
        "output_d.jsonl": ("waiting", None, None),
    }
    assert "1 of 4 files done, 3 waiting" in invoke("status", tmp_path).stdout

    labels = tmp_path / "labels.csv"
    assert ask(tmp_path / "a.csv", "--output", labels).exit_code == 0
    assert "1 of 1 file done" in invoke("status", labels).stdout
    (overview,) = find_overviews(tmp_path)
    assert str(labels) in overview.left_out and len(overview.files) == 5


def test_stdin_has_rows(tmp_path: Path) -> None:
    words = ["run", "-q", "-", "--prompt-template", ASK, *FLAGS]
    found = CliRunner().invoke(main, words, input='{"text": "a"}\n{"text": "b"}\n')
    assert found.exit_code == 0, found.output
    rows = [json.loads(line)["row"] for line in found.stdout.splitlines()]
    assert rows == [{"text": "a"}, {"text": "b"}]
    limited = [*words, "--column", "seed=n"]  # a look for the column took all rows
    found = CliRunner().invoke(main, limited, input='{"text": "a", "n": 2}\n')
    assert json.loads(found.stdout)["request"]["seed"] == 2
    found = CliRunner().invoke(main, [*words, "--delimiter", ";"], input="text\na\n")
    assert found.exit_code == 2
    assert "Save a CSV as such a file" in found.stderr


def test_special_tokens_in_cells_are_told_once(tmp_path: Path) -> None:
    """They are the model's own, and more than text; the template's are meant."""
    folder = open_model(EngineConfig()).tokenizer_folder
    assert folder is not None
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    special = next(token["content"] for token in added if token["special"])
    write_csv(tmp_path / "a.csv", ["a", f"b {special}", f"c {special}"])
    words = [tmp_path / "a.csv", "--prompt-template"]
    found = invoke("run", *words, ASK, *FLAGS)
    assert found.exit_code == 0, found.output
    assert found.stderr.count("Warning: line 2: cells spell special tokens") == 1
    assert f"prompt: {special} (2 rows)" in found.stderr
    write_csv(tmp_path / "a.csv", ["a", "b"])
    checked = invoke("check", *words, f"{special}{{{{ n }}}}", *FLAGS[:2])
    assert "2 right" in checked.output
    assert "cells spell" not in checked.output


def test_check_shows_the_first_prompt(tmp_path: Path) -> None:
    """Flags are those of the run; a wrong row is named by its number."""
    table = write_parquet(tmp_path / "a.parquet", ["first", None, "third"])
    found = invoke("check", table, "--prompt-template", ASK, "--raw", *FLAGS)
    assert found.exit_code == 3, found.output
    assert "a.parquet:2: --prompt-template: text is null" in found.stdout
    assert "Question: first?" in found.stdout
    assert "2 right, 1 wrong" in found.stdout
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    for flag in (["--raw"], ["--temperature", "1"]):
        found = invoke("check", lines, *flag)
        assert found.exit_code == 2
        assert (
            f"{flag[0]} is for requests made of rows, and there is no" in found.stderr
        )


def test_without_a_template_a_table_is_refused_with_the_line_to_type(
    tmp_path: Path,
) -> None:
    """The line names a column that is there."""
    plain = write_parquet(tmp_path / "a.parquet")
    named = tmp_path / "b.csv"
    named.write_text("review text,n\nx,1\n")
    for table, cell in ((plain, "{{ text }}"), (named, '{{ row["review text"] }}')):
        for command in ("run", "check"):
            found = invoke(command, table)
            assert found.exit_code == 2
            assert f"fminfer run {table} --prompt-template 'Is it good? {cell}'" in (
                found.stderr
            )
    found = invoke("run", tmp_path)
    command = f"fminfer run {tmp_path} --prompt-template 'Is it good? {{{{ text }}}}'"
    assert found.exit_code == 2
    assert f"tables need a template. Type: {command}" in found.stderr
    found = invoke("split", "--input-file", plain, "--output-dir", tmp_path / "parts")
    assert found.exit_code == 2
    assert "is a table, and is not split" in found.stderr
    found = invoke("run", "--prompt", "x", "--prompt-template", "y")
    assert found.exit_code == 2
    assert "leave out --prompt-template" in found.stderr
    found = invoke("run", "--prompt-template", "y", "--batch-size", "2")
    assert found.exit_code == 2, "it is no run of made-up requests"


def test_a_column_that_is_not_there_ends_the_run_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_csv(tmp_path / "a.csv")
    found = ask(table, "--column", "seed=sead")
    assert found.exit_code == 2
    assert "has no column 'sead'. Its columns are: text, n" in found.stderr
    assert not (tmp_path / "output_a.jsonl").exists()


def test_a_url_may_be_a_table(tmp_path: Path) -> None:
    """It is fetched as any input is; without a template it is refused."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:3]}), buffer)
    for name in ("a.parquet", "b.txt"):
        with fsspec.open(f"memory://rows/{name}", "wb") as file:
            file.write(buffer.getvalue())
    output = tmp_path / "a.jsonl"
    work = ["--work-dir", tmp_path / "work"]
    found = ask("memory://rows/", "--output", output, *work)
    assert found.exit_code == 0, found.output
    assert len(read(output)) == 3
    for url, remedy in (("a.parquet", "add"), ("", "its tables need")):
        found = invoke("run", f"memory://rows/{url}", "--output", output, *work)
        assert found.exit_code == 2
        assert f"{remedy} --prompt-template" in found.stderr


def test_a_job_of_a_table_is_planned(tmp_path: Path) -> None:
    """`fminfer submit` knows the run's flags, and gives each table a job."""
    write_csv(tmp_path / "a.csv")
    words = ["--scheduler", "slurm", "--dry-run", "--infer-data", tmp_path]
    found = invoke("submit", *words, "--", "--prompt-template", ASK)
    assert found.exit_code == 0, found.output
    found = invoke("submit", *words)
    assert found.exit_code == 2
    for flags in (["{{ text "], [ASK, "--field", "seed"], [ASK, "--choices", "@no"]):
        found = invoke("submit", *words, "--", "--prompt-template", *flags)
        assert found.exit_code == 2, "it sent jobs that had to fail"
        assert "--" in found.stderr and found.stdout == ""
    found = invoke("submit", *words, "--", "--field", "seed=1")
    assert found.exit_code == 2 and "needs --prompt-template" in found.stderr


def test_pyarrow_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CSV and JSON need none; Parquet says what to install."""
    from fminfer.files.tables import table
    from fminfer.files.tables.table_file import open_table

    def fail(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    parquet = write_parquet(tmp_path / "a.parquet")
    csv = write_csv(tmp_path / "a.csv")
    monkeypatch.setattr(table.importlib, "import_module", fail)
    assert len(list(open_table(csv).read_rows())) == 40
    with pytest.raises(UsageError, match=r"pip install .*\[tables\]'"):
        open_table(parquet)


def test_a_delimiter_that_changes_nothing(tmp_path: Path) -> None:
    """A CSV's comma is no other setting; Parquet has no delimiter."""
    table = write_csv(tmp_path / "a.csv")
    words = ["--output", tmp_path / "a.jsonl"]
    assert ask(table, *words).exit_code == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    found = ask(table, *words, "--delimiter", ",")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "a.jsonl").read_bytes() == before

    other = write_parquet(tmp_path / "b.parquet")
    flags = ("--prompt-template", ASK, "--delimiter", ",")
    for command in ("run", "check"):
        found = invoke(command, other, *flags)
        assert found.exit_code == 2
        assert "b.parquet is none" in " ".join(found.output.split())
