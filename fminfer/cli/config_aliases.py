"""Keys of other tools' configuration files and start lines, and the flags of ours that they mean.

EnergonAI's services have them in a Python file: model_class = opt_125M, tp_init_size = 2, …
Or they start with --name M --tp 8 --http_host H --http_port 7070 --dtype fp16 --max_batchsize 4
--random_init True --random_model_size 7b1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from fminfer.cli.options.flags import GroupedOption
from fminfer.cli.options.option_table import options_for
from fminfer.core.errors import UsageError
from fminfer.models.known_sizes import SIZES, size_fields

HUB_CONFIGS = {"hf_gpt2": "openai-community/gpt2"}  # model classes that are models of the hub
Meaning = Callable[[object, str], tuple[str, object] | None]  # of (value, what it is called)


class Entry(NamedTuple):
    """A value that is given under some key."""

    name: str  # what messages call it
    key: str  # of ours
    value: object


def translate(table: Mapping[str, object], name_of: Callable[[str], str]) -> list[Entry]:
    """Return what each entry means in keys of ours.

    Args:
        table: keys with underscores.
        name_of: what messages call a key.

    Raises:
        UsageError: a value that cannot be.
    """
    entries = []
    for key, value in table.items():
        name = name_of(key)
        if key not in ALIASES:
            entries.append(Entry(name, key, value))
        elif (meant := ALIASES[key](value, name)) is not None:
            entries.append(Entry(name, *meant))
    return entries


def key_of(name: str) -> str:
    """Return the one spelling of a flag or key: without --, with underscores."""
    return name.removeprefix("--").replace("-", "_")


def as_bool(value: object, name: str) -> bool:
    """Return a value that must be true or false.

    Raises:
        UsageError: it is something else.
    """
    try:
        return bool(click.BOOL.convert(str(value), None, None))
    except click.BadParameter:
        raise UsageError(f"{name} is {value!r}; give true or false") from None


def _meaning_of(ours: str, values: Mapping[str, Any]) -> Meaning:
    """Return the meaning of an old key of one of our flags.

    Args:
        values: what its values mean; {}: the same.
    """

    def meaning(value: object, name: str) -> tuple[str, object] | None:
        if "true" in values:
            value = str(as_bool(value, name)).lower()
        elif values and value not in values:
            allowed = [str(each) for each in values.values()]
            said = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise UsageError(f"{name} is {value!r}; give {ours}: {said}")
        meant = values.get(str(value)) if values else value
        return None if meant is None else (ours, meant)

    return meaning


def _config_of_class(value: object, name: str) -> tuple[str, object]:
    """Return the config of opt_125M, opt_6B7 or hf_gpt2."""
    size = re.sub(r"(\d+)b(\d+)$", r"\1.\2b", str(value).lower().replace("_", "-"))
    found = HUB_CONFIGS.get(str(value), size)
    if found == size and size_fields(size) is None:
        known = ", ".join(sorted(SIZES))
        raise UsageError(
            f"{name} is {value!r}, whose shape is not known. Leave it out if the checkpoint has a "
            f"config.json; otherwise give model-config: a config.json, or one of {known}"
        )
    return "model_config", found


_KEYS = [option for command in ("run", "serve") for option in options_for(command)]
OLD_FLAGS = {key_of(old) for option in _KEYS for old in option.old_flags}
ALIASES: Mapping[str, Meaning] = {
    "model_class": _config_of_class,
    **{
        key_of(old): _meaning_of(key_of(option.all_flags[0]), values)
        for option in _KEYS
        for old, values in option.old.items()
        if values or not old.startswith("--")
    },
}


DEFAULT_SIZE = "560m"  # of a random model
_option = partial(GroupedOption, group="Old command lines", hidden=True)

OLD_SERVE_OPTIONS = [
    _option(["--config_file", "config"], expose_value=False, help="The same as --config."),
    _option(["--name", "old_name"], help="The same as --model-name, or as --tokenizer."),
    _option(["--random_init", "old_random_init"], type=bool, help="True: --random-init."),
    _option(["--random_model_size", "old_random_model_size"], help="Of --random_init True."),
]


def translate_old_flags(ctx: click.Context) -> list[str]:
    """Set today's parameters to what MODEL and the old flags mean; return notices to the user.

    Raises:
        click.UsageError: an old and a new flag that contradict each other.
    """
    names = ("model_argument", "old_name", "old_random_init", "old_random_model_size")
    model, name, is_random, size = (ctx.params.pop(each) for each in names)
    if model is not None:
        _set(ctx, "model", model, "")
    if is_random:
        _set(ctx, "random_init", size or DEFAULT_SIZE, "--random_model_size ")
        _set(ctx, "tokenizer", name or ctx.params["tokenizer"], "--name ")
        _set(ctx, "model", None, "--random_init True")
    elif name is not None:
        _set(ctx, "model", name, "--name ")
        _set(ctx, "random_init", None, "--name")
    if size is not None and not is_random:
        return ["--random_model_size means nothing without --random_init True"]
    return []


def _set(ctx: click.Context, target: str, value: Any, old: str) -> None:
    """Set a parameter, whatever a file or a variable says; None: to nothing.

    Args:
        old: the old flag, as errors show it before the value.
    """
    typed, source = ctx.params[target], ctx.get_parameter_source(target)
    if source is ParameterSource.COMMANDLINE and typed != value:
        flag = next(param for param in ctx.command.params if param.name == target).opts[0]
        ours, its = (old, flag) if value is None else (f"{old}{value}", f"{flag} {typed}")
        raise click.UsageError(f"{ours} and {its} contradict each other; give {flag} alone", ctx)
    ctx.params[target] = value
    if value is not None:
        ctx.set_parameter_source(target, ParameterSource.COMMANDLINE)
