"""The flags of `fminfer run` and `serve` as keys of a configuration file, or as variables."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import click

from fminfer.cli.config_aliases import ALIASES, OLD_FLAGS, as_bool, key_of
from fminfer.cli.foreign_names import FLAGS
from fminfer.cli.options import flags
from fminfer.cli.options.value_types import NUMBERS
from fminfer.core.errors import UsageError
from fminfer.core.option import Command

TABLES: tuple[Command, ...] = ("run", "serve")  # of a file
# One of these takes the place of the other, where it is told nearer to the command line.
RIVALS = {"model": "random_init", "model_argument": "random_init", "random_init": "model"}


@dataclass(slots=True, frozen=True)
class Flag:
    """A flag as a key."""

    option: click.Option
    is_negative: bool = False  # as --no-prefix-cache


@dataclass(slots=True, frozen=True)
class Setting:
    """What a file or a variable says of a parameter."""

    value: str | bool | list[str]  # what click converts
    origin: str  # where it stands, for messages


@cache
def flags_of(command: Command) -> dict[str, Flag]:
    """Return the flags of a command by their keys: the long names, with underscores."""
    found = {}
    for option in flags.flags_of(command):
        if not isinstance(option, click.Option) or option.hidden or not option.expose_value:
            continue
        named = [(name, False) for name in option.opts]
        for name, is_negative in [*named, *((name, True) for name in option.secondary_opts)]:
            if name.startswith("--"):
                found[key_of(name)] = Flag(option, is_negative)
    return found


def known_flags() -> set[str]:
    """Return the keys that are flags of some command."""
    return {key for command in TABLES for key in flags_of(command)} | {*OLD_FLAGS}


def known_keys() -> set[str]:
    """Return the keys that a file may have."""
    return known_flags() | ALIASES.keys()


def nearest(key: str, spell: Callable[[str], str]) -> str:
    """Return what to do for a flag of another tool, or ask for the likeliest, or nothing."""
    if text := FLAGS.get(key.replace("_", "-")):
        return f". {text}"
    found = difflib.get_close_matches(key, sorted(known_flags()), 1)
    return f"; did you mean {spell(found[0])}?" if found else ""


def setting_of(flag: Flag, value: object, origin: str, *, is_variable: bool = False) -> Setting:
    """Return what a value says of a flag.

    Args:
        is_variable: it is a text, which may hold several values.

    Raises:
        UsageError: a value of a kind that no flag takes.
    """
    option = flag.option
    if isinstance(value, list):
        if not option.multiple and option.type is not NUMBERS:
            raise UsageError(f"{origin} is a list; give one value")
        texts = [_text(each, origin) for each in value]
        return Setting(texts if option.multiple else ",".join(texts), origin)
    if option.is_flag:
        return Setting(as_bool(value, origin) is not flag.is_negative, origin)
    text = _text(value, origin)
    if option.multiple:
        words = option.type.split_envvar_value(text) if is_variable else [text]
        if not words:  # such as a comma alone, which must not open a server to all
            raise UsageError(f"{origin} is set, and holds no value; unset it, or give one")
        return Setting([*words], origin)
    return Setting(text, origin)


def _text(value: object, origin: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(
        f"{origin} is of type {type(value).__name__}; give text, a number, true or false"
    )
