"""Thoughts of each family: its template, and what its model writes behind the prompt."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from fminfer.core.config import KnownThoughts
from fminfer.core.thought_form import Thought
from fminfer.text.calls.call_forms import find_parser
from fminfer.text.thoughts import ThoughtReader, find_thoughts
from tests.engine.thinking_bench import HELLO, ThinkingBench
from tests.text.call_writers import write_calls
from tests.text.thinking_templates import THINKING_TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
HARMONY = "<|channel|>analysis<|message|>"
HARMONY_FINAL = "<|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True)
class Family:
    """What the model of a template writes; the variables that open or close its thought."""

    form: KnownThoughts
    opening: str = "<think>"
    closing: str = "</think>"
    seam: str = "\n\n"  # between the closing tag and the answer
    next_opening: str = ""  # of a second thought; default: `opening`
    opened_by: dict[str, Any] | None = None  # None: the template never opens a thought
    closed_by: dict[str, Any] | None = None  # None: nor does it close one
    # with which the prompt names the tags
    named_by: dict[str, Any] = field(default_factory=dict)

    @property
    def thinks_by(self) -> dict[str, Any]:
        """The variables with which the model thinks."""
        return self.opened_by or self.named_by

    def write(self, thought: str, answer: str) -> str:
        """Return what the model writes; its thought has begun where the template opens it."""
        first = self.opening if self.opened_by is None else ""
        return f"{first}{thought}{self.closing}{self.seam}{answer}"


FAMILIES: dict[str, Family] = {
    "qwen3": Family("qwen3", closed_by={"enable_thinking": False}),
    "qwen3 thinking": Family("qwen3", opened_by={}),
    "deepseek r1": Family("deepseek_r1", opened_by={}),
    "deepseek v3.1": Family("deepseek_r1", opened_by={"thinking": True}, closed_by={}),
    "glm 4.5": Family(
        "deepseek_r1", "\n<think>", seam="\n", closed_by={"enable_thinking": False}
    ),
    "gpt-oss": Family(
        "openai_gptoss",
        HARMONY,
        "<|end|>",
        HARMONY_FINAL,
        f"<|start|>assistant{HARMONY}",
    ),
    "magistral": Family("mistral", "[THINK]", "[/THINK]", ""),
    "seed-oss": Family(
        "seed_oss",
        "<seed:think>",
        "</seed:think>",
        "\n",
        closed_by={"thinking_budget": 0},
    ),
    "cohere": Family(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        closed_by={"reasoning": False},
    ),
    "kimi": Family("kimi", "◁think▷", "◁/think▷", ""),
    "minimax m2": Family("deepseek_r1", opened_by={}),
    "granite 3.2": Family(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        "\n",
        closed_by={},
        named_by={"thinking": True},
    ),
    "smollm3": Family("deepseek_r1", seam="\n", closed_by={"enable_thinking": False}),
    "keeps reasoning": Family("deepseek_r1"),
}
CLOSED = [name for name, family in FAMILIES.items() if family.closed_by is not None]
CALLING = [name for name in FAMILIES if find_parser(THINKING_TEMPLATES[name])]


@dataclass
class Asked:
    """One family's template, asked with what its model writes."""

    name: str
    variables: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)

    def message(self, text: str) -> tuple[Any, Any, Any]:
        """Return thought, content and reason of an answer, which its stream is as well."""
        bench = self.make_bench(text)
        found = bench.message(**self.request)
        bench.stream_events(**self.request)
        return found

    def make_bench(self, text: str) -> ThinkingBench:
        bench = ThinkingBench(
            text.encode() + b"\0", THINKING_TEMPLATES[self.name], context=1500
        )
        bench.find_start(**self.request)
        return bench

    @property
    def request(self) -> dict[str, Any]:
        return self.fields | {"chat_template_kwargs": self.variables}


def ask(name: str, **fields: Any) -> Asked:
    return Asked(name, FAMILIES[name].thinks_by, fields)


def find_thought(name: str) -> Thought:
    """Return what a request knows of its thought, by its template."""
    asked = ask(name)
    bench = asked.make_bench("")
    request = {"messages": HELLO, "max_tokens": 9} | asked.request
    thought = bench.intake.parse(request).params.thought
    assert thought is not None
    return thought


def test_each_template_names_its_tags() -> None:
    found = {name: find_thoughts(text) for name, text in THINKING_TEMPLATES.items()}
    expected = {name: family.form for name, family in FAMILIES.items()}
    assert found == expected | {"no thought": None}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_thought_that_ends_stays_open_or_is_absent(name: str) -> None:
    family = FAMILIES[name]
    asked = ask(name)
    whole = family.write("I see.", "Yes")
    assert asked.message(whole) == ("I see.", "Yes", "stop")
    begun = whole.partition(family.closing)[0]
    assert asked.message(begun) == ("I see.", None, "stop")
    cut = Asked(name, family.thinks_by, {"max_tokens": len(begun.encode())})
    assert cut.message(begun + "more") == ("I see.", None, "length")
    expected = ("Yes", None) if find_thought(name).is_open else (None, "Yes")
    assert asked.message("Yes")[:2] == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_thought_and_tags_in_the_answer(name: str) -> None:
    family = FAMILIES[name]
    opening = family.opening.strip()
    again = f"{family.next_opening or opening}b{family.closing}{family.seam}c"
    first = family.write("a", "").removesuffix(family.seam)
    assert ask(name).message(f"{first}{again}") == ("a\nb", "c", "stop")
    answer = json.dumps({"v": f"{opening}b{family.closing}c"}, ensure_ascii=False)
    assert ask(name).message(family.write("a", answer)) == ("a", answer, "stop")


@pytest.mark.parametrize("name", FAMILIES)
def test_whether_the_prompt_opens_a_thought(name: str) -> None:
    assert find_thought(name).is_open == (FAMILIES[name].opened_by is not None)


@pytest.mark.parametrize("name", CLOSED)
def test_a_thought_that_is_switched_off(name: str) -> None:
    """The template writes an empty thought, or its end: all that follows is the answer."""
    family = FAMILIES[name]
    text = f"{family.opening}b{family.closing}"
    found = Asked(name, family.closed_by or {}).message(text)
    assert found == (None, text, "stop")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tag_over_three_tokens(name: str) -> None:
    family = FAMILIES[name]
    text = family.write("I < see", "Yes").encode()
    closing = family.closing.encode()
    start = text.index(closing)
    thought = find_thought(name)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(1, len(closing)):
        for second in range(first + 1, len(closing)):
            cuts = [0, start, start + first, start + second, len(text)]
            reader = ThoughtReader(thought)
            for cut, next_cut in pairwise(cuts):
                reader.feed(decoder.decode(text[cut:next_cut]))
            reader.finish()
            ((begin, end),) = reader.spans
            assert text.decode()[begin:end] == "I < see"
            assert text.decode()[reader.answer_start :] == "Yes"


@pytest.mark.parametrize("name", CALLING)
def test_calls_behind_a_thought(name: str) -> None:
    family = FAMILIES[name]
    parser = find_parser(THINKING_TEMPLATES[name])
    assert parser is not None
    call = write_calls(parser, [("look", {"at": f"x{family.closing}y"})])
    thought = f"I could {call.replace(family.closing, '')}"
    seam = "" if parser == "openai" else family.seam
    text = family.write(thought, "").removesuffix(family.seam) + seam + call
    bench = (asked := ask(name, tools=TOOLS)).make_bench(text)
    (choice,) = bench.choices(**asked.request)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, None)
    (entry,) = message["tool_calls"]
    assert entry["function"]["name"] == "look"
    arguments = json.loads(entry["function"]["arguments"])
    assert arguments == {"at": f"x{family.closing}y"}
    assert choice["finish_reason"] == "tool_calls"
    bench.stream_events(**asked.request)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_budget_in_each_family(name: str) -> None:
    """What is forced ends the thought, and the answer goes on behind it."""
    family = FAMILIES[name]
    asked = ask(name, thinking_token_budget=2, max_tokens=300)
    opening = "" if family.opened_by is not None else family.opening
    bench = asked.make_bench(opening + 400 * "a")
    (choice,) = bench.choices(**asked.request)
    message = choice["message"]
    assert message["reasoning_content"].startswith("aa")
    assert "aaa" not in message["reasoning_content"]
    assert {*message["content"]} == {"a"}
    assert choice["reasoning_truncated"] is True
    bench.stream_events(**asked.request)
