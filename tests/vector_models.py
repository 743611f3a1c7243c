"""Tiny encoders with random weights, and a tokenizer of words, for tests of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_words(folder: Path) -> Any:
    """Save a tokenizer of BERT's kind, whose words are w0 to w199; return transformers' own."""
    vocab = {piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}
    found = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad", "unk", "cls", "sep", "mask")
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=found,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": piece for name, piece in zip(names, SPECIAL, strict=True)},
    )
    hf.save_pretrained(folder)
    return hf


def save_bert(folder: Path, num_labels: int = 0) -> tuple[Any, Any]:
    """Save a tiny BERT; return it and its tokenizer.

    Args:
        num_labels: of a head that scores; 0: it has none.
    """
    torch.manual_seed(num_labels)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        num_labels=num_labels or 2,
        initializer_range=0.3,
    )
    kind = (
        transformers.BertForSequenceClassification
        if num_labels
        else transformers.BertModel
    )
    model = kind(config).eval()
    model.save_pretrained(folder)
    return model, save_words(folder)


def mean_vectors(model: Any, hf: Any, texts: list[str]) -> Any:
    """Return the means of the last hidden states, (texts, size), as transformers has them."""
    found = []
    with torch.no_grad():
        for text in texts:
            found.append(
                model(**hf(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            )
    return torch.stack(found).numpy()
