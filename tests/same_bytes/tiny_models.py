"""Tiny models whose attention, products and routers differ, with sensitive weights.

Weights are scaled by the number of inputs. So scores of attention differ by about 2,
and logits by about 2 as well: neither one key nor one token stands out, and a bit that
differs in one layer shows in the logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tests.conftest import SHAPE, save_byte_tokenizer
from tests.further_families import LATENT, SIGMOID
from tests.sequence_models import save_sequence_model
from tests.vector_models import SPECIAL, WORDS, save_words

CONTEXT = 1024
EOS = 290  # of decoders; it has no piece
GAIN = 1.4
Kind = Literal["decoder", "encoder-decoder", "vectors"]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A config, and how its checkpoint is stored."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    stored: torch.dtype = torch.float32
    kind: Kind = "decoder"

    def save(self, folder: Path) -> None:
        """Save the model with its tokenizer."""
        if self.kind == "encoder-decoder":
            save_sequence_model(self.model_type, folder)
            return

        fields = SHAPE | {"max_position_embeddings": CONTEXT} | self.fields
        config = transformers.AutoConfig.for_model(self.model_type, **fields)
        torch.manual_seed(11)
        is_decoder = self.kind == "decoder"
        auto = (
            transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
        )
        model = auto.from_config(config)
        spread_weights(model)
        model.to(self.stored).save_pretrained(folder)
        if is_decoder:
            save_byte_tokenizer(folder)
        else:
            save_words(folder)


def heads(
    num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int = 64
) -> dict[str, Any]:
    """Return fields of a decoder's sizes."""
    return {
        "hidden_size": hidden_size,
        "eos_token_id": EOS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 128,
    }


# Names end with the query heads of each KV head, and the size of a head.
MODELS: dict[str, TinyModel] = {
    "llama-3x64": TinyModel("llama", heads(6, 2, 64, 96)),
    "llama-4x128": TinyModel("llama", heads(4, 1, 128), stored=torch.bfloat16),
    "qwen3-5x32": TinyModel("qwen3", heads(5, 1, 32, 160), stored=torch.bfloat16),
    "gemma2-2x80": TinyModel(
        "gemma2",
        heads(4, 2, 80)
        | {
            "query_pre_attn_scalar": 80,
            "sliding_window": 150,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3-4x64": TinyModel(
        "gemma3_text",
        heads(4, 1, 64)
        | {
            "query_pre_attn_scalar": 64,
            "sliding_window": 37,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral-2x32": TinyModel(
        "mixtral",
        heads(4, 2, 32)
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek_v3-latent": TinyModel(
        "deepseek_v3",
        LATENT | SIGMOID | {"first_k_dense_replace": 1, "eos_token_id": EOS},
    ),
    "t5-1x32": TinyModel("t5", kind="encoder-decoder"),
    "bert-1x64": TinyModel(
        "bert",
        {
            "hidden_size": 128,
            "num_attention_heads": 2,
            "intermediate_size": 160,
            "vocab_size": len(SPECIAL) + len(WORDS),
            "pad_token_id": 0,
        },
        kind="vectors",
    ),
}
DTYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}


def spread_weights(model: Any) -> None:
    """Draw every weight anew, so that each layer changes what comes out."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" in name:
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, GAIN / parameter.shape[-1] ** 0.5)
