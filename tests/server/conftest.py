"""Clients here reach servers of this machine and nothing else; a browser for a module's
tests."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from fminfer.server.http import SWITCH_S
from tests.browser import Browser, open_browser
from tests.fakes.serving import serve_fake
from tests.server.batch_calls import Clock
from tests.server.page import Page

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
