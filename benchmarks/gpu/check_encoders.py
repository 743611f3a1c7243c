"""Of phase 3: models with an encoder beside transformers, with kernels required, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, expect
from fminfer import Engine
from tests.encoder_families import ENCODERS, PAIRS, make_encoder

NAMES = {
    "cuda": ("t5", "umt5", "bart", "bert", "mpnet", "modernbert"),
    "cpu": ("t5", "bert"),
}
TOLERANCE = 1e-4
NEW = 12
OPTIONS: dict[str, Any] = {"kernels": "require", "block_size": 16, "budget": 4096}


def cases(setting: Setting) -> Iterator[Case]:
    for name in NAMES[setting.device]:
        if name in ENCODERS or name in PAIRS:
            yield Case(f"{name} float32", partial(check_encoder, setting, name))


def check_encoder(setting: Setting, name: str) -> Figures:
    """Compare greedy texts, or vectors."""
    folder = setting.scratch / "encoders" / name
    model = make_encoder(name)
    if name == "umt5":
        attention = model.decoder.block[0].layer[0].SelfAttention
        told = f"transformers {transformers.__version__} lets it see later tokens"
        if not attention.is_causal:
            raise Skipped(told)
    if name in PAIRS:
        model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(folder)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in (1, 16, 33, 60, 100)]
    how = {"dtype": "float32", "device": setting.device, "skip_tokenizer_init": True}
    engine = Engine(str(folder), **OPTIONS, **how)
    try:
        expect(engine.facts.measured.has_kernel, "attention is plain torch")
        if name in ENCODERS:
            return _check_vectors(engine, model, prompts)
        return _check_texts(engine, model, prompts)
    finally:
        engine.close()


def _check_vectors(engine: Engine, model: Any, prompts: list[list[int]]) -> Figures:
    found = engine.embed(prompts)
    worst = 0.0
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        worst = max(worst, (hidden - torch.from_numpy(vector)).abs().max().item())
    expect(
        worst <= TOLERANCE,
        f"numbers are off by more than {TOLERANCE}",
        {"error": worst},
    )
    return {"error": worst}


def _check_texts(engine: Engine, model: Any, prompts: list[list[int]]) -> Figures:
    ask = {"max_tokens": NEW, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    requests = [{"prompt": each, "return_token_ids": True} | ask for each in prompts]
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    start = (engine.intake.limits.start_ids or ())[:1]
    worst = 0.0
    for prompt, record in zip(prompts, records, strict=True):
        expect(record.error is None, f"a row failed: {record.error}")
        choice = record.choices[0].fields
        ids = choice["token_ids"]
        with torch.inference_mode():
            fed = torch.tensor([[*start, *ids[:-1]]])
            logits = model(
                input_ids=torch.tensor([prompt]), decoder_input_ids=fed
            ).logits[0]
        right = logits.log_softmax(-1)
        expect(right.argmax(-1).tolist() == ids, "other tokens than transformers'")
        told = zip(ids, choice["logprobs"]["token_logprobs"], strict=True)
        worst = max(
            worst, *(abs(right[n, i].item() - v) for n, (i, v) in enumerate(told))
        )
    expect(
        worst <= TOLERANCE,
        f"logprobs are off by more than {TOLERANCE}",
        {"error": worst},
    )
    return {"error": worst}
