"""Loads the tensors of a model or of one stage, from its weight files, or draws them at random."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fminfer.compute.spec import Attention, Model
from fminfer.core.errors import CheckpointError
from fminfer.core.partition import Part
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.origins import ModelOrigins, Origin, Origins, find_origins, is_left_out
from fminfer.models.stored.read_ahead import Waiting, reading_ahead
from fminfer.models.stored.stored_tensors import FLOATS
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.stored.weight_folder import indexed_names, weight_files
from fminfer.models.tensor_shapes import (
    Shapes,
    entry_shapes,
    exit_shapes,
    is_precise,
    layer_shapes,
    may_stay_stored,
)

Tensors = dict[str, torch.Tensor]
OnProgress = Callable[[int, int], None]


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


class _Reader:
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
        dtype = self._dtype_of(name, origin)
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
            and self._files.dtypes[stored] == self._dtype_of(name, origin)
            and self._files.is_in_place(stored)
        )

    def count_bytes(self, origins: Origins) -> int:
        """Return what tensors will take in memory."""
        return sum(
            torch.Size(origin.shape).numel() * self._dtype_of(name, origin).itemsize
            for name, origin in origins.items()
        )

    def _dtype_of(self, name: str, origin: Origin) -> torch.dtype:
        """Return the type of a tensor in memory."""
        if is_precise(name):
            return torch.float32
        stays = self._keeps_bfloat16 and may_stay_stored(name)
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


def check_tensors(checkpoint: Checkpoint, *, has_weights: bool = True) -> None:
    """Refuse what `load_tensors` would refuse, by the headers of the weight files alone.

    Args:
        has_weights: otherwise the names of an index are checked, if there is one.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unexpected, or misshapen.
    """
    if checkpoint.folder is None:
        return
    if has_weights:
        _find(checkpoint, _open(checkpoint, checkpoint.folder))
    elif names := indexed_names(checkpoint.folder):
        _find_origins(checkpoint, dict.fromkeys(names))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype of most weights by their files' headers, or the config's without files.

    A config may lack it, or name another one. None: a dtype that does not run here, or a broken
    file, which loading will name.
    """
    folder = checkpoint.folder
    try:
        if folder is None or not weight_files(folder):
            own: torch.dtype | None = checkpoint.config.dtype
            return own
        return _open(checkpoint, folder).main_dtype()
    except CheckpointError:
        return None


def weight_dtype(
    checkpoint: Checkpoint, dtype: torch.dtype, *, keeps_bfloat16: bool
) -> torch.dtype:
    """Return the dtype in which most weights are held, of arithmetic in `dtype`.

    Args:
        keeps_bfloat16: as `load_tensors` is told.
    """
    is_kept = keeps_bfloat16 and checkpoint.folder is not None
    return torch.bfloat16 if is_kept and stored_dtype(checkpoint) == torch.bfloat16 else dtype


def _open(checkpoint: Checkpoint, folder: Path) -> TensorFiles:
    return TensorFiles(folder, checkpoint.architecture.prefix)


def _refuse_types(files: TensorFiles, left_out: str, name: str) -> None:
    """Refuse values that are no plain floats, such as those of quantized weights."""
    for tensor, dtype in files.types.items():
        if dtype not in FLOATS and not is_left_out(tensor, left_out):
            why = "weights have one of " + ", ".join(FLOATS)
            if dtype not in ("I64", "BOOL", "C64"):
                why = "quantized weights do not run yet"
            raise CheckpointError(
                f"{name} stores {tensor!r} as {dtype}: {why}. Take a checkpoint in 16 or 32 bits"
            )


def _find(checkpoint: Checkpoint, files: TensorFiles) -> ModelOrigins:
    _refuse_types(files, checkpoint.architecture.left_out, checkpoint.name)
    return _find_origins(checkpoint, files.shapes)


def _find_origins(
    checkpoint: Checkpoint, stored: Mapping[str, tuple[int, ...] | None]
) -> ModelOrigins:
    is_tied = bool(checkpoint.config.tie_word_embeddings)
    return find_origins(checkpoint.architecture, stored, is_tied=is_tied, name=checkpoint.name)


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
    files = _open(checkpoint, checkpoint.folder)
    origins = _find(checkpoint, files)
    reader = _Reader(files, dtype, device, on_progress, keeps_bfloat16=keeps_bfloat16)
    of_layers = sum(map(reader.count_bytes, origins.layers[part.first : part.last]))
    reader.total = of_layers + sum(
        map(reader.count_bytes, [origins.entry] * part.is_first + [origins.exit] * part.is_last)
    )
    entry = reader.read_all(origins.entry, None) if part.is_first else {}
    outside = reader.read_all(origins.exit, None) if part.is_last else {}
    if part.is_last and not origins.has_own_head:
        embed = entry.get("embed.weight")
        outside["head.weight"] = (
            reader.read("embed.weight", origins.entry["embed.weight"], None)
            if embed is None
            else embed
        )
    elif (
        part.is_last and part.is_first and checkpoint.config.tie_word_embeddings
    ):  # stored twice: kept once, if they are equal
        head, embed = outside["head.weight"], entry["embed.weight"]
        if head.dtype == embed.dtype and torch.equal(head, embed):
            outside["head.weight"] = embed
    layers = _read_layers(reader, origins, checkpoint.model, part)
    return PartTensors(layers, entry, outside, dtype, of_layers + _count_bytes(entry, outside))


def _read_layers(
    reader: _Reader, origins: ModelOrigins, model: Model, part: Part
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

    def draw(shapes: Shapes, where: str) -> Tensors:
        return {
            name: _draw_one(name, shape, f"{seed} {where}{name}", spread, of_norms, dtype, device)
            for name, shape in shapes.items()
        }

    shapes = {
        number: layer_shapes(model.layers[number], model.hidden_size)
        for number in range(part.first, part.last)
    }
    layers = (draw(own, f"layer {number} ") for number, own in shapes.items())
    sizes = [math.prod(shape) for own in shapes.values() for shape in own.values()]
    entry = draw(entry_shapes(model), "") if part.is_first else {}
    outside = draw(exit_shapes(model), "") if part.is_last else {}
    if part.is_last and checkpoint.config.tie_word_embeddings:
        of_embed = {"embed.weight": entry_shapes(model)["embed.weight"]}
        outside["head.weight"] = (entry or draw(of_embed, ""))["embed.weight"]
    num_bytes = sum(sizes) * dtype.itemsize + _count_bytes(entry, outside)
    return PartTensors(layers, entry, outside, dtype, num_bytes)


def _draw_one(
    name: str,
    shape: tuple[int, ...],
    key: str,
    spread: float,
    of_norms: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Draw a tensor with its own seed. Norms multiply by 1, biases are 0, the rest is normal."""
    dtype = torch.float32 if is_precise(name) else dtype
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if "norm" in name or name.startswith(("before_", "after_", "sum_")):
        return torch.full(shape, of_norms, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, spread, generator=generator)
