"""Drawing and scoring rows of logits, against plain one-row references."""

from __future__ import annotations

import pytest
import torch

from fminfer.kernel_build import find_compiler
from fminfer.sampling import LogitEditTensors, SamplingTensors, rank, sample, score
from fminfer.score_kernel import ScoreKernel

from .conftest import built_library

VOCAB = 50


def how(rows: list[tuple[float, float, int, float]]) -> SamplingTensors:
    temperature, top_p, top_k, noise = zip(*rows, strict=True)
    return SamplingTensors(
        torch.tensor(temperature),
        torch.tensor(top_p),
        torch.tensor(top_k),
        torch.zeros(len(rows)),
        torch.tensor(noise, dtype=torch.float64),
    )


def plain_probs(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> list[float]:
    """Filter one row by sorting it: the definition, slowly."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))
    kept = order[:top_k] if top_k else order
    mass_of_kept = sum(probs[i].item() for i in kept)
    chosen, mass = [], 0.0
    for i in kept:
        if chosen and mass >= top_p:
            break
        chosen.append(i)
        mass += probs[i].item() / mass_of_kept
    total = sum(probs[i].item() for i in chosen)
    return [probs[i].item() / total if i in chosen else 0.0 for i in range(len(probs))]


def test_every_row_has_its_own_parameters_and_the_right_distribution() -> None:
    """Chi-square over 4,000 draws a setting, all settings mixed in every batch."""
    torch.manual_seed(3)
    logits = torch.randn(VOCAB) * 2
    settings = [(1.0, 1.0, 0), (0.7, 1.0, 5), (1.3, 0.8, 0), (1.0, 0.6, 20), (0.5, 0.95, 3)]
    counts = torch.zeros(len(settings), VOCAB)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        noise = torch.rand(100, len(settings), dtype=torch.float64, generator=generator)
        rows = [(*s, noise[i, j].item()) for i in range(100) for j, s in enumerate(settings)]
        ids = sample(logits.expand(len(rows), -1), how(rows), 0).ids.view(100, -1)
        for j in range(len(settings)):
            counts[j] += torch.bincount(ids[:, j], minlength=VOCAB)
    for j, setting in enumerate(settings):
        expected = torch.tensor(plain_probs(logits, *setting)) * 4000
        assert counts[j][expected == 0].sum() == 0, f"{setting} drew a token that is filtered out"
        large = expected >= 5
        chi_square = ((counts[j] - expected)[large] ** 2 / expected[large]).sum().item()
        degrees = int(large.sum()) - 1
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 4, (setting, chi_square, degrees)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB)
    rows = [(0.1 * i, 1 - 0.1 * i, i, 0.12 * i) for i in range(8)]
    together = sample(logits, how(rows), 3)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], how([row]), 3)
        assert alone.ids[0] == together.ids[i]
        assert torch.equal(alone.top_ids[0], together.top_ids[i])


def test_greedy_by_temperature_top_p_or_top_k_and_ties_to_the_lowest_id() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, [7, 30]] = 5.0
    rows = [(0.0, 1.0, 0, 0.9), (1.0, 0.0, 0, 0.9), (1.0, 1.0, 1, 0.9), (1e-6, 1.0, 0, 0.2)]
    assert sample(logits, how(rows), 0).ids.tolist() == [7, 7, 7, 7]
    assert sample(logits[:1], how([(1e-6, 1.0, 0, 0.9)]), 0).ids.tolist() == [30]


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, [3, 9, 21, 40]] = 1.0
    draws = [sample(logits, how([(1.0, 1.0, 2, u / 100)]), 0).ids.item() for u in range(100)]
    assert set(draws) == {3, 9}
    draws = [sample(logits, how([(1.0, 0.7, 0, u / 100)]), 0).ids.item() for u in range(100)]
    assert set(draws) == {3, 9, 21}


def test_top_p_over_a_flat_vocabulary_larger_than_the_candidates() -> None:
    """With more tokens than are tried first, the whole vocabulary is sorted."""
    logits = torch.zeros(1, 4000)
    draws = [sample(logits, how([(1.0, 0.5, 0, u / 50)]), 0).ids.item() for u in range(50)]
    assert max(draws) < 2000 and max(draws) >= 1900


def test_noise_at_its_ends_never_draws_what_has_no_mass() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 5:8] = 0.0
    ends = [(1.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 1.0 - 2**-53)]
    assert sample(logits, how(ends), 0).ids.tolist() == [5, 7]


def test_logprobs_are_of_the_raw_logits_and_equal_in_both_places() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB) * 30
    expected = torch.log_softmax(logits.double(), -1)
    for num_top in (0, 1, 5, VOCAB, VOCAB + 9):
        draws = score(logits, logits.argmax(-1), num_top)
        assert torch.allclose(draws.logprobs.double(), expected.amax(-1), atol=1e-5)
        assert draws.top_ids.shape == (6, min(num_top, VOCAB))
        if num_top:
            assert torch.equal(draws.top_logprobs[:, 0], draws.logprobs)
            assert (draws.top_logprobs.diff(dim=-1) <= 0).all()


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1024, 1025, 32000, 50257])
def test_the_compiled_ranking_is_the_plain_one(vocab: int) -> None:
    kernel = ScoreKernel(built_library())
    torch.manual_seed(1)
    for logits in (
        torch.randn(7, vocab) * 5,
        torch.randn(7, 2 * vocab)[:, :vocab] * 30,  # rows that do not follow one another
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
            found, plain = kernel(logits, num_top), rank(logits, num_top)
            exact = logits.double().logsumexp(-1)
            torch.testing.assert_close(found.normalizer.double(), exact, rtol=1e-6, atol=1e-6)
            assert torch.equal(found.best, plain.best)
            assert torch.equal(logits.gather(-1, found.best_ids).float(), found.best)
            if num_top <= 64:
                ordered = logits.sort(dim=-1, descending=True, stable=True)[1]
                assert torch.equal(found.best_ids, ordered[:, :num_top])


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("place", [0, 3, 500, 998])
def test_the_compiled_ranking_of_a_nan(place: int) -> None:
    kernel = ScoreKernel(built_library())
    best = torch.zeros(1, 999)
    best[0, 500:503] = torch.tensor([7.0, float("nan"), 8.0])
    assert kernel(best, 2).best_ids.tolist() == [[502, 500]]
    logits = torch.randn(3, 999)
    logits[1, place] = float("nan")
    found = score(logits, logits.nan_to_num(-9.0).argmax(-1), 5, kernel)
    assert found.logprobs.isnan().tolist() == [False, True, False]
    assert found.top_logprobs.isnan().all(-1).tolist() == [False, True, False]
    logits[1, place - 1] = float("inf")
    assert kernel(logits, 2).normalizer.isnan().tolist() == [False, True, False]
    logits[1, place - 1] = float("-inf")
    assert kernel(logits, 2).normalizer.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_drawn_from_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(4, VOCAB) * 3).to(dtype)
    wide = logits.float()
    rows = [(0.0, 1.0, 0, 0.5), (1.0, 0.9, 0, 0.3), (0.7, 1.0, 9, 0.8), (1.3, 0.5, 4, 0.1)]
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
        ours, expected = (sample(each, how(rows), 3, changes) for each in (logits, wide))
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(logits.float(), wide)


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = float("nan")
    rows = [(1.0, 0.9, 10, 0.5)] * 3
    draws = sample(logits, how(rows), 2)
    assert draws.logprobs.isnan().tolist() == [False, True, False]
    alone = sample(logits[[0, 2]], how(rows[:2]), 2)
    assert draws.ids[[0, 2]].tolist() == alone.ids.tolist()
