"""The table of options: a row becomes a flag, a key, a variable, and a line of the docs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import click
import pytest
from click.testing import CliRunner

from fminfer.cli import config_keys, option_table
from fminfer.cli.app import main
from fminfer.cli.config_file import ConfiguredCommand
from fminfer.cli.flags import SHOWS_ALL, GroupedOption, make_flags
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import UsageError
from fminfer.core.option import (
    GROUPS,
    Bytes,
    Command,
    Count,
    Options,
    Seconds,
    WholeTexts,
    option,
    options_of,
    pop_options,
)

ROOT = Path(__file__).parent.parent.parent
ALL = [
    each
    for table in option_table.TABLES
    for each in options_of(table, is_own=True).values()
]


@dataclass(frozen=True)
class MadeUp(Options):
    """Options of every kind, as somebody may add them."""

    depth: Count | None = option("How deep.", group="Model", commands=("run",))
    is_deep: bool = option("Whether it is deep.", group="Model", commands=("run",))
    deep_words: tuple[str, ...] = option("Words.", group="Model", commands=("run",))
    deep_kind: Literal["a", "b"] = option(
        "Kind.", default="a", group="Model", commands=("run",)
    )
    lapse_s: Seconds = option("Time.", default=75.0, group="Model", commands=("run",))
    deep_bytes: Bytes = option("Size.", default=2**24, group="Model", commands=("run",))
    deepest: tuple[int, ...] = option(
        "Numbers.", group="Model", commands=("run",), flags=("--deep-id",)
    )


def made_up(*words: str) -> MadeUp:
    """Return what `fminfer run` would be told, had it these options."""
    command = ConfiguredCommand("run", settings_of="run", params=make_flags("run"))
    return pop_options(MadeUp, command.make_context("run", [*words]).params)


@pytest.fixture
def with_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the made-up dataclass to the table."""
    monkeypatch.setattr(option_table, "TABLES", (*option_table.TABLES, MadeUp))
    config_keys.flags_by_key.cache_clear()
    yield
    config_keys.flags_by_key.cache_clear()


@pytest.mark.parametrize("command", get_args(Command))
def test_every_option_reaches_its_commands(command: Command) -> None:
    shown = {
        param.name: param
        for param in main.commands[command].params
        if isinstance(param, GroupedOption)
    }
    meant = {each.name: each for each in ALL if command in each.commands}
    assert meant, "the command takes its options from the table"
    assert meant.keys() <= shown.keys()
    others = {
        name for name in shown.keys() - meant.keys() if name and name[:4] != "old_"
    }
    assert others <= {"config", "help_all"}
    for name, each in meant.items():
        assert each.told in shown[name].opts and shown[name].group in GROUPS


@pytest.mark.parametrize("command", get_args(Command))
def test_no_option_goes_without_its_value(command: str) -> None:
    """Old flags did: `serve --http_port` ended with a traceback, `--attention` meant nothing."""
    given = {"run": ["a.jsonl"], "submit": ["--scheduler", "lsf", "--infer-data", "a"]}
    for param in main.commands[command].params:
        if isinstance(param, click.Option) and not (param.is_flag or param.count):
            words = [*given.get(command, []), param.opts[0]]
            found = CliRunner().invoke(main, [command, *words])
            assert found.exit_code == 2 and "requires an argument" in found.stderr, (
                words
            )


def test_old_flags_are_named_in_errors() -> None:
    for flag in ("--http_port", "--max_batchsize"):
        found = CliRunner().invoke(main, ["serve", flag, "x"])
        assert found.exit_code == 2 and f"'{flag}'" in found.stderr
    found = CliRunner().invoke(main, ["check", "a.jsonl", "--data-group-size", "0"])
    assert "--data-group-size is 0" in found.stderr
    with pytest.raises(UsageError, match="max_batchsize is called max_rows now"):
        make_config(None, max_batchsize=3)


def test_an_option_is_declared_once() -> None:
    for command in get_args(Command):
        flags = [f for each in ALL if command in each.commands for f in each.all_flags]
        assert sorted(flags) == sorted(set(flags)), command
    names = [each.name for each in ALL if each.name in options_of(EngineConfig)]
    assert sorted(names) == sorted(options_of(EngineConfig)), (
        "each part is in the table"
    )


def test_every_option_has_a_help() -> None:
    for each in ALL:
        assert len(each.help) > 10 and each.help.endswith((".", "]", "…")), each.name


def test_the_docs_have_the_table_of_flags() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "scripts" / "option_tables.py", "--check"]
    )
    assert found.returncode == 0


def test_a_row_becomes_flags(with_more: None) -> None:
    assert made_up() == MadeUp()
    assert MadeUp().is_deep is False and MadeUp().deepest == () == MadeUp().deep_words
    words = "--depth 3 --deep --deep-words x --deep-words y --deep-kind b --deep-id 1,2"
    found = made_up(*words.split(), "--deep-size", "1G", "--lapse", "1m")
    assert found == MadeUp(
        depth=3,
        is_deep=True,
        deep_words=("x", "y"),
        deep_kind="b",
        lapse_s=60.0,
        deep_bytes=2**30,
        deepest=(1, 2),
    )
    with pytest.raises(UsageError, match="depth is 0; it must be at least 1"):
        made_up("--depth", "0")
    with pytest.raises(click.UsageError, match="'c' is not one of 'a', 'b'"):
        made_up("--deep-kind", "c")


def test_a_row_has_its_default_in_the_help(with_more: None) -> None:
    command = ConfiguredCommand("run", settings_of="run", params=make_flags("run"))
    context = click.Context(command)
    context.meta[SHOWS_ALL] = True
    text = " ".join(command.get_help(context).split())
    assert "--depth INTEGER How deep. --deep Whether" in text
    assert "[a|b] Kind. [default: a]" in text
    assert (
        "H:MM:SS Time. [default: 75 s]" in text and "SIZE Size. [default: 16M]" in text
    )


def test_a_row_becomes_a_key_and_a_variable(
    with_more: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fminfer.toml"
    file.write_text('depth = 3\ndeep = true\ndeep-words = ["x"]\ndeep_id = [1, 2]\n')
    found = made_up("--config", str(file))
    assert found == MadeUp(depth=3, is_deep=True, deep_words=("x",), deepest=(1, 2))
    monkeypatch.setenv("FMINFER_DEPTH", "4")
    monkeypatch.setenv("FMINFER_DEEP_WORDS", "y,z")
    found = made_up("--config", str(file))
    assert found.depth == 4 and found.deep_words == ("y", "z")


def test_wrong_values_are_refused_without_the_command_line() -> None:
    wrong: Any = {"deep_kind": "c"}
    with pytest.raises(UsageError, match="deep_kind is 'c'; it must be one of a, b"):
        MadeUp(**wrong)
    with pytest.raises(TypeError):
        option("A fact that there is not.", colour="red")


def test_an_option_without_a_default_is_off_or_refused() -> None:
    """Another name of a tuple's type had the default None, which nobody could iterate over."""

    @dataclass(frozen=True)
    class Some(Options):
        texts: WholeTexts = option("Texts.")
        is_on: bool = option("A switch.")
        size: Bytes | None = option("A size.")

    assert Some() == Some(texts=(), is_on=False, size=None)
    with pytest.raises(AssertionError, match="number needs a default"):

        class Wrong(Options):
            number: int = option("A number.")
