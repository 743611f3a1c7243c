"""Writes the tokenizer of a GGUF file as the transformers files that it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import processors

from fminfer.core.errors import CheckpointError
from fminfer.text.gguf_vocabulary import (
    Json,
    Metadata,
    StoredVocabulary,
    build_byte_level,
    build_scored_merges,
    build_unigram,
    require_cuts,
)

KINDS = ("gpt2", "llama", "t5")  # of tokenizer.ggml.model
TEMPLATE = "tokenizer.chat_template"
# Keys of tokenizer_config.json → names of special tokens.
_SPECIALS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Tokens that end a turn. A file names one of them at most; a template may write several.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)
# another one, except beside <|return|>, where it ends a part of a turn
_END = "<|end|>"
# Keys of generation_config.json → of general.sampling.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def write_tokenizer_files(metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    vocabulary = StoredVocabulary.read(metadata)
    kind = vocabulary.find_field("model")
    if kind not in KINDS:
        fault = (
            "no tokenizer"
            if kind in (None, "none", "no_vocab")
            else f"one of the kind {kind!r}"
        )
        raise CheckpointError(
            f"the GGUF file holds {fault}, and only {', '.join(KINDS)} are read. Name the "
            "folder or hub id of the original model by --tokenizer"
        )
    cuts = require_cuts(vocabulary.find_field("pre")) if kind == "gpt2" else None
    vocabulary.check_counts()
    if cuts is not None:
        backend, pieces = build_byte_level(vocabulary, cuts)
    else:
        backend, pieces = (build_scored_merges if kind == "llama" else build_unigram)(
            vocabulary
        )
    adds_bos = kind == "llama" if cuts is None else cuts.adds_bos
    before = (
        vocabulary.find_special_token("bos")
        if vocabulary.find_field("add_bos_token", adds_bos)
        else None
    )
    behind = (
        vocabulary.find_special_token("eos")
        if vocabulary.find_field("add_eos_token", kind == "t5")
        else None
    )
    first, second = (
        [piece for piece in (before, text, behind) if piece is not None]
        for text in ("$A", "$B")
    )
    special = {
        piece: vocabulary.ids[piece] for piece in (before, behind) if piece is not None
    }
    special_ids = [*special.items()]
    backend.post_processor = processors.TemplateProcessing(
        first, first + second, special_ids
    )
    content: dict[str, Any] = json.loads(backend.to_str())
    content["added_tokens"] = vocabulary.make_added_tokens()
    content["model"] |= pieces
    adds = {"add_bos_token": before is not None, "add_eos_token": behind is not None}
    _write_json(folder / "tokenizer.json", content)
    _write_json(
        folder / "tokenizer_config.json",
        _drop_none_values(_make_config(vocabulary) | adds),
    )
    write_generation_config(metadata, folder)


def write_generation_config(metadata: Metadata, folder: Path) -> None:
    """Write generation_config.json, which needs no tokenizer of a kind that is read."""
    vocabulary = StoredVocabulary.read(metadata)
    template = "".join(_find_templates(metadata).values())
    ends = _TURN_ENDS if "<|return|>" in template else (*_TURN_ENDS, _END)
    eos = [vocabulary.find_special_id(name) for name in ("eos", "eot", "eom")]
    eos += [vocabulary.ids.get(end) for end in ends if end in template]
    fields = {
        name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()
    } | {
        "bos_token_id": vocabulary.find_special_id("bos"),
        # An id that is no token is written all the same: loading then says so.
        "eos_token_id": [
            token_id for token_id in dict.fromkeys(eos) if token_id is not None
        ]
        or vocabulary.find_field("eos_token_id"),
        "pad_token_id": vocabulary.find_special_id("padding"),
    }
    _write_json(folder / "generation_config.json", _drop_none_values(fields))


def _make_config(vocabulary: StoredVocabulary) -> Json:
    templates = _find_templates(vocabulary.metadata)
    several = [{"name": name, "template": each} for name, each in templates.items()]
    return {
        key: vocabulary.find_special_token(name) for key, name in _SPECIALS.items()
    } | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": templates["default"]
        if [*templates] == ["default"]
        else several or None,
    }


def _find_templates(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates by their names; the one without a name is "default"."""
    return {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if f"{key}.".startswith(f"{TEMPLATE}.") and isinstance(text, str)
    }


def _drop_none_values(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
