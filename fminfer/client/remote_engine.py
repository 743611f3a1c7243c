"""Servers elsewhere as the engine of a job."""

from __future__ import annotations

import os
from collections.abc import Callable

from typing_extensions import Self

from fminfer.client.costs import Costs
from fminfer.client.dialects import DIALECTS
from fminfer.client.engine_key import read_engine_key
from fminfer.client.remote_core import RemoteCore
from fminfer.client.remote_intake import RemoteIntake
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_finding import find_servers
from fminfer.core.config import EngineConfig
from fminfer.core.errors import StoppedError, UsageError
from fminfer.engine.engine_core import Event
from fminfer.files.tables.table_options import TableOptions
from fminfer.runtime.job_engine import EngineTraits, OnStep, OnWork
from fminfer.runtime.lines.runs import Runs


class RemoteEngine(RemoteCore):
    """Answers the lines of a job, as `runtime.job_engine.JobEngine` says.

    Args:
        costs: of its answers; None: nobody said what they cost.
        end_run: is told once why the run is to end: it has cost enough.
        print_note: prints what the user should know.
    """

    traits = EngineTraits("elsewhere")

    def __init__(
        self,
        servers: list[ServerFacts],
        options: RemoteOptions,
        key: str,
        intake: RemoteIntake,
        *,
        costs: Costs | None = None,
        end_run: Callable[[StoppedError], None] = lambda reason: None,
        print_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(servers, options, key, print_note=print_note)
        self.intake = intake
        self.facts = servers[0]
        self.model_name = self.facts.model
        self.runs = Runs(self, intake, servers[0].model, has_long_steps=False)
        self._costs = costs
        self._end_run = end_run
        self._on_work: OnWork = lambda num_fed, num_drawn, num_running: None

    @classmethod
    def connect(
        cls,
        config: EngineConfig,
        options: RemoteOptions,
        print_note: Callable[[str], None],
    ) -> Self:
        """Return the engine of the servers that options name; wait for one that answers.

        Raises:
            ServerError: none has answered for `engine_patience_s`.
            UsageError: a key, a model or an option that is wrong.
        """
        key = read_engine_key(options, os.environ)
        servers = find_servers(options, config.model, key, print_note)
        intake = make_remote_intake(config, servers[0])
        return cls(servers, options, key, intake, print_note=print_note)

    @property
    def warnings(self) -> dict[str, int]:
        """Warnings about requests that were answered, and how often each occurred."""
        return self.intake.warnings.to_dict()

    def follow(
        self, on_work: OnWork | None = None, on_step: OnStep | None = None
    ) -> None:
        """Have the tokens of answers told as they come; there are no steps."""
        if on_work is not None:
            self._on_work = on_work

    def stop(self, grace_s: float) -> None:
        """End the run in good order, as `Engine.stop` does."""
        self.runs.stop(grace_s)

    def step(self) -> list[Event]:
        """Wait a little for answers, and return them; end the run if they cost too much."""
        stats = self.stats
        num_fed = stats.num_prompt_tokens
        num_drawn = stats.num_generated_tokens
        events = super().step()
        num_fed = stats.num_prompt_tokens - num_fed
        num_drawn = stats.num_generated_tokens - num_drawn
        self._on_work(num_fed, num_drawn, len(self._running))
        if self._costs is not None and (end := self._costs.find_end(stats)) is not None:
            self._costs = None  # told once
            self._end_run(end)
        return events


def check_choices(table: TableOptions, facts: ServerFacts) -> None:
    """Raise a UsageError for --choices if servers tell no probabilities of labels."""
    if table.choices is not None and facts.dialect != "fminfer":
        raise UsageError(
            f"--choices asks for the probability of each label, which "
            f"{DIALECTS[facts.dialect].title} does not tell. For labels alone give "
            '--field \'structured_outputs={"choice": ["yes", "no"]}\''
        )


def make_remote_intake(config: EngineConfig, facts: ServerFacts) -> RemoteIntake:
    """Return what opens lines for servers with these facts."""
    names = frozenset({facts.model, facts.model.rpartition("/")[2]})
    is_checked = config.check_model or config.model is None
    return RemoteIntake(config, DIALECTS[facts.dialect], names if is_checked else None)
