"""Chat templates in files, and what of a template's text says what it knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fminfer.core.errors import CheckpointError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.tokenizer import Tokenizer
from fminfer.text.tokenizer_folder import LEGACY_TEMPLATE, read_template

HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def without_template(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    """An editor's BOM became the first token of every prompt."""
    file = tmp_path / "own.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    assert read_template(file) == TEMPLATE


def test_a_processors_json_is_not_taken_for_jinja(tmp_path: Path) -> None:
    """The JSON around the template was rendered into every prompt."""
    file = tmp_path / LEGACY_TEMPLATE
    file.write_text(json.dumps({"chat_template": TEMPLATE}))
    assert read_template(file) == TEMPLATE
    for wrong in (
        '{"other": 1}',
        '{"chat_template": {"default": "x"}}',
        "[]",
        TEMPLATE,
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"chat_template|Expecting"):
            read_template(file)


def test_a_template_beside_the_tokenizer_as_processors_have_it(tmp_path: Path) -> None:
    """transformers gives it to the processor only, and the model seemed to have none."""
    folder = without_template(tmp_path / "model")
    assert ChatTemplate(Tokenizer.load(folder)).find_template(has_tools=False) is None
    (folder / LEGACY_TEMPLATE).write_text(json.dumps({"chat_template": TEMPLATE}))
    assert ChatTemplate(Tokenizer.load(folder)).render(HELLO, []).text == "<user>Hello"
    (folder / "chat_template.jinja").write_text("own")
    assert ChatTemplate(Tokenizer.load(folder)).render(HELLO, []).text == "own"
    (folder / "chat_template.jinja").unlink()
    (folder / LEGACY_TEMPLATE).write_text('{"chat_')
    with pytest.raises(CheckpointError, match=r"chat_template\.json is broken"):
        Tokenizer.load(folder)


def test_a_word_is_not_a_role() -> None:
    """A template that speaks of developers got a role that it does not know."""
    messages = [{"role": "developer", "content": "Be brief."}]
    tokenizer = Tokenizer.load(DEMO_MODEL)
    speaks = TEMPLATE + "{# for developers #}{{ 'a developer wrote this' }}"
    assert (
        ChatTemplate(tokenizer, speaks).render(messages, []).text.startswith("<system>")
    )
    knows = TEMPLATE + '{% if messages[0]["role"] == "developer" %}{% endif %}'
    assert (
        ChatTemplate(tokenizer, knows)
        .render(messages, [])
        .text.startswith("<developer>")
    )
