"""Streamed layers: each is read for every pass, while the one before it computes.

A slot holds a layer's stored bytes. With two slots, one layer computes and the next is
read. With a slot for each layer, all stay in the host's memory, and are copied to a GPU.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fminfer.core.errors import MachineError
from fminfer.core.messages import StageSpan
from fminfer.forward.layer import TransformerLayer
from fminfer.models.layer_source import LayerSource
from fminfer.models.stored.direct_reads import (
    DirectReads,
    LentBuffer,
    PendingReads,
    buffer_size_of,
    wait_for_reads,
)
from fminfer.models.tensor_specs import Weights

SLOTS = 2  # layers in memory: one computes, one is read
MakeLayer = Callable[[int, Weights], TransformerLayer]
# Where layers come from: the disk; the system's cache of files; memory of the process.
StreamKind = Literal["disk", "shared memory", "own memory"]


@dataclass(slots=True)
class Slot:
    """Memory for one layer's stored bytes."""

    buffer: torch.Tensor  # bytes
    number: int | None = None  # of the layer that is here, or is being read
    reading: PendingReads = ()


class LayerStream:
    """Reads layers, the next one while one computes.

    To a GPU, a layer is copied while another computes; the GPU holds two at once. The
    copies have a CUDA stream of their own, which waits for no computation. So a layer's
    memory on the GPU is used again only once the GPU is done with that layer.
    """

    def __init__(self, source: LayerSource, make: MakeLayer, kind: StreamKind) -> None:
        self._source = source
        self._make = make
        self._is_direct = kind != "shared memory"
        # Where each layer's tensors are, and the parts of them that are needed.
        self._spans = spans = {
            number: source.find_spans(number) for number in source.streamed
        }
        assert source.files is not None, "a model in files"
        paths = {span.file for wholes, _ in spans.values() for span in wholes}
        seen = {path: source.files.seen[path] for path in paths}
        self.reads = DirectReads(seen, is_direct=self._is_direct)
        sizes = [buffer_size_of(wholes) for wholes, _ in spans.values()]
        self.keeps_all = kind == "own memory" or len(sizes) <= SLOTS
        sizes = sizes if self.keeps_all else [max(sizes)] * SLOTS
        self._slots = [Slot(_allocate_buffer(size, source.device)) for size in sizes]
        if self.keeps_all:
            for number, slot in zip(spans, self._slots, strict=True):
                self._read(number, slot)
        self._copies: torch.cuda.Stream | None = None
        if source.device.type == "cuda":
            self._copies = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        self._computing: deque[tuple[TransformerLayer, torch.cuda.Event]] = (
            deque()
        )  # on a GPU
        self._brought: list[list[float]] = []  # as in `StageSpan.brought`
        self._reported = (0, 0.0)  # bytes and seconds of reading

    @contextmanager
    def layer(self, number: int, following: int) -> Iterator[TransformerLayer]:
        """Lend a layer to compute with; read the following one meanwhile."""
        while len(self._computing) >= SLOTS:
            self._computing.popleft()[1].synchronize()
        start_s = time.time()
        slot = self._find_slot(number) or self._start_reading(number)
        wait_for_reads(slot.reading)
        if self._find_slot(following) is None:
            self._start_reading(following, used=slot)
        lent = LentBuffer(self._spans[number][0], slot.buffer)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            layer = self._make(number, self._source.load_layer(number, lent))
        if self._copies is not None:  # the GPU then has a copy of all the slot's bytes
            self._copies.synchronize()
        came_s = time.time()
        yield layer
        if self._copies is not None:
            done = torch.cuda.current_stream(self._source.device).record_event()
            self._computing.append((layer, done))
        self._brought.append([start_s, came_s, time.time()])

    def try_layers(self, numbers: Iterable[int]) -> None:
        """Make layers once, so that a failure comes while the model loads."""
        for number in numbers:
            with self.layer(number, number):
                pass
        self.reset()

    def reset(self) -> None:
        """Forget what was brought so far, while the model loaded."""
        self._brought = []
        self._reported = (self.reads.num_bytes, self.reads.busy_s)

    def add_reads(self, span: StageSpan) -> StageSpan:
        """Return a step's span, with the layers that were brought since the last one."""
        brought = self._brought
        before = self._reported
        self.reset()
        return replace(
            span,
            read_bytes=self._reported[0] - before[0],
            # the cache has no disk's speed
            read_s=(self._reported[1] - before[1]) * self._is_direct,
            brought=brought,
        )

    def close(self) -> None:
        """Stop reading, and free the slots' memory."""
        self.reads.close()
        for slot in self._slots if self._copies is not None else ():
            _cuda_runtime().cudaHostUnregister(slot.buffer.data_ptr())
        self._slots.clear()

    def _find_slot(self, number: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.number == number), None)

    def _start_reading(self, number: int, used: Slot | None = None) -> Slot:
        """Begin to read a layer into an empty slot, or into another than `used`."""
        free = [slot for slot in self._slots if slot is not used]
        slot = next((slot for slot in free if slot.number is None), free[0])
        with suppress(MachineError):  # of a layer that nobody computes with
            wait_for_reads(slot.reading)
        self._read(number, slot)
        return slot

    def _read(self, number: int, slot: Slot) -> None:
        wholes, needed = self._spans[number]
        slot.number = number
        slot.reading = self.reads.start(LentBuffer(wholes, slot.buffer), needed)


@dataclass(slots=True, frozen=True)
class StreamedLayers:
    """A stage's layers in their order, some of them streamed."""

    numbers: Sequence[int]
    kept: Mapping[int, TransformerLayer]  # that stay in memory
    stream: LayerStream

    def __iter__(self) -> Iterator[TransformerLayer]:
        brought = [number for number in self.numbers if number not in self.kept]
        following = dict(zip(brought, brought[1:] + brought[:1], strict=True))
        for number in self.numbers:
            if number in self.kept:
                yield self.kept[number]
                continue
            with self.stream.layer(number, following[number]) as layer:
                yield layer
            del layer  # before the next one is made


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _allocate_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Return bytes that begin with a whole page; for a GPU, pinned, so that it can copy them.

    On a CPU, pages into which nothing is read, such as other ranks' parts, take no memory. torch
    would round its own pinned memory up to a power of two.
    """
    memory = mmap.mmap(-1, max(1, size))
    with suppress(OSError, AttributeError):  # without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        failed = int(
            _cuda_runtime().cudaHostRegister(buffer.data_ptr(), len(buffer), 0)
        )
        if failed:
            raise MemoryError(
                f"the system pins no {len(buffer)} bytes (CUDA error {failed})"
            )
    return buffer
