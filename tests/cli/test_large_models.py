"""docs/large_models.md says what `fminfer check` predicts, and its commands are taken."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fminfer.cli.app import main
from scripts import large_model_tables
from tests.conftest import more

PAGE = Path(__file__).parent.parent.parent / "docs" / "large_models.md"


@pytest.mark.parametrize("table", ["memory", pytest.param("opt", marks=more)])
def test_a_table_is_what_check_predicts(table: str) -> None:
    """All tables take minutes: the script writes them. These two hold memory, load and time."""
    text = PAGE.read_text()
    assert large_model_tables.fill(text, [table]) == text, (
        f"run {large_model_tables.__file__}"
    )


def test_load_and_time_of_one_row_are_what_check_predicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first and the last column of a table whose others have more rows in flight."""
    shown = (
        PAGE.read_text()
        .partition("<!-- table: published -->\n")[2]
        .partition("<!-- end")[0]
    )
    monkeypatch.setattr(large_model_tables, "BATCHES", [1])
    found = []
    for table in (shown, large_model_tables.published_table()):
        rows = [
            row.split(" | ") for row in table.splitlines() if ", predicted | " in row
        ]
        found.append([(name, first, last) for name, first, *_, last in rows])
    assert found[0] == found[1] and len(found[0]) == 3, (
        f"run {large_model_tables.__file__}"
    )


def test_every_table_is_there_and_its_commands_are_taken() -> None:
    text = PAGE.read_text()
    for name in re.findall(r"<!-- table: (.*) -->", text):
        table = text.partition(f"<!-- table: {name} -->\n")[2].partition(
            "<!-- end -->"
        )[0]
        assert table.count("\n") >= 3, name
    commands = re.findall(r"^    fminfer check (.*)$", text, flags=re.M)
    assert len(commands) == 5
    check = main.commands["check"]
    for command in commands:
        check.make_context("check", shlex.split(command))


def test_memory_is_within_a_tenth_of_what_was_published() -> None:
    rows = re.findall(
        r"^\| (?:bfloat16|int8) \| ([\d.]+) \|.* ([\d.]+) \|$", PAGE.read_text(), re.M
    )
    assert [told for told, _ in rows] == ["42.88", "21.68"]
    for told, ours in rows:
        assert float(ours) == pytest.approx(float(told), rel=0.1)
