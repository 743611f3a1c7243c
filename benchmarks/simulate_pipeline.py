#!/usr/bin/env python
"""The engine's own schedule on machines that are not there: a pipeline with a clock of its own.

The real loop, scheduler and KV books run; only the stages are simulated. A stage starts
a step when it is free and the step has come; how long it takes is arithmetic
(pipeline_costs.py). Rows are made up, their lengths evenly spread around those asked
for. Rates and busy shares are those of the middle of the run, where half of all tokens
are drawn: a long file has little beginning and end.

    python benchmarks/simulate_pipeline.py --model opt-175b --machine a100-80gb --stages 8
    python benchmarks/simulate_pipeline.py --model opt-175b --machine a100-80gb --sweep

A table comes first, one JSON line last. It is no measurement, and has no peer beside it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import Any

import click
from pipeline_clock import Driver, Engine, SimulatedPipeline, Workload, run_engine
from pipeline_costs import (
    GB,
    MACHINES,
    SHAPES,
    Link,
    Machine,
    SplitRule,
    build_hops,
    build_stages,
    split,
)

SWEEP = (2, 4, 8, 16, 32, 64)
WAVES = 4  # requests a row that fits: the middle two are measured


@dataclass(slots=True, frozen=True)
class Settings:
    """The command's flags."""

    model: str
    machine: str
    split: SplitRule
    stage_layers: str | None
    micro_batches: int | None
    rows: int
    requests: int | None
    prompt_tokens: int
    max_tokens: int
    spread: float
    budget: int | None
    chunk_size: int
    min_share: int | None
    per_machine: int
    between_gbytes: float | None
    between_us: float | None
    gemm_efficiency: float | None
    memory_efficiency: float | None
    driver_step_ms: float
    driver_token_us: float

    @property
    def device(self) -> Machine:
        """Return the machine with what the flags change of it."""
        machine = MACHINES[self.machine]
        between = Link(
            machine.between.latency_s
            if self.between_us is None
            else self.between_us * 1e-6,
            machine.between.bytes_per_s
            if self.between_gbytes is None
            else self.between_gbytes * GB,
        )
        given = {
            name: value
            for name in ("gemm_efficiency", "memory_efficiency")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(machine, between=between, **given)

    @property
    def row_tokens(self) -> float:
        """Return the tokens that a row keeps, on average."""
        return self.prompt_tokens + self.max_tokens

    def counts(self, num_stages: int) -> list[int]:
        """Return the layers of each stage."""
        if self.stage_layers is not None:
            return [int(count) for count in self.stage_layers.split(",")]
        return split(SHAPES[self.model], self.device, num_stages, self.split)


def simulate(settings: Settings, num_stages: int) -> dict[str, Any] | None:
    """Run one number of stages; return its line of the table, or None if the model does
    not fit."""
    stages = build_stages(
        SHAPES[settings.model], settings.device, settings.counts(num_stages)
    )
    kv_tokens = min(stage.kv_tokens for stage in stages)
    if settings.budget is not None:
        kv_tokens = min(kv_tokens, settings.budget)
    fitting_rows = min(int(kv_tokens / settings.row_tokens), settings.rows)
    if fitting_rows < 1:
        return None
    micro_batches = settings.micro_batches or num_stages + 1
    pipeline = SimulatedPipeline(
        [stage.time_s for stage in stages],
        build_hops(settings.device, num_stages, settings.per_machine),
        Driver(settings.driver_step_ms / 1e3, settings.driver_token_us / 1e6),
        SHAPES[settings.model].hidden * settings.device.dtype_bytes,
    )
    outcome = run_engine(
        pipeline,
        Engine(
            kv_tokens,
            micro_batches,
            settings.rows,
            settings.chunk_size,
            min_share=settings.min_share,
        ),
        Workload(
            settings.requests or WAVES * fitting_rows,
            settings.prompt_tokens,
            settings.max_tokens,
            settings.spread,
        ),
    )
    layers = [stage.num_layers for stage in stages]
    head = {"stages": num_stages, "micro_batches": micro_batches, "layers": layers}
    return head | {"kv_tokens": kv_tokens} | dataclasses.asdict(outcome)


def print_table(results: list[dict[str, Any]]) -> None:
    """Print a line for each number of stages; `×` is the speed-up over the first."""
    print(
        f"{'P':>3}{'M':>4}{'rows':>6}{'KV tokens':>11}{'tok/step':>9}{'gen tok/s':>10}"
        f"{'all tok/s':>10}{'busy':>6}{'min':>6}{'bubble':>8}"
        f"{'×':>7}{'per P':>7}{'round ms':>10}"
    )
    first = results[0]
    for found in results:
        busy = statistics.fmean(found["busy"])
        gain = found["generated_per_s"] / first["generated_per_s"]
        share = gain * first["stages"] / found["stages"]
        print(
            f"{found['stages']:>3}{found['micro_batches']:>4}{found['max_rows_running']:>6}"
            f"{found['kv_tokens']:>11,}{found['tokens_a_step']:>9.0f}"
            f"{found['generated_per_s']:>10,.0f}{found['tokens_per_s']:>10,.0f}"
            f"{busy:>6.0%}{min(found['busy']):>6.0%}{1 - busy:>8.0%}{gain:>7.2f}{share:>7.2f}"
            f"{found['round_s'] * 1e3:>10.1f}"
        )


@click.command()
@click.option("--model", type=click.Choice(list(SHAPES)), required=True)
@click.option("--machine", type=click.Choice(list(MACHINES)), required=True)
@click.option("--stages", default=8, show_default=True, help="P, one device each.")
@click.option("--sweep", is_flag=True, help="P = 2, 4, … 64 instead.")
@click.option("--split", type=click.Choice(["even", "time", "memory"]), default="time")
@click.option("--stage-layers", help="Layers of each stage, as 9,9,8; sets P.")
@click.option("--micro-batches", type=int, help="M; default: P + 1.")
@click.option(
    "--rows", default=4096, show_default=True, help="Most rows that run at once."
)
@click.option(
    "--requests", type=int, help="Rows of the file; default: 4 times those that fit."
)
@click.option(
    "--prompt-tokens", default=256, show_default=True, help="A row, on average."
)
@click.option("--max-tokens", default=128, show_default=True, help="A row, on average.")
@click.option(
    "--spread", default=0.5, show_default=True, help="Lengths differ by this share."
)
@click.option(
    "--budget", type=int, help="Most tokens of KV cache; default: what memory holds."
)
@click.option("--chunk-size", default=512, show_default=True)
@click.option(
    "--min-share", type=int, help="The scheduler's MIN_SPREAD_ROWS; default: its own."
)
@click.option("--per-machine", default=8, show_default=True, help="Devices a machine.")
@click.option(
    "--between-gbytes", type=float, help="Gigabytes a second between machines."
)
@click.option("--between-us", type=float, help="Latency between machines, µs.")
@click.option("--gemm-efficiency", type=float, help="Share of the peak FLOP/s.")
@click.option(
    "--memory-efficiency", type=float, help="Share of the peak memory bandwidth."
)
@click.option(
    "--driver-step-ms", default=0.1, show_default=True, help="The engine's own, a step."
)
@click.option(
    "--driver-token-us", default=20.0, show_default=True, help="And a drawn token."
)
def main(stages: int, sweep: bool, **flags: Any) -> None:
    """Simulate the engine over a pipeline of P stages."""
    settings = Settings(**flags)
    if settings.stage_layers is not None:
        stages = settings.stage_layers.count(",") + 1
    results = []
    for num_stages in SWEEP if sweep else (stages,):
        if num_stages > SHAPES[settings.model].num_layers:
            continue
        found = simulate(settings, num_stages)
        if found is None:
            print(f"P = {num_stages}: the weights and one row do not fit")
        else:
            results.append(found)
    if not results:
        raise SystemExit(1)
    print_table(results)
    ridge = settings.device.ridge_tokens
    print(f"products, not weights, set the pace from {ridge:.0f} tokens a step on")
    summary = dataclasses.asdict(settings) | {"ridge_tokens": ridge, "results": results}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
