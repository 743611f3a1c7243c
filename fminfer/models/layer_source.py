"""Where the weights of a model or of one stage come from: its files, chance, or memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fminfer.compute.spec import Attention
from fminfer.compute.weights import Dense, Format, TensorSpec, Weight
from fminfer.core.partition import Part
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.formats import held_format
from fminfer.models.origins import Origin, Origins
from fminfer.models.stored.read_ahead import Waiting, reading_ahead
from fminfer.models.stored.tensor_table import DTYPES, TensorFiles
from fminfer.models.tensor_specs import (
    TensorSpecs,
    Weights,
    entry_specs,
    exit_specs,
    layer_specs,
    part_specs,
)
from fminfer.models.weight_headers import find_stored, open_files

OnProgress = Callable[[int, int], None]


class LayerSource(Protocol):
    """Gives the weights of one stage, each whenever it is asked for, and as often.

    It keeps none of them. All have the dtype of the arithmetic but those that are held in another
    format (`held_format`).
    """

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the arithmetic."""

    @property
    def num_bytes(self) -> int:
        """Return what all of them take; a weight that has two names counts once."""

    def layer(self, number: int) -> Weights:
        """Return the weights of a layer, by its number in the model."""

    def layers(self) -> Iterator[Weights]:
        """Give those of each layer of the stage, in order, while the next ones are fetched."""

    def entry(self) -> Weights:
        """Return the weights before the first layer; none but on the first stage."""

    def exit(self, entry: Weights) -> Weights:
        """Return the weights after the last layer; none but on the last stage.

        Args:
            entry: what `entry` gave. An embedding that is the head is the same weight.
        """


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
    """Return one stage's weights, of which none is read yet.

    Args:
        dtype: of the arithmetic.
        keeps_bfloat16: as `held_format` takes it.
        seed: for random weights. They do not depend on how the model is split.
        on_progress: called with (bytes read, bytes in all) as weights arrive.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    if checkpoint.folder is None:
        return RandomSource(checkpoint, part, dtype, device, seed)
    files = open_files(checkpoint, checkpoint.folder)
    reader = TensorReader(files, dtype, device, on_progress, keeps_bfloat16=keeps_bfloat16)
    return FileSource(checkpoint, part, reader)


class FileSource:
    """Gives weights from files."""

    def __init__(self, checkpoint: Checkpoint, part: Part, reader: TensorReader) -> None:
        origins = find_stored(checkpoint, reader.files)
        self._reader, self._part, self._layers = reader, part, origins.layers
        self._model, self.dtype = checkpoint.model, reader.dtype
        self._is_tied = bool(checkpoint.config.tie_word_embeddings)
        self._entry = origins.entry if part.is_first else {}
        self._exit = dict(origins.exit) if part.is_last else {}
        if part.is_last and not part.is_first and not origins.has_own_head:
            self._exit["head.weight"] = origins.entry["embed.weight"]
        groups = [*self._layers[part.first : part.last], self._entry, self._exit]
        self.num_bytes = reader.total = sum(map(reader.count_bytes, groups))

    def layer(self, number: int) -> Weights:
        attention = self._model.layers[number].attention
        return self._reader.read_all(self._layers[number], attention)

    def layers(self) -> Iterator[Weights]:
        """Give each layer's weights; those of the next ones are read meanwhile, then the head's."""
        numbers = range(self._part.first, self._part.last)
        groups = [self._reader.waiting(self._layers[number]) for number in numbers]
        with reading_ahead([*groups, self._reader.waiting(self._exit)]) as next_group:
            for number in numbers:
                yield self.layer(number)
                next_group()

    def entry(self) -> Weights:
        return self._reader.read_all(self._entry, None)

    def exit(self, entry: Weights) -> Weights:
        found, embed = self._reader.read_all(self._exit, None), entry.get("embed.weight")
        head = found.get("head.weight")
        if embed is None or not self._part.is_last:
            return found
        if head is None:
            found["head.weight"] = embed
        elif self._is_tied and embed.equals(head):  # stored twice: kept once
            found["head.weight"] = embed
            self.num_bytes = self._reader.total - head.num_bytes
        return found


class RandomSource:
    """Draws weights. Each has a seed of its own, by its name and its layer's number."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self._model, self._part, self._seed = checkpoint.model, part, seed
        self.dtype, self._device = dtype, device
        self._is_tied = bool(checkpoint.config.tie_word_embeddings)
        self._spread = float(getattr(checkpoint.config, "initializer_range", 0.02))
        final_norm = checkpoint.model.final_norm
        self._of_norms = 1.0 - (final_norm.offset if final_norm else 0.0)
        specs = part_specs(checkpoint.model, part)
        if self._is_tied and part.is_first:
            specs.pop("head.weight", None)
        held = [(self._format_of(spec), spec.shape) for spec in specs.values()]
        self.num_bytes = sum(form.num_bytes(shape) for form, shape in held)

    def layer(self, number: int) -> Weights:
        specs = layer_specs(self._model.layers[number], self._model.hidden_size)
        return self._draw(specs, f"layer {number} ")

    def layers(self) -> Iterator[Weights]:
        return map(self.layer, range(self._part.first, self._part.last))

    def entry(self) -> Weights:
        return self._draw(entry_specs(self._model), "") if self._part.is_first else {}

    def exit(self, entry: Weights) -> Weights:
        if not self._part.is_last:
            return {}
        specs = exit_specs(self._model)
        if not self._is_tied:
            return self._draw(specs, "")
        del specs["head.weight"]
        embed = entry_specs(self._model)["embed.weight"]
        return self._draw(specs, "") | {
            "head.weight": entry.get("embed.weight") or self._one(embed, "embed.weight")
        }

    def _format_of(self, spec: TensorSpec) -> Dense:
        found = held_format(spec, (), self.dtype, keeps_bfloat16=False)
        assert isinstance(found, Dense), "nothing is stored otherwise"
        return found

    def _draw(self, specs: TensorSpecs, where: str) -> Weights:
        return {name: self._one(spec, f"{where}{name}") for name, spec in specs.items()}

    def _one(self, spec: TensorSpec, name: str) -> Weight:
        """Draw one. Norms multiply by 1, biases are 0, the rest is normal."""
        held = self._format_of(spec)
        (tensor,) = held.empty(spec.shape, self._device)
        if spec.use in ("bias", "norm_bias", "choice"):
            tensor.zero_()
        elif spec.use == "norm":
            tensor.fill_(self._of_norms)
        else:
            key = f"{self._seed} {name}"
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(key.encode()))
            tensor.normal_(0, self._spread, generator=generator)
        return Weight(spec, held, (tensor,))


@dataclass(slots=True)
class MemorySource:
    """Gives weights that are in memory already."""

    dtype: torch.dtype
    of_layers: Sequence[Weights]  # from number `first` on
    before: Weights = field(default_factory=dict)
    after: Weights = field(default_factory=dict)
    first: int = 0

    @property
    def num_bytes(self) -> int:
        groups = (self.before, *self.of_layers, self.after)
        weights = {id(weight): weight for group in groups for weight in group.values()}
        return sum(weight.num_bytes for weight in weights.values())

    def layer(self, number: int) -> Weights:
        return self.of_layers[number - self.first]

    def layers(self) -> Iterator[Weights]:
        return iter(self.of_layers)

    def entry(self) -> Weights:
        return dict(self.before)

    def exit(self, entry: Weights) -> Weights:
        return dict(self.after)


class TensorReader:
    """Reads from one checkpoint's files.

    Args:
        dtype: of the arithmetic.
        on_progress: called with (bytes read, bytes in all) after each tensor.
        keeps_bfloat16: as `held_format` takes it.
    """

    def __init__(
        self,
        files: TensorFiles,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        *,
        keeps_bfloat16: bool,
    ) -> None:
        self.files, self.dtype, self._device = files, dtype, device
        self._on_progress, self._keeps_bfloat16 = on_progress, keeps_bfloat16
        self.done = self.total = 0

    def read_all(self, origins: Origins, attention: Attention | None) -> Weights:
        return {name: self.read(origin, attention) for name, origin in origins.items()}

    def read(self, origin: Origin, attention: Attention | None) -> Weight:
        held, in_place = self._held(origin), self._in_place(origin)
        if in_place is None:
            tensors = self._join(origin, held)
        else:
            stored = self.files.read(in_place)
            whole = stored.mT if origin.is_transposed else stored
            tensors = (whole[0] if origin.is_row else whole,)
        if origin.layout is not None and (change := origin.layout.change) is not None:
            assert attention is not None, "only a layer's tensors are laid out otherwise"
            tensors = tuple(change(tensor, attention) for tensor in tensors)
        if isinstance(held, Dense):
            tensors = (tensors[0].to(self._device, held.dtype),)  # itself, where it is so
        weight = Weight(origin.spec, held, tuple(tensor.contiguous() for tensor in tensors))
        if in_place is not None and weight.tensors[0].data_ptr() != stored.data_ptr():
            self.files.drop(in_place)
        self.done += weight.num_bytes
        self._on_progress(min(self.done, self.total), self.total)
        return weight

    def waiting(self, origins: Origins) -> list[Waiting]:
        """Return the parts of files of which tensors are made, not read yet."""
        found: list[Waiting] = []
        for origin in origins.values():
            stays = self._stays(origin)
            for piece in origin.pieces:
                for name in piece.stored:
                    found += self.files.waiting(name, is_used_there=stays)
        return found

    def _stays(self, origin: Origin) -> bool:
        """Tell whether a tensor is the stored one, where it lies."""
        name = self._in_place(origin)
        if name is None or origin.layout is not None or self._device.type != "cpu":
            return False
        return self._held(origin) == Dense(DTYPES[self.files.types[name]])

    def _in_place(self, origin: Origin) -> str | None:
        """Return the stored tensor that can be used where it lies; None: it is copied first."""
        (name, *_), form = origin.pieces[0].stored, origin.pieces[0].format
        is_one = origin.is_one_piece and form is None and self.files.is_in_place(name)
        return name if is_one else None

    def count_bytes(self, origins: Origins) -> int:
        """Return what tensors will take in memory."""
        return sum(self._held(origin).num_bytes(origin.shape) for origin in origins.values())

    def _held(self, origin: Origin) -> Format:
        """Return the format of a tensor in memory."""
        stored = {each.format or self.files.types[n] for each in origin.pieces for n in each.stored}
        formats = [Dense(DTYPES[each]) if isinstance(each, str) else each for each in stored]
        return held_format(origin.spec, formats, self.dtype, keeps_bfloat16=self._keeps_bfloat16)

    def _join(self, origin: Origin, held: Format) -> tuple[torch.Tensor, ...]:
        """Copy what is stored of a tensor, and dequantize what is not held so."""
        wholes = held.empty(origin.shape, self._device)
        for piece in origin.pieces:
            parts = [whole if piece.item is None else whole[piece.item] for whole in wholes]
            if not origin.is_one_piece:
                parts = [part[piece.first : piece.last] for part in parts]
            if piece.format is None:
                (name,) = piece.stored
                target = parts[0].mT if origin.is_transposed else parts[0]
                self.files.copy(name, target[None] if origin.is_row else target)
                continue
            values = tuple(map(self.files.read, piece.stored))
            values = piece.format.read(values, is_transposed=origin.is_transposed)
            if isinstance(held, Dense):
                values = (piece.format.dequantize(values, held.dtype),)
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)
            for name in piece.stored:
                self.files.drop(name)
        return wholes
