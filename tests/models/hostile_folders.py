"""Changed model folders, each loaded in a fork of one warm process: 700 of them take minutes.

A change is named by its file, its place and its value, so that one can be tried by itself:

    python -m tests.models.hostile_folders [--all] [part of a name …]

A folder is refused in a sentence, or it answers. Whatever else comes is a fault: a raw
exception, a crash, a hang, much memory, a long message, or code that ran.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fminfer
from fminfer.models.known_sizes import DEMO_MODEL
from tests.gguf_building import ARRAY, SAMPLES, STRING, U32, build, entry, read, text

Change = Callable[[Path], object]
MOST_CPU_S = 5.0
MOST_WALL_S = 40.0  # other processes compute beside it
MOST_BYTES = 1 << 30  # more than a process that answers has
MOST_CHARACTERS = 2000
SEED = 77
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PROMPT = {"prompt": "Question: How?\nAnswer:", "max_tokens": 4, "temperature": 0}


class Infinity(float):
    """Written as 1e400, which JSON allows and Python reads as infinite."""


WRONG = {
    "null": None,
    "empty": "",
    "text 64": "64",
    "list": [],
    "[1]": [1],
    "object": {},
    "true": True,
    "false": False,
    "-1": -1,
    "0": 0,
    "1": 1,
    "1.5": 1.5,
    "1e400": float("inf"),
    "10**30": 10**30,
    "nan": float("nan"),
    "deep": [[[[{"a": [None]}]]]],
    "long": "x" * 100_000,
}


@dataclass(frozen=True)
class Case:
    """A folder of a kind, and what is changed in it."""

    name: str
    kind: str  # of the folder, as `make_folder` knows it
    change: Change
    request: str = "prompt"
    says: str = ""  # a pattern that its refusal must have


@dataclass
class Outcome:
    """What came of a case."""

    name: str
    status: str  # told, runs, raw, died, hangs
    text: str
    cpu_s: float
    wall_s: float
    grown_bytes: int
    ran_code: bool = False

    @property
    def fault(self) -> str:
        """What is wrong with it; "": nothing."""
        if self.ran_code:
            return "it ran code"
        if self.status not in ("told", "runs"):
            return f"{self.status}: {self.text[:300]}"
        if len(self.text) > MOST_CHARACTERS:
            return f"a message of {len(self.text)} characters: {self.text[:200]}"
        if self.cpu_s > MOST_CPU_S:
            return f"it took {self.cpu_s:.1f} s of a core ({self.text[:200]})"
        if self.grown_bytes > MOST_BYTES:
            return f"it took {self.grown_bytes >> 20} MiB ({self.text[:200]})"
        return ""


# ---- folders


def make_folder(kind: str, folder: Path) -> None:
    """Make a small model that runs."""
    if kind == "demo":
        shutil.copytree(DEMO_MODEL, folder)
    elif kind == "bin":
        from safetensors.torch import load_file

        shutil.copytree(DEMO_MODEL, folder)
        tensors = load_file(folder / "model.safetensors")
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    elif kind == "sentence":
        from tests.vector_models import save_bert

        save_bert(folder)
        _dump(
            folder / "modules.json",
            [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": "sentence_transformers.models.Transformer",
                },
                {
                    "idx": 1,
                    "name": "1",
                    "path": "1_Pooling",
                    "type": "sentence_transformers.models.Pooling",
                },
                {
                    "idx": 2,
                    "name": "2",
                    "path": "2_Normalize",
                    "type": "sentence_transformers.models.Normalize",
                },
            ],
        )
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        _dump(folder / "1_Pooling" / "config.json", pooling)
        _dump(
            folder / "sentence_bert_config.json",
            {"max_seq_length": 32, "do_lower_case": False},
        )
        _dump(
            folder / "config_sentence_transformers.json",
            {
                "prompts": {"query": "q: "},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        )
    elif kind == "gguf":
        folder.mkdir()
        shutil.copy(SAMPLES / "llama.gguf", folder / "m.gguf")
    else:
        from tests.conftest import make_model

        make_model(kind).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / file, folder)
        edit(folder, "tokenizer.json", _fit_vocabulary)


def _fit_vocabulary(content: Any) -> None:
    """Leave out the tokens that 300 rows have no place for."""
    vocab = content["model"]["vocab"]
    kept = {piece for piece, number in vocab.items() if number < 300}
    content["model"]["vocab"] = {p: n for p, n in vocab.items() if p in kept}
    pairs = [
        each if isinstance(each, list) else each.split(" ")
        for each in content["model"]["merges"]
    ]
    content["model"]["merges"] = [p for p in pairs if {p[0], p[1], p[0] + p[1]} <= kept]


def _dump(file: Path, content: Any) -> None:
    said = json.dumps(content).replace("Infinity", "1e400")
    file.write_text(said, "utf-8")


def edit(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change what a JSON file says."""
    content = json.loads((folder / name).read_text("utf-8"))
    change(content)
    _dump(folder / name, content)


def _put(content: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = new


def _drop(content: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        content = content[key]
    del content[path[-1]]


def put(name: str, path: tuple[Any, ...], new: Any) -> Change:
    return lambda folder: edit(folder, name, lambda content: _put(content, path, new))


def drop(name: str, path: tuple[Any, ...]) -> Change:
    return lambda folder: edit(folder, name, lambda content: _drop(content, path))


def update(name: str, fields: dict[str, Any]) -> Change:
    return lambda folder: edit(folder, name, lambda content: content.update(fields))


# ---- configs

CONFIG_KEYS = {
    "demo": (
        "architectures",
        "attention_bias",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "vocab_size",
        "transformers_version",
        "use_cache",
        "torch_dtype",
        "rope_scaling",
        "rope_theta",
        "quantization_config",
        "text_config",
        "is_encoder_decoder",
        "id2label",
        "auto_map",
        "num_labels",
        "layer_types",
        "sliding_window",
        "attn_implementation",
        "label2id",
        "problem_type",
        "tokenizer_class",
        "attribute_map",
        "n_positions",
        "is_causal",
    ),
    "gemma3_text": (
        "layer_types",
        "sliding_window",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "rope_parameters",
        "use_bidirectional_attention",
        "attn_logit_softcapping",
    ),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "sliding_window"),
    "gpt2": (
        "n_head",
        "n_embd",
        "n_layer",
        "n_positions",
        "activation_function",
        "n_inner",
    ),
    "phi3-long": (
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    ),
    "deepseek_v3": (
        "n_group",
        "topk_group",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "v_head_dim",
        "first_k_dense_replace",
        "n_routed_experts",
        "mlp_layer_types",
    ),
    "sentence": (
        "max_position_embeddings",
        "type_vocab_size",
        "layer_norm_eps",
        "hidden_act",
        "num_attention_heads",
        "pad_token_id",
        "sentence_transformers",
        "id2label",
    ),
}
FIELD_CHANGES: dict[str, dict[str, Any]] = {
    "hidden size 65": {"hidden_size": 65},
    "heads 3": {"num_attention_heads": 3},
    "kv heads 3": {"num_key_value_heads": 3},
    "kv heads 8": {"num_key_value_heads": 8},
    "layers 10**6": {"num_hidden_layers": 10**6},
    "layers 10**9": {"num_hidden_layers": 10**9},
    "layers 3": {"num_hidden_layers": 3},
    "vocab 10**9": {"vocab_size": 10**9},
    "vocab 100": {"vocab_size": 100},
    "vocab 2**63": {"vocab_size": 2**63},
    "positions 10**12": {"max_position_embeddings": 10**12},
    "head_dim 10**9": {"head_dim": 10**9},
    "head_dim 15": {"head_dim": 15},
    "eps -1": {"rms_norm_eps": -1.0},
    "eps 1": {"rms_norm_eps": 1},
    "sizes as floats": {"hidden_size": 64.0, "num_attention_heads": 4.0},
    "sizes as texts": {"hidden_size": "64", "num_attention_heads": "4"},
    "architecture of no model": {"architectures": ["os.system"]},
    "architecture long": {"architectures": ["x" * 100_000]},
    "model_type long": {"model_type": "x" * 100_000},
    "model_type path": {"model_type": "../../etc/passwd"},
    "dtype name": {"dtype": "float99", "torch_dtype": "float99"},
    "dtype text 64": {"dtype": "64", "torch_dtype": "64"},
    "dtype int8": {"dtype": "int8"},
    "dtype nn": {"dtype": "nn", "torch_dtype": "nn"},
    "dtype of torch": {"dtype": "ops", "torch_dtype": "ops"},
    "dtype object": {"dtype": {"": "float32", "text_config": 3}},
    "auto_map": {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    },
    "auto_map remote": {"auto_map": {"AutoConfig": "some/repo--evil.Config"}},
    "quantization gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantization own": {
        "quantization_config": {"quant_method": "fminfer", "version": 1}
    },
    "quantization own later": {
        "quantization_config": {"quant_method": "fminfer", "version": 99}
    },
    "quantization long": {"quantization_config": {"quant_method": "x" * 100_000}},
    "text_config": {"text_config": {"model_type": "llama"}},
    "text_config wrong": {"text_config": {"model_type": [1]}},
    "text_config of itself": {"text_config": {"text_config": {"text_config": {}}}},
    "encoder": {"is_encoder_decoder": True},
    "causal": {"is_causal": False},
    "layer types": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2,
    },
    "layer types wrong": {"layer_types": ["x"]},
    "label": {"id2label": {"a": "b"}},
    "labels": {"num_labels": 10**9},
    "hub keys": {"_name_or_path": "/dev/zero", "_commit_hash": "x"},
    "methods": {"to_dict": 1, "from_pretrained": 2},
    "dunder": {"__class__": "os.system", "__init__": 1, "__dict__": 3},
    "attribute map": {"attribute_map": {"hidden_size": "vocab_size"}},
    "activation": {"hidden_act": "exec"},
    "tied": {"tie_word_embeddings": "no"},
    "attn": {
        "_attn_implementation": "flash_attention_2",
        "attn_implementation": "evil/kernel",
    },
    "experts": {"num_local_experts": 10**9, "num_experts_per_tok": 2},
    "transformers version": {"transformers_version": "99.99"},
}
ROPES: dict[str, Any] = {
    "text": "linear",
    "no type": {"factor": 2.0},
    "unknown type": {"rope_type": "spiral", "factor": 2.0},
    "factor 0": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4},
    "factor text": {"rope_type": "linear", "factor": "2", "rope_theta": 1e4},
    "factor nan": {"rope_type": "linear", "factor": float("nan"), "rope_theta": 1e4},
    "factor -1": {"rope_type": "dynamic", "factor": -1, "rope_theta": 1e4},
    "theta 0": {"rope_type": "default", "rope_theta": 0},
    "theta -1": {"rope_type": "default", "rope_theta": -1},
    "theta text": {"rope_type": "default", "rope_theta": "10000"},
    "theta huge": {"rope_type": "default", "rope_theta": 10**400},
    "theta list": {"rope_type": "default", "rope_theta": [1]},
    "yarn bare": {"rope_type": "yarn"},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "beta_fast": 0,
        "beta_slow": 0,
    },
    "yarn 0": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 0,
    },
    "llama3 bare": {"rope_type": "llama3", "factor": 8.0},
    "llama3 0": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1,
        "high_freq_factor": 1,
        "original_max_position_embeddings": 8192,
    },
    "longrope bare": {"rope_type": "longrope"},
    "longrope short": {
        "rope_type": "longrope",
        "factor": 2,
        "long_factor": [1],
        "short_factor": [],
        "original_max_position_embeddings": 512,
        "rope_theta": 1e4,
    },
    "longrope text": {
        "rope_type": "longrope",
        "long_factor": "abc",
        "short_factor": "abc",
        "original_max_position_embeddings": "512",
    },
    "nested": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    "nested wrong": {"full_attention": 3, "sliding_attention": None},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": -1},
    "partial huge": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1e9,
    },
    "type list": {"rope_type": ["linear"], "type": {}},
    "llama 4": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
}
EOS = {
    "-1": -1,
    "vocab": 407,
    "2**70": 2**70,
    "true": True,
    "text": "0",
    "1.5": 1.5,
    "[-1]": [-1],
    "[0, 9999]": [0, 9999],
    "[]": [],
    "[[0]]": [[0]],
    "object": {},
    "[text]": ["0"],
    "many": list(range(100_000)),
}
BROKEN_JSON = {
    "empty": b"",
    "blank": b" \n",
    "brackets": b"[" * 50_000_000,
    "brackets closed": b"[" * 200_000 + b"]" * 200_000,
    "braces": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "number": b"1" * 5000,
    "nul": b"\0" * 100,
    "utf-16": '{"model_type": "llama"}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "latin-1": b'{"model_type": "\xe9"}',
    "surrogate": b'{"model_type": "\\ud800"}',
    "cut": b'{"model_type": "lla',
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "comment": b'// {"model_type": "llama"}\n{}',
    "page": b"<!DOCTYPE html><html></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "gzip": b"\x1f\x8b\x08" + b"\0" * 99,
}


def config_cases() -> Iterator[Case]:
    for kind, keys in CONFIG_KEYS.items():
        for key in keys:
            for label, new in WRONG.items():
                yield Case(
                    f"config {kind} {key} {label}",
                    kind,
                    put("config.json", (key,), new),
                )
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    for key in config:
        yield Case(f"config demo {key} missing", "demo", drop("config.json", (key,)))
    for label, fields in FIELD_CHANGES.items():
        yield Case(f"config fields {label}", "demo", update("config.json", fields))
    for label, rope in ROPES.items():
        for key in ("rope_parameters", "rope_scaling"):
            for kind in ("demo", "gemma3_text"):
                yield Case(
                    f"config {kind} {key} is {label}",
                    kind,
                    put("config.json", (key,), rope),
                )
    for label, eos in EOS.items():
        for name in ("config.json", "generation_config.json"):
            says = (
                "eos"
                if label in ("-1", "[-1]", "[[0]]", "text") and name[0] == "g"
                else ""
            )
            change = put(name, ("eos_token_id",), eos)
            yield Case(f"{name} eos {label}", "demo", change, says=says)
    for key in (
        "temperature",
        "top_k",
        "max_new_tokens",
        "pad_token_id",
        "transformers_version",
    ):
        for label, new in WRONG.items():
            change = put("generation_config.json", (key,), new)
            yield Case(f"generation {key} {label}", "demo", change)
    files = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "modules.json",
        "added_tokens.json",
        "adapter_config.json",
        "model.safetensors.index.json",
        "quantize_config.json",
        "vocab.json",
        "processor_config.json",
    )
    for name in files:
        for label, content in BROKEN_JSON.items():
            yield Case(
                f"file {name} {label}", "demo", write(name, content), request="chat"
            )
    sentence = (
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    )
    for name in sentence:
        for label, content in BROKEN_JSON.items():
            change = write(name, content)
            yield Case(f"file {name} {label}", "sentence", change, "input")
    paths: tuple[tuple[str, tuple[Any, ...]], ...] = (
        *(
            (name, (key,))
            for name, key in (
                (sentence[1], "pooling_mode_mean_tokens"),
                (sentence[1], "pooling_mode"),
                (sentence[1], "include_prompt"),
                (sentence[2], "max_seq_length"),
                (sentence[2], "do_lower_case"),
                (sentence[3], "prompts"),
                (sentence[3], "default_prompt_name"),
                (sentence[3], "similarity_fn_name"),
                (sentence[3], "activation_fn"),
                ("tokenizer_config.json", "model_max_length"),
            )
        ),
        *(("modules.json", (1, key)) for key in ("path", "type", "idx")),
        ("modules.json", (1,)),
    )
    for name, path in paths:
        for label, new in WRONG.items():
            change = put(name, path, new)
            yield Case(f"sentence {name} {path} {label}", "sentence", change, "input")


# ---- tokenizers

NORMALIZERS: dict[str, Any] = {
    "unknown": {"type": "Nothing"},
    "Replace empty": {"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"},
    "Replace empty regex": {
        "type": "Replace",
        "pattern": {"Regex": ""},
        "content": "aaaa",
    },
    "Replace wrong regex": {
        "type": "Replace",
        "pattern": {"Regex": "("},
        "content": "a",
    },
    "Replace catastrophic": {
        "type": "Replace",
        "pattern": {"Regex": "(Q|u|e|s|t|i|o|n|Qu|es|ti|.)*(.|.)*$x"},
        "content": "",
    },
    "Replace long": {
        "type": "Replace",
        "pattern": {"Regex": "(" * 5000 + ")" * 5000},
        "content": "",
    },
    "Replace repeat": {
        "type": "Replace",
        "pattern": {"Regex": "a{1,99999}{1,9999}"},
        "content": "",
    },
    "Replace big content": {
        "type": "Replace",
        "pattern": {"String": "e"},
        "content": "e" * 10**6,
    },
    "Prepend empty": {"type": "Prepend", "prepend": ""},
    "Precompiled": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "Precompiled wrong": {"type": "Precompiled", "precompiled_charsmap": "////" * 100},
    "Precompiled size": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="},
    "Sequence deep": None,
    "Sequence wrong": {"type": "Sequence", "normalizers": [1]},
    "Strip to nothing": {
        "type": "Replace",
        "pattern": {"Regex": "(?s)."},
        "content": "",
    },
    "Bert": {"type": "BertNormalizer", "clean_text": "yes"},
}
PRE_TOKENIZERS: dict[str, Any] = {
    "unknown": {"type": "Nothing"},
    "Split empty": {
        "type": "Split",
        "pattern": {"String": ""},
        "behavior": "Isolated",
        "invert": False,
    },
    "Split empty regex": {
        "type": "Split",
        "pattern": {"Regex": ""},
        "behavior": "Removed",
        "invert": False,
    },
    "Split wrong": {
        "type": "Split",
        "pattern": {"Regex": "[z-a]"},
        "behavior": "Isolated",
        "invert": False,
    },
    "Split catastrophic": {
        "type": "Split",
        "pattern": {"Regex": "(([a-zA-Z: ]+)*)+$x"},
        "behavior": "Isolated",
        "invert": False,
    },
    "Split behavior": {
        "type": "Split",
        "pattern": {"String": "a"},
        "behavior": "x",
        "invert": 0,
    },
    "Metaspace long": {
        "type": "Metaspace",
        "replacement": "ab",
        "prepend_scheme": "always",
    },
    "Metaspace empty": {
        "type": "Metaspace",
        "replacement": "",
        "prepend_scheme": "always",
    },
    "Metaspace never": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "x"},
    "Delimiter": {"type": "CharDelimiterSplit", "delimiter": ""},
    "Fixed 0": {"type": "FixedLength", "length": 0},
    "Fixed": {"type": "FixedLength", "length": -1},
    "ByteLevel": {"type": "ByteLevel", "add_prefix_space": "x", "trim_offsets": 3},
    "Split lookbehind": {
        "type": "Split",
        "pattern": {"Regex": "(?<=a*)b\\1(?R)"},
        "behavior": "Isolated",
        "invert": False,
    },
}
POST: dict[str, Any] = {
    "unknown": {"type": "Nothing"},
    "Template missing": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    "Template no A": {
        "type": "TemplateProcessing",
        "single": [],
        "pair": [],
        "special_tokens": {},
    },
    "Template ids": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[X]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"[X]": {"id": "[X]", "ids": [99999], "tokens": ["[X]"]}},
    },
    "Template many": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[X]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"[X]": {"id": "[X]", "ids": [1] * 9, "tokens": ["[X]"]}},
    },
    "Template twice": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3,
        "pair": [],
        "special_tokens": {},
    },
    "Template types": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "B", "type_id": 2**40}}],
        "pair": [],
        "special_tokens": {},
    },
    "Bert": {
        "type": "BertProcessing",
        "sep": ["[SEP]", 99999],
        "cls": ["[CLS]", 88888],
    },
    "Bert wrong": {"type": "BertProcessing", "sep": [1, "x"]},
    "Roberta": {"type": "RobertaProcessing", "sep": ["</s>", -1], "cls": ["<s>", 0]},
}
DECODERS: dict[str, Any] = {
    "unknown": {"type": "Nothing"},
    "Replace empty": {"type": "Replace", "pattern": {"String": ""}, "content": "bbbb"},
    "Strip": {"type": "Strip", "content": " ", "start": 2**40, "stop": 2**40},
    "Strip -1": {"type": "Strip", "content": " ", "start": -1, "stop": 0},
    "Strip wrong": {"type": "Strip", "content": "ab", "start": 1, "stop": 0},
    "WordPiece": {"type": "WordPiece", "prefix": "", "cleanup": True},
    "ByteFallback": {"type": "ByteFallback"},
    "CTC": {
        "type": "CTC",
        "pad_token": "",
        "word_delimiter_token": "",
        "cleanup": False,
    },
    "BPE": {"type": "BPEDecoder", "suffix": ""},
    "Sequence wrong": {"type": "Sequence", "decoders": [{"type": "Sequence"}]},
    "Metaspace": {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"},
}
MODELS: dict[str, Any] = {
    "unknown": {"type": "Nothing"},
    "no type": {"vocab": {}, "merges": []},
    "BPE empty": {"type": "BPE", "vocab": {}, "merges": []},
    "BPE merges missing": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1},
        "merges": [["a", "b"]],
    },
    "BPE merges wrong": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["ab"]},
    "BPE ids doubled": {"type": "BPE", "vocab": {"a": 0, "b": 0, "c": 0}, "merges": []},
    "BPE ids far": {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []},
    "BPE ids -1": {"type": "BPE", "vocab": {"a": -1}, "merges": []},
    "BPE dropout": {"type": "BPE", "dropout": 1.0, "vocab": {"a": 0}, "merges": []},
    "BPE dropout 5": {"type": "BPE", "dropout": 5, "vocab": {"a": 0}, "merges": []},
    "BPE unknown": {"type": "BPE", "unk_token": "[X]", "vocab": {"a": 0}, "merges": []},
    "BPE merge to itself": {
        "type": "BPE",
        "vocab": {"a": 0, "": 1},
        "merges": [["a", ""]],
    },
    "Unigram empty": {"type": "Unigram", "unk_id": None, "vocab": []},
    "Unigram no unknown": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]},
    "Unigram unknown": {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0]]},
    "Unigram empty piece": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["a", -1.0], ["", -1.0]],
    },
    "Unigram nan": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["a", float("nan")], ["b", 1e308]],
    },
    "Unigram infinite": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["a", float("inf")]],
    },
    "WordLevel": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[X]"},
    "WordLevel empty": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    "WordPiece": {
        "type": "WordPiece",
        "unk_token": "[X]",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 0,
        "vocab": {"a": 0},
    },
    "WordPiece unknown": {
        "type": "WordPiece",
        "unk_token": "a",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"a": 0},
    },
    "more than rows": {
        "type": "WordLevel",
        "unk_token": "w0",
        "vocab": {f"w{n}": n for n in range(5000)},
    },
}
ADDED: dict[str, Any] = {
    "mapping": {},
    "of text": ["a"],
    "empty content": [{"id": 0, "content": "", "special": True}],
    "no content": [{"id": 0, "special": True}],
    "content null": [{"id": 0, "content": None, "special": True}],
    "no id": [{"content": "<|endoftext|>", "special": True}],
    "id -1": [{"id": -1, "content": "<|endoftext|>", "special": True}],
    "id far": [{"id": 4_000_000_000, "content": "<far>", "special": True}],
    "id huge": [{"id": 2**70, "content": "<far>", "special": True}],
    "id beyond the rows": [{"id": 407, "content": "<beyond>", "special": True}],
    "flags": [{"id": 0, "content": "<|endoftext|>", "special": "yes", "lstrip": 3}],
    "flags null": [
        {"id": 0, "content": "<|endoftext|>", "special": None, "lstrip": None}
    ],
    "twice": [
        {
            "id": 0,
            "content": "<|endoftext|>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ]
    * 2,
    "one id twice": [
        {
            "id": 0,
            "content": each,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for each in ("<a>", "<b>")
    ],
    "many": [
        {
            "id": 500 + n,
            "content": f"<{n}>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for n in range(3000)
    ],
    "space": [
        {
            "id": 0,
            "content": " ",
            "special": True,
            "single_word": True,
            "lstrip": True,
            "rstrip": True,
            "normalized": True,
        }
    ],
    "long content": [
        {
            "id": 0,
            "content": "x" * 10**6,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
}
TOKENIZER_CONFIG: dict[str, dict[str, Any]] = {
    "class os": {"tokenizer_class": "os.system"},
    "class dunder": {"tokenizer_class": "__import__"},
    "class of none": {"tokenizer_class": "EvilTokenizer"},
    "class GPT2": {"tokenizer_class": "GPT2Tokenizer"},
    "class Llama": {"tokenizer_class": "LlamaTokenizer"},
    "class Bert": {"tokenizer_class": "BertTokenizer"},
    "class T5": {"tokenizer_class": "T5Tokenizer"},
    "class ByT5": {"tokenizer_class": "ByT5Tokenizer"},
    "class NLLB": {"tokenizer_class": "NllbTokenizer", "src_lang": "xx"},
    "class M2M": {"tokenizer_class": "M2M100Tokenizer"},
    "class Whisper": {"tokenizer_class": "WhisperTokenizer"},
    "class base": {"tokenizer_class": "PreTrainedTokenizer"},
    "auto_map": {"auto_map": {"AutoTokenizer": ["evil.Tok", "evil.TokFast"]}},
    "auto_map remote": {"auto_map": {"AutoTokenizer": ["some/repo--evil.Tok", None]}},
    "names": {
        "name_or_path": "/dev/zero",
        "vocab_file": "/dev/zero",
        "tokenizer_file": "/x",
    },
    "vocab_file": {"vocab_file": "../../etc/passwd", "merges_file": "/dev/zero"},
    "eos unknown": {"eos_token": "<nowhere>", "bos_token": "<nobody>"},
    "eos object": {"eos_token": {"content": 3, "lstrip": "x"}},
    "eos of itself": {"eos_token": {"__type": "AddedToken"}},
    "extra": {"extra_special_tokens": {"a": 3}},
    "extra list": {
        "extra_special_tokens": [1, None],
        "additional_special_tokens": "abc",
    },
    "decoder": {"added_tokens_decoder": {"x": {"content": "a"}}},
    "decoder -1": {"added_tokens_decoder": {"-1": {"content": "a"}}},
    "decoder far": {"added_tokens_decoder": {"4000000000": {"content": "<far>"}}},
    "decoder taken": {
        "added_tokens_decoder": {"5": {"content": "<five>", "special": True}}
    },
    "decoder list": {"added_tokens_decoder": [1]},
    "decoder null": {"added_tokens_decoder": {"0": None}},
    "self": {"self": 1, "cls": 2, "args": 3, "kwargs": {"a": 1}},
    "init_inputs": {"init_inputs": ["a", 1], "init_kwargs": 3},
    "fix": {"fix_mistral_regex": True, "is_local": "x"},
    "processor": {"processor_class": "EvilProcessor", "backend": "mistral"},
    "backend": {"backend": "sentencepiece"},
    "response": {"response_schema": {"type": "object"}, "response_template": 3},
    "padding": {"padding_side": "up", "truncation_side": 3},
    "max_length": {"model_max_length": "long"},
}
TEMPLATES: dict[str, Any] = {
    "syntax": "{% for %}",
    "unclosed": "{{ messages",
    "undefined": "{{ nothing.of.this }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "system": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "include": "{% include '/etc/passwd' %}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "mutate": "{{ messages.clear() }}{{ messages.append(messages) }}",
    "raise": "{{ raise_exception('no') }}",
    "zero": "{{ 1 / 0 }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "many braces": "{{" * 20_000,
    "nested": "{% if x %}" * 2000 + "{% endif %}" * 2000,
    "brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "surrogate": "{{ '\\ud800' }}",
    "empty": "",
    "tokens": "{{ messages[0].content }}<|endoftext|>",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "extends": "{% extends 'x' %}",
    "filter": "{{ 'a' | nothing }}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "globals": "{{ namespace.__init__ }}{{ lipsum.__globals__['os'].popen('touch MARKER') }}",
}
# Bounded rendering refuses these.
LOOPING = {
    "raise long": "{{ raise_exception('no' * 100000) }}",
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x",
    "times": "{{ 'x' * 10**10 }}",
    "center": "{{ 'x'.center(10**10) }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
}


def tokenizer_cases() -> Iterator[Case]:
    parts = {
        "normalizer": NORMALIZERS,
        "pre_tokenizer": PRE_TOKENIZERS,
        "post_processor": POST,
        "decoder": DECODERS,
        "model": MODELS,
        "added_tokens": ADDED,
    }
    for part, values in parts.items():
        for label, new in values.items():
            if label == "Sequence deep":
                new = {"type": "Sequence", "normalizers": []}
                for _ in range(300):
                    new = {"type": "Sequence", "normalizers": [new]}
            yield Case(
                f"tokenizer {part} {label}", "demo", put("tokenizer.json", (part,), new)
            )
            if part in ("normalizer", "added_tokens", "post_processor"):
                change = put("tokenizer.json", (part,), new)
                yield Case(
                    f"tokenizer of BERT {part} {label}", "sentence", change, "input"
                )
        for label, new in WRONG.items():
            yield Case(
                f"tokenizer {part} {label}", "demo", put("tokenizer.json", (part,), new)
            )
        yield Case(f"tokenizer {part} missing", "demo", drop("tokenizer.json", (part,)))
    for key in ("version", "truncation", "padding"):
        for label, new in {**WRONG, "text 9": "9"}.items():
            yield Case(
                f"tokenizer {key} {label}", "demo", put("tokenizer.json", (key,), new)
            )
    for key in ("vocab", "merges", "unk_token", "dropout", "byte_fallback", "type"):
        for label, new in WRONG.items():
            change = put("tokenizer.json", ("model", key), new)
            yield Case(f"tokenizer model.{key} {label}", "demo", change)
    for label, new in {
        "truncation 0": {
            "direction": "Right",
            "max_length": 0,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "truncation stride": {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 5,
        },
        "padding": {
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 99999,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    }.items():
        change = put("tokenizer.json", (label.split()[0],), new)
        yield Case(f"tokenizer {label} set", "demo", change)
    for key in (
        "tokenizer_class",
        "eos_token",
        "bos_token",
        "pad_token",
        "model_max_length",
        "added_tokens_decoder",
        "chat_template",
        "extra_special_tokens",
        "backend",
        "clean_up_tokenization_spaces",
        "auto_map",
        "add_bos_token",
        "model_input_names",
    ):
        for label, new in WRONG.items():
            change = put("tokenizer_config.json", (key,), new)
            yield Case(f"tokenizer_config {key} {label}", "demo", change, "chat")
    for label, fields in TOKENIZER_CONFIG.items():
        change = update("tokenizer_config.json", fields)
        yield Case(f"tokenizer_config {label}", "demo", change, "chat")
        yield Case(f"tokenizer_config of BERT {label}", "sentence", change, "input")
    for name in ("special_tokens_map.json", "added_tokens.json"):
        for label, new in WRONG.items():
            written = write(
                name, json.dumps({"eos_token": new, "<|endoftext|>": new}).encode()
            )
            yield Case(f"{name} values {label}", "demo", written)
    vocabularies: dict[str, bytes] = {
        "vocab.json": b'{"a": 0, "b": "x"}',
        "vocab.txt": b"a\na\n\n" * 1000,
        "merges.txt": b"a\nb c d\n",
        "tokenizer.model": b"\x0a\x05\x0a\x01a\x15\0\0\0\0",
        "spiece.model": b"\x0a\xff\xff\xff\xff\x0f",
        "x.tiktoken": b"YQ== 0\nYg== x\n",
        "sentencepiece.bpe.model": b"junk" * 100,
    }
    for name, content in vocabularies.items():
        for label, classes in (
            ("alone", None),
            ("GPT2", "GPT2Tokenizer"),
            ("Llama", "LlamaTokenizer"),
            ("T5", "T5Tokenizer"),
            ("Bert", "BertTokenizer"),
        ):

            def change(
                folder: Path,
                name: str = name,
                content: bytes = content,
                classes: str | None = classes,
            ) -> None:
                (folder / "tokenizer.json").unlink()
                (folder / name).write_bytes(content)
                if classes is None:
                    (folder / "tokenizer_config.json").unlink()
                else:
                    _dump(
                        folder / "tokenizer_config.json", {"tokenizer_class": classes}
                    )

            yield Case(f"vocabulary {name} {label}", "demo", change)
    for label, template in {**TEMPLATES, **LOOPING}.items():
        template = template.replace("MARKER", str(_marker()))
        mark = "looping " if label in LOOPING else ""
        change = write("chat_template.jinja", template.encode())
        yield Case(f"{mark}template {label}", "demo", change, "chat")
        of_config = put("tokenizer_config.json", ("chat_template",), template)

        def in_config(folder: Path, of_config: Change = of_config) -> None:
            (folder / "chat_template.jinja").unlink()
            of_config(folder)

        if not mark:
            yield Case(
                f"template of tokenizer_config {label}", "demo", in_config, "chat"
            )
    for label, new in WRONG.items():
        content = json.dumps({"chat_template": new}).encode()

        def legacy(folder: Path, content: bytes = content) -> None:
            (folder / "chat_template.jinja").unlink()
            (folder / "chat_template.json").write_bytes(content)

        yield Case(f"template of chat_template.json {label}", "demo", legacy, "chat")


# ---- files that are no files


def write(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return change


def _socket(path: Path) -> None:
    before = Path.cwd()  # its address is short
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(before)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "stdin": lambda path: path.symlink_to("/dev/stdin"),
    "random": lambda path: path.symlink_to("/dev/urandom"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "FIFO by a link": lambda path: (
        os.mkfifo(path.with_name("pipe")),
        path.symlink_to("pipe"),
    ),
    "proc": lambda path: path.symlink_to("/proc/self/mem"),
    "empty": lambda path: path.touch(),
}
FILES = {
    "demo": (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "modules.json",
        "adapter_config.json",
        "quantize_config.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "x.safetensors",
        "pytorch_model.bin",
        "additional_chat_templates",
    ),
    "bin": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    "sentence": (
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling",
    ),
    "gguf": ("m.gguf",),
}


def file_cases() -> Iterator[Case]:
    for kind, names in FILES.items():
        for name in names:
            for label, make in ODD_FILES.items():

                def change(
                    folder: Path,
                    name: str = name,
                    make: Callable[[Path], object] = make,
                ) -> None:
                    path = folder / name
                    if path.is_dir():
                        shutil.rmtree(path)
                    path.unlink(missing_ok=True)
                    make(path)

                request = "input" if kind == "sentence" else "chat"
                yield Case(f"place {name} {label}", kind, change, request)
    vocabularies = {
        "vocab.json": "GPT2Tokenizer",
        "merges.txt": "GPT2Tokenizer",
        "tokenizer.model": "LlamaTokenizer",
        "vocab.txt": "BertTokenizer",
        "spiece.model": "T5Tokenizer",
    }
    for name, classes in vocabularies.items():
        for label, make in ODD_FILES.items():

            def alone(
                folder: Path,
                name: str = name,
                classes: str = classes,
                make: Callable[[Path], object] = make,
            ) -> None:
                (folder / "tokenizer.json").unlink()
                make(folder / name)
                _dump(folder / "tokenizer_config.json", {"tokenizer_class": classes})

            yield Case(f"place alone {name} {label}", "demo", alone)


# ---- weights


def _header(change: Callable[[dict[str, Any]], object]) -> Change:
    def edited(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        new = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])

    return edited


def _first(header: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(v for k, v in header.items() if k != "__metadata__")
    return found


def _raw_header(make: Callable[[bytes, bytes], bytes]) -> Change:
    def edited(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        file.write_bytes(make(data[8 : 8 + length], data[8 + length :]))

    return edited


def _with_length(header: bytes, values: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + values


def _index(content: Any) -> Change:
    def edited(folder: Path) -> None:
        (folder / "model.safetensors").rename(
            folder / "model-00001-of-00001.safetensors"
        )
        _dump(folder / "model.safetensors.index.json", content)

    return edited


def _proto(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _doubling(num: int, end: bytes = b"") -> bytes:
    """Return the pickle of tuples of tuples, whose leaves double in each."""
    pairs = b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
        for n in range(num)
    )
    return _proto(b"K\x01q\x00", pairs, end)


def _doubling_names(num: int) -> bytes:
    last = bytes([num])
    return _doubling(num, b"h" + last + b"h" + last + b"\x93")


def _text_key(num: int) -> bytes:
    return _proto(b"}", b"X" + struct.pack("<I", num) + b"x" * num, b"K\x01s")


class _Call:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _marker() -> Path:
    return Path(tempfile.gettempdir()) / f"fminfer-hostile-{os.getuid()}-ran"


def pickles() -> dict[str, bytes]:
    ref = _proto(
        b"}",
        b"X\x01\0\0\0a",
        b"(X\x07\0\0\0storage",
        _global("torch", "FloatStorage"),
        b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ",
        b"s",
    )
    nested = b"]" * 100_000 + b"a" * 99_999
    return {
        "os.system": pickle.dumps({"a": _Call(os.system, f"touch {_marker()}")}, 2),
        "exec": pickle.dumps({"a": _Call(exec, f"open({str(_marker())!r}, 'w')")}, 4),
        "eval": pickle.dumps(_Call(eval, f"open({str(_marker())!r}, 'w')"), 0),
        "getattr": pickle.dumps({"a": _Call(getattr, os, "x")}, 2)
        if False
        else _proto(_global("builtins", "getattr"), b"K\x01K\x02\x86R"),
        "torch.load": _proto(_global("torch", "load"), b"X\x01\0\0\0x\x85R"),
        "torch.hub": _proto(_global("torch.hub", "load"), b"X\x01\0\0\0x\x85R"),
        "omegaconf": _proto(_global("omegaconf.os", "system"), b"X\x01\0\0\0x\x85R"),
        "long name": _proto(_global("a" * 1_000_000, "b")),
        "name with ends": _proto(_global("torch\x1b[31m", "b\x00")),
        "INST": b"(X\x04\0\0\0true" + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nX\x04\0\0\0trueo.",
        "names that double": _doubling_names(18),
        "names that double 25": _doubling_names(25),
        "names that double 120": _doubling_names(120),
        "tuples that double": _doubling(30),
        "key of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(60)
            ),
            b"}h\x3cK\x01s",
        ),
        "storage of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(25)
            ),
            b"h\x19Q",
        ),
        "storage kind of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(25)
            ),
            b"(h\x19h\x19K\x01K\x01K\x01tQ",
        ),
        "storage size of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(25)
            ),
            b"(X\x07\0\0\0storage",
            _global("torch", "FloatStorage"),
            b"h\x19K\x01h\x19tQ",
        ),
        "storage key of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(25)
            ),
            b"(X\x07\0\0\0storage",
            _global("torch", "FloatStorage"),
            b"h\x19K\x01K\x01tQ",
        ),
        "dtype of doubles": _proto(
            b"K\x01q\x00",
            *(
                b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                for n in range(25)
            ),
            b"(X\x07\0\0\0storageh\x19K\x01K\x01K\x01tQ",
        ),
        "lists in themselves": _proto(b"]q\x00h\x00a"),
        "dict in itself": _proto(b"}q\x00X\x01\0\0\0ah\x00s"),
        "list extends itself": _proto(b"]q\x00K\x01a", b"h\x00" * 40),
        "lists that double": _proto(
            b"]q\x00(K\x01K\x01e", *(b"h\x00(h\x00h\x00e" for _ in range(60))
        ),
        "nested": _proto(nested),
        "long key": _text_key(10_000_000),
        "long number": _proto(
            b"\x8b" + struct.pack("<i", 5_000_000) + b"\xff" * 5_000_000
        ),
        "digits": b"I" + b"9" * 100_000 + b"\n.",
        "digits long": b"L" + b"9" * 100_000 + b"L\n.",
        "memo far": _proto(b"K\x01r\xff\xff\xff\xff"),
        "mark": _proto(b"(" * 1_000_000),
        "pops": _proto(b"0" * 10),
        "no end": b"\x80\x02" + b"K\x01" * 100_000,
        "empty": b"",
        "no tensors": _proto(b"}"),
        "storage alone": ref,
        "frames": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
        "extension": b"\x80\x02\x82\x01.",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"}.",
        "unicode": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"}.",
        "persid": b"Pos.system\n.",
        "called with itself": _proto(
            _global("collections", "OrderedDict"), b"q\x00h\x00\x85R"
        ),
        "dict of pairs": _proto(
            _global("collections", "OrderedDict"), b"K\x01\x85\x85R"
        ),
        "rebuild": _proto(
            b"}X\x01\0\0\0a",
            _global("torch._utils", "_rebuild_tensor_v2"),
            b"(K\x01K\x01K\x01K\x01tRs",
        ),
        "parameter": _proto(
            b"}X\x01\0\0\0a", _global("torch._utils", "_rebuild_parameter"), b")Rs"
        ),
    }


def _zip(pickled: bytes, kind: int = zipfile.ZIP_STORED, **more: bytes) -> Change:
    def change(folder: Path) -> None:
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w", kind) as archive:
            archive.writestr("m/data.pkl", pickled)
            archive.writestr("m/version", "3\n")
            for name, content in more.items():
                archive.writestr(f"m/{name}", content)

    return change


def weight_cases() -> Iterator[Case]:
    ranges: dict[str, Callable[[dict[str, Any]], object]] = {
        "dtype unknown": lambda h: _first(h).update(dtype="F99"),
        "dtype object": lambda h: _first(h).update(dtype={}),
        "dtype long": lambda h: _first(h).update(dtype="F" * 10**6),
        "dtype null": lambda h: _first(h).update(dtype=None),
        "dtype int": lambda h: _first(h).update(dtype="I32"),
        "shape negative": lambda h: _first(h).update(shape=[-1, -64]),
        "shape huge": lambda h: _first(h).update(shape=[2**63, 2**63]),
        "shape many": lambda h: _first(h).update(shape=[1] * 100_000),
        "shape zeros": lambda h: _first(h).update(shape=[0, 2**62]),
        "shape text": lambda h: _first(h).update(shape="407"),
        "shape null": lambda h: _first(h).update(shape=None),
        "shape bool": lambda h: _first(h).update(shape=[True, 407, 64]),
        "shape float": lambda h: _first(h).update(shape=[407.0, 64.0]),
        "offsets missing": lambda h: _first(h).pop("data_offsets"),
        "offsets one": lambda h: _first(h).update(data_offsets=[0]),
        "offsets outside": lambda h: _first(h).update(
            data_offsets=[10**9, 10**9 + 104192]
        ),
        "offsets swapped": lambda h: _first(h).update(data_offsets=[104192, 0]),
        "offsets huge": lambda h: _first(h).update(data_offsets=[0, 2**70]),
        "offsets 1e400": lambda h: _first(h).update(data_offsets=[0, float("inf")]),
        "entry null": lambda h: h.update(a=None),
        "entry text": lambda h: h.update(a="x"),
        "entry list": lambda h: h.update(a=[]),
        "metadata": lambda h: h.update(__metadata__=3),
        "extra": lambda h: h.update(
            a={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        ),
        "name empty": lambda h: h.update(
            {"": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
        ),
        "name long": lambda h: h.update(
            {"x" * 10**6: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
        ),
        "name surrogate": lambda h: h.update(
            {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
        ),
        "names many": lambda h: h.update(
            {
                f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for n in range(50_000)
            }
        ),
        "lost": lambda h: h.pop(next(k for k in h if k != "__metadata__")),
    }
    for label, change in ranges.items():
        yield Case(f"safetensors {label}", "demo", _header(change))
    raw: dict[str, Callable[[bytes, bytes], bytes]] = {
        "length 0": lambda h, v: struct.pack("<Q", 0) + h + v,
        "length 1": lambda h, v: struct.pack("<Q", 1) + h + v,
        "length far": lambda h, v: struct.pack("<Q", 2**63) + h + v,
        "length -1": lambda h, v: b"\xff" * 8 + h + v,
        "length all": lambda h, v: struct.pack("<Q", len(h + v)) + h + v,
        "spaces": lambda h, v: _with_length(h + b" " * (99_000_000 - len(h)), v),
        "many spaces": lambda h, v: _with_length(h + b" " * 100_000_001, v),
        "brackets": lambda h, v: _with_length(b"[" * 50_000_000, v),
        "depth": lambda h, v: _with_length(
            b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", v
        ),
        "list": lambda h, v: _with_length(b"[]", v),
        "null": lambda h, v: _with_length(b"null", v),
        "twice": lambda h, v: _with_length(h[:-1] + b"," + h[1:], v),
        "latin": lambda h, v: _with_length(b'{"\xe9": 1}', v),
        "digits": lambda h, v: _with_length(b'{"a":' + b"9" * 10_000 + b"}", v),
        "cut": lambda h, v: _with_length(h, v)[: len(h) // 2],
        "cut 7": lambda h, v: b"\0" * 7,
        "cut values": lambda h, v: _with_length(h, v[:-1]),
        "more": lambda h, v: _with_length(h, v + b"\0"),
        "nan": lambda h, v: _with_length(h, b"\xff" * len(v)),
        "many names": lambda h, v: _with_length(
            b"{" + b",".join(b'"%d":{}' % n for n in range(3_000_000)) + b"}", v
        ),
    }
    for label, make in raw.items():
        yield Case(f"safetensors header {label}", "demo", _raw_header(make))
    one = "model-00001-of-00001.safetensors"
    for label, content in {
        "no map": {},
        "map null": {"weight_map": None},
        "map list": {"weight_map": []},
        "map of null": {"weight_map": {"a": None}},
        "map of list": {"weight_map": {"a": [1]}},
        "outside": {"weight_map": {"a": "../x"}},
        "absolute": {"weight_map": {"a": "/dev/zero"}},
        "nul": {"weight_map": {"a": "x\0y"}},
        "long": {"weight_map": {"a": "x" * 10_000}},
        "empty name": {"weight_map": {"a": ""}},
        "dot": {"weight_map": {"a": "."}},
        "itself": {"weight_map": {"a": "model.safetensors.index.json"}},
        "missing": {"weight_map": {f"{n}": f"x{n}" for n in range(10_000)}},
        "wrong": {"weight_map": {"nothing": one}},
        "surrogate": {"weight_map": {"a": "\ud800"}},
        "empty": {"weight_map": {}},
        "config": {"weight_map": {"a": "config.json"}},
    }.items():
        yield Case(f"index {label}", "demo", _index(content))
    for label, pickled in pickles().items():
        yield Case(f"bin {label}", "bin", _zip(pickled))
        if len(pickled) < 10**6:
            older = (
                b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
            )
            change = write("pytorch_model.bin", older + pickled + b"\x80\x02].")
            yield Case(f"older bin {label}", "bin", change)
    bomb = _zip(b"\0" * 200_000_000, zipfile.ZIP_DEFLATED)
    yield Case("bin zip bomb", "bin", bomb)
    yield Case("bin stored zeros", "bin", _zip(b"\0" * 90_000_000))
    yield Case("bin stored steps", "bin", _zip(_proto(b"NNNNNNNN0" * 700_000)))
    yield Case(
        "bin many entries",
        "bin",
        _zip(_proto(b"}"), **{f"e{n}": b"" for n in range(60_000)}),
    )
    yield Case("bin big-endian", "bin", _zip(_proto(b"}"), byteorder=b"big"))
    yield Case("bin byteorder long", "bin", _zip(_proto(b"}"), byteorder=b"x" * 10**7))
    yield Case("bin two", "bin", _zip(_proto(b"}"), **{"sub/data.pkl": b""}))
    yield Case("bin cut", "bin", _cut("pytorch_model.bin", 2000))
    yield Case("bin cut end", "bin", _cut("pytorch_model.bin", -10))
    yield Case(
        "bin random",
        "bin",
        write("pytorch_model.bin", random.Random(1).randbytes(9999)),
    )
    rng = random.Random(SEED)
    for kind, name in (
        ("bin", "pytorch_model.bin"),
        ("demo", "model.safetensors"),
        ("gguf", "m.gguf"),
        ("demo", "tokenizer.json"),
        ("demo", "config.json"),
        ("sentence", "tokenizer.json"),
        ("sentence", "config.json"),
    ):
        for number in range(12):
            change = _noise(name, rng.randrange(1 << 30))
            yield Case(
                f"noise {kind} {name} {number}",
                kind,
                change,
                "input" if kind == "sentence" else "prompt",
            )


def _noise(name: str, seed: int) -> Change:
    def change(folder: Path) -> None:
        rng = random.Random(seed)
        data = bytearray((folder / name).read_bytes())
        for _ in range(3):
            data[rng.randrange(min(len(data), 5000))] = rng.randrange(256)
        (folder / name).write_bytes(data)

    return change


def _cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[:size]
    )


# ---- GGUF


def gguf_cases() -> Iterator[Case]:
    keys, tensors = read(SAMPLES / "llama.gguf")
    whole = (SAMPLES / "llama.gguf").read_bytes()

    def built(change: Callable[[Any, Any], object]) -> Change:
        def write_one(folder: Path) -> None:
            own_keys = dict(keys)
            own_tensors = dict(tensors)
            change(own_keys, own_tensors)
            (folder / "m.gguf").write_bytes(build(own_keys, own_tensors))

        return write_one

    wrong_values: dict[str, Any] = {
        "-1": (5, -1),
        "0": (U32, 0),
        "2**63": (10, 2**63),
        "2**64-1": (10, 2**64 - 1),
        "text": (STRING, "64"),
        "empty": (STRING, ""),
        "long": (STRING, "x" * 10**6),
        "true": (7, True),
        "nan": (6, float("nan")),
        "inf": (12, float("inf")),
        "array": (ARRAY, (U32, [1, 2, 3])),
        "no array": (ARRAY, (U32, [])),
        "texts": (ARRAY, (STRING, ["a"])),
        "huge array": (ARRAY, (U32, [64] * 10**5)),
    }
    for key in keys:
        for label, new in wrong_values.items():
            change = built(lambda k, t, key=key, new=new: k.update({key: new}))
            yield Case(f"gguf {key} {label}", "gguf", change)
        yield Case(
            f"gguf {key} missing", "gguf", built(lambda k, t, key=key: k.pop(key))
        )
    more = {
        "alignment 0": {"general.alignment": (U32, 0)},
        "alignment 3": {"general.alignment": (U32, 3)},
        "alignment 2**31": {"general.alignment": (U32, 2**31)},
        "alignment 2**63": {"general.alignment": (10, 2**63)},
        "template": {
            "tokenizer.chat_template": (STRING, "{{ cycler.__init__.__globals__ }}")
        },
        "template syntax": {"tokenizer.chat_template": (STRING, "{% for %}")},
        "template number": {"tokenizer.chat_template": (U32, 3)},
        "eos far": {"tokenizer.ggml.eos_token_id": (U32, 4_000_000_000)},
        "bos text": {"tokenizer.ggml.bos_token_id": (STRING, "x")},
        "sampling": {"general.sampling.temp": (STRING, "hot")},
        "rope type": {"llama.rope.scaling.type": (STRING, "spiral")},
        "rope factor": {
            "llama.rope.scaling.type": (STRING, "linear"),
            "llama.rope.scaling.factor": (6, 0.0),
        },
        "split": {"split.count": (2, 9)},
        "split text": {"split.count": (STRING, "x"), "split.no": (STRING, "y")},
        "type": {"general.type": (STRING, "adapter")},
        "key of all": {"": (U32, 1)},
        "merges wrong": {"tokenizer.ggml.merges": (ARRAY, (U32, [1, 2]))},
        "charsmap": {
            "tokenizer.ggml.model": (STRING, "t5"),
            "tokenizer.ggml.precompiled_charsmap": (ARRAY, (U32, [1] * 10)),
        },
        "t5": {"tokenizer.ggml.model": (STRING, "t5")},
        "gpt2": {
            "tokenizer.ggml.model": (STRING, "gpt2"),
            "tokenizer.ggml.pre": (STRING, "gpt-2"),
        },
        "llama spm": {"tokenizer.ggml.model": (STRING, "llama")},
        "arch": {"general.architecture": (STRING, "x" * 10**5)},
    }
    for label, new in more.items():
        yield Case(
            f"gguf keys {label}", "gguf", built(lambda k, t, new=new: k.update(new))
        )
    head = b"GGUF" + struct.pack("<I", 3)
    arch = text("general.architecture") + struct.pack("<I", STRING) + text("llama")
    nested = (
        struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1
        + struct.pack("<IQ", ARRAY, 1) * 100_000
    )
    raws = {
        "counts 2**63": head + struct.pack("<QQ", 2**63, 2**63),
        "tensors 2**63": head + struct.pack("<QQ", 2**63, 1) + arch,
        "tensors 2**40": head + struct.pack("<QQ", 2**40, 1) + arch + b"\0" * 10**6,
        "keys 2**40": head + struct.pack("<QQ", 0, 2**40) + arch + b"\0" * 10**6,
        "version 0": b"GGUF" + struct.pack("<I", 0),
        "version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "big-endian": b"GGUF" + struct.pack(">I", 3),
        "text 2**63": head + struct.pack("<QQQ", 0, 1, 2**63) + b"x" * 100,
        "text 2**64-1": head + struct.pack("<QQQ", 0, 1, 2**64 - 1) + b"x" * 100,
        "kind 13": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<II", 13, 0),
        "kind 2**32-1": head + struct.pack("<QQ", 0, 1) + text("a") + b"\xff" * 8,
        "array 2**63": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<IIQ", 9, 4, 2**63),
        "array of texts": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<IIQ", 9, 8, 2**63)
        + b"\0" * 1000,
        "array of empty texts": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<IIQ", 9, 8, 5_000_000)
        + b"\0" * 40_000_000,
        "arrays nested": head + struct.pack("<QQ", 0, 1) + text("a") + nested,
        "array of arrays": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<IIQ", 9, 9, 2**40),
        "bool 7": head
        + struct.pack("<QQ", 0, 1)
        + text("a")
        + struct.pack("<IB", 7, 7),
        "latin": head
        + struct.pack("<QQ", 0, 1)
        + struct.pack("<Q", 1)
        + b"\xe9"
        + struct.pack("<II", 4, 1),
        "dimensions": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + text("a")
        + struct.pack("<I", 2**32 - 1),
        "shape 0": head + struct.pack("<QQ", 1, 1) + arch + entry("a", 0, (0,), 0),
        "shape overflow": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("a", 0, (2**63, 2**63), 0),
        "shape none": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("a", 0, (), 0)
        + b"\0" * 64,
        "type 99": head + struct.pack("<QQ", 1, 1) + arch + entry("a", 99, (32,), 0),
        "type none": head + struct.pack("<QQ", 1, 1) + arch + entry("a", 4, (32,), 0),
        "blocks": head + struct.pack("<QQ", 1, 1) + arch + entry("a", 8, (31,), 0),
        "offset": head + struct.pack("<QQ", 1, 1) + arch + entry("a", 0, (32,), 2**63),
        "offset odd": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("a", 0, (1,), 3)
        + b"\0" * 99,
        "name long": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("x" * 10**6, 0, (1,), 0)
        + b"\0" * 99,
        "stacked": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("blk.0.ffn_up_exps.weight", 0, (2**20, 0, 4), 0)
        + b"\0" * 99,
        "layers far": head
        + struct.pack("<QQ", 1, 1)
        + arch
        + entry("blk.999999999.attn_q.weight", 0, (1,), 0)
        + b"\0" * 99,
    }
    for label, content in raws.items():
        yield Case(f"gguf raw {label}", "gguf", write("m.gguf", content))
    for size in (
        0,
        3,
        4,
        8,
        15,
        24,
        30,
        40,
        100,
        500,
        1000,
        2000,
        3000,
        5000,
        8000,
        len(whole) - 1,
    ):
        yield Case(f"gguf cut {size}", "gguf", write("m.gguf", whole[:size]))


def all_cases() -> list[Case]:
    """Return all cases, the same ones in the same order each time."""
    found = [
        *config_cases(),
        *tokenizer_cases(),
        *file_cases(),
        *weight_cases(),
        *gguf_cases(),
    ]
    twice = [
        name
        for name, num in Counter(f"{c.kind} {c.name}" for c in found).items()
        if num > 1
    ]
    assert not twice, twice
    return found


def sample(num: int, seed: int = SEED) -> list[Case]:
    """Return some cases of every part, without those that only a bounded rendering refuses."""
    by_part: dict[str, list[Case]] = {}
    for case in all_cases():
        if not case.name.startswith("looping"):
            by_part.setdefault(case.name.split()[0], []).append(case)
    rng = random.Random(seed)
    groups = [rng.sample(cases, len(cases)) for cases in by_part.values()]
    turns = [
        cases[turn] for turn in range(num) for cases in groups if turn < len(cases)
    ]
    return turns[:num]


# ---- trying them


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _answer(case: Case, folder: Path) -> str:
    """Load a folder and ask it something; return what it says."""
    place = folder / "m.gguf" if case.kind == "gguf" else folder
    with fminfer.Engine(str(place), kernels="off", budget=4096) as engine:
        if case.request == "input":
            return f"{engine.embed(['w1 w2']).shape}"
        request = (
            CHAT
            if case.request == "chat" and engine.intake.has_chat_template
            else PROMPT
        )
        (record,) = engine.run([request])
        if record.error is not None:
            raise record.error
        return repr(record.text)


def _in_child(case: Case, folder: Path, said: int) -> None:
    """Answer in a process of its own, and never return."""
    with contextlib.suppress(BaseException):
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        try:
            result = ("runs", _answer(case, folder))
        except fminfer.FminferError as error:
            result = ("told", str(error))
        except BaseException as error:
            import traceback

            frames = traceback.extract_tb(error.__traceback__)
            own = [
                f"{Path(f.filename).name}:{f.lineno}"
                for f in frames
                if "fminfer" in f.filename
            ]
            result = ("raw", f"{type(error).__name__}: {error} at {own[-1:]}")
        os.write(said, json.dumps(result).encode())
    os._exit(0)


def try_case(case: Case, origin: Path) -> Outcome:
    """Change a copy of a folder, and load it in a fork."""
    marker = _marker()
    marker.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=origin.parent) as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(origin, folder)
        case.change(folder)
        results = Path(temporary) / "result"
        said = os.open(results, os.O_RDWR | os.O_CREAT)
        start = time.monotonic()
        before = _resident()
        pid = os.fork()
        if not pid:
            _in_child(case, folder, said)
        os.close(said)
        status = None
        while time.monotonic() - start < MOST_WALL_S:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(pid, signal.SIGKILL)
            _, _, usage = os.wait4(pid, 0)
            status = None
        wall = time.monotonic() - start
        text = results.read_text()
    if status is None:
        kind = "hangs"
        message = f"no end after {wall:.0f} s"
    elif not text:
        kind = "died"
        message = f"of signal {os.WTERMSIG(status)}"
    else:
        kind, message = json.loads(text)
    if kind == "told" and case.says and not re.search(case.says, message):
        kind = "told otherwise"
    if kind == "runs" and case.says:
        kind = "runs, and should be refused"
        message = message
    cpu = usage.ru_utime + usage.ru_stime
    grown = (usage.ru_maxrss << 10) - before
    return Outcome(case.name, kind, message, cpu, wall, grown, marker.exists())


def try_all(cases: Iterable[Case], folder: Path) -> Iterator[Outcome]:
    """Try cases one after the other, in forks of this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    _answer(
        Case("", "demo", lambda f: None, "chat"), DEMO_MODEL
    )  # what loading imports is here now
    for case in cases:
        if not (origin := folder / case.kind).exists():
            make_folder(case.kind, origin)
            bare = Case(
                case.kind,
                case.kind,
                lambda f: None,
                "input" if case.kind == "sentence" else "chat",
            )
            first = try_case(bare, origin)
            assert first.status == "runs", first
        yield try_case(case, origin)


def main(words: list[str]) -> int:
    cases = all_cases()
    names = [word for word in words if not word.startswith("--")]
    if names:
        cases = [case for case in cases if any(name in case.name for name in names)]
    elif "--all" not in words:
        cases = sample(int(os.environ.get("NUM", "100")))
    num_faults = 0
    statuses = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in try_all(cases, Path(folder)):
            statuses[outcome.status] += 1
            num_faults += bool(outcome.fault)
            if outcome.fault or "--verbose" in words:
                print(
                    f"{outcome.name}: {outcome.fault or outcome.text[:300]}", flush=True
                )
            if "--json" in words:
                print(json.dumps(asdict(outcome)), flush=True)
    print(f"{sum(statuses.values())} folders: {dict(statuses)}, {num_faults} faults")
    return bool(num_faults)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
