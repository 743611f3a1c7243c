"""That draws have the right probabilities: chi-square over the engine's own noise and samplers.

The seeds are fixed, so a right sampler always passes; a wrong one is far over the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fminfer
from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.kernels.kernel_build import find_compiler
from fminfer.compute.sampling.draw_kernel import DrawKernel
from fminfer.compute.sampling.masks import LogitEditTensors, make_mask_tensors
from fminfer.compute.sampling.sampler import (
    Drawer,
    SamplingTensors,
    compute_token_bits,
    draw_tokens,
    sample_tokens,
)
from fminfer.compute.values.step import make_draws
from fminfer.contract.field_table import COLUMNS
from fminfer.contract.request import RequestParams
from fminfer.core.messages import Mask, make_mask, pack_token_ids
from fminfer.engine.noise import make_draw_key, make_noise_key, make_step_noise
from fminfer.models.layer_source import open_weights
from fminfer.models.tensor_specs import Weights
from tests.conftest import built_library, span

VOCAB = 60
NUM_DRAWS = 6_400  # of each setting
NORMAL_QUANTILE = 3.719  # one right sampler in 10,000 is beyond it


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: float = 0.0  # of each third token
    repetition: float = 1.0  # of each fourth
    minus: float = 0.0  # of each fifth: penalties of frequency and presence
    only: int = 1  # each so manieth may be drawn
    has_few: bool = True  # their ids are listed


SETTINGS = [
    Setting(),
    Setting(temperature=0.6),
    Setting(temperature=1.7),
    Setting(temperature=0.8, top_k=7),
    Setting(temperature=1.4, top_k=25),
    Setting(temperature=0.9, top_p=0.75),
    Setting(temperature=1.5, top_p=0.95),
    Setting(temperature=1.2, top_k=20, top_p=0.8),
    Setting(temperature=1.3, min_p=0.1),
    Setting(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    Setting(temperature=0.3),
    Setting(temperature=5.0),
    Setting(top_k=2),
    Setting(top_k=59),
    Setting(temperature=2.0, top_p=0.3),
    Setting(temperature=2.0, top_p=0.99),
    Setting(temperature=0.7, min_p=0.02),
    Setting(temperature=3.0, min_p=0.3),
    Setting(temperature=0.7, top_p=0.9, min_p=0.01),
    Setting(temperature=1.1, top_k=30, min_p=0.05),
    Setting(bias=1.0),
    Setting(temperature=0.8, bias=-2.0),
    Setting(bias=3.0, top_k=10),
    Setting(repetition=1.5),
    Setting(temperature=1.3, repetition=0.7, top_p=0.9),
    Setting(repetition=2.0, min_p=0.05),
    Setting(minus=1.5),
    Setting(temperature=0.6, minus=-0.8, top_k=15),
    Setting(bias=0.7, repetition=1.2, minus=0.4),
    Setting(1.2, 25, 0.95, 0.01, bias=-1.0, repetition=1.3, minus=0.5),
    *[
        replace(setting, has_few=has_few)
        for has_few in (True, False)
        for setting in (
            Setting(only=7),
            Setting(temperature=0.6, only=2),
            Setting(temperature=0.8, bias=2.0, top_k=40, top_p=0.9, only=2),
            Setting(temperature=1.5, min_p=0.1, repetition=1.4, only=11),
            Setting(temperature=1.3, top_p=0.8, only=3),
        )
    ],
]


def exact_probs(logits: np.ndarray, how: Setting) -> np.ndarray:
    """Return each id's probability by the definition: temperature, top_k, min_p, top_p
    in turn."""
    edited = logits.astype(np.float64)
    edited[::3] += how.bias
    fourth = edited[::4]
    edited[::4] = np.where(fourth > 0, fourth / how.repetition, fourth * how.repetition)
    edited[::5] -= how.minus
    edited[np.arange(len(edited)) % how.only > 0] = -np.inf
    scaled = edited / how.temperature
    probs = np.exp(scaled - scaled.max())
    best_first = np.argsort(-probs, kind="stable")
    if how.top_k:
        probs[best_first[how.top_k :]] = 0
    probs[probs < how.min_p * probs.max()] = 0
    probs /= probs.sum()
    mass_before = np.concatenate([[0.0], np.cumsum(probs[best_first])[:-1]])
    probs[best_first[mass_before >= how.top_p]] = 0
    return np.asarray(probs / probs.sum())


def chi_square_limit(degrees: int) -> float:
    """Return the chi-square quantile (Wilson and Hilferty, 1931, doi:10.1073/pnas.17.12.684)."""
    ninth = 2 / (9 * degrees)
    return float(degrees * (1 - ninth + NORMAL_QUANTILE * ninth**0.5) ** 3)


def check_counts(counts: np.ndarray, probs: np.ndarray, what: object) -> None:
    """Compare counts with probabilities; ids that are expected fewer than 10 times are
    one bin."""
    assert counts[probs == 0].sum() == 0, f"{what} drew what has no probability"
    expected = probs * counts.sum()
    is_rare = expected < 10
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed = observed[expected > 0]
    expected = expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    limit = chi_square_limit(len(expected) - 1)
    assert chi_square < limit, f"{what}: {chi_square:.1f} is over {limit:.1f}"


def key_of(
    *,
    seed: int = 1,
    repeat: int = 0,
    prompt: Sequence[int] = (5,),
    index: int = 0,
    candidate: int = 0,
) -> bytes:
    """Return the key of a sequence's draws."""
    key = make_draw_key([list(prompt)], RequestParams(), seed, repeat, b"")
    return make_noise_key(key, index, candidate)


def mask_of(ids: Iterable[int], *, has_few: bool = True) -> Mask:
    """Return the mask of these tokens, as one of few where it may be one."""
    mask = make_mask(pack_token_ids(ids, 512))
    return mask if has_few else replace(mask, few=None)


def rows_of(settings: list[Setting], noise: list[int]) -> SamplingTensors:
    columns = {name: [getattr(s, name) for s in settings] for name in COLUMNS}
    draws = make_draws(range(len(settings)), noise=noise, **columns)
    return SamplingTensors.from_draws(draws, torch.device("cpu"))


def edits_of(settings: list[Setting]) -> LogitEditTensors:
    """Return an entry for each row and token; most of them change nothing."""
    ids = torch.arange(VOCAB)

    def column(values: list[float], every: int, otherwise: float) -> torch.Tensor:
        return torch.where(
            ids % every == 0, torch.tensor(values)[:, None], otherwise
        ).flatten()

    return LogitEditTensors(
        torch.arange(len(settings)).repeat_interleave(VOCAB),
        ids.repeat(len(settings)),
        column([s.bias for s in settings], 3, 0.0),
        column([s.repetition for s in settings], 4, 1.0),
        column([s.minus for s in settings], 5, 0.0),
        *(torch.empty(0, dtype=torch.int64) for _ in range(2)),
        make_mask_tensors(
            [mask_of(range(0, VOCAB, s.only), has_few=s.has_few) for s in settings],
            range(len(settings)),
            VOCAB,
            torch.device("cpu"),
        ),
    )


@cache
def noise_of_steps() -> list[list[int]]:
    """Return the noise of eight steps of a row for each setting and eighth of its draws."""
    keys = [
        key_of(prompt=[i], candidate=place)
        for i in range(NUM_DRAWS // 8)
        for place in range(len(SETTINGS))
    ]
    return [[make_step_noise(key, step) for key in keys] for step in range(8)]


@pytest.fixture(scope="module", params=["plain", "compiled"])
def counts(request: pytest.FixtureRequest) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw for all settings, mixed in each batch; return the logits and each setting's
    counts."""
    drawer: Drawer = draw_tokens
    if request.param == "compiled":
        if find_compiler() is None:
            pytest.skip("there is no C++ compiler")
        drawer = DrawKernel(built_library())
    generator = np.random.default_rng(5)
    logits = generator.normal(0, 1.5, VOCAB).astype(np.float32)
    found = [np.zeros(VOCAB, dtype=np.int64) for _ in SETTINGS]
    settings = SETTINGS * (NUM_DRAWS // 8)
    edits = edits_of(settings)
    for noise in noise_of_steps():
        rows = rows_of(settings, noise)
        expanded = torch.from_numpy(logits).expand(len(noise), -1)
        ids = sample_tokens(
            expanded, rows, 0, edits, tokens=span(expanded, drawer=drawer)
        ).ids
        for place, column in enumerate(ids.view(-1, len(SETTINGS)).numpy().T):
            found[place] += np.bincount(column, minlength=VOCAB)
    return logits, found


@pytest.mark.parametrize("place", range(len(SETTINGS)), ids=[str(s) for s in SETTINGS])
def test_draws_follow_the_exact_probabilities(
    counts: tuple[np.ndarray, list[np.ndarray]], place: int
) -> None:
    logits, found = counts
    assert found[place].sum() == NUM_DRAWS
    check_counts(found[place], exact_probs(logits, SETTINGS[place]), SETTINGS[place])


def test_a_neighbouring_setting_would_be_noticed(
    counts: tuple[np.ndarray, list[np.ndarray]],
) -> None:
    """The limits are worth something: draws of one setting fail those of one close by."""
    logits, found = counts
    near = [
        (1, Setting(temperature=0.65)),
        (3, Setting(temperature=0.8, top_k=8)),
        (3, Setting(temperature=0.8, top_k=6)),
        (5, Setting(temperature=0.9, top_p=0.7)),
        (5, Setting(temperature=0.9, top_p=0.8)),
        (8, Setting(temperature=1.3, min_p=0.15)),
    ]
    for place, other in near:
        with pytest.raises(AssertionError):
            check_counts(found[place], exact_probs(logits, other), other)


def test_draws_through_the_engine(llama_checkpoint: tuple[Path, Any]) -> None:
    """5,120 first tokens of one prompt: candidates of a line, and equal lines without a seed."""
    folder, model = llama_checkpoint
    how = Setting(temperature=1.3, top_k=40, top_p=0.9)
    request = {
        "prompt": [5, 17, 80, 33, 200],
        "max_tokens": 1,
        "temperature": how.temperature,
        "top_k": how.top_k,
        "top_p": how.top_p,
        "n": 128,
        "logprobs": 0,
        "ignore_eos": True,
    }
    engine = fminfer.Engine(str(folder), dtype="float32", kernels="off")
    ids_of = {
        engine.tokenizer.piece_of_token(i): i for i in range(model.config.vocab_size)
    }
    drawn = [
        ids_of[choice["logprobs"]["tokens"][0]]
        for record in engine.run([request] * 40)
        for choice in record.to_dict()["result"]["choices"]
    ]
    engine.close()
    with torch.no_grad():
        logits = model(torch.tensor([request["prompt"]])).logits[0, -1].numpy()
    assert len(drawn) == 5120
    check_counts(
        np.bincount(drawn, minlength=len(logits)), exact_probs(logits, how), how
    )


def test_draws_through_the_engine_are_unrelated(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices, steps and requests beside each other, where all tokens are equally likely."""

    def load_flat(*arguments: Any, **options: Any) -> Any:
        source: Any = open_weights(*arguments, **options)
        own = source.load_exit

        def flat(entry: Weights) -> Weights:
            head = own(entry)["head.weight"].plain
            return own(entry) | {
                "head.weight": make_dense_weight(torch.zeros_like(head), "head")
            }

        source.load_exit = flat
        return source

    monkeypatch.setattr("fminfer.runtime.load.builder.open_weights", load_flat)
    folder, model = llama_checkpoint
    engine = fminfer.Engine(str(folder), dtype="float32", kernels="off")
    vocab = model.config.vocab_size
    requests = [
        {"prompt": [i], "n": 32, "max_tokens": 8, "temperature": 1, "ignore_eos": True}
        | {"return_token_ids": True}
        for i in range(64)
    ]
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    engine.close()
    draws = np.array(
        [
            [choice["token_ids"] for choice in record.to_dict()["result"]["choices"]]
            for record in records
        ]
    )
    assert draws.shape == (64, 32, 8)
    check_counts(
        np.bincount(draws.ravel(), minlength=vocab), np.full(vocab, 1 / vocab), "all"
    )
    bins = draws * 16 // vocab
    share = np.bincount(np.arange(vocab) * 16 // vocab) / vocab
    for axis, name in enumerate(("requests", "choices", "steps")):
        moved = np.moveaxis(bins, axis, 0)
        pairs = moved[:-1:2] * 16 + moved[1::2]
        check_counts(
            np.bincount(pairs.ravel(), minlength=256),
            np.outer(share, share).ravel(),
            name,
        )


STREAMS: dict[str, Callable[[int], int]] = {
    "steps": lambda i: make_step_noise(key_of(), i),
    "candidates": lambda i: make_step_noise(key_of(candidate=i), 0),
    "prompts": lambda i: make_step_noise(key_of(index=i), 0),
    "repeats": lambda i: make_step_noise(key_of(repeat=i), 0),
    "seeds": lambda i: make_step_noise(key_of(seed=i - 12_000), 0),
    "requests": lambda i: make_step_noise(key_of(prompt=[i]), 0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_uniform_and_neighbours_are_unrelated(name: str) -> None:
    """Whichever of its numbers counts up: values, pairs of neighbours, and their correlation."""
    count = 24_000
    noise = torch.tensor([STREAMS[name](i) for i in range(count)])
    for token in (0, 41):
        values = (
            compute_token_bits(noise, torch.arange(42))[:, token]
            .numpy()
            .astype(np.int64)
            % 2**32
        ) / 2**32
        bins = (values * 200).astype(int)
        check_counts(np.bincount(bins, minlength=200), np.full(200, 1 / 200), name)
        pairs = (values[::2] * 20).astype(int) * 20 + (values[1::2] * 20).astype(int)
        check_counts(
            np.bincount(pairs, minlength=400), np.full(400, 1 / 400), f"pairs of {name}"
        )
        for lag in (1, 2, 3):
            correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
            assert abs(correlation) < NORMAL_QUANTILE / count**0.5, (name, lag)
