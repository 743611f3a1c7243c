"""The table of ways to run a file, for people and as JSON; every time in it is predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fminfer.core.quantities import counted, show_bytes, show_short
from fminfer.estimate.run_plans import PlannedRun
from fminfer.plan.roofs import Roofs

MOST_ROWS = 12  # that are shown, unless all are asked for
HEAD = ["groups", "stages", "tp", "weights", "offload", "a rank", "KV tokens"]
HEAD += ["load", "run", "ms/token", "bound by"]


@dataclass(slots=True, frozen=True)
class PlanReport:
    """The ways to run a file on some devices."""

    kind: str  # of devices
    runs: list[PlannedRun]  # the fastest one first, those that do not fit last
    roofs: Roofs

    @property
    def fitting(self) -> list[PlannedRun]:
        """Those that can be."""
        return [run for run in self.runs if not run.why_not]

    def to_dict(self) -> dict[str, Any]:
        """Return everything."""
        found = {"kind": self.kind, "is_predicted": True, "roofs": asdict(self.roofs)}
        return found | {"runs": [run.to_dict() for run in self.runs]}

    def to_text(self, *, is_all: bool = False) -> str:
        """Return the table, and why others do not fit."""
        fitting, others = self.fitting, [run for run in self.runs if run.why_not]
        shown = fitting if is_all else fitting[:MOST_ROWS]
        rows = [HEAD, *map(_cells, shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self._title()]
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}")
        if len(shown) < len(fitting):
            lines.append(f"  … and {len(fitting) - len(shown)} more that fit; --all shows them")
        if is_all:
            lines += [f"  {_name(run)}: {run.why_not}" for run in others]
        for why, count in Counter(run.why_not.split(":")[0] for run in others).items():
            lines.append(f"not       {counted(count, 'way')}: {why}")
        return "\n".join([*lines, *(f"fastest   {_name(run)}" for run in fitting[:1])])

    def _title(self) -> str:
        roofs = self.roofs
        rates = ("memory_rate", "link_rate", "host_rate", "disk_rate")
        told = [f"{n.removesuffix('_rate')} {getattr(roofs, n) / 1e9:,.1f} GB/s" for n in rates]
        nodes = f" on each of {roofs.num_nodes} nodes" * (roofs.num_nodes > 1)
        return (
            f"plans     PREDICTED for {roofs.num_devices} × {self.kind}{nodes}: "
            f"{show_bytes(roofs.device_bytes)}, {roofs.arithmetic_rate / 1e12:,.3g} TFLOP/s, "
            f"{', '.join(told)}"
        )


def _name(run: PlannedRun) -> str:
    return run.flags or "one process, without flags"


def _cells(run: PlannedRun) -> list[str]:
    assert run.plan is not None, "a run that fits is planned"
    config, num = run.config, sum(len(each.numbers) for each in run.streamed)
    return [
        *map(str, (config.data_group_size, config.num_stages, config.tensor_parallel_size)),
        *(run.plan.held_in, f"{num} {run.streamed[0].place}" if num else "off"),
        *(show_bytes(run.rank_bytes), f"{run.plan.num_kv_tokens:,}"),
        *(show_short(run.load_s), show_short(run.run_s)),
        *(f"{run.ms_token:,.3f}" if run.ms_token < 10 else f"{run.ms_token:,.0f}", run.bound),
    ]
