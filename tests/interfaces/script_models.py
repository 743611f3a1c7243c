"""Tiny models that the scripts of other tools run with.

python -m tests.interfaces.script_models FOLDER    # saves them, to run the originals by hand

Heads are of sizes that vLLM has kernels for.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

import fminfer

DEMO_FOLDER = Path(fminfer.__file__).parent / "demo_model"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "and", "is", "in", "dog", "cat", "sun", "house", "red", "blue"]
MODULES = ("Transformer", "Pooling", "Normalize")


def build_models(folder: Path) -> dict[str, str]:
    """Save the models that scripts name by environment variables; return these."""
    save_llama(folder / "llama")
    save_bert(folder / "classes", num_labels=3)
    save_bert(folder / "scores", num_labels=1)
    for name, modules in {"vectors": MODULES[:2], "normed": MODULES}.items():
        save_bert(folder / name)
        save_modules(folder / name, modules)
    shutil.copytree(folder / "vectors", folder / "prompted")
    prompts = {"query": "the red ", "document": "a "}
    settings = folder / "prompted" / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"prompts": prompts, "similarity_fn_name": "dot"}))
    return {
        "LLAMA": str(folder / "llama"),
        "CLASSES": str(folder / "classes"),
        "SCORES": str(folder / "scores"),
        "VECTORS": str(folder / "vectors"),
        "NORMED": str(folder / "normed"),
        "PROMPTED": str(folder / "prompted"),
    }


def save_llama(folder: Path) -> None:
    """Save a llama with random weights, and the demo model's tokenizer and template."""
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(DEMO_FOLDER)
    config.hidden_size = 128
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = 64
    config.initializer_range = 0.1
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def save_bert(folder: Path, num_labels: int = 0) -> None:
    """Save a BERT with random weights, and a tokenizer of few words."""
    torch.manual_seed(num_labels)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
        num_labels=num_labels or 2,
        initializer_range=0.3,
    )
    kind = transformers.BertModel
    if num_labels:
        kind = transformers.BertForSequenceClassification
    kind(config).save_pretrained(folder)

    vocab = {piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}
    words = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    pieces = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=64,
        **{f"{name}_token": piece for name, piece in pieces.items()},
    )
    hf.save_pretrained(folder)


def save_modules(folder: Path, modules: tuple[str, ...]) -> None:
    """Make a folder one of sentence-transformers, with mean pooling."""
    entries = []
    for number, name in enumerate(modules):
        path = f"{number}_{name}" if number else ""
        (folder / path).mkdir(exist_ok=True)
        kind = f"sentence_transformers.models.{name}"
        entries.append({"idx": number, "name": str(number), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(entries))
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = {"max_seq_length": 64, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    print(json.dumps(build_models(Path(sys.argv[1]))))
