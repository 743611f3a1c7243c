"""Every family against transformers itself, alone and in float32; by default, some families:
test_transformer compares the logits of all.

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
from tests.conftest import STORED, VOCAB, in_turns, some_families

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
        ids = [
            rng.randrange(VOCAB)
            for _ in range(rng.choice([1, 2, 5, 17, 32, 33, 64, 90]))
        ]
        if index % 3 == 1:
            ids = stem[: rng.choice([20, 32, 45, 70])] + ids[:20]
        request: Request = {
            "prompt": ids,
            "max_tokens": rng.randint(1, 12),
            "logprobs": 3,
        }
        request["ignore_eos"] = True  # a tokenizer class of transformers may bring one
        if index % 7 < 2:
            request |= {
                "temperature": 0.9,
                "top_p": 0.8,
                "top_k": 40,
                "n": 2,
                "seed": index,
            }
        else:
            request |= {"temperature": 0, "echo": index % 3 == 0}
        requests.append(request)
    return requests


def oracle_greedy(model: Any, ids: list[int], count: int) -> Answer:
    """Return transformers' greedy ids and the logprobs (tokens, vocab) of the whole sequence."""
    ids = list(ids)
    start = len(ids)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[start:], torch.log_softmax(logits_of(model, ids), -1)


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].float()
    return logits


class Oracle:
    """What transformers answers to greedy requests, each worked out once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, request: Request, guess: list[int]) -> Answer:
        """Return transformers' answer.

        Args:
            guess: ids that may be the answer. One pass tells whether each is the best one after
                those before it; if so, transformers draws the same ids one by one.
        """
        prompt = request["prompt"]
        count = request["max_tokens"]
        key = (count, *prompt)
        if key not in self._answers:
            logits = logits_of(self._model, prompt + guess)
            best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            if len(guess) == count and best == guess:
                self._answers[key] = guess, torch.log_softmax(logits, -1)
            else:
                self._answers[key] = oracle_greedy(self._model, prompt, count)
        return self._answers[key]


@pytest.fixture(scope="session")
def family_oracle(family_checkpoint: tuple[Path, Any]) -> tuple[Path, Oracle]:
    """Give a family's checkpoint and transformers' answers."""
    return family_checkpoint[0], Oracle(family_checkpoint[1])


def check_greedy(
    request: Request, result: dict[str, Any], answer: Answer, engine: Any
) -> None:
    prompt = request["prompt"]
    ids, logprobs = answer
    shown = prompt + ids if request["echo"] else ids
    first = 0 if request["echo"] else len(prompt)
    found = result["choices"][0]["logprobs"]
    assert found["tokens"] == [engine.tokenizer.piece_of_token(i) for i in shown]
    for place, token_id in enumerate(shown):
        if first + place == 0:
            assert found["token_logprobs"][0] is None
            continue
        row = logprobs[first + place - 1]
        assert found["token_logprobs"][place] == pytest.approx(
            row[token_id].item(), abs=TOLERANCE
        )
        best = row.topk(3)
        top = list(found["top_logprobs"][place].values())[:3]
        assert top == pytest.approx(best.values.tolist(), abs=TOLERANCE)


# with the kernel, if it can be built
SMALL = {"chunk_size": 24, "block_size": 16, "budget": 256}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "odd": {"chunk_size": 13, "block_size": 5, "micro_batches": 1, "kernels": "off"},
}


@pytest.mark.parametrize("family_checkpoint", some_families(STORED), indirect=True)
def test_greedy_equals_transformers_alone(family_oracle: tuple[Path, Oracle]) -> None:
    check_all(*family_oracle, mixed_requests(), SMALL)


@pytest.mark.parametrize(
    ("family_checkpoint", "sizes"),
    in_turns(OTHER_SIZES),
    indirect=["family_checkpoint"],
)
def test_other_sizes_and_bodies_of_attention_change_nothing(
    family_oracle: tuple[Path, Oracle], sizes: str
) -> None:
    check_all(*family_oracle, mixed_requests()[::2], OTHER_SIZES[sizes])


def check_all(
    folder: Path, oracle: Oracle, requests: list[Request], options: dict[str, Any]
) -> fminfer.Engine:
    """See that an engine answers as transformers does, prefixes found again among them."""
    engine = fminfer.Engine(str(folder), dtype="float32", **options)
    records = {record.line.number: record for record in engine.run(requests)}
    engine.close()
    assert sorted(records) == list(range(1, len(requests) + 1))
    assert engine.stats.num_cached_tokens > 100
    ids_of = {engine.tokenizer.piece_of_token(i): i for i in range(VOCAB)}
    for number, request in enumerate(requests, start=1):
        record = records[number]
        assert record.error is None, record.error
        assert record.result is not None
        if request["temperature"] == 0:
            drawn = record.result["choices"][0]["logprobs"]["tokens"][
                -request["max_tokens"] :
            ]
            guess = [ids_of.get(piece, 0) for piece in drawn]
            check_greedy(request, record.result, oracle.answer(request, guess), engine)
        else:
            assert len(record.result["choices"]) == 2
    return engine


def test_a_small_budget_makes_rows_wait(llama_checkpoint: tuple[Path, Any]) -> None:
    """The `small` case above is only worth something if its rows really cannot all run
    at once."""
    folder, _ = llama_checkpoint
    peaks = []
    for budget in (256, 16384):
        engine = fminfer.Engine(
            str(folder), dtype="float32", kernels="off", block_size=16, budget=budget
        )
        list(engine.run(mixed_requests()))
        engine.close()
        peaks.append(engine.stats.max_rows_running)
    assert peaks[0] <= 12 < peaks[1]


def test_sampled_logprobs_equal_transformers(
    llama_checkpoint: tuple[Path, Any],
) -> None:
    """Whatever is drawn, with whatever filters, its logprob is that of the raw logits."""
    folder, model = llama_checkpoint
    engine = fminfer.Engine(str(folder), dtype="float32", kernels="off")
    prompt = [5, 17, 80, 33, 200]
    request = {
        "prompt": prompt,
        "max_tokens": 9,
        "n": 3,
        "logprobs": 0,
        "temperature": 1.5,
    }
    (record,) = engine.run([request | {"echo": True, "top_k": 50}])
    engine.close()
    assert record.result is not None
    ids_of = {engine.tokenizer.piece_of_token(i): i for i in range(VOCAB)}
    for choice in record.result["choices"]:
        ids = [ids_of[piece] for piece in choice["logprobs"]["tokens"]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        expected = torch.log_softmax(logits, -1)[:-1].gather(
            1, torch.tensor(ids[1:])[:, None]
        )
        found = choice["logprobs"]["token_logprobs"][1:]
        assert found == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)
