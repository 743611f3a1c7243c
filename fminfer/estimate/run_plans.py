"""The ways to spread a run over devices, and the table of them; every time in it is
predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fminfer.core.config import EngineConfig, GroupSizes, Quantized
from fminfer.core.errors import UsageError
from fminfer.core.quantities import describe_bytes, describe_short_time, with_noun
from fminfer.core.terminal import make_table_lines
from fminfer.plan.roofs import Roofs
from fminfer.plan.run_plan import RunPlan, Streamed
from fminfer.plan.slowness import find_slowness

ALL_BITS: tuple[Quantized | None, ...] = (None, "int8", "int4")
MOST_ROWS = 12  # of the table, unless all are asked for
HEAD = ["groups", "stages", "tp", "weights", "offload", "a rank", "KV tokens"]
HEAD += ["load", "run", "ms/token", "bound by"]


@dataclass(slots=True, frozen=True)
class PlannedRun:
    """One way to run a file, with what is predicted of it."""

    config: EngineConfig
    plan: RunPlan | None = None  # None: the options are refused
    why_not: str = ""  # why it cannot run, or does not fit
    load_s: float = 0.0
    run_s: float = 0.0
    ms_token: float = 0.0  # of the run, without loading
    bound: str = ""

    @property
    def flags(self) -> str:
        """The flags of `fminfer run` for it."""
        config = self.config
        values = {
            "--data-group-size": config.data_group_size,
            "--pipeline-group-size": config.num_stages,
            "--tp": config.tensor_parallel_size,
            "--quantize": config.quantize,
            "--offload": config.offload,
        }
        return " ".join(
            f"{k} {v}" for k, v in values.items() if v not in (1, None, "off")
        )

    @property
    def name(self) -> str:
        """Its flags, as people read them."""
        return self.flags or "one process, without flags"

    @property
    def streamed(self) -> list[Streamed]:
        """The streamed layers of each stage."""
        ranks = self.plan.ranks if self.plan else ()
        return [
            rank.streamed for rank in ranks if rank.streamed and not rank.part.shard
        ]

    @property
    def rank_bytes(self) -> int:
        """The most memory that a rank takes without its KV cache."""
        return max(rank.takes.total(0) for rank in self.plan.ranks) if self.plan else 0

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON tells of it."""
        fields: dict[str, Any] = {"flags": self.flags, "why_not": self.why_not}
        if self.plan is None or self.why_not:
            return fields
        fields |= {
            "weight_dtype": self.plan.held_in,
            "why_slower": find_slowness(self.plan),
            "kv_tokens": self.plan.num_kv_tokens,
            "rank_bytes": self.rank_bytes,
            "streamed": [*map(asdict, self.streamed)],
        }
        return fields | {
            n: getattr(self, n) for n in ("load_s", "run_s", "ms_token", "bound")
        }

    def to_cells(self) -> list[str]:
        """Return its row of the table."""
        assert self.plan is not None, "a run that fits is planned"
        config = self.config
        num = sum(len(each.numbers) for each in self.streamed)
        ms_token = (
            f"{self.ms_token:,.3f}" if self.ms_token < 10 else f"{self.ms_token:,.0f}"
        )
        return [
            *map(
                str,
                (
                    config.data_group_size,
                    config.num_stages,
                    config.tensor_parallel_size,
                ),
            ),
            self.plan.held_in,
            f"{num} {self.streamed[0].place}" if num else "off",
            describe_bytes(self.rank_bytes),
            f"{self.plan.num_kv_tokens:,}",
            describe_short_time(self.load_s),
            describe_short_time(self.run_s),
            ms_token,
            self.bound,
        ]


def find_spreads(
    roofs: Roofs, sizes: GroupSizes, kept: Collection[str] = ()
) -> Iterator[tuple[int, int, int]]:
    """Yield the data groups, stages and shards that use all devices; 1 of a `kept`
    option is told.

    Shards of a stage are on one node. A pipeline takes part of a node, or whole nodes.
    """
    num = roofs.num_devices
    size = roofs.num_devices * roofs.num_nodes
    named = {n: getattr(sizes, n) for n in ("data_group_size", "tensor_parallel_size")}
    is_whole = sizes.world_size is not None  # all numbers of ranks are told then
    groups, tp = (
        n if is_whole or n > 1 or name in kept else None for name, n in named.items()
    )
    given_sizes = (groups, sizes.configured_stages, tp)
    for shards in (n for n in range(1, num + 1) if num % n == 0):
        for stages in (n for n in range(1, size + 1) if size // shards % n == 0):
            spread = (size // (shards * stages), stages, shards)
            fits = all(
                size in (None, number)
                for number, size in zip(spread, given_sizes, strict=True)
            )
            if fits and (num % (shards * stages) == 0 or shards * stages % num == 0):
                yield spread


def plan_runs(
    config: EngineConfig,
    roofs: Roofs,
    plan_one: Callable[[EngineConfig], PlannedRun],
    *,
    kept: Collection[str],
) -> list[PlannedRun]:
    """Plan a run in all ways; return the fastest first, and last those that do not fit.

    `kept` are names of options that were given. Without `offload`, layers that do not fit are
    streamed.
    """
    runs: list[PlannedRun] = []
    for groups, stages, shards in find_spreads(roofs, config, kept):
        for quantize in (config.quantize,) if config.quantized_to else ALL_BITS:
            run_config = replace(
                config,
                world_size=None,
                data_group_size=groups,
                pipeline_group_size=stages,
                tensor_parallel_size=shards,
                quantize=quantize,
            )
            runs.append(plan_one(run_config))
            if runs[-1].why_not and "offload" not in kept:
                runs.append(plan_one(replace(run_config, offload="auto")))
    if not runs:
        raise UsageError(
            f"no way uses {with_noun(roofs.num_devices * roofs.num_nodes, 'device')} "
            "with the stages and ranks that flags ask for; --tp must divide the "
            "devices of a node. Change these flags, or --num-devices"
        )
    return sorted(runs, key=lambda each: (bool(each.why_not), each.load_s + each.run_s))


@dataclass(slots=True, frozen=True)
class PlanReport:
    """The ways to run a file on some devices."""

    kind: str  # of devices
    runs: list[PlannedRun]  # the fastest one first, those that do not fit last
    roofs: Roofs

    @property
    def fitting(self) -> list[PlannedRun]:
        """Those that fit."""
        return [run for run in self.runs if not run.why_not]

    def to_dict(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "kind": self.kind,
            "is_predicted": True,
            "roofs": asdict(self.roofs),
            "runs": [run.to_dict() for run in self.runs],
        }

    def to_text(self, *, is_all: bool = False, columns: int = 0) -> str:
        """Return the table, and why other plans do not fit, for a terminal of `columns`."""
        fitting = self.fitting
        others = [run for run in self.runs if run.why_not]
        shown = fitting if is_all else fitting[:MOST_ROWS]
        rows = [HEAD, *(run.to_cells() for run in shown)]
        lines = [self._title()]
        lines += [
            f"  {line}" for line in make_table_lines(rows, columns and columns - 2)
        ]
        if len(shown) < len(fitting):
            lines.append(
                f"  … and {len(fitting) - len(shown)} more that fit; --all shows them"
            )
        if is_all:
            lines += [f"  {run.name}: {run.why_not}" for run in others]
        for why, count in Counter(run.why_not.split(":")[0] for run in others).items():
            lines.append(f"not       {with_noun(count, 'way')}: {why}")
        nearest = sorted(others, key=lambda run: run.rank_bytes) if not fitting else []
        lines += [f"nearest   {r.name}: {r.plan.shortage}" for r in nearest if r.plan][
            :1
        ]
        fastest = fitting[:1]
        reasons = (
            each for run in fastest if run.plan for each in find_slowness(run.plan)
        )
        lines += [f"fastest   {run.name}" for run in fastest]
        return "\n".join([*lines, *(f"slower    {reason}" for reason in reasons)])

    def _title(self) -> str:
        roofs = self.roofs
        rates = ("memory_rate", "link_rate", "host_rate", "disk_rate")
        rate_texts = [
            f"{n.removesuffix('_rate')} {getattr(roofs, n) / 1e9:,.1f} GB/s"
            for n in rates
        ]
        nodes = f" on each of {roofs.num_nodes} nodes" if roofs.num_nodes > 1 else ""
        return (
            f"plans     PREDICTED for {roofs.num_devices} × {self.kind}{nodes}: "
            f"{describe_bytes(roofs.device_bytes)}, "
            f"{roofs.arithmetic_rate / 1e12:,.3g} TFLOP/s, "
            f"{', '.join(rate_texts)}"
        )
