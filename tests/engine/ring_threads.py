"""The ranks of a ring as threads of one process, whose wires are queues and may break."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch

from fminfer.core.errors import FminferError, PipelineError
from fminfer.core.partition import Part
from fminfer.pipeline import ring
from fminfer.pipeline.ring import RingPipeline, StageWork, serve_stage
from fminfer.pipeline.wire import LinkSpec, RankMessage

WAIT_S = 20.0


class Death(BaseException):
    """Ends a rank at once, as a signal does."""


class Wires:
    """Connections between all ranks. A rank's death breaks those that it has."""

    def __init__(self, num_ranks: int, rng: random.Random) -> None:
        ranks = range(num_ranks)
        self._queues: dict[tuple[int, int], queue.SimpleQueue[RankMessage | None]] = {
            (sender, receiver): queue.SimpleQueue()
            for sender in ranks
            for receiver in ranks
        }
        self._dead: set[int] = set()
        self._rng = rng

    def send(self, sender: int, receiver: int, message: RankMessage) -> None:
        if {sender, receiver} & self._dead:
            raise RuntimeError("Connection reset by peer")
        hidden = None if message.hidden is None else message.hidden.clone()
        self._queues[sender, receiver].put(replace(message, hidden=hidden))

    def receive(self, sender: int, receiver: int) -> RankMessage:
        message = self._queues[sender, receiver].get(timeout=WAIT_S)
        if message is None:
            raise RuntimeError("Connection closed by peer")
        return message

    def kill(self, rank: int) -> None:
        """Break a rank's connections; what was sent and not received may be lost."""
        self._dead.add(rank)
        for pair, messages in self._queues.items():
            if rank in pair:
                while self._rng.random() < 0.5 and not messages.empty():
                    with contextlib.suppress(queue.Empty):
                        messages.get_nowait()
                messages.put(None)


@dataclass(slots=True, frozen=True)
class RankForm(LinkSpec):
    """A form that says whose it is."""

    rank: int = 0
    wires: Wires | None = None


def _send(message: RankMessage, rank: int, form: LinkSpec) -> None:
    assert isinstance(form, RankForm) and form.wires is not None
    form.wires.send(form.rank, rank, message)


def _receive(rank: int, form: LinkSpec) -> RankMessage:
    assert isinstance(form, RankForm) and form.wires is not None
    return form.wires.receive(rank, form.rank)


@contextlib.contextmanager
def wires_are_queues() -> Iterator[None]:
    """Let rings of this process send through queues."""
    with (
        mock.patch.object(ring, "send_message", _send),
        mock.patch.object(ring, "receive_message", _receive),
    ):
        yield


class ThreadRing:
    """A ring of stages, each of which one rank or several compute; rank 0 is the caller's."""

    def __init__(
        self, stages: Sequence[Sequence[StageWork]], rng: random.Random
    ) -> None:
        num_shards = len(stages[0])
        self.num_ranks = len(stages) * num_shards
        self._wires = Wires(self.num_ranks, rng)
        self._threads: list[threading.Thread] = []
        for number, shards in enumerate(stages):
            for shard, stage in enumerate(shards):
                part = Part(number, len(stages), number, number + 1, shard, num_shards)
                if part.rank == 0:
                    first = stage
                    first_part = part
                    continue
                arguments = (stage, part, self._form(part.rank))
                thread = threading.Thread(
                    target=self._serve, args=arguments, daemon=True
                )
                self._threads.append(thread)
        self.pipeline = RingPipeline(first, first_part, self._form(0), explain)
        for thread in self._threads:
            thread.start()

    def _form(self, rank: int) -> RankForm:
        return RankForm(
            1, torch.int64, torch.device("cpu"), rank=rank, wires=self._wires
        )

    def _serve(self, stage: StageWork, part: Part, form: RankForm) -> None:
        try:
            serve_stage(stage, part, form, on_stop=lambda: None)
        except (Death, FminferError, RuntimeError):
            self._wires.kill(part.rank)  # as its process ends

    def close(self) -> None:
        """End all ranks, also those that wait for a dead one."""
        self.pipeline.close()
        if self.pipeline.failure is not None:
            for rank in range(self.num_ranks):
                self._wires.kill(rank)
        for thread in (self.pipeline._thread, *self._threads):
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{thread.name} waits for ever"


def explain(text: str) -> FminferError:
    return PipelineError(text)
