"""Reads what many configs say alike: heads, rotary positions, windows, slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fminfer.compute.spec import Attention, Layer, Mlp, Model, Moe, Norm, Rope
from fminfer.core.errors import CheckpointError
from fminfer.models.families.tensor_names import Architecture, Sources, experts, parameter, sources

Changes = dict[str, Any]
# transformers turns a part of each head in these alone, whatever other configs say.
PARTIAL = frozenset(
    (
        "phi",
        "phi3",
        "stablelm",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "gpt_neox_japanese",
        "minimax_m2",
        "nemotron",
        "persimmon",
        "solar_open",
    )
)

# Of the families here, these have rotary settings for each kind of layer in transformers.
LAYERED = frozenset(("gemma3_text", "modernbert", "olmo3"))


def rope_of(c: Any, layer: int = 0, *, is_interleaved: bool = False) -> Rope:
    """Return the rotary positions of a layer."""
    how, kind = _rope_parameters(c, layer)
    try:
        if how["rope_type"] != "default":
            inv_freq, scale = ROPE_INIT_FUNCTIONS[how["rope_type"]](c, **kind)
            rope = Rope(tuple(inv_freq.tolist()), scale, is_interleaved)
        else:
            part = how.get("partial_rotary_factor", 1.0) if c.model_type in PARTIAL else 1.0
            size = int(head_dim_of(c) * part)
            rope = plain_rope(how["rope_theta"], size, is_interleaved=is_interleaved)
        if not all(map(math.isfinite, (*rope.inv_freq, rope.scale))):
            raise ValueError("frequencies are not finite")
        return rope
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"rope_parameters in config.json are not valid: {how} ({error!r}). Use the config.json "
            "that the model was published with"
        ) from error


def _rope_parameters(c: Any, layer: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a layer's rotary settings as transformers reads them, and their kind of layer if any.

    Raises:
        CheckpointError: there are none for this kind of layer, or some for kinds that nobody reads.
    """
    how = c.rope_parameters
    if c.model_type in LAYERED:  # what stands beside the kinds' own entries is never read
        kind = c.layer_types[layer]
        if not isinstance(how.get(kind), dict):
            raise CheckpointError(
                f"config.json has no rope_parameters for {kind!r} layers. Use the config.json that "
                "the model was published with"
            )
        return how[kind], {"layer_type": kind}
    nested = [name for name, value in how.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(
            f"rope_parameters in config.json has entries for kinds of layers, {', '.join(nested)}, "
            f"but {c.model_type} takes one setting for all layers. Remove them"
        )
    return how, {}


def plain_rope(theta: float, size: int, *, is_interleaved: bool = False) -> Rope:
    """Return rotary positions of the first `size` elements of a head."""
    powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return Rope(tuple((1.0 / theta**powers).tolist()), 1.0, is_interleaved)


def head_dim_of(c: Any) -> int:
    return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)


def window_of(c: Any, layer: int) -> int | None:
    types = getattr(c, "layer_types", None)
    window: int | None = getattr(c, "sliding_window", None)
    return None if types and types[layer] != "sliding_attention" else window


def attention_of(c: Any, layer: int, **changes: Any) -> Attention:
    """Return a layer's attention by the fields of most configs, with changes."""
    heads, head_dim = c.num_attention_heads, head_dim_of(c)
    if "kv_heads" not in changes:
        changes["kv_heads"] = getattr(c, "num_key_value_heads", None) or heads
    if "rope" not in changes and getattr(c, "rope_parameters", None):
        changes["rope"] = rope_of(c, layer)
    if "window" not in changes:
        changes["window"] = window_of(c, layer)
    how = Attention(heads, changes.pop("kv_heads"), head_dim, head_dim**-0.5)
    return replace(how, **changes)


def interleaved_slopes(num: int) -> tuple[float, ...]:
    """Return ALiBi's slopes as BLOOM and Falcon have them."""
    power = 2 ** math.floor(math.log2(num))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num - power)))


def mpt_slopes(num: int, most: float) -> tuple[float, ...]:
    """Return ALiBi's slopes as MPT has them."""
    power = 2 ** math.ceil(math.log2(num))
    slopes = [2.0 ** -((i + 1) * most / power) for i in range(power)]
    return tuple(slopes if power == num else [*slopes[1::2], *slopes[::2]][:num])


def assemble(
    c: Any,
    *,
    norm: Norm,
    mlp: Callable[[int], Mlp | Moe],
    prefix: str,
    outer: Sources,
    inner: Sources,
    attention: Callable[[int], Changes] | Changes | None = None,
    layer: Changes | None = None,
    left_out: str = "",
    **changes: Any,
) -> Architecture:
    """Make an architecture.

    Args:
        norm: at all places.
        mlp: by a layer's number.
        attention: fields of `Attention` that differ, for all layers or by a layer's number.
        left_out: a pattern of the names of stored tensors that the model does not compute.
        layer, changes: fields of every `Layer` and of the `Model` that differ.
    """

    def one(number: int) -> Layer:
        own = attention(number) if callable(attention) else attention or {}
        how: Changes = {"before": (norm, norm)} | (layer or {})
        return Layer(attention_of(c, number, **own), mlp(number), **how)

    layers = tuple(one(number) for number in range(c.num_hidden_layers))
    how: Changes = {"embed_size": c.hidden_size, "final_norm": norm} | changes
    model = Model(c.hidden_size, c.vocab_size, layers, **how)
    base = prefix.partition(".")[0] + "."
    return Architecture(model, outer, inner, prefix, base, left_out=left_out)


def same(mlp: Mlp | Moe) -> Callable[[int], Mlp | Moe]:
    """Return a function that gives this MLP for every layer."""
    return lambda layer: mlp


OF_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\."


def text_part(c: Any, **rows: Callable[[Any], Architecture]) -> Architecture:
    """Return the text part of a model that reads images, too; what it has for these is left out.

    Args:
        rows: by the architectures that the text part may have.

    Raises:
        CheckpointError: it has another.
    """
    text_type = c.text_config.model_type
    if (row := rows.get(text_type)) is not None:
        return replace(row(c.text_config), left_out=OF_IMAGES)
    raise CheckpointError(
        f"config.json has a text_config of the architecture {text_type!r}, which does not run "
        f"there; these do: {', '.join(rows)}"
    )


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
