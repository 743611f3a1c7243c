"""fminfer: a file of completions requests in, a file of answers out, offline.

`fminfer.Engine` is the Python API; it is loaded on first use, because torch takes seconds.
"""

from __future__ import annotations

from typing import Any

from fminfer.core.config import EngineConfig
from fminfer.core.errors import (
    CheckpointError,
    FminferError,
    MachineError,
    OutOfMemoryError,
    PipelineError,
    RequestError,
    StepLimitError,
    StoppedError,
    UncompiledError,
    UsageError,
)
from fminfer.core.version import __version__

__all__ = [
    "CheckpointError",
    "Delta",
    "Engine",
    "EngineConfig",
    "Failed",
    "Finished",
    "FminferError",
    "MachineError",
    "OutOfMemoryError",
    "PipelineError",
    "RequestError",
    "StepLimitError",
    "StoppedError",
    "UncompiledError",
    "UsageError",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from fminfer.machine.processor import cap_libraries

        cap_libraries()
        from fminfer.runtime.engine_api import Engine

        return Engine
    if name in ("Delta", "Failed", "Finished"):
        from fminfer.engine import engine_core

        return getattr(engine_core, name)
    raise AttributeError(f"module 'fminfer' has no attribute {name!r}")
