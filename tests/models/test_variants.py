"""What differs between checkpoints of one family: settings, lengths, experts, ALiBi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import (
    build_alibi_tensor as falcon_alibi,
)
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import fminfer
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint, open_random_checkpoint
from fminfer.models.families.config_parts import (
    interleaved_alibi_slopes,
    mpt_alibi_slopes,
)
from tests.conftest import FIELDS, family_config


def config_folder(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_random_weights_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Every family can be benched without weights, and its 16-bit path runs."""
    family_config(name).save_pretrained(tmp_path)
    engine = fminfer.Engine(random_init=str(tmp_path), dtype="bfloat16", kernels="off")
    prompts = [list(range(40)), [7]]
    request = {"prompt": prompts, "max_tokens": 3, "logprobs": 1, "temperature": 0}
    (record,) = engine.run([request | {"ignore_eos": True}])
    engine.close()
    assert record.error is None and record.result is not None
    for choice in record.result["choices"]:
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == 3 and all(-30 < value <= 0 for value in found)


@pytest.mark.parametrize(
    ("model_type", "setting", "fields"),
    [
        ("bloom", "slow_but_exact", {"slow_but_exact": True, "pretraining_tp": 2}),
        ("mpt", "attn_config.alibi", {"attn_config": {"alibi": False}}),
        ("mpt", "attn_config.qk_ln", {"attn_config": {"qk_ln": True}}),
        ("mpt", "attn_config.prefix_lm", {"attn_config": {"prefix_lm": True}}),
        ("mpt", "attn_config.rope", {"attn_config": {"rope": True}}),
        (
            "mpt",
            "attn_config.attn_type",
            {"attn_config": {"attn_type": "multiquery_attention"}},
        ),
        ("mpt", "logit_scale", {"logit_scale": "inv_sqrt_d_model"}),
        ("mpt", "no_bias", {"no_bias": False}),
        ("mpt", "norm_type", {"norm_type": "rmsnorm"}),
        ("mpt", "expansion_ratio", {"expansion_ratio": 2}),
        (
            "gemma3_text",
            "use_bidirectional_attention",
            {"use_bidirectional_attention": True},
        ),
    ],
)
def test_a_setting_that_would_be_wrong_is_refused_by_name(
    model_type: str, setting: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    name = config_folder(tmp_path, model_type=model_type, **fields)
    for open_model in (open_checkpoint, open_random_checkpoint):
        with pytest.raises(CheckpointError, match=rf"sets {setting} to .* only with"):
            open_model(name)


def test_a_config_that_transformers_refuses(tmp_path: Path) -> None:
    name = config_folder(
        tmp_path, model_type="mpt", attn_config={"attn_type": "no_such_kind"}
    )
    with pytest.raises(CheckpointError, match=r"config\.json is broken"):
        open_checkpoint(name)


BOTH = ("longt5", "pegasus", "marian", "whisper", "m2m_100", "t5gemma")
ENCODERS = ("albert", "electra", "deberta-v2", "xlm-roberta-xl", "eurobert")
STATEFUL = (
    "mamba",
    "mamba2",
    "rwkv",
    "jamba",
    "falcon_mamba",
    "recurrent_gemma",
    "zamba",
    "xlstm",
)
STATEFUL += (
    "nemotron_h",
    "zamba2",
    "bamba",
    "qwen3_next",
    "kimi_linear",
    "minimax",
    "lfm2",
)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"model_type": "own", "is_encoder_decoder": True},
            "'own' has .* of these t5, mt5, umt5",
        ),
        *(
            ({"model_type": name}, f"{name}.* has an encoder and a decoder")
            for name in BOTH
        ),
        *(({"model_type": name}, f"{name}.* is an encoder") for name in ENCODERS),
        *(
            ({"model_type": name}, f"{name}.* has layers with a state")
            for name in STATEFUL
        ),
        ({"model_type": "own", "mamba_d_state": 16}, "has layers with a state"),
        (
            {"model_type": "own", "text_config": {"model_type": "qwen3_next"}},
            "has layers with",
        ),
        (
            {"model_type": "own", "architectures": ["OwnForMaskedLM"]},
            "'own' is an encoder",
        ),
        ({"model_type": "zzyzx"}, "lists them\\); if it is a decoder"),
        (
            {"model_type": "qwen4"},
            r"'qwen4' is none of .*nearest is 'qwen[23]'; if .*docs/arch",
        ),
        # A name that tells nothing: the fields do.
        (
            {
                "model_type": "new",
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "n_routed_experts": 2,
            }
            | {
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "first_k_dense_replace": 1,
            },
            "'new' is none of the .*nearest is 'deepseek_v",
        ),
    ],
)
def test_what_cannot_run_is_named_with_the_nearest_that_can(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """BERT's nearest was biogpt and Mamba's llama, to be added "often in ten lines"."""
    name = config_folder(tmp_path, **fields)
    for open_model in (open_checkpoint, open_random_checkpoint):
        with pytest.raises(CheckpointError, match=says):
            open_model(name)


@pytest.mark.parametrize("text", ["[]", "{}", "no json"])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model_type|no JSON"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("mpt", 256),
        ("bloom", 256),
        ("gpt_bigcode", 256),
        ("llama-dynamic", 256),
        ("phi3-long", 256),
        ("gemma3_text", 256),
        ("gemma3", 256),
        ("ministral3", 256),
        ("phimoe-long", 256),
    ],
)
def test_context_length(name: str, length: int, tmp_path: Path) -> None:
    """`longrope` ends where its frequencies would change, although 512 positions are stated."""
    family_config(name).save_pretrained(tmp_path)
    assert open_random_checkpoint(str(tmp_path)).context_length == length


@pytest.mark.parametrize("num_heads", [1, 2, 4, 6, 12, 16, 28, 71])
def test_alibi_slopes_equal_transformers(num_heads: int) -> None:
    two = torch.ones(1, 2, dtype=torch.int64)
    for build in (bloom_alibi, falcon_alibi):
        slopes = torch.tensor(interleaved_alibi_slopes(num_heads))
        if build is falcon_alibi:
            slopes = slopes.bfloat16().float()
        expected = build(two, num_heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=0)
    for bias_max in (8, 16):
        expected = -build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0]
        slopes = torch.tensor(mpt_alibi_slopes(num_heads, bias_max))
        torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=0)
