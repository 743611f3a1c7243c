"""Warnings of lines: each kind and name is told once, and counted in bounded memory."""

from __future__ import annotations

from fminfer.contract.row_warnings import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    RowWarning,
    WarningCounts,
    cut_name,
)


def test_what_is_new_is_told_once() -> None:
    counts = WarningCounts()
    assert counts.add(RowWarning("cut", ())) == "cut"
    assert counts.add(RowWarning("unknown", ("a", "b", "a"))) == "unknown: a, b"
    assert counts.add(RowWarning("unknown", ("b", "c"))) == "unknown: c"
    assert (
        counts.add(RowWarning("unknown", ("a",)))
        == counts.add(RowWarning("cut", ()))
        == ""
    )
    assert counts.to_dict() == {"cut": 2, "unknown: a, b, c": 3}
    counts.clear()
    assert counts.to_dict() == {}


def test_names_beyond_the_most_are_others_and_told_once() -> None:
    counts = WarningCounts()
    names = tuple(f"n{number}" for number in range(MAX_NAMES))
    assert "others" not in counts.add(RowWarning("unknown", names))
    assert (
        counts.add(RowWarning("unknown", ("x",)))
        == "unknown: others, which are not named"
    )
    assert counts.add(RowWarning("unknown", ("y", "n0"))) == ""
    (told,) = counts.to_dict()
    assert told == f"unknown: {', '.join(names)} and others"


def test_a_warning_is_one_line_and_a_name_is_cut() -> None:
    assert str(RowWarning("unknown", ("a\nb\tc",))) == r"unknown: a\nb\tc"
    assert cut_name("x" * MAX_NAME_CHARS) == "x" * MAX_NAME_CHARS
    assert cut_name("x" * (MAX_NAME_CHARS + 1)) == "x" * MAX_NAME_CHARS + "…"
