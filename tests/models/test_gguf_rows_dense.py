"""Dense decoders in GGUF, written by llama.cpp's package, beside transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import longest_context_of, open_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.origins import check_tensors
from tests.conftest import SHAPE, make_model_of
from tests.forward.test_transformer import error_of, logits_of, rows_of_ids
from tests.models.gguf_writer import (
    Change,
    as_published,
    find_frequency_factors,
    with_permuted_rows,
    write_gguf,
)
from tests.models.test_gguf_file import check_broken_metadata
from tests.models.test_gguf_models import FORMS, check_form, differences

MAX_ERROR = 1e-4
KEYS = gguf.Keys
GROUPED = {"intermediate_size": 96, "num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 32}  # four heads are wider than the hidden size
HALF = {"partial_rotary_factor": 0.5, "rope_theta": 20000.0, "rope_type": "default"}
FOUR_LAYERS = {"num_hidden_layers": 4}  # so that each kind of layer comes
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
MINISTRAL3 = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Row:
    """A small model, and what llama.cpp's converter makes of it."""

    arch: str
    model_type: str
    fields: Mapping[str, Any]
    # Of the model, besides common ones.
    keys: Callable[[Any], Mapping[str, Any]] = lambda model: {}
    change: Callable[[Any], Change] = lambda config: as_published
    more_tensors: Callable[[Any], Mapping[str, torch.Tensor]] = lambda config: {}
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.variant}" if self.variant else self.arch

    def make_config(self) -> Any:
        return transformers.AutoConfig.for_model(self.model_type, **SHAPE | self.fields)


def turned_keys(model: Any) -> Mapping[str, Any]:
    """Return the key of how much of a head turns."""
    config = model.config
    rope = config.rope_parameters
    size = getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    turned_dim = int(size * rope.get("partial_rotary_factor", 1.0))
    return {KEYS.Rope.DIMENSION_COUNT: turned_dim}


def llama_keys(model: Any) -> Mapping[str, Any]:
    """Return what the converter of LLaMA and its heirs adds."""
    return turned_keys(model) | {KEYS.LLM.VOCAB_SIZE: model.config.vocab_size}


def window_keys(model: Any) -> Mapping[str, Any]:
    config = model.config
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        KEYS.Attention.SLIDING_WINDOW: config.sliding_window,
        KEYS.Attention.SLIDING_WINDOW_PATTERN: kinds if any(kinds) else None,
    }


def cohere2_keys(model: Any) -> Mapping[str, Any]:
    config = model.config
    return llama_keys(model) | {
        KEYS.LLM.LOGIT_SCALE: config.logit_scale,
        KEYS.Attention.SLIDING_WINDOW: config.sliding_window,
        KEYS.Rope.SCALING_TYPE: "none",
    }


def mistral3_keys(model: Any) -> Mapping[str, Any]:
    rope = model.config.rope_parameters
    return llama_keys(model) | {
        KEYS.Rope.SCALING_YARN_LOG_MUL: rope["mscale_all_dim"],
        KEYS.Attention.TEMPERATURE_SCALE: rope["llama_4_scaling_beta"],
    }


def hunyuan_keys(model: Any) -> Mapping[str, Any]:
    """Return the keys of frequencies that alpha has changed already."""
    config = model.config
    rope = config.rope_parameters
    size = config.head_dim
    base = rope["rope_theta"] * rope.get("alpha", 1.0) ** (size / (size - 2))
    return {
        KEYS.Rope.FREQ_BASE: base,
        KEYS.Rope.SCALING_TYPE: "none",
        KEYS.Rope.SCALING_FACTOR: 1.0,
        KEYS.Rope.SCALING_ORIG_CTX_LEN: 256 * 1024,
        KEYS.LLM.CONTEXT_LENGTH: 256 * 1024,
    }


def nemotron_keys(model: Any) -> Mapping[str, Any]:
    return llama_keys(model) | {
        KEYS.Attention.LAYERNORM_EPS: model.config.norm_eps,
        KEYS.Rope.SCALING_TYPE: "none",
    }


def apertus_keys(model: Any) -> Mapping[str, Any]:
    """Return the values of each layer's activation, which are tensors of a checkpoint."""
    activations = [layer.mlp.act_fn for layer in model.model.layers]
    values = {
        KEYS.xIELU.ALPHA_P: "alpha_p",
        KEYS.xIELU.ALPHA_N: "alpha_n",
        KEYS.xIELU.BETA: "beta",
        KEYS.xIELU.EPS: "eps",
    }
    return llama_keys(model) | {
        key: [getattr(each, name).item() for each in activations]
        for key, name in values.items()
    }


def without_activations(config: Any) -> Change:
    """Return a change that takes the tensors of Apertus's activations away."""
    return lambda name, tensor: {} if ".act_fn." in name else {name: tensor}


def mpt_keys(model: Any) -> Mapping[str, Any]:
    config = model.config
    return {
        KEYS.LLM.CONTEXT_LENGTH: config.max_seq_len,
        KEYS.LLM.FEED_FORWARD_LENGTH: 4 * config.hidden_size,
        KEYS.Attention.CLAMP_KQV: config.attn_config.clip_qkv,
        KEYS.Attention.MAX_ALIBI_BIAS: float(config.attn_config.alibi_bias_max),
    }


def starcoder_keys(model: Any) -> Mapping[str, Any]:
    return {
        KEYS.LLM.FEED_FORWARD_LENGTH: 4 * model.config.hidden_size,
        KEYS.Attention.HEAD_COUNT_KV: 1,
    }


def stack_head_norms(config: Any) -> Change:
    """Return a change that stacks the norms of StableLM's heads."""
    stacked: dict[str, list[torch.Tensor]] = {}

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        stem, _, number = name.removesuffix(".weight").partition(".norms.")
        if not number:
            return {name: tensor}
        is_query = stem.endswith("q_layernorm")
        num = config.num_attention_heads if is_query else config.num_key_value_heads
        norms = stacked.setdefault(stem, [tensor] * num)
        norms[int(number)] = tensor
        return {f"{stem}.weight": torch.stack(norms)} if int(number) == num - 1 else {}

    return change


def norms_plus_one(config: Any) -> Change:
    """Return a change of Nemotron's norms, whose biases stay."""

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: tensor + 1 if name.endswith("norm.weight") else tensor}

    return change


ROWS = (
    Row(
        "smollm3",
        "smollm3",
        GROUPED | FOUR_LAYERS | {"rope_theta": 50000.0},
        llama_keys,
        with_permuted_rows,
    ),
    Row("jais2", "jais2", WIDE, turned_keys),
    Row(
        "glm4",
        "glm4",
        WIDE | {"attention_bias": True, "rope_parameters": HALF},
        turned_keys,
    ),
    Row(
        "cohere2",
        "cohere2",
        GROUPED | {"sliding_window": 13, "logit_scale": 0.7, "num_hidden_layers": 5},
        cohere2_keys,
    ),
    Row(
        "olmo",
        "olmo",
        GROUPED | {"clip_qkv": 0.9},
        lambda model: {
            KEYS.Attention.LAYERNORM_EPS: 1e-5,
            KEYS.Attention.CLAMP_KQV: model.config.clip_qkv,
        },
        with_permuted_rows,
    ),
    Row(
        "olmo",
        "olmo",
        GROUPED | {"tie_word_embeddings": True},
        lambda model: {KEYS.Attention.LAYERNORM_EPS: 1e-5},
        with_permuted_rows,
        variant="unclipped",
    ),
    Row(
        "exaone4",
        "exaone4",
        WIDE
        | FOUR_LAYERS
        | {"sliding_window": 13, "sliding_window_pattern": 3}
        | {"rope_parameters": LLAMA3},
        window_keys,
        more_tensors=find_frequency_factors,
    ),
    Row(
        "exaone4",
        "exaone4",
        WIDE | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        variant="near",
    ),
    Row("seed_oss", "seed_oss", WIDE | {"attention_bias": True}),
    Row(
        "apertus",
        "apertus",
        WIDE | {"rope_parameters": LLAMA3},
        apertus_keys,
        without_activations,
        more_tensors=find_frequency_factors,
    ),
    Row(
        "mistral3",
        "ministral3",
        WIDE | {"rope_parameters": MINISTRAL3},
        mistral3_keys,
        with_permuted_rows,
    ),
    Row(
        "mistral3",
        "mistral",
        WIDE | {"sliding_window": None, "tie_word_embeddings": True},
        llama_keys,
        with_permuted_rows,
        variant="small",
    ),
    Row("ernie4_5", "ernie4_5", WIDE),
    Row("ernie4_5", "ernie4_5", WIDE | {"use_bias": True}, variant="biases"),
    Row("hunyuan-dense", "hunyuan_v1_dense", WIDE),
    Row(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        WIDE
        | {"rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}
        | {"max_position_embeddings": 256 * 1024, "attention_bias": True},
        hunyuan_keys,
        variant="alpha",
    ),
    Row(
        "arcee",
        "arcee",
        WIDE | {"rope_parameters": YARN},
        llama_keys,
        with_permuted_rows,
    ),
    Row("stablelm", "stablelm", GROUPED | {"rope_parameters": HALF}, turned_keys),
    Row(
        "stablelm",
        "stablelm",
        GROUPED | {"use_parallel_residual": True, "qk_layernorm": True},
        turned_keys,
        stack_head_norms,
        variant="parallel",
    ),
    Row(
        "phi2",
        "phi",
        {"intermediate_size": 256, "rope_parameters": HALF | {"rope_theta": 10000.0}},
        turned_keys,
    ),
    Row(
        "nemotron",
        "nemotron",
        WIDE | {"rope_parameters": HALF},
        nemotron_keys,
        norms_plus_one,
    ),
    Row(
        "mpt",
        "mpt",
        {"max_seq_len": 256, "num_attention_heads": 12, "hidden_size": 96}
        | {"attn_config": {"clip_qkv": 0.9}},
        mpt_keys,
    ),
    Row("starcoder", "gpt_bigcode", {}, starcoder_keys),
)


BY_NAME = {row.name: row for row in ROWS}


def write_row(row: Row, path: Path) -> Any:
    """Write a row's file; return the model of transformers."""
    config = row.make_config()
    model = make_model_of(config)
    write_gguf(
        model,
        row.arch,
        row.keys(model),
        path,
        change=row.change(config),
        more_tensors=row.more_tensors(config),
    )
    return model


def check_row(row: Row, path: Path, num_stages: int) -> None:
    model = write_row(row, path)
    checkpoint = open_checkpoint(str(path))
    faults = [*differences(checkpoint.model, architecture_of(model.config).model)]
    assert not faults
    assert checkpoint.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert checkpoint.context_length == longest_context_of(model.config)
    parts = split_layers(len(checkpoint.model.layers), num_stages, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_logits_are_those_of_transformers(row: Row, tmp_path: Path) -> None:
    """Each row: the spec of the config before conversion, and logits of two stages."""
    check_row(row, tmp_path / "m.gguf", num_stages=2)


@pytest.mark.parametrize(
    ("row", "form"),
    [
        pytest.param(row, FORMS[place % len(FORMS)], id=row.name)
        for place, row in enumerate(ROWS)
    ],
)
def test_quantized_rows_lie_as_floats_do(row: Row, form: str, tmp_path: Path) -> None:
    """Rows of blocks are put in order, joined and checked by their sizes, too."""
    write_row(row, tmp_path / "m.gguf")
    check_form(str(tmp_path / "m"), form, rows_of_ids()[1:], tmp_path)


def test_the_steeper_slopes_of_mpt(tmp_path: Path) -> None:
    """MPT-7B-StoryWriter has a bias of 16, which transformers itself does not read."""
    row = BY_NAME["mpt"]
    fields = {**row.fields, "attn_config": {"alibi_bias_max": 16}}
    model = write_row(replace(row, fields=fields), tmp_path / "m.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert not [*differences(checkpoint.model, architecture_of(model.config).model)]


def test_stablelm_goes_by_its_norms(tmp_path: Path) -> None:
    """Files of StableLM-3B say that residuals are parallel, and they are not."""
    path = tmp_path / "m.gguf"
    row = BY_NAME["stablelm"]
    wrong = {KEYS.LLM.USE_PARALLEL_RESIDUAL: True}
    model = write_row(replace(row, keys=lambda model: row.keys(model) | wrong), path)
    parts = split_layers(3, 1, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("glm4", KEYS.Rope.DIMENSION_SECTIONS, [4, 4, 4, 4], "does not read for"),
        ("cohere2", KEYS.Rope.DIMENSION_COUNT, 8, "only with 16"),
        ("cohere2", KEYS.Attention.SLIDING_WINDOW, None, "lacks the key cohere2.atte"),
        ("olmo", KEYS.Attention.LAYERNORM_EPS, 1e-6, "only with 1e-05"),
        (
            "olmo",
            KEYS.LLM.EMBEDDING_LENGTH,
            32,
            "token_embd.weight' has shape (300, 64)",
        ),
        ("mistral3", KEYS.LLM.EXPERT_COUNT, 4, "does not read for this architecture"),
        ("mistral3", KEYS.Attention.TEMPERATURE_LENGTH, 64, "does not read for this"),
        ("mpt", KEYS.Attention.MAX_ALIBI_BIAS, 0.0, "only with 8.0 or 16.0"),
        ("mpt", KEYS.Attention.MAX_ALIBI_BIAS, None, "lacks the key mpt.attention.ma"),
        ("mpt", KEYS.LLM.FEED_FORWARD_LENGTH, 96, "only with 384"),
        ("starcoder", KEYS.Attention.HEAD_COUNT_KV, 4, "only with 1"),
        ("apertus", KEYS.xIELU.BETA, 0.5, "xielu.beta is 0.5, and no float32 of each"),
        ("apertus", KEYS.xIELU.EPS, [1, 2, 3], "[1, 2, 3], and no float32 of each lay"),
        ("apertus", KEYS.xIELU.EPS, [0.5] * 4, "block_count is 3, and 4 are stored"),
        ("apertus", KEYS.xIELU.ALPHA_P, [0.5] * 2, "such as 'blk.2.xielu.alpha_p'"),
        ("arcee", KEYS.xIELU.BETA, [0.5] * 3, "holds a tensor 'blk.0.xielu.beta'"),
    ],
)
def test_a_key_that_would_change_answers_refuses_the_file(
    name: str, key: str, value: Any, says: str, tmp_path: Path
) -> None:
    row = BY_NAME[name]
    path = tmp_path / "m.gguf"
    write_row(replace(row, keys=lambda model: row.keys(model) | {key: value}), path)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(open_checkpoint(str(path)))
    assert says in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    "name", ["cohere2", "exaone4", "mistral3", "apertus", "mpt", "starcoder"]
)
def test_broken_metadata_are_refused_or_make_a_model(name: str, tmp_path: Path) -> None:
    """Functions of rows read numbers of others, and believe none."""
    source = tmp_path / f"{name}.gguf"
    write_row(BY_NAME[name], source)
    check_broken_metadata(source, tmp_path / "m.gguf")
