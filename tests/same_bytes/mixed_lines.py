"""Lines of many kinds, by names, which ask for the same answers wherever they stand.

Whatever draws has a seed of its own: others draw by their number in the file, and a
server draws them at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.same_bytes.tiny_models import Kind
from tests.sequence_models import TEXTS
from tests.vector_models import WORDS

Lines = dict[str, dict[str, Any]]

NUM_LINES = 120
NUM_BYTES = 256  # ids that have a piece
SMALLEST_ID = {"decoder": 0, "encoder-decoder": 3}
NUM_IDS = {"decoder": 300, "encoder-decoder": 100}
# Tokens of the prefixes that rows share. Each one begins with the one before.
STEMS = (310, 450, 520)
SAMPLED: dict[str, Any] = {"temperature": 1, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# How a line of each kind differs; "{seed}" stands for a number of its own.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": SAMPLED,
    "several": SAMPLED | {"n": 3, "max_tokens": 14},
    "best": SAMPLED | {"n": 2, "best_of": 4, "max_tokens": 9},
    "echo": GREEDY | {"echo": True},
    "scored": {"echo": True, "max_tokens": 0},
    "echo-draws": SAMPLED | {"echo": True, "max_tokens": 3, "n": 2},
    "one": GREEDY | {"max_tokens": 1},
    "long": SAMPLED | {"max_tokens": 40, "top_p": 0.9},
    "long-greedy": GREEDY | {"max_tokens": 40},
    "filters": SAMPLED | {"top_k": 30, "min_p": 0.01, "max_tokens": 20},
    "penalties": SAMPLED
    | {
        "frequency_penalty": 0.6,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "max_tokens": 25,
    },
    "stop": SAMPLED | {"stop": ["e", "7", "a"], "max_tokens": 40},
    "bias": GREEDY | {"logit_bias": {"101": 2.5, "55": 2.5}, "max_tokens": 12},
    "allowed": SAMPLED | {"allowed_token_ids": [*range(40, 80)], "max_tokens": 12},
}
CONSTRAINED: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": ["north", "north east", "south"]}},
    "regex": {"structured_outputs": {"regex": "(a|e| ){4,20}"}},
    "schema": {
        "guided_json": {
            "type": "object",
            "properties": {
                "room": {"enum": ["e", "ae"]},
                "steps": {"type": "integer", "minimum": 0, "maximum": 9999},
            },
            "required": ["room", "steps"],
            "additionalProperties": False,
        },
    },
}


def make_lines(kind: Kind, num_lines: int = NUM_LINES) -> Lines:
    """Return lines by their names; fewer lines are a sample of all kinds."""
    lines = _make_inputs() if kind == "vectors" else _make_completions(kind)
    assert len(lines) == NUM_LINES
    places = sorted(random.Random(1).sample(range(NUM_LINES), num_lines))
    named = [*lines.items()]
    return dict(named[place] for place in places)


def make_earlier_lines(kind: Kind) -> list[dict[str, Any]]:
    """Return what is asked before, whose prompts begin as later ones do, but go on
    differently."""
    if kind == "vectors":
        return [{"input": " ".join(WORDS[:length])} for length in (3, 50, 120)]
    chance = random.Random(99)
    _, stem = _make_stem(kind)
    lengths = (100, 317, *STEMS, 390, 480)
    return [
        {
            "prompt": stem[:length] + _draw_ids(kind, chance, 9),
            "max_tokens": 5,
            "temperature": 0,
            "echo": place % 2 == 0,
            "logprobs": place % 2 or None,
        }
        for place, length in enumerate(lengths)
    ]


def make_short_answers() -> list[dict[str, Any]]:
    """Return lines that end at their first token: so the engine expects short answers,
    admits too many rows for its KV cache, and preempts some."""
    return [
        {
            "prompt": [50 + number, 60 + max_tokens],
            "max_tokens": max_tokens,
            "allowed_token_ids": [70],
            "stop_token_ids": [70],
        }
        for number in range(20)
        for max_tokens in (14, 20, 40)
    ]


def order_names(lines: Lines, order: int) -> list[str]:
    """Return the names in one of four orders: as they are, backwards, or shuffled."""
    names = [*lines]
    if order == 1:
        names.reverse()
    if order > 1:
        random.Random(order).shuffle(names)
    return names


def count_candidates(line: dict[str, Any]) -> int:
    """Return how many sequences of a prompt run together."""
    return int(line.get("best_of") or line.get("n") or 1)


def _draw_ids(kind: Kind, chance: random.Random, count: int) -> list[int]:
    first = SMALLEST_ID[kind]
    return [chance.randrange(first, NUM_IDS[kind]) for _ in range(count)]


def _make_stem(kind: Kind) -> tuple[random.Random, list[int]]:
    chance = random.Random(5)
    return chance, _draw_ids(kind, chance, STEMS[-1])


def _make_completions(kind: Kind) -> Lines:
    chance, stem = _make_stem(kind)
    lines: Lines = {}

    def add(name: str, prompt: Any, **fields: Any) -> None:
        number = len(lines)
        common = {
            "max_tokens": chance.randint(1, 40),
            "logprobs": number % 6,
            "seed": number,
            "return_token_ids": True,
        }
        lines[f"{number}-{name}"] = {"prompt": prompt} | common | fields

    add_prompts(kind, chance, stem, add)
    if kind == "encoder-decoder":
        _move_to_decoder(lines)
    return lines


def add_prompts(
    kind: Kind, chance: random.Random, stem: list[int], add: Callable[..., None]
) -> None:
    """Add 36 lines with nested prefixes, 15 long and 60 short ones, and 9 constrained ones."""
    names = [*KINDS]
    for number in range(36):  # 12 of each prefix, which differ behind it
        length = STEMS[number % 3]
        prompt = stem[:length] + _draw_ids(kind, chance, chance.randint(1, 30))
        name = names[number % len(names)]
        add(f"prefix-of-{length}-{name}", prompt, **KINDS[name])
    for number in range(15):
        prompt = _draw_ids(kind, chance, chance.randint(120, 600))
        name = names[number]
        add(f"long-prompt-{name}", prompt, **KINDS[name])
    for number in range(60):
        name = names[number % len(names)]
        prompt: Any = _draw_ids(kind, chance, chance.randint(2, 40))
        if number % 4 == 1:
            prompt = f"{TEXTS[number % len(TEXTS)]} {number}"
        if number % 20 == 7:
            prompt = [_draw_ids(kind, chance, length) for length in (3, 17)]
        add(f"short-{name}", prompt, **KINDS[name])
    # the other tokenizer has no braces
    constrained = ["choice", "regex"]
    if kind == "decoder":
        constrained.append("schema")
    for number in range(9):
        name = constrained[number % len(constrained)]
        prompt = f"{TEXTS[1]} {number}:"
        temperature = number % 2
        add(name, prompt, **CONSTRAINED[name], max_tokens=40, temperature=temperature)


def _move_to_decoder(lines: Lines) -> None:
    """Give some lines a prompt of the decoder, which echo scores."""
    chance = random.Random(6)
    for number, line in enumerate(lines.values()):
        if line.get("echo") or number % 5 == 2:
            length = chance.randint(1, 80)
            line["decoder_prompt"] = _draw_ids("encoder-decoder", chance, length)


def _make_inputs() -> Lines:
    """Return lines that ask for vectors."""
    chance = random.Random(5)
    stem = chance.choices(WORDS, k=320)
    lines: Lines = {}
    for number in range(NUM_LINES):
        length = chance.choice((1, 3, 17, 60, 200, 500))
        words = chance.choices(WORDS, k=length)
        if number % 3 == 0:
            words = stem + words[:40]
        text = " ".join(words)
        lines[f"{number}-input"] = {"input": text}
        if number % 10 == 4:
            others = [" ".join(words[:count]) for count in (1, 2, 9)]
            lines[f"{number}-input"] = {"input": [text, *others]}
    return lines
