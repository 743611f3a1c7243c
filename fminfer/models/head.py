"""From the last hidden states to logits: a product whose sums are kept in float32.

Sums of 16-bit products are float32 in every library; rounded to bfloat16, logits around 20 would be
multiples of 1/8, and many would tie. So no body here rounds them.
"""

from __future__ import annotations

import torch

from fminfer.compute.registry import Registry
from fminfer.compute.weights import Weight

# Of a weight, what plain torch widens to float32 at once: a cache holds it while it is multiplied.
WIDENED_BYTES = 2 << 20


class Head:
    """A model's head, a linear layer, with logits in float32.

    Args:
        weight: (vocab, hidden); it may be the embedding.
        registry: has what packs the weight, if a kernel serves it. Otherwise it stays as it is.
        scale: of logits.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None,
        registry: Registry,
        scale: float = 1.0,
    ) -> None:
        self._bias, self._scale = None if bias is None else bias.float(), scale
        self.vocab_size = weight.shape[0]
        self.packed = registry.head(weight, self._bias)
        if self.packed is None:  # otherwise it is kept packed alone
            self._weight = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, (rows, vocab) float32, of hidden states, (rows, hidden)."""
        logits = self._multiply(hidden) if self.packed is None else self.packed.unrounded(hidden)
        return logits if self._scale == 1.0 else logits.mul_(self._scale)

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._weight.is_plain:
            widened = self._weight.dequantized(torch.float32)
            return torch.nn.functional.linear(hidden.float(), widened, self._bias)
        weight = self._weight.plain
        if weight.dtype == torch.float32:
            return torch.nn.functional.linear(hidden, weight, self._bias)
        if weight.is_cuda:
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return logits if self._bias is None else logits.add_(self._bias)
        return _multiply_widened(hidden, weight, self._bias)


def _multiply_widened(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return hidden·Wᵀ + b in float32, some outputs after the other, in plain torch."""
    hidden = hidden.float()
    logits = hidden.new_empty((len(hidden), len(weight)))
    size = max(1, WIDENED_BYTES // (4 * weight.shape[1]))
    for first in range(0, len(weight), size):
        part = slice(first, first + size)
        logits[:, part] = hidden @ weight[part].float().t()
    return logits if bias is None else logits.add_(bias)
