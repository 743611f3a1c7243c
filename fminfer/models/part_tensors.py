"""Loads the tensors of a model or of one stage, from its weight files, or draws them at random."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fminfer.compute.spec import Attention, Model
from fminfer.compute.weights import TensorSpec
from fminfer.core.partition import Part
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.origins import ModelOrigins, Origin, Origins
from fminfer.models.stored.read_ahead import Waiting, reading_ahead
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.tensor_specs import (
    Tensors,
    TensorSpecs,
    entry_specs,
    exit_specs,
    layer_specs,
)
from fminfer.models.weight_headers import find_stored, open_files

OnProgress = Callable[[int, int], None]


class TensorReader:
    """Reads from one checkpoint's files.

    Args:
        dtype: of the arithmetic.
        on_progress: called with (bytes read, bytes in all) after each tensor.
        keeps_bfloat16: what is stored so and multiplied or looked up stays so.
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
        self._files, self._dtype, self._device = files, dtype, device
        self._on_progress, self._keeps_bfloat16 = on_progress, keeps_bfloat16
        self.done = self.total = 0

    def read_all(self, origins: Origins, attention: Attention | None) -> Tensors:
        return {name: self.read(name, origin, attention) for name, origin in origins.items()}

    def read(self, name: str, origin: Origin, attention: Attention | None) -> torch.Tensor:
        dtype = self._dtype_of(origin)
        stored = tensor = self._join(origin, dtype)
        if origin.layout is not None:
            assert attention is not None, "only a layer's tensors are laid out otherwise"
            tensor = origin.layout.change(tensor, attention)
        tensor = tensor.to(self._device, dtype).contiguous()  # itself, where it is so
        if origin.is_one_piece and tensor.data_ptr() != stored.data_ptr():
            self._files.drop(origin.pieces[0].stored)
        self.done += tensor.nbytes
        self._on_progress(min(self.done, self.total), self.total)
        return tensor

    def waiting(self, origins: Origins) -> list[Waiting]:
        """Return the parts of files of which tensors are made, not read yet."""
        found: list[Waiting] = []
        for name, origin in origins.items():
            stays = self._stays(name, origin)
            for piece in origin.pieces:
                found += self._files.waiting(piece.stored, is_used_there=stays)
        return found

    def _stays(self, name: str, origin: Origin) -> bool:
        """Tell whether a tensor is the stored one, where it lies."""
        stored = origin.pieces[0].stored
        return (
            origin.is_one_piece
            and origin.layout is None
            and self._device.type == "cpu"
            and self._files.dtypes[stored] == self._dtype_of(origin)
            and self._files.is_in_place(stored)
        )

    def leave(self, origins: Iterable[Origin | None]) -> None:
        """Leave the memory of stored tensors to others."""
        for piece in (piece for origin in origins if origin for piece in origin.pieces):
            self._files.drop(piece.stored)

    def count_bytes(self, origins: Origins) -> int:
        """Return what tensors will take in memory."""
        return sum(
            torch.Size(origin.shape).numel() * self._dtype_of(origin).itemsize
            for name, origin in origins.items()
        )

    def _dtype_of(self, origin: Origin) -> torch.dtype:
        """Return the type of a tensor in memory."""
        if origin.spec.is_precise:
            return torch.float32
        stays = self._keeps_bfloat16 and origin.spec.is_widened
        if stays and all(self._files.dtypes[p.stored] == torch.bfloat16 for p in origin.pieces):
            return torch.bfloat16
        return self._dtype

    def _join(self, origin: Origin, dtype: torch.dtype) -> torch.Tensor:
        first = origin.pieces[0]
        if origin.is_one_piece and self._files.is_in_place(first.stored):
            return self._files.read(first.stored)
        shape = first.shape if origin.is_one_piece else origin.shape
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for piece in origin.pieces:
            target = whole if piece.item is None else whole[piece.item]
            rows = target if origin.is_one_piece else target[piece.first : piece.last]
            self._files.copy(piece.stored, rows)
        return whole


@dataclass(slots=True)
class PartTensors:
    """The tensors of one stage.

    All have the dtype of the arithmetic but those that stay as they are stored.
    """

    layers: Iterator[Tensors]  # in order; each is read when it is asked for
    entry: Tensors  # before the first layer; empty but on the first stage
    exit: Tensors  # after the last layer; empty but on the last stage
    dtype: torch.dtype  # of the arithmetic
    num_bytes: int  # of all of them; a tensor that has two names counts once
    # Leaves memory of a head's files to others once it is packed. What is read again comes back.
    leave_head: Callable[[], None] = lambda: None


def load_tensors(
    checkpoint: Checkpoint,
    part: Part,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    keeps_bfloat16: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> PartTensors:
    """Return one stage's tensors; its layers' are read later, each when it is asked for.

    Args:
        dtype: the type of the returned tensors.
        keeps_bfloat16: what is stored so and multiplied or looked up stays so; random weights not.
        seed: for random weights. They do not depend on how the model is split.
        on_progress: called with (bytes read, bytes in all) as tensors arrive.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    if checkpoint.folder is None:
        return _draw(checkpoint, part, dtype, device, seed)
    files = open_files(checkpoint, checkpoint.folder)
    origins = find_stored(checkpoint, files)
    reader = TensorReader(files, dtype, device, on_progress, keeps_bfloat16=keeps_bfloat16)
    of_layers = sum(map(reader.count_bytes, origins.layers[part.first : part.last]))
    reader.total = of_layers + sum(
        map(reader.count_bytes, [origins.entry] * part.is_first + [origins.exit] * part.is_last)
    )
    entry = reader.read_all(origins.entry, None) if part.is_first else {}
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    outside = _read_exit(reader, origins, entry, is_tied=is_tied) if part.is_last else {}
    layers = _read_layers(reader, origins, checkpoint.model, part)
    num_bytes = of_layers + _count_bytes(entry, outside)
    leave = partial(reader.leave, [origins.entry["embed.weight"], origins.exit.get("head.weight")])
    return PartTensors(layers, entry, outside, dtype, num_bytes, leave)


def _read_exit(
    reader: TensorReader, origins: ModelOrigins, entry: Tensors, *, is_tied: bool
) -> Tensors:
    """Read what stands after the last layer; `entry` has the embedding if it is on this stage."""
    outside = reader.read_all(origins.exit, None)
    embed = entry.get("embed.weight")
    if not origins.has_own_head:
        if embed is None:
            embed = reader.read("embed.weight", origins.entry["embed.weight"], None)
        outside["head.weight"] = embed
    elif embed is not None and is_tied:  # stored twice: kept once, if they are equal
        head = outside["head.weight"]
        if head.dtype == embed.dtype and torch.equal(head, embed):
            outside["head.weight"] = embed
    return outside


def _read_layers(
    reader: TensorReader, origins: ModelOrigins, model: Model, part: Part
) -> Iterator[Tensors]:
    """Give each layer's tensors; those of the next ones are read meanwhile, then the head's."""
    numbers = range(part.first, part.last)
    groups = [reader.waiting(origins.layers[number]) for number in numbers]
    outside = reader.waiting(origins.exit) if part.is_last else []
    with reading_ahead([*groups, outside]) as next_group:
        for number in numbers:
            yield reader.read_all(origins.layers[number], model.layers[number].attention)
            next_group()


def _count_bytes(*groups: Tensors) -> int:
    tensors = {id(tensor): tensor for group in groups for tensor in group.values()}
    return sum(tensor.nbytes for tensor in tensors.values())


def _draw(
    checkpoint: Checkpoint, part: Part, dtype: torch.dtype, device: torch.device, seed: int
) -> PartTensors:
    model = checkpoint.model
    spread = float(getattr(checkpoint.config, "initializer_range", 0.02))
    of_norms = 1.0 - (model.final_norm.offset if model.final_norm else 0.0)
    draw = RandomTensors(seed, spread, of_norms, dtype, device).draw
    specs = {
        number: layer_specs(model.layers[number], model.hidden_size)
        for number in range(part.first, part.last)
    }
    layers = (draw(own, f"layer {number} ") for number, own in specs.items())
    sizes = [spec.size for own in specs.values() for spec in own.values()]
    entry = draw(entry_specs(model), "") if part.is_first else {}
    outside = draw(exit_specs(model), "") if part.is_last else {}
    if part.is_last and checkpoint.config.tie_word_embeddings:
        of_embed = {"embed.weight": entry_specs(model)["embed.weight"]}
        outside["head.weight"] = (entry or draw(of_embed, ""))["embed.weight"]
    num_bytes = sum(sizes) * dtype.itemsize + _count_bytes(entry, outside)
    return PartTensors(layers, entry, outside, dtype, num_bytes)


@dataclass(slots=True, frozen=True)
class RandomTensors:
    """Draws tensors.

    Args:
        spread: the standard deviation of weights.
        of_norms: what the weights of norms are.
    """

    seed: int
    spread: float
    of_norms: float
    dtype: torch.dtype
    device: torch.device

    def draw(self, specs: TensorSpecs, where: str) -> Tensors:
        """Draw tensors of these specs. Each has a seed of its own, by its name and `where`."""
        return {name: self._one(spec, f"{where}{name}") for name, spec in specs.items()}

    def _one(self, spec: TensorSpec, name: str) -> torch.Tensor:
        """Draw one tensor. Norms multiply by 1, biases are 0, the rest is normal."""
        dtype, device = torch.float32 if spec.is_precise else self.dtype, self.device
        shape = spec.shape
        if spec.use in ("bias", "choice"):
            return torch.zeros(shape, dtype=dtype, device=device)
        if spec.use == "norm":
            return torch.full(shape, self.of_norms, dtype=dtype, device=device)
        key = f"{self.seed} {name}"
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0, self.spread, generator=generator)
