"""A GGUF file under lm-evaluation-harness: its own rotary factors, and scores of every token."""

from __future__ import annotations

import json

import pytest

from fminfer.integrations.lm_eval import FminferLM
from tests.gguf_building import SAMPLES

MAX_ERROR = 1e-3  # of a sum over a prompt's tokens


@pytest.mark.parametrize("num_scored", [1, 4, None])
def test_scores_of_a_gguf_file_are_those_of_the_model(num_scored: int | None) -> None:
    """LLaMA 3's factors are a tensor of the file, which the harness's `hf` does not read."""
    prompts = json.loads((SAMPLES / "llama3.json").read_text())["prompts"]
    model = FminferLM(str(SAMPLES / "llama3.gguf"), dtype="float32")
    requests = []
    for prompt in prompts:
        ids = prompt["ids"]
        cut = 1 if num_scored is None else len(ids) - num_scored
        requests.append((("", ""), ids[:cut], ids[cut:]))

    scores = model._loglikelihood_tokens(requests)

    for prompt, (_, context, scored), (total, is_greedy) in zip(
        prompts, requests, scores, strict=True
    ):
        expected = prompt["next_logprobs"][len(context) - 1 :]
        assert total == pytest.approx(sum(expected), abs=MAX_ERROR)
        greedy = prompt["argmax"][len(context) - 1 : -1]
        assert is_greedy == (greedy == scored)
