"""Where the weights of one stage come from: the model's files, or chance."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.formats.joined import Joined
from fminfer.compute.values.weights import Format, Tensors, Weight
from fminfer.core.partition import Part
from fminfer.models.arrivals import Arrival, choose_arrival
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.holding import Holding
from fminfer.models.origins import (
    Origin,
    Origins,
    Piece,
    StoredModel,
    cut_origins,
    make_drawn_origins,
    read_stored_model,
)
from fminfer.models.sharding import WHOLE, ModelShard, outputs_dim
from fminfer.models.stored.direct_reads import LentBuffer, Span, merge_spans
from fminfer.models.stored.tensor_table import PartToRead, TensorFiles, reading_ahead
from fminfer.models.tensor_specs import Weights, entry_specs, exit_specs, layer_specs

OnProgress = Callable[[int, int], None]
MOST_BETWEEN = 64  # rows of other ranks that are read with those around them


class LayerSource:
    """Loads the weights of one stage, as often as they are asked for. It holds none.

    `origins` are of the whole model. `on_progress` is called with (bytes made, bytes in all).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: Part,
        origins: Origins,
        maker: WeightReader | WeightDrawer,
        on_progress: OnProgress = lambda done, total: None,
        streamed: Collection[int] = (),
    ) -> None:
        self._maker = maker
        self.dtype = maker.holding.dtype
        self.device = maker.device
        self.files = maker.files
        self._on_progress = on_progress
        self.numbers = part.layer_numbers
        self.streamed = [number for number in part.layer_numbers if number in streamed]
        self.resident = [
            number for number in part.layer_numbers if number not in streamed
        ]
        self.is_first = part.is_first
        self.is_last = part.is_last
        model = checkpoint.model

        def origins_of(specs: Collection[str], top: str = "") -> Origins:
            return {
                name: origins[top + name] for name in specs if top + name in origins
            }

        self._layers = {
            n: origins_of(layer_specs(model.layers[n], model.hidden_size), f"{n}.")
            for n in part.layer_numbers
        }
        self._entry = origins_of(entry_specs(model) if part.is_first else {})
        self._exit = origins_of(exit_specs(model) if part.is_last else {})
        self._embed = {"embed.weight": origins["embed.weight"]}
        has_head = part.is_last and not model.is_pooled
        self._shares_embed = has_head and "head.weight" not in origins
        self._is_tied = bool(checkpoint.config.tie_word_embeddings)
        groups = [
            *self._layers.values(),
            self._exit,
            self._entry or (self._embed if self._shares_embed else {}),
        ]
        # What all weights take; one that has two names counts once.
        self.num_bytes = sum(map(self._count_bytes, groups))
        self._done = 0
        self._total = self.num_bytes - sum(
            self._count_bytes(self._layers[n]) for n in self.streamed
        )

    def load_layer(self, number: int, lent: LentBuffer | None = None) -> Weights:
        """Return the weights of a layer by its number; they may stay in bytes that are lent."""
        where = f"layer {number} "
        origins = self._layers[number]
        if lent is None:
            return self._load_weights(origins, where)
        assert self.files is not None, "a model in files"
        with self.files.reading_from(lent):
            return {
                name: self._maker.make_weight(where + name, one)
                for name, one in origins.items()
            }

    def find_spans(self, number: int) -> tuple[list[Span], list[Span]]:
        """Return the spans of a layer's tensors in files, and those that this rank needs."""
        reader = self._maker
        origins = self._layers[number].values()
        assert isinstance(reader, WeightReader), "a model in files"
        needed = merge_spans(
            span for each in origins for span in reader.find_spans(each)
        )
        uncut = (replace(each, cut=WHOLE) for each in origins)
        return merge_spans(
            span for each in uncut for span in reader.find_spans(each)
        ), needed

    def load_layers(self) -> Iterator[Weights]:
        """Yield the weights of each resident layer; read the next layer's ahead, then exit's."""
        groups = [*(self._layers[n] for n in self.resident), self._exit]
        waiting = [
            [w for one in g.values() for w in self._maker.list_parts_to_read(one)]
            for g in groups
        ]
        with reading_ahead(waiting) as next_group:
            for number in self.resident:
                yield self.load_layer(number)
                next_group()

    def load_entry(self) -> Weights:
        """Return the weights before the first layer; none but on the first stage."""
        weights = self._load_weights(self._entry)
        table = weights.get("encoder.embed.weight")
        if self._is_tied and table and weights["embed.weight"].equals(table):
            del weights["encoder.embed.weight"]  # it is stored twice, and held once
            self.num_bytes -= table.num_bytes
        return weights

    def load_exit(self, entry: Weights) -> Weights:
        """Return the weights after the last layer. A tied head is `entry`'s embedding."""
        weights = self._load_weights(self._exit)
        embed = entry.get("embed.weight")
        head = weights.get("head.weight")
        if self._shares_embed:
            weights["head.weight"] = (
                embed or self._load_weights(self._embed)["embed.weight"]
            )
        elif self._is_tied and embed and head and embed.equals(head):
            weights["head.weight"] = embed  # it is stored twice, and held once
            self.num_bytes -= embed.num_bytes
        return weights

    def free_product_pages(self, number: int) -> None:
        """Free the pages of a layer's stored products, once they are packed."""
        self._free_pages(
            o for o in self._layers[number].values() if o.spec.use == "product"
        )

    def free_head_pages(self, *, is_embedding: bool) -> None:
        """Free the pages of the stored head, once it is packed.

        `is_embedding`: the head is the embedding, and both are packed.
        """
        if not self._shares_embed:
            self._free_pages([self._exit["head.weight"]])
        if self._shares_embed or is_embedding:
            self._free_pages(self._embed.values())

    def _free_pages(self, origins: Iterable[Origin]) -> None:
        for name in (
            name for each in origins for piece in each.pieces for name in piece.stored
        ):
            assert self.files is not None, "what is stored"
            self.files.free_pages(name)

    def _count_bytes(self, origins: Origins) -> int:
        return sum(
            self._held_format(each).num_bytes(each.held_spec.shape)
            for each in origins.values()
        )

    def _held_format(self, origin: Origin) -> Format:
        return self._maker.holding.choose_held_format(
            self._maker.choose_format(origin), origin.spec
        )

    def _load_weights(self, origins: Origins, where: str = "") -> Weights:
        weights: Weights = {}
        for name, origin in origins.items():
            weight = self._maker.make_weight(where + name, origin)
            held = self._held_format(origin)
            weights[name] = weight if held == weight.format else weight.to_floats(held)
            self._done += weights[name].num_bytes
            self._on_progress(min(self._done, self._total), self._total)
        return weights


def open_weights(
    checkpoint: Checkpoint,
    part: Part,
    *,
    holding: Holding,
    device: torch.device,
    seed: int,
    share: ModelShard | None = None,
    on_progress: OnProgress = lambda done, total: None,
    streamed: Collection[int] = (),
    keeps_parts: bool = False,
) -> LayerSource:
    """Return the source of one stage's weights; none is read yet.

    Args:
        seed: for random weights. They do not depend on how the model is split.
        keeps_parts: products take weights of several parts.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    if checkpoint.folder is not None:
        stored = read_stored_model(checkpoint, checkpoint.folder)
        origins = cut_origins(stored.origins, share)
        reader = WeightReader(stored, device, holding, keeps_parts)
        return LayerSource(checkpoint, part, origins, reader, on_progress, streamed)
    origins = cut_origins(make_drawn_origins(checkpoint), share)
    spread = float(getattr(checkpoint.config, "initializer_range", 0.02))
    model = checkpoint.model
    norm = model.final_norm or (model.encoder and model.encoder.final_norm)
    drawer = WeightDrawer(
        seed, spread, 1.0 - (norm.offset if norm else 0.0), device, holding
    )
    return LayerSource(checkpoint, part, origins, drawer)


@dataclass(slots=True, frozen=True)
class WeightReader:
    """Makes weights from one checkpoint's files."""

    stored: StoredModel
    device: torch.device
    holding: Holding
    keeps_parts: bool = False

    @property
    def files(self) -> TensorFiles:
        """The files that hold the tensors."""
        assert self.stored.files is not None, "a model in files"
        return self.stored.files

    def choose_format(self, origin: Origin) -> Format:
        """Return the format in which a weight is held."""
        stored = origin.stored_formats(self.files.types)
        made = self.holding.choose_format(origin.spec, stored)
        return self.holding.choose_cut_format(made, origin.spec, origin.cut)

    def make_weight(self, name: str, origin: Origin) -> Weight:
        """Return a weight. The name has the number of its layer, if it is of one."""
        held = self.choose_format(origin)
        is_lent = self.files.lent is not None
        arrival = choose_arrival(origin, held, self.stored)
        if is_lent and self.keeps_parts and arrival == "apart":
            parts = tuple((held, piece.last - piece.first) for piece in origin.pieces)
            tensors = tuple(self.files.read(*piece.stored) for piece in origin.pieces)
            return Weight(origin.held_spec, Joined(parts), tensors, is_lent)
        tensors = self._make_tensors(origin, held, arrival)
        return Weight(origin.held_spec, held, tensors, is_lent)

    def list_parts_to_read(self, origin: Origin) -> Iterator[PartToRead]:
        """Yield the parts of files that a weight is made of."""
        arrival = choose_arrival(origin, self.choose_format(origin), self.stored)
        is_used_there = self.device.type == "cpu" and arrival == "in place"
        for span in self.find_spans(origin):
            yield self.files.make_part_to_read(span, is_used_there=is_used_there)

    def find_spans(self, origin: Origin) -> Iterator[Span]:
        """Yield the spans of files that a weight is made of."""
        for piece, _, rows in _place_pieces(origin):
            is_stacked = piece.item is None and outputs_dim(origin.spec) > 0
            is_other = (
                piece.is_turned or origin.layout.is_transposed or origin.layout.is_row
            )
            # tensors of several may not have the matrix's rows
            is_other |= len(piece.stored) > 1
            needed: list[tuple[int, int] | None] = [None]
            if rows is not None and not (is_stacked or is_other):
                rows = rows.sort().values
                ends = (rows.diff() > MOST_BETWEEN).nonzero()[:, 0] + 1
                parts = torch.tensor_split(rows, ends)
                needed = [(int(part[0]), int(part[-1]) + 1) for part in parts]
            for name, some in product(piece.stored, needed):
                yield from self.files.find_spans(name, some)

    def _make_tensors(self, origin: Origin, held: Format, arrival: Arrival) -> Tensors:
        if origin.cut.is_zero:
            return tuple(
                t.zero_() for t in held.empty(origin.held_spec.shape, self.device)
            )
        if arrival != "in place":
            return self._join_pieces(origin, held)

        (name,) = origin.pieces[0].stored
        stored = self.files.read(name)
        tensor = stored.to(self.device)
        if tensor.data_ptr() != stored.data_ptr():
            self.files.free_pages(name)
        return (tensor,)

    def _join_pieces(self, origin: Origin, held: Format) -> Tensors:
        """Copy what is stored of a tensor; dequantize or quantize what is not held so."""
        wholes = held.empty(origin.held_spec.shape, self.device)
        last: int | None = None
        at = 0  # the next row to be written
        for piece, item, rows in _place_pieces(origin):
            at = at if item == last else 0
            last = item
            num = piece.last - piece.first if rows is None else len(rows)
            row_format = held
            targets = wholes if item is None else held.select_expert(wholes, item)
            if not origin.is_one_piece:
                row_format, targets = held.view_rows(targets, at, at + num)
            at += num
            self._fill_rows(piece, origin, rows, row_format, targets)
        return wholes

    def _fill_rows(
        self,
        piece: Piece,
        origin: Origin,
        rows: torch.Tensor | None,
        row_format: Format,
        targets: Tensors,
    ) -> None:
        """Write some rows of a piece to the tensors of a format."""
        layout = origin.layout
        columns = origin.cut.columns
        is_turned = piece.is_turned or layout.is_transposed or layout.is_row
        is_same = columns is None and not (is_turned or layout.added)
        is_plain = piece.format is None and row_format.floats is not None
        if is_plain and rows is None and is_same:
            self.files.copy(next(iter(piece.stored)), targets[0])
            return

        values = self._read_piece(piece, origin, rows)
        if row_format == piece.format:
            if columns is not None:
                values = row_format.cut_inputs(values, columns)
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        else:
            numbers = values[0]
            if piece.format is not None:
                numbers = piece.format.dequantize(
                    values, row_format.floats or torch.float32
                )
            if piece.is_turned:
                numbers = numbers.mT if rows is None else numbers.mT[rows]
            _fill_numbers(row_format, targets, numbers, columns)
        for name in piece.stored:
            self.files.free_pages(name)

    def _read_piece(
        self, piece: Piece, origin: Origin, rows: torch.Tensor | None
    ) -> Tensors:
        """Return some rows of a piece in the format that it is stored in."""
        stored = {name: self.files.read(name) for name in piece.stored}
        layout = origin.layout
        dim = outputs_dim(origin.spec) - (piece.item is not None)
        if piece.reader is None:
            values = tuple(map(layout.to_outputs_first, stored.values()))
        else:
            values = piece.reader.read(stored, is_transposed=layout.is_transposed)
        if rows is None or piece.is_turned:
            return values
        if piece.format is None or dim:
            return tuple(value.index_select(dim, rows) for value in values)
        return piece.format.select_rows(values, rows)


def _fill_numbers(
    row_format: Format, targets: Tensors, numbers: torch.Tensor, columns: range | None
) -> None:
    """Write floats of whole rows to a format, or some of their inputs."""
    if columns is None:
        row_format.fill(targets, numbers)
        return
    if row_format.floats is not None:
        row_format.fill(targets, numbers[..., columns.start : columns.stop])
        return
    # of whole rows, for a row may be one block
    wholes = row_format.empty(tuple(numbers.shape), numbers.device)
    row_format.fill(wholes, numbers)
    cuts = row_format.cut_inputs(wholes, columns)
    for target, cut in zip(targets, cuts, strict=True):
        target.copy_(cut)


def _place_pieces(
    origin: Origin,
) -> Iterator[tuple[Piece, int | None, torch.Tensor | None]]:
    """Yield each piece that this rank holds, the item that it belongs to, and its rows.

    None: it belongs to no item; all rows are held.
    """
    order = origin.find_order()
    for piece in origin.pieces:
        if order is None or origin.is_one_piece:
            yield piece, piece.item, order
        elif piece.item is not None and outputs_dim(origin.spec) == 0:  # of a head
            for place in (order == piece.item).nonzero()[:1]:
                yield piece, int(place), None
        else:
            rows = order[(order >= piece.first) & (order < piece.last)] - piece.first
            if len(rows):
                yield piece, piece.item, rows


@dataclass(slots=True, frozen=True)
class WeightDrawer:
    """Draws random weights, each with a seed of its own, by its name."""

    seed: int
    spread: float  # the standard deviation
    norm_weight: float  # what the weights of norms are
    device: torch.device
    holding: Holding
    files: None = None

    def choose_format(self, origin: Origin) -> Format:
        # of one format, however it is cut
        return self.holding.choose_format(origin.spec, ())

    def list_parts_to_read(self, origin: Origin) -> tuple[PartToRead, ...]:
        return ()

    def make_weight(self, name: str, origin: Origin) -> Weight:
        """Draw one. Norms multiply by 1, biases are 0, the rest is normal."""
        held = self.choose_format(origin)
        spec = origin.spec
        floats = Dense(held.floats or self.holding.dtype)
        if spec.use in ("bias", "norm_bias", "choice", "norm"):
            value = self.norm_weight if spec.use == "norm" else 0.0
            (tensor,) = floats.empty(origin.held_spec.shape, self.device)
            return Weight(origin.held_spec, held, (tensor.fill_(value),))
        (tensor,) = floats.empty(spec.shape, self.device)
        key = f"{self.seed} {name}"
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(key.encode()))
        tensor.normal_(0, self.spread, generator=generator)
        if (order := origin.find_order()) is not None:
            tensor = tensor.index_select(outputs_dim(spec), order.to(self.device))
        if held.floats is not None and origin.cut.columns is None:
            return Weight(origin.held_spec, held, (tensor,))
        tensors = held.empty(origin.held_spec.shape, self.device)
        _fill_numbers(held, tensors, tensor, origin.cut.columns)
        return Weight(origin.held_spec, held, tensors)
