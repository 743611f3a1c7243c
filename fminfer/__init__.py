"""fminfer: a file of completions requests in, a file of answers out, offline.

`fminfer.Engine` is the Python API; `LLM` and `SentenceTransformer` have other tools' names.
They are loaded on first use, because torch takes seconds.
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
    "LLM",
    "AsyncEngine",
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
    "RequestOutput",
    "SamplingParams",
    "SentenceTransformer",
    "StepLimitError",
    "StoppedError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UncompiledError",
    "UsageError",
    "__version__",
]
# What is loaded on first use, and the module that has it.
_LATE = {
    "AsyncEngine": "fminfer.interfaces.async_engine",
    "Delta": "fminfer.engine.engine_core",
    "Engine": "fminfer.runtime.engine_api",
    "Failed": "fminfer.engine.engine_core",
    "Finished": "fminfer.engine.engine_core",
    "LLM": "fminfer.interfaces.vllm_llm",
    "RequestOutput": "fminfer.interfaces.vllm_outputs",
    "SamplingParams": "fminfer.interfaces.vllm_params",
    "SentenceTransformer": "fminfer.interfaces.sentence_encoder",
    "StructuredOutputsParams": "fminfer.interfaces.vllm_params",
    "TextPrompt": "fminfer.interfaces.vllm_params",
    "TokensPrompt": "fminfer.interfaces.vllm_params",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'fminfer' has no attribute {name!r}")
    from importlib import import_module

    from fminfer.machine.processor import cap_libraries

    cap_libraries()
    return getattr(import_module(_LATE[name]), name)
