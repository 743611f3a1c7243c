"""Splitting JSON without parsing it: members of an object, values of a file. Checked
against json.

What comes out must be the very bytes that went in, whatever the text and wherever
chunks are cut.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fminfer.contract.json_object import find_members, join_lines
from fminfer.core.errors import DamagedInputError
from fminfer.files.json_values import split_values
from tests.conftest import num_examples

TEXTS = st.text(st.sampled_from('"\\{}[],: é\u2028\n\ud800a'), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)

INDENTS = st.sampled_from([None, 0, 2, "\t"])


@settings(max_examples=num_examples(150), deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=5), INDENTS)
def test_members_are_those_that_json_finds(value: dict[str, Any], indent: Any) -> None:
    raw = json.dumps(value, indent=indent).encode()
    members = find_members(raw)
    assert list(members) == list(value)
    for name, member in members.items():
        assert (
            json.loads(member.key) == name and json.loads(member.value) == value[name]
        )
        assert member.key in raw and member.value in raw, "verbatim"


@settings(max_examples=num_examples(100), deadline=None)
@given(VALUES, INDENTS)
def test_one_line_holds_the_same_value(value: Any, indent: Any) -> None:
    raw = json.dumps(value, indent=indent).replace("\n", "\r\n").encode()
    line = join_lines(raw)
    assert json.loads(line) == value
    assert b"\n" not in line and b"\r" not in line


def test_only_line_breaks_and_indents_are_left_out() -> None:
    assert (
        join_lines(b'{\n  "a" : "x  y",\r\n\t"b": [1,  2]\r}')
        == b'{"a" : "x  y","b": [1,  2]}'
    )


def test_spellings_are_kept() -> None:
    raw = b'{ "a" :0.0 , "\\u0062":1e0,"c":\t"\\/\\u00e9\xc3\xa9","a": 0}'
    members = find_members(raw)
    assert {name: (m.key, m.value) for name, m in members.items()} == {
        "a": (b'"a"', b"0"),  # the last value, in the first place
        "b": (b'"\\u0062"', b"1e0"),
        "c": (b'"c"', b'"\\/\\u00e9\xc3\xa9"'),
    }
    assert list(members) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "piece", [b'"\\\\\\"",', b"[],", b'{"a":[]},', b'"",', b"1,", b" \t" * 3 + b"0,"]
)
def test_time_is_linear(piece: bytes) -> None:
    """Ten times the bytes may cost ten times the time; a quadratic scan would take a hundred."""
    sizes = (30_000, 300_000)
    small, large = (b'{"x":[' + piece * (size // len(piece)) + b"0]}" for size in sizes)
    times = []
    for raw in (small, large):
        started = time.perf_counter()
        (member,) = find_members(raw).values()
        times.append(time.perf_counter() - started)
        assert member.value == raw[5:-1]
    assert times[1] < 40 * times[0] + 0.2


def test_depth_and_backslashes_cost_no_recursion() -> None:
    deep = b"[" * 10**5 + b"]" * 10**5
    assert find_members(b'{"x":' + deep + b"}")["x"].value == deep
    slashes = b'"' + b"\\" * 10**6 + b'"'
    assert find_members(b'{"x":' + slashes + b"}")["x"].value == slashes


def cut(raw: bytes, size: int) -> Any:
    return (raw[i : i + size] for i in range(0, len(raw), size))


@settings(max_examples=num_examples(150), deadline=None)
@given(st.lists(VALUES, max_size=5), INDENTS, st.integers(1, 9))
def test_elements_of_an_array_wherever_it_is_cut(
    values: list[Any], indent: Any, size: int
) -> None:
    raw = json.dumps(values, indent=indent).encode()[1:]
    found = [json.loads(value) for value in split_values(cut(raw, size), is_array=True)]
    assert found == values


@settings(max_examples=num_examples(100), deadline=None)
@given(
    st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4),
    INDENTS,
    st.integers(1, 9),
)
def test_objects_one_after_another(values: list[Any], indent: Any, size: int) -> None:
    raw = " \n".join(json.dumps(value, indent=indent) for value in values).encode()
    found = [
        json.loads(value) for value in split_values(cut(raw, size), is_array=False)
    ]
    assert found == values


@pytest.mark.parametrize(
    "text, num_before, hint",
    [
        (b'{"a":1},\n{"b":2}', 1, "line 2: the array's last bracket is missing"),
        (b'{"a":1},{"b":"x\n"}]', 1, "line 1: a string is not closed"),
        (b'{"a":1},{"b":[1}]', 1, "line 1: } closes what was not opened"),
        (b'{"a":1},]', 1, "a comma has no value beside it"),
        (b'{"a":1},,{"b":2}]', 1, "a comma has no value beside it"),
        (b",]", 0, "a comma has no value beside it"),
        (b'{"a":1}]\n\n{"b":2}', 1, "line 3: text stands behind"),
        (b"", 0, "last bracket is missing"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_broken_array_gives_what_stands_before_the_break(
    text: bytes, num_before: int, hint: str, size: int
) -> None:
    found = []
    with pytest.raises(DamagedInputError, match=hint):
        for value in split_values(cut(text, size), is_array=True):
            found.append(json.loads(value))
    assert found == [{"a": 1}][:num_before]


def test_memory_is_one_value_and_not_the_file() -> None:
    """Elements come while the file is being read, so a file of any size can be answered."""
    num_read = 0

    def chunks() -> Any:
        nonlocal num_read
        for _ in range(1000):
            num_read += 1
            yield b'{"a": 1},'
        yield b"{}]"

    values = split_values(chunks(), is_array=True)
    next(values)
    assert num_read == 1
    assert sum(1 for _ in values) == 1000
