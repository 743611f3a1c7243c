"""The one forward: computes any spec over the packed tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import nn

from fminfer.compute.formats.dense import make_dense_weight
from fminfer.compute.layers import plain
from fminfer.compute.layers.products import Linear
from fminfer.compute.shards import ShardGroup
from fminfer.compute.values.spec import Encoder, Layer, Model, Pooling
from fminfer.compute.values.step import Column, find_last_tokens, join_ranges
from fminfer.compute.values.weights import Function, Weight
from fminfer.forward.layer import TransformerLayer, norm_sum
from fminfer.forward.layer_step import LayerStep, PartBuilder
from fminfer.forward.layer_stream import (
    LayerStream,
    MakeLayer,
    StreamedLayers,
    StreamKind,
)
from fminfer.forward.registry import Registry
from fminfer.machine.device import send_columns
from fminfer.models.layer_source import LayerSource
from fminfer.models.tensor_specs import Weights, find_plain_tensor

# Of a weight, what plain torch widens to float32 at once: a cache holds it while it is
# multiplied.
WIDENED_BYTES = 2 << 20
# What dense layers behind a pooling compute, beside the activations of MLPs.
_READINGS: dict[str, Function] = {"": lambda x: x, "tanh": torch.tanh}


class Head:
    """A model's head: logits in float32. Its weight may be the embedding."""

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None,
        registry: Registry,
        scale: float = 1.0,
    ) -> None:
        self._bias = None if bias is None else bias.float()
        self._scale = scale
        self.vocab_size = weight.shape[0]
        self.packed = registry.choose_head(weight, self._bias)
        if self.packed is None:  # otherwise it is kept packed alone
            self._weight = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, (rows, vocab) float32, of hidden states, (rows, hidden)."""
        logits = (
            self._multiply(hidden)
            if self.packed is None
            else self.packed.multiply_unrounded(hidden)
        )
        return logits if self._scale == 1.0 else logits.mul_(self._scale)

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._weight.is_plain:
            return Linear(self._weight, self._bias)(hidden.float())
        weight = self._weight.plain
        if weight.dtype == torch.float32:
            return nn.functional.linear(hidden.float(), weight, self._bias)
        if weight.is_cuda:
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:  # some outputs after the other
            hidden = hidden.float()
            logits = hidden.new_empty((len(hidden), len(weight)))
            size = max(1, WIDENED_BYTES // (4 * weight.shape[1]))
            for first in range(0, len(weight), size):
                part = slice(first, first + size)
                logits[:, part] = hidden @ weight[part].float().t()
        return logits if self._bias is None else logits.add_(self._bias)


def _build_resident_layers(
    source: LayerSource, make_layer: MakeLayer
) -> dict[int, TransformerLayer]:
    """Build the layers that stay in memory, by their numbers."""
    kept: dict[int, TransformerLayer] = {}
    # zip would hold the last ones while the next are read
    for weights in source.load_layers():
        number = source.resident[len(kept)]
        kept[number] = make_layer(number, weights)
        if kept[number].is_packed:
            source.free_product_pages(number)
        del weights  # before the next layer's are read
    return kept


def _open_stream(
    source: LayerSource, make_layer: MakeLayer, model: Model, kind: StreamKind
) -> LayerStream | None:
    """Open the stream of streamed layers, and try one of each kind; None: there are none."""
    if not source.streamed:
        return None
    stream = LayerStream(source, make_layer, kind)
    kinds = {model.layers[number]: number for number in source.streamed}
    stream.try_layers(source.streamed if stream.keeps_all else kinds.values())
    return stream


def _build_projection(
    weights: Weights, name: str, builder: PartBuilder
) -> Function | None:
    """Build the product between embeddings and hidden states of other sizes, if there is one."""
    weight = weights.pop(f"{name}.weight", None)
    if weight is None:
        return None
    return builder.registry.choose_steady_product(weight, None)


class Transformer:
    """A model, or the layers of one stage.

    A layer's weights are freed once its compute objects exist.

    Args:
        join: replaces a layer by one compiled call, where it can; None: layers stay as they are.
        shards: the ranks that share the stage; None: this one has it whole.
        tokens: whose rows of embedding and head it has; None: all.
    """

    def __init__(
        self,
        model: Model,
        source: LayerSource,
        *,
        builder: PartBuilder,
        join: Callable[[TransformerLayer], TransformerLayer] | None = None,
        shards: ShardGroup | None = None,
        tokens: range | None = None,
        streams: StreamKind = "disk",
    ) -> None:
        self.shards = shards
        self._tokens = tokens or range(model.vocab_size)
        self.model = model
        self._entry = source.load_entry()
        self._exit = source.load_exit(self._entry)
        self.dtype = source.dtype  # of hidden states

        def make_layer(number: int, weights: Weights) -> TransformerLayer:
            layer = TransformerLayer(model.layers[number], weights, builder)
            return layer if join is None else join(layer)

        kept = _build_resident_layers(source, make_layer)
        self.stream = _open_stream(source, make_layer, model, streams)
        self._add_sinusoids()
        self._build_stacks(source, kept, builder)
        self._build_head(source, builder)
        self._project_in = _build_projection(self._entry, "project_in", builder)
        self._project_out = _build_projection(self._exit, "project_out", builder)
        self.weight_bytes = source.num_bytes  # as they were read

    def _add_sinusoids(self) -> None:
        """Compute the position embeddings that a model has without weights."""
        model = self.model
        if self._entry and model.has_sinusoids:
            device = self._entry["embed.weight"].device
            table = plain.compute_sinusoids(model.num_positions, model.hidden_size)
            self._entry["positions.weight"] = make_dense_weight(
                table.to(device, self.dtype), "other"
            )

    def _build_stacks(
        self,
        source: LayerSource,
        kept: dict[int, TransformerLayer],
        builder: PartBuilder,
    ) -> None:
        """Build the stack of the decoder, and those of an encoder and its pooling."""
        model = self.model

        def build_stack(
            spec: Model | Encoder, numbers: list[int], name: str = ""
        ) -> Stack:
            layers: Iterable[TransformerLayer] = (
                [kept[number] for number in numbers]
                if self.stream is None
                else StreamedLayers(numbers, kept, self.stream)
            )
            layer_specs = [model.layers[number] for number in numbers]
            exit = self._exit if source.is_last else None
            return Stack(spec, layer_specs, layers, self._entry, exit, builder, name)

        cached = [
            number for number in source.numbers if number < model.num_cached_layers
        ]
        self._decoder = build_stack(model, cached)
        self.layers = self._decoder.layers
        self.layer_specs = self._decoder.layer_specs
        self.is_first = source.is_first
        self.encoder: Stack | None = None
        self.pooling: Pooler | None = None
        if model.encoder is not None:
            numbers = source.numbers[len(cached) :]
            self.encoder = build_stack(model.encoder, numbers, "encoder.")
            if source.is_last and model.encoder.pooling is not None:
                self.pooling = Pooler(
                    model.encoder.pooling, self._exit, builder.registry
                )

    def _build_head(self, source: LayerSource, builder: PartBuilder) -> None:
        """Build the head and the embeddings, which may share one weight."""
        embed = self._entry.pop("embed.weight", None)
        self._look_up: Function | None = None
        if embed is not None:
            self._look_up = partial(embed.dequantize_rows, dtype=self.dtype)
        self.head: Head | None = None
        if self._exit and not self.model.is_pooled:
            weight = self._exit.pop("head.weight")
            self.head = Head(
                weight,
                find_plain_tensor(self._exit, "head.bias"),
                builder.registry,
                self.model.logit_scale,
            )
            if self.head.packed is not None:
                if weight is embed:  # kept once
                    self._look_up = self.head.packed.dequantize_rows
                source.free_head_pages(is_embedding=weight is embed)
        self._look_up_encoder = self._look_up  # of what an encoder reads
        if (of_encoder := self._entry.pop("encoder.embed.weight", None)) is not None:
            self._look_up_encoder = partial(
                of_encoder.dequantize_rows, dtype=self.dtype
            )

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ids, (tokens,): hidden states, (tokens, hidden)."""
        x = self._embed_ids(ids, self._look_up)
        if self._project_in is not None:
            x = self._project_in(x)
        return self._decoder.embed(x, positions)

    def embed_for_encoder(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same before the encoder's first layer."""
        assert self.encoder is not None, "a model with an encoder"
        x = self._embed_ids(ids, self._look_up_encoder)
        return self.encoder.embed(x, positions, types)

    def _embed_ids(self, ids: torch.Tensor, look_up: Function | None) -> torch.Tensor:
        assert look_up is not None, "the first stage"
        if self.shards is None:
            x = look_up(ids).to(self.dtype)
        else:  # one rank has a token's row, and the others add nothing to it
            places = ids - self._tokens.start
            is_own = (places >= 0) & (places < len(self._tokens))
            x = look_up(places.where(is_own, 0)).to(self.dtype)
            x = self.shards.sum(x.where(is_own[:, None], 0.0))
        scale = self.model.embed_scale
        # Rounded to the dtype, as Gemma was trained.
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def run(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Run the layers, and on the last stage the final norm; return (kept tokens, hidden)."""
        step.shards = self.shards
        x = self._decoder.run(x, step)
        if self._project_out is not None:
            x = self._project_out(x)
        return x


class Stack:
    """A decoder's or an encoder's layers of one stage, with what is before and behind them.

    `entry` and `exit` are weights before the first layer and after the last one, named
    by `name`; `exit` is None where the last layer is on another stage.
    """

    def __init__(
        self,
        spec: Model | Encoder,
        layer_specs: list[Layer],
        layers: Iterable[TransformerLayer],
        entry: Weights,
        exit: Weights | None,
        builder: PartBuilder,
        name: str,
    ) -> None:
        self.layer_specs = layer_specs
        self.layers = layers
        self._offset = spec.position_offset
        self._positions = find_plain_tensor(entry, f"{name}positions.weight")
        self._types = find_plain_tensor(entry, f"{name}types.weight")
        embed_norm = spec.embed_norm if entry else None
        self._embed_norm = builder.make_norm(embed_norm, entry, f"{name}embed_norm")
        final_norm = (
            None if exit is None else spec.final_norm
        )  # one may have no weights
        self._final_norm = builder.make_norm(
            final_norm, exit or {}, f"{name}final_norm"
        )

    def embed(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add positions and types of tokens, (tokens,) each, to embeddings; None: types 0."""
        if self._positions is not None:
            x = x + self._positions[positions + self._offset]
        if self._types is not None:
            x = x + (self._types[0] if types is None else self._types[types])
        return x if self._embed_norm is None else self._embed_norm(x)

    def run(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Run the layers, the last one for the kept tokens only, and the final norm."""
        more: torch.Tensor | None = None
        kept = step.kept
        step.kept = None
        number = 0
        for layer in self.layers:
            if number == len(self.layer_specs) - 1:
                step.kept = kept
            x, more = layer(x, more, number, step)
            number += 1  # noqa: SIM113  # enumerate would hold it while the next one is made
            del layer
        return norm_sum(self._final_norm, x, more)[1]


class Pooler:
    """Makes one vector a prompt of hidden states."""

    def __init__(self, spec: Pooling, exit: Weights, registry: Registry) -> None:
        self._spec = spec
        of_readings = (
            (n, weight) for n, weight in exit.items() if n.startswith("reading_")
        )
        self._tensors = {name: weight.plain.float() for name, weight in of_readings}
        self._products = [
            registry.choose_steady_product(
                make_dense_weight(self._tensors[f"reading_{number}.weight"], "other"),
                self._tensors.get(f"reading_{number}.bias"),
            )
            for number in range(len(spec.readings))
        ]
        self._activations = [
            _READINGS.get(each.activation)
            or registry.parts.make_activation(each.activation)
            for each in spec.readings
        ]

    def choose_kept(self, ids: Column, lengths: Column) -> Column | None:
        """Return the packed tokens whose hidden states are pooled, int64; None: all of them."""
        if self._spec.mode == "last":
            return find_last_tokens(ids, lengths, self._spec.padding_id)
        return lengths.cumsum() - lengths if self._spec.mode == "cls" else None

    def __call__(self, hidden: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
        """Return vectors, (prompts, size) float32, of the kept tokens, (tokens, hidden)."""
        x = _pool(self._spec.mode, hidden.float(), lengths)
        get = self._tensors.get
        for number, each in enumerate(self._spec.readings):
            name = f"reading_{number}"
            x = self._activations[number](self._products[number](x))
            if each.norm is not None:
                x = plain.norm(
                    x, each.norm, get(f"{name}_norm.weight"), get(f"{name}_norm.bias")
                )
        return nn.functional.normalize(x) if self._spec.is_normalized else x


def _pool(mode: str, hidden: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Return one vector a prompt, by the name of a mode of sentence-transformers."""
    if mode in ("cls", "last"):  # `choose_kept` has chosen them
        return hidden
    (sizes,) = send_columns([lengths], hidden.device)
    # each token by its place, from 1 on (SGPT, Muennighoff 2022)
    if mode == "weightedmean":
        (places,) = send_columns([join_ranges(0 * lengths + 1, lengths)], hidden.device)
        hidden = hidden * places[:, None]
    kind = {"max": "max", "weightedmean": "sum"}.get(mode, "mean")
    x = torch.segment_reduce(hidden, kind, lengths=sizes, axis=0)
    if mode == "mean_sqrt_len_tokens":
        return x * sizes[:, None].sqrt()
    return x / (sizes * (sizes + 1) // 2)[:, None] if mode == "weightedmean" else x
