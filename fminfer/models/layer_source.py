"""Where the weights of one stage come from: the model's files, or chance."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fminfer.compute.spec import Attention
from fminfer.compute.weights import Dense, Format, Tensors, Weight
from fminfer.core.partition import Part
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.families.tensor_names import AS_STORED
from fminfer.models.formats import held_format
from fminfer.models.origins import ModelOrigins, Origin, Origins, drawn_origins
from fminfer.models.stored.read_ahead import Waiting, reading_ahead
from fminfer.models.stored.tensor_table import DTYPES, TensorFiles
from fminfer.models.tensor_specs import Weights
from fminfer.models.weight_headers import find_stored, open_files

OnProgress = Callable[[int, int], None]


class Maker(Protocol):
    """Makes the tensors of weights."""

    def format_of(self, origin: Origin) -> Format:
        """Return the format in which a weight is held."""

    def make(self, name: str, origin: Origin, attention: Attention | None) -> Tensors:
        """Return its tensors. The name has the number of its layer, if it is of one."""

    def waiting(self, origin: Origin) -> Iterator[Waiting]:
        """Give the parts of files that it is made of, which were not read yet."""

    def leave(self, origin: Origin) -> None:
        """Leave memory of the files that it is made of to others."""


class LayerSource:
    """Gives the weights of one stage, whenever they are asked for and as often. It keeps none.

    Args:
        origins: of the whole model.
        dtype: of the arithmetic.
        on_progress: called with (bytes made, bytes in all) after each weight.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: Part,
        origins: ModelOrigins,
        maker: Maker,
        dtype: torch.dtype,
        on_progress: OnProgress,
    ) -> None:
        self.dtype, self._origins, self._maker, self._part = dtype, origins, maker, part
        self._on_progress, self._numbers = on_progress, range(part.first, part.last)
        self._attention = [layer.attention for layer in checkpoint.model.layers]
        self._is_tied = bool(checkpoint.config.tie_word_embeddings)
        self._of_embed = {"embed.weight": origins.entry["embed.weight"]}
        groups = [*origins.layers[part.first : part.last], *[origins.exit] * part.is_last]
        has_embed = part.is_last and not origins.has_own_head
        groups += [origins.entry] if part.is_first else [self._of_embed] * has_embed
        each = (origin for group in groups for origin in group.values())
        # What all weights take; one that has two names counts once.
        self.num_bytes = sum(maker.format_of(one).num_bytes(one.spec.shape) for one in each)
        self._done, self._total = 0, self.num_bytes

    def layer(self, number: int) -> Weights:
        """Return the weights of a layer, by its number in the model."""
        where, origins = f"layer {number} ", self._origins.layers[number]
        return self._make(origins, where, self._attention[number])

    def layers(self) -> Iterator[Weights]:
        """Give those of each layer of the stage; the next ones' are read meanwhile, then exit's."""
        groups = [self._origins.layers[number] for number in self._numbers]
        groups += [self._origins.exit] * self._part.is_last
        waiting = [[w for one in g.values() for w in self._maker.waiting(one)] for g in groups]
        with reading_ahead(waiting) as next_group:
            for number in self._numbers:
                yield self.layer(number)
                next_group()

    def entry(self) -> Weights:
        """Return the weights before the first layer; none but on the first stage."""
        return self._make(self._origins.entry) if self._part.is_first else {}

    def exit(self, entry: Weights) -> Weights:
        """Return the weights after the last layer; none but on the last stage.

        Args:
            entry: what `entry` gave; an embedding that is the head is the same weight.
        """
        if not self._part.is_last:
            return {}
        found, embed = self._make(self._origins.exit), entry.get("embed.weight")
        if not self._origins.has_own_head:
            found["head.weight"] = embed or self._make(self._of_embed)["embed.weight"]
        elif embed is not None and self._is_tied and embed.equals(found["head.weight"]):
            found["head.weight"] = embed  # stored twice: kept once
            self.num_bytes = self._total - embed.num_bytes
        return found

    def leave_head(self, *, is_embedding: bool) -> None:
        """Leave memory of the head's files to others, once it is packed.

        Args:
            is_embedding: the embedding is the same weight; otherwise it stays where it lies.
        """
        own = self._origins.exit.get("head.weight")
        if own is not None:
            self._maker.leave(own)
        if own is None or is_embedding:
            self._maker.leave(self._of_embed["embed.weight"])

    def _make(
        self, origins: Origins, where: str = "", attention: Attention | None = None
    ) -> Weights:
        found: Weights = {}
        for name, origin in origins.items():
            tensors = self._maker.make(where + name, origin, attention)
            found[name] = Weight(origin.spec, self._maker.format_of(origin), tensors)
            self._done += found[name].num_bytes
            self._on_progress(min(self._done, self._total), self._total)
        return found


def open_weights(
    checkpoint: Checkpoint,
    part: Part,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    keeps_bfloat16: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> LayerSource:
    """Return where one stage's weights come from; none is read yet.

    Args:
        dtype: of the arithmetic.
        keeps_bfloat16: as `held_format` takes it; random weights are not stored.
        seed: for random weights. They do not depend on how the model is split.
        on_progress: called with (bytes read, bytes in all) after each weight.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    held = partial(held_format, dtype=dtype, keeps_bfloat16=keeps_bfloat16)
    if checkpoint.folder is not None:
        files = open_files(checkpoint, checkpoint.folder)
        origins = find_stored(checkpoint, files)
        reader = Reader(files, device, held)
        return LayerSource(checkpoint, part, origins, reader, dtype, on_progress)
    origins = drawn_origins(checkpoint.model, is_tied=checkpoint.config.tie_word_embeddings)
    spread = float(getattr(checkpoint.config, "initializer_range", 0.02))
    norm = checkpoint.model.final_norm
    drawer = Drawer(seed, spread, 1.0 - (norm.offset if norm else 0.0), device, held)
    return LayerSource(checkpoint, part, origins, drawer, dtype, lambda done, total: None)


@dataclass(slots=True, frozen=True)
class Reader:
    """Reads from one checkpoint's files."""

    files: TensorFiles
    device: torch.device
    held: Callable[..., Format]  # `held_format`, of a spec and what is stored

    def format_of(self, origin: Origin) -> Format:
        types = self.files.types
        stored = {each.format or types[name] for each in origin.pieces for name in each.stored}
        formats = [Dense(DTYPES[each]) if isinstance(each, str) else each for each in stored]
        return self.held(origin.spec, formats)

    def make(self, name: str, origin: Origin, attention: Attention | None) -> Tensors:
        held, in_place, layout = self.format_of(origin), self._in_place(origin), origin.layout
        if in_place is None:
            tensors = self._join(origin, held)
        else:
            tensors = (layout.turned(self.files.read(in_place)),)
        start = tensors[0].data_ptr()
        if layout.change is not None:
            assert attention is not None, "only a layer's tensors are laid out otherwise"
            tensors = tuple(layout.change(tensor, attention) for tensor in tensors)
        if isinstance(held, Dense):
            tensors = (tensors[0].to(self.device, held.dtype),)  # itself, where it is so
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        if in_place is not None and tensors[0].data_ptr() != start:
            self.files.drop(in_place)
        return tensors

    def waiting(self, origin: Origin) -> Iterator[Waiting]:
        name, is_here = self._in_place(origin), self.device.type == "cpu"
        stays = (  # as it is stored, where it lies
            (name is not None and is_here and origin.layout == AS_STORED)
            and self.format_of(origin) == Dense(DTYPES[self.files.types[name]])
        )
        for piece in origin.pieces:
            for each in piece.stored:
                yield from self.files.waiting(each, is_used_there=stays)

    def leave(self, origin: Origin) -> None:
        for piece in origin.pieces:
            for name in piece.stored:
                self.files.drop(name)

    def _in_place(self, origin: Origin) -> str | None:
        """Return the stored tensor that can be used where it lies; None: it is copied first."""
        (name, *_), form = origin.pieces[0].stored, origin.pieces[0].format
        is_one = origin.is_one_piece and form is None and self.files.is_in_place(name)
        return name if is_one else None

    def _join(self, origin: Origin, held: Format) -> Tensors:
        """Copy what is stored of a tensor; dequantize what is not held so."""
        wholes, layout = held.empty(origin.spec.shape, self.device), origin.layout
        for piece in origin.pieces:
            parts = [whole if piece.item is None else whole[piece.item] for whole in wholes]
            if not origin.is_one_piece:
                parts = [part[piece.first : piece.last] for part in parts]
            if piece.format is None and not (layout.is_transposed or layout.is_row):
                self.files.copy(next(iter(piece.stored)), parts[0])
                continue
            values = tuple(map(self.files.read, piece.stored))
            if piece.format is None:
                values = (layout.turned(values[0]),)
            else:
                values = piece.format.read(values, is_transposed=layout.is_transposed)
                if isinstance(held, Dense):
                    values = (piece.format.dequantize(values, held.dtype),)
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)
            for name in piece.stored:
                self.files.drop(name)
        return wholes


@dataclass(slots=True, frozen=True)
class Drawer:
    """Draws weights. Each has a seed of its own, by its name.

    Args:
        spread: the standard deviation.
        of_norms: what the weights of norms are.
    """

    seed: int
    spread: float
    of_norms: float
    device: torch.device
    held: Callable[..., Format]

    def format_of(self, origin: Origin) -> Format:
        return self.held(origin.spec, ())

    def make(self, name: str, origin: Origin, attention: Attention | None) -> Tensors:
        """Draw one. Norms multiply by 1, biases are 0, the rest is normal."""
        (tensor,) = self.format_of(origin).empty(origin.spec.shape, self.device)
        if origin.spec.use in ("bias", "norm_bias", "choice"):
            return (tensor.zero_(),)
        if origin.spec.use == "norm":
            return (tensor.fill_(self.of_norms),)
        key = f"{self.seed} {name}"
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(key.encode()))
        return (tensor.normal_(0, self.spread, generator=generator),)

    def waiting(self, origin: Origin) -> Iterator[Waiting]:
        return iter(())

    def leave(self, origin: Origin) -> None:
        """Nothing: there is no file."""
