"""Phase 5: how long attention and products take, beside the roofs that phase 0 found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from benchmarks.gpu import results
from benchmarks.gpu.cases import Case, Figures, Setting, Skipped
from benchmarks.gpu.references import Heads
from benchmarks.gpu.stopwatch import call_s, median_s
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.attention.triton_attention import TritonAttention
from fminfer.compute.values.step import Rows

SHAPE = {"cuda": Heads(32, 8, 128), "cpu": Heads(4, 2, 16)}  # llama-8B's
TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
ROWS = {"cuda": (1, 8, 64, 256, 1024), "cpu": (1, 2)}  # that decode
KEYS = {"cuda": (256, 1024, 4096, 16384), "cpu": (20,)}
PROMPTS = {"cuda": ((8, 512), (1, 8192)), "cpu": ((2, 24),)}  # rows, tokens of each
PRODUCT_ROWS = {"cuda": (1, 64, 256, 4096), "cpu": (1, 8)}
PRODUCT = {"cuda": (4096, 14336), "cpu": (64, 96)}  # inputs, outputs
TURNS = {"cuda": 15, "cpu": 1}
MOST_BYTES = 20 << 30  # of keys and values
BLOCK = 32


def cases(setting: Setting) -> Iterator[Case]:
    kind = setting.device
    for rows, keys in itertools.product(ROWS[kind], KEYS[kind]):
        yield Case(f"decode {rows} x {keys}", partial(time_decode, setting, rows, keys))
    for rows, tokens in PROMPTS[kind]:
        yield Case(
            f"prefill {rows} x {tokens}", partial(time_prefill, setting, rows, tokens)
        )
    for rows in PRODUCT_ROWS[kind]:
        yield Case(f"product of {rows} rows", partial(time_product, setting, rows))
    yield Case("host's share of a launch", partial(time_launches, setting))


class Bench:
    """The kernel over rows of a step, each with its own blocks."""

    def __init__(self, setting: Setting, rows: int, tokens: int, before: int) -> None:
        kind = setting.device
        self.device = torch.device(kind)
        shape = SHAPE[kind]
        dtype = TYPE[kind]
        self.kernel = TritonAttention(
            shape.heads, shape.kv_heads, shape.dim, dtype=dtype, device=self.device
        )
        each = -(-(before + tokens) // BLOCK)
        size = (rows * each, shape.kv_heads, BLOCK, shape.dim)
        self.kv_bytes = (
            rows * (before + tokens) * 2 * shape.kv_heads * shape.dim * dtype.itemsize
        )
        if self.kv_bytes > MOST_BYTES:
            raise Skipped(f"{self.kv_bytes / 2**30:.0f} GiB of keys and values")
        self.keys, self.values = (
            torch.randn(size, dtype=dtype, device=self.device) for _ in ("k", "v")
        )
        order = torch.randperm(rows * each).view(rows, each).tolist()
        self.rows = Rows.from_tables(*((before, tokens, table) for table in order))
        self.query, self.new_keys, self.new_values = (
            torch.randn(
                1, count, rows * tokens, shape.dim, dtype=dtype, device=self.device
            )
            for count in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.plan = self.kernel.lay_out(self.rows, BLOCK)
        self.scoring = Scoring(shape.dim**-0.5)

    def __call__(self) -> torch.Tensor:
        call = AttentionCall(
            self.query,
            self.new_keys,
            self.new_values,
            self.keys,
            self.values,
            self.plan,
            self.scoring,
        )
        return self.kernel(call)


@torch.inference_mode()
def time_decode(setting: Setting, rows: int, keys: int) -> Figures:
    """Time rows of one token, which read their keys and values once."""
    bench = Bench(setting, rows, 1, keys - 1)
    took = median_s(bench, bench.device, TURNS[setting.device], warmups=1)
    rate = bench.kv_bytes / took
    figures: Figures = {"us": took * 1e6, "GB/s": rate / 1e9}
    return figures | results.share_of(setting.results, rate, "copy")


@torch.inference_mode()
def time_prefill(setting: Setting, rows: int, tokens: int) -> Figures:
    """Time whole prompts; of the square of scores a half counts."""
    shape = SHAPE[setting.device]
    bench = Bench(setting, rows, tokens, 0)
    took = median_s(bench, bench.device, TURNS[setting.device], warmups=1)
    rate = rows * 2 * shape.heads * shape.dim * tokens * (tokens + 1) / took
    figures: Figures = {"us": took * 1e6, "TFLOP/s": rate / 1e12}
    return figures | results.share_of(
        setting.results, rate, str(TYPE[setting.device])[6:]
    )


@torch.inference_mode()
def time_product(setting: Setting, rows: int) -> Figures:
    """Time x W^T, several weights in turn, so that no cache holds them."""
    kind = setting.device
    device = torch.device(kind)
    (inputs, outputs) = PRODUCT[kind]
    x = torch.randn(rows, inputs, device=device).to(TYPE[kind])
    weights = [
        torch.randn(outputs, inputs, device=device).to(TYPE[kind]) for _ in range(4)
    ]
    turn = itertools.cycle(weights)
    took = median_s(lambda: linear(x, next(turn)), device, 4 * TURNS[kind])
    flops = 2 * rows * inputs * outputs / took
    read = weights[0].nbytes / took
    figures: Figures = {"us": took * 1e6, "TFLOP/s": flops / 1e12, "GB/s": read / 1e9}
    return figures | results.share_of(setting.results, flops, str(TYPE[kind])[6:])


@torch.inference_mode()
def time_launches(setting: Setting) -> Figures:
    """Time what the host does for a call of attention, its three kernels and its plan."""
    turns = 200 if setting.device == "cuda" else 2
    bench = Bench(setting, 1, 1, 19)
    call = call_s(bench, bench.device, turns)
    plan = call_s(lambda: bench.kernel.lay_out(bench.rows, BLOCK), bench.device, turns)
    add = call_s(lambda: bench.query.add_(1), bench.device, turns)
    return {
        "attention us": call * 1e6,
        "plan us": plan * 1e6,
        "torch's add us": add * 1e6,
    }
