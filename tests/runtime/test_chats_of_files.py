"""Chats of a run are rendered while the next ones are read; each has its own prompt and
limit."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing

import pytest

import fminfer
from fminfer.contract.envelope import Line
from fminfer.core.errors import MachineError, RequestError
from fminfer.runtime.lines.line_intake import LineIntake
from fminfer.text import chat_template
from fminfer.text.limited_process import LimitedPool
from fminfer.text.template_worker import TemplateWorker

TEMPLATE = (
    "{{ 'x'.center(width | default(1)) }}{{ messages[0].content }}"
    "{% for i in range(times | default(0)) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineIntake]:
    file = tmp_path_factory.mktemp("template") / "own.jinja"
    file.write_text(TEMPLATE)
    with closing(fminfer.Engine(chat_template=str(file))) as engine:
        yield LineIntake(engine.intake)


def read(intake: LineIntake, *chats: str) -> list[str]:
    """Return what stands in each chat's prompt, or its error."""
    lines = [Line(0, number, chat.encode()) for number, chat in enumerate(chats, 1)]
    prompts = []
    for opened in intake.open_all(lines):
        error = getattr(opened, "error", None)
        text = "" if error else opened.prepared.prompts[0].text  # type: ignore[union-attr]
        prompts.append(error.message if isinstance(error, RequestError) else text)
    return prompts


def chat(content: str, args: str = "{}") -> str:
    message = f'{{"role":"user","content":"{content}"}}'
    echo = f'"chat_template_kwargs":{args},"max_tokens":1'
    return f'{{"messages":[{message}],{echo}}}'


def test_each_chat_has_its_own_prompt(
    intake: LineIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside broken lines, other requests, and a chat that is too large for the pipe."""
    pool = LimitedPool(TemplateWorker)
    monkeypatch.setattr(chat_template, "_RENDERERS", pool)
    chats = [
        chat("a"),
        "{",
        '{"prompt":"p","max_tokens":1}',
        chat("y" * 50_000),
        chat("b"),
    ]
    for _ in range(2):  # the process does not know the template at first
        first, broken, prompt, long, last = read(intake, *chats)
        assert (first, prompt, last) == ("xa", "p", "xb")
        assert "not JSON" in broken and "maximum context length" in long

    def ask(message: object) -> None:
        raise AssertionError("a chat was rendered by itself")

    monkeypatch.setattr(pool, "ask", ask)
    assert read(intake, *map(chat, "abc")) == ["xa", "xb", "xc"]


def test_one_without_end_costs_its_own_line(
    intake: LineIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chat_template, "_RENDERERS", LimitedPool(TemplateWorker, seconds=0.4)
    )
    endless = chat("c", '{"times":99999}')
    told = read(intake, chat("a"), endless, chat("b"), endless)
    assert ["takes more than 0.4 s" in each for each in told] == [
        False,
        True,
        False,
        True,
    ]


def test_a_machine_that_starts_no_process_is_told_of(
    intake: LineIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the system ended a run by itself: a batch of a server blamed the disk."""
    pool = LimitedPool(TemplateWorker)
    monkeypatch.setattr(chat_template, "_RENDERERS", pool)

    def start() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool, "_start_process", start)
    with pytest.raises(MachineError, match=r"line 1 was prepared.*Too many open"):
        read(intake, chat("a"))
