"""Every family against transformers itself, alone and in float32.

One mixed batch: 30 greedy rows of mixed length and sampled rows among them, with chunks that cut
prompts and a KV budget so small that rows wait.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import fminfer
from tests.conftest import VOCAB

TOLERANCE = 1e-4
Request = dict[str, Any]
Answer = tuple[list[int], torch.Tensor]  # greedy ids; logprobs (tokens, vocab) of all


def mixed_requests() -> list[Request]:
    """Draw 30 greedy requests, with 12 sampled ones strewn among them, as token ids.

    A third of them share a prefix with others, of whole blocks and of parts of one.
    """
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    requests: list[Request] = []
    for index in range(42):
        ids = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 32, 33, 64, 90]))]
        if index % 3 == 1:
            ids = stem[: rng.choice([20, 32, 45, 70])] + ids[:20]
        request: Request = {"prompt": ids, "max_tokens": rng.randint(1, 12), "logprobs": 3}
        request["ignore_eos"] = True  # a tokenizer class of transformers may bring one
        if index % 7 < 2:
            request |= {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "n": 2, "seed": index}
        else:
            request |= {"temperature": 0, "echo": index % 3 == 0}
        requests.append(request)
    return requests


def oracle_greedy(model: Any, ids: list[int], count: int) -> Answer:
    """Return transformers' greedy ids and the logprobs (tokens, vocab) of the whole sequence."""
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    return ids[start:], torch.log_softmax(logits, -1)


@pytest.fixture(scope="session")
def family_answers(family_checkpoint: tuple[Path, Any]) -> tuple[Path, list[Answer | None]]:
    """Give (folder, transformers' answer to each greedy request), worked out once a family."""
    folder, model = family_checkpoint
    answers: list[Answer | None] = [
        oracle_greedy(model, request["prompt"], request["max_tokens"])
        if request["temperature"] == 0
        else None
        for request in mixed_requests()
    ]
    return folder, answers


def check_greedy(request: Request, result: dict[str, Any], answer: Answer, engine: Any) -> None:
    prompt = request["prompt"]
    ids, logprobs = answer
    shown = prompt + ids if request["echo"] else ids
    first = 0 if request["echo"] else len(prompt)
    found = result["choices"][0]["logprobs"]
    assert found["tokens"] == [engine.tokenizer.piece(i) for i in shown]
    for place, token_id in enumerate(shown):
        if first + place == 0:
            assert found["token_logprobs"][0] is None
            continue
        row = logprobs[first + place - 1]
        assert found["token_logprobs"][place] == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        best = row.topk(3)
        top = list(found["top_logprobs"][place].values())[:3]
        assert top == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),  # on the CPU the compiled kernel, if there is a compiler
        pytest.param({"chunk_size": 24, "block_size": 16, "budget": 256}, id="small"),
        pytest.param(
            {"chunk_size": 13, "block_size": 5, "micro_batches": 1, "attention": "eager"}, id="odd"
        ),
    ],
)
def test_greedy_equals_transformers_alone(
    family_answers: tuple[Path, list[Answer | None]], options: dict[str, Any]
) -> None:
    folder, answers = family_answers
    check_all(folder, mixed_requests(), answers, options)


def check_all(
    folder: Path, requests: list[Request], answers: list[Answer | None], options: dict[str, Any]
) -> None:
    """See that an engine answers as transformers does, prefixes found again among them."""
    engine = fminfer.Engine(str(folder), dtype="float32", **options)
    records = {record.line.number: record for record in engine.run(requests)}
    engine.close()
    assert sorted(records) == list(range(1, len(requests) + 1))
    assert engine.stats.num_cached_tokens > 100
    for number, request in enumerate(requests, start=1):
        record = records[number]
        assert record.error is None, record.error
        assert record.result is not None
        answer = answers[number - 1]
        if answer is not None:
            check_greedy(request, record.result, answer, engine)
        else:
            assert len(record.result["choices"]) == 2


def test_a_small_budget_makes_rows_wait(llama_checkpoint: tuple[Path, Any]) -> None:
    """The `small` case above is only worth something if its rows really cannot all run at once."""
    folder, _ = llama_checkpoint
    peaks = []
    for budget in (256, 16384):
        engine = fminfer.Engine(
            str(folder), dtype="float32", attention="eager", block_size=16, budget=budget
        )
        list(engine.run(mixed_requests()))
        engine.close()
        peaks.append(engine.stats.max_rows_running)
    assert peaks[0] <= 12 < peaks[1]


def test_sampled_logprobs_equal_transformers(llama_checkpoint: tuple[Path, Any]) -> None:
    """Whatever is drawn, with whatever filters, its logprob is that of the raw logits."""
    folder, model = llama_checkpoint
    engine = fminfer.Engine(str(folder), dtype="float32", attention="eager")
    prompt = [5, 17, 80, 33, 200]
    request = {"prompt": prompt, "max_tokens": 9, "n": 3, "logprobs": 0, "temperature": 1.5}
    (record,) = engine.run([request | {"echo": True, "top_k": 50}])
    engine.close()
    assert record.result is not None
    ids_of = {engine.tokenizer.piece(i): i for i in range(VOCAB)}
    for choice in record.result["choices"]:
        ids = [ids_of[piece] for piece in choice["logprobs"]["tokens"]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        found = choice["logprobs"]["token_logprobs"][1:]
        assert found == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)
