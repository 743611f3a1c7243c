"""Reads the weight files of a checkpoint as one table of tensors, whatever their form."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from fminfer.compute.values.weights import Shape
from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import (
    broken_file_error,
    check_no_impostor,
    is_gguf,
    naming_broken_files,
)
from fminfer.machine.host_memory import read_mapped_bytes
from fminfer.models.stored.direct_reads import (
    FileStamp,
    LentBuffer,
    Span,
    read_file_stamp,
)
from fminfer.models.stored.gguf_file import read_gguf
from fminfer.models.stored.stored_tensors import (
    BITS,
    DTYPES,
    FLOATS,
    JoinedTensor,
    StoredFile,
    StoredTensor,
    read_safetensors,
)
from fminfer.models.stored.torch_file import read_torch_file
from fminfer.models.stored.weight_folder import (
    LAYER,
    WeightFiles,
    find_weights,
    no_weights_error,
    unsharded_error,
)

# Where a tensor lies; or the file that has it under the same name.
Home = JoinedTensor | StoredFile
PAGE = mmap.PAGESIZE
COPIED_BYTES = 1 << 18  # at once, of what is not aligned
# bytes of weights that are searched for nan while a run goes on
MOST_SEARCHED = 4 << 30
# bytes that are read before they are asked for; one group is in any case
AHEAD = 1 << 29
# metaseq's OPT: names of tensors, and how parts for tensor parallelism are joined. A
# fused qkv_proj holds keys, values and queries in this order. Each part has its share
# of all three.
# The second tensor that is left out is a copy of the embedding.
LEFT_OUT = ("decoder.version", "decoder.output_projection.weight")
FUSED = ".qkv_proj."
BY_ROWS = (FUSED, ".fc1.", ".embed_tokens.")
BY_COLUMNS = (".out_proj.weight", ".fc2.weight")
RENAMED = {
    "decoder.layer_norm.": "decoder.final_layer_norm.",
    "decoder.project_in_dim.": "decoder.project_in.",
    "decoder.project_out_dim.": "decoder.project_out.",
}


def read_weight_file(path: Path) -> StoredFile:
    """Return the tensors of a file, without their values.

    Raises:
        CheckpointError: it is no file of weights, or it is broken.
    """
    with naming_broken_files(path):
        check_no_impostor(path)
        if is_gguf(path):
            return read_gguf(path)[0]
        return (
            read_safetensors(path)
            if path.suffix == ".safetensors"
            else read_torch_file(path)
        )


class WeightHeaders:
    """The headers of a checkpoint's weight files. Each is read once.

    A file that was written to since then is read again.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[FileStamp, StoredFile]] = {}

    def read(self, path: Path) -> tuple[StoredFile, FileStamp]:
        """Return what a file holds, and its stamp before it was read."""
        with naming_broken_files(path):
            stamp = read_file_stamp(path)
        known = self._files.get(path)
        if known is None or known[0] != stamp:
            known = (stamp, read_weight_file(path))
            self._files[path] = known
        return known[1], stamp


@dataclass(slots=True, frozen=True)
class PartToRead:
    """A part of a file that is read ahead of its use."""

    nbytes: int
    fetch: Callable[[], None]  # has the system read it


class TensorFiles:
    """All tensors of a checkpoint by their stored names. Values are read on demand.

    Args:
        layer_prefix: what the names of a layer's tensors begin with, {} for its number. A folder
            with a file for each layer leaves it out.
        beside: further folders, by what the names of their tensors begin with.
        headers: those that were read already.

    Raises:
        CheckpointError: there are no files, one is broken or missing, or a tensor is
        there twice.
    """

    def __init__(
        self,
        folder: Path,
        layer_prefix: str = "layers.{}.",
        beside: Mapping[str, Path] = MappingProxyType({}),
        headers: WeightHeaders | None = None,
    ) -> None:
        headers = headers or WeightHeaders()
        weights = find_weights(folder)
        if not weights.files:
            raise no_weights_error(folder)
        files = []
        self.seen = dict[Path, FileStamp]()  # their facts before they were read
        for path in weights.files:
            file, self.seen[path] = headers.read(path)
            files.append(file)
        self._maps: dict[Path, mmap.mmap] = {}
        self.lent: LentBuffer | None = (
            None  # in `reading_from`: the buffer that is read
        )
        self._homes: dict[str, Home] = {}
        self.types: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        if weights.form == "metaseq":
            for name, tensor in _join_metaseq_parts(files).items():
                self._add(name, tensor, tensor.dtype, tensor.shape)
        else:
            self._add_files(folder, weights, files, layer_prefix)
        for start, other in beside.items():
            self._add_folder(start, TensorFiles(other, headers=headers))

    def _add_files(
        self,
        folder: Path,
        weights: WeightFiles,
        files: Sequence[StoredFile],
        layer_prefix: str,
    ) -> None:
        """Add the tensors of files that hold whole ones."""
        named = {*weights.homes.values()}
        for file in files:
            layer = (
                LAYER.fullmatch(file.path.name) if weights.form == "layers" else None
            )
            prefix = layer_prefix.format(layer[1]) if layer else ""
            elsewhere = {home for home in named if folder / home != file.path}
            # a large model has tens of thousands: no function is called for each
            names = {
                prefix + name: name
                for name in file.types
                if weights.homes.get(name) not in elsewhere
            }
            if doubles := names.keys() & self._homes.keys():
                whole = min(doubles)
                first = self._find_tensor(whole).parts[0].file.name
                index = f", and no {weights.index} says which one counts"
                raise CheckpointError(
                    f"{folder} holds the tensor {whole!r} twice, in {first} and "
                    f"{file.path.name}{'' if layer else index}; take the file away that "
                    "does not belong to the model, or fetch the index"
                )
            self._homes |= {
                whole: JoinedTensor((file.tensors[name],)) if prefix else file
                for whole, name in names.items()
            }
            self.types |= {whole: file.types[name] for whole, name in names.items()}
            self.shapes |= {whole: file.shapes[name] for whole, name in names.items()}

    def _add_folder(self, start: str, other: TensorFiles) -> None:
        """Add the tensors of another folder; their names begin with `start`."""
        for name, dtype in other.types.items():
            home = other._find_tensor(name)
            self._add(start + name, home, dtype, other.shapes[name])
        self.seen |= other.seen

    def _add(self, name: str, home: Home, dtype: str, shape: Shape) -> None:
        self._homes[name] = home
        self.types[name] = dtype
        self.shapes[name] = shape

    def _find_tensor(self, name: str) -> JoinedTensor:
        """Return the parts of a tensor, and where they lie."""
        home = self._homes[name]
        if isinstance(home, JoinedTensor):
            return home
        return JoinedTensor((home.tensors[name],))

    @contextmanager
    def reading_from(self, lent: LentBuffer) -> Iterator[None]:
        """Read bytes from a lent buffer meanwhile, and none from files."""
        self.lent = lent
        try:
            yield
        finally:
            self.lent = None

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a tensor, a view of its mapped file if it is in place there."""
        tensor = self._find_tensor(name)
        if self.is_in_place(name):
            return self._view_tensor(tensor.parts[0])
        whole = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        self.copy(name, whole)
        return whole

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor's values, and free the pages of their part of the file."""
        tensor = self._find_tensor(name)
        first = 0
        if not tensor.shape:
            target.copy_(self._view_tensor(tensor.parts[0]))
            return
        for part in tensor.parts:
            size = part.shape[tensor.dim]
            rows = part.shape[0]
            part_target = target.narrow(tensor.dim, first, size)
            step = (
                rows
                if _is_aligned(part)
                else -(-rows * COPIED_BYTES // max(1, part_target.nbytes))
            )
            for row in range(0, rows, step or 1):
                last = min(row + step, rows)
                part_target[row:last] = self._view_tensor(part.slice_rows(row, last))
            self._free_pages(part)
            first += size

    def free_pages(self, name: str) -> None:
        """Free the pages of a tensor's part of the file, after it was copied."""
        for part in self._find_tensor(name).parts:
            self._free_pages(part)

    def is_in_place(self, name: str) -> bool:
        """Tell whether a tensor can be used where it lies: it is one part, which is aligned."""
        parts = self._find_tensor(name).parts
        return len(parts) == 1 and _is_aligned(parts[0])

    def find_spans(
        self, name: str, rows: tuple[int, int] | None = None
    ) -> Iterator[Span]:
        """Yield the spans of a tensor's parts, or of some rows (first, end) of a single part."""
        parts = self._find_tensor(name).parts
        for part in parts:
            span_part = (
                part if rows is None or len(parts) > 1 else part.slice_rows(*rows)
            )
            yield Span(part.file, *span_part.span)

    def make_part_to_read(self, span: Span, *, is_used_there: bool) -> PartToRead:
        """Return a span as a part to be read ahead.

        A span that will be copied is read into the system's memory only, not into this
        process's pages.
        """
        size = span.last - span.first
        fetch = partial(_start_reading, span)
        if is_used_there and size:
            address = torch.frombuffer(
                self._map_file(span.file), dtype=torch.uint8
            ).data_ptr()
            fetch = partial(read_mapped_bytes, address + span.first, size)
        return PartToRead(size, fetch)

    def _view_tensor(self, tensor: StoredTensor) -> torch.Tensor:
        dtype = DTYPES[tensor.dtype]
        first, last = tensor.span
        if first == last:
            return torch.empty(tensor.shape, dtype=dtype)
        stored = self._view_bytes(tensor.file, first, last)
        # of old files: the processor may not read it where it lies
        if not _is_aligned(tensor):
            stored = stored.clone()
            self._free_pages(tensor)
        return stored.view(dtype).as_strided(tensor.shape, tensor.strides)

    def _view_bytes(self, file: Path, first: int, last: int) -> torch.Tensor:
        if self.lent is not None:
            return self.lent.find_bytes(Span(file, first, last))
        mapped = self._map_file(file)
        if last > len(mapped):
            raise broken_file_error(file, "it was cut off meanwhile")
        return torch.frombuffer(
            mapped, dtype=torch.uint8, count=last - first, offset=first
        )

    def _map_file(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with naming_broken_files(path), path.open("rb") as file:
                # Nothing writes into the map. If it did, the file would not change.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]

    def _free_pages(self, tensor: StoredTensor) -> None:
        if self.lent is not None:
            return
        first, last = tensor.span
        first = -(-first // PAGE) * PAGE  # whole pages of its own
        last = last // PAGE * PAGE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map_file(tensor.file).madvise(mmap.MADV_DONTNEED, first, last - first)


def find_nonfinite_tensor(folder: Path) -> str:
    """Return the first tensor with nan or infinity; "": none, or files are too large."""
    files = TensorFiles(folder)
    if sum(path.stat().st_size for path in files.seen) > MOST_SEARCHED:
        return ""
    floats = (name for name, dtype in files.types.items() if dtype in FLOATS)
    return next((name for name in floats if not files.read(name).isfinite().all()), "")


def _start_reading(span: Span) -> None:
    """Start the system's reading of a part of a file, which goes on by itself."""
    if hasattr(os, "posix_fadvise"):
        # who needs it says what is wrong
        with suppress(OSError), span.file.open("rb") as file:
            size = span.last - span.first
            os.posix_fadvise(file.fileno(), span.first, size, os.POSIX_FADV_WILLNEED)


@contextmanager
def reading_ahead(
    groups: Sequence[Sequence[PartToRead]],
) -> Iterator[Callable[[], None]]:
    """Read groups of tensors into memory in a thread, one after the other, not too far ahead.

    Yields:
        a function to call when a group has been used.
    """
    largest = max((sum(part.nbytes for part in group) for group in groups), default=0)
    waiting = iter(groups)
    with ThreadPoolExecutor(1, "fminfer weights") as thread:

        def read_next() -> None:
            for part in next(waiting, ()):
                thread.submit(part.fetch)

        for _ in groups[: max(1, AHEAD // max(1, largest))]:
            read_next()
        try:
            yield read_next
        except BaseException:
            thread.shutdown(cancel_futures=True)
            raise
        for _ in groups:
            read_next()


def _is_aligned(tensor: StoredTensor) -> bool:
    return tensor.start * 8 % BITS[tensor.dtype] == 0


def _join_metaseq_parts(files: Sequence[StoredFile]) -> dict[str, JoinedTensor]:
    """Return the tensors of all parts of metaseq under the names of transformers."""
    first = files[0]
    for file in files:
        for name in file.tensors.keys() ^ first.tensors.keys():
            raise CheckpointError(
                f"{first.path.name} and {file.path.name} do not hold the same tensors: "
                f"{name!r} is in one of them; fetch both again"
            )
    for name in first.tensors:
        if "flat_param" in name:
            raise unsharded_error(first.path.name)
    tensors: dict[str, JoinedTensor] = {}
    for name in first.tensors.keys() - set(LEFT_OUT):
        parts = [file.tensors[name] for file in files]
        for new_name, tensor in _join_metaseq_tensor(name, parts):
            for old_part, new_part in RENAMED.items():
                new_name = new_name.replace(old_part, new_part)
            tensors[new_name] = tensor
    return tensors


def _join_metaseq_tensor(
    name: str, parts: list[StoredTensor]
) -> Iterator[tuple[str, JoinedTensor]]:
    dim = next((0 for each in BY_ROWS if each in name), None)
    dim = 1 if name.endswith(BY_COLUMNS) else dim
    _check_part_shapes(name, parts, dim)
    if FUSED not in name:
        yield (
            name,
            JoinedTensor(tuple(parts if dim is not None else parts[:1]), dim or 0),
        )
        return
    for number, product_name in enumerate(("k_proj", "v_proj", "q_proj")):
        sizes = [part.shape[0] // 3 for part in parts]
        rows = (
            part.slice_rows(number * n, (number + 1) * n)
            for part, n in zip(parts, sizes, strict=True)
        )
        yield name.replace("qkv_proj", product_name), JoinedTensor(tuple(rows))


def _check_part_shapes(name: str, parts: list[StoredTensor], dim: int | None) -> None:
    """Check that parts can be joined along a dimension, or are the same without one."""
    shapes = [part.shape for part in parts]
    fits = True
    others = set(shapes)
    if dim is not None:
        fits = all(
            len(s) > dim and (FUSED not in name or s[0] % 3 == 0) for s in shapes
        )
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if not fits or len(others) > 1:
        found_shapes = " and ".join(map(str, shapes[:2]))
        raise CheckpointError(
            f"{parts[0].file.parent}: tensor {name!r} has shape {found_shapes}, which is no "
            "part of a model; fetch the files again"
        )
