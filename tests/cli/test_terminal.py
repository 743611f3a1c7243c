"""Texts fit narrow and wide terminals, and stay as they are where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from fminfer.core.terminal import make_table_lines, wrap_lines
from tests.forked import programs

LINE = '{"prompt": "a", "max_tokens": 1, "temperature": 0}\n'
BAD = '{"prompt": "a", "temperature": 9}\n'
PLAN = [
    "--random-init",
    "opt-125m",
    "--plan",
    "--device-kind",
    "h200",
    "--num-devices",
    "2",
]


def show_on(columns: int, folder: Path, path: str, *words: str) -> list[str]:
    """Return the lines that a command shows on a terminal of so many columns."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        environment = os.environ | {"PATH": path}
        environment.pop("COLUMNS", None)
        os.execvpe("fminfer", ["fminfer", *words], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    parts = []
    try:
        while part := os.read(terminal, 1 << 16):
            parts.append(part)
    except OSError:  # the end, on Linux
        pass
    os.waitpid(child, 0)
    lines = b"".join(parts).decode().replace("\r\n", "\n").split("\n")
    return [line.split("\r")[-1].rstrip() for line in lines]


@pytest.mark.skipif(
    sys.platform != "linux", reason="the end of a terminal is told otherwise"
)
@pytest.mark.parametrize("columns", [60, 200])
def test_reports_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    """Lines broke in the middle of words, and the cells of tables stood below each other."""
    path = programs(tmp_path / "programs")
    (tmp_path / "r.jsonl").write_text(LINE + BAD)
    commands = (
        ["run", "r.jsonl", "--kernels", "off"],
        ["status", "."],
        ["families"],
        ["check", "r.jsonl", "--kernels", "off"],
        ["check", "r.jsonl", *PLAN],
    )
    shown = {
        " ".join(words): show_on(columns, tmp_path, path, *words) for words in commands
    }
    for command, lines in shown.items():
        assert len(lines) > 3, (command, lines)
        assert [line for line in lines if len(line) > columns] == [], command
    memory = next(
        line for line in shown["check r.jsonl --kernels off"] if line[:6] == "memory"
    )
    assert ("rank 0, layers 2, libraries " in memory) == (columns == 60)


def test_what_follows_a_name_stands_below_it() -> None:
    text = "speed     1,000 tokens/s computed, of them 10 generated\nlong      a b\n    is here"
    assert wrap_lines(text, 30) == (
        "speed     1,000 tokens/s\n"
        "          computed, of them 10\n"
        "          generated\n"
        "long      a b\n"
        "    is here"
    )
    assert wrap_lines(text, 0) == text and wrap_lines(text, 200) == text
    assert wrap_lines("a sentence that is long", 12) == "a sentence\n  that is\n  long"
    path = "/a/path/that/is/longer/than/the/terminal.jsonl"
    assert path in wrap_lines(f"output    {path}", 20), "it can be copied"


def test_a_table_that_is_too_wide_is_sentences() -> None:
    rows = [["rank", "KV cache"], ["0", "1.00 GiB"], ["11", "2 MiB"]]
    table = ["rank  KV cache", "   0  1.00 GiB", "  11     2 MiB"]
    assert make_table_lines(rows) == make_table_lines(rows, 14) == table
    assert make_table_lines(rows, 13) == [
        "rank 0, KV cache 1.00 GiB",
        "rank 11, KV cache 2 MiB",
    ]
