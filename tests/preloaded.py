"""What the processes that tests fork have imported already: all that a process of the command has.

transformers comes first, without a compiler and sharded tensors, as in such a process. A fork that
had to import its configs by itself took two seconds of a core.
"""

from fminfer.machine.library_imports import import_transformers

import_transformers()

import fminfer.batch.run_process
import fminfer.cli.app
import fminfer.server.http
import fminfer.server.serving
import fminfer.worker.part_process  # noqa: F401
