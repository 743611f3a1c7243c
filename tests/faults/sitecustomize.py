"""Makes one rank of a run fail at a chosen moment; Python imports it from a folder in its path.

FAULT is "kind rank phase": raise, kill, stop or hang; which rank; during load, prefill
or decode. One that hangs still beats. In decode it waits until a row is finished, which the
journal FAULT_ROWS holds. FAULT_TIME is told when it happens.
"""

import os
import signal
import sys
import time
from pathlib import Path

kind, _, place = os.environ.get("FAULT", "").partition(" ")
rank, _, phase = place.partition(" ")


def _fail() -> None:
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if kind == "raise":
        raise RuntimeError("a fault that the test wants")
    if kind == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


# asked late: a rank may be a fork of the one that imported this
def _is_here() -> bool:
    kinds = ("rank ", "pipeline ")
    own = [argument for argument in sys.orig_argv if argument.startswith(kinds)]
    return rank == (own[0].rpartition(" ")[2] if own else "0")


if kind and "-m" in sys.orig_argv:
    import fminfer.runtime.load.builder
    import fminfer.runtime.load.one_pipeline
    from fminfer.forward.stage import Stage

    open_weights = fminfer.runtime.load.builder.open_weights
    forward = Stage.forward

    def load_or_fail(*args, **options):
        if phase == "load" and _is_here():
            _fail()
        return open_weights(*args, **options)

    def forward_or_fail(self, step, hidden):
        is_prefill = step.lengths.max() > 1
        rows = Path(os.environ["FAULT_ROWS"])
        # the first is no row
        is_late = rows.exists() and rows.read_bytes().count(b"\n") > 1
        is_now = (phase == "prefill" and is_prefill) or (phase == "decode" and is_late)
        if is_now and _is_here():
            _fail()
        return forward(self, step, hidden)

    if kind == "hang":
        fminfer.runtime.load.one_pipeline.limit_step = lambda plan: 2.0
    fminfer.runtime.load.builder.open_weights = load_or_fail
    Stage.forward = forward_or_fail
