"""Makes this process rank 0 of a pipeline whose other ranks it starts."""

from __future__ import annotations

from fminfer.core.config import EngineConfig
from fminfer.pipeline.group import Group
from fminfer.pipeline.meeting import End
from fminfer.runtime.launch.processes import Processes
from fminfer.runtime.launch.role import ChildOptions, Spread


def lead_ranks(
    config: EngineConfig,
    ranks: Processes,
    spread: Spread,
    child_options: ChildOptions,
    end: End | None,
) -> Group:
    """Be rank 0 of processes that this one has started.

    Args:
        end: ends this process at once; None: it is not ours to end.
    """
    return Group(
        ranks.become_ranks(config, spread, child_options),
        join_timeout_s=spread.join_timeout_s,
        rank_timeout_s=spread.rank_timeout_s,
        end=end,
        children=ranks,
    )
