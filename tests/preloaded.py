"""What the processes that tests fork have imported already: all that a process of the command has.

transformers comes first, without a compiler and sharded tensors, as in such a process. A fork that
had to import its configs by itself took two seconds of a core.
"""

import importlib

from fminfer.machine.library_imports import import_transformers

import_transformers()
for name in ("cli.app", "job.run_process", "server.http", "runtime.process_roles"):
    importlib.import_module(f"fminfer.{name}")
