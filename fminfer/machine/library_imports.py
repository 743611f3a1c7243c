"""Imports torch, and what transformers' configs need without what they load for models' sake.

A run takes configs and tokenizers from transformers, no model. But the import of a config brings
torch's compiler, sharded tensors and a list of all models. On two Zen 3 cores that takes 2.7 s
beside torch itself, and 0.6 s as it is done here: without the stand-in for the compiler 2.1 s,
without sharded tensors hidden 1.3 s, without the kept list 1.1 s. It is for the command's own
processes: transformers has no sharded tensors there afterwards.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fminfer.machine.threads import shorten_openmp_waits
from fminfer.machine.user_cache import make_cache_folder

COMPILER = "torch._dynamo"
# What comes and goes in a few steps of hundreds of rows. Python's own 700 had the
# collector look at all rows' tokens so often that it took a third of the time between steps.
MOST_NEW_OBJECTS = 10_000


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Settle how torch will work, and let it and other libraries be imported.

    It takes pages of 2 MB for weights and KV cache: docs/performance.md has the figures. The
    collector of garbage is kept away from half a million objects that stay to the end:
    to look at them again and again takes a third of the imports' time.
    """
    shorten_openmp_waits()
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    gc.disable()
    try:
        import_transformers()
        yield
    finally:
        gc.freeze()
        gc.set_threshold(MOST_NEW_OBJECTS)
        gc.enable()


def import_transformers() -> None:
    """Import what transformers' configs have in common, unless the process has it.

    The compiler itself is imported as usual once something asks for it.
    """
    if "transformers" not in sys.modules:
        # in some other version: then all is imported as usual
        with suppress(Exception):
            _import_configs()


def _import_configs() -> None:
    import torch

    if COMPILER in sys.modules:
        return  # something wanted it already
    compiler = _NoCompiler(COMPILER)
    # one module of it is used
    compiler.__path__ = [str(Path(torch.__path__[0]) / "_dynamo")]
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with _replacing_module(compiler):
            _cache_list_of_models()
            from transformers import LlamaConfig  # noqa: F401
    finally:
        torch.distributed.is_available = is_available


@contextmanager
def _replacing_module(module: ModuleType) -> Iterator[None]:
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
        return _return_unchanged


def _return_unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return _return_unchanged if function is None else function


def _cache_list_of_models() -> None:
    """Have transformers list its models from what was found last time.

    It reads 2,000 files for that, twice in a process. The function that does is in one of its
    modules, which is imported before the package itself runs.
    """
    from importlib.metadata import version  # not for fminfer --help

    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    package = module_from_spec(spec)
    package.__version__ = version("transformers")  # type: ignore[attr-defined]
    with _replacing_module(package):
        reader: Any = importlib.import_module("transformers.utils.import_utils")
    name = "create_import_structure_from_path"
    setattr(
        reader,
        name,
        _CachedList(Path(spec.origin).parent / "models", getattr(reader, name)),
    )


class _CachedList:
    """What a function finds in a folder, kept in the user's cache for the next process.

    What is kept is of one installation, by its RECORD, which holds a checksum of every
    file. What is damaged, or is no such list, is found again.

    Args:
        read: the function; of other folders it is asked each time.
    """

    def __init__(self, folder: Path, read: Callable[[Any], Any]) -> None:
        from importlib.metadata import distribution

        self._folder = folder
        self._read = read
        installed = distribution("transformers")
        is_this = Path(str(installed.locate_file("transformers/models"))) == folder
        record = installed.read_text("RECORD") or ""
        is_whole = "transformers/models/__init__.py,sha256=" in record
        cache = make_cache_folder() if is_this and is_whole else None
        key = hashlib.sha256(record.encode()).hexdigest()[:16]
        self._path = None if cache is None else cache / f"transformers-{key}.json"
        self._list: Any = None

    def __call__(self, path: Any) -> Any:
        if Path(path) not in (self._folder, self._folder / "__init__.py"):
            return self._read(path)
        if self._list is None:
            self._list = self._load()
        if self._list is None:
            self._list = self._read(path)
            self._save()
        return self._list

    def _load(self) -> Any:
        if self._path is None:
            return None
        # Not there, or damaged:
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            digest, _, text = self._path.read_text().partition("\n")
            if digest == _digest(text):
                return _list_from_json(json.loads(text))
        return None

    def _save(self) -> None:
        if self._path is None:
            return
        text = json.dumps(_list_to_json(self._list))
        # No room, or a list of another form: then it is found again next time.
        with suppress(OSError, ValueError, TypeError):
            if _list_from_json(json.loads(text)) != self._list:
                return
            descriptor, part = tempfile.mkstemp(dir=self._path.parent)
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"{_digest(text)}\n{text}")
                os.replace(part, self._path)  # whole or not at all
            finally:
                Path(part).unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _list_to_json(value: Any) -> Any:
    """Return transformers' list for JSON.

    Sets become lists, and dicts {"items": [[key, value], …]}.
    """
    if isinstance(value, dict):
        items = [
            [_list_to_json(key), _list_to_json(each)] for key, each in value.items()
        ]
        return {"items": items}
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _list_from_json(value: Any, *, is_key: bool = False) -> Any:
    """Return the list again; raise ValueError, TypeError or KeyError if it is none."""
    if isinstance(value, list):
        if not all(isinstance(each, str) for each in value):
            raise ValueError("a set of something else than names")
        return frozenset(value) if is_key else set(value)
    if is_key and isinstance(value, str):
        return value
    if is_key or not isinstance(value, dict):
        raise ValueError("neither a name, nor a set of names, nor a table")
    return {
        _list_from_json(key, is_key=True): _list_from_json(each)
        for key, each in value["items"]
    }
