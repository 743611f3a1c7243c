"""Layers streamed to the GPU (--offload): compared in phase 3, timed in phase 6."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Figures, Setting, expect, save_once
from fminfer import Engine
from tests.conftest import make_model, save_byte_tokenizer
from tests.models.test_oracle import mixed_requests

NAMES = ("llama", "mixtral", "deepseek_v3")
PLACES = {"cuda": ("cpu", "disk"), "cpu": ("disk",)}
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "budget": 4096}
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 6}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


def cases(setting: Setting) -> Iterator[Case]:
    for place in PLACES[setting.device]:
        for name in NAMES:
            yield Case(
                f"{name} streamed from {place}",
                partial(check_family, setting, name, place),
            )


def check_family(setting: Setting, name: str, place: str) -> Figures:
    """Compare answers, draws included, with those of the whole model."""

    def save(folder: Path) -> None:
        make_model(name).save_pretrained(folder)
        save_byte_tokenizer(folder)

    folder = save_once(setting.scratch / "streams" / name, save)
    whole, streamed = (_answers(setting, folder, offload) for offload in ("off", place))
    worst = 0.0
    for one, other in zip(whole, streamed, strict=True):
        expect(
            one["tokens"] == other["tokens"],
            "other tokens than those of the whole model",
        )
        pairs = zip(one["token_logprobs"], other["token_logprobs"], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs if a is not None)])
    expect(
        worst <= TOLERANCE,
        f"logprobs are off by more than {TOLERANCE}",
        {"error": worst},
    )
    return {"error": worst}


def _answers(setting: Setting, folder: Path, offload: str) -> list[dict[str, Any]]:
    engine = Engine(str(folder), device=setting.device, offload=offload, **OPTIONS)
    try:
        expect(
            bool(engine.facts.streaming) == (offload != "off"),
            "layers that are streamed",
        )
        records = sorted(
            engine.run(mixed_requests()), key=lambda record: record.line.number
        )
        expect(not any(record.error for record in records), "a row failed")
        return [
            choice.fields["logprobs"] for record in records for choice in record.choices
        ]
    finally:
        engine.close()


def time_stream(setting: Setting, place: str) -> Figures:
    """Time passes over layers of a 7B model: their GB/s, and how long the GPU waits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(folder: Path) -> None:
        sizes = LARGE if setting.device == "cuda" else SMALL
        config = LlamaConfig(
            **sizes, vocab_size=512, num_attention_heads=sizes["hidden_size"] // 32
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)

    folder = save_once(setting.scratch / "streams" / "large", save)
    how = {"dtype": "bfloat16", "device": setting.device, "skip_tokenizer_init": True}
    engine = Engine(str(folder), offload=place, **how)
    try:
        rows = [
            {"prompt": [n % 500 + 3, n // 500], "max_tokens": 8} for n in range(1024)
        ]
        ask = {"temperature": 0, "ignore_eos": True}
        expect(
            not any(r.error for r in engine.run((r | ask for r in rows), 1024)),
            "a row failed",
        )
        (stage,) = engine.stats.stages
        streamed = engine.pipeline.plan.this_rank.streamed
        expect(streamed is not None, "layers that are streamed")
        brought = stage.num_passes * streamed.num_bytes / 1e9
        return {
            "passes": stage.num_passes,
            "GB/s brought": brought / max(stage.busy_s, 1e-9),
            "waited": stage.waited_s / max(stage.busy_s, 1e-9),
            "ms a pass": 1e3 * stage.busy_s / max(1, stage.num_passes),
        }
    finally:
        engine.close()
