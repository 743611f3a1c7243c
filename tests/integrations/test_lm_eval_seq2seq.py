"""lm-evaluation-harness with an encoder and a decoder: our numbers beside those of its `hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fminfer.integrations.lm_eval  # noqa: F401  registers it
from tests.conftest import more
from tests.integrations.lm_eval_tasks import (
    STEPS,
    Task,
    check_loglikelihoods,
    check_metrics,
    choice_task,
    evaluate,
    generation_task,
    responses,
    task,
)
from tests.sequence_models import TEXTS, save_sequence_model

LENGTH = {"max_length": 64}
LONG = " ".join(TEXTS * 3)


def tasks() -> list[Task]:
    contexts = [*TEXTS, "Answer: ", "", LONG]
    return [
        choice_task(contexts),
        task(
            "perplexity",
            "loglikelihood_rolling",
            [{"text": text} for text in (TEXTS[1], LONG)],
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        ),
        generation_task("stops", [*TEXTS, LONG], until=["\n", " t"], max_gen_toks=12),
    ]


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=more)])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_sequence_model(request.param, folder)
    own = evaluate("fminfer", folder, tasks(), LENGTH | {"kernels": "off"})
    return own, evaluate("hf", folder, tasks(), LENGTH)


def test_the_tasks_metrics_are_those_of_hf(both: Any) -> None:
    check_metrics(*both)


def test_loglikelihoods_and_greedy_flags(both: Any) -> None:
    """An encoder reads contexts, the decoder scores; long contexts are cut from the left."""
    ours, theirs = (responses(results, "choice") for results in both)
    assert len(ours) == 8 * len(STEPS)
    check_loglikelihoods(ours, theirs)


def test_texts_end_where_those_of_hf_do(both: Any) -> None:
    """`hf` lets texts be longer by as many tokens as their contexts have."""
    ours, theirs = (responses(results, "stops") for results in both)
    for (our,), (their,) in zip(ours, theirs, strict=True):
        assert their.startswith(our)
    assert any(our == their for (our,), (their,) in zip(ours, theirs, strict=True))
