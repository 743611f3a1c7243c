"""Opens the model of a run, and plans the run: once in each process, as its part begins."""

from __future__ import annotations

from collections.abc import Callable

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.models.checkpoint import Checkpoint, open_model
from fminfer.pipeline.group import Group
from fminfer.pipeline.ranks import ALONE, Spread
from fminfer.plan.machine_facts import Machine
from fminfer.plan.planning import plan_ahead
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.load.agreement import find_place_of_rank


class Opening:
    """Opens the model, and prepares rank 0, before ranks meet: mistakes are told at once.

    Args:
        checkpoint: the model, if it is open already.
        plan: the run's plan, if this process has made it already.
        is_computing: this process computes; otherwise only if it has a group.
        prepare: is called by rank 0 before others are met.
    """

    def __init__(
        self,
        config: EngineConfig,
        spread: Spread = ALONE,
        *,
        checkpoint: Checkpoint | None = None,
        plan: RunPlan | None = None,
        is_computing: bool = False,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._spread = spread
        self._checkpoint = checkpoint if plan is None else plan.checkpoint
        self._plan = plan
        self._is_computing = is_computing
        self._prepare = prepare

    def __call__(self, rank: int) -> None:
        """Find the model; the weights of one at the hub may be fetched later."""
        if rank == 0:
            self._prepare()
        self._checkpoint = self._checkpoint or open_model(
            self.config, has_weights=False
        )

    def plan_run(self, group: Group | None = None) -> RunPlan:
        """Return the run's plan, with the model's weights on this machine.

        A process that may yet compute nothing asks for no GPU's memory.
        """
        if self._plan is not None:
            return self._plan
        config = self.config
        spread = self._spread
        checkpoint = (self._checkpoint or open_model(config)).with_weights()
        if config.offload != "off" and checkpoint.folder is None:
            raise UsageError(
                "--offload streams layers from a model's files, and random weights "
                "have none. Use --model-name, or leave --offload out"
            )
        place = Machine(
            num_stages=spread.num_stages,
            num_shards=config.tensor_parallel_size,
            num_pipelines=spread.num_pipelines,
            local_size=spread.num_stages * config.tensor_parallel_size,
        )
        is_computing = self._is_computing or group is not None
        if is_computing:
            place = find_place_of_rank(place, group, spread)
        self._plan = plan_ahead(config, checkpoint, place, is_computing=is_computing)
        return self._plan
