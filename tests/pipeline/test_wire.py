"""What crosses a process comes out as it went in."""

from __future__ import annotations

from array import array

import pytest

from fminfer.core.messages import (
    EditColumns,
    SamplingRows,
    ScoringRows,
    StageSpan,
    Step,
    StepRow,
    TokenLogprobs,
)
from fminfer.pipeline.step_bytes import (
    decode_result,
    decode_spans,
    decode_step,
    encode_result,
    encode_spans,
    encode_step,
)

NAN, INF = float("nan"), float("inf")


def test_a_step() -> None:
    edits = EditColumns(array("q", [7]), array("f", [0.1]), array("f", [1.2]), array("f", [0.3]))
    sampling = SamplingRows(
        [1, 2], [0.0, 0.7], [1.0, 0.9], [0, 40], [0.0, 0.05], [0, -(2**63)], edits, [0, 1],
        [5, 6], [2, 0], 3, [b"\xff" * 8, bytes(range(120, 136))], [1, 0],
    )  # fmt: skip
    rows = [StepRow([4, 5], 0, [1, 2]), StepRow([9], 31, [3])]
    step = Step(12, rows, [(1, 4)], sampling, ScoringRows([0], [5], 2))
    assert decode_step(encode_step(step)) == step
    empty = Step(13, [StepRow([1], 0, [0])], [], SamplingRows(), ScoringRows())
    assert decode_step(encode_step(empty)) == empty


def test_a_result_with_numbers_that_json_has_not() -> None:
    sampled = TokenLogprobs([3, 4], [-0.1, NAN], [[3, 1], [0, 2]], [[-0.1, -INF], [NAN, -1 / 3]])
    scored = TokenLogprobs([8], [-INF], [[]], [[]])
    spans = [StageSpan(1.5, 2.25, 10), StageSpan(1e9 + 0.125, 1e9 + 0.5, 2**40, 64)]
    result = decode_result(encode_result(5, sampled, scored), decode_spans(encode_spans(spans)))
    assert (result.step_id, result.spans) == (5, spans)
    assert repr(result.sampled) == repr(sampled), "nan is not equal to itself"
    assert repr(result.scored) == repr(scored)


@pytest.mark.parametrize("count", [0, 3])
def test_a_result_of_one_kind_of_rows(count: int) -> None:
    nothing = TokenLogprobs([], [], [], [])
    some = TokenLogprobs([1] * count, [-1.0] * count, [[]] * count, [[]] * count)
    result = decode_result(encode_result(1, some, nothing), [])
    assert (result.sampled, result.scored) == (some, nothing)
