"""Whether an answer has the same bytes whatever rows are computed beside it."""

from __future__ import annotations

import torch

from fminfer.compute.formats.dense import Dense
from fminfer.compute.layers.products import is_kernel_faster
from fminfer.compute.values.weights import KERNEL_TYPES
from fminfer.core.config import ComputeOptions
from fminfer.core.errors import UsageError
from fminfer.machine.processor import has_unit
from fminfer.models.tensor_specs import model_specs
from fminfer.plan.run_plan import RunPlan, name_of

TILES = "AMX sums few rows in another order than many; --same-answers on computes without it"


def explain_dependence(plan: RunPlan) -> str:
    """Return why answers may depend on other rows, as a plan shows it; "": they do not."""
    torch_weight = _find_torch_weight(plan)
    reasons = {
        "a GPU computes": plan.device.type != "cpu",
        "--kernels off": plan.config.kernels == "off",
        "there are no compiled kernels": not plan.machine.has_library,
        f"torch computes in {name_of(plan.dtype)}": plan.dtype not in KERNEL_TYPES,
        TILES: plan.dtype == torch.bfloat16 and has_unit("amx_bf16"),
        f"torch multiplies with {torch_weight}": bool(torch_weight),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _find_torch_weight(plan: RunPlan) -> str:
    """Return the first weight that the kernels cannot multiply with; "": there is none."""
    for name, spec in model_specs(plan.checkpoint.model).items():
        if spec.use != "product":
            continue
        held = plan.held[name]
        has_units = spec.shape[-1] % 2 == 0 or held == Dense(torch.float32)
        if not (has_units and is_kernel_faster(held, plan.dtype)):
            sizes = " × ".join(map(str, spec.shape))
            return f"{name}, {sizes} in {held.name}"
    return ""


def require_same_answers(config: ComputeOptions, why_dependent: str) -> None:
    """Refuse --same-answers on if answers may depend on other rows.

    Raises:
        UsageError: they may; it says why, and what would do.
    """
    if config.same_answers == "on" and why_dependent:
        raise UsageError(
            f"--same-answers on: answers may depend on other rows here: {why_dependent}. "
            "It needs a CPU, float32 or bfloat16, and fminfer's own kernels, which g++ "
            "builds. Change what is in the way, or leave --same-answers out"
        )
