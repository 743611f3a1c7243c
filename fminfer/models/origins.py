"""Finds the stored tensors that each of ours is made of, by names and shapes.

A tensor that is missing, left over or misshapen is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fminfer.compute.quantized.forms import OWN_FORMS
from fminfer.compute.spec import Layer, Mlp, Moe
from fminfer.compute.weights import Shape, TensorSpec
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.families.tensor_names import AS_STORED, Layout, Source, source_of
from fminfer.models.formats import FORMATS, StoredFormat
from fminfer.models.sharding import WHOLE, ModelShare, TensorCut
from fminfer.models.stored.stored_tensors import BLOCKS, FLOATS
from fminfer.models.tensor_specs import TensorSpecs, entry_specs, exit_specs, layer_specs

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
    """What is stored of one of ours: rows `first` to `last` of it, of one item if stacked."""

    stored: Mapping[str, Shape]  # in the order of its format
    format: StoredFormat | None  # None: plain floats, one tensor
    item: int | None
    first: int  # row
    last: int
    is_turned: bool = False  # its floats are (inputs, outputs)


@dataclass(slots=True, frozen=True)
class Origin:
    """The stored tensors that one of ours is made of; without pieces it is drawn at random."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    layout: Layout
    cut: TensorCut = WHOLE  # the part that this rank holds

    @property
    def held(self) -> TensorSpec:
        """What this rank holds of it."""
        return self.cut.held(self.spec)

    @property
    def is_one_piece(self) -> bool:
        """Whether ours is one stored matrix or vector, and does not stack it."""
        return len(self.pieces) == 1 and self.pieces[0].item is None


Origins = dict[str, Origin]


@dataclass(slots=True, frozen=True)
class ModelOrigins:
    """Where all tensors of a model come from."""

    entry: Origins
    layers: tuple[Origins, ...]
    exit: Origins  # without the head's weight where the embedding is the head
    has_own_head: bool

    def by_name(self) -> Origins:
        """Return all of them; names of a layer's tensors begin with its number."""
        layers = enumerate(self.layers)
        inner = {f"{number}.{name}": o for number, own in layers for name, o in own.items()}
        return self.entry | inner | self.exit

    def cut(self, share: ModelShare | None) -> ModelOrigins:
        """Return the same with the parts that one rank holds; None: it holds all."""
        cuts = {} if share is None else share.cuts()

        def cut(origins: Origins, top: str = "") -> Origins:
            return {n: replace(each, cut=cuts.get(top + n, WHOLE)) for n, each in origins.items()}

        layers = tuple(cut(own, f"{number}.") for number, own in enumerate(self.layers))
        return replace(self, entry=cut(self.entry), layers=layers, exit=cut(self.exit))


def is_left_out(name: str, others: str) -> bool:
    """Tell whether nothing reads a stored tensor.

    Args:
        others: a pattern of names, as in `Architecture.left_out`, beside those of old releases.
    """
    return bool(_LEFT_OVER.search(f".{name}") or (others and re.match(others, name)))


def find_origins(
    checkpoint: Checkpoint,
    stored: Mapping[str, Shape | None],
    types: Mapping[str, str] | None = None,
) -> ModelOrigins:
    """Find every tensor of the model among the stored ones.

    A model that stores no head uses the embedding as its head, if its config says so.

    Args:
        stored: the shape of each tensor of the checkpoint; None: it is not known.
        types: of the stored tensors; None: they are not known.

    Raises:
        CheckpointError: tensors are missing, of another shape or type, or not part of the model.
    """
    model, search = checkpoint.model, _Search(checkpoint, stored, types or {})
    layers = tuple(search.find_layer(layer, number) for number, layer in enumerate(model.layers))
    outside, has_own_head = exit_specs(model), True
    if checkpoint.config.tie_word_embeddings and not model.is_pooled:
        has_own_head = search.has_head(outside["head.weight"].shape)
        if not has_own_head:
            del outside["head.weight"]
    entry, outer = search.find_outside(entry_specs(model)), search.find_outside(outside)
    search.refuse_what_is_wrong()
    return ModelOrigins(entry, layers, outer, has_own_head)


def drawn_origins(checkpoint: Checkpoint) -> ModelOrigins:
    """Return the tensors of a model that is stored nowhere."""
    model, is_tied = checkpoint.model, checkpoint.config.tie_word_embeddings

    def drawn(specs: TensorSpecs) -> Origins:
        return {name: Origin(spec, (), AS_STORED) for name, spec in specs.items()}

    layers = tuple(drawn(layer_specs(layer, model.hidden_size)) for layer in model.layers)
    outside, has_own_head = exit_specs(model), model.is_pooled or not is_tied
    if not has_own_head:
        del outside["head.weight"]
    return ModelOrigins(drawn(entry_specs(model)), layers, drawn(outside), has_own_head)


class _Search:
    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: Mapping[str, Shape | None],
        types: Mapping[str, str],
    ) -> None:
        self._name, self._architecture = checkpoint.name, checkpoint.architecture
        self._stored, self._types = stored, types
        known = {*types.values()}
        self._forms = [form for form in FORMATS if not types or known.intersection(form.types)]
        self._prefixes = tuple(dict.fromkeys((*PREFIXES, *self._architecture.base.split("|"))))
        self._by_core = {self._core(each): each for each in stored}
        self._used: dict[str, StoredFormat | None] = {}
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def find_layer(self, layer: Layer, number: int) -> Origins:
        specs = layer_specs(layer, self._architecture.model.hidden_size)
        return self._find(specs, *self._architecture.of_layer(number), layer)

    def find_outside(self, specs: TensorSpecs) -> Origins:
        return self._find(specs, self._architecture.outer, "", None)

    def has_head(self, shape: Shape) -> bool:
        """Tell whether the checkpoint has a weight of the head."""
        source = self._architecture.outer["head"]
        names = [f"{name}.weight" for name in source.names[0].split("|")]
        return self._has(self._piece(names, shape, source.layout))

    def refuse_what_is_wrong(self) -> None:
        left_out = self._architecture.left_out
        for tensor, dtype in self._types.items():
            is_read = dtype in FLOATS or self._used.get(tensor) is not None
            if not is_read and not is_left_out(tensor, left_out):
                remedy = "Take a checkpoint in 16 or 32 bits"
                if dtype in BLOCKS:
                    runs = [each for form in FORMATS for each in form.types if each in BLOCKS]
                    why = f"these types run: {', '.join((*runs, *FLOATS))}"
                    remedy = "Take a file of the same model with these alone"
                elif tensor.rpartition(".")[2] in {form.name for form in OWN_FORMS}:
                    why = "fminfer quantize wrote it"
                    remedy = "Run it with the config.json that lies there, and no other"
                elif dtype in ("I64", "BOOL", "C64"):
                    why = "weights have one of " + ", ".join(FLOATS)
                else:
                    why = "quantized weights do not run yet"
                raise CheckpointError(f"{self._name} stores {tensor!r} as {dtype}: {why}. {remedy}")
        for wrong in self._misshapen[:1]:
            raise CheckpointError(f"{self._name}: {wrong}")
        left = [n for n in self._stored if n not in self._used and not is_left_out(n, left_out)]
        for name in self._missing[:1]:
            why = "the checkpoint is incomplete, fetch it again"
            if left:
                why = (
                    f"it holds {left[0]!r}, which a model of this config does not have. Config and "
                    "weights do not belong together, or names were changed"
                )
            raise CheckpointError(
                f"{self._name} lacks {len(self._missing)} of the model's tensors, such as "
                f"{name!r}; {why}"
            )
        used = {self._core(each): each for each in self._used}
        for name in left:
            if other := used.get(self._core(name)):
                raise CheckpointError(
                    f"{self._name} holds a tensor twice, as {other!r} and as {name!r}; take one "
                    "of them away"
                )
        for name in left[:1]:
            raise CheckpointError(
                f"{self._name} holds a tensor {name!r} that a model of its config.json does not "
                f"have ({len(left)} such tensors); config and weights do not belong together"
            )

    def _find(
        self, specs: TensorSpecs, where: Mapping[str, Source], prefix: str, layer: Layer | None
    ) -> Origins:
        origins: Origins = {}
        for ours, spec in specs.items():
            shape = spec.shape
            module, _, leaf = ours.rpartition(".")
            source = source_of(ours, where)
            whole = [prefix + each for each in source.whole.split("|")]
            pieces: tuple[Piece, ...] = (self._piece(whole, shape, source.layout),)
            if source.names and not (source.whole and self._has(pieces[0])):
                form = f"{prefix}{{}}.{leaf}"
                pieces = tuple(self._pieces(source, form, shape, module, layer))
            for piece in pieces:
                self._take(piece)
            origins[ours] = Origin(spec, pieces, source.layout)
        return origins

    def _pieces(
        self, source: Source, form: str, shape: Shape, module: str, layer: Layer | None
    ) -> Iterator[Piece]:
        if module == "kv_up" and len(source.names) == 2:
            assert layer is not None, "a latent is of a layer"
            yield from self._pieces_by_head(source, form, layer)
            return
        is_stacked = "*" in source.names[0]
        of_item = shape[1:] if is_stacked else shape
        sizes = _part_sizes(module, layer, len(source.names), sum(of_item[:1]))
        for item in range(shape[0]) if is_stacked else (None,):
            first = 0
            for theirs, size in zip(source.names, sizes, strict=True):
                part = (size, *of_item[1:]) if of_item else ()
                names = [form.format(n) for n in theirs.replace("*", str(item)).split("|")]
                names = [each.rpartition("/")[2] for each in names]  # what is whole
                yield self._piece(names, part, source.layout, item, first)
                first += size

    def _pieces_by_head(self, source: Source, form: str, layer: Layer) -> Iterator[Piece]:
        """Give each head's rows for its keys, which are stored turned, and for its values."""
        latent, first = layer.attention.latent, 0
        assert latent is not None, "there is a kv_up"
        sizes = zip(source.names, (latent.key_dim, latent.value_dim), (True, False), strict=True)
        for head, (name, size, is_turned) in product(range(layer.attention.heads), [*sizes]):
            shape = (latent.rank, size) if is_turned else (size, latent.rank)
            piece = self._piece([form.format(name.replace("*", str(head)))], shape, source.layout)
            yield replace(piece, first=first, last=first + size, is_turned=is_turned)
            first += size

    def _piece(
        self,
        names: Sequence[str],
        shape: Shape,
        layout: Layout,
        item: int | None = None,
        first: int = 0,
    ) -> Piece:
        """Return a matrix or vector under the first of its names that is stored, in any format."""
        place = item, first, first + sum(shape[:1])
        for form, name in product(self._forms, names if len(shape) > 1 else ()):
            parts = form.stored(name, shape, is_transposed=layout.is_transposed)
            if not self._types and [*parts] == [name]:
                continue  # without types, what has a plain name is plain
            found = {self._resolve(part): each for part, (_, each) in parts.items()}
            types = zip(found, parts.values(), strict=True)
            if all(n in self._stored and self._types.get(n, t) == t for n, (t, _) in types):
                return Piece(found, form, *place)
        return Piece({self._resolve(*names): layout.stored_shape(shape)}, None, *place)

    def _has(self, piece: Piece) -> bool:
        return all(name in self._stored for name in piece.stored)

    def _resolve(self, *names: str) -> str:
        """Return the first of these names that the checkpoint has, or else the first name."""
        for each in names:
            if each in self._stored:
                return each
            if stored := self._by_core.get(self._core(each)):
                return stored
        return names[0]

    def _core(self, name: str) -> str:
        """Return a name without what it may begin with, and with the usual end."""
        while prefix := next(filter(name.startswith, self._prefixes), ""):
            name = name.removeprefix(prefix)
        stem, dot, leaf = name.rpartition(".")
        return stem + _OLD_LEAVES.get(dot + leaf, dot + leaf)

    def _take(self, piece: Piece) -> None:
        for name, shape in piece.stored.items():
            found = self._stored.get(name)
            self._used[name] = piece.format
            if name not in self._stored:
                self._missing.append(name)
            elif found is not None and found != shape:
                self._misshapen.append(
                    f"tensor {name!r} has shape {found}, and config.json asks for {shape}"
                    + "; it seems to be transposed" * (found == shape[::-1])
                )


def _part_sizes(module: str, layer: Layer | None, num: int, rows: int) -> tuple[int, ...]:
    """Return how many rows of one of our tensors each stored one has."""
    if num == 1:
        return (rows,)
    assert layer is not None, "what is outside layers is not joined"
    if module == "qkv":
        return layer.attention.qkv_sizes
    if module == "cross_kv":
        assert layer.cross is not None, "keys and values of what the encoder gave"
        return layer.cross.attention.qkv_sizes[1:]
    assert num == 2, "gate and up"
    mlp: Mlp | Moe | None = layer.mlp
    if isinstance(mlp, Moe):
        mlp = mlp.shared if module == "shared.up" else mlp.expert
    assert isinstance(mlp, Mlp), "an expert"
    return (mlp.size, mlp.size)
