"""What a test's server is started with, and the servers that the tests of a file share.

A test asks for `server`, or for `engine` to start a server itself. Both are demo models in
float32. A file, a class or a test says what else they need:

    pytestmark = needs_server(engine={"max_rows": 4}, has_state=True)

    @needs_server(api_keys=("k1", "k2"))
    def test_routes_that_compute_need_a_key(server: Running) -> None: ...

The nearest mark counts, and all of it: nothing is added from the file's.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

import fminfer
from tests.server.running import Running, running


@dataclass(slots=True, frozen=True)
class ServerNeeds:
    """What a test's server, and the engine that it stands on, are started with."""

    engine: dict[str, Any] = field(default_factory=dict)  # options of `fminfer.Engine`
    settings: dict[str, Any] = field(default_factory=dict)  # of `ServerSettings`
    # The fixture that gives the folder of the model; none: the demo model.
    model: str = ""
    has_state: bool = False  # a folder of files and batches
    is_fresh: bool = False  # for each test; otherwise a file's tests share a server


def needs_server(
    *,
    engine: dict[str, Any] | None = None,
    model: str = "",
    has_state: bool = False,
    is_fresh: bool = False,
    **settings: Any,
) -> pytest.MarkDecorator:
    """Mark what the `server` and the `engine` of tests are started with.

    Args:
        engine: options of `fminfer.Engine`.
        model: the fixture that gives the folder of the model; none: the demo model.
        has_state: whether the server has a folder of files and batches.
        is_fresh: whether each test has a server of its own.
        settings: of `ServerSettings`.
    """
    needs = ServerNeeds(engine or {}, settings, model, has_state, is_fresh)
    return pytest.mark.needs_server(needs)


def find_needs(test: pytest.Item) -> ServerNeeds:
    """Return what the nearest mark of a test says; without one, the defaults."""
    mark = test.get_closest_marker("needs_server")
    if mark is None:
        return ServerNeeds()

    needs = mark.args[0]
    assert isinstance(needs, ServerNeeds)
    return needs


class SharedServers:
    """The engines and servers that a file's tests share; each starts when a test needs it.

    One thread steps an engine. So each shared server has an engine of its own, and `engine`
    returns another, for tests that start servers one after the other.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._opened = ExitStack()
        self._engines: list[tuple[dict[str, Any], fminfer.Engine]] = []
        self._servers: list[tuple[ServerNeeds, Running]] = []
        self._clients: dict[str, Any] = {}

    def engine(self, options: dict[str, Any]) -> fminfer.Engine:
        """Return the engine with these options that no shared server steps."""
        for known, engine in self._engines:
            if known == options:
                return engine

        engine = self._start_engine(options)
        self._engines.append((options, engine))
        return engine

    def server(self, needs: ServerNeeds, options: dict[str, Any]) -> Running:
        """Return the shared server with these needs, whose engine has these options."""
        for known, server in self._servers:
            if known == needs:
                return server

        engine = self._start_engine(options)
        state = self._folders.mktemp("shared") / "state" if needs.has_state else None
        server = self._opened.enter_context(
            running(engine, state=state, **needs.settings)
        )
        self._servers.append((needs, server))
        return server

    def client(self, server: Running) -> Any:
        """Return OpenAI's client of a server that needs no key."""
        if server.url in self._clients:
            return self._clients[server.url]

        import openai  # 3 s: most files do without

        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        )
        self._clients[server.url] = self._opened.enter_context(client)
        return client

    def close(self) -> None:
        self._opened.close()

    def _start_engine(self, options: dict[str, Any]) -> fminfer.Engine:
        return self._opened.enter_context(fminfer.Engine(**options))
