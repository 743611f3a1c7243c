"""Of phase 3: what a GPU answers beside the CPU: weights in blocks, GGUF files, constraints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.cases import Case, Figures, Setting, expect, save_once
from fminfer import Engine
from fminfer.compute.values.spec import Moe
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.stored.stored_tensors import BLOCKS
from fminfer.models.stored.tensor_table import read_weight_file
from tests.conftest import make_model, save_byte_tokenizer
from tests.models.test_oracle import mixed_requests

SAMPLES = Path(__file__).parents[2] / "tests" / "data" / "gguf"
TOLERANCE = 1e-4
# Of a mixture's rows: where two experts are as good, rounding chooses either.
APART = 0.05
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "budget": 4096}
NAMES = {
    "cuda": ("llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "gemma2"),
    "cpu": ("llama",),
}
REFUSED = "fallback-iq4_xs.gguf"
FILES = {
    "cuda": tuple(sorted(path.name for path in SAMPLES.glob("*.gguf"))),
    "cpu": ("kforms-q4_k_m.gguf",),
}
HELD = ("blocks", "floats")  # how a GPU has the weights of a file in blocks
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "stars": {"type": "integer"}},
    "required": ["label", "stars"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[a-f]{3}[0-9]+x"}},
    {"structured_outputs": {"json": SCHEMA}},
    {},
)
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.7, "top_k": 30},
    {"temperature": 1.2, "seed": 7, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1, "seed": 8, "presence_penalty": 0.6, "logit_bias": {"40": 3}},
)


def cases(setting: Setting) -> Iterator[Case]:
    for name in NAMES[setting.device]:
        for bits in ("int8", "int4"):
            for held in HELD:
                run = partial(check_quantized, setting, name, bits, held)
                yield Case(f"{name} {bits} in {held}", run)
    names = [name for name in FILES[setting.device] if name != REFUSED]
    for name in names:
        types = {*read_weight_file(SAMPLES / name).types.values()}
        for held in HELD if types & BLOCKS.keys() else HELD[-1:]:
            yield Case(f"{name} in {held}", partial(check_file, setting, name, held))
    for name in NAMES[setting.device]:
        run = partial(check_constraints, setting, name)
        yield Case(f"{name} constrained", run)


def check_quantized(setting: Setting, name: str, bits: str, held: str) -> Figures:
    folder = save_model(setting, name)
    options = {"quantize": bits, "held": held}
    return compare(setting, folder, mixed_requests(), options)


def check_file(setting: Setting, name: str, held: str) -> Figures:
    """Compare a file of llama.cpp's; some of them have 29 tokens."""
    rows = [
        row | {"prompt": [3 + token % 20 for token in row["prompt"]]}
        for row in mixed_requests()
    ]
    return compare(setting, SAMPLES / name, rows, {"held": held})


def check_constraints(setting: Setting, name: str) -> Figures:
    """Compare rows of every constraint, drawn in every way, that are in one batch."""
    folder = save_model(setting, name)
    rows = [
        {"prompt": f"Row {number}:", "max_tokens": 24, "logprobs": 2} | draw | inside
        for number, (draw, inside) in enumerate(
            (draw, inside) for draw in DRAWS for inside in CONSTRAINTS
        )
    ]
    return compare(setting, folder, rows, {})


def save_model(setting: Setting, name: str) -> Path:
    def save(folder: Path) -> None:
        make_model(name).save_pretrained(folder)
        save_byte_tokenizer(folder)
        # Constrained answers need an end: a byte that no text has.
        (folder / "generation_config.json").write_text('{"eos_token_id": 255}')

    return save_once(setting.scratch / "beside_cpu" / name, save)


def compare(
    setting: Setting, model: Path, rows: list[Any], options: dict[str, Any]
) -> Figures:
    """See that tokens are those of plain torch on the CPU, and logprobs close to its."""
    held = options.pop("held", "floats")
    right = answer(model, rows, device="cpu", kernels="off", **options)
    with patch("fminfer.plan.planning._has_room", return_value=held == "floats"):
        found = answer(model, rows, device=setting.device, kernels="require", **options)
    worst = 0.0
    num_apart = 0
    told: Figures = {}
    for theirs, ours in zip(right, found, strict=True):
        error = max(map(abs, map(sub, ours["logprobs"], theirs["logprobs"])))
        if ours["tokens"] == theirs["tokens"] and error <= TOLERANCE:
            worst = max(worst, error)
            continue
        num_apart += 1
        told = {"row": theirs["row"], "off by": error, "text": ours["text"]}
    layers = open_checkpoint(str(model)).model.layers
    is_mixture = any(isinstance(layer.mlp, Moe) for layer in layers)
    figures: Figures = {"error": worst, "rows apart": num_apart}
    allowed = APART * len(right) if is_mixture else 0
    expect(num_apart <= allowed, "other answers than the CPU's", figures | told)
    return figures


def answer(model: Path, rows: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Return text, tokens and logprobs of each choice, in order."""
    engine = Engine(str(model), **OPTIONS, **options)
    try:
        records = sorted(engine.run(rows), key=lambda record: record.line.number)
    finally:
        engine.close()
    failed = [record.error for record in records if record.error]
    expect(not failed, f"a row failed: {failed[:1]}")
    return [
        {
            "row": record.line.number,
            "text": choice.fields["text"],
            "tokens": choice.fields["logprobs"]["tokens"],
            "logprobs": [
                value or 0.0 for value in choice.fields["logprobs"]["token_logprobs"]
            ],
        }
        for record in records
        for choice in record.choices
    ]
