"""The encoder: layers that see each prompt whole and keep no keys, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from fminfer.compute.layers.plain import ACTIVATIONS, norm
from fminfer.compute.spec import Encoder, Layer, Model, Pooling
from fminfer.compute.step import ranges
from fminfer.machine.device import send
from fminfer.models.layer import LayerOf, normed_sum, run_layers
from fminfer.models.layer_bodies import Bodies
from fminfer.models.layer_step import LayerStep
from fminfer.models.tensor_specs import Weights, plain_of


class EncoderOf:
    """The encoder's layers of one stage.

    Args:
        hows: the specs of the stage's layers.
        layers: these layers.
        entry, exit: the weights before the first layer, and after the last one; another stage has
            them: {} and None. After the last one a model may have none.
    """

    def __init__(
        self,
        model: Model,
        hows: list[Layer],
        layers: Iterable[LayerOf],
        entry: Weights,
        exit: Weights | None,
        bodies: Bodies,
    ) -> None:
        assert model.encoder is not None, "a model with an encoder"
        self.how: Encoder = model.encoder
        self.own, self._layers = hows, layers
        self.is_last = exit is not None
        self._tables = {n: plain_of(entry, f"encoder.{n}.weight") for n in ("positions", "types")}
        embed_norm = self.how.embed_norm if entry else None
        self._embed_norm = bodies.norm(embed_norm, entry, "encoder.embed_norm")
        final_norm, exit = self.how.final_norm if self.is_last else None, exit or {}
        self._final_norm = bodies.norm(final_norm, exit, "encoder.final_norm")
        of_readings = ((n, weight) for n, weight in exit.items() if n.startswith("reading_"))
        self._read_by = {name: weight.plain.float() for name, weight in of_readings}

    def embed(
        self, x: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None
    ) -> torch.Tensor:
        """Add positions and types of tokens, (tokens,) each, to their embeddings.

        Args:
            types: None: all are 0.
        """
        table = self._tables["positions"]
        if table is not None:
            x = x + table[positions + self.how.position_offset]
        table = self._tables["types"]
        if table is not None:
            x = x + (table[0] if types is None else table[types])
        return x if self._embed_norm is None else self._embed_norm(x)

    def run(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Run the stage's layers, and behind the last of all the final norm.

        Args:
            x: (tokens, hidden) of prompts.

        Returns:
            (kept tokens, hidden).
        """
        return normed_sum(self._final_norm, *run_layers(self._layers, len(self.own), x, step))[1]

    def pool(self, hidden: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
        """Return one vector a prompt, (prompts, size) float32.

        Args:
            hidden: of the tokens that `kept_tokens` tells, (tokens, hidden).
            lengths: of the prompts.
        """
        how = self.how.pooling
        assert how is not None, "a model that pools"
        x = _pooled(how.how, hidden.float(), lengths)
        get = self._read_by.get
        for number, each in enumerate(how.readings):
            name = f"reading_{number}"
            x = nn.functional.linear(x, self._read_by[f"{name}.weight"], get(f"{name}.bias"))
            if each.activation:
                x = READ_BY[each.activation](x)
            if each.norm is not None:
                x = norm(x, each.norm, get(f"{name}_norm.weight"), get(f"{name}_norm.bias"))
        return nn.functional.normalize(x) if how.is_normalized else x


def kept_tokens(how: Pooling | None, lengths: np.ndarray) -> np.ndarray | None:
    """Return the packed tokens whose hidden states are pooled, int64; None: all of them."""
    if how is None or how.how not in ("cls", "last"):
        return None
    ends = lengths.cumsum()
    return ends - 1 if how.how == "last" else ends - lengths


READ_BY = {**ACTIVATIONS, "tanh": torch.tanh}


def _pooled(how: str, hidden: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Return one vector a prompt, by the name of a mode of sentence-transformers."""
    if how in ("cls", "last"):  # `kept_tokens` has chosen them
        return hidden
    (sizes,) = send([lengths], hidden.device)
    if how == "weightedmean":  # each token by its place, from 1 on (SGPT, Muennighoff 2022)
        (places,) = send([ranges(0 * lengths + 1, lengths)], hidden.device)
        hidden = hidden * places[:, None]
    kind = {"max": "max", "weightedmean": "sum"}.get(how, "mean")
    x = torch.segment_reduce(hidden, kind, lengths=sizes, axis=0)
    if how == "mean_sqrt_len_tokens":
        return x * sizes[:, None].sqrt()
    return x / (sizes * (sizes + 1) // 2)[:, None] if how == "weightedmean" else x
