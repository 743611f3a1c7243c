"""Flags of servers elsewhere: what is refused, and that a key is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fminfer.client.engine_key import read_engine_key
from fminfer.client.remote_options import (
    KEY_VARIABLE,
    RemoteOptions,
    check_no_model_flags,
)
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError

URL = "http://127.0.0.1:8000/v1"
KEY = "sk-very-secret"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://a/v1",
        "",
        f"{URL},",
        f"{URL}?key={KEY}",
        f"http://me:{KEY}@a/v1",
    ],
)
def test_urls_that_are_none_or_hold_secrets_are_refused_without_showing_them(
    url: str,
) -> None:
    with pytest.raises(UsageError) as error:
        RemoteOptions(engine=url)
    assert KEY not in str(error.value)


def test_several_servers_lose_their_last_slash() -> None:
    options = RemoteOptions(engine=f"{URL}/, http://b:1")
    assert options.urls == [URL, "http://b:1/v1"]


@pytest.mark.parametrize(
    "option",
    [{"dtype": "bfloat16"}, {"seed": 3}, {"world_size": 2}, {"embeddings": "npy"}],
)
def test_options_of_a_model_are_refused_by_their_flag(
    option: dict[str, object],
) -> None:
    config = EngineConfig(**option)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^--.* is of a model that is loaded here"):
        check_no_model_flags(config)
    check_no_model_flags(EngineConfig("some-model", strict=True))


def test_a_key_comes_from_the_variable_or_from_the_file(tmp_path: Path) -> None:
    options = RemoteOptions(engine=URL)
    assert read_engine_key(options, {}) == ""
    assert read_engine_key(options, {KEY_VARIABLE: f" {KEY}\n"}) == KEY
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    options = RemoteOptions(engine=URL, engine_key_file=file)
    assert read_engine_key(options, {KEY_VARIABLE: "another"}) == KEY


@pytest.mark.parametrize("text", ["", f"{KEY} {KEY}", f"{KEY}ä", f"{KEY}\x00x"])
def test_what_is_no_key_is_refused_without_showing_it(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_engine_key(RemoteOptions(engine=URL, engine_key_file=file), {})
    assert KEY not in str(error.value) and str(file) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    options = RemoteOptions(engine=URL, engine_key_file=tmp_path / "none")
    with pytest.raises(UsageError, match="none cannot be read: FileNotFoundError"):
        read_engine_key(options, {})
