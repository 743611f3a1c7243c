"""How many equal lines came before one."""

from __future__ import annotations

from fminfer.answers.line_counter import EqualLines
from fminfer.contract.envelope import Line, open_envelope


def test_a_line_that_is_refused_is_no_equal_of_one_with_the_default() -> None:
    """1e400 was read back as null, the default, so that equal lines behind it drew one further."""
    lines = [b'{"prompt": "p", "temperature": 1e400}', b'{"prompt": "p"}', b'{"prompt": "p"}']
    lines += [b'{"prompt": "p", "temperature": null}']
    equal, found = EqualLines(), []
    for number, raw in enumerate(lines, 1):
        line = Line(0, number, raw)
        found.append(equal.count(line, open_envelope(line)))
    assert found[1:] == [0, 1, 2]
