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
    invert,
    make_mask,
    pack_ids,
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
        [5, 6], [2, 0], 3, [make_mask(b"\xff" * 8), make_mask(bytes(range(120, 136)))], [1, 0],
    )  # fmt: skip
    rows = [StepRow([4, 5], 0, [1, 2]), StepRow([9], 31, [3])]
    step = Step(12, rows, [(1, 4)], sampling, ScoringRows([0], [5], 2))
    assert decode_step(encode_step(step)) == step
    empty = Step(13, [StepRow([1], 0, [0])], [], SamplingRows(), ScoringRows())
    assert decode_step(encode_step(empty)) == empty


@pytest.mark.parametrize(
    ("form", "bits", "max_bytes"),
    [
        (b"allowed", pack_ids([3, 40_000, 49_151 - 64], 6144), 60),
        (b"allowed", pack_ids(range(0, 49_000, 200), 6144), 1500),
        (b"banned", invert(pack_ids([0, 40_000, 49_150], 6144)), 60),
        (b"words", pack_ids(range(0, 49_000, 9), 6144), 16_000),
        (b"words", b"\xff" * 6144, 3100),
        (b"words", pack_ids(range(60), 8), 60),  # few, but a word is shorter
        (b"allowed", pack_ids([63], 16), 30),
        (b"words", pack_ids([63], 8), 60),  # and all behind
    ],
)
def test_a_mask_goes_in_its_shortest_form(form: bytes, bits: bytes, max_bytes: int) -> None:
    """All went as words: 2 KB for three tokens that may be drawn."""
    mask = make_mask(bits)
    step = Step(1, [], [], SamplingRows(masks=[mask], mask_of=[0]), ScoringRows())
    data = encode_step(step)
    assert decode_step(data) == step
    nothing = Step(1, [], [], SamplingRows(mask_of=[0]), ScoringRows())
    assert b'"' + form + b'"' in data
    assert len(data) - len(encode_step(nothing)) <= max_bytes


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
