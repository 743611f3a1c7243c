"""Reasons in a plan why its run is slower than it could be."""

from __future__ import annotations

from fminfer.compute.values.spec import Moe
from fminfer.machine.device import describe_slow_dtype
from fminfer.plan.run_plan import RunPlan

NO_FLOATS = (
    "become floats at each use, for floats do not fit a GPU beside the KV cache; a smaller "
    "--budget or more GPUs may make room"
)


def find_slowness(plan: RunPlan) -> list[str]:
    """Return the reasons that apply to a plan. What --kernels off turns off is not listed."""
    model = plan.checkpoint.model
    on_gpu = plan.device.type == "cuda"
    has_experts = any(isinstance(layer.mlp, Moe) for layer in model.layers)
    without_graphs = {
        "--tensor-parallel-size (copies and stages have them: --data-group-size, "
        "--pipeline-group-size)": plan.machine.num_shards > 1,
        "streamed layers": any(rank.streamed for rank in plan.ranks),
        "mixtures of experts": has_experts,
        "attention to an encoder": any(layer.cross for layer in model.layers),
    }
    causes = " or ".join(cause for cause, holds in without_graphs.items() if holds)
    reasons = {
        plan.why_reread: True,
        describe_slow_dtype(plan.dtype, plan.device): True,
        f"weights in {plan.held_in} {NO_FLOATS}": plan.has_blocks,
        "a GPU computes experts one after another": on_gpu and has_experts,
        f"there are no CUDA graphs of decode steps with {causes}": (
            bool(causes)
            and on_gpu
            and not model.is_pooled
            and plan.config.kernels != "off"
        ),
    }
    return [reason for reason, holds in reasons.items() if reason and holds]
