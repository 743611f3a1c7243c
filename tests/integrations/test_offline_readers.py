"""HELM, and the adapters of DejaVu and H2O, read a file that the command wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fminfer.models.checkpoint import DEMO_MODEL
from tests.cli.test_cli import run
from tests.integrations.adapters import AdapterResults, adapter_request
from tests.integrations.helm import HelmAnswer, HelmCache

TOLERANCE = 1e-4
CONTEXT = "Question: How do you go from the bathroom to the office?\nAnswer:"
GREEDY = " north east east east east east"
CONTINUATIONS = [GREEDY, " north", " south east", " attic"]


def helm_request(**changes: Any) -> dict[str, Any]:
    """Return a request as HELM's client for offline models makes it."""
    return {
        "request_type": "language-model-inference",
        "model": "demo",
        "prompt": CONTEXT,
        "temperature": 0.0,
        "n": 1,
        "max_tokens": 20,
        "best_of": 1,
        "stop": ["\n"],
        "echo": False,
        "top_p": 1,
    } | changes


# The prompt is one that the demo model is unsure of; best_of below n is what HELM writes.
SAMPLED = helm_request(prompt="Answer: north", temperature=1.9, n=12, stop=None)
SCORED = helm_request(logprobs=1)
NO_ROOM = helm_request(max_tokens=2000)
ECHOED = helm_request(echo=True, max_tokens=0, logprobs=1, stop=None)
WRAPPED = helm_request(max_tokens=3)
ONE_TOKEN = {"max_tokens": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answer all clients' requests in one run of the command."""
    folder = tmp_path_factory.mktemp("offline")
    requests = [helm_request(), SAMPLED, NO_ROOM, SCORED, ECHOED]
    for continuation in CONTINUATIONS:
        requests.append(adapter_request(CONTEXT + continuation))
        requests.append(adapter_request(CONTEXT + continuation, **ONE_TOKEN))
    # HELM's export wraps its requests, and says which scenario they are of.
    wrapped = {"request": WRAPPED, "scenario": {"name": "rooms"}}
    lines = [json.dumps(request) + "\n" for request in [*requests, wrapped]]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    found = run(folder / "requests.jsonl", "--model-name", "demo", "--dtype", "float32")
    assert found.returncode == 3, found.stderr
    return folder / "output_requests.jsonl"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        DEMO_MODEL, dtype=torch.float32
    )


def oracle(model: Any, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Return logprob and greediness of each id after the first, by transformers."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    targets = torch.tensor(ids[1:])
    values = logprobs.gather(1, targets[:, None])[:, 0]
    return values.tolist(), (logprobs.argmax(-1) == targets).tolist()


def helm(results: Path, request: dict[str, Any]) -> HelmAnswer:
    return HelmCache(results).answer(request)


def test_helm_finds_its_requests_and_their_times(results: Path) -> None:
    for request in (helm_request(), SAMPLED, SCORED, ECHOED, WRAPPED):
        answer = helm(results, request)
        assert len(answer.completions) == request["n"]
        assert answer.batch_size >= 1
        assert 0 < answer.batch_request_time / answer.batch_size < 120
    with pytest.raises(KeyError):
        # it stands in the errors file, or the import itself had failed
        helm(results, NO_ROOM)


def test_helm_reads_completions_with_and_without_logprobs(
    results: Path, tokenizer: Any, model: Any
) -> None:
    (plain,) = helm(results, helm_request()).completions
    (scored,) = helm(results, SCORED).completions
    assert plain.text == scored.text == GREEDY
    assert plain.tokens == [(GREEDY, 0.0)], (
        "no logprobs asked, and no null in their place"
    )
    assert plain.finish_reason == scored.finish_reason == "stop"
    assert "".join(token for token, _ in scored.tokens) == GREEDY
    prompt = tokenizer(CONTEXT)["input_ids"]
    values, _ = oracle(model, prompt + tokenizer(GREEDY)["input_ids"])
    assert scored.logprob == pytest.approx(
        sum(values[len(prompt) - 1 :]), abs=TOLERANCE
    )
    sampled = helm(results, SAMPLED).completions
    assert len({completion.text for completion in sampled}) > 1


def test_helm_scores_an_echoed_prompt(
    results: Path, tokenizer: Any, model: Any
) -> None:
    (echoed,) = helm(results, ECHOED).completions
    assert echoed.text == CONTEXT
    assert "".join(token for token, _ in echoed.tokens) == CONTEXT
    ids = tokenizer(CONTEXT)["input_ids"]
    values, _ = oracle(model, ids)
    assert [value for _, value in echoed.tokens] == pytest.approx(
        [0, *values], abs=TOLERANCE
    )
    assert echoed.logprob == pytest.approx(sum(values), abs=TOLERANCE)


@pytest.mark.parametrize("sort_keys", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, ONE_TOKEN], ids=["max_tokens=0", "max_tokens=1"]
)
@pytest.mark.parametrize("continuation", CONTINUATIONS)
def test_the_adapters_of_dejavu_and_h2o(
    results: Path,
    tokenizer: Any,
    model: Any,
    continuation: str,
    changes: dict[str, Any],
    sort_keys: bool,
) -> None:
    reader = AdapterResults(results, tokenizer, sort_keys=sort_keys)
    ids, mean_logprob, is_greedy = reader.score(CONTEXT, continuation, **changes)
    prompt, whole = (
        tokenizer(text)["input_ids"] for text in (CONTEXT, CONTEXT + continuation)
    )
    assert ids[: len(whole)] == whole
    assert len(ids) == len(whole) + changes.get("max_tokens", 0)
    values, greedy = oracle(model, whole)
    expected = values[len(prompt) - 1 :]
    assert mean_logprob == pytest.approx(sum(expected) / len(expected), abs=TOLERANCE)
    assert is_greedy == all(greedy[len(prompt) - 1 :])
    assert is_greedy == (continuation in (GREEDY, " north"))
