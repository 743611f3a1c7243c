"""How this copy of fminfer was installed, and the command that adds an extra to it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

PREFIX = Path(sys.prefix)


def describe_install(extra: str, packages: str = "") -> str:
    """Return the command that adds an extra to this installation.

    Args:
        packages: what is needed in place of the extra, if the extra does not say it.
    """
    for name, describe in (
        ("uv-receipt.toml", _describe_uv_tool),
        ("pipx_metadata.json", _describe_pipx),
    ):
        receipt = PREFIX / name
        if receipt.exists():
            return describe(receipt.read_text(errors="replace"), extra, packages)

    requirement = packages or _make_requirement([extra])
    settings = PREFIX / "pyvenv.cfg"
    pip = shutil.which("pip")
    if settings.exists() and re.search(r"(?m)^uv\b", settings.read_text()):
        command = "uv pip install"
    elif pip is not None and Path(pip).parent == Path(sys.executable).parent:
        command = "pip install"
    else:  # another environment's, or none
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return f"{command} {requirement}"


def _describe_uv_tool(receipt: str, extra: str, packages: str) -> str:
    """Return uv's command; it makes the tool anew, with the extras that it has."""
    match = re.search(r"extras = \[([^\]]*)\]", receipt)
    extras = re.findall(r"[\w-]+", match[1]) if match else []
    if packages:
        more = " ".join(f"--with {name}" for name in packages.split())
        return f"uv tool install {_make_requirement(extras)} {more}"
    return f"uv tool install {_make_requirement([*extras, extra])}"


def _describe_pipx(receipt: str, extra: str, packages: str) -> str:
    if packages:
        return f"pipx inject fminfer {packages}"
    match = re.search(r"\[([\w,-]+)\]", _find_text(receipt, "package_or_url"))
    extras = match[1].split(",") if match else []
    requirement = _make_requirement([*extras, extra], takes_constraints=False)
    return f"pipx install --force {requirement}"


def _find_text(receipt: str, name: str) -> str:
    match = re.search(rf'"{name}": "((?:[^"\\]|\\.)*)"', receipt)
    return match[1] if match else ""


def _make_requirement(extras: list[str], *, takes_constraints: bool = True) -> str:
    """Return what an installer is given: the name, or where this copy came from."""
    wanted = ",".join(dict.fromkeys(extras))
    wanted = f"[{wanted}]" if wanted else ""
    origin = _read_origin()
    path = Path(unquote(urlparse(origin.get("url", "")).path))
    if "dir_info" in origin:
        is_editable = "-e " if origin["dir_info"].get("editable") else ""
        limits = path / "constraints.txt"
        has_pins = takes_constraints and limits.exists()
        pins = f"-c {shlex.quote(str(limits))} " if has_pins else ""
        return f"{pins}{is_editable}{shlex.quote(f'{path}{wanted}')}"
    if origin.get("url", "").startswith("file:") and path.exists():
        return shlex.quote(f"fminfer{wanted} @ {origin['url']}")
    return shlex.quote(f"fminfer{wanted}") if wanted else "fminfer"


def _read_origin() -> dict[str, Any]:
    """Return what the installer wrote of where this copy is from; {}: from an index."""
    import importlib.metadata

    try:
        distribution = importlib.metadata.distribution("fminfer")
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH alone
        return {}
    text = distribution.read_text("direct_url.json")
    origin: dict[str, Any] = json.loads(text) if text else {}
    return origin
