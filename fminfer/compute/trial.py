"""What a kernel offers, and its trial beside plain torch before it is used, as a model loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from fminfer.core.config import Kernels
from fminfer.core.errors import UsageError

Target = TypeVar("Target")
Kernel = TypeVar("Kernel")
Pair = tuple[torch.Tensor, torch.Tensor]  # (found, expected)
# of an error, as a part of the largest expected number
Limits = dict[torch.dtype, float]

# Compilers, drivers and machines raise others. These say that our own code is wrong.
OUR_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
)
POSITION = re.compile(r"at \d+:\d+:")


@dataclass(slots=True, frozen=True)
class Trial(Generic[Kernel]):
    """How a body is compared with plain torch."""

    name: str  # what messages call what it computes
    pairs: Callable[[Kernel], Iterable[Pair]]
    limit: float  # of an error, as a part of the largest expected number
    key: Hashable = None  # a trial stands for all that have the same: a shape, a spec


@dataclass(slots=True, frozen=True, eq=False)
class Candidate(Generic[Target, Kernel]):
    """A compiled body that may be chosen for what is asked: a weight, a spec."""

    make: Callable[[Target], Kernel]
    trial: Callable[[Target], Trial[Kernel]]
    serves: Callable[[Target], bool] = lambda target: True


def compare_pairs(pairs: Iterable[Pair], limit: float) -> bool:
    """Compare what a body gives with what is expected; tell whether all of it could be.

    Where nan is expected, anything is right.

    Raises:
        ValueError: they differ by more than `limit` times the largest expected number.
    """
    has_nan = False
    for computed, expected in pairs:
        computed = computed.double().cpu()
        expected = expected.double().cpu()
        has_nan = has_nan or bool(expected.isnan().any())
        is_same = (computed == expected) | expected.isnan()
        error = (computed - expected).abs().masked_fill(is_same, 0.0).amax()
        largest = expected.abs().masked_fill(~expected.isfinite(), 0.0).amax()
        if not error <= limit * largest:
            raise ValueError(
                f"what it gives is off by {(error / (largest or 1.0)).item():.2g}"
            )
    return not has_nan


def explain_failure(mode: Kernels, name: str, error: BaseException) -> str:
    """Return why plain torch computes something, or raise it if no other body will do.

    Raises:
        UsageError: --kernels require, or the GPU's context is broken.
    """
    problem = f"{name}: the kernel cannot be used ({describe_reason(error)})"
    if mode == "require":
        raise UsageError(f"--kernels require: {problem}. Use --kernels auto") from error
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except (
        RuntimeError
    ) as broken:  # after a wrong access nothing works in this process any more
        raise UsageError(
            f"{problem}, and broke the GPU's context. Use --kernels off"
        ) from broken
    return problem


def describe_reason(error: BaseException) -> str:
    """Return what a compiler or a driver says, in a line; a fault of our own is called one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        text = repr(error)
    elif POSITION.fullmatch(
        lines[0]
    ):  # triton shows the source first, and the reason last
        text = f"{lines[0]} {lines[-1]}"
    else:
        text = lines[0]
    if isinstance(error, OUR_FAULTS):
        return f"a fault of fminfer's, please report it: {type(error).__name__}: {text}"
    return text
