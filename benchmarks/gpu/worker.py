"""One process of a phase: runs its share of the cases and writes down each at once.

python -m benchmarks.gpu.worker MODULE < JOB.json

It imports the phase's module at once, and then waits for the job. So the imports of a phase run
beside the phase before it. Without a job it ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, Wrong

BROKEN_STATUS = 3  # the GPU's context is broken: the other cases need another process
TEXT_SIZE = 4000
START = "start"  # stands for the cases of a process that ends before it has any


@dataclass(slots=True, frozen=True)
class Job:
    """What one process is told.

    Args:
        place, num_places: which share of the cases is its own.
        only: names of cases; none: all of its share.
        is_again: failed cases are run once more, each launch waited for.
    """

    phase: int
    setting: Setting
    place: int = 0
    num_places: int = 1
    only: tuple[str, ...] = ()
    is_again: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        setting = fields.pop("setting")
        for name in ("results", "prepared", "scratch"):
            setting[name] = None if setting[name] is None else Path(setting[name])
        return Job(
            **fields | {"setting": Setting(**setting), "only": tuple(fields["only"])}
        )

    def share(self, cases: Iterable[Case]) -> list[Case]:
        """Return the cases that are this process's."""
        if self.only:
            return [case for case in cases if case.name in self.only]
        return list(cases)[self.place :: self.num_places]


def wait_and_work(name: str) -> int:
    """Import a phase's module, wait for a job and run it; return the exit status."""
    found: ModuleType | str
    try:
        found = importlib.import_module(name)
    except Exception:
        found = traceback.format_exc()[-TEXT_SIZE:]
    line = sys.stdin.readline()
    return work(Job.from_json(line), found) if line else 0


def work(job: Job, module: ModuleType | str) -> int:
    """Run a process's cases; return its exit status.

    Args:
        module: that has the phase's cases, or why it cannot be imported.
    """
    base: dict[str, Any] = {"phase": job.phase, "worker": job.place}
    if job.is_again:
        base["again"] = True
    path = job.setting.results
    if isinstance(module, str):
        failed = {"case": START, "state": "failed", "text": module, "figures": {}}
        results.append(path, base | {"cases": [START]})
        results.append(path, base | failed)
        return 0
    cases = job.share(module.cases(job.setting))
    results.append(path, base | {"cases": [case.name for case in cases]})
    for case in cases:
        line = base | {"case": case.name}
        results.append(path, line | {"state": "running"})
        started = time.perf_counter()
        found = run_case(case)
        results.append(path, line | found | {"seconds": time.perf_counter() - started})
        if found["state"] == "failed" and _is_broken(job.setting):
            return BROKEN_STATUS
        if job.num_places > 1 and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()  # the other processes may need it
    return 0


def run_case(case: Case) -> dict[str, Any]:
    """Run one case, whatever it raises."""
    figures: Figures = {}
    text = ""
    try:
        figures = case.run()
        state = "passed"
    except Skipped as reason:
        state = "skipped"
        text = str(reason)
    except Wrong as wrong:
        state = "wrong"
        text = str(wrong)
        figures = wrong.figures
    except Exception:
        state = "failed"
        text = traceback.format_exc()[-TEXT_SIZE:]
    return {"state": state, "text": text, "figures": figures}


def _is_broken(setting: Setting) -> bool:
    """Tell whether nothing works on the GPU any more, as after a wrong access."""
    if setting.device != "cuda" or "torch" not in sys.modules:
        return False
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    faulthandler.enable()  # whoever is out of time is asked with SIGABRT where it is
    sys.exit(wait_and_work(sys.argv[1]))
