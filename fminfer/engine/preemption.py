"""Chooses which running rows lose their blocks to others, and in which order.

Prompts with several candidates are never preempted: their sequences share blocks and run together.
"""

from __future__ import annotations

from collections.abc import Iterable

from fminfer.engine.sequence import PromptState, Sequence


def rows_below(priority: int, sequences: Iterable[Sequence]) -> list[Sequence]:
    """List the rows that a prompt may preempt: the lowest priority first, then the latest."""
    rows = [
        sequence
        for sequence in sequences
        if sequence.prompt.priority < priority and len(sequence.prompt.sequences) == 1
    ]
    return sorted(rows, key=lambda row: (row.prompt.priority, -row.prompt.number))


def first_to_go(sequence: Sequence, ready: Iterable[Sequence]) -> Sequence:
    """Choose the row to preempt when no block is left for a running row: itself or a ready one."""
    priority = sequence.prompt.priority
    others = (other for other in ready if _may_go(other.prompt, priority))
    return max([sequence, *others], key=lambda row: (-row.prompt.priority, row.prompt.number))


def _may_go(prompt: PromptState, priority: int) -> bool:
    """Return whether a row may be preempted for this priority: once, or for a higher one."""
    return len(prompt.sequences) == 1 and (not prompt.again or prompt.priority < priority)
