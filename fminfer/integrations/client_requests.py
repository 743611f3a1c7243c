"""Many requests of a client answered together, and what clients read from their logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from tqdm import tqdm

from fminfer.core.errors import FminferError
from fminfer.worker.engine_api import Engine


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
