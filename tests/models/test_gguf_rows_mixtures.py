"""Mixtures of experts in GGUF, written by llama.cpp's package, beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fminfer.core.config import ModelOptions
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import longest_context_of, open_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.gguf.mixture_configs import PHIMOE_SCALE
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.origins import check_tensors
from tests.conftest import SHAPE, make_model_of
from tests.forward.test_transformer import error_of, logits_of
from tests.models.gguf_mixture_writer import (
    ATTENTION,
    LLM,
    dots1_keys,
    ernie_keys,
    exaone_moe_keys,
    glm4moe_keys,
    granitemoe_keys,
    hunyuan_alpha_keys,
    hunyuan_moe_keys,
    make_predicting_layer,
    minimax_keys,
    phimoe_factors,
    phimoe_keys,
    rename_choice,
    split_joined_experts,
)
from tests.models.gguf_writer import (
    Change,
    find_frequency_factors,
    map_tensors,
    read_published,
    stack_experts,
    with_permuted_rows,
    write_gguf,
)
from tests.models.test_gguf_models import differences

MAX_ERROR = 1e-4
OWN_TOKENIZER = ModelOptions(tokenizer=str(DEMO_MODEL))
Fields = dict[str, Any]
GROUPED: Fields = {"intermediate_size": 96, "num_key_value_heads": 2}
WIDE: Fields = GROUPED | {"head_dim": 32}  # four heads are wider than the hidden size
TIED: Fields = {"tie_word_embeddings": True}
HALF = {"partial_rotary_factor": 0.5, "rope_theta": 20000.0, "rope_type": "default"}
ROUTED: Fields = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
EXPERTS: Fields = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXAONE: Fields = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "sliding_window": 13,
    "num_hidden_layers": 4,
    "sliding_window_pattern": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ERNIE: Fields = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "rope_theta": 50000.0,
}
MULTIPLIERS: Fields = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0 + number for number in range(8)],
    "short_mscale": PHIMOE_SCALE,
    "long_mscale": PHIMOE_SCALE,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Row:
    """A small model, and what llama.cpp's converter makes of it."""

    arch: str
    model_type: str
    fields: Fields
    keys: Callable[[Any], Mapping[str, Any]] = lambda config: {}  # besides common ones
    change: Callable[[Any], Change] = lambda config: rename_choice
    more_tensors: Callable[[Any], Mapping[str, torch.Tensor]] = lambda config: {}
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.variant}" if self.variant else self.arch

    def write(self, path: Path, **more_keys: Any) -> Any:
        """Write its file, with other keys, and return its model of transformers."""
        fields = SHAPE | self.fields
        config = transformers.AutoConfig.for_model(self.model_type, **fields)
        model = make_model_of(config)
        write_gguf(
            model,
            self.arch,
            {**self.keys(config), **more_keys},
            path,
            change=self.change(config),
            more_tensors=self.more_tensors(config),
        )
        return model


GLM = Row(
    "glm4moe",
    "glm4_moe",
    WIDE | ROUTED | {"use_qk_norm": True, "attention_bias": True, "n_group": 1},
    glm4moe_keys,
)
ROWS = (
    GLM,
    Row(
        "glm4moe",
        "glm4_moe",
        GROUPED | ROUTED | {"n_group": 4, "topk_group": 2, "rope_parameters": HALF},
        glm4moe_keys,
        variant="groups",
    ),
    Row("exaone-moe", "exaone_moe", WIDE | EXAONE, exaone_moe_keys),
    Row(
        "exaone-moe",
        "exaone_moe",
        WIDE | EXAONE | {"rope_parameters": LLAMA3, "first_k_dense_replace": 2},
        exaone_moe_keys,
        more_tensors=find_frequency_factors,
        variant="factors",
    ),
    Row(
        "dots1",
        "dots1",
        WIDE | ROUTED | {"norm_topk_prob": True, "sliding_window": None},
        dots1_keys,
    ),
    Row(
        "dots1",
        "dots1",
        GROUPED | ROUTED | {"norm_topk_prob": False, "sliding_window": None},
        dots1_keys,
        variant="unscaled",
    ),
    Row("olmoe", "olmoe", GROUPED | {"num_experts": 6, "num_experts_per_tok": 2}),
    Row("ernie4_5-moe", "ernie4_5_moe", GROUPED | ERNIE | TIED, ernie_keys),
    Row(
        "ernie4_5-moe",
        "ernie4_5_moe",
        WIDE | ERNIE | {"moe_layer_interval": 2, "moe_num_shared_experts": 0},
        ernie_keys,
        variant="interval",
    ),
    Row(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        WIDE | TIED | {"num_experts": 6, "moe_topk": 2},
        hunyuan_moe_keys,
    ),
    Row(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        WIDE
        | {"num_experts": 6, "moe_topk": 3, "max_position_embeddings": 256 * 1024}
        | {"rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        hunyuan_alpha_keys,
        variant="alpha",
    ),
    Row(
        "phimoe",
        "phimoe",
        GROUPED
        | EXPERTS
        | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 17},
        phimoe_keys,
    ),
    Row(
        "phimoe",
        "phimoe",
        GROUPED | EXPERTS | {"rope_parameters": LONGROPE},
        phimoe_keys,
        more_tensors=phimoe_factors,
        variant="long",
    ),
    Row(
        "granitemoe",
        "granitemoe",
        GROUPED | EXPERTS | MULTIPLIERS,
        granitemoe_keys,
        lambda config: split_joined_experts(with_permuted_rows(config)),
    ),
    Row(
        "granitemoe",
        "granitemoeshared",
        GROUPED | EXPERTS | MULTIPLIERS | TIED | {"shared_intermediate_size": 40},
        granitemoe_keys,
        lambda config: split_joined_experts(with_permuted_rows(config)),
        variant="shared",
    ),
    Row(
        "minimax-m2",
        "minimax_m2",
        WIDE | EXPERTS | {"rope_parameters": HALF},
        minimax_keys,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_logits_are_those_of_transformers(row: Row, tmp_path: Path) -> None:
    """Each row: the spec of the config before conversion, and logits of two stages."""
    path = tmp_path / "m.gguf"
    model = row.write(path)
    checkpoint = open_checkpoint(str(path))
    faults = [*differences(checkpoint.model, architecture_of(model.config).model)]
    assert not faults
    assert checkpoint.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert checkpoint.context_length == longest_context_of(model.config)
    parts = split_layers(len(checkpoint.model.layers), 2, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR


@pytest.mark.parametrize("name", ["glm4moe", "exaone-moe"])
def test_layers_that_predict_further_tokens_are_left_out(
    name: str, tmp_path: Path
) -> None:
    """Published files of both have one such layer, and block_count counts it."""
    row = next(row for row in ROWS if row.name == name)
    config = transformers.AutoConfig.for_model(row.model_type, **SHAPE | row.fields)
    num = config.num_hidden_layers
    published = stack_experts(read_published(make_model_of(config)))
    stored = dict(map_tensors(published, row.arch, num, rename_choice))
    behind = make_predicting_layer(stored, num - 1)
    with_more = replace(row, more_tensors=lambda config: behind)
    path = tmp_path / "m.gguf"
    keys = {LLM.BLOCK_COUNT: num + 1, LLM.NEXTN_PREDICT_LAYERS: 1}
    model = with_more.write(path, **keys)
    assert len(open_checkpoint(str(path)).model.layers) == num
    parts = split_layers(num, 2, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR
    with_more.write(path, **keys | {LLM.NEXTN_PREDICT_LAYERS: num + 1})
    with pytest.raises(CheckpointError, match=f"no whole number from 0 to {num}"):
        open_checkpoint(str(path))
    row.write(path, **{LLM.NEXTN_PREDICT_LAYERS: 1})  # the last layer is one as others
    with pytest.raises(CheckpointError, match=f"layer {num - 1} predicts further"):
        open_checkpoint(str(path))


def test_parts_of_positions_are_the_same_in_texts(tmp_path: Path) -> None:
    """The converter tells of them for GLM-4.5V and 4.6V."""
    row = next(row for row in ROWS if row.name == "glm4moe")
    path = tmp_path / "m.gguf"
    model = row.write(path, **{"{arch}.rope.dimension_sections": [1, 1, 2, 0]})
    parts = split_layers(len(open_checkpoint(str(path)).model.layers), 1, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR


def test_a_bias_of_the_choice_may_be_a_vector_or_a_row(tmp_path: Path) -> None:
    """The converter stores ERNIE's as it is published, with one row."""
    row = next(row for row in ROWS if row.arch == "ernie4_5-moe")

    def with_vectors(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        is_choice = "e_score_correction_bias" in name
        assert not is_choice or tensor.shape == (1, 6)
        return rename_choice(name, tensor[0] if is_choice else tensor)

    path = tmp_path / "m.gguf"
    model = replace(row, change=lambda config: with_vectors).write(path)
    parts = split_layers(3, 1, head_cost=0.0)
    assert error_of(logits_of(path, parts), model) < MAX_ERROR


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("glm4moe", LLM.EXPERT_GATING_FUNC, 1, "expert_gating_func to 1"),
        ("dots1", LLM.EXPERT_GATING_FUNC, 1, "expert_gating_func to 1"),
        ("exaone-moe", LLM.EXPERT_GATING_FUNC, 1, "expert_gating_func to 1"),
        ("minimax-m2", LLM.EXPERT_GATING_FUNC, 1, "expert_gating_func to 1"),
        ("minimax-m2", LLM.EXPERT_FEED_FORWARD_LENGTH, 48, "feed_forward_length to"),
        ("minimax-m2", LLM.EXPERT_WEIGHTS_SCALE, 2.0, "expert_weights_scale to 2.0"),
        ("olmoe", LLM.EXPERT_WEIGHTS_NORM, True, "expert_weights_norm to True"),
        ("olmoe", ATTENTION.CLAMP_KQV, 8.0, "clamp_kqv to 8.0, which fminfer does not"),
        ("ernie4_5-moe", LLM.EXPERT_GATING_FUNC, 2, "expert_gating_func to 2"),
        ("ernie4_5-moe", LLM.INTERLEAVE_MOE_LAYER_STEP, 0, "moe_layer_step is 0"),
        ("hunyuan-moe", LLM.EXPERT_SHARED_COUNT, 2, "expert_shared_count to 2"),
        ("hunyuan-moe", LLM.EXPERT_FEED_FORWARD_LENGTH, 48, "feed_forward_length to"),
        ("granitemoe", "{arch}.rope.scaling.finetuned", False, "finetuned to False"),
    ],
)
def test_a_key_that_would_change_answers_refuses_the_file(
    name: str, key: str, value: Any, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    next(row for row in ROWS if row.name == name).write(path, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        check_tensors(open_checkpoint(str(path), OWN_TOKENIZER))
    assert says in str(caught.value)
