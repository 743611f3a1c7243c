"""The table of all architectures: `model_type` -> the row that reads its config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fminfer.core.errors import CheckpointError
from fminfer.models.families import (
    encoder_decoders,
    encoders,
    gpt_like,
    llama_like,
    mixtures,
)
from fminfer.models.families.config_parts import Row

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
        return f"has an encoder and a decoder; of these {', '.join(encoder_decoders.ROWS)} run"
    if model_type in _STATEFUL or any(map(_OF_STATES.search, {*fields, *_declared(known)})):
        return (
            "has layers with a state (state-space, recurrent or linear attention, as Mamba has), "
            "and fminfer computes attention over a KV cache alone"
        )
    is_masked = "ForMaskedLM" in str(fields.get("architectures"))
    if is_masked or model_type in MASKED:
        return f"is an encoder, which writes no text; of these {', '.join(encoders.ROWS)} run"
    return ""


def nearest_family(model_type: str, fields: Iterable[str], families: Iterable[str]) -> str:
    """Return the family whose name and fields of config.json are nearest; "": none is near."""
    found = frozenset(fields)

    def likeness(family: str) -> tuple[float, float]:
        shared = len(found & _declared(CONFIG_MAPPING[family])) / max(1, len(found))
        return SequenceMatcher(None, model_type.lower(), family).ratio(), shared

    nearest = max(families, key=lambda family: likeness(family)[0] + 2 * likeness(family)[1])
    name, shared = likeness(nearest)
    return nearest if name >= _LIKE_NAME or shared >= _LIKE_FIELDS else ""


def _declared(config: Any) -> set[str]:
    return set() if config is None else {field.name for field in dataclasses.fields(config)}


ROWS: dict[str, Row] = {
    **llama_like.ROWS,
    **mixtures.ROWS,
    **gpt_like.ROWS,
    **encoder_decoders.ROWS,
    **encoders.ROWS,
}


def check_model_type(model_type: str, fields: dict[str, Any]) -> None:
    """Refuse an architecture without a row; say its kind, or the nearest family that runs."""
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
