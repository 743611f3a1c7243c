"""Drawing and scoring rows of logits, against plain one-row references."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.sampling.draw_kernel import DrawKernel, ScoreKernel
from fminfer.compute.sampling.masks import LogitEditTensors, StepEdits
from fminfer.compute.sampling.sampler import (
    Drawer,
    SamplingTensors,
    compute_gumbel_noise,
    copy_to_host,
    draw_tokens,
    rank_logits,
    sample_tokens,
    score_tokens,
)
from fminfer.compute.values.step import Step, TokenLogprobs, pack_masks, unpack_masks
from fminfer.core.messages import invert_mask, make_mask, pack_token_ids
from fminfer.engine.noise import make_step_noise
from tests.conftest import built_library, span
from tests.steps import make_draws

VOCAB = 50
NEEDS_COMPILER = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C++ compiler"
)


@pytest.fixture(params=["plain", "compiled"])
def drawer(request: pytest.FixtureRequest) -> Drawer:
    if request.param == "plain":
        return draw_tokens
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return DrawKernel(built_library())


def how(rows: list[tuple[float, float, int, int]]) -> SamplingTensors:
    """Return rows' temperature, top_p, top_k, and the number of their noise."""
    temperature, top_p, top_k, number = zip(*rows, strict=True)
    noise = [make_step_noise(b"rows", each) for each in number]
    how = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "noise": noise}
    return SamplingTensors.from_draws(
        make_draws(range(len(rows)), **how), torch.device("cpu")
    )


def plain_probs(
    logits: torch.Tensor, temperature: float, top_p: float, top_k: int
) -> list[float]:
    """Filter one row by sorting it: the definition, slowly."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    kept = order[:top_k] if top_k else order
    mass_of_kept = sum(probs[i].item() for i in kept)
    chosen = []
    mass = 0.0
    for i in kept:
        if chosen and mass >= top_p:
            break
        chosen.append(i)
        mass += probs[i].item() / mass_of_kept
    total = sum(probs[i].item() for i in chosen)
    return [probs[i].item() / total if i in chosen else 0.0 for i in range(len(probs))]


def test_every_row_has_its_own_parameters_and_the_right_distribution(
    drawer: Drawer,
) -> None:
    """Chi-square over 4,000 draws a setting, all settings mixed in every batch."""
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 2
    settings = [
        (1.0, 1.0, 0),
        (0.7, 1.0, 5),
        (1.3, 0.8, 0),
        (1.0, 0.6, 20),
        (0.5, 0.95, 3),
    ]
    counts = torch.zeros(len(settings), VOCAB)
    for start in range(0, 20_000, 500):
        rows = [
            (*s, start + 5 * i + j) for i in range(100) for j, s in enumerate(settings)
        ]
        ids = sample_tokens(
            logits.expand(len(rows), -1),
            how(rows),
            0,
            tokens=span(logits, drawer=drawer),
        ).ids.view(100, -1)
        for j in range(len(settings)):
            counts[j] += torch.bincount(ids[:, j], minlength=VOCAB)
    for j, setting in enumerate(settings):
        expected = torch.tensor(plain_probs(logits, *setting)) * 4000
        assert counts[j][expected == 0].sum() == 0, (
            f"{setting} drew a token that is filtered out"
        )
        large = expected >= 5
        chi_square = ((counts[j] - expected)[large] ** 2 / expected[large]).sum().item()
        degrees = int(large.sum()) - 1
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 4, (
            setting,
            chi_square,
            degrees,
        )


def test_a_row_does_not_depend_on_its_neighbours(drawer: Drawer) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB)
    rows = [(0.1 * i, 1 - 0.1 * i, i, i) for i in range(8)]
    together = sample_tokens(logits, how(rows), 3, tokens=span(logits, drawer=drawer))
    for i, row in enumerate(rows):
        alone = sample_tokens(
            logits[i : i + 1], how([row]), 3, tokens=span(logits, drawer=drawer)
        )
        assert alone.ids[0] == together.ids[i]
        assert torch.equal(alone.top_ids[0], together.top_ids[i])


def test_greedy_by_temperature_top_p_or_top_k_and_ties_to_the_lowest_id(
    drawer: Drawer,
) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, [7, 30]] = 5.0
    rows = [(0.0, 1.0, 0, 9), (1.0, 0.0, 0, 9), (1.0, 1.0, 1, 9), (0.0, 1.0, 5, 2)]
    assert sample_tokens(
        logits, how(rows), 0, tokens=span(logits, drawer=drawer)
    ).ids.tolist() == [
        7,
        7,
        7,
        7,
    ]
    rows = [(1e-6, 1.0, 0, i) for i in range(100)]
    equals = sample_tokens(
        logits[:1].expand(100, -1), how(rows), 0, tokens=span(logits, drawer=drawer)
    )
    assert set(equals.ids.tolist()) == {7, 30}


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids(
    drawer: Drawer,
) -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, [3, 9, 21, 40]] = 1.0
    for top_p, top_k, expected in (
        (1.0, 2, {3, 9}),
        (0.7, 0, {3, 9, 21}),
        (0.3, 3, {3}),
    ):
        rows = how([(1.0, top_p, top_k, u) for u in range(100)])
        assert (
            set(drawer(logits.expand(100, -1), rows, torch.arange(100)).tolist())
            == expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_either_sign_are_equals(dtype: torch.dtype, drawer: Drawer) -> None:
    for zeros in ((-0.0, 0.0), (0.0, -0.0)):
        logits = torch.full((100, 32), -1.0, dtype=dtype)
        logits[:, [0, 16]] = torch.tensor(zeros, dtype=dtype)
        rows = how([(1.0, 1.0, 2, u) for u in range(100)])
        assert set(drawer(logits, rows, torch.arange(100)).tolist()) == {0, 16}


def test_top_p_over_a_flat_vocabulary_larger_than_the_candidates(
    drawer: Drawer,
) -> None:
    """With more tokens than are tried first, plain torch sorts the whole row."""
    logits = torch.zeros(201, 4000)
    logits[200, 7] = 30.0  # a row that needs no sorting
    rows = how([(1.0, 0.5, 0, u) for u in range(201)])
    *draws, peaked = drawer(logits, rows, torch.arange(201)).tolist()
    assert max(draws) < 2000 and max(draws) >= 1900
    assert peaked == 7


@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 2048, 2049, 32003])
def test_draws_lie_where_the_definition_in_float64_puts_them(
    vocab: int, drawer: Drawer
) -> None:
    """Of the tokens that are kept, the drawn one has the highest log-probability + noise."""
    generator = torch.Generator().manual_seed(vocab)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    count = 24
    normal = torch.randn((count, vocab), generator=generator)
    for logits in (
        normal * 4,
        (normal * 4).bfloat16(),
        normal.half(),
        normal.T.contiguous().T,  # rows that do not follow one another
        torch.where(random(count, vocab) < 0.9, float("-inf"), normal),
        normal * 200,  # where many weights are zero
    ):
        columns = {
            "temperature": 0.2 + 1.5 * random(count),
            "top_p": torch.where(random(count) < 0.5, 1.0, 0.05 + 0.94 * random(count)),
            "top_k": torch.where(
                random(count) < 0.5, 0, (random(count) * 60).long() + 2
            ),
            "min_p": torch.where(random(count) < 0.5, 0.0, random(count) * 0.2),
            "noise": torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        }
        settings = SamplingTensors.from_draws(
            make_draws(range(count), **columns), torch.device("cpu")
        )
        noise = compute_gumbel_noise(settings.noise, torch.arange(vocab))
        rows = torch.arange(count)[random(count) < 0.8]
        with torch.inference_mode():
            ids = drawer(logits, settings, rows).tolist()
        for row, drawn in zip(rows.tolist(), ids, strict=True):
            if logits[row].isfinite().any():
                probs = kept_probs(logits[row].double(), settings, row)
                assert probs[drawn] > 0
                scores = probs.log() + noise[row]
                assert scores[drawn] >= scores.max() - 1e-4


def kept_probs(logits: torch.Tensor, how: SamplingTensors, row: int) -> torch.Tensor:
    """Filter one row by sorting it: the definition in float64."""
    probs = torch.softmax(logits / how.temperature[row], -1)
    ordered, ids = probs.sort(descending=True, stable=True)
    if top_k := int(how.top_k[row]):
        ordered[top_k:] = 0
    ordered[ordered < how.min_p[row] * ordered[0]] = 0
    ordered /= ordered.sum()
    if how.top_p[row] < 1:
        ordered[1:][ordered.cumsum(-1)[:-1] >= how.top_p[row].double()] = 0
    return torch.zeros_like(ordered).scatter(0, ids, ordered / ordered.sum())


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["flat", "normal", "steep", "ascending", "hidden", "odd"]
)
def test_the_compiled_draw_is_the_plain_one(kind: str, dtype: torch.dtype) -> None:
    """The same tokens of equal logits, whatever vectors the processor has."""
    kernel = DrawKernel(built_library())
    generator = torch.Generator().manual_seed(2)
    count = 96
    for vocab in (1, 15, 64, 700, 5003):
        rows = how([(0.3 + i / 60, 1.0, 0, i) for i in range(count)])
        drawn = torch.rand((3, count), generator=generator)
        rows.top_p[drawn[0] < 0.4] = 0.9
        rows.top_k[drawn[1] < 0.4] = 40
        rows.min_p[drawn[2] < 0.4] = 0.07
        logits = torch.randn((count, vocab), generator=generator)
        if kind == "flat":
            logits = torch.where(logits < -1, float("-inf"), 3.0)
        elif kind == "steep":
            logits *= 30
        elif kind == "ascending":
            logits = logits.sort(-1)[0]
        elif kind == "hidden":
            logits[logits < 0.5] = float("-inf")
        elif kind == "odd":
            for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
                logits[i] = value
                logits[3 + i, vocab // 2 :] = value
                logits[6 + i, vocab // 2] = value
        every = torch.arange(count)
        logits = logits.to(dtype)
        assert torch.equal(
            kernel(logits, rows, every), draw_tokens(logits, rows, every)
        ), vocab


def test_a_draw_is_hard_to_tip(drawer: Drawer) -> None:
    """Rounding to bfloat16 changed 19 % of draws, where the distributions differed by 0.3 %.

    With the same noise, another token has a probability of 2 t / (1 + t) at most, where t is the
    total variation between the distributions before and after.
    """
    generator = torch.Generator().manual_seed(6)
    count = 2000
    rows = how([(1.0, 1.0, 0, i) for i in range(count)])
    every = torch.arange(count)
    before = torch.randn((40, 1000), generator=generator).repeat(count // 40, 1) * 2
    tokens = drawer(before, rows, every)
    rounded = before.bfloat16().float()
    nudged = [
        before
        + step
        * torch.randn(before[:40].shape, generator=generator).repeat(count // 40, 1)
        for step in (0.003, 0.03, 0.3)
    ]
    for after in (rounded, *nudged):
        changed = (drawer(after, rows, every) != tokens).double().mean().item()
        variation = (before.softmax(-1) - after.softmax(-1)).abs().sum(
            -1
        ).mean().item() / 2
        assert changed <= 2 * variation + 3 * (2 * variation / count) ** 0.5
    assert changed > 0, "the test looks at nothing"


def test_a_draw_without_memory_is_a_memory_error() -> None:
    """It ended the process: what a thread of the pool throws goes nowhere."""
    library = SimpleNamespace(fminfer_draw=lambda *given: 1)
    kernel = DrawKernel(cast(ctypes.CDLL, library))
    with pytest.raises(MemoryError, match="no memory"):
        kernel(torch.zeros(1, 9), how([(1.0, 1.0, 0, 5)]), torch.arange(1))


def test_the_compiled_draw_does_not_depend_on_threads_and_survives_any_logits() -> None:
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    kernel = DrawKernel(built_library())
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((40, 5003), generator=generator) * 3
    special = (float("nan"), float("inf"), float("-inf"))
    for i, value in enumerate(special):
        logits[i] = value
        logits[3 + i, ::2] = value
        logits[6 + i, 5:] = value
    rows = how([(1.0, 1 - i % 3 / 4, i % 4 * 9, i) for i in range(40)])
    every = torch.arange(40)
    num_threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            found.append(kernel(logits, rows, every))
        finally:
            torch.set_num_threads(num_threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert int(found[0].min()) >= 0 and int(found[0].max()) < 5003
    assert logits[5, found[0][5]].isfinite() and logits[8, found[0][8]].isfinite()


def test_logprobs_are_of_the_raw_logits_and_equal_in_both_places() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB) * 30
    expected = torch.log_softmax(logits.double(), -1)
    for num_top in (0, 1, 5, VOCAB, VOCAB + 9):
        draws = score_tokens(logits, logits.argmax(-1), num_top)
        assert torch.allclose(draws.logprobs.double(), expected.amax(-1), atol=1e-5)
        assert draws.top_ids.shape == (6, min(num_top, VOCAB))
        if num_top:
            assert torch.equal(draws.top_logprobs[:, 0], draws.logprobs)
            assert (draws.top_logprobs.diff(dim=-1) <= 0).all()


@NEEDS_COMPILER
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1024, 1025, 32000, 50257])
def test_the_compiled_ranking_is_the_plain_one(vocab: int) -> None:
    kernel = ScoreKernel(built_library())
    torch.manual_seed(1)
    for logits in (
        torch.randn(7, vocab) * 5,
        # rows that do not follow one another
        torch.randn(7, 2 * vocab)[:, :vocab] * 30,
        torch.randn(7, vocab).round(),  # of equals the lowest ids come first
        torch.randn(7, vocab).sort(-1)[0],
        torch.zeros(7, vocab),
        torch.full((2, vocab), -1e30),
        torch.where(torch.rand(7, vocab) < 0.9, float("-inf"), torch.randn(7, vocab)),
        (torch.randn(7, vocab) * 5).bfloat16(),  # many equals
        (torch.randn(7, 2 * vocab)[:, :vocab] * 30).bfloat16(),
        (torch.randn(7, vocab) * 5).half(),
    ):
        for num_top in {min(k, vocab) for k in (1, 2, 5, 20, 64, 70)}:
            found = kernel(logits, num_top)
            plain = rank_logits(logits, num_top)
            exact = logits.double().logsumexp(-1)
            torch.testing.assert_close(
                found.normalizer.double(), exact, rtol=1e-6, atol=1e-6
            )
            assert torch.equal(found.best, plain.best)
            assert torch.equal(logits.gather(-1, found.best_ids).float(), found.best)
            if num_top <= 64:
                ordered = logits.sort(dim=-1, descending=True, stable=True)[1]
                assert torch.equal(found.best_ids, ordered[:, :num_top])


@NEEDS_COMPILER
@pytest.mark.parametrize("place", [0, 3, 500, 998])
def test_the_compiled_ranking_of_a_nan(place: int) -> None:
    kernel = ScoreKernel(built_library())
    best = torch.zeros(1, 999)
    best[0, 500:503] = torch.tensor([7.0, float("nan"), 8.0])
    assert kernel(best, 2).best_ids.tolist() == [[502, 500]]
    logits = torch.randn(3, 999)
    logits[1, place] = float("nan")
    found = score_tokens(
        logits, logits.nan_to_num(-9.0).argmax(-1), 5, span(logits, kernel)
    )
    assert found.logprobs.isnan().tolist() == [False, True, False]
    assert found.top_logprobs.isnan().all(-1).tolist() == [False, True, False]
    logits[1, place - 1] = float("inf")
    assert kernel(logits, 2).normalizer.isnan().tolist() == [False, True, False]
    logits[1, place - 1] = float("-inf")
    assert kernel(logits, 2).normalizer.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=NEEDS_COMPILER)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_of_plus_infinity_makes_every_logprob_nan(
    is_compiled: bool, dtype: torch.dtype
) -> None:
    """Other tokens than the overflown one scored -inf, which was reported as -9999."""
    library = built_library() if is_compiled else None
    ranker = rank_logits if library is None else ScoreKernel(library)
    drawer = draw_tokens if library is None else DrawKernel(library)
    logits = torch.randn(4, VOCAB).to(dtype)
    logits[1, 5] = float("inf")
    logits[2, 5] = float("-inf")  # a token that cannot be
    scored = score_tokens(logits, torch.tensor([3, 3, 5, 3]), 2, span(logits, ranker))
    assert scored.logprobs.isnan().tolist() == [False, True, False, False]
    assert scored.logprobs[2] == float("-inf")
    assert scored.top_logprobs.isnan().all(-1).tolist() == [False, True, False, False]
    edits = LogitEditTensors(
        *(torch.tensor([], dtype=kind) for kind in (torch.int64, torch.int64)),
        *(torch.tensor([]) for _ in range(3)),
        torch.tensor([1]),
        torch.tensor([5]),
    )
    for temperature in (0.0, 1.0):
        for changes in (None, edits):  # the overflown logit may be banned from the draw
            rows = how([(temperature, 1.0, 0, 5)] * 4)
            draws = sample_tokens(
                logits, rows, 1, changes, span(logits, ranker, drawer)
            )
            assert draws.logprobs.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_drawn_from_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(4, VOCAB) * 3).to(dtype)
    wide = logits.float()
    rows = [(0.0, 1.0, 0, 5), (1.0, 0.9, 0, 3), (0.7, 1.0, 9, 8), (1.3, 0.5, 4, 1)]
    edits = LogitEditTensors(
        torch.tensor([0, 2]),
        torch.tensor([5, 6]),
        torch.tensor([0.001, 9.0]),
        torch.tensor([1.0, 1.1]),
        torch.tensor([0.0, 0.1]),
        torch.tensor([1]),
        torch.tensor([3]),
    )
    for changes in (None, edits):
        ours, expected = (
            sample_tokens(each, how(rows), 3, changes) for each in (logits, wide)
        )
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(logits.float(), wide)


def test_a_part_of_a_steps_edits_reads_nothing_from_the_device() -> None:
    """Each part waited for the GPU up to 14 times. A "meta" tensor fails on any read."""
    step = Step(
        0,
        draws=make_draws(
            range(4),
            num_edits=[1, 0, 3, 1],
            num_banned=[0, 2, 0, 1],
            mask=[0, 1, -1, 1],
        ),
        edit_ids=np.arange(10, 15),
        **{
            f"edit_{name}": np.ones(5, np.float32)
            for name in ("bias", "factor", "minus")
        },
        banned_ids=np.array([20, 21, 22]),
        **pack_masks(
            [
                make_mask(pack_token_ids([3, 7], 8)),
                make_mask(invert_mask(pack_token_ids([1], 8))),
            ]
        ),
    )
    for device in ("meta", "cpu"):
        part = StepEdits(step, VOCAB, torch.device(device)).make_tensors(slice(1, 3))
        assert part is not None and part.masks is not None
        assert [len(part.ids), len(part.bias), len(part.banned_ids)] == [3, 3, 2]
        assert len(part.masks.mask_of) == 2
        found = [
            getattr(own, each.name)
            for own in (part, part.masks)
            for each in fields(own)
        ]
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        assert len(tensors) == 11 and {each.device.type for each in tensors} == {device}
    assert (part.rows.tolist(), part.ids.tolist()) == ([1, 1, 1], [11, 12, 13])
    assert (part.banned_rows.tolist(), part.banned_ids.tolist()) == ([0, 0], [20, 21])
    assert part.masks.mask_of.tolist() == [1, -1]
    plain = Step(0, draws=make_draws(range(4)))
    assert (
        StepEdits(plain, VOCAB, torch.device("meta")).make_tensors(slice(1, 3)) is None
    )


def test_draws_travel_in_one_copy_as_they_are() -> None:
    """A GPU was waited for four times a step, once for each column."""
    ids = torch.tensor([3, 2**40 + 1])
    logprobs = torch.tensor([-0.1, float("nan")])
    for top in (0, 2):
        top_ids = torch.tensor([[9, 2**33], [0, 1]])[:, :top]
        best = torch.tensor([[-1e-30, float("-inf")], [-0.3, -7.7]])[:, :top]
        found = copy_to_host(TokenLogprobs(ids, logprobs, top_ids, best))
        assert (
            found.ids.tolist() == ids.tolist()
            and found.top_ids.tolist() == top_ids.tolist()
        )
        assert repr(found.logprobs.tolist()) == repr(logprobs.tolist())
        assert found.top_logprobs.tolist() == best.tolist()


@pytest.mark.parametrize(
    "temperature", [[0.0, 0.0, 0.0], [1.0, 0.5, 2.0], [1.0, 0.0, 0.7]], ids=str
)
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": [0, 5, 9], "min_p": [0.1, 0, 0]}], ids=str
)
def test_rows_without_top_p_read_nothing_from_the_device(
    temperature: list[float], filters: dict[str, list[float]]
) -> None:
    """The host knows which of them draw, and asked the GPU. A "meta" tensor fails on reads."""
    draws = make_draws(
        range(3), temperature=temperature, noise=[3, -(2**63), 7], **filters
    )
    how = SamplingTensors.from_draws(draws, torch.device("meta"))
    assert {each.device.type for each in (how.temperature, how.noise)} == {"meta"}
    found = sample_tokens(torch.empty(3, 50, device="meta"), how, 1)
    assert found.ids.shape == (3,) and found.ids.device.type == "meta"
    assert how.host.temperature.tolist() == draws["temperature"].tolist()


def masked(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """Put -inf by hand where a row's mask has no bit."""
    left = logits.float().clone()
    for place, mask in enumerate(unpack_masks(step)):
        # its sign stands for all behind
        number = int.from_bytes(mask.bits, "little", signed=True)
        banned = [
            token_id
            for token_id in range(logits.shape[-1])
            if not number >> token_id & 1
        ]
        own = torch.from_numpy(np.flatnonzero(step.draws["mask"] == place))
        left[own[:, None], torch.tensor(banned)] = float("-inf")
    return left


def edits_of(step: Step, vocab: int, part: slice | None = None) -> LogitEditTensors:
    part = part or slice(0, len(step.draws))
    edits = StepEdits(step, vocab, torch.device("cpu")).make_tensors(part)
    assert edits is not None
    return edits


def how_of(step: Step, part: slice = slice(None)) -> SamplingTensors:
    return SamplingTensors.from_draws(step.draws[part], torch.device("cpu"))


VARIED_VOCAB = 700


def varied(count: int, *, has_edits: bool = True) -> Step:
    """Return draws of every way with masks of few tokens, of bits and none, and some edits."""
    few, bits = (
        make_mask(pack_token_ids(range(3, 700, step), 88)) for step in (100, 2)
    )
    two, last = (make_mask(pack_token_ids(each, 88)) for each in ([5, 300], [699]))
    but = make_mask(invert_mask(pack_token_ids([1, 2, 650], 88)))
    low = make_mask(invert_mask(pack_token_ids(range(320), 48)))
    assert [each.few is None for each in (few, two, last, bits, but, low)] == [
        False
    ] * 3 + [True] * 3
    number = np.arange(count)
    draws = make_draws(number, mask=number % 7 - 1, temperature=0.3 + number % 11 / 8)
    draws["noise"] = [make_step_noise(b"rows", each) for each in range(count)]
    draws["temperature"][number % 6 == 0] = 0
    draws["top_p"][number % 8 == 1] = 0.8
    draws["top_k"][number % 8 == 2] = 2
    draws["top_k"][number % 8 == 3] = 40
    draws["top_k"][number % 16 == 4] = 1
    draws["min_p"][number % 8 == 5] = 0.1
    step = Step(0, draws=draws, **pack_masks([few, bits, two, last, but, low]))
    if has_edits:
        draws["num_edits"][::3] = 4
        draws["num_banned"][1::5] = 2
        step.edit_ids = np.tile([3, 103, 7, 9], len(draws[::3]))
        step.edit_bias, step.edit_factor, step.edit_minus = (
            np.tile(np.array(each, np.float32), len(draws[::3]))
            for each in ([2.0, 0.5, 4.0, -3.0], [1, 1.3, 1, 1], [0, 0, 0.7, 0])
        )
        step.banned_ids = np.tile([203, 11], len(draws[1::5]))
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_draws_are_those_of_what_the_masks_leave(
    drawer: Drawer, dtype: torch.dtype
) -> None:
    """After penalties and bias, before temperature; behind a mask's end, what its last
    bit says."""
    count = 840
    vocab = VARIED_VOCAB
    step = varied(count)
    logits = (
        3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(2))
    ).to(dtype)
    edits = edits_of(step, vocab)
    rows_how = how_of(step)
    draws = sample_tokens(
        logits, rows_how, 2, edits, tokens=span(logits, drawer=drawer)
    )
    left = masked(edits.apply(logits), step)
    expected = sample_tokens(left, rows_how, 0)
    assert torch.equal(draws.ids, expected.ids)
    raw = logits.float().log_softmax(-1).gather(-1, draws.ids[:, None])[:, 0]
    assert torch.allclose(draws.logprobs, raw, atol=1e-5), (
        "logprobs are of the raw logits"
    )
    for part in (slice(0, 7), slice(7, 8), slice(100, 230), slice(800, 840)):
        own = sample_tokens(
            logits[part],
            how_of(step, part),
            2,
            edits_of(step, vocab, part),
            tokens=span(logits, drawer=drawer),
        )
        assert torch.equal(own.ids, draws.ids[part])
    # A promise: a token that is drawn without the mask is drawn with it, where it is allowed.
    free = replace(edits, masks=None)
    without = sample_tokens(
        logits, rows_how, 0, free, tokens=span(logits, drawer=drawer)
    ).ids
    is_allowed = left.gather(-1, without[:, None])[:, 0].isfinite()
    is_kept = is_allowed & ~(rows_how.is_random & rows_how.is_filtered)
    assert count / 6 < int(is_kept.sum()) < count / 2, "the test looks at nothing"
    assert torch.equal(draws.ids[is_kept], without[is_kept])


def test_masked_rows_of_any_logits_draw_what_is_allowed(drawer: Drawer) -> None:
    """Also where all that is allowed is -inf: then it was token 0, allowed or not."""
    count = 840
    vocab = VARIED_VOCAB
    step = varied(count, has_edits=False)
    rows_how = how_of(step)
    edits = edits_of(step, vocab)
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(count, vocab, generator=generator)
    odd = torch.rand(count, vocab, generator=generator)
    for value in (float("nan"), float("inf"), float("-inf")):
        for share in (0.002, 0.5, 1.0):
            logits = torch.where(odd < share, value, normal)
            ids = sample_tokens(
                logits, rows_how, 1, edits, tokens=span(logits, drawer=drawer)
            ).ids
            left = masked(torch.zeros(count, vocab), step)
            assert torch.equal(left.gather(-1, ids[:, None]), torch.zeros(count, 1))
    all_low = torch.full((count, vocab), float("-inf"))
    ids = sample_tokens(
        all_low, rows_how, 1, edits, tokens=span(all_low, drawer=drawer)
    ).ids.tolist()
    firsts = [3, 3, 5, 699, 0, 320, 0]  # the last is of rows without a mask
    assert ids == [firsts[place] for place in step.draws["mask"]]


def test_masks_copy_no_logits_where_their_rows_draw_what_is_allowed() -> None:
    """Any mask copied the logits of all rows of its step, 16 ms of a step's 40."""
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 9.0
    masks = pack_masks([make_mask(pack_token_ids([3, 7], 8))])
    edits = edits_of(
        Step(0, draws=make_draws(range(3), mask=[0, -1, 0]), **masks), VOCAB
    )
    assert edits.apply(logits) is logits

    def refuse(*_given: object) -> torch.Tensor:
        raise AssertionError("nothing is drawn again")

    greedy = how([(0.0, 1.0, 0, 5)] * 3)
    assert sample_tokens(
        logits, greedy, 0, edits, tokens=span(logits, drawer=refuse)
    ).ids.tolist() == [
        7,
        7,
        7,
    ]


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = float("nan")
    rows = [(1.0, 0.9, 10, 5)] * 3
    draws = sample_tokens(logits, how(rows), 2)
    assert draws.logprobs.isnan().tolist() == [False, True, False]
    alone = sample_tokens(logits[[0, 2]], how(rows[:2]), 2)
    assert draws.ids[[0, 2]].tolist() == alone.ids.tolist()


def test_equals_among_the_best_come_by_their_ids() -> None:
    """torch's topk has no order of equals: on a GPU it changed from run to run."""
    torch.manual_seed(3)
    logits = torch.randint(0, 4, (40, VOCAB)).float()
    logits[5] = 0
    logits[6, 7:] = float("-inf")
    for num_top in (2, 5, 13, VOCAB):
        found = rank_logits(logits, num_top)
        for row in range(len(logits)):
            order = sorted(
                range(VOCAB), key=lambda i, row=row: (-logits[row, i].item(), i)
            )
            assert found.best_ids[row].tolist() == order[:num_top]
            assert torch.equal(found.best[row], logits[row, order[:num_top]])
