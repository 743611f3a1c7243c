"""A missing extra is named with the command that fits the installation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fminfer.machine import installation
from fminfer.machine.installation import describe_install

UV = """[tool]
requirements = [{ name = "fminfer", extras = ["tables"] }]
entrypoints = [{ name = "fminfer", install-path = "/x/fminfer", from = "fminfer" }]
"""
PIPX = json.dumps({"main_package": {"package_or_url": "fminfer[tables,zst]"}}, indent=4)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with pip, whose fminfer is from an index."""
    monkeypatch.setattr(installation, "PREFIX", tmp_path)
    monkeypatch.setattr(installation, "_read_origin", lambda: {})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "pip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "command", "of_packages"),
    [
        ("x", "", "pip install 'fminfer[serve]'", "pip install s3fs"),
        (
            "uv-receipt.toml",
            UV,
            "uv tool install 'fminfer[tables,serve]'",
            "uv tool install 'fminfer[tables]' --with s3fs",
        ),
        (
            "pipx_metadata.json",
            PIPX,
            "pipx install --force 'fminfer[tables,zst,serve]'",
            "pipx inject fminfer s3fs",
        ),
        (
            "pyvenv.cfg",
            "home = /usr/bin\nuv = 0.9\n",
            "uv pip install 'fminfer[serve]'",
            "uv pip install s3fs",
        ),
    ],
)
def test_each_installer_has_its_command(
    file: str, text: str, command: str, of_packages: str, prefix: Path
) -> None:
    (prefix / file).write_text(text)
    assert describe_install("serve") == command
    assert describe_install("remote", "s3fs") == of_packages


def test_a_pip_of_another_environment_is_not_named(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    python = prefix / "bin" / "python"
    assert describe_install("serve") == f"{python} -m pip install 'fminfer[serve]'"


def test_a_clone_and_a_file_are_named(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = prefix / "my clone"
    clone.mkdir()
    wheel = prefix / "fminfer-1-py3-none-any.whl"
    wheel.write_text("")

    def install_from(origin: dict[str, Any]) -> str:
        monkeypatch.setattr(installation, "_read_origin", lambda: origin)
        return describe_install("serve").removeprefix("pip install ")

    origin: dict[str, Any] = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    assert install_from(origin) == f"-e '{clone}[serve]'"
    (clone / "constraints.txt").write_text("")
    pinned = f"-c '{clone / 'constraints.txt'}' '{clone}[serve]'"
    assert install_from(origin | {"dir_info": {}}) == pinned
    assert (
        install_from({"url": wheel.as_uri()}) == f"'fminfer[serve] @ {wheel.as_uri()}'"
    )
    receipt = prefix / "pipx_metadata.json"
    receipt.write_text(PIPX)
    forced = "pipx install --force"
    assert install_from(origin | {"dir_info": {}}) == (
        f"{forced} '{clone}[tables,zst,serve]'"
    ), "pipx takes no constraints"
    receipt.unlink()
    wheel.unlink()
    assert install_from({"url": wheel.as_uri()}) == "'fminfer[serve]'"
