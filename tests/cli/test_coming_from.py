"""Every command of ours in docs/coming_from.md is one that our command line takes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from fminfer.cli.app import main
from fminfer.cli.run_stand_in import run_stand_in

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "coming_from.md").read_text()
COMMANDS = sorted(set(re.findall(r"`fminfer ([^`]+)`", TEXT)) - {"run", "run --infer-data"})


@pytest.mark.parametrize("command", COMMANDS)
def test_its_flags_are_taken(command: str) -> None:
    name, *words = shlex.split(command)
    ours = main.get_command(click.Context(main), name)
    assert ours is not None, name
    found = ours.make_context(name, words)
    if name == "submit":
        run_stand_in.make_context("run", list(found.params["run_flags"]))


def test_there_are_rows_of_every_command() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {"run", "split", "merge", "submit"}
    assert len(COMMANDS) > 25


def test_every_flag_of_the_old_runner_has_a_row() -> None:
    path = ROOT / "scripts" / "dist_inference_runner.py"
    spec = importlib.util.spec_from_file_location("dist_inference_runner", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    left = "\n".join(line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"--[a-z0-9-]+", left))
    assert not set(module.KNOWN) - named
