"""What the processes that tests fork have imported already: all that a process of the
command has.

transformers comes first, without a compiler and sharded tensors, as in such a process.
A fork that had to import its configs by itself took two seconds of a core.
"""

import importlib

from fminfer.machine.library_imports import import_transformers

import_transformers()
PARTS = (
    "cli.app",
    "job.answering",
    "server.http",
    "runtime.process_roles",
    "runtime.engine_api",
)
LIBRARIES = (
    "sqlite3",
    "sentencepiece",
    "tokenizers.trainers",
    "transformers.convert_slow_tokenizer",
)
try:
    for name in (*(f"fminfer.{part}" for part in PARTS), *LIBRARIES):
        importlib.import_module(name)
except ImportError as error:
    # an ImportError is swallowed
    raise SystemExit(f"tests/preloaded.py: {error}") from error
