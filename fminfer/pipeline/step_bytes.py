"""A Step and a StepResult as bytes: a head of int64 numbers, then the bytes of their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import get_args

import numpy as np
import orjson

from fminfer.compute.step import (
    NO_VECTORS,
    STEP_COLUMNS,
    ResultKind,
    Results,
    Step,
    StepResult,
    TokenLogprobs,
)
from fminfer.core.messages import StageSpan

KINDS: tuple[ResultKind, ...] = get_args(ResultKind)


def encode_step(step: Step) -> bytes:
    """Return a step's bytes: its id, the length of each column, and the columns."""
    columns = [getattr(step, name) for name in STEP_COLUMNS]
    return _join([step.step_id, *map(len, columns)], columns)


def decode_step(data: bytes) -> Step:
    """Return the step of `encode_step`."""
    step_id, *lengths = np.frombuffer(data, np.int64, 1 + len(STEP_COLUMNS)).tolist()
    likes = STEP_COLUMNS.values()
    shapes = ((length, *like.shape[1:]) for length, like in zip(lengths, likes, strict=True))
    columns = _read(data, 8 * (1 + len(lengths)), zip(likes, shapes, strict=True))
    return Step(step_id, **dict(zip(STEP_COLUMNS, columns, strict=True)))


def encode_result(step_id: int, results: Results) -> bytes:
    """Return a result's bytes without spans: its id, shapes of `top_ids` and vectors, columns."""
    head, columns = [step_id], []
    for kind in KINDS:
        found = results.get(kind) or TokenLogprobs.empty()
        head += found.top_ids.shape
        columns += [getattr(found, each.name) for each in fields(found)]
    vectors = results.get("vectors", NO_VECTORS)
    return _join([*head, *vectors.shape], [*columns, vectors])


def decode_result(data: bytes, spans: list[StageSpan]) -> StepResult:
    """Return the result of `encode_result`."""
    size = 3 + 2 * len(KINDS)
    step_id, *shape = np.frombuffer(data, np.int64, size).tolist()
    *sizes, of_vectors = zip(shape[::2], shape[1::2], strict=True)
    likes = [TokenLogprobs.empty(*each) for each in sizes]
    of_all = [getattr(like, each.name) for like in likes for each in fields(like)]
    likes_of_all = [*((like, like.shape) for like in of_all), (NO_VECTORS, of_vectors)]
    columns = _read(data, 8 * size, likes_of_all)
    found = {kind: TokenLogprobs(*(next(columns) for _ in fields(TokenLogprobs))) for kind in KINDS}
    results: Results = {}
    for kind, each in found.items():
        if len(each):
            results[kind] = each
    if of_vectors[0]:
        results["vectors"] = next(columns)
    return StepResult(step_id, results, spans)


def encode_spans(spans: list[StageSpan]) -> bytes:
    """Return spans as lines of JSON, to which others may be appended."""
    return b"".join(orjson.dumps(span, option=orjson.OPT_APPEND_NEWLINE) for span in spans)


def decode_spans(data: bytes) -> list[StageSpan]:
    """Return the spans of `encode_spans`."""
    return [StageSpan(**orjson.loads(line)) for line in data.splitlines()]


def _join(head: list[int], columns: Iterable[np.ndarray]) -> bytes:
    return b"".join([np.array(head, np.int64).tobytes(), *(each.tobytes() for each in columns)])


def _read(
    data: bytes, start: int, likes: Iterable[tuple[np.ndarray, tuple[int, ...]]]
) -> Iterator[np.ndarray]:
    """Yield columns, given the dtype (of an array) and shape of each; copies are aligned."""
    for like, shape in likes:
        count = int(np.prod(shape))
        found = np.frombuffer(data, like.dtype, count, start)
        yield found.reshape(shape).copy()
        start += count * like.itemsize
