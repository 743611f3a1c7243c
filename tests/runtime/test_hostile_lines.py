"""A line that is made to keep a computer busy costs its own run two seconds of computing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.contract.envelope import Line
from tests.conftest import more
from tests.text.hostile_constraints import HOSTILE

MOST_S = 2.0  # which limited processes have
SPARE_S = 0.4  # for the good lines, and for what a process does beside its work
GOOD = json.dumps({"prompt": "a b", "max_tokens": 2}).encode()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()


def prompt(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2} | fields).encode()


def constraint(name: str) -> Callable[[], bytes]:
    return lambda: prompt(**HOSTILE[name]())


LINES: dict[str, Callable[[], bytes]] = {name: constraint(name) for name in HOSTILE} | {
    "a broken line": lambda: b'{"prompt": "' + b'\\"' * 500_000,
    "open brackets": lambda: b'{"prompt": ' + b"[" * 4_000_000,
    "one digit": lambda: b"1",
    "zeros": lambda: b"0" * 4_000_000,
    "a long text": lambda: prompt(prompt="x y" * 1_000_000),
    "combining signs": lambda: prompt(prompt="e" + "\u0301" * 500_000),
    "ids": lambda: prompt(prompt=[5] * 2_000_000),
    "unknown fields": lambda: prompt(**{f"unknown{n}": n for n in range(200_000)}),
    "a long custom_id": lambda: (
        b'{"custom_id": "' + b"x" * 4_000_000 + b'", "prompt": "a"}'
    ),
    "bad words": lambda: prompt(bad_words=[f"{n:x} {n:o}" for n in range(16_000)]),
    "stop strings": lambda: prompt(
        stop=[f"a{n}" * 30 for n in range(1000)], max_tokens=200
    ),
    "biases": lambda: prompt(logit_bias={str(n): 1 for n in range(50_000)}),
    "template arguments": lambda: chat(chat_template_kwargs={"x": "z" * (8 << 20)}),
    "messages": lambda: chat(messages=[{"role": "user", "content": "hi"}] * 50_001),
    "parts": lambda: chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}
        ]
    ),
    "tools": lambda: chat(
        tools=[
            {"type": "function", "function": {"name": f"f{n}"}} for n in range(20_000)
        ]
    ),
}
BY_DEFAULT = ("a broken line", "more blank lines", "ids", "biases")


def computed_s() -> float:
    """Return what this process and its children have computed, those that have ended too."""
    told = os.times()
    live = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = told.user + told.system + told.children_user + told.children_system
    for each in live:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with fminfer.Engine(dtype="float32") as found:
        [*found.run([Line(0, 1, GOOD), Line(0, 2, chat())])]
        yield found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else more) for name in LINES],
)
def test_a_hostile_line_costs_two_seconds(engine: fminfer.Engine, name: str) -> None:
    hostile = LINES[name]()
    before_s = computed_s()
    records = [*engine.run([Line(0, 1, GOOD), Line(0, 2, hostile), Line(0, 3, GOOD)])]
    took_s = computed_s() - before_s
    assert [
        r.line.number for r in records if r.error is None and r.line.number != 2
    ] == [1, 3]
    assert len(records) == 3
    assert took_s < MOST_S + SPARE_S
