"""The options of `FminferLM`, checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.worker.engine_options import refuse_old_names


def check_length(asked: int | None, context_length: int) -> int:
    """Return the tokens of context to use: those that are asked for, or the model's."""
    if asked is None:
        return context_length
    if not 1 < asked <= context_length:
        raise UsageError(
            f"max_length is {asked}; it must be from 2 to the model's context, {context_length}"
        )
    return asked


def check_options(options: dict[str, Any], own: list[str]) -> None:
    """Refuse what is no option.

    Args:
        options: meant for the engine.
        own: names of the other options.
    """
    refuse_old_names(options)
    known = {field.name for field in fields(EngineConfig)} - {"model", "device"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise UsageError(
            f"model_args holds {', '.join(unknown)}, which fminfer does not know; it knows "
            f"{', '.join([*own, *sorted(known)])}"
        )
