"""Times variants of the attention kernel, and checks each against float64.

python3 -m benchmarks.gpu.sweep_attention --out sweep.jsonl --seconds 110
TRITON_INTERPRET=1 python3 -m benchmarks.gpu.sweep_attention --cpu --out x.jsonl  # tiny
python3 -m benchmarks.gpu.sweep_attention --compile --out c.jsonl                 # no GPU
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.old_attention import old_kernel
from fminfer.compute.kernels.triton_kernels import attend_kernel, join_kernel

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
LIMIT = {"bf16": 5e-3, "f16": 1e-3, "f32": 1e-5}
NO_WINDOW = 2**31 - 1
POOL_TOKENS = 600_000  # of llama-8B's keys
IS_TINY = "--cpu" in sys.argv


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    block: int = 32
    loads: str = "one"  # "one" id a piece where blocks are long enough; "few", "each"
    order: str = "tiles"
    split: int = 0
    splits: int = 1
    edge: int = 1
    odd: str = "dot"
    maxnreg: int = 0
    is_one: bool = True
    heads: tuple[int, int, int] = (32, 8, 128)
    dtype: str = "bf16"
    is_old: bool = False
    is_sorted: bool = False  # the host's order of tiles: not compiled

    def __str__(self) -> str:
        name = f"q{self.queries} k{self.keys} w{self.warps} s{self.stages} b{self.block}"
        name += f" {self.loads}" + (" heads" if self.order == "heads" else "")
        name += f" split{self.split}/{self.splits}" if self.split else ""
        name += f" edge{self.edge}" if self.edge != 1 else ""
        name += f" odd:{self.odd}" if self.odd != "dot" else ""
        name += f" max{self.maxnreg}" if self.maxnreg else ""
        name += " sorted" if self.is_sorted else ""
        name += f" {self.dtype}" if self.dtype != "bf16" else ""
        return name + (" OLD" if self.is_old else "")

    def constants(self) -> dict[str, Any]:
        heads, kv_heads, dim = self.heads
        found: dict[str, Any] = {
            "HAS_CAP": False,
            "HAS_SINKS": False,
            "GROUP": heads // kv_heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": dim,
            "BLOCK_SIZE": self.block,
            "DIM": dim,
            "QUERIES": self.queries,
            "KEYS": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        if not self.is_old:
            found |= {"HAS_SLOPES": False, "HAS_WINDOW": False, "IS_ONE": self.is_one}
            found |= {"SPLIT": self.split, "SPLITS": self.splits, "LOADS": self.loads}
            found |= {"ORDER": self.order, "EDGE_STAGES": self.edge, "ODD": self.odd}
        return found | ({"maxnreg": self.maxnreg} if self.maxnreg else {})

    def args(self, tensors: dict[str, Any]) -> list[Any]:
        heads, _, dim = self.heads
        names = ["query", "out", "keys", "values", "tiles", "blocks", "slopes", "sinks"]
        names += [] if self.is_old else ["parts", "marks"]
        return [*(tensors[name] for name in names), dim, heads * dim, NO_WINDOW, dim**-0.5, 1.0]

    def grid(self, tiles: int, programs: int) -> tuple[int, int, int]:
        kv_heads = self.heads[1]
        if self.order == "heads" and not self.is_old:
            return tiles * kv_heads, 1, programs
        return tiles, kv_heads, programs


@dataclass(frozen=True)
class Shape:
    """Rows of a step: tokens of each, and keys before them."""

    rows: int
    tokens: int
    before: int

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"decode {self.rows}x{self.before + 1}"
        return f"prefill {self.rows}x{self.tokens}" + (f"+{self.before}" if self.before else "")

    @property
    def keys(self) -> int:
        return self.before + self.tokens

    def kv_bytes(self, heads: tuple[int, int, int]) -> int:
        return self.rows * self.keys * 2 * heads[1] * heads[2] * 2

    def flops(self, heads: tuple[int, int, int]) -> float:
        seen = self.tokens * self.before + self.tokens * (self.tokens + 1) / 2
        return self.rows * 4 * heads[0] * heads[2] * seen


Job = tuple[Variant, Shape, int]  # with programs a tile and KV head
DECODES = [Shape(64, 1, 4095), Shape(256, 1, 449), Shape(64, 1, 1023)]
PROMPTS = [Shape(8, 512, 0), Shape(1, 8192, 0), Shape(2, 1024, 3072)]
# Block ids are loaded first: of num_stages, (num_stages - 1) // 2 pieces are on their way.
D = Variant(16, 32, 4, 7)
P = Variant(128, 64, 8, 3, loads="each", is_one=False)


def decode_variants() -> Iterator[Variant]:
    yield replace(D, keys=64, stages=3, is_old=True)
    for keys, warps, stages in (
        *((32, 4, 3), (32, 4, 5), (32, 4, 7), (32, 4, 9), (32, 2, 3), (32, 2, 5), (32, 2, 7)),
        *((32, 2, 9), (32, 1, 5), (32, 8, 7), (16, 2, 5), (16, 1, 7), (16, 4, 9), (16, 2, 9)),
    ):
        yield replace(D, keys=keys, warps=warps, stages=stages)
    for keys, warps, stages in (
        *((64, 4, 3), (64, 4, 2), (64, 4, 5), (64, 4, 7), (64, 2, 5), (64, 8, 5)),
        *((128, 4, 3), (128, 8, 3), (128, 8, 5), (32, 4, 7), (32, 2, 7)),
    ):
        yield replace(D, keys=keys, warps=warps, stages=stages, loads="each")
    yield replace(D, keys=64, stages=3, loads="few")
    yield replace(D, order="heads")
    yield replace(D, keys=64, stages=5, loads="each", order="heads")
    for keys, block, loads, stages in (
        *((16, 16, "one", 9), (32, 16, "each", 7), (64, 16, "each", 5)),
        *((64, 64, "one", 3), (64, 64, "one", 5), (32, 64, "one", 7), (128, 128, "one", 3)),
    ):
        yield replace(D, keys=keys, block=block, loads=loads, stages=stages)


def split_jobs() -> Iterator[Job]:
    few = [Shape(1, 1, 16383), Shape(8, 1, 4095), Shape(1, 1, 1023), Shape(8, 1, 449)]
    some = [Shape(8, 1, 16383), Shape(16, 1, 8191), *DECODES]
    for keys, stages, loads in ((32, 7, "one"), (64, 5, "each")):
        base = replace(D, keys=keys, stages=stages, loads=loads)
        yield from ((base, shape, 1) for shape in few + some)
        for split, splits in ((256, 32), (512, 16), (512, 32), (1024, 128)):
            each = replace(base, split=split, splits=splits)
            yield from ((each, shape, splits) for shape in few + some)
            if (split, splits) == (512, 32):  # programs that take several splits
                yield from ((each, shape, 1) for shape in some)
                yield from ((each, shape, 4) for shape in some)
    yield from ((replace(D, split=256, splits=64), shape, 64) for shape in few)
    base = replace(D, split=512, splits=32, order="heads")
    yield from ((base, shape, 32) for shape in few + some)


def prefill_variants() -> Iterator[Variant]:
    yield replace(P, is_old=True)
    for queries, keys, warps, stages in (
        *((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 5), (128, 64, 4, 3), (128, 128, 8, 3)),
        *((128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 32, 8, 5)),
        *((256, 64, 8, 3), (256, 32, 8, 5), (256, 64, 16, 3), (64, 32, 4, 5), (128, 32, 4, 5)),
    ):
        yield replace(P, queries=queries, keys=keys, warps=warps, stages=stages)
    for queries, warps, stages in ((128, 8, 5), (128, 8, 7), (64, 4, 5), (128, 4, 5)):
        yield replace(P, loads="one", queries=queries, keys=32, warps=warps, stages=stages)
    for odd in ("none", "rows"):
        yield replace(P, odd=odd)
        yield replace(P, odd=odd, queries=64, warps=4)
        yield replace(P, odd=odd, keys=128)
    yield replace(P, odd="none", queries=64, warps=4, maxnreg=168)
    yield replace(P, odd="none", keys=32, stages=5, maxnreg=128)
    yield replace(P, is_sorted=True)
    yield replace(P, order="heads")
    yield replace(P, order="heads", is_sorted=True)
    yield replace(P, order="heads", is_sorted=True, stages=5)
    yield replace(P, order="heads", is_sorted=True, edge=3)
    yield replace(P, order="heads", is_sorted=True, keys=128)
    for queries, keys, block, warps, stages in (
        *((128, 64, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 5), (64, 64, 64, 4, 5)),
        *((128, 128, 128, 8, 3), (128, 64, 128, 8, 5)),
    ):
        sizes: dict[str, Any] = {"queries": queries, "keys": keys, "block": block}
        sizes |= {"warps": warps, "stages": stages, "order": "heads", "is_sorted": True}
        yield replace(P, **sizes, loads="one")


def other_jobs() -> Iterator[Job]:
    prompt, decode = PROMPTS[1], DECODES[0]
    base = replace(P, order="heads", is_sorted=True)
    for queries, keys, warps, stages in (
        *((128, 64, 4, 5), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 5)),
    ):
        sizes: dict[str, Any] = {"queries": queries, "keys": keys, "warps": warps}
        yield replace(base, **sizes, stages=stages, heads=(32, 8, 64)), prompt, 1
    for queries, keys, warps, stages in (
        *((64, 64, 8, 3), (64, 32, 8, 3), (128, 32, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    ):
        sizes = {"queries": queries, "keys": keys, "warps": warps}
        yield replace(base, **sizes, stages=stages, heads=(8, 4, 256)), prompt, 1
    yield replace(base, heads=(32, 32, 128)), Shape(1, 2048, 0), 1
    for keys, warps, stages, heads in (
        *((32, 4, 7, (32, 8, 64)), (64, 4, 5, (32, 8, 64)), (32, 2, 7, (32, 8, 64))),
        *((32, 4, 5, (8, 4, 256)), (32, 8, 5, (8, 4, 256)), (16, 4, 7, (8, 4, 256))),
        *((32, 4, 7, (32, 32, 128)), (64, 4, 5, (32, 32, 128))),
    ):
        loads = "one" if keys <= 32 else "each"
        how: dict[str, Any] = {"keys": keys, "warps": warps, "stages": stages, "heads": heads}
        shape = Shape(16, 1, 4095) if heads[1] == 32 else decode
        yield replace(D, **how, loads=loads), shape, 1
    yield replace(D, dtype="f16"), decode, 1
    yield replace(base, dtype="f16"), prompt, 1


def jobs() -> Iterator[Job]:
    if IS_TINY:
        small: dict[str, Any] = {"heads": (4, 2, 16), "dtype": "f32"}
        for loads, block in (("one", 32), ("each", 8), ("few", 8)):
            base = replace(D, keys=16, stages=3, **small, loads=loads, block=block)
            for order in ("tiles", "heads"):
                for split, programs in ((0, 1), (16, 8), (16, 3), (16, 1)):
                    each = replace(base, split=split, splits=4 if split else 1, order=order)
                    yield each, Shape(3, 1, 122), programs
                prompt = replace(base, is_one=False, order=order, is_sorted=order == "heads")
                yield prompt, Shape(2, 50, 0), 1
                yield prompt, Shape(2, 20, 37), 1
        yield replace(D, keys=16, **small, is_old=True), Shape(2, 1, 60), 1
        return
    parts = [
        [(variant, shape, 1) for variant in decode_variants() for shape in DECODES],
        [(variant, shape, 1) for variant in prefill_variants() for shape in PROMPTS],
        list(split_jobs()),
        list(other_jobs()),
    ]
    seen: set[Job] = set()
    for part in parts:
        for job in part:
            if job not in seen:
                seen.add(job)
                yield job


class NoDriver:
    """What compiles for Hopper, without a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile in this process, so that the disk's cache has it; tell of its size."""
    started = time.perf_counter()
    triton.runtime.driver.set_active(NoDriver())
    mock, dtype = triton.runtime.jit.MockTensor, TYPES[variant.dtype]
    tensors = {name: mock(dtype) for name in ("query", "out", "keys", "values")}
    tensors |= {name: mock(torch.int32) for name in ("tiles", "blocks")}
    tensors |= {name: mock(torch.float32) for name in ("slopes", "sinks", "parts", "marks")}
    kernel = old_kernel if variant.is_old else attend_kernel
    made = kernel.warmup(*variant.args(tensors), grid=(1,), **variant.constants())
    if variant.split:
        join_kernel.warmup(*join_args(tensors), grid=(1,), **join_constants(variant))
    found: dict[str, Any] = {"shared": made.metadata.shared}
    found["HGMMA"] = made.asm["ptx"].count("wgmma.mma_async")
    found["async"] = made.asm["ptx"].count("cp.async.cg")
    if "--compile" in sys.argv:
        found |= usage(made.asm["cubin"])
    return found | {"compile_s": time.perf_counter() - started}


def usage(cubin: bytes) -> dict[str, Any]:
    """Read registers and stack of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    words = dict(
        each.split(":")[:2] for each in said.split() if each.count(":") == 1 and each[-1] != ":"
    )
    return {"regs": int(words.get("REG", -1)), "stack": int(words.get("STACK", -1))}


def join_args(tensors: dict[str, Any]) -> list[Any]:
    return [*(tensors[name] for name in ("out", "tiles", "sinks", "parts", "marks")), NO_WINDOW]


def join_constants(variant: Variant) -> dict[str, Any]:
    heads, _, dim = variant.heads
    found: dict[str, Any] = {"HAS_SINKS": False, "HAS_WINDOW": False, "HEADS": heads}
    found |= {"HEAD_DIM": dim, "DIM": dim, "KEYS": variant.keys, "SPLIT": variant.split}
    return found | {"SPLITS": variant.splits, "num_warps": 4}


@cache
def pool(dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(time.time_ns() % 2**31)
    size = 4096 if IS_TINY else POOL_TOKENS
    width = 2 * 16 if IS_TINY else 8 * 128
    first, second = (
        torch.randn(size * width, dtype=TYPES[dtype], device=device) for _ in ("k", "v")
    )
    return first, second


class Bench:
    """Inputs of a shape: some sets, whose keys together are more than the cache holds."""

    def __init__(self, shape: Shape, variant: Variant, device: str) -> None:
        heads, kv_heads, dim = variant.heads
        block = variant.block
        self.shape, self.device, self.heads = shape, device, variant.heads
        dtype = TYPES[variant.dtype]
        self.keys, self.values = (
            each[: each.numel() // (kv_heads * block * dim) * (kv_heads * block * dim)].view(
                -1, kv_heads, block, dim
            )
            for each in pool(variant.dtype, device)
        )
        each = -(-shape.keys // block)
        room = self.keys.shape[0] // (shape.rows * each)
        sets = min(max(-(-(512 << 20) // shape.kv_bytes(variant.heads)), 2), 32, room)
        if shape.tokens > 1 or IS_TINY:
            sets = min(sets, 2)
        order = torch.randperm(self.keys.shape[0])[: sets * shape.rows * each]
        self.tables = order.view(sets, shape.rows, each)
        self.blocks = [table.flatten().int().to(device) for table in self.tables]
        total = shape.rows * shape.tokens
        self.query = torch.randn(total, heads, dim, dtype=dtype, device=device)
        self.out = torch.empty_like(self.query)
        self.zeros = torch.zeros(heads, device=device)

    @cache  # noqa: B019
    def tiles(self, most: int, is_sorted: bool) -> torch.Tensor:
        shape, each = self.shape, self.tables.shape[2]
        found = [
            (row * shape.tokens + at, min(most, shape.tokens - at), shape.before + at, row * each)
            for row in range(shape.rows)
            for at in range(0, shape.tokens, most)
        ]
        if is_sorted:
            found.sort(key=lambda tile: -tile[2])
        return torch.tensor(found, dtype=torch.int32, device=self.device)

    @cache  # noqa: B019
    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, and what they must give, by the plain formula."""
        shape, (heads, kv_heads, dim) = self.shape, self.heads
        rows = sorted({0, shape.rows // 2, shape.rows - 1})
        inner = torch.tensor(sorted({0, shape.tokens - 1, *(_any(shape.tokens) for _ in "12345")}))
        tokens, found = [], []
        for row in rows:
            index = self.tables[0, row].to(self.device)
            keys, values = (
                cache[index].transpose(0, 1).flatten(1, 2)[:, : shape.keys].double()
                for cache in (self.keys, self.values)
            )
            place = inner + row * shape.tokens
            asked = self.query[place.to(self.device)].double().transpose(0, 1)
            asked = asked.reshape(kv_heads, heads // kv_heads, -1, dim)
            scores = asked @ keys[:, None].transpose(-1, -2) * dim**-0.5
            at = torch.arange(shape.keys)
            hidden = at[None, :] > (inner + shape.before)[:, None]
            scores = scores.masked_fill(hidden.to(self.device), float("-inf"))
            given = torch.softmax(scores, -1) @ values[:, None]
            tokens.append(place)
            found.append(given.flatten(0, 1).transpose(0, 1))
        return torch.cat(tokens).to(self.device), torch.cat(found)


def _any(most: int) -> int:
    return int(torch.randint(most, (1,)))


@cache
def bench(shape: Shape, variant: Variant, device: str) -> Bench:
    return Bench(shape, variant, device)


@cache
def scratch(elements: int, device: str) -> torch.Tensor:
    return torch.empty(elements, device=device)


def find_bench(job: Job, device: str) -> Bench:
    variant, shape, _ = job
    plain = Variant(16, 16, 1, 1, variant.block, heads=variant.heads, dtype=variant.dtype)
    return bench(shape, plain, device)


def launcher(job: Job, device: str) -> tuple[Callable[[int], Any], Bench]:
    variant, shape, programs = job
    given = find_bench(job, device)
    most = 1 if shape.tokens == 1 else variant.queries // (variant.heads[0] // variant.heads[1])
    tiles = given.tiles(most, variant.is_sorted)
    elements = len(tiles) * variant.splits * variant.heads[0]
    parts = scratch(elements * variant.heads[2] if variant.split else 1, device)
    marks = scratch(elements * 2 if variant.split else 1, device)
    tensors = {"query": given.query, "out": given.out, "keys": given.keys}
    tensors |= {"values": given.values, "tiles": tiles, "slopes": given.zeros}
    tensors |= {"sinks": given.zeros, "parts": parts, "marks": marks}
    kernel = old_kernel if variant.is_old else attend_kernel
    constants, grid = variant.constants(), variant.grid(len(tiles), programs)
    args = [variant.args(tensors | {"blocks": blocks}) for blocks in given.blocks]
    join, more = join_args(tensors), join_constants(variant)

    def launch(number: int) -> Any:
        made = kernel[grid](*args[number], **constants)
        if variant.split:
            join_kernel[(len(tiles), variant.heads[0])](*join, **more)
        return made

    return launch, given


def measure(job: Job, device: str) -> dict[str, Any]:
    variant, shape, _ = job
    launch, given = launcher(job, device)
    given.out.fill_(float("nan"))
    made = launch(0)
    tokens, right = given.right()
    found = given.out[tokens].double()
    error = float((found - right).norm() / right.norm())
    line: dict[str, Any] = {"error": error, "is_right": error <= LIMIT[variant.dtype]}
    line["is_written"] = not bool(given.out.isnan().any())
    if device == "cuda":
        line |= {"regs": made.n_regs, "spills": made.n_spills, "shared": made.metadata.shared}
    took = time_sets(launch, len(given.tables), device)
    line["us"] = took * 1e6
    if shape.tokens == 1:
        line["GB/s"] = shape.kv_bytes(variant.heads) / took / 1e9
    else:
        line["TFLOP/s"] = shape.flops(variant.heads) / took / 1e12
    return line


def time_sets(launch: Callable[[int], Any], sets: int, device: str) -> float:
    """Return the median seconds of a launch, in a graph of one for each set."""
    if device != "cuda":
        started = time.perf_counter()
        launch(0)
        return time.perf_counter() - started
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(sets):
            launch(number)
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(7)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) / 1000 / sets


def time_torch(shape: Shape, heads: tuple[int, int, int]) -> dict[str, Any]:
    """Time torch's own attention on keys in one piece, each head with its own."""
    given = [
        torch.randn(
            shape.rows, heads[0], shape.tokens, heads[2], dtype=torch.bfloat16, device="cuda"
        )
        for _ in "qkv"
    ]
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    with torch.nn.attention.sdpa_kernel(backend):
        scaled_dot_product_attention(*given, is_causal=True)
        took = time_sets(lambda _: scaled_dot_product_attention(*given, is_causal=True), 2, "cuda")
    return {"us": took * 1e6, "TFLOP/s": shape.flops(heads) / took / 1e12}


class Log:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", buffering=1)
        self.lines: list[dict[str, Any]] = []

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        self.file.write(json.dumps(line) + "\n")

    def table(self, most: int) -> None:
        shapes: dict[str, list[dict[str, Any]]] = {}
        for line in self.lines:
            if "us" in line:
                shapes.setdefault(f"{line['shape']} {line['heads']}", []).append(line)
        for shape, lines in shapes.items():
            print(f"{shape}: {len(lines)} variants")
            lines.sort(key=lambda line: line["us"])
            kept = lines[:most] + [
                x for x in lines[most:] if "OLD" in x["name"] or "sdpa" in x["name"]
            ]
            for x in kept:
                rate = x.get("GB/s") or x.get("TFLOP/s") or 0.0
                bad = "" if x.get("is_right", True) and x.get("is_written", True) else " WRONG"
                print(
                    f"  {x['us']:8.1f} {rate:7.1f} {x['name']} z{x.get('programs', '')}"
                    f" r{x.get('regs')} sp{x.get('spills')} {(x.get('shared') or 0) >> 10}K"
                    f" e{x.get('error', 0):.1e}{bad}"
                )
        wrong = [
            x for x in self.lines if x.get("is_right") is False or x.get("is_written") is False
        ]
        for x in wrong[:8]:
            print("WRONG", x["shape"], x["name"], x.get("programs"), x["error"], x["is_written"])
        for x in [x for x in self.lines if "failed" in x][:15]:
            print("FAILED", x["shape"], x["name"], x["failed"][:110])


def short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def compile_all(log: Log, variants: list[Variant], tasks: list[Future[Any]]) -> None:
    for variant, task in zip(variants, tasks, strict=True):
        try:
            log.add(name=str(variant), heads=variant.heads, **task.result())
        except Exception as error:
            log.add(name=str(variant), heads=variant.heads, failed=short(error), shape="")
        print(log.lines[-1], flush=True)


def run(log: Log, todo: list[Job], tasks: dict[Variant, Future[Any]], until: float) -> int:
    device, pending = "cpu" if IS_TINY else "cuda", list(todo)
    while pending and time.monotonic() < until:
        ready = [job for job in pending if IS_TINY or task_of(job, tasks).done()]
        if not ready:
            waiting = {task_of(job, tasks) for job in pending}
            left_s = max(until - time.monotonic(), 0)
            wait_for(waiting, timeout=left_s, return_when=FIRST_COMPLETED)
            continue
        variant, shape, programs = job = ready[0]
        pending.remove(job)
        facts = {"shape": str(shape), "heads": variant.heads, "name": str(variant)}
        facts |= {"programs": programs} | asdict(variant)
        try:
            facts |= {} if IS_TINY else task_of(job, tasks).result()
            log.add(**facts | measure(job, device))
        except Exception as error:
            log.add(**facts, failed=short(error), trace=traceback.format_exc()[-1500:])
            if "CUDA error" in str(error):
                print("the device is broken:", facts["name"], shape)
                break
        print(".", end="", flush=True)
    return len(pending)


def task_of(job: Job, tasks: dict[Variant, Future[Any]]) -> Future[Any]:
    return tasks[replace(job[0], is_sorted=False)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    started = time.monotonic()
    log, todo = Log(given.out), [job for job in jobs() if given.only in f"{job[1]} {job[0]}"]
    if given.cpu:
        run(log, todo, {}, started + 600)
        log.table(99)
        return
    variants = list(dict.fromkeys(replace(job[0], is_sorted=False) for job in todo))
    context = multiprocessing.get_context("fork")  # before this process uses the GPU
    workers = ProcessPoolExecutor(given.workers, mp_context=context)
    tasks = [workers.submit(compile_variant, variant) for variant in variants]
    if given.compile:
        compile_all(log, variants, tasks)
        return
    until = started + given.seconds - 6
    for shape in (PROMPTS[0], PROMPTS[1]):
        facts = {"shape": str(shape), "heads": (32, 8, 128), "name": "torch's sdpa flash"}
        try:
            log.add(**facts, **time_torch(shape, (32, 32, 128)))
        except Exception as error:
            log.add(**facts, failed=short(error))
    print(f"started after {time.monotonic() - started:.1f} s", flush=True)
    left = run(log, todo, dict(zip(variants, tasks, strict=True)), until)
    workers.shutdown(wait=False, cancel_futures=True)
    print(f"\n{len(todo)} jobs, {left} left out, {time.monotonic() - started:.1f} s")
    log.table(5)
    sys.stdout.flush()
    for process in (workers._processes or {}).values():
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
