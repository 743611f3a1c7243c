"""Phase 1: the GPU's attention beside float64, of every kind of row and at every edge."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.gpu.cases import Case, Figures, Setting, expect
from benchmarks.gpu.references import Heads, attend_as_torch, attend_in_float64
from fminfer.compute.attention.scoring import AttentionCall, Scoring
from fminfer.compute.attention.triton_attention import TritonAttention
from fminfer.compute.values.step import Rows

SHAPES = {
    "cuda": (
        Heads(32, 8, 128),
        Heads(32, 32, 128),
        Heads(28, 4, 128),
        Heads(71, 1, 64),
        Heads(8, 4, 256, softcap=50.0, window=4096),
        Heads(32, 32, 80),
        Heads(12, 12, 96, window=150),
        Heads(3, 3, 65, has_slopes=True),
    ),
    "cpu": (
        Heads(4, 2, 16),
        Heads(7, 1, 24, softcap=0.7, window=40),
        Heads(3, 3, 65, has_slopes=True),
    ),
}
# The interpreter multiplies no bfloat16.
TYPES = {
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.float32, torch.float16),
}
BLOCKS = {"cuda": (16, 32), "cpu": (8, 16)}
# lengths of rows
EDGES = {"cuda": (1, 31, 32, 33, 63, 64, 65, 1000), "cpu": (1, 31, 33)}
LONG = {"cuda": (8192, 32768), "cpu": (130,)}
ROWS = {"cuda": (1, 16, 256, 1024), "cpu": (4,)}  # that decode together
ROW_LENGTH = {"cuda": 130, "cpu": 20}
HIGH = (70_000, Heads(32, 8, 128), 32)  # blocks of llama-8B: past 2**31 elements
# Relative norm of the error, and beside sdpa's own; float32 is near to what sums can have.
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
OF_SDPA = 1.25
LEAST = {torch.float32: 2e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
MOST_CHECKED = 64  # rows of a step, and queries of a row
Row = tuple[int, int, list[int]]  # position, tokens, block table


def cases(setting: Setting) -> Iterator[Case]:
    kind = setting.device
    device = torch.device(kind)
    for place, shape in enumerate(SHAPES[kind]):
        for number, dtype in enumerate(TYPES[kind]):
            # Each shape meets both sizes of blocks, the first one in every type.
            sizes = (
                BLOCKS[kind] if place == 0 else (BLOCKS[kind][(place + number) % 2],)
            )
            for block in sizes:
                name = f"{shape} {str(dtype)[6:]} blocks of {block}"
                yield Case(
                    name, partial(check_shape, kind, shape, dtype, block, device)
                )
    yield Case("the highest blocks", partial(check_high_blocks, device))


class Trial:
    """A cache, full of what must not matter, and the kernel over it."""

    def __init__(
        self,
        shape: Heads,
        dtype: torch.dtype,
        block: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.block = block
        self.device = device
        self.kernel = TritonAttention(
            shape.heads, shape.kv_heads, shape.dim, dtype=dtype, device=device
        )
        size = (num_blocks, shape.kv_heads, block, shape.dim)
        self.keys, self.values = (
            torch.empty(size, dtype=dtype, device=device) for _ in ("k", "v")
        )
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        # squares of errors, of all
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def row(self, position: int, tokens: int, table: Sequence[int] = ()) -> Row:
        """Return a row with random keys before it, and nan behind its last token."""
        count = -(-(position + tokens) // self.block)
        blocks = list(table) or [self._free.pop() for _ in range(count)]
        index = torch.tensor(blocks, device=self.device)
        for cache in (self.keys, self.values):
            size = (self.shape.kv_heads, count * self.block, self.shape.dim)
            whole = torch.randn(size, device=self.device).to(cache.dtype)
            whole[:, position:] = float("nan")
            cache[index] = whole.view(size[0], count, self.block, -1).transpose(0, 1)
        return position, tokens, blocks

    def step(self, rows: list[Row]) -> None:
        """Run the kernel for rows, and add up how far it is off."""
        shape = self.shape
        total = sum(tokens for _, tokens, _ in rows)
        new = [
            torch.randn(1, total, count, shape.dim, device=self.device).to(
                self.keys.dtype
            )
            for count in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]
        query, key, value = (each.transpose(1, 2) for each in new)
        plan = self.kernel.lay_out(Rows.from_tables(*rows), self.block)
        how = Scoring(
            shape.dim**-0.5, shape.window, shape.slopes(self.device), shape.softcap
        )
        call = AttentionCall(query, key, value, self.keys, self.values, plan, how)
        found = self.kernel(call)[0].transpose(0, 1)
        expect(not bool(found.isnan().any()), "nan in what it gives")
        first = 0
        checked = {
            *random.Random(1).sample(range(len(rows)), min(len(rows), MOST_CHECKED))
        }
        for place, row in enumerate(rows):
            last = first + row[1]
            if place in checked or place == len(rows) - 1:
                self._compare(row, query[0, :, first:last], found[:, first:last])
            first = last

    def _compare(self, row: Row, query: torch.Tensor, found: torch.Tensor) -> None:
        position, tokens, table = row
        index = torch.tensor(table, device=self.device)
        keys, values = (
            cache[index].transpose(0, 1).flatten(1, 2)[:, : position + tokens]
            for cache in (self.keys, self.values)
        )
        picked = torch.arange(tokens, device=self.device)
        if tokens > MOST_CHECKED:
            half = MOST_CHECKED // 2
            rest = torch.randint(half, tokens, (half,), device=self.device)
            picked = torch.cat([picked[:half], rest, picked[-1:]])
        given = (self.shape, query[:, picked], keys, values, position + picked)
        right = attend_in_float64(*given)
        ours = found[:, picked].double()
        torchs = attend_as_torch(*given)
        theirs = right if torchs is None else torchs.double()
        squares = ((ours - right), (theirs - right), right)
        self._sums += torch.stack([each.square().sum() for each in squares])

    def figures(self) -> Figures:
        """Return relative errors, if they are small enough."""
        ours, theirs, whole = self._sums.sqrt().tolist()
        dtype = self.keys.dtype
        figures: Figures = {"error": ours / whole}
        if theirs:
            figures["sdpa's"] = theirs / whole
        expect(
            ours / whole <= LIMIT[dtype], f"off by more than {LIMIT[dtype]}", figures
        )
        if theirs:
            limit = max(OF_SDPA * theirs / whole, LEAST[dtype])
            expect(
                ours / whole <= limit, f"off by more than {OF_SDPA} x sdpa's", figures
            )
        return figures


@torch.inference_mode()
def check_shape(
    kind: str, shape: Heads, dtype: torch.dtype, block: int, device: torch.device
) -> Figures:
    """Feed prompts, chunks and single tokens of all lengths."""
    torch.manual_seed(0)
    tokens = (
        4 * sum(EDGES[kind]) + 2 * sum(LONG[kind]) + sum(ROWS[kind]) * ROW_LENGTH[kind]
    )
    num_rows = 4 * len(EDGES[kind]) + 2 * len(LONG[kind]) + sum(ROWS[kind])
    trial = Trial(shape, dtype, block, tokens // block + 2 * num_rows, device)
    trial.step([trial.row(0, length) for length in EDGES[kind]])
    mixed = [trial.row(length, 1) for length in EDGES[kind]]
    trial.step(mixed + [trial.row(length, 40 % length + 1) for length in EDGES[kind]])
    trial.step([trial.row(0, LONG[kind][0])])
    trial.step([trial.row(LONG[kind][-1] - 1, 1)])
    for count in ROWS[kind]:
        trial.step([trial.row(ROW_LENGTH[kind] - 1 - i % 9, 1) for i in range(count)])
    return trial.figures()


@torch.inference_mode()
def check_high_blocks(device: torch.device) -> Figures:
    """Attend in the last blocks of a pool that 32 bits cannot count."""
    num_blocks, shape, block = HIGH
    trial = Trial(shape, torch.float16, block, num_blocks, device)
    high = range(num_blocks - 1, num_blocks - 4, -1)
    trial.step([trial.row(block + 3, 4, table=[high[0], high[1]])])
    trial.step([trial.row(5, 1, table=[high[2]])])
    return trial.figures() | {"elements": trial.keys.numel()}
