"""How many equal lines came before one."""

from __future__ import annotations

import json

from fminfer.answers.line_counter import EqualLines
from fminfer.contract.envelope import Line, parse_envelope


def test_a_line_that_is_refused_is_no_equal_of_one_with_the_default() -> None:
    """1e400 was read back as null, the default, so that equal lines behind it drew one
    further."""
    lines = [
        b'{"prompt": "p", "temperature": 1e400}',
        b'{"prompt": "p"}',
        b'{"prompt": "p"}',
    ]
    lines += [b'{"prompt": "p", "temperature": null}']
    equal = EqualLines()
    found = []
    for number, raw in enumerate(lines, 1):
        line = Line(0, number, raw)
        found.append(equal.count(line, parse_envelope(line)))
    assert found[1:] == [0, 1, 2]


def test_equal_chats_are_counted_by_all_that_a_template_sees() -> None:
    """With what an engine may refuse; a chat that is none is not counted."""
    chat = {
        "messages": [{"role": "user", "content": "p"}],
        "top_logprobs": 900,
        "logprobs": True,
    }
    asked = [
        chat,
        chat,
        chat | {"chat_template_kwargs": {"x": 1}},
        chat | {"tools": 7},
        chat,
    ]
    asked.append(chat | {"temperature": 0})
    equal = EqualLines()
    found = []
    for number, fields in enumerate(asked, 1):
        line = Line(0, number, json.dumps(fields).encode())
        found.append(equal.count(line, parse_envelope(line)))
    assert found == [0, 1, 0, 0, 2, 0]
