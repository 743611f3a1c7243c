"""Small models of every family, made once, and transformers as the oracle beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fminfer.models.families import FAMILIES

VOCAB = 300
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {"intermediate_size": 128, "num_key_value_heads": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 24, "head_dim": 16},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma": {"intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 32},
    "phi": {"intermediate_size": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 128},
    "gptj": {"rotary_dim": 8},
    "bloom": {"seq_length": 256},
}


def make_model(model_type: str) -> Any:
    """Build a small random model in float32 whose every parameter is far from 0 and 1."""
    config = transformers.AutoConfig.for_model(model_type, **(SHAPE | FIELDS[model_type]))
    torch.manual_seed(7)
    model = getattr(transformers, FAMILIES[model_type].class_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the 256 bytes as a checkpoint's own."""
    from fminfer.tokenizer import _byte_tokenizer

    transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer()).save_pretrained(folder)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """Give (folder, transformers model) of one family."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Give (folder, transformers model) of the llama family, for what no family changes."""
    folder = tmp_path_factory.mktemp("llama-one")
    model = make_model("llama")
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder, model
