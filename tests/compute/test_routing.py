"""In bfloat16 each token has the experts that transformers chooses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from fminfer.core.partition import Part
from fminfer.forward.layer import ExpertLayer
from fminfer.forward.layer_step import PartBuilder
from fminfer.forward.transformer import Transformer
from fminfer.models.checkpoint import open_checkpoint
from fminfer.models.holding import Holding
from fminfer.models.layer_source import open_weights
from tests.conftest import make_model, plain_registry

# The last two keep their routers in float32 in any dtype.
IN_FLOAT32 = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
)
ROUNDED = ("mixtral", "qwen2_moe", "granitemoe", "phimoe")


def load_routers(folder: Path) -> list[ExpertLayer | None]:
    """Return the mixture of each layer of a checkpoint, in bfloat16; None: it has none."""
    checkpoint = open_checkpoint(str(folder))
    part = Part(0, 1, 0, len(checkpoint.model.layers))
    where = torch.device("cpu")
    tensors = open_weights(
        checkpoint, part, holding=Holding(torch.bfloat16), device=where, seed=0
    )
    bodies = PartBuilder(plain_registry(torch.bfloat16), checkpoint.context_length)
    layers = Transformer(checkpoint.model, tensors, builder=bodies).layers
    return [
        layer.mlp if isinstance(layer.mlp, ExpertLayer) else None for layer in layers
    ]


def choose_theirs(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the experts that a mixture of transformers gives to its experts' module."""
    seen: list[torch.Tensor] = []
    hook = block.experts.register_forward_pre_hook(
        lambda _, given: seen.append(given[1])
    )
    with torch.no_grad():
        block(x[None])
    hook.remove()
    return seen[0].view(len(x), -1)


@pytest.mark.parametrize("name", [*IN_FLOAT32, *ROUNDED])
def test_experts_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Scores that were rounded gave some tokens other experts, where the model has
    precise ones."""
    own = make_model(name)
    if name not in IN_FLOAT32[-2:]:
        own = own.to(torch.bfloat16)
    own.save_pretrained(tmp_path)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16
    ).eval()
    generator = torch.Generator().manual_seed(3)
    pairs = zip(load_routers(tmp_path), theirs.model.layers, strict=True)
    ours, layer = next((mlp, layer) for mlp, layer in pairs if mlp is not None)
    x = torch.randn(4000, theirs.config.hidden_size, generator=generator).bfloat16()
    block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    _, chosen = ours._route(x, SimpleNamespace(shards=None))  # type: ignore[arg-type]
    assert torch.equal(chosen.sort(-1).values, choose_theirs(block, x).sort(-1).values)
