"""What the tensors of a spec are for: its weights and the small tensors beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# product: a layer's matrix, rows times it; moved: one that becomes others when its layer is made
# (`kv_up` of a latent); router and choice: small ones that decide between experts.
Use = Literal["product", "moved", "head", "embedding", "router", "choice", "norm", "bias", "other"]


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """One tensor of a spec. Matrices are (outputs, inputs), of experts (experts, …)."""

    shape: tuple[int, ...]
    use: Use

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def is_widened(self) -> bool:
        """Whether it may be held in another format than hidden states: it becomes theirs in use."""
        return self.use in ("product", "head", "embedding")

    @property
    def is_precise(self) -> bool:
        """Whether it is float32 in any dtype."""
        return self.use in ("router", "choice")
