"""Finds the stored tensors that each of ours is made of, by the headers of weight files.

A tensor that is missing, left over or misshapen is refused by name. No values are read, but
biases of GPTQ that a model does not have: they must be 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.own_rows import OWN_FORMATS
from fminfer.compute.values.spec import Attention
from fminfer.compute.values.weights import USES, Format, Shape, TensorSpec, Use
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.families.tensor_names import AS_STORED, Layout, Source, find_source
from fminfer.models.holding import FORMATS, StoredFormat
from fminfer.models.sharding import WHOLE, ModelShard, TensorCut, outputs_dim
from fminfer.models.stored.stored_tensors import BLOCKS, DTYPES, FLOATS
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.stored.weight_folder import find_weights, read_indexed_names
from fminfer.models.tensor_specs import TIED, model_specs, without_tied_tensors

# formats and numbers of rows, as `Holding.choose_format` takes them
Parts = list[tuple[Format, int]]

# Old checkpoints hold causal masks and tables of positions, which nothing reads.
_LEFT_OVER = re.compile(
    r"\.(attn\.bias|attention\.bias|masked_bias|attn\.causal_mask|position_ids|inv_freq"
    r"|(cos|sin)_cached|attn\.embed_positions)$"
)
# What names begin with or not, as they were saved with a head or without, or as part of a whole.
PREFIXES = ("model.", "language_model.", "decoder.", "transformer.")
# What old conversions from TensorFlow call weights and biases of norms.
_OLD_LEAVES = {".gamma": ".weight", ".beta": ".bias"}


@dataclass(slots=True, frozen=True)
class Piece:
    """A stored part of one of our tensors: its rows `first` to `last`, or of a stacked item."""

    stored: Mapping[str, Shape]  # in the order of its reader
    reader: StoredFormat | None  # None: plain floats, one tensor
    item: int | None
    first: int  # row
    last: int
    is_turned: bool = False  # its floats are (inputs, outputs)

    @property
    def format(self) -> Format | None:
        """What its values have once they are read; None: plain floats, as they are stored."""
        return None if self.reader is None else self.reader.format


@dataclass(slots=True, frozen=True)
class Origin:
    """The stored tensors that one of ours is made of; without pieces it is drawn at random."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    layout: Layout
    attention: Attention | None = None  # of its layer
    cut: TensorCut = WHOLE  # the part that this rank holds

    @property
    def held_spec(self) -> TensorSpec:
        """The spec of the part that this rank holds."""
        return self.cut.cut_spec(self.spec)

    @property
    def is_one_piece(self) -> bool:
        """Whether ours is one stored matrix or vector, and does not stack it."""
        return len(self.pieces) == 1 and self.pieces[0].item is None

    def find_order(self) -> torch.Tensor | None:
        """Return the number of the stored row of each row held; None: all rows, as stored."""
        change = self.layout.change
        rows = self.cut.rows
        if change is None and rows is None:
            return None
        dim = outputs_dim(self.spec)
        order = torch.arange(self.spec.shape[dim])
        if change is not None:  # queries, keys and values stay among themselves
            assert self.attention is not None, (
                "only a layer's tensors are laid out otherwise"
            )
            order = change(order[None] if dim else order, self.attention).flatten()
        return (
            order
            if rows is None
            else torch.cat([order[r.start : r.stop] for r in rows])
        )

    def stored_formats(self, types: Mapping[str, str]) -> Parts:
        """Return the format and number of rows of each piece, by the types of stored tensors."""
        firsts = [(piece, next(iter(piece.stored))) for piece in self.pieces]
        return [
            (p.format or Dense(DTYPES[types[n]]), p.last - p.first) for p, n in firsts
        ]


# By the names of `model_specs`, without tensors that are the embedding itself.
Origins = dict[str, Origin]


def is_ignored(name: str, others: str) -> bool:
    """Tell whether nothing reads a stored tensor: of old releases, or of a pattern."""
    return bool(_LEFT_OVER.search(f".{name}") or (others and re.match(others, name)))


def find_origins(
    checkpoint: Checkpoint,
    stored: Mapping[str, Shape | None],
    types: Mapping[str, str] | None = None,
) -> Origins:
    """Find every tensor of the model among the stored ones; a shape or types may not be known.

    Raises:
        CheckpointError: tensors are missing, of another shape or type, or not part of the model.
    """
    search = _OriginSearch(checkpoint, stored, types or {})
    origins = {
        n: search.find_origin(n, spec)
        for n, spec in model_specs(checkpoint.model).items()
    }
    for name in origins.keys() & TIED if checkpoint.config.tie_word_embeddings else ():
        pieces = origins[name].pieces
        if pieces == origins["embed.weight"].pieces or not all(
            map(search.has_piece, pieces)
        ):
            del origins[name]  # it is the embedding
    for wrong in search.find_faults(origins):
        raise CheckpointError(f"{checkpoint.name}{wrong}")
    return origins


def read_origins(checkpoint: Checkpoint, folder: Path) -> tuple[TensorFiles, Origins]:
    """Find every tensor of the model by the headers of all weight files, as `find_origins`."""
    files = TensorFiles(
        folder,
        checkpoint.architecture.prefix,
        checkpoint.dense_folders,
        checkpoint.headers,
    )
    origins = find_origins(checkpoint, files.shapes, files.types)
    _check_zero_biases(checkpoint, files, origins)
    return files, origins


def _check_zero_biases(
    checkpoint: Checkpoint, files: TensorFiles, origins: Origins
) -> None:
    """Check that biases are 0 that quantizers wrote, and the model does not have."""
    scheme = checkpoint.architecture.scheme
    if scheme is None or not scheme.has_zero_biases:
        return
    used = {
        name for o in origins.values() for piece in o.pieces for name in piece.stored
    }
    left_out = checkpoint.architecture.left_out
    for name in sorted(files.types.keys() - used):
        is_of_model = name.endswith(".bias") and not is_ignored(name, left_out)
        if is_of_model and files.read(name).float().any():
            raise CheckpointError(
                f"{checkpoint.name} holds a bias {name!r} that is not 0, and a model of its "
                "config.json has none there; config and weights do not belong together"
            )


def make_drawn_origins(checkpoint: Checkpoint) -> Origins:
    """Return the tensors of a model that is stored nowhere."""
    is_tied = checkpoint.config.tie_word_embeddings
    specs = without_tied_tensors(model_specs(checkpoint.model), is_tied=is_tied)
    return {name: Origin(spec, (), AS_STORED) for name, spec in specs.items()}


def cut_origins(origins: Origins, share: ModelShard | None) -> Origins:
    """Return the origins of the parts that one rank holds; None: it holds all."""
    cuts = {} if share is None else share.cuts
    return {
        name: replace(each, cut=cuts.get(name, WHOLE)) for name, each in origins.items()
    }


def check_tensors(checkpoint: Checkpoint, *, has_weights: bool = True) -> None:
    """Check tensors as loading would, by the headers of weight files, or by an index alone."""
    if checkpoint.folder is None:
        return
    if has_weights:
        read_origins(checkpoint, checkpoint.folder)
    elif names := read_indexed_names(checkpoint.folder):
        find_origins(checkpoint, dict.fromkeys(names))


@dataclass(slots=True, frozen=True)
class StoredModel:
    """What is stored of a model: the origin of each of its tensors, and the types of files."""

    origins: Origins  # without tensors that are the embedding itself
    types: Mapping[str, str]  # by stored names
    files: TensorFiles | None  # None: a config alone says it
    tied: frozenset[str]  # names of those that may be the embedding

    @property
    def all_origins(self) -> Origins:
        """The origin of every tensor; that of a tied one is the embedding's."""
        return dict.fromkeys(self.tied, self.origins["embed.weight"]) | self.origins

    def list_formats(self) -> dict[str, Parts]:
        """Return the formats in which each tensor is stored, by our names."""
        return {
            name: origin.stored_formats(self.types)
            for name, origin in self.all_origins.items()
        }

    def is_in_place(self, name: str) -> bool:
        """Tell whether a stored tensor can be used where it lies in its file."""
        return self.files is None or self.files.is_in_place(name)


def find_stored_model(checkpoint: Checkpoint) -> StoredModel | None:
    """Find what is stored of a model by headers, or by the config where there are no files.

    None: weights are random, or files are broken, which loading will name.
    """
    folder = checkpoint.folder
    if folder is None:
        return None
    with suppress(CheckpointError):
        if find_weights(folder).files:
            return read_stored_model(checkpoint, folder)
        return _assume_stored_model(checkpoint, folder)
    # such as of a hub's model, whose weights are not here, and whose index is
    if checkpoint.architecture.scheme is not None:
        with suppress(CheckpointError):
            return _assume_stored_model(checkpoint, folder)
    return None


def read_stored_model(checkpoint: Checkpoint, folder: Path) -> StoredModel:
    """Find what is stored of a model by the headers of all weight files.

    Raises:
        CheckpointError: as `find_origins`.
    """
    files, origins = read_origins(checkpoint, folder)
    tied = model_specs(checkpoint.model).keys() & TIED
    return StoredModel(origins, files.types, files, frozenset(tied))


def _assume_stored_model(checkpoint: Checkpoint, folder: Path) -> StoredModel | None:
    """Return what the files of a config will hold: usual names in its dtype, and its scheme's.

    An index says which matrices are quantized. Without one they are those of layers.
    """
    architecture = checkpoint.architecture
    scheme = architecture.scheme
    # gpt-oss's config names no dtype
    dtype = checkpoint.config.dtype or (torch.bfloat16 if scheme else None)
    if dtype is None:
        return None
    names = read_indexed_names(folder)
    search = _OriginSearch(checkpoint, dict.fromkeys(names), {})
    plain_search = search
    uses: Collection[Use] = USES
    if scheme is not None and not names:
        has_head = scheme.has_head and not checkpoint.config.tie_word_embeddings
        uses = ("product", "moved", "head") if has_head else ("product", "moved")
        plain = replace(checkpoint, architecture=replace(architecture, scheme=None))
        plain_search = _OriginSearch(plain, {}, {})
    origins = {
        name: (search if spec.use in uses else plain_search).find_origin(name, spec)
        for name, spec in model_specs(checkpoint.model).items()
    }
    stored = (n for each in origins.values() for p in each.pieces for n in p.stored)
    names_of_types = {each: name for name, each in DTYPES.items()}
    # a config may name any type; what is stored in one that no weight has is refused later
    types = dict.fromkeys(stored, names_of_types.get(dtype, "F32"))
    return StoredModel(origins, types, files=None, tied=frozenset())


class _OriginSearch:
    """Finds the stored tensors that ours are made of, under all names that a checkpoint uses."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: Mapping[str, Shape | None],
        types: Mapping[str, str],
    ) -> None:
        self._architecture = checkpoint.architecture
        self._scheme = checkpoint.architecture.scheme
        passed_over = self._scheme.passed_over if self._scheme else ""
        self._left_out = "|".join(
            filter(None, (self._architecture.left_out, passed_over))
        )
        self._stored = stored
        self._types = types
        known = {*types.values()}
        self._formats = [
            form for form in FORMATS if not types or known.intersection(form.types)
        ]
        self._prefixes = tuple(
            dict.fromkeys((*PREFIXES, *self._architecture.base.split("|")))
        )
        self._wrong_types: dict[str, Sequence[str]] = {}
        self._by_core = {self._core_of_name(each): each for each in stored}

    def find_faults(self, origins: Origins) -> Iterator[str]:
        """Describe each fault, in words that follow the name of the model."""
        left_out = self._left_out
        pieces = [piece for each in origins.values() for piece in each.pieces]
        used = {name: piece.format for piece in pieces for name in piece.stored}
        for tensor, types in self._wrong_types.items():
            yield (
                f" stores {tensor!r} as {self._types[tensor]}, and its quantization_config asks "
                f"for {' or '.join(filter(None, types))}; config and weights do not belong "
                "together, or it is a type that does not run"
            )
        for tensor, dtype in self._types.items():
            is_read = dtype in FLOATS or used.get(tensor) is not None
            if not is_read and not is_ignored(tensor, left_out):
                reason = self._describe_unread_type(tensor, dtype)
                yield f" stores {tensor!r} as {dtype}: {reason}"
        for name, shape in (each for piece in pieces for each in piece.stored.items()):
            if (stored_shape := self._stored.get(name)) not in (None, shape):
                reason = (
                    "; it seems to be transposed" if stored_shape == shape[::-1] else ""
                )
                yield (
                    f": tensor {name!r} has shape {stored_shape}, and config.json asks for "
                    f"{shape}{reason}"
                )
        unread = [
            n for n in self._stored if n not in used and not is_ignored(n, left_out)
        ]
        missing = [name for name in used if name not in self._stored]
        head_pieces = origins["head.weight"].pieces if "head.weight" in origins else ()
        for name in missing:
            reason = "the checkpoint is incomplete, fetch it again"
            if unread:
                reason = (
                    f"it holds {unread[0]!r}, which a model of this config does not "
                    "have. Config and weights do not belong together, or names were "
                    "changed"
                )
            elif missing == [name for piece in head_pieces for name in piece.stored]:
                reason = (
                    "it was saved without its head. If the embedding is the head, set "
                    "tie_word_embeddings to true in config.json; else save the whole model"
                )
            yield f" lacks {len(missing)} of the model's tensors, such as {name!r}; {reason}"
        by_core = {self._core_of_name(each): each for each in used}
        for name in unread:
            if other := by_core.get(self._core_of_name(name)):
                yield (
                    f" holds a tensor twice, as {other!r} and as {name!r}; take one of "
                    "them away"
                )
        for name in unread:
            yield (
                f" holds a tensor {name!r} that a model of its config.json does not have "
                f"({len(unread)} such tensors); config and weights do not belong together"
            )

    def _describe_unread_type(self, tensor: str, dtype: str) -> str:
        """Describe why a stored type is not read, and what to do."""
        if dtype in BLOCKS:
            runs = [each for form in FORMATS for each in form.types if each in BLOCKS]
            why = f"these types run: {', '.join((*runs, *FLOATS))}"
            return f"{why}. Take a file of the same model with these alone"
        if tensor.rpartition(".")[2] in {form.name for form in OWN_FORMATS}:
            remedy = "Run it with the config.json that lies there, and no other"
            return f"fminfer quantize wrote it. {remedy}"
        if dtype in ("I64", "BOOL", "C64"):
            why = f"weights have one of {', '.join(FLOATS)}"
        elif self._scheme is None:
            why = "quantized weights run if a quantization_config says how"
        else:
            why = "quantization_config does not say that it is quantized so"
        return f"{why}. Take a checkpoint in 16 or 32 bits"

    def find_origin(self, name: str, spec: TensorSpec) -> Origin:
        """Find the stored pieces of a tensor."""
        sources = self._architecture.outer
        prefix = ""
        attention = None
        ours = name
        if name[0].isdigit():
            number, _, ours = name.partition(".")
            sources, prefix = self._architecture.find_layer_sources(int(number))
            attention = self._architecture.model.layers[int(number)].attention
        source = find_source(ours, sources)
        whole = [prefix + each for each in source.whole.split("|")]
        pieces: tuple[Piece, ...] = (
            self._find_piece(whole, spec.shape, source.layout),
        )
        if source.names and not (source.whole and self.has_piece(pieces[0])):
            name_pattern = f"{prefix}{{}}.{ours.rpartition('.')[2]}"
            pieces = tuple(self._find_pieces(source, name_pattern, spec, attention))
        return Origin(spec, pieces, source.layout, attention)

    def _find_pieces(
        self,
        source: Source,
        name_pattern: str,
        spec: TensorSpec,
        attention: Attention | None,
    ) -> Iterator[Piece]:
        is_joined = len(source.names) > 1
        is_stacked = "*" in source.names[0]
        if spec.use == "moved" and is_joined:
            assert attention is not None, "only a layer has a kv_up"
            yield from self._find_latent_pieces(source, name_pattern, attention)
            return
        item_shape = spec.shape[1:] if is_stacked else spec.shape
        sizes = (
            [each.total for each in spec.outputs]
            if is_joined
            else [sum(item_shape[:1])]
        )
        for item in range(spec.shape[0]) if is_stacked else (None,):
            first = 0
            for alternatives, size in zip(source.names, sizes, strict=True):
                item_part = (size, *item_shape[1:]) if item_shape else ()
                names = [
                    name_pattern.format(n)
                    for n in alternatives.replace("*", str(item)).split("|")
                ]
                names = [each.rpartition("/")[2] for each in names]  # what is whole
                yield self._find_piece(names, item_part, source.layout, item, first)
                first += size

    def _find_latent_pieces(
        self, source: Source, name_pattern: str, attention: Attention
    ) -> Iterator[Piece]:
        """Find a kv_up that is stored by heads: each head's keys, turned, then its values."""
        latent = attention.latent
        assert latent is not None, "there is a kv_up"
        keys_name, values_name = source.names
        halves = (
            (keys_name, latent.key_dim, True),
            (values_name, latent.value_dim, False),
        )
        first = 0
        for head, (name, size, is_turned) in product(range(attention.heads), halves):
            shape = (latent.rank, size) if is_turned else (size, latent.rank)
            stored_name = name_pattern.format(name.replace("*", str(head)))
            piece = self._find_piece([stored_name], shape, source.layout)
            yield replace(piece, first=first, last=first + size, is_turned=is_turned)
            first += size

    def _find_piece(
        self,
        names: Sequence[str],
        shape: Shape,
        layout: Layout,
        item: int | None = None,
        first: int = 0,
    ) -> Piece:
        """Return a matrix or vector under the first stored name, in any format."""
        extent = item, first, first + sum(shape[:1])
        for name in names if self._scheme and len(shape) > 1 else ():
            if published := self._find_published_piece(name, shape, extent):
                return published
        for form, name in product(self._formats, names if len(shape) > 1 else ()):
            parts = form.stored(name, shape, is_transposed=layout.is_transposed)
            if not self._types and [*parts] == [name]:
                continue  # without types, what has a plain name is plain
            shapes = {
                self._find_stored_name(part): shape_of_part
                for part, (_, shape_of_part) in parts.items()
            }
            types = zip(shapes, parts.values(), strict=True)
            if all(
                n in self._stored and (not self._types or self._types[n] in some)
                for n, (some, _) in types
            ):
                return Piece(shapes, form, *extent)
        return Piece(
            {self._find_stored_name(*names): layout.stored_shape(shape)}, None, *extent
        )

    def _find_published_piece(
        self, name: str, shape: Shape, extent: tuple[int | None, int, int]
    ) -> Piece | None:
        """Return a matrix that is stored as the config's scheme says; None: in plain floats."""
        assert self._scheme is not None, "a published quantized checkpoint"
        reader = self._scheme.find_reader(name.removesuffix(".weight"), shape)
        if reader is None:
            return None
        parts = {
            self._find_stored_name(*part.split("|")): of_part
            for part, of_part in reader.stored(name, shape, is_transposed=False).items()
        }
        needed = {
            part: of_part
            for part, of_part in parts.items()
            if part in self._stored or "" not in of_part[0]
        }
        plain_name = self._find_stored_name(name)
        # Without a file and an index it will be there. What has a plain name may be plain.
        is_there = not self._stored or any(
            part in self._stored
            and (part != plain_name or self._types.get(part) in types)
            for part, (types, _) in needed.items()
        )
        if not is_there:
            return None
        for part, (types, _) in needed.items():
            if self._types.get(part, types[0]) not in types:
                self._wrong_types[part] = types
        shapes = {
            part: self._fit_shape(part, types, part_shape)
            for part, (types, part_shape) in needed.items()
        }
        return Piece(shapes, reader, *extent)

    def _fit_shape(self, name: str, types: Sequence[str], shape: Shape) -> Shape:
        """Return the shape of a stored tensor; dimensions of 1 do not count for scales."""
        stored_shape = self._stored.get(name)
        if stored_shape is None or "F32" not in types:
            return shape
        sizes, asked_sizes = (
            [size for size in each if size > 1] for each in (stored_shape, shape)
        )
        return stored_shape if sizes == asked_sizes else shape

    def has_piece(self, piece: Piece) -> bool:
        return all(name in self._stored for name in piece.stored)

    def _find_stored_name(self, *names: str) -> str:
        """Return the first of these names that the checkpoint has, or else the first name."""
        for each in names:
            if each in self._stored:
                return each
            if stored := self._by_core.get(self._core_of_name(each)):
                return stored
        return names[0]

    def _core_of_name(self, name: str) -> str:
        """Return a name without what it may begin with, and with the usual end."""
        while prefix := next(filter(name.startswith, self._prefixes), ""):
            name = name.removeprefix(prefix)
        stem, dot, leaf = name.rpartition(".")
        return stem + _OLD_LEAVES.get(dot + leaf, dot + leaf)
