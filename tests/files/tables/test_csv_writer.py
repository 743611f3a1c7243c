"""Cells of a CSV are texts that say what the column held."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow

from fminfer.files.tables.csv_writer import list_texts


def test_nested_times_are_spelled_as_others_are() -> None:
    """Also those behind the year 9999, which Python has no value for."""
    days = pyarrow.array([[3_000_000, None], None], pyarrow.list_(pyarrow.date32()))
    cell = {"at": datetime.datetime(2024, 1, 1, 13), "price": Decimal("1.50")}

    assert list_texts(days) == ['["10183-09-21", null]', ""]
    assert list_texts(pyarrow.array([cell])) == [
        '{"at": "2024-01-01 13:00:00.000000", "price": "1.50"}'
    ]
