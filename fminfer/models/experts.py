"""Mixture-of-experts weights: checkpoints hold a tensor an expert, transformers one a layer.

Gate and up projections of all experts share the parameter `gate_up_proj`, (experts, 2 * inner,
hidden), gate first. It knows no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import torch

from fminfer.errors import CheckpointError
from fminfer.models.families import Family

_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")


@dataclass(slots=True, frozen=True)
class ExpertPiece:
    """Where one expert's tensor goes: a part of the rows of one expert of the parameter."""

    target: str
    expert: int
    part: int
    num_parts: int


def find_piece(name: str, family: Family) -> ExpertPiece | None:
    """Return where a checkpoint's tensor goes if it belongs to one expert, else None."""
    match = _ONE_EXPERT.fullmatch(name)
    for part in family.experts if match else ():
        if match and match["name"] == part.name:
            target = f"{match['module']}.{part.parameter}"
            return ExpertPiece(target, int(match["expert"]), part.index, part.count)
    return None


class ExpertAssembler:
    """Puts the experts' tensors together, in whatever order they come.

    Args:
        dtype, device: of the parameters that it makes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._whole: dict[str, torch.Tensor] = {}
        self._awaited: dict[str, set[tuple[int, int]]] = {}  # (expert, part) of a parameter

    def add(self, piece: ExpertPiece, tensor: torch.Tensor, shape: torch.Size) -> bool:
        """Copy one tensor to its place and tell whether its parameter is now complete.

        Args:
            shape: of the whole parameter, (experts, rows, columns).

        Raises:
            CheckpointError: the tensor does not fit, or was there before.
        """
        num_experts, rows, columns = shape
        expected = (rows // piece.num_parts, columns)
        if piece.expert >= num_experts or tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"expert {piece.expert} of {piece.target!r} has a tensor of shape "
                f"{tuple(tensor.shape)}; config.json asks for {num_experts} experts of {expected}"
            )
        if piece.target not in self._awaited:
            empty = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._whole[piece.target] = empty
            parts = product(range(num_experts), range(piece.num_parts))
            self._awaited[piece.target] = set(parts)
        if (piece.expert, piece.part) not in self._awaited[piece.target]:
            raise CheckpointError(
                f"expert {piece.expert} of {piece.target!r} comes twice under different names; "
                "take the file away that does not belong to the model"
            )
        first = piece.part * expected[0]
        self._whole[piece.target][piece.expert, first : first + expected[0]] = tensor
        self._awaited[piece.target].remove((piece.expert, piece.part))
        return not self._awaited[piece.target]

    def take(self, target: str) -> torch.Tensor:
        """Hand over a complete parameter."""
        assert not self._awaited[target], "some expert is still missing"
        return self._whole.pop(target)
