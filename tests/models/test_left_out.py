"""Checkpoints of which a part runs: what is for images, or for several tokens, is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.known_sizes import check_split
from fminfer.models.origins import check_tensors
from tests.conftest import make_model
from tests.forward.test_transformer import MAX_ERROR, error_of, logits_of, one_stage

Tensors = dict[str, torch.Tensor]


def save(
    name: str,
    folder: Path,
    rename: Callable[[str], str],
    more: dict[str, tuple[int, ...]],
) -> Any:
    """Save a small model whose tensors have other names, and further ones beside them."""
    own = make_model(name)
    own.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {rename(each): tensor for each, tensor in load_file(path).items()}
    tensors |= {each: torch.ones(shape) for each, shape in more.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return own


def _of_newer_releases(name: str) -> str:
    if not name.startswith("language_model."):
        return f"model.{name}"
    name = name.removeprefix("language_model.")
    return (
        name.replace("model.", "model.language_model.")
        if name.startswith("model.")
        else name
    )


def _with_gate(name: str) -> str:
    return name.replace("mlp.moe_statics", "mlp.gate.moe_statics")


# of a fourth layer, which predicts a further token
EXTRA = "model.layers.3.eh_proj.weight"
VISION = "vision_tower.encoder.layers.0.mlp.fc3.weight"


@pytest.mark.parametrize(
    ("name", "rename", "more"),
    [
        ("gemma3", str, {VISION: (2, 2)}),
        ("gemma3", _of_newer_releases, {f"model.{VISION}": (2, 2)}),
        ("mistral3", _of_newer_releases, {}),
        ("glm4_moe", str, {EXTRA: (2, 2)}),
        (
            "ernie4_5_moe",
            _with_gate,
            {"model.mtp_block.0.input_layernorm.weight": (64,)},
        ),
        ("exaone_moe", str, {"mtp.norm.weight": (64,)}),
        ("xglm", str, {"model.embed_positions.weights": (258, 64)}),
    ],
)
def test_what_is_left_out_changes_nothing(
    name: str,
    rename: Callable[[str], str],
    more: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    own = save(name, tmp_path, rename, more)
    assert error_of(logits_of(tmp_path, one_stage()), own) < MAX_ERROR


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("gemma3", "language_model.model.layers.0.more.weight"),
        ("gemma3", "vision.more.weight"),
        ("glm4_moe", "model.layers.4.eh_proj.weight"),
        ("llama", VISION),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    name: str, extra: str, tmp_path: Path
) -> None:
    save(name, tmp_path, str, {extra: (2, 2)})
    with pytest.raises(CheckpointError, match=f"holds a tensor '{extra}'"):
        check_tensors(open_checkpoint(str(tmp_path)))


def test_the_text_part_counts(tmp_path: Path) -> None:
    """Its vocabulary and layers are the model's; the ends of sequences are those of the
    whole."""
    save("mistral3", tmp_path, str, {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [5, 6]}))
    (tmp_path / "generation_config.json").unlink()
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.config.vocab_size, checkpoint.context_length) == (300, 256)
    assert checkpoint.eos_ids == {5, 6}
    with pytest.raises(fminfer.FminferError, match="3 layers"):
        check_split(fminfer.core.config.EngineConfig(str(tmp_path)), 4)


def test_a_part_that_does_not_run_is_named(tmp_path: Path) -> None:
    save("mistral3", tmp_path, str, {})
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"]["model_type"] = "llama"
    path.write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"text_config of the architecture 'llama'.*mistral"
    ):
        open_checkpoint(str(tmp_path))


def test_a_quantized_whole_is_refused(tmp_path: Path) -> None:
    """The field stands beside text_config, not in it."""
    save("gemma3", tmp_path, str, {})
    path = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "hqq"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    with pytest.raises(
        CheckpointError,
        match=r"quantized by 'hqq' \(groups of HQQ's own\), which does not",
    ):
        open_checkpoint(str(tmp_path))
