"""Chats whose thoughts are ended by budgets, and what is asked of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.same_bytes.mixed_lines import CONSTRAINED, Lines

NUM_LINES = 40
# Opens the thought, and shows Hermes' form of calls.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>{% endfor %}"
    "assistant: <think>\n"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"floor": {"enum": floors}},
                "required": ["floor"],
                "additionalProperties": False,
            },
        },
    }
    for name, floors in (("look", [1, 2, 3]), ("go", ["up", "down", "out"]))
]
LABELS = {
    "structured_outputs": {
        "choice": ["north", "north east", "south"],
        "probabilities": True,
    }
}
BUDGETS = (0, 3, 7, -1)
SEVERAL: dict[str, Any] = {"n": 4, "temperature": 1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "n": 2},
    "several": SEVERAL | {"logprobs": True, "top_logprobs": 2},
    "choice": SEVERAL | CONSTRAINED["choice"],
    "regex": SEVERAL | CONSTRAINED["regex"] | {"logprobs": True},
    "schema": SEVERAL | CONSTRAINED["schema"] | {"max_tokens": 120},
    "labels": SEVERAL | LABELS | {"logprobs": True},
    "greedy-labels": {"temperature": 0} | LABELS,
    "stop": SEVERAL | {"stop": ["e", "7", "a"]},
    "hidden": SEVERAL | {"include_reasoning": False},
    "calls": SEVERAL | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120},
}


def make_thinking_lines() -> Lines:
    """Return lines by their names: each kind with each budget; every other line has a seed."""
    lines: Lines = {}
    for budget in BUDGETS:
        for kind, fields in KINDS.items():
            number = len(lines)
            is_seeded = (number + number // 10) % 2 == 0
            question = f"Where is room {number}? " + "Go on. " * (number % 7)
            lines[f"{number}-{kind}-{budget}"] = (
                {
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": 40,
                    "thinking_token_budget": budget,
                    "return_token_ids": True,
                }
                | ({"seed": number} if is_seeded else {})
                | fields
            )
    assert len(lines) == NUM_LINES
    return lines


def save_template(folder: Path) -> Path:
    path = folder / "template.jinja"
    path.write_text(TEMPLATE)
    return path
