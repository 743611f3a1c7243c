"""Imports transformers without what it loads for others' sake, or does twice.

Its models can be compiled and spread over processes: a run does neither, and importing what that
takes is most of importing transformers. It is for the command's own processes, where nothing else
uses transformers: it has no sharded tensors there afterwards.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def import_transformers() -> None:
    """Import what transformers' models have in common, unless the process has it.

    The compiler itself is imported as usual once something asks for it.
    """
    if "transformers" not in sys.modules:
        with suppress(Exception):  # in some other version: then all is imported as usual
            _import_common_parts()


def _import_common_parts() -> None:
    import torch

    compiler = _NoCompiler(COMPILER)
    compiler.__path__ = [str(Path(torch.__path__[0]) / "_dynamo")]  # one module of it is used
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with _standing_in(compiler):
            _read_folders_once()
            from transformers import GenerationMixin, PreTrainedModel  # noqa: F401
    finally:
        torch.distributed.is_available = is_available


@contextmanager
def _standing_in(module: ModuleType) -> Iterator[None]:
    """Have a module be imported in place of the one that has its name."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]


class _NoCompiler(ModuleType):
    """Stands for torch.compile's module: its decorators leave a function as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unchanged if function is None else function


def _read_folders_once() -> None:
    """Have transformers read the folders of all its models once; it does so for two modules.

    That is in one of its modules, which is imported before the package itself runs.
    """
    spec = find_spec("transformers")
    assert spec is not None
    package = module_from_spec(spec)
    package.__version__ = version("transformers")  # type: ignore[attr-defined]
    with _standing_in(package):
        reader: Any = importlib.import_module("transformers.utils.import_utils")
    name = "create_import_structure_from_path"
    setattr(reader, name, functools.cache(getattr(reader, name)))
