"""Models with random weights that float16 holds exactly, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LENGTHS = (12, 20)
TEXTS = (
    "Hello, world! It's 2024.",
    " two  spaces\nand 12345 lines\n\n",
    "naïve café – 東京 🙂",
)


ASCII_TEXT = "the winter in the north and the sun"
NO_MATTER = (
    "transformers_version",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "dtype",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "_name_or_path",
    "use_cache",
    "initializer_range",
)


def make_model(model_type: str, fields: dict[str, Any], seed: int) -> Any:
    """Make a model in float32 whose every parameter is random, and not small."""
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            _fill(module, name, weight, config, generator)
        for name, buffer in module.named_buffers(recurse=False):
            if name == "e_score_correction_bias":
                _set(buffer, 0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def _fill(
    module: nn.Module,
    name: str,
    weight: Tensor,
    config: Any,
    generator: torch.Generator,
) -> None:
    """Draw a parameter: norms around one, biases that are not zero, products of size one."""
    values = torch.randn(weight.shape, generator=generator)
    kind = type(module).__name__
    if "Norm" in kind and name == "weight":
        values = 0.2 * values + (0.0 if config.model_type.startswith("gemma") else 1.0)
    elif isinstance(module, nn.Embedding):
        values = 0.5 * values
    elif weight.dim() == 1 or name.endswith("bias"):
        values = 0.2 * values
    else:
        has_inputs_first = kind in ("Conv1D", "GptOssExperts")
        values /= weight.shape[-2 if has_inputs_first else -1] ** 0.5
        # logits that differ
        values *= 2.0 if weight.shape[0] == config.vocab_size else 1.0
    _set(weight, values)


def _set(weight: Tensor, values: Tensor) -> None:
    """Put values into a parameter, rounded to float16."""
    with torch.no_grad():
        weight.copy_(values.half().float())


def rounded(values: Tensor) -> list[float]:
    """Return numbers with seven digits."""
    return [float(f"{each:.7g}") for each in values.flatten().tolist()]


def scored_prompts(model: Any, num_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return prompts of random tokens, with logprobs of what comes next and what is
    likeliest."""
    generator = torch.Generator().manual_seed(seed)
    return [
        _scored(model, torch.randint(num_tokens, (length,), generator=generator))
        for length in LENGTHS
    ]


def _scored(model: Any, ids: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    assert logits.dtype == torch.float32 and logits.isfinite().all(), (
        "a sample has finite logits"
    )
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.max(-1)
    return {
        "ids": ids.tolist(),
        "next_logprobs": rounded(logprobs[:-1].gather(1, ids[1:, None])),
        "argmax": best.indices.tolist(),
        "argmax_logprobs": rounded(best.values),
    }


def slim_config(model: Any) -> dict[str, Any]:
    """Return a config without what every one of transformers has."""
    return {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in NO_MATTER
    }


def tokenized_texts(
    folder: Path, special: Sequence[str], is_ascii: bool
) -> list[dict[str, Any]]:
    """Return texts and their tokens, without and with what the tokenizer puts around them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    eos = tokenizer.eos_token
    texts = [ASCII_TEXT] if is_ascii else [*TEXTS]
    texts += [] if is_ascii else [f"one{eos} two{eos}\nthree"]
    texts += ["".join(f"{each}  a{each}\nb" for each in special)] if special else []
    return [
        {
            "text": text,
            "ids": tokenizer(text, add_special_tokens=False).input_ids,
            "ids_with_special": tokenizer(text).input_ids,
        }
        for text in texts
    ]
