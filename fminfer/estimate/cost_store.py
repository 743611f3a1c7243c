"""Keeps what steps of a model take on this machine in the user's cache folder.

A file for each machine, model shape, dtype, attention and version. It knows no weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from fminfer.core.errors import UsageError
from fminfer.core.version import __version__
from fminfer.estimate.cost_model import COSTS, CostModel
from fminfer.files.disk import replacing
from fminfer.machine import processor
from fminfer.machine.threads import choose_num_threads
from fminfer.machine.user_cache import cache_folder
from fminfer.plan.run_plan import RunPlan

# Of a config, what says where it comes from, not what is computed.
NOT_SHAPE = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")


def find_costs_path(plan: RunPlan, *, has_kernel: bool) -> Path | None:
    """Return where costs are kept, for exactly this work; None: there is no cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    shape = {
        name: value
        for name, value in plan.checkpoint.config.to_dict().items()
        if name not in NOT_SHAPE and not name.endswith("token_id")
    }
    on_gpu, config = plan.device.type == "cuda", plan.config
    machine = torch.cuda.get_device_name(plan.device) if on_gpu else processor.describe()
    parts = [
        *(__version__, torch.__version__, platform.machine(), machine),
        str(choose_num_threads(config.threads, torch.get_num_threads(), 1)),
        *(json.dumps(shape, sort_keys=True, default=str), str(config.max_layers)),
        *(str(plan.dtype), f"torch.{plan.held_in}", str(plan.kv_dtype)),
        str(has_kernel),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return folder / f"costs-{key}.json"


def keep_costs(path: Path, costs: CostModel, model: str) -> None:
    """Write costs; the model's name is for people.

    Raises:
        UsageError: they cannot be written.
    """
    fields = {
        "model": model,
        "median_error": costs.error,
        "whole_runs": costs.whole_runs,
        "seconds": dict(zip(COSTS, costs.seconds, strict=True)),
    }
    try:
        with replacing(path, path.with_suffix(f".{os.getpid()}.part"), is_durable=False) as file:
            file.write(json.dumps(fields, indent=2).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"what was measured cannot be kept: {error}") from error


def load_costs(path: Path) -> CostModel | None:
    """Read costs; None: they were never measured, or the file is damaged."""
    try:
        fields = json.loads(path.read_text())
        seconds = tuple(float(fields["seconds"][name]) for name in COSTS)
        whole_runs = tuple(map(float, fields["whole_runs"]))
        if not whole_runs:
            return None
        return CostModel(seconds, float(fields["median_error"]), whole_runs)
    except (OSError, ValueError, KeyError, TypeError):
        return None
