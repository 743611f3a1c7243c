"""Published quantized models, by their configs alone: what they take, and that they are read.

The configs are written down as published; sizes are those of `tests.published_configs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.origins import find_stored_model
from fminfer.models.tensor_specs import model_specs
from fminfer.plan.machine_facts import Machine, find_machine
from fminfer.plan.planning import make_plan
from tests.published_configs import PUBLISHED

GPT_OSS: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP8_TILES: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
QWEN3_FP8: dict[str, Any] = FP8_TILES | {
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{n}.input_layernorm" for n in range(48)),
        *(f"model.layers.{n}.mlp.gate" for n in range(48)),
        *(f"model.layers.{n}.post_attention_layernorm" for n in range(48)),
    ]
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "version": "gemm",
    "zero_point": True,
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": 1.89,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": "weight",
                "block_structure": None,
                "dynamic": False,
                "group_size": 128,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
}
FOUR_BIT_FLOATS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 16,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}
NVFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.10.3.dev47+ge463fe6",
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": FOUR_BIT_FLOATS | {"dynamic": "local"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": FOUR_BIT_FLOATS,
        }
    },
}
GPT_OSS_120B = {"num_hidden_layers": 36, "num_local_experts": 128}
# The model, what else its config has, and how many GB its weights take, from and to:
# those of the published files, without what no pass reads, and up to 3 % beside them.
# NVFP4 becomes floats of 16 bits.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float, float]] = {
    "gpt-oss-20b": ("openai/gpt-oss-20b", {}, GPT_OSS, 13.5, 14.2),
    "gpt-oss-120b": ("openai/gpt-oss-20b", GPT_OSS_120B, GPT_OSS, 64.0, 67.3),
    "DeepSeek-V3": ("deepseek-ai/DeepSeek-V3", {}, FP8_TILES, 671.0, 696.0),
    "Qwen3-30B-A3B-FP8": ("Qwen/Qwen3-30B-A3B", {}, QWEN3_FP8, 30.5, 32.2),
    "Qwen2-7B-AWQ": ("Qwen/Qwen2-7B", {}, AWQ, 5.4, 5.8),
    "Qwen2-7B-GPTQ": ("Qwen/Qwen2-7B", {}, GPTQ, 5.4, 5.8),
    "Llama-3.1-8B-W4A16": ("meta-llama/Llama-3.1-8B", {}, W4A16, 5.6, 6.0),
    "Llama-3.1-8B-NVFP4": ("meta-llama/Llama-3.1-8B", {}, NVFP4, 16.0, 16.1),
}


def save_config(name: str, folder: Path) -> Path:
    base, more, quantization, _, _ = SHAPES[name]
    _, fields = PUBLISHED[base]
    fields = fields | {"torch_dtype": "bfloat16"} | more
    folder.joinpath("config.json").write_text(
        json.dumps(fields | {"quantization_config": quantization})
    )
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_a_config_alone_says_what_a_model_takes(name: str, tmp_path: Path) -> None:
    """Such models were refused, so that 13 GB had to become 40."""
    folder = save_config(name, tmp_path)
    checkpoint = open_checkpoint(
        str(folder), ModelOptions(skip_tokenizer_init=True), has_weights=False
    )
    config = EngineConfig(model=str(folder), dtype="bfloat16", device="cpu")
    plan = make_plan(config, checkpoint, find_machine(config, Machine()))

    held = sum(
        plan.held[tensor].num_bytes(spec.shape)
        for tensor, spec in model_specs(checkpoint.model).items()
    )

    _, _, _, least, most = SHAPES[name]
    assert least <= held / 1e9 <= most


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float16", "float64"])
def test_a_config_may_name_any_type(dtype: str, tmp_path: Path) -> None:
    """A type that no weight has ended a forecast without files in a StopIteration."""
    _, fields = PUBLISHED["meta-llama/Llama-3.1-8B"]
    tmp_path.joinpath("config.json").write_text(
        json.dumps(fields | {"torch_dtype": dtype})
    )
    checkpoint = open_checkpoint(
        str(tmp_path), ModelOptions(skip_tokenizer_init=True), has_weights=False
    )

    stored = find_stored_model(checkpoint)

    assert stored is not None and stored.list_formats()
