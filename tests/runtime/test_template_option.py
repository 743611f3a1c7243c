"""`--chat-template FILE`, as an engine takes it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import fminfer
from fminfer.core.errors import UsageError

TEMPLATE = "Question: {{ messages[-1].content }}\nAnswer:"


def test_what_stands_around_a_template_is_in_no_prompt(tmp_path: Path) -> None:
    """A byte order mark, and a processor's JSON, were rendered into each prompt."""
    marked = tmp_path / "own.jinja"
    wrapped = tmp_path / "chat_template.json"
    marked.write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    wrapped.write_text(json.dumps({"chat_template": TEMPLATE}))
    for file in (marked, wrapped):
        with closing(fminfer.Engine(chat_template=str(file))) as engine:
            prompt = engine.intake.chat_template.render(
                [{"role": "user", "content": "x"}], []
            )
        assert prompt.text == "Question: x\nAnswer:"
    wrapped.write_text("{}")
    with pytest.raises(
        UsageError, match=r"chat_template\.json cannot be read: it is no JSON"
    ):
        fminfer.Engine(chat_template=str(wrapped))
