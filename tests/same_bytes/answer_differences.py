"""Says in which line, at which token and by how much the answers of two runs differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from tests.same_bytes.varied_runs import Answers

MOST_SHOWN = 8  # lines of a pair of runs


def describe_differences(answers: Answers, others: Answers) -> list[str]:
    """Compare the answers that both have, byte for byte; describe each that differs."""
    differences = []
    for name in sorted(answers.keys() & others.keys(), key=line_number):
        answer = answers[name]
        other = others[name]
        if json.dumps(answer) != json.dumps(other):
            differences.append(f"{name}: {describe_difference(answer, other)}")
    return differences


def line_number(name: str) -> int:
    """Return the number that a line's name begins with."""
    return int(name.partition("-")[0])


def summarize_pair(first: str, second: str, differences: list[str]) -> str:
    """Return the text about two runs that differ."""
    shown = [f"    {each}" for each in differences[:MOST_SHOWN]]
    num_left = len(differences) - len(shown)
    if num_left:
        shown.append(f"    and {num_left} more")
    head = f"{len(differences)} lines differ\n  of {first}\n  and {second}"
    return "\n".join([head, *shown])


def describe_difference(answer: dict[str, Any], other: dict[str, Any]) -> str:
    """Return where two answers of one line differ first, and by how much."""
    for field, name in (("choices", "choice"), ("data", "vector")):
        pairs = zip(answer.get(field, ()), other.get(field, ()), strict=True)
        for place, (one, another) in enumerate(pairs):
            if json.dumps(one) == json.dumps(another):
                continue
            gap = (
                compare_choices(one, another)
                if field == "choices"
                else compare_numbers(one["embedding"], another["embedding"])
            )
            return f"{name} {place}, {gap}"
    return "other fields differ"


def compare_choices(choice: dict[str, Any], other: dict[str, Any]) -> str:
    """Return at which token two choices differ, and by how much up to it."""
    parts = []
    token_ids = choice.get("token_ids") or []
    other_ids = other.get("token_ids") or []
    pairs = enumerate(zip(token_ids, other_ids, strict=False))
    place = next((place for place, (one, two) in pairs if one != two), None)
    if place is not None:
        parts.append(
            f"drawn token {place} of {len(token_ids)} is {token_ids[place]} "
            f"and {other_ids[place]}"
        )
    elif len(token_ids) != len(other_ids):
        parts.append(f"{len(token_ids)} and {len(other_ids)} tokens")

    logprobs, other_logprobs = choice["logprobs"], other["logprobs"]
    if logprobs and other_logprobs:
        numbers = logprobs["token_logprobs"]
        other_numbers = other_logprobs["token_logprobs"]
        if place is not None:  # behind it, the texts are not the same
            num_echoed = 0
            if len(numbers) > len(token_ids):
                num_echoed = len(choice["prompt_token_ids"])
            num_same = num_echoed + place + 1
            numbers, other_numbers = numbers[:num_same], other_numbers[:num_same]
        parts.append(f"logprobs: {compare_numbers(numbers, other_numbers)}")
        if logprobs["top_logprobs"] != other_logprobs["top_logprobs"]:
            parts.append("top_logprobs differ")
    if choice["text"] != other["text"]:
        parts.append("texts differ")
    names = [key for key in choice if choice[key] != other.get(key)]
    return "; ".join(parts) + f" (fields: {', '.join(names)})"


def compare_numbers(numbers: list[float | None], others: list[float | None]) -> str:
    """Return how many of two lists of numbers differ, where first, and by how much."""
    gaps = dict(_find_gaps(numbers, others))
    if not gaps:
        return f"none of {len(numbers)} numbers differs"
    first = min(gaps)
    return (
        f"{len(gaps)} of {len(numbers)} numbers differ, first number {first}, "
        f"by {max(gaps.values()):.2g} at most"
    )


def _find_gaps(
    numbers: list[float | None], others: list[float | None]
) -> Iterator[tuple[int, float]]:
    for place, (number, other) in enumerate(zip(numbers, others, strict=False)):
        if number == other:
            continue
        is_absent = number is None or other is None
        yield place, math.inf if is_absent else abs(number - other)  # type: ignore[operator]
