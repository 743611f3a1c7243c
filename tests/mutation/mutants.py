"""What to change: places of the code, and what mutmut's operators make of them, drawn
by a seed."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_swap_op

# A package, and its tests. What takes answers over is tested where a job over a file
# does so. Left out are files whose tests mostly start processes, servers or browsers:
# they take minutes.
PACKAGES = {
    "contract": ["tests/contract"],
    "files": ["tests/files"],
    "answers": [
        "tests/answers",
        *(f"tests/job/test_{each}.py" for each in ("edited", "grown", "try_again")),
    ],
    "split": ["tests/split"],
    "server/batches": [
        f"tests/server/test_batches_{each}.py"
        for each in (
            "beside",
            "ends",
            "files",
            "keys",
            "lines",
            "parts",
            "state",
            "trouble",
        )
    ],
    "job": [
        f"tests/job/test_{each}.py"
        for each in (
            "edited",
            "grown",
            "limit",
            "machine",
            "npy",
            "overview",
            "progress",
            "prompt",
            "report_counts",
            "report_page",
            "report_runs",
            "run_inputs",
            "run_summary",
            "shards",
            "synthetic",
            "time_left",
            "try_again",
        )
    ],
}
SOURCE = Path("fminfer")
# What operator_swap_op changes; it finds out slowly by itself.
SWAPPED = (
    cst.BinaryOperation,
    cst.UnaryOperation,
    cst.BooleanOperation,
    cst.ComparisonTarget,
    cst.AugAssign,
)
OPERATORS: list[tuple[Any, Any]] = [
    (SWAPPED if operator is operator_swap_op else kind, operator)
    for kind, operator in mutation_operators
]


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        name: stays the same while its statement does.
        lines: of its statement, from 1; of a compound one those of its head.
        function: the function or method around it, not nested ones: qualified name, and
        the number
            of those before it that have the same name; None outside of functions.
        change: a node and what replaces it; None changes nothing.
    """

    name: str
    package: str
    path: str
    lines: range
    function: tuple[str, int] | None
    module: cst.Module = field(repr=False)
    change: tuple[cst.CSTNode, cst.CSTNode] | None = field(repr=False)

    @property
    def before(self) -> str:
        return self.module.code

    @cached_property
    def after(self) -> str:
        return (
            self.module.deep_replace(*self.change).code if self.change else self.before
        )

    def diff(self) -> str:
        texts = (text.splitlines() for text in (self.before, self.after))
        lines = [*difflib.unified_diff(*texts, lineterm="", n=0)][3:]
        return "\n".join(f"    {line}" for line in lines)

    def __str__(self) -> str:
        return f"{self.name} {self.path}:{self.lines.start}"


@dataclass(frozen=True)
class Statement:
    """A statement that can be changed: all the changes of which one is drawn."""

    package: str
    path: str
    key: str
    lines: range
    module: cst.Module
    changes: list[tuple[cst.CSTNode, cst.CSTNode, tuple[str, int] | None]]


class _Places(cst.CSTVisitor):
    """Collects changes by statement.

    Left alone are annotations, decorators, docstrings, and words for people: strings
    with spaces.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[cst.CSTNode, list[Any]] = {}
        self._statements: list[cst.CSTNode] = []
        self._names: list[str] = []
        self._bodies: list[tuple[str, int]] = []  # of functions that are open
        self._counts: dict[str, int] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(
            node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
        ):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString):
            return False
        if isinstance(node, cst.Call) and m.matches(
            node.func, m.Name("len") | m.Name("isinstance")
        ):
            return False  # as mutmut: every change of these fails
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            self._statements.append(node)
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._names.append(node.name.value)
        if self._statements and not _is_prose(node):
            function = self._bodies[0] if self._bodies else None
            changes = self.found.setdefault(self._statements[-1], [])
            for kind, operator in OPERATORS:
                if isinstance(node, kind):
                    changes += [(node, changed, function) for changed in operator(node)]
        return super().on_visit(node)

    def on_leave(self, node: cst.CSTNode) -> None:
        super().on_leave(node)
        if self._statements and self._statements[-1] is node:
            self._statements.pop()
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._names.pop()

    def visit_FunctionDef_body(self, node: cst.FunctionDef) -> None:
        name = ".".join(self._names)
        self._bodies.append((name, self._counts.get(name, 0)))
        self._counts[name] = self._counts.get(name, 0) + 1

    def leave_FunctionDef_body(self, node: cst.FunctionDef) -> None:
        self._bodies.pop()


def _is_prose(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString) and " " in node.value.strip("\"' ")


def draw_mutants(num_mutants: int, seed: int) -> list[Mutant]:
    """Draw statements of all packages, each as likely as any other, and one change of each."""
    statements = [
        (_digest(f"{seed} {statement.key}"), statement)
        for package in PACKAGES
        for path in sorted((SOURCE / package).glob("*.py"))
        for statement in _statements(package, path)
    ]
    statements.sort(key=lambda each: each[0])
    return [_mutant(each, digest) for digest, each in statements[:num_mutants]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _statements(package: str, path: Path) -> Iterator[Statement]:
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    positions = wrapper.resolve(PositionProvider)
    places = _Places()
    wrapper.visit(places)
    times: dict[str, int] = {}
    lines = path.read_text().splitlines()
    for node, changes in places.found.items():
        first = positions[node].start.line
        end = positions[node].end.line + 1
        body = getattr(node, "body", None)
        if isinstance(body, cst.BaseSuite):
            end = max(first + 1, positions[body].start.line)
        key = f"{path} {' '.join(lines[first - 1 : end - 1])}"
        times[key] = times.get(key, 0) + 1
        if changes:
            key = f"{key} {times[key]}"
            yield Statement(
                package, str(path), key, range(first, end), wrapper.module, changes
            )


def _mutant(statement: Statement, digest: str) -> Mutant:
    node, changed, function = statement.changes[
        int(digest, 16) % len(statement.changes)
    ]
    where = (statement.package, statement.path, statement.lines, function)
    return Mutant(digest[:8], *where, statement.module, (node, changed))
