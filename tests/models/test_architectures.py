"""Rows beside published configs; fields that nobody reads and tensors that misfit are
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fminfer.core.errors import CheckpointError
from fminfer.core.partition import split_layers
from fminfer.models.checkpoint import find_text_config, open_checkpoint
from fminfer.models.config_fields import architecture_of
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, open_weights
from fminfer.models.tensor_specs import entry_specs, exit_specs, layer_specs
from tests.conftest import make_model
from tests.published_configs import PUBLISHED

Tensors = dict[str, torch.Tensor]


def config_of(fields: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**fields)


def count_parameters(config: Any) -> int:
    model = architecture_of(config).model
    specs = [layer_specs(layer, model.hidden_size) for layer in model.layers]
    outside = entry_specs(model) | exit_specs(model)
    if find_text_config(config).tie_word_embeddings:
        del outside["head.weight"]
    return sum(spec.size for each in (*specs, outside) for spec in each.values())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_model_is_described_in_full(name: str) -> None:
    """A field that changes nothing refuses no model, and no tensor is forgotten."""
    billions, fields = PUBLISHED[name]
    assert count_parameters(config_of(fields)) / 1e9 == pytest.approx(
        billions, rel=0.003, abs=6e-5
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "bidirectional",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "softcapping to 50.0",
        ),
        ({"model_type": "bloom", "slow_but_exact": True}, "slow_but_exact to True"),
        ({"model_type": "mpt", "logit_scale": 0.5}, "logit_scale to 0.5"),
        ({"model_type": "mpt", "no_bias": False}, "no_bias"),
        ({"model_type": "mpt", "norm_type": "rmsnorm"}, "norm_type"),
        (
            {"model_type": "mpt", "attn_config": {"qk_ln": True}},
            "attn_config.qk_ln to True",
        ),
        ({"model_type": "mpt", "attn_config": {"rope": True}}, "attn_config.rope"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        (
            {"model_type": "llama", "quantization_config": {"bits": 4}},
            "quantization_config",
        ),
    ],
)
def test_a_field_that_nobody_reads_refuses_the_model(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        architecture_of(config_of(fields))


def test_a_field_that_no_class_declares_is_passed_over() -> None:
    architecture_of(config_of({"model_type": "llama", "my_own_note": "of training"}))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"model_type": "llama", "sliding_window": 8}, {"model_type": "llama"}),
        (
            {
                "model_type": "mistral",
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 32,
            },
            {"model_type": "mistral", "sliding_window": 8},
        ),
        (
            {"model_type": "llama", "partial_rotary_factor": 0.5},
            {"model_type": "llama"},
        ),
        (
            {"model_type": "gpt2", "rope_theta": 1e4, "sliding_window": 4},
            {"model_type": "gpt2"},
        ),
        (
            {
                "model_type": "gpt_neo",
                "attention_types": [[["global"], 24]],
                "window_size": 512,
            },
            {"model_type": "gpt_neo", "attention_types": [[["global"], 24]]},
        ),
        (
            {"model_type": "falcon", "alibi": True, "rope_theta": 1e6},
            {"model_type": "falcon", "alibi": True},
        ),
    ],
)
def test_what_transformers_does_not_read_changes_nothing(
    fields: dict[str, Any], same: dict[str, Any]
) -> None:
    """Leftovers of another family were obeyed, or refused: a window of a llama, say."""
    assert (
        architecture_of(config_of(fields)).model
        == architecture_of(config_of(same)).model
    )


def test_an_activation_that_does_not_run_is_named() -> None:
    """It was a KeyError, and only after the weights had been read."""
    with pytest.raises(CheckpointError, match="activation 'relu6', which does not run"):
        architecture_of(config_of({"model_type": "llama", "hidden_act": "relu6"}))


def load(folder: Path) -> LayerSource:
    checkpoint = open_checkpoint(str(folder))
    (part,) = split_layers(3, 1, head_cost=0.0)
    return open_weights(
        checkpoint,
        part,
        holding=Holding(torch.float32),
        device=torch.device("cpu"),
        seed=0,
    )


def save(
    name: str, folder: Path, change: Callable[[Tensors], object], **fields: Any
) -> None:
    """Save a small model whose tensors, or config, were changed."""
    make_model(name).save_pretrained(folder)
    path = folder / "model.safetensors"
    config = folder / "config.json"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def _rename(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name + "s": tensors.pop(name)})


def _put(
    name: str, value: Callable[[Tensors], torch.Tensor]
) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value(tensors).clone().contiguous()})


Q = "model.layers.2.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
FC = "transformer.h.1.mlp.c_fc.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
UP = "model.layers.1.mlp.up_proj.weight"
A_TENSOR = {"llama": DOWN, "gpt2": FC, "mixtral": EXPERT}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (
            "llama",
            _rename("model.layers.1.mlp.up_proj.weight"),
            "lacks 1 of the model's tensors, such as 'model.layers.1.mlp.up_proj.weight'",
        ),
        (
            "llama",
            lambda tensors: tensors.pop("model.norm.weight"),
            "model.norm.weight",
        ),
        ("llama", lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
        ("llama", _put(Q, lambda t: t[Q][:32]), r"shape \(32, 64\).*\(64, 64\)"),
        ("llama", _put(DOWN, lambda t: t[DOWN].t()), r"shape \(128, 64\).*\(64, 128\)"),
        (
            "llama",
            _put("model.layers.0.x.weight", lambda t: t[Q]),
            "model.layers.0.x.weight",
        ),
        (
            "llama",
            _put("model.layers.3.mlp.up_proj.weight", lambda t: t[Q]),
            "model.layers.3.mlp",
        ),
        ("llama", _put(Q.replace("weight", "bias"), lambda t: t[Q][0]), "q_proj.bias"),
        (
            "gpt2",
            lambda t: t.pop(FC),
            "lacks 1 of .*, such as .*h.1.mlp.c_fc.weight",
        ),
        (
            "gpt2",
            _put(FC, lambda t: t[FC].t()),
            r"c_fc.weight.* \(256, 64\).*\(64, 256\)",
        ),
        ("gpt2", _rename(FC), "h.1.mlp.c_fc.weight"),
        ("mixtral", _rename(EXPERT), EXPERT),
        (
            "mixtral",
            _put(EXPERT, lambda t: t[EXPERT].t()),
            r"experts.3.w2.weight.*shape",
        ),
        (
            "mixtral",
            _put(EXPERT, lambda t: t[EXPERT][:, :9]),
            r"experts.3.w2.weight.*shape",
        ),
        (
            "gpt2",
            _put(FC, lambda t: t[FC][:, :9]),
            r"c_fc.weight.* \(64, 9\).*\(64, 256\)",
        ),
        (
            "mixtral",
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
            "experts.3.w2.weight",
        ),
        (
            "mixtral",
            _put(
                "model.layers.1.block_sparse_moe.experts.4.w2.weight",
                lambda t: t["model.norm.weight"],
            ),
            "experts.4.w2.weight",
        ),
    ],
)
def test_a_tensor_that_misfits_is_named(
    name: str, change: Callable[[Tensors], object], named: str, tmp_path: Path
) -> None:
    save(name, tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("name", A_TENSOR)
def test_a_tensor_twice_is_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, lambda tensors: None)
    twice = A_TENSOR[name]
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({twice: tensors[twice]}, tmp_path / "b.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{twice}' twice, in a.safetensors and b"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", A_TENSOR)
def test_a_file_that_is_cut_off_is_named(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is broken"):
        load(tmp_path)


def test_a_head_of_its_own_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    """Of `tie_word_embeddings: true` and another lm_head.weight, logprobs were off by
    up to 2.4."""
    save("llama", tmp_path, lambda tensors: None, tie_word_embeddings=True)
    found = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    entry = found.load_entry()
    head = found.load_exit(entry)["head.weight"]
    assert torch.equal(head.plain, stored["lm_head.weight"])
    assert not head.equals(entry["embed.weight"])


def test_a_head_that_is_the_embedding_is_kept_once(tmp_path: Path) -> None:
    same = _put(
        "lm_head.weight", lambda tensors: tensors["model.embed_tokens.weight"].clone()
    )
    save("llama", tmp_path, same, tie_word_embeddings=True)
    found = load(tmp_path)
    entry = found.load_entry()
    assert found.load_exit(entry)["head.weight"] is entry["embed.weight"]


def test_masks_and_tables_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("transformer.")]:
            # as gpt2's own
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors["h.0.attn.masked_bias"] = torch.ones(())

    save("gpt2", tmp_path, change)
    assert len([*load(tmp_path).load_layers()]) == 3


def test_experts_that_are_fused_on_disk_too(tmp_path: Path) -> None:
    """As transformers holds them in memory, and some checkpoints on disk."""
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    one_by_one = next(load(tmp_path).load_layers())
    save_file(
        dict(model.state_dict()),
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    fused = next(load(tmp_path).load_layers())
    for name in ("experts.up.weight", "experts.down.weight", "router.weight"):
        assert fused[name].equals(one_by_one[name])


def test_an_expert_under_two_names_is_refused(tmp_path: Path) -> None:
    old = "block_sparse_moe.experts.0.w1.weight"
    new = "mlp.experts.0.w1.weight"
    twice = _put(
        f"model.layers.0.{new}", lambda tensors: tensors[f"model.layers.0.{old}"]
    )
    save("mixtral", tmp_path, twice)
    with pytest.raises(
        CheckpointError, match=r"holds a tensor .*mlp.experts.0.w1.weight"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["embed_out", "lm_head"])
def test_both_names_of_gpt_neox_s_head(name: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        (head,) = (
            each for each in tensors if each in ("lm_head.weight", "embed_out.weight")
        )
        tensors[f"{name}.weight"] = tensors.pop(head)

    save("gpt_neox", tmp_path, change)
    assert "head.weight" in load(tmp_path).load_exit({})
