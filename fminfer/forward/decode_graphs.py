"""Decode steps as CUDA graphs: the host starts one graph in place of hundreds of kernels.

A graph does the same work on the same addresses each time. So a step of one token a row
is computed for the next larger of some numbers of rows, and its inputs go into tensors
that stay. Rows that are missing are padded: they store no keys, attend to nothing, and
reach no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fminfer.compute.attention.kv_cache import KvCache, StepAttention
from fminfer.compute.attention.paged_attention import AttentionKernel
from fminfer.compute.trial import explain_failure
from fminfer.compute.values.spec import Layer, Moe
from fminfer.compute.values.step import Rows
from fminfer.core.config import Kernels
from fminfer.forward.layer_step import LayerStep
from fminfer.forward.transformer import Transformer
from fminfer.machine.device import pin_columns
from fminfer.machine.out_of_memory import is_out_of_memory

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # runs work, and returns what does the same once more
# Entries of block tables in a step: 4 MB. A step of more attends for longer than its
# launches take.
MAX_BLOCKS = 1 << 20


class GraphKernel(AttentionKernel, Protocol):
    """A compiled attention kernel whose plan may have numbers that change."""

    def lay_out_decode_numbers(
        self, rows: Rows, block_size: int, size: int
    ) -> list[np.ndarray]:
        """Return the numbers of rows of one token each, padded to `size` rows."""

    def make_decode_layout(self, numbers: torch.Tensor, size: int) -> Any:
        """Return the plan of `size` rows, whatever `numbers`, int32, come to hold."""


class CudaCapture:
    """Captures work as CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        try:
            # If a capture fails, torch leaves the thread on its stream; the outer block
            # does not.
            with torch.cuda.stream(self._stream):
                work()  # compiles, and gives cuBLAS memory, which a capture must not
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    work()
        except BaseException:
            # the stream may still be capturing; the pool may go with its only graph
            self._begin()
            raise
        current.wait_stream(self._stream)
        replay: Work = graph.replay
        return replay


class DecodeGraphs:
    """Runs steps of one token a row by replaying what was captured for a number of rows.

    `explain` says why work cannot be captured, or raises an error.
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
        self._network = network
        self._cache = cache
        self._kernel = kernel
        self._explain = explain
        self._capture = capture(cache.device)
        self.why_not = ""  # why nothing is captured any more
        self._sizes = choose_graph_sizes(max_rows)
        # by rows; None: there was no memory for it
        self.graphs: dict[int, Work | None] = {}
        most = self._sizes[-1]
        size = count_input_bytes(most, cache.num_blocks)
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=cache.device)
        width = 0 if network.is_first else network.model.hidden_size
        self._hidden = self._inputs.new_zeros((most, width), dtype=network.dtype)
        self._out = torch.empty(0)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the largest graph, with padded rows alone."""
        self.run(Rows.from_tables(), np.empty(0, np.int64), None, self._sizes[-1])

    def run(
        self, rows: Rows, ids: np.ndarray, before: torch.Tensor | None, size: int = 0
    ) -> torch.Tensor | None:
        """Return (rows, hidden) of all rows; None: a step has others, or there is no graph.

        Args:
            before: (rows, hidden) of the stage before; None on the first stage.
            size: of the graph; 0: that of the rows.
        """
        num = len(rows)
        size = size or next((each for each in self._sizes if each >= num), 0)
        is_decode = len(ids) == num
        if (
            self.why_not
            or not size
            or not is_decode
            or self.graphs.get(size, self) is None
        ):
            return None
        of_tokens = np.zeros((2, size), np.int64)
        of_tokens[:, :num] = ids, rows.positions
        numbers = self._kernel.lay_out_decode_numbers(
            rows, self._cache.block_size, size
        )
        packed = pin_columns([of_tokens.ravel(), *numbers], self._cache.device)
        if len(packed) > len(self._inputs):
            return None
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
        if before is not None:
            self._hidden[:num].copy_(before)
        if size not in self.graphs:
            self.graphs[size] = self._capture_graph(size)
        if (replay := self.graphs[size]) is None:
            return None
        replay()
        return self._out[:num].clone()  # the next replay writes there

    def _capture_graph(self, size: int) -> Work | None:
        """Capture a graph; None: it cannot be."""
        network = self._network
        cache = self._cache
        of_tokens, numbers = self._inputs.tensor_split([16 * size])
        ids, positions = of_tokens.view(torch.int64).view(2, size)
        plan = self._kernel.make_decode_layout(numbers.view(torch.int32), size)
        attend = StepAttention(cache.kernel, cache.layers, plan, plan)

        def work() -> None:
            before = (
                network.embed(ids, positions)
                if network.is_first
                else self._hidden[:size]
            )
            hidden = network.run(before, LayerStep(positions, attend))
            if not len(self._out):  # before anything is captured
                self._out = hidden.new_empty((self._sizes[-1], hidden.shape[1]))
            self._out[:size].copy_(hidden)

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


GraphBuilder = Callable[[KvCache], DecodeGraphs]


def choose_graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for; the last one holds all rows."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(
            sizes[-1] + (8 if sizes[-1] < 64 else 16 if sizes[-1] < 256 else 64)
        )
    return [*(each for each in sizes if each < max_rows), min(max_rows, sizes[-1])]


def count_input_bytes(max_rows: int, num_blocks: int = MAX_BLOCKS) -> int:
    """Count the bytes of the largest graph's inputs.

    Those are two int64 and six int32 a row, and block tables.
    """
    return 40 * max_rows + 4 * min(max_rows * num_blocks, MAX_BLOCKS)


def can_capture(layers: Sequence[Layer]) -> bool:
    """Return whether steps of these layers are alike: no experts, and no cross attention."""
    return not any(isinstance(layer.mlp, Moe) or layer.cross for layer in layers)


def choose_graphs(
    mode: Kernels,
    network: Transformer,
    kernel: Any,
    max_rows: int,
    device: torch.device,
) -> GraphBuilder | None:
    """Return a builder of graphs of decode steps; None: no GPU, plain attention, or experts."""
    if device.type != "cuda" or kernel is None or not can_capture(network.layer_specs):
        return None
    explain = partial(explain_failure, mode, "CUDA graphs")
    return partial(
        DecodeGraphs, network, kernel=kernel, max_rows=max_rows, explain=explain
    )
