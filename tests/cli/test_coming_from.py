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
from fminfer.cli.config_keys import ALIASES, OLD_FLAGS
from fminfer.cli.submit_command import accept_run_flags
from fminfer.core.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "coming_from.md").read_text()
COMMANDS = sorted(
    set(re.findall(r"`fminfer ([^`]+)`", TEXT)) - {"run", "run --infer-data"}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_flags_are_taken(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fminfer.toml").write_text('model_class = "opt_125M"\n')
    name, *words = shlex.split(command)
    if "opt_config.py" in words:
        (tmp_path / "opt_config.py").write_text("model_class = opt_125M\n")
        with pytest.raises(UsageError, match='model-config = "opt-125m"'):
            main.commands[name].make_context(name, words)
        return
    ours = main.get_command(click.Context(main), name)
    assert ours is not None, name
    found = ours.make_context(name, words)
    if isinstance(ours, click.Group):
        inner, *words = words
        ours.commands[inner].make_context(inner, words)
    if name == "submit":
        accept_run_flags.make_context("run", list(found.params["run_flags"]))


def test_there_are_rows_of_every_command() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {
        "run",
        "serve",
        "split",
        "merge",
        "submit",
    }
    assert len(COMMANDS) > 45


def left_sides() -> str:
    """Return what stands in the first columns: what others have."""
    return "\n".join(
        line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| `")
    )


def test_every_old_flag_of_serve_has_a_row() -> None:
    options = [
        param
        for param in main.commands["serve"].params
        if isinstance(param, click.Option)
    ]
    old = {option.opts[0] for option in options if option.hidden}
    assert len(old) > 8
    assert not old - set(re.findall(r"--[a-z0-9_-]+", left_sides()))


def test_every_old_key_of_the_file_has_a_row() -> None:
    assert not (ALIASES.keys() - {*OLD_FLAGS}) - set(
        re.findall(r"[a-z_]+", left_sides())
    )


def test_every_flag_of_the_old_runner_has_a_row() -> None:
    path = ROOT / "scripts" / "dist_inference_runner.py"
    spec = importlib.util.spec_from_file_location("dist_inference_runner", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    named = set(re.findall(r"--[a-z0-9-]+", left_sides()))
    assert not set(module.KNOWN) - named
