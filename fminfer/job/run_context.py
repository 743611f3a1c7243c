"""The task of one process of the command, with all that its parts need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fminfer.core.config import EngineConfig
from fminfer.files.output_paths import Plan
from fminfer.job.run_paths import JobPaths
from fminfer.machine.stopper import Stopper
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import Manners, Role


@dataclass(slots=True, frozen=True)
class ProcessContext:
    """One of the processes of a command that has an engine."""

    config: EngineConfig
    role: Role
    children: Processes  # what this process has started
    stopper: Stopper  # hears that the command is to stop
    end: Callable[[str], None]  # ends this process at once; it is told the kind of an error
    elapsed_s: Callable[[], float]  # since the command started
    is_quiet: bool
    is_verbose: bool

    @property
    def manners(self) -> Manners:
        """How the processes that this one has started should behave."""
        return Manners(self.stopper.grace_s, self.is_verbose, is_of_command=True)


@dataclass(slots=True, frozen=True)
class RunContext(ProcessContext):
    """A run of the command in one of its processes."""

    job: JobPaths
    plan: Plan | None  # inputs and outputs; None: rank 0 finds them itself, once it is known
