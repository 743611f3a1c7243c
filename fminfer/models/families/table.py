"""The table of all architectures: `model_type` -> the row that reads its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.compute.layers.plain import ACTIVATIONS
from fminfer.compute.spec import ACTIVATION_SHAPES, Moe
from fminfer.core.errors import CheckpointError
from fminfer.models.config_fields import ReadConfig
from fminfer.models.families import (
    gpt_like,
    latent_like,
    llama_like,
    llama_variants,
    mixtures,
    opt_like,
    squared_relu,
)
from fminfer.models.families.nearest import nearest_family, other_kind
from fminfer.models.families.tensor_names import Architecture

# A row's name is its `model_type`.
ROWS: dict[str, Callable[[Any], Architecture]] = {
    row.__name__: row
    for rows in (
        *(llama_like.ROWS, llama_variants.ROWS, squared_relu.ROWS, mixtures.ROWS),
        *(gpt_like.ROWS, opt_like.ROWS, latent_like.ROWS),
    )
    for row in rows
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


def architecture_of(config: Any) -> Architecture:
    """Turn a config of transformers into a spec and the sources of its tensors.

    Raises:
        CheckpointError: the architecture does not run, or no row reads a field that is set.
    """
    check_model_type(config.model_type, config.to_dict())
    read = ReadConfig(config)
    architecture = ROWS[config.model_type](read)
    read.refuse_unread()
    for layer in architecture.model.layers:
        mlp = layer.mlp.expert if isinstance(layer.mlp, Moe) else layer.mlp  # shared ones alike
        if mlp.activation not in ACTIVATIONS.keys() | ACTIVATION_SHAPES.keys():
            raise CheckpointError(
                f"config.json has the activation {mlp.activation!r}, which does not run; these do: "
                + ", ".join(sorted(ACTIVATIONS))
            )
    return architecture
