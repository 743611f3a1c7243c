"""The small parts that need neither torch nor a model: blocks, stops, clocks, noise, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fminfer.compute.values.step import unpack_masks
from fminfer.contract.request import RequestParams
from fminfer.core.errors import UsageError
from fminfer.core.messages import Mask, invert_mask, make_mask, pack_token_ids
from fminfer.core.quantities import describe_seconds
from fminfer.core.timing import RowClock
from fminfer.engine.blocks import BlockPool
from fminfer.engine.logit_edits import Bans
from fminfer.engine.noise import (
    digest_meaning,
    make_draw_key,
    make_noise_key,
    make_step_noise,
)
from fminfer.engine.packing import PackedRow, Slots, pack_rows
from fminfer.engine.results import find_stop
from fminfer.engine.sequence import PreparedRequest, PromptState, RequestState, Sequence
from fminfer.files.input_folders import find_inputs
from fminfer.files.line_reader import read_lines
from fminfer.text.encoded_prompt import EncodedPrompt


def test_blocks_are_shared_and_come_back() -> None:
    pool = BlockPool(4, block_size=8)
    assert (
        pool.num_blocks_for(0) == 0
        and pool.num_blocks_for(8) == 1
        and pool.num_blocks_for(9) == 2
    )
    first = pool.allocate(2)
    pool.share(first[:1])
    pool.release(first)
    assert pool.num_free == 3, (
        "a shared block is free only when its last holder lets go"
    )
    with pytest.raises(AssertionError, match="has a holder"):
        pool.check_books()
    pool.release(first[:1])
    pool.check_books()
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(first[:1])


@pytest.mark.parametrize(
    "text, stops, num_new, expected",
    [
        ("one two", ("two",), 3, (4, "two")),
        ("one two", ("e t",), 3, (2, "e t")),  # begins before the new characters
        # the earliest wins, not the first listed
        ("one two", ("three", "two", "o"), 7, (0, "o")),
        ("one two", ("one",), 3, None),  # was searched before, when it was new
        ("one two", ("a long one", "one"), 3, None),
        # of two at one place the first listed
        ("one two", ("tw", "two"), 3, (4, "tw")),
        ("one two", (), 3, None),
    ],
)
def test_find_stop(
    text: str, stops: tuple[str, ...], num_new: int, expected: tuple[int, str] | None
) -> None:
    assert find_stop(text, stops, num_new) == expected


def test_find_stop_behind_a_place() -> None:
    assert find_stop("one one", ("one",), 7, 1) == (4, "one")
    assert find_stop("one one", ("e one", "n"), 7, 2) == (2, "e one")
    assert find_stop("one", ("one",), 3, 1) is None


@pytest.mark.parametrize(
    "allowed, never, bits, few",
    [
        ((3, 63, 64, 149), (), pack_token_ids([3, 63, 64, 149], 24), (3, 63, 64, 149)),
        # its last bit is of no token's behind
        ((3, 63), (), pack_token_ids([3, 63], 16), (3, 63)),
        ((3, 9, 64), (9,), pack_token_ids([3, 64], 16), (3, 64)),
        ((), (7, 63), invert_mask(pack_token_ids([7, 63], 16)), None),
        (tuple(range(300)), (), pack_token_ids(range(300), 40), None),
        (tuple(range(256)), (), pack_token_ids(range(256), 40), tuple(range(256))),
    ],
)
def test_bans_are_a_mask(
    allowed: tuple[int, ...],
    never: tuple[int, ...],
    bits: bytes,
    few: tuple[int, ...] | None,
) -> None:
    """A banned first token of a longer word is none of it."""
    words = [*((token_id,) for token_id in never), (8, 9)]
    bans = Bans(RequestParams(allowed_token_ids=allowed), frozenset([5]), words)
    assert bans.mask == Mask(bits, few) == make_mask(bits)


@pytest.mark.parametrize(
    ("bits", "few"),
    [
        ([3, 7], (7,)),
        ([3], ()),  # a stop token that is not allowed was drawn here
        ([3, 5], (5,)),
        ([2], (2,)),
        ([2, 5], (2, 5)),
    ],
)
def test_where_nothing_else_is_left_an_answer_may_end(
    bits: list[int], few: tuple[int, ...]
) -> None:
    """Its constraint left 3, which stops it and is not among the allowed, or the held 2
    and EOS."""
    params = RequestParams(
        allowed_token_ids=(2, 7), stop_token_ids=(2, 3), min_tokens=4
    )
    bans = Bans(params, frozenset([5]), [], frozenset([2, 3]))
    assert (
        bans.narrow_mask(
            make_mask(pack_token_ids(bits, 8)), bans.find_banned(1, [7])
        ).few
        == few
    )


def test_rows_that_may_draw_the_same_share_a_mask() -> None:
    params = RequestParams(temperature=0, max_tokens=1)
    slots = Slots()

    def row(*never: int) -> PackedRow:
        bans = Bans(params, frozenset(), [(token_id,) for token_id in never])
        owner = RequestState(0, PreparedRequest(params, []), added_s=0.0)
        prompt = PromptState(owner, 0, EncodedPrompt([7], "", []), bans=bans)
        sequence = Sequence(prompt, noise_key=b"", detokenizer=None)
        slots.allocate(sequence)
        return PackedRow(sequence, [7], 0, [sequence])

    step = pack_rows(0, [row(3), row(), row(4, 5), row(3), row(5, 4)], [], slots).step
    assert step.draws["mask"].tolist() == [0, -1, 1, 0, 1]
    assert unpack_masks(step) == [
        make_mask(invert_mask(pack_token_ids(ids, 8))) for ids in ([3], [4, 5])
    ]
    none = pack_rows(0, [row(), row()], [], slots).step
    assert (unpack_masks(none), none.draws["mask"].tolist()) == ([], [-1, -1])


def test_row_times_add_up_to_the_wall_time() -> None:
    """HELM adds batch_time / batch_size over rows; that must be the time that passed."""
    clock = RowClock()
    first = clock.start(0.0)
    second = clock.start(1.0)
    clock.stop(first, 4.0)
    third = clock.start(5.0)
    clock.stop(second, 6.0)
    clock.stop(third, 10.0)
    rows = [first, second, third]
    assert sum(row.batch_time_s / row.batch_size for row in rows) == pytest.approx(10.0)
    assert first.batch_time_s == 4.0 and 1 < first.batch_size < 2


def key_of(
    seed: int = 1,
    repeat: int = 0,
    ids: list[list[int]] | None = None,
    place: tuple[int, int] = (0, 0),
    meaning: bytes = b"",
    **fields: Any,
) -> bytes:
    """Return the key of a sequence's draws."""
    key = make_draw_key(ids or [[5, 6]], RequestParams(**fields), seed, repeat, meaning)
    return make_noise_key(key, *place)


def test_noise_belongs_to_the_request() -> None:
    others = [
        key_of(seed=2),
        key_of(seed=-(2**63)),
        key_of(seed=2**63 - 1),
        key_of(repeat=1),
        key_of(ids=[[5, 7]]),
        key_of(ids=[[5], [6]]),
        key_of(ids=[[5, 6], [7]]),
        key_of(place=(1, 0)),
        key_of(place=(0, 1)),
        key_of(meaning=b"x"),
        key_of(temperature=0.5),
        key_of(logit_bias=((5, 1.0),)),
        key_of(allowed_token_ids=(5,)),
        key_of(bad_words=("x",)),
    ]
    draws = [make_step_noise(each, 3) for each in (key_of(), *others)] + [
        make_step_noise(key_of(), 4)
    ]
    assert len(set(draws)) == len(draws)


def test_what_only_shows_or_ends_an_answer_changes_no_draw() -> None:
    """`logprobs` or another `n` gave a seeded request other texts."""
    for fields in (
        {"n": 3, "best_of": 3},
        {"max_tokens": 99},
        {"logprobs": 5, "echo": True},
        {"stop": ("x",), "stop_token_ids": (7,)},
        {"frequency_penalty": -0.0},
        {"truncate_prompt_tokens": 2, "truncation_side": "right"},
    ):
        assert key_of(**fields) == key_of()
    biases = ((5, 1.0), (6, 2.0))
    assert key_of(logit_bias=biases) == key_of(logit_bias=biases[::-1])


def test_draws_are_those_of_earlier_versions() -> None:
    """A new field of requests would change all of them, were its default part of the key."""
    some = RequestParams(temperature=0.7, top_p=0.9, logit_bias=((5, 1.0),))
    others = RequestParams(
        min_tokens=3, stop=("x",), presence_penalty=0.5, max_tokens=99, top_k=7
    )
    for params, draws, meaning in (
        (
            RequestParams(),
            "b594cfb8cee0ef73e7e3d8319d40b0a1",
            "5389065fb5d50960fbbec4d6643adb57",
        ),
        (some, "aec8a36bc5bf320b9aef8c08bfc15c29", "2d414c0c1cad9cf797225cf4c60aa523"),
        (
            others,
            "48f2ebe2654cac85d315936f16f8b523",
            "c3f3ea87f5355367300aaa9b218cd888",
        ),
    ):
        assert make_draw_key([[5, 6]], params, 7, 0, b"").hex() == draws
        assert digest_meaning(["x"], params).hex() == meaning


def test_requests_of_one_meaning() -> None:
    same = digest_meaning(["x"], RequestParams(seed=1))
    assert digest_meaning(["x"], RequestParams(seed=2, presence_penalty=-0.0)) == same
    assert digest_meaning(["x"], RequestParams(max_tokens=17)) != same
    assert digest_meaning([[120]], RequestParams()) != same and len(same) == 16


def test_the_noise_of_steps_is_uniform_over_64_bits() -> None:
    key = key_of()
    tenths = [0] * 10
    for step in range(20_000):
        tenths[int((make_step_noise(key, step) + 2**63) * 10 >> 64)] += 1
    chi_square = sum((count - 2000) ** 2 / 2000 for count in tenths)
    assert chi_square < 27.9, "p < 0.001 with 9 degrees of freedom"


def test_lines_are_numbered_with_blank_ones_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\n  \n[]")
    assert [(line.number, line.raw.strip()) for line in read_lines(path, 0)] == [
        (1, b"{}"),
        (4, b"[]"),
    ]


def test_find_inputs_says_what_is_wrong(tmp_path: Path) -> None:
    written = ("output_a.jsonl", "x.errors.jsonl", "x.status.json")
    for name in ("b.jsonl", "a.jsonl", "c.txt", *written):
        (tmp_path / name).touch()
    assert [p.name for p in find_inputs([tmp_path])] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "empty").mkdir()
    for path, hint in [
        ("no.jsonl", "does not exist"),
        ("c.txt", "jsonl"),
        ("empty", "holds no"),
    ]:
        with pytest.raises(UsageError, match=hint):
            find_inputs([tmp_path / path])
    with pytest.raises(UsageError, match="twice"):
        find_inputs([tmp_path, tmp_path / "a.jsonl"])


def test_two_answers_in_one_place_are_refused(tmp_path: Path) -> None:
    """The errors of `a` and the answers of `a.errors` would share a name; inputs were
    deleted."""
    from fminfer.files.output_paths import require_output_paths

    first = tmp_path / "a.jsonl"
    second = tmp_path / "a.errors.jsonl"
    with pytest.raises(UsageError, match="also belongs"):
        require_output_paths([first, second], None)
    with pytest.raises(UsageError, match="is the input"):
        require_output_paths([second], first)
    assert require_output_paths([first], None) == [tmp_path / "output_a.jsonl"]
    (tmp_path / "plain").touch()
    assert require_output_paths([first], tmp_path / "plain") == [tmp_path / "plain"]


def test_seconds_are_written_for_people() -> None:
    assert describe_seconds(3725) == "1:02:05" and describe_seconds(59.7) == "1:00"
