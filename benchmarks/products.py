#!/usr/bin/env python
"""How much of the processor packed products use, by rows and by how weights are stored.

Each product multiplies rows with one of several copies of a weight, which together no
cache holds: so a model's layers find their weights. Our products, torch's `linear` and torch's
packed products (MKL, oneDNN) take turns. A share is of the least time that the
machine's roof allows: its fastest multiplications in registers, or reading the weight
once, whichever takes longer.

    python benchmarks/products.py
    FMINFER_CPU=avx2 python benchmarks/products.py --rows 1 --rows 64 --each

Tables in markdown come first, one JSON line last. Figures are medians over the shapes,
of medians over the calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent))  # the package beside this file, installed or not

from fminfer.machine import processor  # noqa: E402
from fminfer.machine.threads import count_cores, shorten_openmp_waits  # noqa: E402

if __name__ == "__main__":  # as the command does, before torch is loaded
    processor.cap_libraries()
    shorten_openmp_waits()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages

import click  # noqa: E402
import torch  # noqa: E402

from fminfer.compute.formats.dense import make_dense_weight  # noqa: E402
from fminfer.compute.kernels.kernel_build import FLAGS, find_compiler, start_build  # noqa: E402
from fminfer.compute.layers.products import (  # noqa: E402
    Linear,
    ProductKernel,
    make_library_candidates,
)

# inputs, outputs
SHAPES = ((768, 3072), (3072, 768), (768, 2304), (2048, 8192), (768, 32000))
ROWS = (1, 4, 16, 64, 256, 512)
KINDS = (  # of the rows and of the stored weights
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
)
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
CACHE_BYTES = 32 << 20  # where the system does not tell
ROOF_TURNS = 2_000_000
ROOF_S = 1.0  # tens of milliseconds a try, for so long; the best one counts
READ_FLOATS = 64 << 20
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # of the largest result

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Roof:
    """What the machine's cores do in a second at most; 0: nothing tells."""

    floats: float
    pairs: float
    bytes: float

    def best_with(self, other: Roof) -> Roof:
        """Return the best of two; a virtual machine's neighbours may halve reads for seconds."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Roof(*(max(both) for both in pairs))

    def least_s(self, flop: float, rows: torch.dtype, weight_bytes: int) -> float:
        """Return the least time of a product; 0: unknown, as that of tiles (AMX) is."""
        if rows == torch.bfloat16 and processor.has_unit("amx_bf16"):
            return 0.0
        peak = self.pairs if rows == torch.bfloat16 and self.pairs else self.floats
        return max(flop / peak, weight_bytes / self.bytes)


def measure_roof(num_threads: int) -> Roof:
    """Build roof.cpp as the kernels are built, and return the best of many tries."""
    compiler = find_compiler()
    if compiler is None:
        raise click.ClickException(
            "there is no C++ compiler; install g++, or set CXX to one"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roof.so"
        flags = [
            *FLAGS,
            *processor.choose_compiler_flags(),
            "-std=c++17",
            "-pthread",
            "-shared",
            "-fPIC",
        ]
        command = [*compiler, *flags, "-o", str(path), str(HERE / "roof.cpp")]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    data = torch.ones(READ_FLOATS + 16)
    start = -(-data.data_ptr() // 64) * 64
    number = ctypes.c_int64

    def best(name: str, *arguments: object) -> float:
        function = getattr(library, name)
        function.restype = ctypes.c_double
        threads = number(num_threads)
        found = 0.0
        end = time.perf_counter() + ROOF_S
        while time.perf_counter() < end:
            found = max(found, float(function(threads, *arguments)))
        return found

    return Roof(
        best("roof_floats", number(ROOF_TURNS)),
        best("roof_pairs", number(ROOF_TURNS)),
        best("roof_reads", ctypes.c_void_p(start), number(READ_FLOATS)),
    )


def cache_bytes() -> int:
    """Return the size of the largest cache."""
    try:
        return int(CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return CACHE_BYTES


def pack_sides(
    kernel: ProductKernel | None,
    weight: torch.Tensor,
    rows: torch.dtype,
    spare_bytes: int,
) -> dict[str, list[Multiply]]:
    """Return the products of each side that can, one for each copy of a weight."""
    copies = [weight.clone() for _ in range(spare_bytes // weight.nbytes + 2)]
    sides: dict[str, list[Multiply]] = {}
    if kernel is not None and can_multiply(kernel, weight, rows):
        sides["fminfer"] = [
            kernel.pack_weight(make_dense_weight(copy, "product"), None)
            for copy in copies
        ]
    if weight.dtype == rows:
        sides["linear"] = [_linear(copy) for copy in copies]
        for packed in make_library_candidates(rows, is_fast=True):
            asked = [
                Linear(make_dense_weight(copy, "product"), None) for copy in copies
            ]
            if packed.serves(asked[0]):
                sides["packed"] = [packed.make(each) for each in asked]
    return sides


def _linear(weight: torch.Tensor) -> Multiply:
    return lambda x: torch.nn.functional.linear(x, weight)


def can_multiply(
    kernel: ProductKernel, weight: torch.Tensor, rows: torch.dtype
) -> bool:
    """Try whether our products take such a weight with such rows."""
    asked = make_dense_weight(weight, "product")
    if not kernel.can_pack(asked):
        return False
    try:
        kernel.pack_weight(asked, None)(torch.zeros((1, weight.shape[1]), dtype=rows))
    except AssertionError:  # what it says of rows that it does not take
        return False
    return True


def time_sides(
    sides: dict[str, list[Multiply]], x: torch.Tensor, seconds: float
) -> dict[str, float]:
    """Return each side's median seconds a product; the sides take turns of a round of copies."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds * len(sides)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, products in sides.items():
            for product in products:
                started = time.perf_counter()
                product(x)
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def check(
    sides: dict[str, list[Multiply]], x: torch.Tensor, weight: torch.Tensor
) -> None:
    """Refuse to time products that are wrong."""
    right = torch.nn.functional.linear(x.float(), weight.float())
    for name, products in sides.items():
        error = (products[-1](x).float() - right).abs().max() / right.abs().max()
        if not error <= MAX_ERROR[x.dtype]:
            raise click.ClickException(
                f"{name} is wrong by {error:.1g} of the largest result"
            )


def measure(
    kernel: ProductKernel | None,
    all_rows: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    seconds: float,
    spare_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Give the seconds of all sides for each kind, shape and number of rows."""
    for rows_dtype, stored in KINDS:
        for inputs, outputs in shapes:
            torch.manual_seed(1)
            weight = torch.randn(outputs, inputs).to(stored)
            sides = pack_sides(kernel, weight, rows_dtype, spare_bytes)
            if not sides:
                continue
            check(sides, torch.randn(5, inputs).to(rows_dtype), weight)
            for rows in all_rows:
                x = torch.randn(rows, inputs).to(rows_dtype)
                yield {
                    "kind": f"{_name(rows_dtype)} rows, {_name(stored)} weights",
                    "shape": f"{inputs}×{outputs}",
                    "rows": rows,
                    "flop": 2.0 * rows * inputs * outputs,
                    "rows_dtype": rows_dtype,
                    "weight_bytes": weight.nbytes,
                    "took_s": time_sides(sides, x, seconds),
                }


def rate(record: dict[str, Any], roof: Roof) -> dict[str, Any]:
    """Return a record with rates and shares of the roof."""
    names = ("kind", "shape", "rows")
    flop = record["flop"]
    took_s = record["took_s"]
    least_s = roof.least_s(flop, record["rows_dtype"], record["weight_bytes"])
    return {name: record[name] for name in names} | {
        "gflops": {side: flop / s / 1e9 for side, s in took_s.items()},
        "share": {side: least_s / s for side, s in took_s.items()},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(records: list[dict[str, Any]], shape: str | None) -> Iterator[str]:
    """Give the lines of a kind's table: of one shape, or medians over all."""
    yield (
        "| rows | fminfer GFLOP/s | of the roof | torch linear | of it | torch "
        "packed | of it |"
    )
    yield "|---|---|---|---|---|---|---|"
    for rows in sorted({record["rows"] for record in records}):
        chosen = [
            r for r in records if r["rows"] == rows and shape in (None, r["shape"])
        ]
        cells = [str(rows)]
        for side in ("fminfer", "linear", "packed"):
            found = [r for r in chosen if side in r["gflops"]]
            gflops = (
                statistics.median(r["gflops"][side] for r in found) if found else 0.0
            )
            share = statistics.median(r["share"][side] for r in found) if found else 0.0
            cells += [
                f"{gflops:.0f}" if found else "–",
                f"{share:.0%}" if share else "–",
            ]
        yield "| " + " | ".join(cells) + " |"


def print_tables(records: list[dict[str, Any]], is_each: bool) -> None:
    """Print a table for each kind, and for each of its shapes if asked to."""
    for kind in dict.fromkeys(record["kind"] for record in records):
        own = [record for record in records if record["kind"] == kind]
        shapes = list(dict.fromkeys(record["shape"] for record in own))
        for shape in [None, *(shapes if is_each else [])]:
            print(f"\n{kind}, {shape or f'medians over {len(shapes)} shapes'}\n")
            print("\n".join(table(own, shape)))


@click.command()
@click.option(
    "--rows", "all_rows", type=int, multiple=True, default=ROWS, show_default=True
)
@click.option("--shape", "shapes", type=(int, int), multiple=True, default=SHAPES,
              show_default=True, help="Inputs and outputs.")  # fmt: skip
@click.option("--threads", type=int, help="[default: as many as there are cores]")
@click.option(
    "--seconds", default=0.1, show_default=True, help="Of each side and each cell."
)
@click.option("--each", is_flag=True, help="Print a table for each shape, too.")
def main(
    all_rows: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    threads: int | None,
    seconds: float,
    each: bool,
) -> None:
    """Time packed products beside torch's, and say how much of the roof they reach."""
    build = start_build()
    torch.set_num_threads(threads or min(torch.get_num_threads(), count_cores()))
    num_threads = torch.get_num_threads()
    roof = measure_roof(num_threads)
    library = build.wait_for_library()
    kernel = None if library is None else ProductKernel(library)
    if kernel is None:
        print(f"without our products: {build.error}", file=sys.stderr)
    with torch.inference_mode():
        measured = list(measure(kernel, all_rows, shapes, seconds, 4 * cache_bytes()))
    roof = roof.best_with(measure_roof(num_threads))
    records = [rate(record, roof) for record in measured]
    print(
        f"{num_threads} threads, flags {' '.join(processor.choose_compiler_flags())}; roof:",
        end=" ",
    )
    print(f"float32 {roof.floats / 1e9:.0f} GFLOP/s,", end=" ")
    print(
        f"pairs of bfloat16 {roof.pairs / 1e9:.0f}," if roof.pairs else "no pairs,",
        end=" ",
    )
    print(f"reads {roof.bytes / 1e9:.0f} GB/s")
    print_tables(records, each)
    roofs = {"floats": roof.floats, "pairs": roof.pairs, "bytes": roof.bytes}
    print(
        "\n" + json.dumps({"threads": num_threads, "roof": roofs, "products": records})
    )


if __name__ == "__main__":
    main()
