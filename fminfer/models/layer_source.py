"""Where the weights of one stage come from: the model's files, or chance."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from fminfer.compute.quantized.block_format import Blocks, Joined
from fminfer.compute.spec import Attention
from fminfer.compute.weights import Dense, Format, Tensors, Weight
from fminfer.core.partition import Part
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.families.tensor_names import AS_STORED
from fminfer.models.formats import Holding
from fminfer.models.origins import (
    ModelOrigins,
    Origin,
    Origins,
    Piece,
    drawn_origins,
    find_origins,
)
from fminfer.models.sharding import WHOLE, ModelShare, outputs_dim
from fminfer.models.stored.direct_reads import Lent, Span, merge
from fminfer.models.stored.tensor_table import TensorFiles, Waiting, reading_ahead
from fminfer.models.tensor_specs import Weights
from fminfer.models.weight_headers import open_files, stored_parts

OnProgress = Callable[[int, int], None]
MOST_BETWEEN = 64  # rows of other ranks that are read with those around them


class LayerSource:
    """Gives the weights of one stage, whenever they are asked for and as often. It keeps none.

    Args:
        origins: of the whole model.
        maker: makes the tensors of weights, in the formats and on the device that it says.
        on_progress: called with (bytes made, bytes in all) after each weight that stays.
        streamed: numbers of the streamed layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: Part,
        origins: ModelOrigins,
        maker: Reader | Drawer,
        on_progress: OnProgress = lambda done, total: None,
        streamed: Collection[int] = (),
    ) -> None:
        self._origins, self._maker, self._part = origins, maker, part
        self.dtype = maker.holding.dtype  # of the arithmetic
        self.device, self.files = maker.device, maker.files
        self._on_progress, self.numbers = on_progress, part.numbers
        self.streamed = [number for number in part.numbers if number in streamed]
        self.resident = [number for number in part.numbers if number not in streamed]
        self.is_first, self.is_last = part.is_first, part.is_last
        self._attention = [layer.attention for layer in checkpoint.model.layers]
        self._is_tied = bool(checkpoint.config.tie_word_embeddings)
        self._of_embed = {"embed.weight": origins.entry["embed.weight"]}
        groups = [*(origins.layers[n] for n in part.numbers), *[origins.exit] * part.is_last]
        has_embed = part.is_last and not origins.has_own_head
        groups += [origins.entry] if part.is_first else [self._of_embed] * has_embed
        each = (origin for group in groups for origin in group.values())
        # What all weights take; one that has two names counts once.
        self.num_bytes = sum(map(self._size, each))
        self._done, self._total = 0, self.num_bytes
        for number in self.streamed:
            self._total -= sum(map(self._size, origins.layers[number].values()))

    def layer(self, number: int, lent: Lent | None = None) -> Weights:
        """Return the weights of a layer, by its number in the model.

        Args:
            lent: its stored bytes, in which weights may stay; None: they are read.
        """
        where, origins = f"layer {number} ", self._origins.layers[number]
        attention = self._attention[number]
        if lent is None:
            return self._make(origins, where, attention)
        assert self.files is not None, "a model in files"
        with self.files.lend(lent):
            make = self._maker.make
            return {name: make(where + name, one, attention) for name, one in origins.items()}

    def spans(self, number: int) -> tuple[list[Span], list[Span]]:
        """Return where a layer's tensors are in files, and the parts that this rank needs."""
        reader, attention = self._maker, self._attention[number]
        assert isinstance(reader, Reader), "a model in files"
        origins = self._origins.layers[number].values()
        needed = merge(span for each in origins for span in reader.spans(each, attention))
        uncut = (replace(each, cut=WHOLE) for each in origins)
        return merge(span for each in uncut for span in reader.spans(each, attention)), needed

    def _size(self, origin: Origin) -> int:
        return self._maker.format_of(origin).num_bytes(origin.held.shape)

    def layers(self) -> Iterator[Weights]:
        """Give those of each layer that stays; read the next ones' meanwhile, then exit's."""
        waiting, reader = [], self._maker
        if isinstance(reader, Reader):
            own = [(self._origins.layers[n], self._attention[n]) for n in self.resident]
            groups = [*own, *[(self._origins.exit, None)] * self._part.is_last]
            waiting = [[w for one in g.values() for w in reader.waiting(one, a)] for g, a in groups]
        with reading_ahead(waiting) as next_group:
            for number in self.resident:
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
        own = found.get("head.weight")
        if not self._origins.has_own_head:
            found["head.weight"] = embed or self._make(self._of_embed)["embed.weight"]
        elif self._is_tied and embed and own and embed.equals(own):
            found["head.weight"] = embed  # stored twice: kept once
            self.num_bytes -= embed.num_bytes
        return found

    def leave_products(self, number: int) -> None:
        """Leave memory of the files of a layer's products to others, once they are packed.

        Args:
            number: of the layer, in the model.
        """
        self._leave(o for o in self._origins.layers[number].values() if o.spec.use == "product")

    def leave_head(self, *, is_embedding: bool) -> None:
        """Leave memory of the head's files to others, once it is packed.

        Args:
            is_embedding: the embedding is the same weight; otherwise it stays where it lies.
        """
        own = self._origins.exit.get("head.weight")
        if own is not None:
            self._leave([own])
        if own is None or is_embedding:
            self._leave(self._of_embed.values())

    def _leave(self, origins: Iterable[Origin]) -> None:
        for piece in (piece for origin in origins for piece in origin.pieces):
            for name in piece.stored:
                assert self.files is not None, "what is stored"
                self.files.drop(name)

    def _make(
        self, origins: Origins, where: str = "", attention: Attention | None = None
    ) -> Weights:
        found: Weights = {}
        for name, origin in origins.items():
            found[name] = self._maker.make(where + name, origin, attention)
            self._done += found[name].num_bytes
            self._on_progress(min(self._done, self._total), self._total)
        return found


def open_weights(
    checkpoint: Checkpoint,
    part: Part,
    *,
    holding: Holding,
    device: torch.device,
    seed: int,
    share: ModelShare | None = None,
    on_progress: OnProgress = lambda done, total: None,
    streamed: Collection[int] = (),
    keeps_parts: bool = False,
) -> LayerSource:
    """Return where one stage's weights come from; none is read yet.

    Args:
        holding: says in which format each is held.
        seed: for random weights. They do not depend on how the model is split.
        share: what this rank holds of each tensor; None: all.
        on_progress: called with (bytes read, bytes in all) after each weight that stays.
        streamed: numbers of the streamed layers; none without files.
        keeps_parts: products take weights of several parts.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    if checkpoint.folder is not None:
        files = open_files(checkpoint, checkpoint.folder)
        origins = find_origins(checkpoint, files.shapes, files.types).cut(share)
        reader = Reader(files, device, holding, keeps_parts)
        return LayerSource(checkpoint, part, origins, reader, on_progress, streamed)
    origins = drawn_origins(checkpoint).cut(share)
    spread = float(getattr(checkpoint.config, "initializer_range", 0.02))
    model = checkpoint.model
    norm = model.final_norm or (model.encoder and model.encoder.final_norm)
    drawer = Drawer(seed, spread, 1.0 - (norm.offset if norm else 0.0), device, holding)
    return LayerSource(checkpoint, part, origins, drawer)


@dataclass(slots=True, frozen=True)
class Reader:
    """Reads from one checkpoint's files."""

    files: TensorFiles
    device: torch.device
    holding: Holding
    keeps_parts: bool = False

    def format_of(self, origin: Origin) -> Format:
        """Return the format in which a weight is held."""
        held = self.holding.of(origin.spec, stored_parts(origin, self.files.types))
        return origin.cut.format(held)

    def make(self, name: str, origin: Origin, attention: Attention | None) -> Weight:
        """Return a weight. The name has the number of its layer, if it is of one."""
        held, is_lent = self.format_of(origin), self.files.lent is not None
        if is_lent and self._stays_in_parts(origin, held):
            parts = tuple((held, piece.last - piece.first) for piece in origin.pieces)
            tensors = tuple(self.files.read(*piece.stored) for piece in origin.pieces)
            return Weight(origin.held, Joined(parts), tensors, is_lent)
        return Weight(origin.held, held, self._tensors(origin, held, attention), is_lent)

    def _stays_in_parts(self, origin: Origin, held: Format) -> bool:
        """Tell whether a product's weight is one or more matrices, held as they are stored."""
        is_as_stored = origin.layout == AS_STORED and origin.cut == WHOLE
        stored = stored_parts(origin, self.files.types)
        return (
            (self.keeps_parts and is_as_stored and isinstance(held, Dense))
            and (origin.spec.use == "product" and len(origin.spec.shape) == 2)
            and all(form == held for form, _ in stored)
            and all(p.format is None and self.files.is_in_place(*p.stored) for p in origin.pieces)
        )

    def _tensors(self, origin: Origin, held: Format, attention: Attention | None) -> Tensors:
        in_place, layout = self._in_place(origin), origin.layout
        if origin.cut.is_zero:
            return tuple(t.zero_() for t in held.empty(origin.held.shape, self.device))
        if in_place is None:
            tensors = self._join(origin, held, _order(origin, attention))
        else:
            tensors = (layout.turned(self.files.read(in_place)),)
        start = tensors[0].data_ptr()
        if layout.added:
            tensors = (tensors[0] + layout.added,)
        if isinstance(held, Dense):
            tensors = (tensors[0].to(self.device, held.dtype),)  # itself, where it is so
        tensors = tuple(tensor.to(self.device).contiguous() for tensor in tensors)
        if in_place is not None and tensors[0].data_ptr() != start:
            self.files.drop(in_place)
        return tensors

    def waiting(self, origin: Origin, attention: Attention | None) -> Iterator[Waiting]:
        """Give the parts of files that a weight is made of, to be read."""
        name, is_here = self._in_place(origin), self.device.type == "cpu"
        held, stored = self.format_of(origin), stored_parts(origin, self.files.types)
        stays = (  # as it is stored, where it lies
            (name is not None and is_here and origin.layout == AS_STORED) and held == stored[0][0]
        )
        for span in self.spans(origin, attention):
            yield self.files.waiting(span, is_used_there=stays)

    def spans(self, origin: Origin, attention: Attention | None) -> Iterator[Span]:
        """Give the same parts as spans."""
        order = _order(origin, attention)
        for piece in origin.pieces:
            is_stacked = piece.item is None and outputs_dim(origin.spec) > 0
            is_other = piece.is_turned or origin.layout.is_transposed or origin.layout.is_row
            if (place := _place_of(piece, origin, order)) is None:
                continue
            of_rows: list[tuple[int, int] | None] = [None]
            if place[1] is not None and not (is_stacked or is_other):
                of_rows = [*_spans_of(place[1])]
            for name in piece.stored:
                for rows in of_rows:
                    yield from self.files.spans(name, rows)

    def _in_place(self, origin: Origin) -> str | None:
        """Return the stored tensor that can be used where it lies; None: it is copied first."""
        (name, *others), form = origin.pieces[0].stored, origin.pieces[0].format
        held = self.format_of(origin)
        is_so = isinstance(held, Dense) if form is None else form == held
        is_one = is_so and not others and origin.is_one_piece
        is_as_it_is = is_one and origin.layout.change is None and origin.cut == WHOLE
        return name if is_as_it_is and self.files.is_in_place(name) else None

    def _join(self, origin: Origin, held: Format, order: torch.Tensor | None) -> Tensors:
        """Copy what is stored of a tensor; dequantize or quantize what is not held so.

        Args:
            order: the number of the stored row of each row held; None: all rows, as stored.
        """
        wholes, columns = held.empty(origin.held.shape, self.device), origin.cut.columns
        item: int | None = None
        at = 0  # the next row to be written
        for piece in origin.pieces:
            if (place := _place_of(piece, origin, order)) is None:
                continue  # it is other ranks'
            at = at if place[0] == item else 0
            item, rows = place
            num = piece.last - piece.first if rows is None else len(rows)
            form, targets, start = _part_at(at, held, wholes)
            parts = [whole if item is None else whole[item] for whole in targets]
            if not origin.is_one_piece:
                parts = [part[at - start : at - start + num] for part in parts]
            at += num
            is_whole = rows is None and columns is None and not piece.is_turned
            is_plain = piece.format is None and isinstance(form, Dense)
            if is_plain and is_whole and not (origin.layout.is_transposed or origin.layout.is_row):
                self.files.copy(next(iter(piece.stored)), parts[0])
                continue
            values = self._values(piece, origin, form, rows)
            new = form if isinstance(form, Blocks) and form != piece.format else None
            if new is not None and columns is None:
                new.quantize(values[0], parts[0])
            else:
                if new is not None:  # of whole rows, for a row may be one block
                    values = (new.quantize(values[0]),)
                for part, value in zip(parts, values, strict=True):
                    part.copy_(_cut_columns(value, form, columns))
            for name in piece.stored:
                self.files.drop(name)
        return wholes

    def _values(
        self, piece: Piece, origin: Origin, form: Format, rows: torch.Tensor | None
    ) -> Tensors:
        """Return some rows of a piece in its own format, or as floats if it is held in another."""
        stored, layout = tuple(map(self.files.read, piece.stored)), origin.layout
        values: Tensors = (layout.turned(stored[0]),)
        if piece.format is not None:
            values = piece.format.read(stored, is_transposed=layout.is_transposed)
        dim = outputs_dim(origin.spec) - (piece.item is not None)
        if rows is not None and not piece.is_turned:
            values = tuple(value.index_select(dim, rows) for value in values)
        if piece.format is not None and form != piece.format:
            dtype = form.dtype if isinstance(form, Dense) else torch.float32
            values = (piece.format.dequantize(values, dtype),)
        if piece.is_turned:
            assert isinstance(form, Dense), "blocks cannot be turned"
            values = (values[0].mT if rows is None else values[0].mT[rows],)
        return values


def _order(origin: Origin, attention: Attention | None) -> torch.Tensor | None:
    """Return the number of the stored row of each row held; None: all rows, as stored."""
    change, rows = origin.layout.change, origin.cut.rows
    if change is None and rows is None:
        return None
    dim = outputs_dim(origin.spec)
    order = torch.arange(origin.spec.shape[dim])
    if change is not None:  # queries, keys and values stay among themselves
        assert attention is not None, "only a layer's tensors are laid out otherwise"
        order = change(order[None] if dim else order, attention).flatten()
    return order if rows is None else torch.cat([order[r.start : r.stop] for r in rows])


def _place_of(
    piece: Piece, origin: Origin, order: torch.Tensor | None
) -> tuple[int | None, torch.Tensor | None] | None:
    """Return where a piece goes: to which item held, with which of its rows (None: all).

    None: this rank holds none of it.
    """
    if order is None or origin.is_one_piece:
        return piece.item, order
    if piece.item is not None and outputs_dim(origin.spec) == 0:  # of a head
        places = (order == piece.item).nonzero()
        return (int(places[0]), None) if len(places) else None
    rows = order[(order >= piece.first) & (order < piece.last)] - piece.first
    return (piece.item, rows) if len(rows) else None


def _spans_of(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Give (first, end) spans that cover the rows; gaps of up to MOST_BETWEEN are read, too."""
    rows = rows.sort().values
    ends = (rows.diff() > MOST_BETWEEN).nonzero()[:, 0] + 1
    for part in torch.tensor_split(rows, ends):
        yield int(part[0]), int(part[-1]) + 1


def _cut_columns(values: torch.Tensor, held: Format, columns: range | None) -> torch.Tensor:
    if columns is None:
        return values
    if isinstance(held, Blocks):
        return held.cut(values, columns)
    return values[..., columns.start : columns.stop]


def _part_at(row: int, held: Format, tensors: Tensors) -> tuple[Format, Tensors, int]:
    """Return the part of a weight that holds a row: its format, its tensors, its first row."""
    if not isinstance(held, Joined):
        return held, tensors, 0
    starts = held.starts()
    number = bisect_right(starts, row) - 1
    return held.parts[number][0], (tensors[number],), starts[number]


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
    holding: Holding
    files: None = None

    def format_of(self, origin: Origin) -> Format:
        return self.holding.of(origin.spec, ())  # of one format, however it is cut

    def make(self, name: str, origin: Origin, attention: Attention | None) -> Weight:
        held = self.format_of(origin)
        return Weight(origin.held, held, self._drawn(name, origin, held))

    def _drawn(self, name: str, origin: Origin, held: Format) -> Tensors:
        """Draw one. Norms multiply by 1, biases are 0, the rest is normal."""
        floats = held if isinstance(held, Dense) else Dense(self.holding.dtype)
        if origin.spec.use in ("bias", "norm_bias", "choice", "norm"):
            value = self.of_norms if origin.spec.use == "norm" else 0.0
            return (floats.empty(origin.held.shape, self.device)[0].fill_(value),)
        (tensor,) = floats.empty(origin.spec.shape, self.device)
        key = f"{self.seed} {name}"
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(key.encode()))
        tensor.normal_(0, self.spread, generator=generator)
        if (order := _order(origin, None)) is not None:
            tensor = tensor.index_select(outputs_dim(origin.spec), order.to(self.device))
        if isinstance(held, Blocks):
            tensor = held.quantize(tensor)
        return (_cut_columns(tensor, held, origin.cut.columns).contiguous(),)
