"""What rows with mixtures of experts have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fminfer.compute.spec import Mlp, Moe
from fminfer.models.families.tensor_names import Sources, experts, parameter, sources


def mixtral_names() -> Sources:
    """Return where router and experts are, in the first form and in that of transformers 5."""
    first, second, third = (
        f"block_sparse_moe.experts.*.{name}|mlp.experts.*.{name}" for name in ("w1", "w2", "w3")
    )
    own = sources(router="block_sparse_moe.gate|mlp.gate")
    return own | experts(f"{first} {third}", second, "mlp.experts")


def shared_names(top: str) -> Sources:
    """Return where the expert of all tokens is."""
    return sources(shared__up=f"{top}.gate_proj {top}.up_proj", shared__down=f"{top}.down_proj")


SIGMOID = shared_names("mlp.shared_experts") | {
    "choice": parameter("mlp.gate.e_score_correction_bias")
}


def sigmoid_moe(c: Any, num_experts: int, num_shared: int) -> Moe:
    """Return experts that are chosen as in DeepSeek V3 (2024)."""
    expert = Mlp(c.hidden_act, c.moe_intermediate_size)
    return Moe(
        *(num_experts, c.num_experts_per_tok, expert),
        is_normalized=c.norm_topk_prob,
        scores="sigmoid",
        has_choice_bias=True,
        groups=c.n_group,
        top_groups=c.topk_group,
        scale=c.routed_scaling_factor,
        shared=replace(expert, size=expert.size * num_shared),
    )


def layers_beyond(c: Any, number: int) -> str:
    """Return a pattern of the names of so many layers that predict several tokens at once."""
    numbers = range(c.num_hidden_layers, c.num_hidden_layers + number)
    return rf"model\.layers\.({'|'.join(map(str, numbers))})\." if number else ""
