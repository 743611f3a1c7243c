"""In which order waiting prompts are to run: those that share a prefix together, long ones first.

Prompts of one prefix that follow one another find it in the cache, however small that is; and a
long row that enters early does not run alone at the end. It knows prompts' ids and limits, no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fminfer.engine.sequence import PromptState

WINDOW = 1024  # prompts that are ordered at a time
MAX_WINDOW_TOKENS = 500_000  # of their ids together, some 20 MB
MIN_SHARED = 32  # first tokens that must be equal for prompts to run together


def plan_order(prompts: Sequence[PromptState]) -> list[PromptState]:
    """Order a window of prompts; files keep their order, so that they are done one after another.

    Within a file the groups that share their first tokens are ordered by their longest row, and a
    group's prompts so that those which share more are neighbours.
    """
    ordered: list[PromptState] = []
    for _, of_file in groupby(prompts, key=lambda prompt: prompt.owner.line.source):
        groups: dict[tuple[int, ...] | int, list[PromptState]] = {}
        for place, prompt in enumerate(of_file):
            head = tuple(prompt.ids[:MIN_SHARED])
            groups.setdefault(head if len(head) == MIN_SHARED else place, []).append(prompt)
        for group in groups.values():
            group.sort(key=lambda prompt: prompt.ids)
            group.sort(key=_steps, reverse=True)
        for group in sorted(groups.values(), key=lambda group: _steps(group[0]), reverse=True):
            ordered += group
    return ordered


def _steps(prompt: PromptState) -> int:
    """Return how many steps a prompt's rows may take."""
    return prompt.params.max_tokens
