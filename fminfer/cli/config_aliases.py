"""Keys of other tools' configuration files, and the flags of ours that they mean.

EnergonAI's services have them in a Python file: model_class = opt_125M, tp_init_size = 2, …
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import click

from fminfer.cli.options.old_options import KERNELS_OF_OLD
from fminfer.cli.options.old_serve_options import tell_of_tensor_parallel
from fminfer.core.errors import UsageError
from fminfer.models.known_sizes import SIZES, size_fields

HUB_CONFIGS = {"hf_gpt2": "openai-community/gpt2"}  # model classes that are models of the hub
Meaning = Callable[[object, str], tuple[str, object] | None]  # of (value, what it is called)


class Entry(NamedTuple):
    """A value that is given under some key."""

    name: str  # what messages call it
    key: str  # of ours
    value: object


def translate(
    table: Mapping[str, object], name_of: Callable[[str], str]
) -> tuple[list[Entry], list[str]]:
    """Return what each entry means in keys of ours, and what to tell of them.

    Args:
        table: keys with underscores.
        name_of: what messages call a key.

    Raises:
        UsageError: a value that cannot be, or a part that is not there yet.
    """
    entries, notices = [], []
    for key, value in table.items():
        name = name_of(key)
        if key not in ALIASES:
            entries.append(Entry(name, key, value))
        elif (meant := ALIASES[key](value, name)) is not None:
            entries.append(Entry(name, *meant))
    sizes = {key: count_of(table[key], name_of(key)) for key in PARALLEL if key in table}
    if sizes:
        product = sizes.get(PARALLEL[0], 1) * sizes.get(PARALLEL[1], 1)
        entries.append(Entry(" × ".join(map(name_of, sizes)), "world_size", product))
    if sizes.get(PARALLEL[0], 1) > 1:
        notices.append(tell_of_tensor_parallel(PARALLEL[0], sizes[PARALLEL[0]]))
    return entries, notices


def as_bool(value: object, name: str) -> bool:
    """Return a value that must be true or false.

    Raises:
        UsageError: it is something else.
    """
    try:
        return bool(click.BOOL.convert(str(value), None, None))
    except click.BadParameter:
        raise UsageError(f"{name} is {value!r}; give true or false") from None


def count_of(value: object, name: str, least: int = 1) -> int:
    """Return a value that must be a whole number.

    Raises:
        UsageError: it is none, or too small.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number from {least}")
    return value


def _rename(ours: str) -> Meaning:
    return lambda value, name: (ours, value)


def _by_bool(ours: str, if_true: object, if_false: object = None) -> Meaning:
    def meaning(value: object, name: str) -> tuple[str, object] | None:
        meant = if_true if as_bool(value, name) else if_false
        return None if meant is None else (ours, meant)

    return meaning


def _kernels(value: object, name: str) -> tuple[str, object]:
    if value not in KERNELS_OF_OLD:
        raise UsageError(f"{name} is {value!r}; give kernels: auto, off or require")
    return "kernels", KERNELS_OF_OLD[str(value)]


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


PARALLEL = ("tp_init_size", "pp_init_size")  # whose product is the number of ranks
OLD_FLAGS = ("fp16", "attention")  # of ours, which other flags say today
ALIASES: Mapping[str, Meaning] = {
    "fp16": _by_bool("dtype", "float16"),
    "attention": _kernels,
    "model_class": _config_of_class,
    "checkpoint": _rename("model_name"),
    "tokenizer_path": _rename("tokenizer"),
    **dict.fromkeys(PARALLEL, lambda value, name: None),  # `translate` takes both together
    "half": _by_bool("dtype", "float16", "float32"),
    "server_host": _rename("host"),
    "server_port": _rename("port"),
    "executor_max_batch_size": _rename("max_rows"),
    "executor_max_queue_size": _rename("queue_size"),
    "allow_cors": _by_bool("allow_origin", ["*"]),
    "timeout_keep_alive": _rename("keep_alive"),
}
