"""docs/large_models.md says what `fminfer check` predicts, and its commands are taken."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fminfer.cli.app import main

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "large_models.md"
SCRIPT = ROOT / "scripts" / "large_model_tables.py"


@pytest.mark.parametrize("table", ["memory", "opt"])
def test_a_table_is_what_check_predicts(table: str) -> None:
    """All tables take minutes: the script writes them. These two hold memory, load and time."""
    found = subprocess.run([sys.executable, SCRIPT, "--check", table], cwd=ROOT)
    assert found.returncode == 0, f"run {SCRIPT}"


def test_every_table_is_there_and_its_commands_are_taken() -> None:
    text = PAGE.read_text()
    for name in re.findall(r"<!-- table: (.*) -->", text):
        table = text.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end -->")[0]
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
