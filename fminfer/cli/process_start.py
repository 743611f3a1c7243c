"""How a process that has an engine starts: its other processes, and what is done beside imports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fminfer.cli.ending import Ending
from fminfer.compute.kernels.kernel_build import start_build
from fminfer.core.config import ComputeOptions, EngineConfig
from fminfer.machine.host_memory import reading_files, touching_memory
from fminfer.machine.library_imports import importing
from fminfer.models.known_sizes import check_split
from fminfer.models.model_folder import find_weight_files
from fminfer.runtime.launch.processes import ProcessContext, Processes
from fminfer.runtime.launch.role import Role

STARTED_S = time.perf_counter()
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
Context = TypeVar("Context", bound=ProcessContext)


def elapsed_s() -> float:
    """Return the seconds since the command started."""
    return time.perf_counter() - STARTED_S


@contextmanager
def starting_process(
    make: Callable[..., Context],
    config: EngineConfig,
    role: Role,
    ending: Ending,
    *,
    is_quiet: bool,
) -> Iterator[Context]:
    """Start the processes that this one starts, which import beside it; at last end them.

    Args:
        make: makes what is given of this process, a `ProcessContext`.

    Raises:
        UsageError: more stages than layers, or layers that do not fit the model.
    """
    if role.kind == "starter":
        check_split(config, role.spread.num_stages)
    ending.is_alone = role.kind == "alone"
    children = ending.children = Processes.of(role)
    ending.stopper.on_second = children.kill
    try:
        yield make(
            *(config, role, children, ending.stopper, ending.at_once, elapsed_s),
            is_quiet=is_quiet,
            is_verbose=ending.is_verbose,
        )
    finally:
        children.end()


@contextmanager
def importing_engine(config: EngineConfig, role: Role) -> Iterator[None]:
    """Let what has the engine be imported, while kernels are built and weights are read."""
    if role.kind != "alone":  # torch's own words on broken connections say less than ours
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
