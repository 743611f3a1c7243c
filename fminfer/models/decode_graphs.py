"""Decode steps as CUDA graphs: the host starts one graph in place of hundreds of kernels.

A graph does the same work on the same addresses each time it is replayed. So a step of one token a
row is computed for the next larger of some numbers of rows, and its inputs go into tensors that
stay. Rows that are missing are padded: they store no keys, attend to nothing, and reach no other
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fminfer.compute.attention.kv_cache import KvCache
from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.spec import Layer, Moe
from fminfer.compute.trial import Limits, Pair, try_body, why_plain
from fminfer.core.config import Kernels
from fminfer.core.messages import StepRow
from fminfer.machine.device import pinned
from fminfer.machine.out_of_memory import is_out_of_memory
from fminfer.models.layer_step import LayerStep
from fminfer.models.transformer import Transformer

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # runs work, and returns what does the same once more
# Entries of block tables in a step: 4 MB. A step of more attends for longer than its launches take.
MAX_BLOCKS = 1 << 20
LIMITS: Limits = {torch.float32: 2e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
TRIED_ROWS = 4
NAME = "CUDA graphs"


class GraphKernel(AttentionKernel, Protocol):
    """A compiled body of attention whose plan can be of numbers that change: triton_attention."""

    def decode_numbers(
        self, rows: Sequence[StepRow], block_size: int, size: int
    ) -> list[np.ndarray]: ...

    def decode_plan(self, numbers: torch.Tensor, size: int) -> Any: ...


class CudaCapture:
    """Captures work as CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        own, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(own)
        try:
            # If a capture fails, torch leaves the thread on its stream; the outer block does not.
            with torch.cuda.stream(self._stream):
                work()  # compiles, and gives cuBLAS memory, which a capture must not
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    work()
        except BaseException:
            self._begin()  # the stream may still be capturing; the pool may go with its only graph
            raise
        own.wait_stream(self._stream)
        replay: Work = graph.replay
        return replay


class DecodeGraphs:
    """Runs steps of one token a row by replaying what was captured for a number of rows.

    Args:
        network: a model, or the layers of one stage.
        cache: of the stage.
        kernel: the cache's.
        max_rows: the most that a step may have.
        capture: made for the device; tests have one that calls again.
        explain: tells why work cannot be captured, or raises an error.
    """

    def __init__(
        self,
        network: Transformer,
        cache: KvCache,
        *,
        kernel: GraphKernel,
        max_rows: int,
        explain: Callable[[BaseException], str],
        capture: Callable[[torch.device], Capture] = CudaCapture,
    ) -> None:
        self._network, self._cache, self._kernel = network, cache, kernel
        self._explain, self._capture = explain, capture(cache.device)
        self.why_not = ""  # why nothing is captured any more
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, Work | None] = {}  # None: there was no memory for it
        most = self._sizes[-1]
        num_bytes = input_bytes(most, cache.num_blocks)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=cache.device)
        width = 0 if network.is_first else network.model.hidden_size
        self._before = self._inputs.new_zeros((most, width), dtype=network.dtype)
        self._out = torch.empty(0)

    @property
    def captured(self) -> list[int]:
        """The numbers of rows for which there is a graph."""
        return [size for size, graph in self._graphs.items() if graph is not None]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the largest graph, with padded rows alone."""
        self.run([], None, self._sizes[-1])

    def run(
        self, rows: Sequence[StepRow], before: torch.Tensor | None, size: int = 0
    ) -> torch.Tensor | None:
        """Compute a step; None: it has other rows, or a graph cannot be had.

        Args:
            before: (rows, hidden) of the stage before; the first stage embeds.
            size: of the graph; 0: that of the rows.

        Returns:
            (rows, hidden), as `Transformer.run` gives it for all tokens.
        """
        num = len(rows)
        size = size or next((each for each in self._sizes if each >= num), 0)
        is_decode = all(len(row.token_ids) == 1 for row in rows)
        if self.why_not or not size or not is_decode or self._graphs.get(size, self) is None:
            return None
        of_tokens = np.zeros((2, size), np.int64)
        of_tokens[:, :num] = [[row.token_ids[0] for row in rows], [row.position for row in rows]]
        numbers = self._kernel.decode_numbers(rows, self._cache.block_size, size)
        given = pinned([of_tokens.ravel(), *numbers], self._cache.device)
        if len(given) > len(self._inputs):
            return None
        self._inputs[: len(given)].copy_(given, non_blocking=True)
        if before is not None and not self._network.is_first:
            self._before[:num].copy_(before)
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        replay = self._graphs[size]
        if replay is None:
            return None
        replay()
        return self._out[:num].clone()  # the next replay writes there

    def _captured(self, size: int) -> Work | None:
        """Capture a graph; None: it cannot be."""
        network, cache = self._network, self._cache
        of_tokens, numbers = self._inputs.tensor_split([16 * size])
        ids, positions = of_tokens.view(torch.int64).view(2, size)
        plan = self._kernel.decode_plan(numbers.view(torch.int32), size)

        def work() -> None:
            cache.use(plan)
            before = self._before[:size]
            if network.is_first:
                before = network.embed(ids, positions)
            found = network.run(before, LayerStep(positions, cache))
            if not len(self._out):  # before anything is captured
                self._out = found.new_empty((self._sizes[-1], found.shape[1]))
            self._out[:size].copy_(found)

        try:
            return self._capture(work)
        except Exception as error:
            if not is_out_of_memory(error):
                self.why_not = self._explain(error)
        # Outside of `except`, so that nothing holds the tensors of what failed.
        if cache.device.type == "cuda":
            torch.cuda.synchronize(cache.device)  # it may still read the inputs
            torch.cuda.empty_cache()
        return None


GraphsOf = Callable[[KvCache], DecodeGraphs]


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for; the last one holds all rows."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (8 if sizes[-1] < 64 else 16 if sizes[-1] < 256 else 64))
    return [*(each for each in sizes if each < max_rows), min(max_rows, sizes[-1])]


def input_bytes(max_rows: int, num_blocks: int) -> int:
    """Return what the inputs of the largest graph take: two int64 and five int32 a row, tables."""
    return 36 * max_rows + 4 * min(max_rows * num_blocks, MAX_BLOCKS)


def can_capture(layers: Sequence[Layer]) -> bool:
    """Tell whether layers compute without a look at what they compute: experts are counted."""
    return not any(isinstance(layer.mlp, Moe) for layer in layers)


def find_graphs(
    asked: Kernels,
    network: Transformer,
    kernel: Any,
    *,
    max_rows: int,
    block_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> tuple[GraphsOf | None, str]:
    """Return what makes the graphs of decode steps, or None and why there are none.

    None without a reason: no GPU, plain attention, or layers that cannot be captured.

    Raises:
        UsageError: --kernels require, and their trial fails.
    """
    if device.type != "cuda" or kernel is None or not can_capture(network.own):
        return None, ""
    explain = partial(why_plain, asked, NAME)
    make: Any = partial(DecodeGraphs, network, kernel=kernel, max_rows=max_rows, explain=explain)
    cache = partial(
        KvCache,
        [layer.attention for layer in network.own],
        num_blocks=2 * TRIED_ROWS,
        block_size=block_size,
        dtype=kv_dtype,
        device=device,
        kernel=kernel,
    )
    pairs = partial(graph_pairs, network, cache)
    return try_body(NAME, asked, lambda: make, pairs, LIMITS[network.dtype])


def graph_pairs(
    network: Transformer, make_cache: Callable[[], KvCache], make: Callable[..., DecodeGraphs]
) -> Iterator[Pair]:
    """Compute the first two tokens of some rows with graphs, and without.

    The second step finds what the first has captured, and has other inputs. Each is done again with
    a row of padding.
    """
    cache, own_cache = make_cache(), make_cache()
    graphs = make(own_cache, max_rows=TRIED_ROWS, explain=_raise)
    shape = TRIED_ROWS, network.model.hidden_size
    for position in range(2):
        tables = ([each, each + TRIED_ROWS] for each in range(TRIED_ROWS))
        rows = [StepRow([id_ + position], position, table) for id_, table in enumerate(tables)]
        positions = torch.full((TRIED_ROWS,), position, device=cache.device)
        x = torch.linspace(-1, 1 + position, shape[0] * shape[1], device=cache.device)
        before = x = x.view(shape).to(network.dtype)
        if network.is_first:
            ids = torch.arange(TRIED_ROWS, device=cache.device) + position
            x = network.embed(ids, positions)
        cache.plan(rows, None)
        expected = network.run(x, LayerStep(positions, cache))
        for num in (TRIED_ROWS, TRIED_ROWS - 1):
            found = graphs.run(rows[:num], before[:num], TRIED_ROWS)
            if found is None:
                raise ValueError("there is no memory for them")
            yield found, expected[:num]


def _raise(error: BaseException) -> str:
    raise error
