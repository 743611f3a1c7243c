"""Habits that slow a reader are counted; a ceiling here only falls (CONTRIBUTING.md, Words)."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fminfer"
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]
FUNCTIONS = [
    (path, node)
    for path, node in NODES
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]
# Names that do not say what they hold.
EMPTY_NAMES = {"how", "asked", "told", "found", "given", "own"}
MOST_COLUMNS = 97
MOST_LINES = 60  # of a function
# A function of Triton is one kernel, which cannot call what is not one.
KERNELS = PACKAGE / "compute" / "kernels" / "triton_kernels.py"

Place = tuple[Path, int]


def find_packed_assignments() -> Iterator[Place]:
    """Yield `a, b = x, y`; a swap is none."""
    for path, node in NODES:
        if not isinstance(node, ast.Assign):
            continue
        targets = node.targets[0]
        if not isinstance(targets, ast.Tuple) or not isinstance(node.value, ast.Tuple):
            continue
        names = [ast.unparse(target) for target in targets.elts]
        values = [ast.unparse(value) for value in node.value.elts]
        is_starred = any(name.startswith("*") for name in names)
        if len(names) == len(values) and not is_starred and {*names} != {*values}:
            yield path, node.lineno


def find_empty_names() -> Iterator[Place]:
    """Yield parameters and variables that are called `found`, `how` and the like."""
    for path, node in NODES:
        is_parameter = isinstance(node, ast.arg) and node.arg in EMPTY_NAMES
        is_variable = (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in EMPTY_NAMES
        )
        if is_parameter or is_variable:
            yield path, node.lineno


def find_multiplied_texts() -> Iterator[Place]:
    """Yield `"text" * condition`; a text times a number is none."""
    conditions = (
        ast.Compare,
        ast.Call,
        ast.Name,
        ast.BoolOp,
        ast.Attribute,
        ast.UnaryOp,
    )
    for path, node in NODES:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        for text, factor in ((node.left, node.right), (node.right, node.left)):
            is_text = isinstance(text, ast.JoinedStr) or (
                isinstance(text, ast.Constant) and isinstance(text.value, str)
            )
            if is_text and isinstance(factor, conditions):
                yield path, node.lineno


def find_starred_literals() -> Iterator[Place]:
    """Yield `*(a, b)`, in calls and in literals."""
    for path, node in NODES:
        if isinstance(node, ast.Starred) and isinstance(
            node.value, ast.Tuple | ast.List
        ):
            yield path, node.lineno


def find_wide_lines() -> Iterator[Place]:
    for path in TREES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                yield path, number


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def find_long_functions() -> Iterator[Place]:
    for path, function in FUNCTIONS:
        if path != KERNELS and count_lines(function) > MOST_LINES:
            yield path, function.lineno


HABITS: list[tuple[Callable[[], Iterator[Place]], int]] = [
    (find_packed_assignments, 5),
    (find_empty_names, 0),
    (find_multiplied_texts, 1),
    (find_starred_literals, 0),
    (find_wide_lines, 0),
    (find_long_functions, 0),
]


@pytest.mark.parametrize(
    ("find_places", "ceiling"), HABITS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_habit_is_not_spread(
    find_places: Callable[[], Iterator[Place]], ceiling: int
) -> None:
    places = sorted(
        f"{path.relative_to(PACKAGE)}:{line}" for path, line in find_places()
    )
    assert len(places) <= ceiling, "\n".join(places)
    assert len(places) == ceiling, f"the ceiling falls to {len(places)}"


def test_functions_are_short() -> None:
    """Half of them have 8 lines at most, nine of ten 25."""
    lengths = sorted(count_lines(function) for _, function in FUNCTIONS)
    assert len(lengths) > 2000, "the test looks at nothing"
    assert statistics.median(lengths) <= 8
    assert lengths[int(len(lengths) * 0.9)] <= 25


@pytest.mark.parametrize(
    ("code", "find_places"),
    [
        ("a, b = 1, 2", find_packed_assignments),
        ("self.a, self.b = x, y", find_packed_assignments),
        ("def f(how): ...", find_empty_names),
        ("for found in x: ...", find_empty_names),
        ("f' {a}' * (a > 0)", find_multiplied_texts),
        ("f(*(a, b))", find_starred_literals),
        ("(*('a', 'b'), c)", find_starred_literals),
    ],
)
def test_a_habit_is_seen(
    code: str,
    find_places: Callable[[], Iterator[Place]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [(PACKAGE, node) for node in ast.walk(ast.parse(code))]
    monkeypatch.setitem(find_places.__globals__, "NODES", nodes)
    assert len(list(find_places())) == 1


@pytest.mark.parametrize("code", ["a, b = b, a", "a, *b = 1, 2", "'ab' * 3", "f(*a)"])
def test_other_code_is_no_habit(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [(PACKAGE, node) for node in ast.walk(ast.parse(code))]
    for find_places, _ in HABITS[:4]:
        monkeypatch.setitem(find_places.__globals__, "NODES", nodes)
        assert not list(find_places())
