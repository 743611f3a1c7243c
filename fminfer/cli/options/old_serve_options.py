"""The start line of EnergonAI's services, and what each of its flags means today.

--name M --tp 8 --http_host H --http_port 7070 --dtype fp16 --max_batchsize 4
--random_init True --random_model_size 7b1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from fminfer.cli.options.flags import OLD_PREFIX, GroupedOption

DEFAULT_SIZE = "560m"  # of a random model
_option = partial(click.option, cls=GroupedOption, group="Old command lines", hidden=True)

_OPTIONS = [
    _option("--config_file", "config", expose_value=False, help="The same as --config."),
    _option("--name", "old_name", help="The same as --model-name, or as --tokenizer."),
    _option("--tp", "old_tp", type=int, help="The same as --world-size."),
    _option("--random_init", "old_random_init", type=bool, help="True: --random-init."),
    _option("--random_model_size", "old_random_model_size", help="Of --random_init True."),
]


def old_serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the old flags that mean more than a name of today."""
    for each in _OPTIONS:
        command = each(command)
    return command


def flag_of(ctx: click.Context, name: str) -> str:
    """Return a parameter as it is typed."""
    option = next(param for param in ctx.command.params if param.name == name)
    return option.opts[0]


def translate_old_flags(ctx: click.Context) -> list[str]:
    """Put what the old flags mean into the parameters of today; return what to tell of it.

    Raises:
        click.UsageError: an old and a new flag that contradict each other.
    """
    old = {name: ctx.params.pop(name) for name in [*ctx.params] if name.startswith(OLD_PREFIX)}
    given = {name: value for name, value in old.items() if value is not None}
    if "old_tp" in given:
        _set(ctx, "world_size", given["old_tp"], "--tp")
    notices = _choose_model(ctx, given)
    if given.get("old_tp", 1) > 1:
        notices.append(tell_of_tensor_parallel("--tp", given["old_tp"]))
    return notices


def tell_of_tensor_parallel(name: str, count: int) -> str:
    """Say what becomes of the wish to cut each layer into so many parts."""
    return (
        f"{name} {count}: tensor parallelism is not there yet. The layers are spread over the "
        "ranks as a pipeline, as --world-size does"
    )


def _choose_model(ctx: click.Context, given: dict[str, Any]) -> list[str]:
    """Decide what --name names: a random model's tokenizer, or the model."""
    name, size = given.get("old_name"), given.get("old_random_model_size")
    if given.get("old_random_init"):
        _set(ctx, "random_init", size or DEFAULT_SIZE, "--random_model_size")
        if name is not None:
            _set(ctx, "tokenizer", name, "--name")
        _drop(ctx, "model", "--random_init True")
        return []
    if name is not None:
        _set(ctx, "model", name, "--name")
        _drop(ctx, "random_init", "--name")
    return [] if size is None else ["--random_model_size means nothing without --random_init True"]


def _is_typed(ctx: click.Context, target: str) -> bool:
    return ctx.get_parameter_source(target) is ParameterSource.COMMANDLINE


def _set(ctx: click.Context, target: str, value: Any, old_flag: str) -> None:
    if _is_typed(ctx, target) and ctx.params[target] != value:
        raise click.UsageError(
            f"{old_flag} {value} and {flag_of(ctx, target)} {ctx.params[target]} contradict each "
            f"other; give {flag_of(ctx, target)} alone",
            ctx,
        )
    ctx.params[target] = value
    ctx.set_parameter_source(target, ParameterSource.COMMANDLINE)


def _drop(ctx: click.Context, target: str, old_flag: str) -> None:
    """Leave out what a file or a variable says; the command line has chosen otherwise."""
    if _is_typed(ctx, target):
        flag = flag_of(ctx, target)
        raise click.UsageError(f"{old_flag} and {flag} contradict each other; give one", ctx)
    ctx.params[target] = None
