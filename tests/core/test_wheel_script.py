"""What `scripts/wheel` does to the README before it is published."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.version import __version__
from fminfer.machine.processor import LEVELS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    loader = SourceFileLoader("wheel_script", str(ROOT / "scripts" / "wheel"))
    spec = spec_from_loader("wheel_script", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_to_the_repository(script: Any) -> None:
    """Relative ones break on an index's page."""
    text = (ROOT / "README.md").read_text()
    address = "https://example.org/a/b"
    absolute = script.make_links_absolute(text, address)
    assert f"]({address}/raw/v{__version__}/docs/run.svg)" in absolute
    assert f"]({address}/blob/v{__version__}/docs/running.md#install)" in absolute
    targets = re.findall(r"\]\(([^)]+)\)", absolute)
    assert targets and all(target.startswith("https://") for target in targets)
    plain = script.make_links_absolute(text, "")
    assert "](docs" not in plain and "![" not in plain


def test_each_level_has_an_instruction_of_its_own(script: Any) -> None:
    assert [*script.INSTRUCTIONS] == [*LEVELS]
