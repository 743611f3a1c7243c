"""Templates that compute without end: each costs its own request, in bounded time and memory."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fminfer.core.errors import RequestError, UsageError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text import chat_template
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.limited_process import LimitedPool
from fminfer.text.template_worker import TemplateWorker
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import more

HELLO = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
HOSTILE = {
    "loops": LOOP,
    "repeated text": "{{ 'x' * 10**10 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ messages[0].content.center(10**11) }}",
    "padding by a filter": "{{ messages[0].content | center(10**11) }}",
    "width of a number": "{{ '%100000000000d' | format(1) }}",
    "batches": "{% for each in [1] | batch(10**11, 'x') %}{% endfor %}",
    "doubling": "{% set n = namespace(x='xx') %}"
    "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "recursion": (
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro "
        "%}{{ f(99) }}"
    ),
    "long lists": "{% for i in range(99) %}{{ range(99999) | list | tojson }}{% endfor %}",
}
BY_DEFAULT = ("loops", "padding", "doubling")


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(
        chat_template, "_RENDERERS", LimitedPool(TemplateWorker, seconds=0.4)
    )
    return Tokenizer.load(DEMO_MODEL)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else more) for name in HOSTILE],
)
def test_a_template_without_end_costs_its_request(
    tokenizer: Tokenizer, name: str
) -> None:
    """A loop in a template held a run for ever, and a padded text took all memory."""
    began = time.perf_counter()
    with pytest.raises(
        RequestError, match=r"takes more than|becomes|OverflowError|Recursion"
    ):
        ChatTemplate(tokenizer, HOSTILE[name]).render(HELLO, [])
    assert time.perf_counter() - began < 8


def test_what_a_client_sends_may_be_the_program() -> None:
    """Sizes in `chat_template_kwargs` are as hostile as those in a template."""
    ours = ChatTemplate(Tokenizer.load(DEMO_MODEL), "{{ 'x'.center(width) }}")
    assert len(ours.render(HELLO, [], args={"width": 30}).text) == 30
    with pytest.raises(RequestError, match=r"takes more than .* of memory"):
        ours.render(HELLO, [], args={"width": 10**11})
    with pytest.raises(
        RequestError, match=r"it becomes 17,\d+,\d+ bytes; 16,777,216 are allowed"
    ):
        ours.render(HELLO, [], args={"width": 17_000_000})
    assert ours.render(HELLO, [], args={"width": 3}).text == " x "


def test_a_given_template_without_end_is_refused_at_once(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"--chat-template: .* takes more than 0\.4 s"):
        ChatTemplate(tokenizer, LOOP).check_syntax()


def test_a_fault_is_quoted_by_its_beginning(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(tokenizer, "{{ raise_exception('x' * 10**6) }}").render(HELLO, [])
    assert "xxx…" in caught.value.message and len(caught.value.message) < 1500


def test_forms_are_kept_without_the_texts_that_they_depend_on() -> None:
    """Each of 16 chats with 8 MB of `chat_template_kwargs` was kept for ever."""
    worker = TemplateWorker()
    message: dict[str, Any] = {
        "name": "one",
        "template": ["{{ messages[0].content }}", {}],
        "messages": HELLO,
        "tools": [],
        "begins": True,
        "continues": False,
        "clock": "",
    }
    for number in range(3):
        reply = worker(message | {"args": {"x": f"{number}" * 1000}})
        assert reply is not None and reply["text"] == "hi"
    kept = worker._templates["one"]._forms
    assert [len(key) for key in kept._entries] == [16]
