"""The server that a test asks for, by its marks; clients reach only servers of this machine.

`needs_server` in `server_needs.py` says what a test's server is started with.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fminfer
from fminfer.server.http import SWITCH_S
from tests.browser import Browser, open_browser
from tests.fakes.serving import serve_fake
from tests.server.batch_calls import Clock
from tests.server.page import Page
from tests.server.running import Running, running
from tests.server.server_needs import ServerNeeds, SharedServers, find_needs

# Read by the libraries when they are imported, which is after this.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(scope="package", autouse=True)
def only_this_machine() -> Iterator[None]:
    """Make every attempt to connect elsewhere a failure."""
    connect = socket.socket.connect
    connect_ex = socket.socket.connect_ex

    def check(connection: socket.socket, address: Any) -> None:
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and not ip_address(address[0]).is_loopback:
            raise AssertionError(f"a test tried to connect to {address}")

    def refuse(connection: socket.socket, address: Any) -> None:
        check(connection, address)
        connect(connection, address)

    def refuse_ex(connection: socket.socket, address: Any) -> int:
        check(connection, address)
        return connect_ex(connection, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse_ex)
        yield


@pytest.fixture(scope="package", autouse=True)
def quick_threads() -> Iterator[None]:
    """Threads take turns as in the command, and uvicorn looks soon whether it is to end."""
    soon = SimpleNamespace(**vars(asyncio) | {"sleep": lambda s: asyncio.sleep(s / 10)})
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", soon)
        yield
    sys.setswitchinterval(before_s)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs_server: what a test's server is started with"
    )


@pytest.fixture(scope="module")
def shared_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharedServers]:
    """The engines and servers that a file's tests share."""
    servers = SharedServers(tmp_path_factory)
    yield servers
    servers.close()


@pytest.fixture
def server_needs(request: pytest.FixtureRequest) -> ServerNeeds:
    """What the nearest `needs_server` says of a test."""
    return find_needs(request.node)


@pytest.fixture
def engine_options(
    server_needs: ServerNeeds, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """Options of the engines that a test needs."""
    options: dict[str, Any] = {"dtype": "float32"} | server_needs.engine
    if server_needs.model:
        options["model"] = str(request.getfixturevalue(server_needs.model))
    return options


@pytest.fixture
def engine(
    engine_options: dict[str, Any], shared_servers: SharedServers
) -> fminfer.Engine:
    """An engine that the file's tests share, for servers that a test starts itself."""
    return shared_servers.engine(engine_options)


@pytest.fixture
def server(
    server_needs: ServerNeeds,
    engine_options: dict[str, Any],
    shared_servers: SharedServers,
    tmp_path: Path,
) -> Iterator[Running]:
    """A server of a free port, with what `needs_server` says."""
    if not server_needs.is_fresh:
        yield shared_servers.server(server_needs, engine_options)
        return

    engine = shared_servers.engine(engine_options)
    state = tmp_path / "state" if server_needs.has_state else None
    with running(engine, state=state, **server_needs.settings) as server:
        yield server


@pytest.fixture
def client(server: Running, shared_servers: SharedServers) -> Any:
    """OpenAI's client of the server."""
    return shared_servers.client(server)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for name in ("stored_files", "stored_batches", "batch_run", "batch_work"):
        monkeypatch.setattr(f"fminfer.server.batches.{name}.time", found)
    monkeypatch.setattr("fminfer.server.batches.batch_work.LOOK_S", 0.05)
    return found


@pytest.fixture(scope="module")
def litellm() -> Any:
    """LiteLLM: every process collects all files, and its import takes 5 s of a core."""
    return importlib.import_module("litellm")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Open the page of a fake server, whose options are the test's parameter."""
    with serve_fake(**getattr(request, "param", {})) as fake:
        page = Page(browser, fake)
        page.open()
        yield page
        browser.open("about:blank")
