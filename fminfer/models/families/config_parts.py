"""Parts of a spec that many configs describe alike: norms, attention, positions, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fminfer.compute.values.spec import Attention, Layer, Mlp, Model, Moe, Norm, Rope
from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import naming_broken_files
from fminfer.models.families.tensor_names import Architecture, Sources

Changes = dict[str, Any]  # fields of a spec's class that differ
Row = Callable[[Any], Architecture]
Mlps = Mlp | Moe | Sequence[Mlp | Moe]  # of all layers, or of each
# transformers turns a part of each head in these alone, whatever other configs say.
PARTIAL = {
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
}
# Of the families here, these have rotary settings for each kind of layer in transformers.
LAYERED = {"gemma3_text", "modernbert", "olmo3"}
Where = Literal["before", "once", "after", "around", "of_sum"]


def derive_row(
    row: Callable[..., Architecture], **fields: Any
) -> Callable[..., Architecture]:
    """Return a row that calls another with these arguments.

    An argument that is a function is called with the config, and its result counts.
    """

    def derived_row(c: Any, **more: Any) -> Architecture:
        arguments = fields | more
        return row(
            c,
            **{
                name: argument(c) if callable(argument) else argument
                for name, argument in arguments.items()
            },
        )

    return derived_row


def first_field(c: Any, *names: str) -> Any:
    """Return the first of these fields that a config declares."""
    for name in names[:-1]:
        if hasattr(c, name):
            return getattr(c, name)
    return getattr(c, names[-1])


def norm_of(c: Any, **changes: Any) -> Norm:
    """Return an RMSNorm if the config's eps is of one, else a LayerNorm with a bias."""
    if hasattr(c, "rms_norm_eps"):
        return Norm(**{"eps": c.rms_norm_eps} | changes)
    eps = first_field(
        c, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
    )
    return Norm(**{"eps": eps, "is_rms": False, "has_bias": True} | changes)


def norm_places(norm: Norm, where: Where) -> Changes:
    """Return the fields of a layer with this norm in some places ("once": before both parts)."""
    both = (norm, norm)
    places: dict[str, Changes] = {
        "before": {},
        "once": {"input_norms": (norm, None), "is_parallel": True},
        "after": {"input_norms": (None, None), "output_norms": both},
        "around": {"output_norms": both},
        "of_sum": {"input_norms": (None, None), "sum_norms": both},
    }
    return {"input_norms": both} | places[where]


def has_product_bias(c: Any, name: str) -> bool:
    """Tell whether products have biases, by this field or by that of all products."""
    return bool(getattr(c, name, False) or getattr(c, "use_bias", False))


def mlp_of(c: Any, size: int | None = None, **changes: Any) -> Mlp:
    """Return a gated MLP by the fields of most configs, with changes."""
    if "has_bias" not in changes:
        changes["has_bias"] = has_product_bias(c, "mlp_bias")
    size = c.intermediate_size if size is None else size
    return Mlp(first_field(c, "hidden_activation", "hidden_act"), size, **changes)


def moe_of(c: Any, **changes: Any) -> Moe:
    """Return experts that a softmax chooses by the fields of most configs, with changes."""
    if "expert" not in changes:
        changes["expert"] = mlp_of(
            c, first_field(c, "moe_intermediate_size", "intermediate_size")
        )
    if "is_normalized" not in changes:
        changes["is_normalized"] = getattr(c, "norm_topk_prob", True)
    num = first_field(c, "num_local_experts", "n_routed_experts", "num_experts")
    return Moe(num, c.num_experts_per_tok, **changes)


def sigmoid_moe(c: Any) -> Moe:
    """Return experts that are chosen as in DeepSeek V3 (2024)."""
    expert = mlp_of(c, c.moe_intermediate_size)
    num_shared = first_field(c, "n_shared_experts", "num_shared_experts")
    return moe_of(
        c,
        scores="sigmoid",
        has_choice_bias=True,
        groups=c.n_group,
        top_groups=c.topk_group,
        scale=c.routed_scaling_factor,
        shared=replace(expert, size=expert.size * num_shared),
    )


def mlps_with_experts(
    c: Any, moe: Moe, numbers: Collection[int], plain: Mlp | None = None
) -> Mlps:
    """Return the MLP of each layer: experts in these layers, a plain MLP in the others."""
    plain = plain or mlp_of(c)
    return [
        moe if number in numbers else plain for number in range(c.num_hidden_layers)
    ]


def rope_of(c: Any, layer: int = 0, *, is_interleaved: bool = False) -> Rope:
    """Return the rotary positions of a layer."""
    parameters, layer_kind = _rope_parameters(c, layer)
    with naming_broken_files(f"rope_parameters {parameters} in config.json"):
        if parameters["rope_type"] != "default":
            inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
                c, **layer_kind
            )
            rope = Rope(tuple(inv_freq.tolist()), scale, is_interleaved)
        else:
            part = (
                parameters.get("partial_rotary_factor", 1.0)
                if c.model_type in PARTIAL
                else 1.0
            )
            size = int(head_dim_of(c) * part)
            rope = make_plain_rope(
                parameters["rope_theta"], size, is_interleaved=is_interleaved
            )
        if not all(map(math.isfinite, (*rope.inv_freq, rope.scale))):
            raise ValueError("frequencies are not finite")
        return rope


def _rope_parameters(c: Any, layer: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a layer's rotary settings as transformers reads them, and its kind if that counts.

    Raises:
        CheckpointError: this kind of layer has no settings, or the config has settings by
            kind that transformers does not read for this family.
    """
    parameters = c.rope_parameters
    # what stands beside the kinds' own entries is never read
    if c.model_type in LAYERED:
        kind = c.layer_types[layer]
        if not isinstance(parameters.get(kind), dict):
            raise CheckpointError(
                f"config.json has no rope_parameters for {kind!r} layers. Use the "
                "config.json that the model was published with"
            )
        return parameters[kind], {"layer_type": kind}
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(
            "rope_parameters in config.json has entries for kinds of layers, "
            f"{', '.join(nested)}, but {c.model_type} takes one setting for all "
            "layers. Remove them"
        )
    return parameters, {}


def make_plain_rope(theta: float, size: int, *, is_interleaved: bool = False) -> Rope:
    """Return rotary positions of the first `size` elements of a head."""
    powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return Rope(tuple((1.0 / theta**powers).tolist()), 1.0, is_interleaved)


def head_dim_of(c: Any) -> int:
    return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)


def attention_of(c: Any, layer: int, **changes: Any) -> Attention:
    """Return a layer's attention by the fields of most configs, with changes."""
    heads = c.num_attention_heads
    head_dim = head_dim_of(c)
    if "kv_heads" not in changes:
        changes["kv_heads"] = getattr(c, "num_key_value_heads", None) or heads
    if "rope" not in changes and getattr(c, "rope_parameters", None):
        changes["rope"] = rope_of(c, layer)
    if "window" not in changes:
        types = getattr(c, "layer_types", None)
        window = getattr(c, "sliding_window", None)
        changes["window"] = (
            None if types and types[layer] != "sliding_attention" else window
        )
    attention = Attention(heads, changes.pop("kv_heads"), head_dim, head_dim**-0.5)
    return replace(attention, **changes)


def interleaved_alibi_slopes(num: int) -> tuple[float, ...]:
    """Return ALiBi's slopes as BLOOM and Falcon have them."""
    power = 2 ** math.floor(math.log2(num))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num - power)))


def mpt_alibi_slopes(num: int, most: float) -> tuple[float, ...]:
    """Return ALiBi's slopes as MPT has them."""
    power = 2 ** math.ceil(math.log2(num))
    slopes = [2.0 ** -((i + 1) * most / power) for i in range(power)]
    return tuple(slopes if power == num else [*slopes[1::2], *slopes[::2]][:num])


def make_architecture(
    c: Any,
    *,
    norm: Norm,  # at all places
    mlp: Mlps,
    outer: Sources,
    inner: Sources,
    prefix: str,
    norms: Where = "before",  # where they stand in a layer
    usual: Changes | None = None,  # fields of `Attention` that differ in all layers
    # and from these, in all or in each
    attention: Changes | Sequence[Changes] | None = None,
    layer: Changes | None = None,  # fields of every `Layer` that differ
    left_out: str = "",  # as `Architecture.left_out`
    **changes: Any,  # fields of the `Model` that differ
) -> Architecture:
    """Make an architecture whose layers have their fields from a config, with changes."""
    num = c.num_hidden_layers
    mlps = mlp if isinstance(mlp, Sequence) else [mlp] * num
    attention_changes = (
        attention if isinstance(attention, Sequence) else [attention or {}] * num
    )
    layer_changes = norm_places(norm, norms) | (layer or {})
    layers = tuple(
        Layer(
            attention_of(c, n, **(usual or {}) | attention_changes[n]),
            mlps[n],
            **layer_changes,
        )
        for n in range(num)
    )
    changes = {"embed_size": c.hidden_size, "final_norm": norm} | changes
    model = Model(c.hidden_size, c.vocab_size, layers, **changes)
    base = prefix.partition(".")[0] + "."
    return Architecture(model, outer, inner, prefix, base, left_out=left_out)
