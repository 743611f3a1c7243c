"""Reads chat templates from files: Jinja, or a processor's chat_template.json."""

from __future__ import annotations

import json
from pathlib import Path

LEGACY_TEMPLATE = "chat_template.json"  # where models that read images, too, kept theirs


def read_template(file: Path) -> str:
    """Return the template that a file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no template.
    """
    text = file.read_text("utf-8-sig")  # a byte order mark is no part of a prompt
    return _read_member(text) if file.suffix == ".json" else text


def _read_member(text: str) -> str:
    fields = json.loads(text)
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if not isinstance(template, str):
        raise ValueError("it is no JSON object with a text as its chat_template")
    return template
