"""Layers that do not stay in memory: each is brought for every pass, while others compute.

What is stored of a layer lies in a slot. With two slots, one layer computes and the next is read
from the disk, or from the system's cache of it. With one for each, all stay in the host's memory,
and come to a GPU.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from fminfer.core.errors import MachineError
from fminfer.core.messages import StageSpan
from fminfer.models.layer import LayerOf
from fminfer.models.stored.direct_reads import (
    DirectReads,
    FileFacts,
    Lent,
    Reading,
    Span,
    end_of,
    finish,
    place_all,
)
from fminfer.models.tensor_specs import Weights

SLOTS = 2  # layers whose bytes are in memory: one that computes, one that is read
Made = tuple[LayerOf, Weights]  # the weights stay as long as a GPU works with the layer
MakeLayer = Callable[[int, Lent], Made]


class Layers(Protocol):
    """Layers of a stage, in their order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[LayerOf]: ...


@dataclass(slots=True)
class Slot:
    """Memory for what is stored of one layer."""

    buffer: torch.Tensor  # bytes
    number: int | None = None  # of the layer that is here, or comes
    reading: Reading = ()
    is_used: bool = False  # its layer computes
    of: int | None = None  # the only layer that it is for; None: any


class LayerStream:
    """Brings layers, the next one while one computes.

    Args:
        make: makes a layer of what is stored of it.
        spans: where in files each layer's tensors are, and what of them it needs, by its number.
        num_slots: fewer than there are layers: they are read anew in every pass.
        device: that computes.
        is_direct: layers are read past the system's cache of files.
        seen: size and time of files, when their headers were read.
    """

    def __init__(
        self,
        make: MakeLayer,
        spans: Mapping[int, tuple[Sequence[Span], Sequence[Span]]],
        num_slots: int,
        device: torch.device,
        *,
        is_direct: bool = True,
        seen: Mapping[Path, FileFacts] = MappingProxyType({}),
    ) -> None:
        self._is_direct = is_direct
        self._make, self.reads = make, DirectReads(is_direct=is_direct)
        self._places = {number: place_all(wholes) for number, (wholes, _) in spans.items()}
        self._needed = {number: needed for number, (_, needed) in spans.items()}
        largest = max(map(end_of, self._places.values()))
        sizes = [largest] * num_slots
        if num_slots >= len(spans):  # each has its own
            sizes = [end_of(places) for places in self._places.values()]
        self._slots = [Slot(_new_buffer(size, device)) for size in sizes]
        if num_slots >= len(spans):
            for slot, number in zip(self._slots, spans, strict=True):
                slot.of = number
        self.reads.open({span.file for wholes, _ in spans.values() for span in wholes}, seen)
        self._gpu = GpuCopies(device) if device.type == "cuda" else None
        self._brought: list[float] = []  # as in `StageSpan.brought`
        self._told = (0, 0.0)  # bytes and seconds of reading

    @property
    def numbers(self) -> list[int]:
        """Of the layers that are brought."""
        return [*self._places]

    @contextmanager
    def layer(self, number: int, following: int) -> Iterator[LayerOf]:
        """Give a layer to compute with; the one that follows is read meanwhile.

        Raises:
            MachineError: a file cannot be read, ends too early, or was changed.
        """
        if self._gpu is not None:
            self._gpu.make_room()
        asked_s = time.time()
        slot = self._find(number) or self._bring(number)
        finish(slot.reading)
        slot.is_used = True
        try:
            if self._find(following) is None and not all(s.is_used for s in self._slots):
                self._bring(following)
            lent = Lent(self._places[number], slot.buffer)
            if self._gpu is None:
                came_s = time.time()
                yield self._make(number, lent)[0]
                self._brought += (asked_s, came_s, time.time())
                return
            made = self._gpu.copy(partial(self._make, number, lent))
        finally:
            slot.is_used = False
        came_s = time.time()
        yield made[0]
        self._gpu.keep(made)
        self._brought += (asked_s, came_s, time.time())

    def reset(self) -> None:
        """Forget what was brought so far, while the model loaded."""
        self._brought, self._told = [], (self.reads.num_bytes, self.reads.busy_s)

    def told(self, span: StageSpan) -> StageSpan:
        """Return when a stage worked with what was brought since the last one."""
        brought, self._brought = self._brought, []
        before, self._told = self._told, (self.reads.num_bytes, self.reads.busy_s)
        return replace(
            span,
            waited_s=sum(brought[1::3]) - sum(brought[::3]),
            read_bytes=self._told[0] - before[0],
            read_s=(self._told[1] - before[1]) * self._is_direct,  # otherwise no disk's speed
            brought=tuple(brought),
        )

    def close(self) -> None:
        """Stop reading, and leave the slots' memory."""
        self.reads.close()
        if self._gpu is not None:
            for slot in self._slots:
                _cuda_runtime().cudaHostUnregister(slot.buffer.data_ptr())
        self._slots.clear()

    def _find(self, number: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.number == number), None)

    def _bring(self, number: int) -> Slot:
        """Begin to read a layer into a slot: one that is empty, or that nobody uses."""
        free = [s for s in self._slots if not s.is_used and s.of in (None, number)]
        slot = next((slot for slot in free if slot.number is None), free[0])
        with suppress(MachineError):  # of a layer that nobody asks for
            finish(slot.reading)
        slot.number = None
        lent = Lent(self._places[number], slot.buffer)
        slot.number, slot.reading = number, self.reads.start(lent, self._needed[number])
        return slot


class GpuCopies:
    """Copies layers to a GPU while it computes others; two are there at once.

    A layer's memory is used again only when the GPU is done with it: copies have a stream of their
    own, which does not wait for the work of others.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[Made, torch.cuda.Event]] = deque()

    def make_room(self) -> None:
        """Wait for the work of the layer before the last one, and leave that."""
        while len(self._kept) >= SLOTS:
            self._kept.popleft()[1].synchronize()

    def copy(self, make: Callable[[], Made]) -> Made:
        """Make a layer, and return once all of it is on the GPU."""
        with torch.cuda.stream(self._stream):
            made = make()
        self._stream.synchronize()
        return made

    def keep(self, layer: Made) -> None:
        """Keep a layer whose work was given to the GPU until that is done."""
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._kept.append((layer, done))


class StreamedLayers:
    """Layers of a stage in their order, of which some are brought for each pass.

    Args:
        numbers: of them all.
        kept: those that stay in memory.
    """

    def __init__(
        self, numbers: Sequence[int], kept: Mapping[int, LayerOf], stream: LayerStream
    ) -> None:
        self._numbers, self._kept, self._stream = numbers, kept, stream
        brought = [number for number in numbers if number not in kept]
        self._following = dict(zip(brought, brought[1:] + brought[:1], strict=True))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[LayerOf]:
        for number in self._numbers:
            if number in self._kept:
                yield self._kept[number]
                continue
            with self._stream.layer(number, self._following[number]) as layer:
                yield layer
            del layer  # before the next one is made


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _new_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Return bytes that begin with a whole page; for a GPU, pinned, so that it can copy them.

    On a CPU, pages into which nothing is read take no memory: they are other ranks' parts. torch's
    own pinned memory would be rounded up to a power of two.
    """
    memory = mmap.mmap(-1, max(1, size))
    with suppress(OSError, AttributeError):  # without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        failed = int(_cuda_runtime().cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
        if failed:
            raise MemoryError(f"the system pins no {len(buffer)} bytes (CUDA error {failed})")
    return buffer
