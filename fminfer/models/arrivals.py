"""How a tensor comes from its files: decided once, done by the reader, counted by forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fminfer.compute.values.weights import Format
from fminfer.models.families.tensor_names import AS_STORED
from fminfer.models.origins import Origin, StoredModel
from fminfer.models.sharding import WHOLE

# in place: it is used where it lies in its mapped file.
# apart: it is several stored matrices. Kernels multiply them where they lie; others join them.
# copied, joined: it is made of one stored tensor, or of several.
# converted: it is held in another format than it is stored in.
Arrival = Literal["in place", "apart", "copied", "joined", "converted"]


def choose_arrival(origin: Origin, held: Format, stored: StoredModel) -> Arrival:
    """Return how a tensor comes, if it is held in a format, in memory that files map."""
    names = [name for piece in origin.pieces for name in piece.stored]
    formats = {piece_format for piece_format, _ in origin.stored_formats(stored.types)}
    if len(names) > len(origin.pieces) or not formats.issubset(held.parts):
        return "converted"

    is_unchanged = origin.layout == AS_STORED and origin.cut == WHOLE
    is_in_place = is_unchanged and all(map(stored.is_in_place, names))
    if origin.is_one_piece:
        return "in place" if is_in_place else "copied"

    is_matrix = origin.spec.use == "product" and len(origin.spec.shape) == 2
    if is_in_place and is_matrix and held.floats is not None:
        return "apart"
    return "joined"


def find_arrivals(
    stored: StoredModel | None, held: Mapping[str, Format]
) -> dict[str, Arrival]:
    """Return how each whole tensor of a model comes, by name. Nothing: it is drawn at random."""
    if stored is None:
        return {}
    return {
        name: choose_arrival(origin, held[name], stored)
        for name, origin in stored.all_origins.items()
    }
