"""Counts of values: the same in memory and in the temporary file."""

from __future__ import annotations

import tempfile

import pytest

from fminfer.answers import seen_counts
from fminfer.answers.seen_counts import SeenCounts
from fminfer.core.errors import MachineError


@pytest.mark.parametrize("num_in_memory", [0, 2, 100])
def test_every_value_is_counted_by_itself(
    num_in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_counts, "MAX_IN_MEMORY", num_in_memory)
    counts = SeenCounts()
    texts = ("a", "b", "\ud800", "")
    for _ in range(2):
        for before in range(3):
            assert [counts.add_text(each) for each in texts] == [before] * 4
            assert [counts.add(bytes([n]) * 16, 5) for n in range(4)] == [
                5 * before
            ] * 4
        counts.clear()


def test_a_disk_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_counts, "MAX_IN_MEMORY", 0)
    monkeypatch.setattr(seen_counts, "_MAKE", "nonsense")
    with pytest.raises(
        MachineError, match=f"make room in {tempfile.gettempdir()}.*TMPDIR"
    ):
        SeenCounts().add_text("a")
