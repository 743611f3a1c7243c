"""Every file that a chat template may come from is in a run's fingerprint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fminfer.core.config import EngineConfig
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.plan.planning import plan_ahead


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_another_template_is_another_run(tmp_path: Path, name: str) -> None:
    """A run went on under another template for tools, and mixed answers of both."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    found = []
    for text in ("one", "two"):
        (folder / name).write_text(text)
        config = EngineConfig(model=str(folder))
        found.append(
            plan_ahead(config, open_checkpoint(str(folder))).fingerprint()[
                "the tokenizer"
            ]
        )
    assert found[0] != found[1]
