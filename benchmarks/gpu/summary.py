"""What a try found, as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu.phases import Phase
from benchmarks.gpu.results import Line

BAD = ("wrong", "failed", "crashed", "out of time", "not reached")
LINES_OF_TEXT = 4  # of what a case raised
LINE = 400  # most characters of a line
MOST_CHARACTERS = 8000


def latest(lines: Sequence[Line], phase: Phase) -> dict[str, Line]:
    """Return a phase's cases with what became of each at first, by name."""
    found: dict[str, Line] = {}
    for line in lines:
        is_mine = (
            line["phase"] == phase.number and line.get("state", "running") != "running"
        )
        if is_mine and not line.get("again"):
            found[line["case"]] = line
    return found


def has_passed(lines: Sequence[Line], phases: Sequence[Phase]) -> bool:
    """Tell whether every phase ran, and nothing in it went wrong."""
    for phase in phases:
        states = {line["state"] for line in latest(lines, phase).values()}
        if not states or states & {*BAD}:
            return False
    return True


def to_text(
    lines: Sequence[Line], phases: Sequence[Phase], most: int = MOST_CHARACTERS
) -> str:
    """Return a line a phase, what is wrong, and each case's figures, as far as there is room."""
    table = [f"{'phase':34}{'seconds':>8}{'planned':>8}  cases"]
    figures = list[str]()
    troubles = list[tuple[str, str]]()  # a case, and what is told of it
    for phase in phases:
        cases = latest(lines, phase)
        counts = Counter(line["state"] for line in cases.values())
        took = sum(
            line["took_s"]
            for line in lines
            if line["phase"] == phase.number and "took_s" in line
        )
        told = (
            ", ".join(f"{count} {state}" for state, count in counts.most_common())
            or "none ran"
        )
        name = f"{phase.number} {phase.name}"
        table.append(f"{name:34}{took:8.1f}{phase.planned_s:8}  {told}")
        for case in cases.values():
            figures.append(f"  {phase.number} {case['case']}: {_figures(case)}"[:LINE])
            if case["state"] in BAD:
                troubles.append(_trouble(phase, case, lines))
    text = "\n".join(table) + "\n"
    if troubles:
        text += _part("What went wrong:", _joined(troubles), (most - len(text)) // 2)
    return text + _part("Figures:", figures, most - len(text))


def _part(head: str, items: Sequence[str], most: int) -> str:
    """Return a headed list of no more characters than `most`, and how much of it is left out."""
    left_out = "  … and {} more, in results.jsonl"
    room = most - len(head) - len(left_out) - 10
    shown = list[str]()
    for item in items:
        room -= len(item) + 1
        if room < 0:
            shown.append(left_out.format(len(items) - len(shown)))
            break
        shown.append(item)
    return "\n".join(["", head, *shown]) + "\n"


def _figures(case: Line) -> str:
    told = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in case.get("figures", {}).items()
    ]
    if case["state"] not in ("passed",):
        told.insert(
            0,
            f"{case['state'].upper()}{': ' if case['text'] else ''}{_first(case['text'])}",
        )
    return ", ".join(told) or "passed"


def _first(text: str) -> str:
    """Return the line of a text that tells most: an exception's own, which is the last one."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0])[:200]


def _trouble(phase: Phase, case: Line, lines: Sequence[Line]) -> tuple[str, str]:
    told = _end_of(case["text"])
    for line in lines:
        is_same = line["phase"] == phase.number and line.get("case") == case["case"]
        if is_same and line.get("again") and line["state"] != "running":
            told.append(f"    again, with CUDA_LAUNCH_BLOCKING=1: {line['state']}")
            told += _end_of(line["text"]) if line["text"] != case["text"] else []
    return f"{phase.number} {case['case']}: {case['state']}", "\n".join(told)


def _joined(troubles: Sequence[tuple[str, str]]) -> list[str]:
    """Group cases that have the same text, so that each text is printed once."""
    by_text: dict[str, list[str]] = {}
    for name, text in troubles:
        by_text.setdefault(text, []).append(name)
    return [
        "\n".join(["  " + "; ".join(names)[:LINE], *filter(None, [text])])
        for text, names in by_text.items()
    ]


def _end_of(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip(" ^~")]
    return [f"      {line[: LINE // 2]}" for line in lines[-LINES_OF_TEXT:]]
