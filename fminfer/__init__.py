"""fminfer: a file of completions requests in, a file of answers out, offline.

`fminfer.Engine` is the Python API; it is loaded on first use, because torch takes seconds.
"""

from __future__ import annotations

from typing import Any

from fminfer.errors import CheckpointError, FminferError, RequestError, UsageError
from fminfer.version import __version__

__all__ = [
    "CheckpointError",
    "Engine",
    "EngineConfig",
    "FminferError",
    "RequestError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from fminfer.processor import cap_libraries

        cap_libraries()
        from fminfer.worker import Engine

        return Engine
    if name == "EngineConfig":
        from fminfer.config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module 'fminfer' has no attribute {name!r}")
