"""Steps as tests write and read them: row by row, in place of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fminfer.compute.values import step as steps
from fminfer.compute.values.step import Step, TokenLogprobs


class Row(NamedTuple):
    """A row of a step."""

    token_ids: list[int]
    position: int  # of the first of them in the sequence
    block_table: list[int]


def make_draws(token_index: Sequence[int], **columns: Any) -> np.ndarray:
    """Return greedy draws from these packed tokens, with other values in `columns`."""
    return steps.make_draws(token_index, **{"temperature": 0} | columns)


def make_step(rows: Sequence[Row], **columns: Any) -> Step:
    """Return a step of rows, each with a slot of its own and with its whole table.

    Each row draws a greedy token from its last one, unless `columns` have other draws.
    """
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    tables = [
        (slot, *each)
        for slot, row in enumerate(rows)
        for each in enumerate(row.block_table)
    ]
    of_rows = {
        "slots": np.arange(len(rows), dtype=np.int32),
        "positions": np.array([row.position for row in rows], np.int64),
        "lengths": lengths,
        "token_ids": np.array(
            [each for row in rows for each in row.token_ids], np.int64
        ),
        "new_blocks": np.array(tables, np.int32).reshape(-1, 3),
        "draws": make_draws(lengths.cumsum() - 1),
    }
    return Step(0, **(of_rows | columns))


class StepReader:
    """Reads the rows of steps. Like a stage, it keeps block tables between steps."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}  # by slot

    def table(self, slot: int) -> list[int]:
        """Return the block table of a slot, as it was told."""
        return self._tables[slot]

    def rows(self, step: Step) -> list[Row]:
        """Return the rows of the next step, with their whole block tables."""
        for slot, place, block in step.new_blocks.tolist():
            if place == 0:  # the slot has another sequence now
                self._tables[slot] = []
            assert place == len(self._tables[slot]), (
                "blocks are told once, and in order"
            )
            self._tables[slot].append(block)
        slots, positions, lengths = (
            column.tolist() for column in (step.slots, step.positions, step.lengths)
        )
        assert len(set(slots)) == len(slots), "a sequence has one row"
        assert sum(lengths) == step.num_tokens and all(lengths)
        ids = iter(step.token_ids.tolist())
        return [
            Row([*islice(ids, length)], position, [*self._tables[slot]])
            for slot, position, length in zip(slots, positions, lengths, strict=True)
        ]


def make_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[float],
    top_ids: Sequence[Sequence[int]] = (),
    top_logprobs: Sequence[Sequence[float]] = (),
) -> TokenLogprobs:
    """Return results as columns; without `top_…` they have no alternatives."""
    shape = len(ids), len(top_ids[0]) if top_ids else 0
    return TokenLogprobs(
        np.array(ids, np.int64),
        np.array(logprobs, np.float32),
        np.array(top_ids, np.int64).reshape(shape),
        np.array(top_logprobs, np.float32).reshape(shape),
    )


def check_equal(found: Any, expected: Any) -> None:
    """Check that steps, results or columns are equal, bit for bit: nan is equal to itself."""
    assert type(found) is type(expected)
    if is_dataclass(expected):
        for each in fields(expected):
            check_equal(getattr(found, each.name), getattr(expected, each.name))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            check_equal(found[key], expected[key])
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected
