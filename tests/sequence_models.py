"""Small models with an encoder and a decoder, and a tokenizer in T5's manner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.encoder_families import make_encoder

TEXTS = [
    "translate English to German: The house is wonderful.",
    "summarize: state authorities dispatched emergency crews on Tuesday to survey the damage.",
    "question: Where is the attic? context: The attic is above the den, and the porch is south.",
    "é 東 \n <extra_id_0> walks in <extra_id_1> park",
    "a",
]


def save_tokenizer(folder: Path, num_sentinels: int = 4) -> Any:
    """Save a Unigram tokenizer that ends each text with </s> and writes spaces as `▁`."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    sentinels = [f"<extra_id_{number}>" for number in range(num_sentinels)]
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>", *sentinels],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=sentinels,
    )
    hf.save_pretrained(folder)
    return hf


def save_sequence_model(name: str, folder: Path, *, ends_by_itself: bool = True) -> Any:
    """Save a model of encoder_families.PAIRS with a tokenizer; return it.

    Args:
        ends_by_itself: its texts have lengths of their own.
    """
    model = make_encoder(name)
    model.generation_config.decoder_start_token_id = (
        model.config.decoder_start_token_id
    ) = 0
    model.generation_config.forced_eos_token_id = model.config.forced_eos_token_id = (
        None
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = 1
    model.generation_config.pad_token_id = model.config.pad_token_id = 0
    with torch.no_grad():
        if ends_by_itself:
            model.lm_head.weight[1] *= 2
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
