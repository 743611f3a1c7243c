"""Starts an engine in this process, and notes which of our functions are entered on the way.

It is run by its path, with the code of any commit: it imports nothing of the tests.

    python start_tracer.py engine notes.json
    python start_tracer.py run notes.json lines.jsonl answers.jsonl
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import orjson

import fminfer

PACKAGE = Path(fminfer.__file__).parent
FIRST = ("checkpoint.py", "open_model")  # a file may stand in any package
LAST = ("stage.py", "Stage")
PLANNER = "make_plan"
MOST_CALLERS = 5  # of a plan or a scan, that are noted

Function = tuple[str, str]  # its file in the package, and its name in there
Step = tuple[Function, Function]  # caller and callee


class StartTracer:
    """Follows calls of all threads; a walk goes from FIRST until an object of LAST is made."""

    def __init__(self) -> None:
        self.functions: set[Function] = set()
        self.steps: dict[Step, int] = {}  # how often each was called
        self.plans: list[list[str]] = []  # the callers of each
        self.scans: list[list[str]] = []
        self._names: dict[CodeType, Function | None] = {}
        self._is_walking = False
        self._is_done = False

    def start(self) -> None:
        """Follow calls from here on, and those of threads that start later."""
        json.loads = self._noting_scans(json.loads)
        orjson.loads = self._noting_scans(orjson.loads)
        threading.setprofile(self._follow)
        sys.setprofile(self._follow)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def notes(self) -> dict[str, Any]:
        """Return all that was noted, as JSON takes it."""
        assert self._is_done, f"{FIRST} was not called, or no {LAST} was made"
        return {
            "functions": sorted(self.functions),
            "steps": [
                [*a, *b, number] for (a, b), number in sorted(self.steps.items())
            ],
            "plans": self.plans,
            "scans": self.scans,
        }

    def _follow(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        function = self._name(frame.f_code)
        if function is None:
            return
        if event == "return":
            if self._is_walking and is_made(frame):
                self._is_walking = False
                self._is_done = True
            return
        if function[1] == PLANNER:
            self.plans.append(self._callers(frame.f_back))
        file = function[0].rpartition("/")[2]
        if (file, function[1]) == FIRST and not self._is_done:
            self._is_walking = True
        if not self._is_walking:
            return
        self.functions.add(function)
        caller = self._find_caller(frame.f_back)
        if caller is not None:
            step = (caller, function)
            self.steps[step] = self.steps.get(step, 0) + 1

    def _name(self, code: CodeType) -> Function | None:
        """Return a function of ours; None: it is a library's, or a part of another function."""
        if code not in self._names:
            path = Path(code.co_filename)
            # Modules, class bodies, lambdas and comprehensions are none.
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            is_named = not code.co_name.startswith("<")
            if is_function and is_named and path.is_relative_to(PACKAGE):
                # Python 3.10 has the short name only.
                name = getattr(code, "co_qualname", code.co_name)
                self._names[code] = (path.relative_to(PACKAGE).as_posix(), name)
            else:
                self._names[code] = None
        return self._names[code]

    def _find_caller(self, frame: FrameType | None) -> Function | None:
        """Return the nearest function of ours, from a frame upwards."""
        while frame is not None:
            function = self._name(frame.f_code)
            if function is not None:
                return function
            frame = frame.f_back
        return None

    def _callers(self, frame: FrameType | None) -> list[str]:
        """Return the nearest functions of ours, from a frame upwards."""
        found: list[str] = []
        while frame is not None and len(found) < MOST_CALLERS:
            function = self._name(frame.f_code)
            if function is not None:
                found.append(f"{function[0]}:{function[1]}")
            frame = frame.f_back
        return found

    def _noting_scans(self, loads: Callable[..., Any]) -> Callable[..., Any]:
        """Return a parser of JSON that notes the headers of safetensors files."""

        def load(*args: Any, **options: Any) -> Any:
            value = loads(*args, **options)
            if isinstance(value, dict) and any(
                isinstance(each, dict) and "data_offsets" in each
                for each in value.values()
            ):
                self.scans.append(self._callers(sys._getframe(1)))
            return value

        return load


def is_made(frame: FrameType) -> bool:
    """Tell whether the function that returns has just made an object of LAST."""
    if frame.f_code.co_name != "__init__":
        return False
    file = Path(frame.f_code.co_filename).name
    return (file, type(frame.f_locals.get("self")).__name__) == LAST


def start_engine(tracer: StartTracer) -> None:
    """Start the engine of the Python API, with the demo model on the CPU."""
    from fminfer.core.config import EngineConfig
    from fminfer.runtime.engine_api import Engine

    tracer.start()
    with Engine(EngineConfig(device="cpu")):
        tracer.stop()


def run_command(tracer: StartTracer, source: str, output: str) -> None:
    """Run the command with the demo model on the CPU."""
    import fminfer.job.model_answering
    from fminfer.cli.app import main

    assert fminfer.job.model_answering is not None, (
        "its imports are no part of the walk"
    )
    words = ["run", source, "--output", output, "--device", "cpu", "--quiet"]
    tracer.start()
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        tracer.stop()


def trace() -> None:
    """Do what the command line says, and write the notes."""
    kind, notes, *paths = sys.argv[1:]
    tracer = StartTracer()
    if kind == "engine":
        start_engine(tracer)
    else:
        run_command(tracer, *paths)
    Path(notes).write_text(json.dumps(tracer.notes()))


if __name__ == "__main__":
    trace()
