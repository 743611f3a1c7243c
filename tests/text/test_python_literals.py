"""Python's literals, as models write them in calls."""

from __future__ import annotations

import ast
import gc
import json
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fminfer.text.calls.python_literals import convert_literals

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=9,
)


def read(text: str) -> object:
    return json.loads(convert_literals(text))


def read_arguments(text: str) -> object:
    return read(f"{{{text}}}")


@settings(deadline=None)
@given(value=VALUES)
def test_values(value: object) -> None:
    try:
        expected = ast.literal_eval(repr(value))
        json.dumps(expected, ensure_ascii=False).encode()
    except (ValueError, SyntaxError):
        return
    assert read(repr(value)) == expected
    arguments = read_arguments(f"a={value!r}, class={value!r}")
    assert arguments == {"a": expected, "class": expected}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\\'b\"'", "a'b\""),
        ('"\\d+\\n\\x41\\u00e9\\\\"', "\\d+\nA\u00e9\\"),
        ("-1.5e-3", -0.0015),
        ("(1,)", [1]),
        ("()", []),
        ("[1, 2,]", [1, 2]),
        ("{'a': (1, 2), 'b': {}}", {"a": [1, 2], "b": {}}),
    ],
)
def test_spellings(text: str, value: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of unknown escapes, which would be printed
        assert read(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1-1",
            "1 - 1",
            "--1",
            "not 1",
            "a",
            "a.b",
            "f(1)",
            "1 if 1 else 2",
            "lambda: 1",
        ),
        *(
            "[1][0]",
            "1, 2 3",
            "f'a'",
            "'a' 'b",
            '"a\nb"',
            "[1",
            "1]",
            "(",
            "(1)",
            "( 'a(,' )",
            "1_000",
            "'\\x1'",
            "0777",
        ),
        *("[x for x in y]", "{**a}", "a := 1", "a = 1", "...", "1 == 1", "", "\0"),
    ],
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


@pytest.mark.parametrize(
    "text",
    ["1", "a=1, 2", "*[1]", "**{'a': 1}", "a={1}", "a=1j", "a==1"],
)
def test_what_is_no_argument(text: str) -> None:
    with pytest.raises(ValueError):
        read_arguments(text)


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 50_000, "[" * 150 + "]" * 150, "-" * 50_000 + "1", "1" + "-1" * 50_000),
        *(
            "a" * 50_000,
            "a" + ".b" * 50_000,
            "[1]" * 50_000,
            "()" * 50_000,
            "1" * 50_000,
        ),
        *("'" * 50_001, "' " * 50_001, "\\" * 50_000, "a=" * 50_000, "{'a':" * 50_000),
        *(" " * 50_000, "1 " * 50_000, "1," * 20_000, "a= " * 9 + " " * 50_000),
    ],
)
@pytest.mark.parametrize("parse", [read, read_arguments])
def test_hostile_texts(parse: Callable[[str], object], text: str) -> None:
    """Python's parser can use up the stack, and patterns can try for hours."""
    gc.disable()  # collecting the garbage of a large process may take a second itself
    try:
        start = time.thread_time()
        with suppress(ValueError, RecursionError):
            parse(text)
        assert time.thread_time() - start < 6
    finally:
        gc.enable()
