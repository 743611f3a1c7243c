"""Keys of configuration files and variables: flags of `fminfer run` and `serve`, old keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import click

from fminfer.cli import flags
from fminfer.cli.flags import NUMBERS
from fminfer.cli.option_table import options_for
from fminfer.core.errors import UsageError
from fminfer.core.option import Command
from fminfer.models.known_sizes import SIZES, find_size_fields

TABLES: tuple[Command, ...] = ("run", "serve")  # of a file
# One of these takes the place of the other, where it is told nearer to the command line.
RIVALS = {
    "model": "random_init",
    "model_argument": "random_init",
    "random_init": "model",
}
# model classes that are models of the hub
HUB_CONFIGS = {"hf_gpt2": "openai-community/gpt2"}


class Entry(NamedTuple):
    """A value that is given under some key."""

    name: str  # what messages call it
    key: str  # of ours
    value: object


def translate_keys(
    table: Mapping[str, object], name_of: Callable[[str], str]
) -> list[Entry]:
    """Return what each entry means in keys of ours; keys have underscores.

    Args:
        name_of: what messages call a key.
    """
    entries = []
    for key, value in table.items():
        name = name_of(key)
        our_key, values = ALIASES.get(key, (key, {}))
        our_value = (
            _translate_model_class(value, name)
            if key == "model_class"
            else _translate_value(value, name, our_key, values)
        )
        if our_value is not None:
            entries.append(Entry(name, our_key, our_value))
    return entries


def key_of(name: str) -> str:
    """Return the one spelling of a flag or key: without --, with underscores."""
    return name.removeprefix("--").replace("-", "_")


def parse_bool(value: object, name: str) -> bool:
    """Return a value that must be true or false."""
    try:
        return bool(click.BOOL.convert(str(value), None, None))
    except click.BadParameter:
        raise UsageError(f"{name} is {value!r}; give true or false") from None


def _translate_value(
    value: object, name: str, our_key: str, values: Mapping[str, Any]
) -> object:
    """Return what a value of an old key means today; None: nothing.

    Args:
        values: as in `Option.old`.
    """
    if not values:
        return value
    if "true" in values:
        value = str(parse_bool(value, name)).lower()
    elif value not in values:
        allowed = [str(each) for each in values.values()]
        choices = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise UsageError(f"{name} is {value!r}; give {our_key}: {choices}")
    return values.get(str(value))


def _translate_model_class(value: object, name: str) -> str:
    """Return the config of opt_125M, opt_6B7 or hf_gpt2."""
    size = re.sub(r"(\d+)b(\d+)$", r"\1.\2b", str(value).lower().replace("_", "-"))
    config = HUB_CONFIGS.get(str(value), size)
    if config == size and find_size_fields(size) is None:
        known = ", ".join(sorted(SIZES))
        raise UsageError(
            f"{name} is {value!r}, whose shape is not known. Leave it out if the "
            "checkpoint has a config.json; otherwise give model-config: a config.json, "
            f"or one of {known}"
        )
    return config


_KEYS = [option for command in ("run", "serve") for option in options_for(command)]
OLD_FLAGS = {key_of(old) for option in _KEYS for old in option.old_flags}
# to our key, and what values mean
ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "model_class": ("model_config", {}),
    **{
        key_of(old): (key_of(option.all_flags[0]), values)
        for option in _KEYS
        for old, values in option.old.items()
        if values or not old.startswith("--")
    },
}


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
def flags_by_key(command: Command) -> dict[str, Flag]:
    """Return the flags of a command by their keys: the long names, with underscores."""
    keyed_flags = {}
    for option in flags.make_flags(command):
        if (
            not isinstance(option, click.Option)
            or option.hidden
            or not option.expose_value
        ):
            continue
        names = [(name, False) for name in option.opts]
        names += [(name, True) for name in option.secondary_opts]
        for name, is_negative in names:
            if name.startswith("--"):
                keyed_flags[key_of(name)] = Flag(option, is_negative)
    return keyed_flags


def list_flag_keys() -> set[str]:
    """Return the keys that are flags of some command."""
    return {key for command in TABLES for key in flags_by_key(command)} | {*OLD_FLAGS}


def list_file_keys() -> set[str]:
    """Return the keys that a file may have."""
    return list_flag_keys() | ALIASES.keys()


def make_setting(
    flag: Flag, value: object, origin: str, *, is_variable: bool = False
) -> Setting:
    """Return what a value says of a flag; a variable's text may hold several values."""
    option = flag.option
    if isinstance(value, list):
        if not option.multiple and option.type is not NUMBERS:
            raise UsageError(f"{origin} is a list; give one value")
        texts = [_format_scalar(each, origin) for each in value]
        return Setting(texts if option.multiple else ",".join(texts), origin)
    if option.is_flag:
        return Setting(parse_bool(value, origin) is not flag.is_negative, origin)
    text = _format_scalar(value, origin)
    if option.multiple:
        words = option.type.split_envvar_value(text) if is_variable else [text]
        if not words:  # such as a comma alone, which must not open a server to all
            raise UsageError(
                f"{origin} is set, and holds no value; unset it, or give one"
            )
        return Setting([*words], origin)
    return Setting(text, origin)


def _format_scalar(value: object, origin: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(
        f"{origin} is of type {type(value).__name__}; give text, a number, true or false"
    )
