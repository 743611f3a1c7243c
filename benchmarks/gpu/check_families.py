"""Phase 3: every family beside transformers, with kernels required.

In float32 greedy tokens are equal and logprobs within 1e-4. In 16 bits the error is
transformers' own, beside transformers in float32, or less. Further families, whose
kernels are those of the others, are tried in float32 only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.gpu import check_beside_cpu, check_encoders, check_streams
from benchmarks.gpu.cases import Case, Figure, Figures, Setting, Skipped, expect
from benchmarks.gpu.family_answers import (
    NAME,
    NUM_BEST,
    Answer,
    prepare,
    score_with_transformers,
)
from fminfer import Engine
from fminfer.compute.values.spec import Layer, Moe
from fminfer.forward.decode_graphs import can_capture
from fminfer.models.checkpoint import open_checkpoint
from tests.conftest import FIELDS
from tests.further_families import FURTHER

FAMILIES = {"cuda": tuple(sorted(FIELDS)), "cpu": ("llama", "gemma2", "falcon-alibi")}
TYPES = {"cuda": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16")}
TOLERANCE = 1e-4
OF_TRANSFORMERS = 1.1
SINCE = {"gpt_oss": "swiglu_limit"}  # fields that older versions of transformers ignore
# Of all differences of a mixture in 16 bits: where rounding makes a token choose
# another expert, a few logprobs are far off, on either side.
COUNTED = 0.95
# A budget, as several processes share the device: each would take most of its memory.
OPTIONS = {"kernels": "require", "block_size": 16, "chunk_size": 48, "budget": 4096}


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in TYPES[setting.device]:
        for name in FAMILIES[setting.device]:
            if dtype == "float32" or name not in FURTHER:
                yield Case(
                    f"{name} {dtype}", partial(check_family, setting, name, dtype)
                )
    yield from check_encoders.cases(setting)
    yield from check_streams.cases(setting)
    yield from check_beside_cpu.cases(setting)


def check_family(setting: Setting, name: str, dtype: str) -> Figures:
    """Answer a family's prompts, and see that kernels did it."""
    kind = name.partition("-")[0]
    if kind not in transformers.CONFIG_MAPPING:
        raise Skipped(f"transformers {transformers.__version__} does not know {kind}")
    since = SINCE.get(kind, "")
    if since and not hasattr(transformers.CONFIG_MAPPING[kind](), since):
        raise Skipped(
            f"transformers {transformers.__version__} reads no {since}, which is set"
        )
    folder = setting.prepared or setting.scratch / "families"
    if setting.prepared and not (folder / name / NAME).exists():
        raise Skipped(f"{folder} lacks it; write it by --prepare")
    expected = prepare(name, folder)
    engine = Engine(str(folder / name), dtype=dtype, device=setting.device, **OPTIONS)
    figures: Figures = {}
    try:
        expect(engine.facts.measured.has_kernel, "attention is plain torch", figures)
        layers = open_checkpoint(str(folder / name)).model.layers
        is_mixture = any(isinstance(layer.mlp, Moe) for layer in layers)
        # Mixtures are slower than they could be, and so are some CPUs in 16 bits.
        is_slow = bool(engine.facts.measured.why_slower) and not (
            is_mixture or (setting.is_tiny and dtype != "float32")
        )
        expect(not is_slow, engine.facts.measured.why_slower, figures)
        if dtype == "float32":
            figures |= check_greedy(engine, expected.answers)
            return figures | count_graphs(engine, layers, setting)
        scored = run(engine, [score_request(answer) for answer in expected.answers])
    finally:
        engine.close()
    where = getattr(torch, dtype), torch.device(setting.device)
    theirs = score_with_transformers(folder / name, expected.answers, *where)
    ours = [choice["logprobs"]["token_logprobs"][1:] for choice in scored]
    right = [answer.logprobs for answer in expected.answers]
    counted = COUNTED if is_mixture else 1.0
    found = {
        "error": rms(ours, right, counted),
        "transformers'": rms(theirs, right, counted),
    }
    figures |= found
    is_good = found["error"] <= OF_TRANSFORMERS * found["transformers'"]
    expect(is_good, f"off by more than {OF_TRANSFORMERS} x transformers'", figures)
    return figures


def check_greedy(engine: Engine, answers: list[Answer]) -> dict[str, Figure]:
    """See that tokens are equal and logprobs close."""
    worst = 0.0
    found = run(engine, [greedy_request(answer) for answer in answers])
    for answer, choice in zip(answers, found, strict=True):
        expect(choice["token_ids"] == answer.ids, "other tokens than transformers'")
        logprobs = choice["logprobs"]
        rows = zip(
            answer.logprobs,
            logprobs["token_logprobs"][1:],
            answer.best,
            logprobs["top_logprobs"][1:],
            strict=True,
        )
        for right, ours, best, top in rows:
            values = list(top.values())[:NUM_BEST]
            pairs = [(right, ours), *zip(best, values, strict=True)]
            worst = max(worst, *(abs(a - b) for a, b in pairs))
    expect(
        worst <= TOLERANCE,
        f"logprobs are off by more than {TOLERANCE}",
        {"error": worst},
    )
    return {"error": worst}


def count_graphs(engine: Engine, layers: Sequence[Layer], setting: Setting) -> Figures:
    """See that decode steps were replayed, where they can be captured."""
    graphs = engine.pipeline.graphs
    captured = (
        [] if graphs is None else [rows for rows, each in graphs.graphs.items() if each]
    )
    is_due = can_capture(layers) and not setting.is_tiny
    # One is captured as the engine starts, for the most rows; the answers' steps have fewer.
    expect(len(captured) >= 2 if is_due else not captured, f"graphs of {captured} rows")
    return {"graphs": len(captured)}


def greedy_request(answer: Answer) -> dict[str, Any]:
    how = {"temperature": 0, "ignore_eos": True, "echo": True, "return_token_ids": True}
    return {
        "prompt": answer.prompt,
        "max_tokens": len(answer.ids),
        "logprobs": NUM_BEST,
        **how,
    }


def score_request(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt + answer.ids,
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
    }


def run(engine: Engine, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each request's only choice, in order."""
    found: dict[int, dict[str, Any]] = {}
    for record in engine.run(requests):
        expect(record.error is None, f"a row failed: {record.error}")
        assert record.result is not None, "a row without error"
        (found[record.line.number],) = record.result["choices"]
    return [found[number] for number in range(1, len(requests) + 1)]


def rms(ours: list[list[float]], right: list[list[float]], counted: float) -> float:
    """Return the RMS of the smallest differences; `counted` is their share of all."""
    pairs = [
        (a, b)
        for x, y in zip(ours, right, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    squares = sorted((a - b) ** 2 for a, b in pairs)
    smallest = squares[: math.ceil(counted * len(squares))]
    return math.sqrt(sum(smallest) / len(smallest))
