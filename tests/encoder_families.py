"""Small configs of encoders, of encoders with decoders, and of decoders that pool.

A name is a model_type, or one with a variant behind a colon; the value holds the class
that makes the model, and the fields that differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.conftest import SHAPE, family_config

VOCAB = 300
ENDS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
_SIZES = SHAPE | ENDS | {"intermediate_size": 96, "pad_token_id": 0}
_DISTIL = SHAPE | {"hidden_dim": 96, "pad_token_id": 0}
_RANKED = {"num_labels": 3}
_WINDOWS = _SIZES | {"local_attention": 10, "num_hidden_layers": 5, "norm_bias": True}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _SIZES),
    "bert:act": (
        "BertModel",
        _SIZES | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    ),
    "bert:causal": ("BertModel", _SIZES | {"is_decoder": True}),
    "bert:scores": ("BertForSequenceClassification", _SIZES | _RANKED),
    "roberta": ("RobertaModel", _SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "roberta:scores": ("RobertaForSequenceClassification", _SIZES | {"num_labels": 1}),
    "xlm-roberta": (
        "XLMRobertaModel",
        _SIZES | {"pad_token_id": 1, "type_vocab_size": 1},
    ),
    "xlm-roberta:scores": (
        "XLMRobertaForSequenceClassification",
        _SIZES | {"num_labels": 1},
    ),
    "camembert": ("CamembertModel", _SIZES | {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBertModel", _DISTIL),
    "distilbert:scores": ("DistilBertForSequenceClassification", _DISTIL | _RANKED),
    "mpnet": ("MPNetModel", _SIZES | {"pad_token_id": 1}),
    "mpnet:scores": ("MPNetForSequenceClassification", _SIZES | _RANKED),
    "nomic_bert": ("NomicBertModel", _SIZES),
    "nomic_bert:scores": ("NomicBertForSequenceClassification", _SIZES | _RANKED),
    "modernbert": ("ModernBertModel", _SIZES | {"local_attention": 10}),
    "modernbert:bias": (
        "ModernBertModel",
        _WINDOWS | {"attention_bias": True, "mlp_bias": True},
    ),
    "modernbert:scores": ("ModernBertForSequenceClassification", _WINDOWS | _RANKED),
    "modernbert:mean": (
        "ModernBertForSequenceClassification",
        _WINDOWS | {"classifier_pooling": "mean", "classifier_bias": True},
    ),
}
# Decoders whose norms, positions and biases move to the encoder, by their names in conftest.
# Those whose tokens see what follows them: a field added to a config of conftest.
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"use_bidirectional_attention": True},
    "qwen2-window": {"is_causal": False},
    "llama": {"is_causal": False},
}
DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "gpt2",
    "opt-bare",
    "bloom",
    "falcon-alibi",
    "gpt_neox",
    "phi",
    "mixtral",
    "gpt_oss",
    "olmo2",
    "mpt",
)
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 32,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
PAIRS: dict[str, dict[str, Any]] = {
    "t5": _T5 | {"feed_forward_proj": "relu"},
    "t5:untied": _T5 | {"tie_word_embeddings": False},
    "mt5": _T5 | {"tie_word_embeddings": False},
    "umt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "bart:untied": _BART | {"tie_word_embeddings": False},
    "mbart:untied": _BART | {"tie_word_embeddings": False},
}


def make_encoder(name: str, maker: str = "") -> Any:
    """Build the small random model of a name of ENCODERS or PAIRS.

    Args:
        maker: the class that makes it; "": that of the name.
    """
    kind = name.partition(":")[0]
    own, fields = ENCODERS.get(name) or ("AutoModelForSeq2SeqLM", PAIRS.get(name, {}))
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(7)
    made = getattr(transformers, maker or own)
    return _spread(made.from_config(config) if own.startswith("Auto") else made(config))


def make_decoder(name: str, kind: str, **fields: Any) -> Any:
    """Build a decoder of conftest's FIELDS without a head, or with one that scores classes.

    Args:
        kind: "Model", "ForCausalLM" or "ForSequenceClassification".
        fields: of the config, which its class makes others of.
    """
    config = family_config(name)
    if fields:
        config = type(config)(**config.to_dict() | fields)
    config.tie_word_embeddings = False
    config.num_labels = 3
    torch.manual_seed(7)
    auto = "AutoModel" + kind.removeprefix("Model")
    model = getattr(transformers, auto).from_config(config)
    # transformers takes sdpa, which leaves its sinks out
    if config.model_type == "gpt_oss":
        model.config._attn_implementation = "eager"
    return _spread(model)


def _spread(model: Any) -> Any:
    """Put every parameter far from 0 and 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_()
    return model.eval()


def save(model: Any, folder: Path, files: dict[str, Any] | None = None) -> Path:
    """Save a model, and JSON files beside it."""
    import json

    model.save_pretrained(folder)
    for name, fields in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(fields))
    return folder
