"""Writes 160 lines of many kinds for the demo model, the same ones each time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

NUM_LINES = 160
ROOMS = (
    "attic",
    "balcony",
    "terrace",
    "library",
    "study",
    "office",
    "bathroom",
    "bedroom",
    "nursery",
    "corridor",
    "hallway",
    "lounge",
)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1, "min_p": 0.1},
    {"temperature": 1, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1, "logit_bias": {"0": -100, "60": 4}},
    {"temperature": 1, "top_p": 0.5, "top_k": 20, "min_p": 0.01},
)
PROMPTS: tuple[Any, ...] = (
    "",
    "Zażółć gęślą jaźń",
    "家の中で 🏠→🚪",
    "e\u0301 \U0001f469\u200d\U0001f680 tab\tand \u0000 zero",
    [70, 71, 72, 73],
    [[70, 71], [72], [73, 74, 75]],
    ["north", "south", "east"],
    "Question: " + "far away " * 40,
)
SHAPED: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": ["north", "north east", "south"]}},
    {"structured_outputs": {"regex": "(north|east)( west){2,4}"}},
    {"guided_choice": ["den", "attic"]},
    {"guided_regex": "[a-c]{3}-[0-9]{2}"},
    {"response_format": {"type": "json_object"}},
    {
        "guided_json": {
            "type": "object",
            "properties": {
                "room": {"enum": ["den", "attic"]},
                "steps": {"type": "integer"},
            },
            "required": ["room", "steps"],
            "additionalProperties": False,
        }
    },
    {
        "structured_outputs": {
            "json": {
                "type": "array",
                "items": {"enum": [1, 2, "x"]},
                "minItems": 2,
                "maxItems": 4,
            }
        }
    },
    {"guided_grammar": 'start: "go " ("north" | "south")+ "."'},
)
FURTHER: tuple[dict[str, Any], ...] = (
    {"n": 3},
    {"n": 2, "best_of": 4, "temperature": 0.8},
    {"best_of": 3, "logprobs": 1, "temperature": 1},
    {"n": 4, "best_of": 3, "temperature": 1},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 3, "temperature": 1, "n": 2},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"max_tokens": 0},
    {"stop": " east"},
    {"stop": ["st ea", "orth"], "temperature": 1},
    {"stop": ["th"], "include_stop_str_in_output": True, "ignore_eos": True},
    {"stop_token_ids": [80, 90, 100], "temperature": 1.2, "ignore_eos": True},
    {"ignore_eos": True, "max_tokens": 40},
    {"min_tokens": 12, "max_tokens": 24},
    {"allowed_token_ids": [40, 41, 42, 43], "max_tokens": 6},
    {"bad_words": ["north", "south"]},
    {"truncate_prompt_tokens": 6},
    {"truncate_prompt_tokens": 6, "truncation_side": "right", "echo": True},
    {"return_token_ids": True},
    {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 20},
)
WRONG: tuple[bytes, ...] = (
    b"no json",
    b'{"prompt": "x", "max_tokens": 3,}',
    b'["an array"]',
    b'{"max_tokens": 3}',
    b'{"prompt": 5}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "x", "temperature": 3}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "max_tokens": true}',
    b'{"prompt": [1, 99999]}',
    b'{"prompt": "x", "max_tokens": 5000}',
    b'{"prompt": "x", "stream": true}',
    b'{"prompt": "x", "suffix": "y"}',
    b'{"prompt": "x", "guided_json": {"not": {}}}',
    b'{"prompt": "x", "guided_regex": "("}',
    b'{"messages": []}',
    b'{"messages": [{"role": "assistant", "content": "no question"}]}',
    b'{"input": "a text for a vector"}',
    b'{"query": "a query", "documents": ["one", "two"]}',
    b'{"text_1": "one", "text_2": ["two", "three"]}',
    b'{"prompt": "x", "model": "another-model"}',
)


def write_lines(path: Path) -> None:
    """Write all lines, and between them blank ones and another end of line."""
    lines = list(make_lines())
    ends = (b"\n", b"\n", b"\r\n", b"\n\n")
    path.write_bytes(
        b"".join(line + ends[n % len(ends)] for n, line in enumerate(lines))
    )


def make_lines() -> Iterator[bytes]:
    """Return the lines, of different kinds beside each other."""
    columns = [
        list(_questions()),
        list(_sampled()),
        list(_further()),
        list(_batch_lines()),
        list(WRONG),
    ]
    for row in range(max(map(len, columns))):
        yield from (column[row] for column in columns if row < len(column))


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _question(number: int) -> str:
    start = ROOMS[number % len(ROOMS)]
    goal = ROOMS[(number * 5 + 3) % len(ROOMS)]
    return f"How do you go from the {start} to the {goal}?"


def _prompt(number: int) -> str:
    return f"Question: {_question(number)}\nAnswer:"


def _questions() -> Iterator[bytes]:
    """Greedy and unseeded requests, some of them twice, and answers of a form."""
    for number in range(20):
        yield _line(
            {"prompt": _prompt(number % 15), "max_tokens": 24, "temperature": 0}
        )
    for number in range(6):  # equal requests without a seed draw by their number
        yield _line({"prompt": _prompt(number // 3), "max_tokens": 12})
    for number, shape in enumerate(SHAPED):
        fields = {"prompt": _prompt(number), "max_tokens": 40, **shape}
        yield _line({**fields, "temperature": 0})
        yield _line({**fields, "seed": number})


def _sampled() -> Iterator[bytes]:
    """Requests with seeds, all filters and penalties, and with prompts of all kinds."""
    numbers = count(1)
    for sampling in SAMPLED:
        for length in (8, 30):
            number = next(numbers)
            fields = {"prompt": _prompt(number), "max_tokens": length, "seed": number}
            yield _line({**fields, **sampling})
    for prompt in PROMPTS:
        yield _line({"prompt": prompt, "max_tokens": 10, "temperature": 0})
        yield _line(
            {"prompt": prompt, "max_tokens": 10, "seed": 7, "logprobs": 2, "echo": True}
        )
    for number in range(4):  # equal requests with a seed have equal answers
        yield _line({"prompt": _prompt(number // 2), "max_tokens": 12, "seed": 99})
    for number in range(6):  # long answers, for which a scarce KV cache preempts others
        fields = {"prompt": _prompt(number), "max_tokens": 120 + 10 * number}
        yield _line({**fields, "ignore_eos": True, "seed": number, "top_p": 0.8})


def _further() -> Iterator[bytes]:
    """Requests for every other field, some of them in a wrapped line with further keys."""
    for number, fields in enumerate(FURTHER):
        request = {
            "prompt": _prompt(number),
            "max_tokens": 16,
            "seed": number,
            **fields,
        }
        if number % 3 == 0:
            request["temperature"] = 0
        if number % 4 == 1:
            yield _line(
                {"id": number, "request": request, "note": {"z": [1, 2.0], "ä": None}}
            )
        else:
            yield _line(request)


def _batch_lines() -> Iterator[bytes]:
    """Lines of OpenAI's Batch API, completions and chats, and bare chats."""
    for number in range(10):
        body = {
            "model": "demo",
            "prompt": _prompt(number),
            "max_tokens": 12,
            "temperature": 0,
        }
        if number % 2:
            body.update({"temperature": 1, "seed": number, "logprobs": 2})
        yield _batch_line(f"completion-{number}", "/v1/completions", body)
    for number in range(12):
        messages = [{"role": "user", "content": _question(number)}]
        if number % 4 == 3:
            messages = [{"role": "system", "content": "Be short."}, *messages]
        body = {
            "model": "demo",
            "messages": messages,
            "max_tokens": 20,
            "temperature": 0,
        }
        if number % 2:
            body.update(
                {"temperature": 1, "seed": number, "logprobs": True, "top_logprobs": 2}
            )
        if number % 5 == 4:
            body.update({"n": 2, "response_format": {"type": "json_object"}})
        yield _batch_line(f"chat-{number}", "/v1/chat/completions", body)
    # Its id is that of a line above.
    yield _batch_line("chat-1", "/v1/chat/completions", {"messages": []})
    yield _batch_line("wrong", "/v1/completions", {"model": "demo", "max_tokens": 2})
    for number in range(6):
        messages = [{"role": "user", "content": _question(number)}]
        yield _line(
            {
                "messages": messages,
                "max_tokens": 16,
                "seed": number,
                "n": 1 + number % 2,
            }
        )


def _batch_line(custom_id: str, url: str, body: dict[str, Any]) -> bytes:
    return _line({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
