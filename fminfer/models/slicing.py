"""Cuts a model down to one stage's layers. It works on models without memory (meta device)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fminfer.models.families import Family
from fminfer.partition import Part

# Of the head's products, how many count: drawn tokens run the head, most prompt tokens do not.
HEAD_SHARE = 0.5


class _Nothing(nn.Module):
    """Stands where a table of another stage was: adds nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros((), device=self._device)


def cut(model: Any, family: Family, part: Part, device: torch.device) -> None:
    """Leave of a model on the meta device what one stage runs.

    The first stage has the embeddings, the last the final norm and the head. A stage that is not
    the first is fed the hidden states of the one before, in the place of embedded tokens.

    Args:
        device: where it will run.
    """
    decoder = model.get_submodule(family.decoder)
    layers = decoder.get_submodule(family.layers)
    decoder.set_submodule(family.layers, nn.ModuleList(layers[part.first : part.last]))
    if not part.is_first:
        _replace(decoder, family.tables, lambda: _Nothing(device))
        _replace(decoder, family.entry, nn.Identity)
    if not part.is_last:
        _replace(decoder, family.exit, nn.Identity)
        model.set_output_embeddings(nn.Identity())
    # Forward asks the config by the layer's place for its kind of attention (full, sliding).
    types = getattr(decoder.config, "layer_types", None)
    if types is not None:
        decoder.config = copy.copy(decoder.config)
        decoder.config.layer_types = types[part.first : part.last]


def _replace(decoder: nn.Module, names: tuple[str, ...], make: Any) -> None:
    for name in names:
        if getattr(decoder, name) is not None:  # OPT has projections in some sizes only
            setattr(decoder, name, make())


def head_cost(model: Any, family: Family) -> float:
    """Return what the head costs on the last stage, in layers."""
    layers = model.get_submodule(family.decoder).get_submodule(family.layers)
    layer_size = sum(p.numel() for p in layers.parameters()) / len(layers)
    head_size = model.get_output_embeddings().weight.numel()
    return float(HEAD_SHARE * head_size / layer_size)
