"""The options of `FminferLM`, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from typing import Any

from tqdm import tqdm

from fminfer.core.config import EngineConfig
from fminfer.core.errors import FminferError, UsageError
from fminfer.worker.engine_api import Engine
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


def answer_all(
    engine: Engine, bodies: list[dict[str, Any]], name: Callable[[int], str], *, is_quiet: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run requests together; yield (place in the list, first choice) as they finish.

    Args:
        name: what an error calls the request at a place.
        is_quiet: show no progress.

    Raises:
        FminferError: a request was refused.
    """
    with closing(engine.run(bodies)) as records:
        for record in tqdm(records, total=len(bodies), disable=is_quiet, unit="request"):
            place = record.line.number - 1
            if record.error is not None:
                raise FminferError(
                    f"request {place + 1} of {len(bodies)}, {name(place)}: "
                    f"{record.error.message} ({record.error.code})"
                )
            assert record.result is not None
            yield place, record.result["choices"][0]


def score(logprobs: dict[str, Any], num_scored: int) -> tuple[float, bool]:
    """Return the sum over the last tokens, and whether each was the best one.

    `top_logprobs` has the best first, so ties count as `argmax` would have them.
    """
    tokens, values, tops = (
        logprobs[name][-num_scored:] for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    best = [next(iter(top.items())) for top in tops]
    return sum(values), best == list(zip(tokens, values, strict=True))


def shown(texts: tuple[str, ...] | None) -> str:
    """Return a request's texts, short enough for a message."""
    if texts is None:
        return "a window of a text"
    return " → ".join(repr(text if len(text) <= 60 else "…" + text[-59:]) for text in texts)
