"""How a Step and a StepResult look as bytes.

A step is JSON; a result is columns of 64-bit numbers, because its logprobs may be nan or infinite.
"""

from __future__ import annotations

from array import array
from dataclasses import astuple, replace

import numpy as np
import orjson

from fminfer.core.messages import (
    EditColumns,
    Mask,
    SamplingRows,
    ScoringRows,
    StageSpan,
    Step,
    StepResult,
    StepRow,
    TokenLogprobs,
    invert,
    make_mask,
    pack_ids,
)


def encode_step(step: Step) -> bytes:
    """Return a step as JSON."""
    masks = [_encode_mask(mask) for mask in step.sampling.masks]
    rest = replace(step, sampling=replace(step.sampling, masks=[]))
    return orjson.dumps((rest, masks), default=_plain)


def decode_step(data: bytes) -> Step:
    """Return the step of `encode_step`."""
    fields, masks = orjson.loads(data)
    sampling = fields["sampling"]
    edits = sampling.pop("edits")
    sampling["masks"] = [_decode_mask(*mask) for mask in masks]
    columns = EditColumns(
        array("q", edits["token_id"]),
        array("f", edits["bias"]),
        array("f", edits["factor"]),
        array("f", edits["minus"]),
    )
    return Step(
        fields["step_id"],
        [StepRow(**row) for row in fields["rows"]],
        [(source, target) for source, target in fields["block_copies"]],
        SamplingRows(edits=columns, **sampling),
        ScoringRows(**fields["scoring"]),
    )


def _encode_mask(mask: Mask) -> orjson.Fragment:
    """Return the shortest of: the allowed ids, the banned ones, and words of bits."""
    size = len(mask.bits)
    forms = [orjson.dumps(("words", size, array("q", mask.bits).tolist()))]
    if mask.few is not None:
        forms.append(orjson.dumps(("allowed", size, mask.few)))
    if banned := make_mask(invert(mask.bits)).few:
        forms.append(orjson.dumps(("banned", size, banned)))
    return orjson.Fragment(min((len(form), form) for form in forms)[1])


def _decode_mask(form: str, size: int, numbers: list[int]) -> Mask:
    if form == "words":
        return make_mask(array("q", numbers).tobytes())
    bits = pack_ids(numbers, size)
    return Mask(bits, tuple(numbers)) if form == "allowed" else make_mask(invert(bits))


def encode_result(step_id: int, sampled: TokenLogprobs, scored: TokenLogprobs) -> bytes:
    """Return a result, less its spans, as columns."""
    shape = [step_id, *_shape(sampled), *_shape(scored)]
    return b"".join(
        (np.array(shape, np.int64).tobytes(), *_columns(sampled), *_columns(scored)),
    )


def decode_result(data: bytes, spans: list[StageSpan]) -> StepResult:
    """Return the result of `encode_result`."""
    step_id, *shape = np.frombuffer(data, np.int64, 5).tolist()
    sampled, end = _read_columns(data, 5 * 8, shape[0], shape[1])
    scored, _ = _read_columns(data, end, shape[2], shape[3])
    return StepResult(step_id, sampled, scored, spans)


def encode_spans(spans: list[StageSpan]) -> bytes:
    """Return spans as columns."""
    return np.array([astuple(span) for span in spans], np.float64).tobytes()


def decode_spans(data: bytes) -> list[StageSpan]:
    """Return the spans of `encode_spans`."""
    rows = np.frombuffer(data, np.float64).reshape(-1, 5).tolist()
    return [
        StageSpan(start_s, end_s, int(sent_bytes), int(max_tokens), earlier_s)
        for start_s, end_s, sent_bytes, max_tokens, earlier_s in rows
    ]


def _plain(value: object) -> list[int] | list[float]:
    assert isinstance(value, array), f"a step holds a {type(value).__name__}"
    return value.tolist()


def _shape(columns: TokenLogprobs) -> tuple[int, int]:
    return len(columns.ids), len(columns.top_ids[0]) if columns.top_ids else 0


def _columns(columns: TokenLogprobs) -> tuple[bytes, ...]:
    return (
        np.array(columns.ids, np.int64).tobytes(),
        np.array(columns.logprobs, np.float64).tobytes(),
        np.array(columns.top_ids, np.int64).tobytes(),
        np.array(columns.top_logprobs, np.float64).tobytes(),
    )


def _read_columns(data: bytes, start: int, count: int, width: int) -> tuple[TokenLogprobs, int]:
    parts = []
    for dtype, shape in (
        (np.int64, (count,)),
        (np.float64, (count,)),
        (np.int64, (count, width)),
        (np.float64, (count, width)),
    ):
        size = int(np.prod(shape))
        parts.append(np.frombuffer(data, dtype, size, start).reshape(shape).tolist())
        start += 8 * size
    return TokenLogprobs(*parts), start
