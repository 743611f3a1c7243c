"""Orders waiting prompts: those that share a prefix together, long ones first.

Prompts of one prefix that follow one another find it even in a small cache. A long row that is
admitted early does not run alone at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from fminfer.contract.request import SamplingParams

MIN_SHARED = 32  # first tokens that must be equal for prompts to run together


class HasPrompt(Protocol):
    """What is ordered."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def params(self) -> SamplingParams: ...


T = TypeVar("T", bound=HasPrompt)


def plan_order(prompts: Sequence[T]) -> list[T]:
    """Order prompts.

    Groups that share their first tokens are ordered by their longest row, and a group's prompts so
    that those which share more are neighbours.
    """
    if len(prompts) < 2:
        return list(prompts)
    ordered: list[T] = []
    groups: dict[tuple[int, ...] | int, list[T]] = {}
    for place, prompt in enumerate(prompts):
        head = tuple(prompt.ids[:MIN_SHARED])
        groups.setdefault(head if len(head) == MIN_SHARED else place, []).append(prompt)
    for group in groups.values():
        group.sort(key=lambda prompt: prompt.ids)
        group.sort(key=_steps, reverse=True)
    for group in sorted(groups.values(), key=lambda group: _steps(group[0]), reverse=True):
        ordered += group
    return ordered


def _steps(prompt: HasPrompt) -> int:
    """Return how many steps a prompt's rows may take."""
    return prompt.params.max_tokens
