#!/usr/bin/env python
"""Where the time of a run goes: products, attention, the head, drawing, the rest, and waiting.

A workload of against_transformers.py is answered once to warm up and once more with a
clock around each part of the stage. "Rest" is what is left of a step: norms, rotary, activation,
residuals and Python; "waiting" is the stage without a step. The arithmetic of the products,
over their time, stands beside the machine's roof, measured in the same process.

    python benchmarks/profile_steps.py --workload a --dtype float32
    python benchmarks/profile_steps.py --workload a --workload b --workload c --plot profile.svg
    python benchmarks/profile_steps.py --dtype bfloat16 --model FOLDER

FOLDER is a checkpoint with 32,000 tokens or more, as those that peers.py leaves in its --folder.

A table comes first, one JSON line last.
"""

from __future__ import annotations

import inspect
import json
import math
import os

# as the command does, before torch is imported
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any

import click
import torch
from against_transformers import SIZE, gemm_gflops, make_workload

import fminfer
from fminfer.compute.attention.kernel_attention import CpuAttention
from fminfer.compute.attention.kv_cache import StepAttention
from fminfer.compute.attention.paged_attention import PlainAttention
from fminfer.forward import stage as stage_module
from fminfer.forward.whole_layers import Spent, WholeLayer
from fminfer.models.tensor_specs import layer_specs

# Functions that are timed: who has it, its name, and the part that its time is of.
TIMED: list[tuple[Any, str, str]] = [
    (StepAttention, "__call__", "attention"),
    (PlainAttention, "lay_out", "planning"),
    (CpuAttention, "lay_out", "planning"),
    (stage_module, "sample_tokens", "drawing"),
    (stage_module, "score_tokens", "drawing"),
]
PARTS = ["products", "attention", "head", "drawing", "planning", "rest", "waiting"]
COLOURS = ["#4f86b8", "#e8983e", "#7ba05b", "#c9b458", "#a46fb0", "#999999", "#eeeeee"]


class Clock:
    """Adds up the seconds of parts; a part's time is not counted to the one around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.flops = 0
        self.spent = Spent()  # within whole layers
        self._inner: list[float] = []

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


def clock_stage(engine: fminfer.Engine, clock: Clock) -> None:
    """Put the clock around the parts of an engine's only stage."""
    stage: Any = engine.pipeline.stages._run.__self__  # type: ignore[attr-defined]
    for place, layer in enumerate(stage._network.layers):
        if isinstance(layer, WholeLayer):
            layer.step.spent = clock.spent
            stage._network.layers[place] = count_layer_flops(clock, layer)
            continue
        for part in (layer.attention, layer.mlp):
            for name, product in getattr(part, "products", {}).items():
                specs = layer_specs(layer.spec, stage._network.model.hidden_size)
                shape = specs[f"{name}.weight"].shape
                part.products[name] = count_flops(
                    clock, shape, clock.wrap("products", product)
                )
    stage._head = CountedHead(stage._head, clock)
    for owner, name, part in TIMED:
        timed = clock.wrap(part, getattr(owner, name))
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(timed) if is_static else timed)
    engine.pipeline.stages._run = clock.wrap("rest", stage.run)  # type: ignore[attr-defined]


class CountedHead:
    """A head with a clock around it."""

    def __init__(self, head: Any, clock: Clock) -> None:
        self.vocab_size = head.vocab_size
        self._head = clock.wrap("head", head)

    def __call__(self, hidden: torch.Tensor) -> Any:
        return self._head(hidden)


def count_flops(
    clock: Clock, shape: tuple[int, ...], product: Callable[..., Any]
) -> Callable[..., Any]:
    def counted(x: torch.Tensor) -> Any:
        clock.flops += 2 * math.prod(shape) * (x.numel() // x.shape[-1])
        return product(x)

    return counted


def count_layer_flops(clock: Clock, layer: WholeLayer) -> Callable[..., Any]:
    qkv, *others = (getattr(layer.layer, name) for name in ("qkv", "out", "up", "down"))

    def counted(x: torch.Tensor, *args: Any) -> Any:
        out, more = layer(x, *args)
        clock.flops += 2 * len(x) * qkv.inputs * qkv.outputs
        clock.flops += (
            2 * len(out) * sum(linear.inputs * linear.outputs for linear in others)
        )
        return out, more

    return counted


def profile(workload: str, scale: float, options: dict[str, Any]) -> dict[str, Any]:
    """Answer a workload twice and return the second time's seconds by part."""
    engine = fminfer.Engine(**options)
    rows = make_workload(workload, scale)
    clock = Clock()
    for number in range(2):
        fresh = [
            row | {"prompt": [(i + number) % 32000 for i in row["prompt"]]}
            for row in rows
        ]
        if number:
            clock_stage(engine, clock)
        num_steps = engine.stats.num_steps
        started = time.perf_counter()
        for record in engine.run(fresh):
            assert not record.error, record.error
        wall_s = time.perf_counter() - started
    engine.close()
    seconds = defaultdict(float, clock.seconds)
    for part in ("products", "attention"):
        seconds[part] += getattr(clock.spent, part)
        seconds["rest"] -= getattr(clock.spent, part)
    seconds["waiting"] = wall_s - sum(seconds.values())
    return {
        "workload": workload,
        "wall_s": wall_s,
        "steps": engine.stats.num_steps - num_steps,
        "product_gflops": clock.flops / max(seconds["products"], 1e-9) / 1e9,
        "seconds": {part: seconds.get(part, 0.0) for part in PARTS},
    }


def draw(runs: list[dict[str, Any]], title: str) -> str:
    """Return an SVG picture, a bar a run."""
    left = 110
    width = 640
    bar = 28
    longest = max(run["wall_s"] for run in runs)
    height = 70 + len(runs) * (bar + 10)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 80}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        (
            '<rect width="100%" height="100%" fill="white"/><text x="8" '
            f'y="18">{escape(title)}</text>'
        ),
    ]
    for place, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        x = left + place * 90
        out.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 16}" y="41">{part}</text>')
    for row, run in enumerate(runs):
        y = 56 + row * (bar + 10)
        x = float(left)
        out.append(f'<text x="8" y="{y + 18}">{escape(run["name"])}</text>')
        for part, colour in zip(PARTS, COLOURS, strict=True):
            wide = run["seconds"][part] / longest * width
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{bar}" fill="{colour}"/>'
            )
            if wide > 34:
                text = f"{run['seconds'][part]:.1f}"
                out.append(
                    f'<text x="{x + wide / 2 - 10:.1f}" y="{y + 18}">{text}</text>'
                )
            x += wide
        out.append(f'<text x="{x + 6:.1f}" y="{y + 18}">{run["wall_s"]:.1f} s</text>')
    return "\n".join([*out, "</svg>"])


@click.command()
@click.option(
    "--workload", "workloads", multiple=True, default=["a"], show_default=True
)
@click.option("--model", help=f"A folder or a hub id; random {SIZE} without.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Share of the rows.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it, as SVG.")
def main(
    workloads: tuple[str, ...],
    model: str | None,
    dtype: str,
    kernels: str,
    scale: float,
    plot: Path | None,
) -> None:
    """Print where the time goes."""
    of_model = {"model": model} if model else {"random_init": SIZE}
    options = {**of_model, "dtype": dtype, "kernels": kernels}
    originals = [inspect.getattr_static(owner, name) for owner, name, _ in TIMED]
    runs = []
    for workload in workloads:
        runs.append(
            profile(workload, scale, options) | {"name": f"workload {workload}"}
        )
        for (owner, name, _), original in zip(TIMED, originals, strict=True):
            setattr(owner, name, original)
    roof = gemm_gflops(dtype)
    print(
        f"{'':12}{'wall s':>8}{'steps':>7}" + "".join(f"{part:>11}" for part in PARTS)
    )
    for run in runs:
        shares = "".join(
            f"{run['seconds'][part] / run['wall_s']:>11.1%}" for part in PARTS
        )
        print(f"{run['name']:12}{run['wall_s']:8.1f}{run['steps']:7}{shares}")
        print(f"{'':12}products at {run['product_gflops']:.0f} of {roof:.0f} GFLOP/s")
    if plot is not None:
        plot.write_text(
            draw(runs, f"{model or SIZE}, {dtype}, kernels {kernels}: seconds by part")
        )
    print(json.dumps({"dtype": dtype, "roof_gflops": roof, "runs": runs}))


if __name__ == "__main__":
    main()
