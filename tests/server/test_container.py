"""The container's image, as far as that can be tried without a builder: its files and
its start."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from configparser import ConfigParser
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
START = ROOT / "scripts" / "container_start"


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with their words on one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in lines)
    ]


def copied() -> list[str]:
    """Return what the build's context is asked for; the wheel comes from an earlier stage."""
    return [
        path
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from=")
        for path in rest.split()[:-1]
    ]


def start(
    tmp_path: Path, *flags: str, is_shown: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Start the script in a folder of its own, with nothing of ours in the environment."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    places = {
        "MODEL_FOLDER": str(tmp_path / "model"),
        "CONFIG_FILE": str(tmp_path / "c.toml"),
    }
    shown = ["--show-command"] if is_shown else []
    return subprocess.run(
        [sys.executable, str(START), *shown, *flags],
        env=kept | {"PYTHONPATH": str(ROOT)} | places | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def words(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fminfer serve ")
    return shlex.split(done.stdout)[2:]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_what_the_image_copies_is_there_and_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines and len(copied()) > 5
    for path in copied():
        assert (ROOT / path).exists(), path
        assert any(fnmatch(path, each) for each in sent), f"{path} is ignored"
    for name in ("scripts/container_start",):
        assert os.access(ROOT / name, os.X_OK)


def test_what_the_image_installs_can_be_installed() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    arguments = dict(
        rest.split("=", 1) for word, rest in instructions() if word == "ARG"
    )
    assert arguments.keys() == {"BASE", "WHEEL_BASE", "DEVICE", "TORCH_INDEX", "EXTRAS"}
    for extra in arguments["EXTRAS"].split(","):
        assert extra in setup["options.extras_require"]
    needed = {
        setup["metadata"]["license_files"],
        "README.md",
        "constraints.txt",
        "setup.cfg",
    }
    assert needed <= set(copied()), "pip reads them"
    minor = int(re.findall(r"python:3\.(\d+)", arguments["BASE"])[0])
    assert minor >= int(setup["options"]["python_requires"].split(".")[-1])


def test_the_image_runs_as_a_user_with_a_cache_of_its_own() -> None:
    told = instructions()
    users = [place for place, (word, _) in enumerate(told) if word == "USER"]
    assert len(users) == 1 and told[users[0]][1] == "fminfer"
    assert not [1 for word, _ in told[users[0] :] if word == "RUN"]
    values = dict(
        pair.split("=", 1)
        for word, rest in told
        if word == "ENV"
        for pair in rest.split()
    )
    cache = values["XDG_CACHE_HOME"]
    assert values["HF_HOME"].startswith(f"{cache}/")
    assert f"--mode 700 --owner fminfer --group fminfer {cache}" in " ".join(
        r for _, r in told
    )
    assert ("EXPOSE", "8020") in told and ("ENTRYPOINT", '["container_start"]') in told


def test_it_serves_the_mounted_model_on_every_address(
    tmp_path: Path, model: str
) -> None:
    found = words(start(tmp_path, "--max-rows", "4"))
    assert found == [
        "--model-name",
        model,
        "--host",
        "0.0.0.0",
        "--port",
        "8020",
        "--max-rows",
        "4",
    ]


def test_file_variables_and_flags_go_before_the_defaults(
    tmp_path: Path, model: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('server_port = 9000\nmodel-name = "/other"\n')
    assert words(start(tmp_path)) == ["--config", str(file), "--host", "0.0.0.0"]
    file.write_text('[serve]\nhost = "::"\n')
    found = words(start(tmp_path, FMINFER_PORT="9001"))
    assert found == ["--config", str(file), "--model-name", model]
    file.unlink()
    for flags in (["org/name"], ["--random-init", "opt-125m"], ["--model-name=/other"]):
        assert words(start(tmp_path, *flags)) == [
            "--host",
            "0.0.0.0",
            "--port",
            "8020",
            *flags,
        ]


@pytest.mark.parametrize("is_empty", [False, True])
def test_without_a_model_it_says_what_to_mount(tmp_path: Path, is_empty: bool) -> None:
    """Docker makes an empty folder where what is mounted is not there."""
    if is_empty:
        (tmp_path / "model").mkdir()
    done = start(tmp_path)
    assert done.returncode == 1 and not done.stdout
    assert f"-v /path/to/model:{tmp_path / 'model'}" in done.stderr


def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, model: str) -> None:
    (tmp_path / "c.toml").write_text("prot = 8020\n")
    done = start(tmp_path)
    assert (
        done.returncode == 1 and "prot" in done.stderr and done.stderr.count("\n") == 1
    )


def test_it_becomes_the_server(tmp_path: Path, model: str) -> None:
    command = tmp_path / "fminfer"
    command.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    command.chmod(0o755)
    done = start(
        tmp_path, "-q", is_shown=False, PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert done.returncode == 7
    assert done.stdout == f"serve --model-name {model} --host 0.0.0.0 --port 8020 -q\n"


class Health(BaseHTTPRequestHandler):
    """A server that is well, or is not."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *told: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("status", [200, 503, None])
def test_health(tmp_path: Path, status: int | None) -> None:
    server = HTTPServer(("127.0.0.1", 0), type("Its", (Health,), {"status": status}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = str(server.server_port)
    try:
        if status is None:
            server.shutdown()
            server.server_close()
        done = start(tmp_path, "--health", is_shown=False, FMINFER_PORT=port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (done.returncode == 0) is (status == 200), done.stderr
