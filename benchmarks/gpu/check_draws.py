"""Phase 4: draws and rankings beside the CPU's plain torch; the same tokens must come out.

Without a GPU the CPU's compiled kernels stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.cases import Case, Figures, Setting, expect
from fminfer.compute.sampling import sampler
from fminfer.compute.sampling.sampler import Drawer, Ranker, Ranking, SamplingTensors
from fminfer.compute.values.step import make_draws
from fminfer.forward.registry import open_registry

SIZES = {"cuda": (64, 128256), "cpu": (16, 3000)}  # rows, vocabulary
NUM_TOP = 20


WAYS: dict[str, dict[str, float]] = {  # how all rows of a case draw
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_p of many": {"temperature": 1.5, "top_p": 0.999},
    "top_k": {"top_k": 50},
    "top_k of one": {"top_k": 1},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "min_p": 0.01},
}
KINDS = ("normal", "steep", "tied", "nan")


def cases(setting: Setting) -> Iterator[Case]:
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            told = f"{kind} logits {str(dtype)[6:]}"
            yield Case(
                f"draws of {told}", partial(check_draws, setting.device, kind, dtype)
            )
            yield Case(
                f"ranks of {told}", partial(check_ranks, setting.device, kind, dtype)
            )


def make_logits(kind: str, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return logits on the CPU: as a random model's, a good model's, with ties, with nan."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0))
    if kind == "steep":
        logits = (logits * 4).sort(-1).values
    elif kind == "tied":
        logits = (logits * 2).round() / 2
    elif kind == "nan":
        logits[::3] = float("nan")
        logits[1::3, 7] = float("nan")
    return logits.to(dtype).float()  # the head gives float32; rounded ones have ties


@torch.inference_mode()
def check_draws(device: str, kind: str, dtype: torch.dtype) -> Figures:
    """Draw each way with the same noise on both."""
    drawer, _ = _bodies(device)
    logits = make_logits(kind, SIZES[device], dtype)
    rows = torch.arange(len(logits))
    noise = torch.randint(
        -(2**63), 2**63 - 1, rows.shape, generator=torch.Generator().manual_seed(1)
    )
    differing: dict[str, int] = {}
    for name, way in WAYS.items():
        draws = make_draws(range(len(rows)), noise=noise, **way)
        how, moved = (
            SamplingTensors.from_draws(draws, torch.device(each))
            for each in ("cpu", device)
        )
        expected = sampler.draw_tokens(logits, how, rows)
        found = drawer(logits.to(device), moved, rows.to(device)).cpu()
        num = int((found != expected).sum())
        in_range = bool(((found >= 0) & (found < logits.shape[1])).all())
        expect(in_range, f"{name}: an id that no token has")
        if num:
            differing[name] = num
    told = ", ".join(f"{name}: {num}" for name, num in differing.items())
    expect(not differing, f"other tokens ({told})", {"rows": len(rows)})
    return {"ways": len(WAYS), "rows": len(rows)}


@torch.inference_mode()
def check_ranks(device: str, kind: str, dtype: torch.dtype) -> Figures:
    """Find normalizers and the best tokens of both."""
    _, ranker = _bodies(device)
    logits = make_logits(kind, SIZES[device], dtype)
    is_number = ~logits.isnan().any(-1)
    figures: Figures = {}
    for num_top in (1, NUM_TOP):
        right = sampler.rank_logits(logits, num_top)
        found = ranker(logits.to(device), num_top)
        pairs = ((right.normalizer, found.normalizer), (right.best, found.best))
        for ours, theirs in pairs:
            error = float((ours - theirs.cpu())[is_number].abs().max())
            figures["error"] = max(error, float(figures.get("error") or 0.0))
        first = (right.best_ids != found.best_ids.cpu())[:, 0][is_number].sum()
        others = _differ(right, found)[is_number].sum()
        figures |= {"other first": int(first), f"other of {num_top}": int(others)}
        is_right = int(first) == 0 and int(others) == 0
        expect(
            is_right and float(figures["error"] or 0.0) < 1e-4, "other tokens", figures
        )
        nans = found.normalizer.cpu().isnan()
        expect(bool((nans == ~is_number).all()), "rows of nan are not told", figures)
    return figures


def _differ(right: Ranking, found: Ranking) -> torch.Tensor:  # (rows,) bool
    """Tell which rows have other tokens among the best.

    Equal logits may stand in any order, and of those that equal the last one any may be
    left out.
    """
    last = right.best[:, -1:]
    ordered = []
    for ranking in (right, found):
        ids, order = ranking.best_ids.cpu().sort(-1)
        values = ranking.best.cpu().gather(-1, order)
        values, order = values.sort(stable=True, dim=-1, descending=True)
        ordered.append(ids.gather(-1, order).masked_fill(values <= last, -1))
    return (ordered[0] != ordered[1]).any(-1)


def _bodies(device: str) -> tuple[Drawer, Ranker]:
    """Return what is compared with plain torch on the CPU."""
    registry = open_registry("require", torch.float32, torch.device(device))
    return registry.choose_drawer(), registry.choose_ranker()
