"""Writes a small transformers model as a GGUF file of llama.cpp, by its package `gguf`.

Names of tensors and keys are those of the package's tables. What the converter does besides
(rows in another order, norms plus one, stacked experts) is a `Change` of a published tensor.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Published = dict[str, torch.Tensor]  # by the names of a checkpoint on the hub
# Gets a published tensor; returns what is stored instead, by names that the package maps.
Change = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
SUFFIXES = (".weight", ".bias")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
ROPE_TYPES = {
    "linear": gguf.RopeScalingType.LINEAR,
    "yarn": gguf.RopeScalingType.YARN,
}


def as_published(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return a tensor as it is."""
    return {name: tensor}


def permute_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of each head as llama.cpp's LLaMA has them: both halves in turns."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def with_permuted_rows(config: Any) -> Change:
    """Return a change that puts rows of queries and keys in llama.cpp's order."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if ".q_proj." in name:
            return {name: permute_rows(tensor, config.num_attention_heads)}
        if ".k_proj." in name:
            return {name: permute_rows(tensor, config.num_key_value_heads)}
        return {name: tensor}

    return change


def find_frequency_factors(config: Any) -> Published:
    """Return what llama.cpp divides frequencies by, for rotary positions of LLaMA 3."""
    size = config.head_dim
    rope = config.rope_parameters
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]
    return {f"{name}.weight": plain / scaled}


def read_published(model: Any) -> Published:
    """Return a model's tensors as a checkpoint on the hub holds them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> Published:
    """Return tensors with those of a layer's experts as one, which has no number."""
    stacked: Published = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            place = experts.setdefault(f"{match[1]}.{match[3]}", {})
            place[int(match[2])] = tensor
        else:
            stacked[name] = tensor
    return stacked | {
        name: torch.stack([each[number] for number in range(len(each))])
        for name, each in experts.items()
    }


def common_keys(config: Any) -> dict[str, Any]:
    """Return what the converter writes of every text model, by the package's keys."""
    keys = gguf.Keys
    stated = {
        key: _first_field(config, *names.split())
        for key, names in {
            keys.LLM.CONTEXT_LENGTH: "max_position_embeddings",
            keys.LLM.EMBEDDING_LENGTH: "hidden_size",
            keys.LLM.FEED_FORWARD_LENGTH: "intermediate_size n_inner",
            keys.LLM.BLOCK_COUNT: "num_hidden_layers",
            keys.Attention.HEAD_COUNT: "num_attention_heads",
            keys.Attention.HEAD_COUNT_KV: "num_key_value_heads",
            keys.Attention.LAYERNORM_RMS_EPS: "rms_norm_eps norm_eps",
            keys.Attention.LAYERNORM_EPS: (
                "layer_norm_eps layer_norm_epsilon norm_epsilon"
            ),
            keys.Attention.KEY_LENGTH: "head_dim",
            keys.Attention.VALUE_LENGTH: "head_dim",
            keys.LLM.EXPERT_COUNT: "num_local_experts num_experts",
            keys.LLM.EXPERT_USED_COUNT: "num_experts_per_tok",
            keys.LLM.EXPERT_GROUP_COUNT: "n_group",
            keys.LLM.EXPERT_GROUP_USED_COUNT: "topk_group",
        }.items()
    }
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    stated[keys.Rope.FREQ_BASE] = rope.get("rope_theta")
    if kind := ROPE_TYPES.get(rope.get("rope_type", "")):
        stated |= {
            keys.Rope.SCALING_TYPE: kind.value,
            keys.Rope.SCALING_FACTOR: rope["factor"],
        }
    if kind is gguf.RopeScalingType.YARN:
        stated |= {
            keys.Rope.SCALING_ORIG_CTX_LEN: rope["original_max_position_embeddings"],
            keys.Rope.SCALING_YARN_ATTN_FACTOR: rope.get("attention_factor"),
            keys.Rope.SCALING_YARN_BETA_FAST: rope.get("beta_fast"),
            keys.Rope.SCALING_YARN_BETA_SLOW: rope.get("beta_slow"),
        }
    return stated


def _first_field(config: Any, *names: str) -> Any:
    """Return the first field that a config has; None: it has none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def map_tensors(
    tensors: Published, arch: str, num_layers: int, change: Change
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield changed tensors by llama.cpp's names. A name that it lacks is an error."""
    (of_arch,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(of_arch, num_layers)
    known = set(names.mapping) | {stored for _, stored in names.mapping.values()}
    assert known, f"the package has no tensors of {arch}"
    for name, tensor in tensors.items():
        for changed_name, changed in change(name, tensor).items():
            stored = names.get_name(changed_name, try_suffixes=SUFFIXES)
            assert stored is not None, f"llama.cpp's {arch} has no {changed_name}"
            yield stored, changed


def write_gguf(
    model: Any,
    arch: str,
    keys: Mapping[str, Any],
    path: Path,
    *,
    change: Change = as_published,
    more_tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a model's file in float32, as llama.cpp's converter lays it out.

    Args:
        arch: llama.cpp's name of the architecture.
        keys: metadata besides `common_keys`, by the package's keys; None takes one away.
        more_tensors: others, by their stored names.
    """
    config = model.config.get_text_config()
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (common_keys(config) | dict(keys)).items():
        add_key(writer, key.format(arch=arch), value)
    add_vocabulary(writer, config.vocab_size)
    published = stack_experts(read_published(model))
    mapped = map_tensors(published, arch, config.num_hidden_layers, change)
    for name, tensor in (*mapped, *(more_tensors or {}).items()):
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of the kind that the converter writes; None adds nothing."""
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


def add_vocabulary(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    """Add a tokenizer of as many tokens as the embedding has rows."""
    usual = ["<unk>", "<s>", "</s>"]
    tokens = usual + [f"t{number}" for number in range(len(usual), num_tokens)]
    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(num_tokens)])
    types = [gguf.TokenType.UNKNOWN, control, control]
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * (num_tokens - len(usual)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
