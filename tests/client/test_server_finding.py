"""Which model servers serve, and what they are."""

from __future__ import annotations

import threading

import pytest

from fminfer.client.remote_options import RemoteOptions
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_finding import find_servers
from fminfer.core.errors import ServerError, UsageError
from tests.client.stand_in import StandIn


def find(
    urls: str, model_name: str | None = None, patience_s: float = 60.0
) -> tuple[list[ServerFacts], list[str]]:
    notes: list[str] = []
    options = RemoteOptions(engine=urls, engine_patience_s=patience_s)
    return find_servers(options, model_name, "", notes.append), notes


def test_a_server_says_what_it_is() -> None:
    with StandIn("--model", "m", "--version", "2.5") as server:
        (facts,), notes = find(f"{server.url}/")
        again, _ = find(server.url)
    assert facts == again[0]
    assert (facts.url, facts.model, facts.dialect) == (server.url, "m", "vllm")
    assert facts.version == "2.5" and "created" not in facts.entry
    assert facts.entry["owned_by"] == "vllm" and not notes


@pytest.mark.parametrize(
    "owner, dialect",
    [
        ("sglang", "sglang"),
        ("llamacpp", "llama-server"),
        ("library", "ollama"),
        ("fminfer", "fminfer"),
        ("system", "openai"),
    ],
)
def test_the_dialect_follows_the_owner(owner: str, dialect: str) -> None:
    with StandIn("--owned-by", owner) as server:
        assert find(server.url)[0][0].dialect == dialect


def test_one_of_several_models_is_named() -> None:
    with StandIn("--model", "one,two") as server:
        assert find(server.url, "two")[0][0].model == "two"
        with pytest.raises(UsageError, match=r"one, two.*--model-name"):
            find(server.url)
        with pytest.raises(UsageError, match="no model 'three', but one, two"):
            find(server.url, "three")


@pytest.mark.parametrize(
    "arguments, name",
    [(["--version", "2"], "version"), (["--model", "b"], "model")],
)
def test_servers_must_be_alike(arguments: list[str], name: str) -> None:
    with StandIn() as first, StandIn(*arguments) as second:
        urls = f"{first.url},{second.url}"
        with pytest.raises(UsageError, match=f"the {name} of {first.url}"):
            find(urls)


def test_a_key_is_needed() -> None:
    key_words = "FMINFER_ENGINE_KEY"
    with StandIn("--key", "k") as server, pytest.raises(UsageError, match=key_words):
        find(server.url)


def test_some_may_be_away() -> None:
    with StandIn() as first, StandIn() as second:
        second.kill()
        servers, notes = find(f"{first.url},{second.url}")
    assert [each.url for each in servers] == [first.url]
    assert len(notes) == 1 and second.url in notes[0]


def test_one_is_waited_for() -> None:
    with StandIn() as server:
        server.kill()
        timer = threading.Timer(0.5, server.start)
        timer.start()
        servers, notes = find(server.url)
        timer.join()
    assert len(servers) == 1 and "waiting for a server" in notes[0]


def test_waiting_ends() -> None:
    with StandIn() as server:
        server.kill()
        with pytest.raises(ServerError, match=server.url):
            find(server.url, patience_s=0.0)
