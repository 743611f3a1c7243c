"""lm-eval's own client of the completions API: it always drops the last entry under echo.

It sends ids with max_tokens 1, echo and logprobs 1, and reads `[ctxlen:-1]`, so the
generated token must be listed, even where it is EOS.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.openai_completions import LocalCompletionsAPI

import fminfer
from tests.conftest import VOCAB

TOLERANCE = 1e-4
Engines = dict[str, fminfer.Engine]


def sequences(model: Any) -> list[tuple[list[int], list[int]]]:
    """Make contexts with continuations, every second one greedy."""
    rng = random.Random(4)
    pairs = []
    for index in range(16):
        context = rng.choices(range(VOCAB), k=rng.choice([1, 3, 20, 70]))
        continuation = rng.choices(range(VOCAB), k=1 + index % 5)
        if index % 2:
            continuation = []
            for _ in range(1 + index % 5):
                continuation.append(greedy_id(model, context + continuation))
        pairs.append((context, continuation))
    return pairs


def greedy_id(model: Any, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def oracle(
    model: Any, context: list[int], continuation: list[int]
) -> tuple[float, bool]:
    ids = context + continuation
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)[
            len(context) - 1 : -1
        ]
    targets = torch.tensor(continuation)
    total = logprobs.gather(1, targets[:, None]).sum().item()
    return total, bool((logprobs.argmax(-1) == targets).all())


@pytest.fixture
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    yield engine
    engine.close()


def parsed(
    engine: fminfer.Engine, pairs: list[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Send the pairs as one request, as lm-eval does, and read the answer with its own code."""
    request = {
        "model": "x",
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    (record,) = engine.run([request])
    lengths = [len(context) for context, _ in pairs]
    found: list[tuple[float, bool]] = LocalCompletionsAPI.parse_logprobs(
        record.to_dict()["result"], ctxlens=lengths
    )
    return found


def check(found: list[tuple[float, bool]], model: Any, pairs: Any) -> None:
    assert len(found) == len(pairs)
    for (total, is_greedy), pair in zip(found, pairs, strict=True):
        expected, expected_greedy = oracle(model, *pair)
        assert total == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == expected_greedy


def test_the_slice_is_the_continuation(
    engine: fminfer.Engine, llama_checkpoint: tuple[Path, Any]
) -> None:
    pairs = sequences(llama_checkpoint[1])
    found = parsed(engine, pairs)
    check(found, llama_checkpoint[1], pairs)
    assert {is_greedy for _, is_greedy in found} == {False, True}


def test_the_slice_when_the_generated_token_is_eos(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Were EOS left out, the slice would lose the continuation's last token."""
    _, model = llama_checkpoint
    pairs = sequences(model)[1:4]
    ends = {greedy_id(model, context + continuation) for context, continuation in pairs}
    for path in llama_checkpoint[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(
        f'{{"eos_token_id": {sorted(ends)}}}'
    )
    engine = fminfer.Engine(str(tmp_path), dtype="float32", kernels="off")
    for context, continuation in pairs:
        request = {"prompt": context + continuation, "max_tokens": 1, "temperature": 0}
        (record,) = engine.run([request])
        assert record.to_dict()["result"]["choices"][0]["finish_reason"] == "stop"
    check(parsed(engine, pairs), model, pairs)
    engine.close()
