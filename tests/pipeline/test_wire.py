"""What crosses a process comes out as it went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fminfer.compute.values.step import (
    MASK,
    SCORE,
    STEP_COLUMNS,
    Results,
    Step,
    TokenLogprobs,
    pack_masks,
    unpack_masks,
)
from fminfer.core.messages import StageSpan, invert_mask, make_mask, pack_token_ids
from fminfer.pipeline.wire import (
    decode_result,
    decode_spans,
    decode_step,
    encode_result,
    encode_spans,
    encode_step,
)
from tests.steps import Row, check_equal, make_draws, make_logprobs, make_step

NAN = float("nan")
INF = float("inf")


def full_step() -> Step:
    """Return a step that has something in each column."""
    draws = make_draws(
        [1, 2], temperature=[0.0, 0.7], top_p=[1.0, 0.9], top_k=[0, 2**40]
    )
    draws["min_p"] = [0.0, 0.05]
    draws["noise"] = [0, -(2**63)]
    draws["mask"] = [1, 0]
    draws["num_edits"] = [3, 1]
    draws["num_banned"] = [2, 0]
    draws["num_top"] = [3, 0]
    few = make_mask(pack_token_ids([3, 40], 8))
    most = make_mask(bytes(range(120, 136)))
    assert few.few is not None and most.few is None
    step = make_step(
        [Row([4, 5], 0, [1, 2]), Row([9], 2**40, [3])],
        block_copies=np.array([[1, 4], [2, 2**40]]),
        draws=draws,
        edit_ids=np.array([7, 8, 2**40, 9]),
        edit_bias=np.array([0.1, NAN, INF, -INF], np.float32),
        edit_factor=np.array([1.2, 1 / 3, 1e-45, 1], np.float32),
        edit_minus=np.array([0.3, -0.0, 0, 3e38], np.float32),
        banned_ids=np.array([5, 2**40]),
        scores=np.array([(0, 5, 2, -1), (1, 2**40, 0, 3)], SCORE),
        token_types=np.array([0, 1, -1], np.int8),
        cross_slots=np.array([5, 2**30], np.int32),
        cross_lengths=np.array([3, 2**40]),
        encoder_output_lengths=np.array([0, 2]),
        encoder_output=np.array([0, 255, 7], np.uint8),
        **pack_masks([few, most, few]),
    )
    step.step_id = 12
    return step


def test_a_step() -> None:
    step = full_step()
    for name, like in STEP_COLUMNS.items():
        column = getattr(step, name)
        assert len(column) and (column.dtype, column.ndim) == (like.dtype, like.ndim), (
            name
        )
    found = decode_step(encode_step(step))
    check_equal(found, step)
    assert unpack_masks(found) == unpack_masks(step)
    check_equal(decode_step(encode_step(Step(13))), Step(13))
    check_equal(
        decode_step(encode_step(make_step([Row([1], 0, [0])]))),
        make_step([Row([1], 0, [0])]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_columns_of_any_bits_and_lengths(seed: int) -> None:
    """Each column is aligned and may be written to, wherever it lay among the bytes."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for name, like in STEP_COLUMNS.items():
        shape = (int(rng.choice([0, 1, 2, 3, 5, 90])), *like.shape[1:])
        size = int(np.prod(shape)) * like.itemsize
        columns[name] = np.frombuffer(rng.bytes(size), like.dtype).reshape(shape)
    step = Step(2**62 + seed, **columns)
    found = decode_step(encode_step(step))
    check_equal(found, step)
    for name in columns:
        flags = getattr(found, name).flags
        assert flags.aligned and flags.writeable and flags.c_contiguous, name


@pytest.mark.parametrize(
    ("form", "bits", "max_bytes"),
    [
        ("ids", pack_token_ids([3, 40_000, 49_151 - 64], 6144), 3 * 4),
        ("ids", pack_token_ids(range(0, 49_000, 200), 6144), 245 * 4),
        ("bits", invert_mask(pack_token_ids([0, 40_000, 49_150], 6144)), 6144),
        ("bits", pack_token_ids(range(0, 49_000, 9), 6144), 6144),
        ("bits", b"\xff" * 6144, 6144),
        ("ids", pack_token_ids(range(60), 8), 60 * 4),
        ("ids", pack_token_ids([63], 16), 4),
        ("bits", pack_token_ids([63], 8), 8),  # and all behind
    ],
)
def test_a_mask_goes_as_its_few_ids_or_as_bits(
    form: str, bits: bytes, max_bytes: int
) -> None:
    """All went as words: 2 KB for three tokens that may be drawn."""
    mask = make_mask(bits)
    step = Step(1, draws=make_draws([0], mask=[0]), **pack_masks([mask]))
    data = encode_step(step)
    check_equal(decode_step(data), step)
    assert unpack_masks(decode_step(data)) == [mask]
    assert (len(step.mask_ids) > 0, len(step.mask_bits) > 0) == (
        form == "ids",
        form == "bits",
    )
    nothing = Step(1, draws=make_draws([0]))
    assert len(data) - len(encode_step(nothing)) <= max_bytes + MASK.itemsize


def test_masks_of_both_forms_beside_each_other() -> None:
    of_few = [
        make_mask(pack_token_ids(ids, size))
        for ids, size in (([3], 8), ([5, 900], 120))
    ]
    of_bits = [
        make_mask(invert_mask(pack_token_ids(ids, size)))
        for ids, size in (([1], 8), ([2, 99], 16))
    ]
    masks = [of_bits[0], of_few[0], of_few[1], of_bits[1], of_few[0]]
    assert unpack_masks(decode_step(encode_step(Step(1, **pack_masks(masks))))) == masks


def test_a_result_with_numbers_that_are_none() -> None:
    sampled = make_logprobs(
        [3, 2**40], [-0.1, NAN], [[3, 1], [0, 2]], [[-0.1, -INF], [NAN, -1 / 3]]
    )
    scored = make_logprobs([8], [-INF])
    spans = [
        StageSpan(1.5, 2.25, 10),
        StageSpan(1e9 + 0.125, 1e9 + 0.5, 2**40, 64),
        StageSpan(3.0, 4.0, earlier_s=0.1),
    ]
    vectors = np.arange(24, dtype=np.uint8).reshape(3, 8)
    results: Results = {"tokens": sampled, "prompt scores": scored, "vectors": vectors}
    result = decode_result(encode_result(5, results), decode_spans(encode_spans(spans)))
    assert (result.step_id, result.spans) == (5, spans)
    check_equal(result.results, results)
    assert decode_spans(encode_spans([])) == []


@pytest.mark.parametrize("kind", ["tokens", "prompt scores"])
@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("count", [0, 3])
def test_a_result_of_one_kind(kind: Any, num_top: int, count: int) -> None:
    some = make_logprobs(
        range(count), [-1.0] * count, [[4] * num_top] * count, [[-2] * num_top] * count
    )
    results: Results = {kind: some} if count else {}
    result = decode_result(encode_result(1, results), [])
    check_equal(result.results, results)
    (other,) = {"tokens", "prompt scores"} - {kind}
    check_equal(result.logprobs_of(other), TokenLogprobs.empty())
    check_equal(result.logprobs_of(kind), some if count else TokenLogprobs.empty())


def test_a_result_of_vectors_alone() -> None:
    """Half-precision hidden states are bytes, too."""
    vectors = np.arange(6, dtype=np.float16).reshape(3, 2).view(np.uint8)
    result = decode_result(encode_result(1, {"vectors": vectors}), [])
    assert np.array_equal(result.vectors, vectors) and not len(
        result.logprobs_of("tokens")
    )
    assert result.vectors.dtype == np.uint8
