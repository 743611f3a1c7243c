"""The table of all architectures: `model_type` -> the row that reads its config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fminfer.compute.layers.plain import ACTIVATIONS
from fminfer.compute.spec import ACTIVATION_SHAPES, Moe, Pooling
from fminfer.core.errors import CheckpointError
from fminfer.models.config_fields import ReadConfig, is_own_folder
from fminfer.models.families import (
    encoder_decoders,
    encoders,
    gpt_like,
    llama_like,
    llama_variants,
    mixtures,
)
from fminfer.models.families.heads import seen_both_ways, with_head
from fminfer.models.families.tensor_names import Architecture, by_our_names
from fminfer.models.tensor_specs import model_specs

# Fields of layers that carry a state from token to token in the place of keys and values.
_OF_STATES = re.compile(
    "mamba|ssm_|state_size|lru_width|linear_conv|linear_attn|linear_num|conv_L_cache"
)
_STATEFUL = ("rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "bailing_hybrid")  # by no such field
_LIKE_NAME, _LIKE_FIELDS = 0.6, 0.75  # a family that is less alike is no help


def other_kind(model_type: str, fields: Mapping[str, Any]) -> str:
    """Return what kind of model no row can describe, by what is declared; "": nothing tells."""
    from transformers.models.auto.modeling_auto import (  # slow, and only for a refusal
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    text = fields.get("text_config")
    if isinstance(text, dict) and (kind := other_kind(str(text.get("model_type")), text)):
        return kind
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    if fields.get("is_encoder_decoder", getattr(known, "is_encoder_decoder", False)):
        return f"has an encoder and a decoder; of these {_named(encoder_decoders.ROWS)} run"
    if model_type in _STATEFUL or any(map(_OF_STATES.search, {*fields, *_declared(known)})):
        return (
            "has layers with a state (state-space, recurrent or linear attention, as Mamba has), "
            "and fminfer computes attention over a KV cache alone"
        )
    is_masked = "ForMaskedLM" in str(fields.get("architectures"))
    if is_masked or model_type in MASKED:
        return f"is an encoder, which writes no text; of these {_named(encoders.ROWS)} run"
    return ""


def _named(rows: Iterable[Callable[[Any], Architecture]]) -> str:
    return ", ".join(row.__name__ for row in rows)


def nearest_family(model_type: str, fields: Iterable[str], families: Iterable[str]) -> str:
    """Return the family whose name and config are nearest; "": none is near.

    Args:
        fields: those of the config.json.
    """
    found = frozenset(fields)

    def likeness(family: str) -> tuple[float, float]:
        shared = len(found & _declared(CONFIG_MAPPING[family])) / max(1, len(found))
        return SequenceMatcher(None, model_type.lower(), family).ratio(), shared

    nearest = max(families, key=lambda family: likeness(family)[0] + 2 * likeness(family)[1])
    name, shared = likeness(nearest)
    return nearest if name >= _LIKE_NAME or shared >= _LIKE_FIELDS else ""


def _declared(config: Any) -> set[str]:
    return set() if config is None else {field.name for field in dataclasses.fields(config)}


# A row's name is its `model_type`, and some rows have further ones.
ROWS: dict[str, Callable[[Any], Architecture]] = {
    row.__name__: row
    for rows in (
        *(llama_like.ROWS, llama_variants.ROWS, mixtures.ROWS),
        *(gpt_like.ROWS, encoder_decoders.ROWS, encoders.ROWS),
    )
    for row in rows
} | {
    **dict.fromkeys(("camembert", "xlm-roberta"), encoders.roberta),
    "internlm3": llama_like.llama,
    # Queries of Ministral 3 grow beyond the original length, which is the limit: `context_length`.
    **dict.fromkeys(("ministral", "ministral3"), llama_like.mistral),
    "olmo3": llama_variants.olmo2,
}


def check_model_type(model_type: str, fields: dict[str, Any]) -> None:
    """Refuse an architecture without a row.

    Args:
        fields: of its config.json.

    Raises:
        CheckpointError: it says what kind of model that is, or the nearest family that runs.
    """
    if model_type in ROWS:
        return
    if kind := other_kind(model_type, fields):
        raise CheckpointError(
            f"the architecture {model_type!r} {kind}; 'fminfer families' lists what runs"
        )
    nearest = nearest_family(model_type, fields, ROWS)
    near = f". By name and config the nearest is {nearest!r}; if" if nearest else "; if"
    raise CheckpointError(
        f"the architecture {model_type!r} is none of the {len(ROWS)} that fminfer runs "
        f"('fminfer families' lists them){near} it is a decoder with attention, "
        "docs/architectures.md tells how to add it"
    )


def architecture_of(config: Any, pooling: Pooling | None = None) -> Architecture:
    """Turn a config of transformers into a spec and the sources of its tensors.

    Args:
        pooling: of a folder of sentence-transformers; None: the config says what a model gives.

    Raises:
        CheckpointError: the architecture does not run, or no row reads a field that is set.
    """
    check_model_type(config.model_type, config.to_dict())
    read = ReadConfig(config)
    architecture = with_head(ROWS[config.model_type](read), read, pooling)
    if architecture.model.is_pooled:
        architecture = seen_both_ways(architecture, read)
    read.refuse_unread()
    for layer in architecture.model.layers:
        mlp = layer.mlp.expert if isinstance(layer.mlp, Moe) else layer.mlp  # shared ones alike
        if mlp.activation not in ACTIVATIONS.keys() | ACTIVATION_SHAPES.keys():
            raise CheckpointError(
                f"config.json has the activation {mlp.activation!r}, which does not run; these do: "
                + ", ".join(sorted(ACTIVATIONS))
            )
    if is_own_folder(getattr(config, "quantization_config", None)):
        return by_our_names(architecture, model_specs(architecture.model))
    return architecture
