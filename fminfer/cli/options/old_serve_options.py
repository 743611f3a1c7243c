"""The start line of EnergonAI's services, and what each of its flags means today.

--name M --tp 8 --http_host H --http_port 7070 --dtype fp16 --max_batchsize 4
--random_init True --random_model_size 7b1
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from fminfer.cli.options.flags import GroupedOption

DEFAULT_SIZE = "560m"  # of a random model
_option = partial(GroupedOption, group="Old command lines", hidden=True)

OLD_SERVE_OPTIONS = [
    _option(["--config_file", "config"], expose_value=False, help="The same as --config."),
    _option(["--name", "old_name"], help="The same as --model-name, or as --tokenizer."),
    _option(["--tp", "old_tp"], type=int, help="The same as --world-size."),
    _option(["--random_init", "old_random_init"], type=bool, help="True: --random-init."),
    _option(["--random_model_size", "old_random_model_size"], help="Of --random_init True."),
]


def translate_old_flags(ctx: click.Context) -> list[str]:
    """Set today's parameters to what MODEL and the old flags mean; return notices to the user.

    Raises:
        click.UsageError: an old and a new flag that contradict each other.
    """
    names = ("model_argument", "old_name", "old_tp", "old_random_init", "old_random_model_size")
    model, name, tp, is_random, size = (ctx.params.pop(each) for each in names)
    if model is not None:
        _set(ctx, "model", model, "")
    if tp is not None:
        _set(ctx, "world_size", tp, "--tp ")
    if is_random:
        _set(ctx, "random_init", size or DEFAULT_SIZE, "--random_model_size ")
        _set(ctx, "tokenizer", name or ctx.params["tokenizer"], "--name ")
        _set(ctx, "model", None, "--random_init True")
    elif name is not None:
        _set(ctx, "model", name, "--name ")
        _set(ctx, "random_init", None, "--name")
    notices = [tell_of_tensor_parallel("--tp", tp)] if (tp or 1) > 1 else []
    if size is not None and not is_random:
        notices.append("--random_model_size means nothing without --random_init True")
    return notices


def tell_of_tensor_parallel(name: str, count: int) -> str:
    """Say that layers are not cut into parts, and what is done instead."""
    return (
        f"{name} {count}: tensor parallelism is not there yet. The layers are spread over the "
        "ranks as a pipeline, as --world-size does"
    )


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
