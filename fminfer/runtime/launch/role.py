"""What a process is in a run. It is decided here, once, and handed to all the rest.

alone      the run's only process
starter    the run's own process; it starts the others on this machine
apart      one of ranks that a cluster's launcher, or a user, has started
rank       started by rank 0 of its pipeline, whose later layers it computes
member     started by the run's own process, as rank 0 of one of several pipelines
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from typing_extensions import Self

from fminfer.core.config import EngineConfig
from fminfer.pipeline.ranks import RankConfig, RankPlace, Spread, find_rank_place

Kind = Literal["alone", "starter", "apart", "rank", "member"]


@dataclass(slots=True, frozen=True)
class Role:
    """One process's part in a run."""

    kind: Kind
    spread: Spread = field(default_factory=Spread)
    # its place among ranks that meet; None: it meets none
    facts: RankPlace | None = None
    link: int | None = None  # of a member: the descriptor of its connection to the run

    @property
    def is_first(self) -> bool:
        """Return whether this process speaks to the user; ranks without a number may
        all do so."""
        if self.kind == "apart":
            return self.facts is not None and not self.facts.rank
        return self.kind in ("alone", "starter")

    @property
    def children(self) -> list[str]:
        """Name the processes that the run's own one starts: pipelines, or ranks of its own."""
        if self.kind == "starter" and self.spread.num_pipelines > 1:
            return [f"pipeline {number}" for number in range(self.spread.num_pipelines)]
        return rank_names(self.spread.num_ranks) if self.kind == "starter" else []


def find_role(ranks: RankConfig, environ: Mapping[str, str]) -> Role:
    """Decide what a process of the command is."""
    facts = find_rank_place(ranks, environ)
    groups = ranks.data_group_size
    shards = ranks.tensor_parallel_size
    num_stages = (
        ranks.num_stages if facts is None else facts.world_size // (groups * shards)
    )
    spread = Spread(
        num_stages, groups, shards, ranks.join_timeout_s, ranks.rank_timeout_s
    )
    if facts is not None:
        return Role("apart", spread, facts)
    return Role("alone" if spread.num_ranks * groups == 1 else "starter", spread)


def rank_names(num_ranks: int) -> list[str]:
    """Name the ranks of a pipeline that its rank 0 starts."""
    return [f"rank {rank}" for rank in range(1, num_ranks)]


@dataclass(slots=True, frozen=True)
class ChildOptions:
    """How the processes of a run behave that others of it have started."""

    grace_s: float = 0.0
    is_verbose: bool = False
    # Whoever started it ends when the run fails. Otherwise that is somebody's program,
    # and goes on.
    is_of_command: bool = False


@dataclass(slots=True, frozen=True)
class Task:
    """What a process is told by the one that started it."""

    role: Role
    config: EngineConfig
    child_options: ChildOptions

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read such a line."""
        fields = json.loads(line)
        role = fields["role"]
        facts = None if role["facts"] is None else RankPlace(**role["facts"])
        return cls(
            Role(role["kind"], Spread(**role["spread"]), facts, role["link"]),
            EngineConfig.from_fields(fields["config"]),
            ChildOptions(**fields["child_options"]),
        )
