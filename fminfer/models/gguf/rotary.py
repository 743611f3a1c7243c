"""Rotary positions and windows of a model's layers, by GGUF's metadata."""

from __future__ import annotations

import math
from typing import Any

from fminfer.core.impostors import broken
from fminfer.models.gguf.metadata import GgufModel
from fminfer.models.stored.gguf_file import read_values

Fields = dict[str, Any]
FULL, NEAR = "full_attention", "sliding_attention"
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
PARTLY_TURNED = ("gptneox", "phi3")  # architectures that may turn a part of each head


def head_dim(m: GgufModel) -> int:
    """Return the elements of a head's key, and of its value."""
    size = m.whole("attention.key_length", m.hidden_size // m.heads, least=1)
    m.only("attention.value_length", size)
    return size


def original_length(m: GgufModel) -> int:
    """Return the context that positions were trained for, before they were scaled."""
    return m.whole("rope.scaling.original_context_length", m.context_length)


def rope(m: GgufModel, size: int | None = None) -> Fields:
    """Return the rotary settings of all layers, or of those without a window.

    Args:
        size: of what is turned; None: of a head.
    """
    size = turned = size or head_dim(m)
    how: Fields = {"rope_type": "default", "rope_theta": m.real("rope.freq_base", 10000.0)}
    if m.arch in PARTLY_TURNED:
        turned = m.whole("rope.dimension_count", size, most=size)
        # transformers rounds size * part down
        how["partial_rotary_factor"] = math.nextafter(turned / size, 1.0)
    else:
        m.only("rope.dimension_count", size)
    m.only("rope.scaling.type", "none", "linear", "yarn", "longrope")
    kind = m.find("rope.scaling.type")
    factor = m.real("rope.scaling.factor", m.real("rope.scale_linear", 1.0)) or 1.0
    original = original_length(m)
    if FREQUENCIES in m.tensors:  # of LLaMA 3, whose factors are the same for all lengths
        m.only("rope.scaling.type", "none")
        m.only("rope.scaling.factor", 1.0, 0.0)
        how |= _divided(m, turned // 2, FREQUENCIES, FREQUENCIES, m.context_length)
        how["factor"] = 1.0
    elif LONG in m.tensors or SHORT in m.tensors:
        how |= _divided(m, turned // 2, LONG, SHORT, original)
        how |= _if_set(m, attention_factor="attn_factor")
    elif kind == "yarn":
        m.only("rope.scaling.yarn_ext_factor", 1.0)
        how |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        how |= _if_set(m, beta_fast="yarn_beta_fast", beta_slow="yarn_beta_slow")
        how |= _if_set(m, attention_factor="yarn_attn_factor")
    elif factor != 1 and kind != "longrope":
        how |= {"rope_type": "linear", "factor": factor}
    return how


def ropes_by_kind(m: GgufModel, near_theta: float | None = None) -> Fields:
    """Return rotary settings by the kind of a layer; those with a window are never scaled.

    Args:
        near_theta: of layers with a window, where the file tells none; None: as the others.
    """
    far = rope(m)
    near = m.real("rope.freq_base_swa", near_theta or far["rope_theta"])
    return {FULL: far, NEAR: {"rope_type": "default", "rope_theta": near}}


def kinds_of_layers(m: GgufModel, every: int) -> list[str]:
    """Return which layers have windows: all but each so many'th, or what the file says."""
    found = m.find("attention.sliding_window_pattern")
    if isinstance(found, list):  # transformers refuses one of another length
        return [NEAR if each else FULL for each in found[: m.num_layers]]
    every = m.whole("attention.sliding_window_pattern", every)
    numbers = range(m.num_layers)
    return [NEAR if every == 0 or number % every < every - 1 else FULL for number in numbers]


def window(m: GgufModel) -> int | None:
    """Return how many keys a query sees in layers with a window; None: there are none."""
    return m.whole("attention.sliding_window", 0) or None


def _divided(m: GgufModel, num: int, long: str, short: str, original: int) -> Fields:
    """Return the settings of frequencies that are divided by factors, which are tensors."""
    found = {name: read_values(m.tensors[name]) for name in (long, short)}
    for name, factors in found.items():
        if len(factors) != num or min(factors) <= 0:
            raise broken(m.path, f"{name} has {len(factors)} factors, and {num} above 0 are needed")
    how: Fields = {"long_factor": found[long], "short_factor": found[short]}
    return how | {"rope_type": "longrope", "original_max_position_embeddings": original}


def _if_set(m: GgufModel, **keys: str) -> Fields:
    found = {name: f"rope.scaling.{key}" for name, key in keys.items()}
    return {name: m.real(key) for name, key in found.items() if m.find(key) is not None}
