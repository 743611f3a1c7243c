"""The noise of Gumbel-max draws: one number for each row and token id, the same on every device.

A token drawn is the argmax of scaled logit + noise. A small change of the logits then changes the
token only where two are nearly level. `kernels/gumbel.h` has the same function.
"""

from __future__ import annotations

import torch

# Factors and shifts of lowbias32, found by search for a mixer of 32 bits that has little bias:
# Wellons 2018, https://nullprogram.com/blog/2018/07/31/. As signed numbers, which torch has.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32


def token_bits(noise: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return 32 random bits for each row and token id, (rows, vocab) int32.

    Two rounds of a mixer: one with the lower half of a row's noise, one with the upper half. It
    needs only 32-bit products, shifts and xor, which all processors have for vectors. One round
    would give two rows whose halves are near each other the same numbers at other ids.

    Args:
        noise: (rows,) int64, 64 random bits each.
    """
    ids = torch.arange(vocab, dtype=torch.int32, device=noise.device)
    lower = (noise << 32 >> 32).to(torch.int32)[:, None]
    upper = (noise >> 32).to(torch.int32)[:, None]
    return _mix(_mix(ids ^ lower).bitwise_xor_(upper))


def gumbel(noise: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return noise of the standard Gumbel distribution, (rows, vocab) float64.

    Float64 holds all 32 bits. The few that win have uniform numbers near 0, and need them.

    Args:
        noise: (rows,) int64, 64 random bits each.
    """
    # 1 - u, where u is (bits + 0.5) / 2^32. Flipped like this, signed bits are 2^31 - 1 - unsigned.
    flipped = token_bits(noise, vocab).bitwise_xor_(0x7FFFFFFF)
    rest = flipped.double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return rest.log_().neg_().log_().neg_()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix in place. Products wrap around; shifts are of unsigned numbers."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= FIRST
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= SECOND
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits
