"""How a process that has an engine starts: its other processes, and what is done beside imports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fminfer.cli.ending import Ending
from fminfer.compute.kernels.kernel_build import start_build
from fminfer.core.config import ComputeOptions, EngineConfig
from fminfer.machine.host_memory import reading_files, touching_memory
from fminfer.machine.start_up import importing, prepare_torch
from fminfer.machine.stopper import Stopper
from fminfer.models.layer_count import check_split
from fminfer.models.stored.weight_folder import find_weight_files
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import Role

STARTED_S = time.perf_counter()
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")


def elapsed_s() -> float:
    """Return the seconds since the command started."""
    return time.perf_counter() - STARTED_S


def start_children(config: EngineConfig, role: Role, stopper: Stopper, ending: Ending) -> Processes:
    """Start the processes that this one starts; they import beside it.

    Raises:
        UsageError: more stages than layers, or layers that do not fit the model.
    """
    spread = role.spread
    if role.kind == "starter":
        check_split(config, spread.num_stages)
    is_team = spread.num_pipelines > 1
    children = Processes(
        role.children, num_ranks=spread.num_ranks - 1 if is_team else 0, has_line=is_team
    )
    ending.children = children
    stopper.on_second = children.kill
    ending.is_alone = role.kind == "alone"
    return children


@contextmanager
def importing_engine(config: EngineConfig, role: Role) -> Iterator[None]:
    """Let what has the engine be imported, while kernels are built and weights are read."""
    if role.kind != "alone":  # torch's own words on broken connections say less than ours
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare_torch()
    start_kernels(config)
    files: dict[Path, int] = {}
    if role.kind == "alone" and config.model is not None and _is_for_cpu(config.device):
        files = find_weight_files(config.model)
    share = {"int8": 0.55, "int4": 0.35}.get(config.quantized_to[:4], 1.0)
    num_bytes = int(2 * share * sum(files.values()))  # packed, and as much for the KV cache
    with reading_files(files), touching_memory(num_bytes), importing():
        yield


def start_kernels(options: ComputeOptions) -> None:
    """Build the CPU's kernels beside what comes next, if a command is likely to want them."""
    if options.kernels != "off" and _is_for_cpu(options.device):
        start_build()


def _is_for_cpu(device: str) -> bool:
    """Tell, without torch, whether a command will most likely compute on the CPU."""
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_DRIVERS)))
