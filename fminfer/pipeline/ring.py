"""The pipeline of several ranks: hidden states go from stage to stage, results back to rank 0.

A rank computes while a second thread receives the next message and a third sends the last one.
So transfers hide behind compute. Where ranks share a stage, its leader passes each step on to the
others before it computes its own shard of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from fminfer.compute.step import Results, Step
from fminfer.core.errors import FminferError, PipelineError
from fminfer.core.messages import StageSpan
from fminfer.core.partition import Part
from fminfer.machine.device import use_device
from fminfer.pipeline.local import Mark, QueuedPipeline
from fminfer.pipeline.step_bytes import (
    decode_result,
    decode_spans,
    decode_step,
    encode_result,
    encode_spans,
    encode_step,
)
from fminfer.pipeline.transport import HiddenForm, RankMessage, receive, send, use_own_stream

CLOSE_TIMEOUT_S = 10.0  # time for the stop message to go round


class StageClock(Protocol):
    """Times a stage's steps, one after another."""

    def start(self) -> None:
        """Begin a step."""

    def stop(self, *, is_awaited: bool, sent_bytes: int = 0, max_tokens: int = 0) -> StageSpan:
        """End it; `is_awaited`: somebody has read what it gave."""


class StageWork(Protocol):
    """What a pipeline asks of one rank's stage."""

    @property
    def clock(self) -> StageClock:
        """What times its steps."""

    @property
    def max_tokens(self) -> int:
        """The most tokens it computes at once since memory ran out; 0: it has not."""

    def forward(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute its layers; `hidden` comes from the stage before, None in the first stage."""

    def finish(self, step: Step, hidden: torch.Tensor) -> Results:
        """Return what was drawn and scored; in the last stage only."""


class _Sender:
    """Sends messages to one rank, in order, on a thread of its own."""

    def __init__(self, rank: int, form: HiddenForm, on_error: Callable[[BaseException], None]):
        self._rank, self._form, self._on_error = rank, form, on_error
        self._messages: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"to-rank-{rank}", daemon=True)
        self._thread.start()

    def put(self, message: RankMessage) -> None:
        self._messages.put(message)

    def end(self) -> None:
        """Send nothing more, once what waits is sent; a rank has failed."""
        self._messages.put(None)

    def join(self) -> None:
        """Wait until the last message, a `stop`, is sent."""
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            with use_own_stream(self._form):
                while (message := self._messages.get()) is not None:
                    send(message, self._rank, self._form)
                    if message.kind == "stop":
                        return
        except BaseException as error:
            self._on_error(_explain(error, self._rank))


class _Receiver:
    """Hands on what one rank sends, on a thread of its own."""

    def __init__(
        self, rank: int, form: HiddenForm, use: Callable[[RankMessage | BaseException], None]
    ):
        self._rank, self._form, self._use = rank, form, use
        self._thread = threading.Thread(target=self._work, name=f"from-rank-{rank}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until a `stop` has come."""
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            with use_own_stream(self._form):
                while True:
                    message = receive(self._rank, self._form)
                    self._use(message)
                    if message.kind == "stop":
                        return
        except BaseException as error:
            self._use(_explain(error, self._rank))


def _explain(error: BaseException, rank: int) -> BaseException:
    """Say which neighbour a broken connection led to."""
    if isinstance(error, RuntimeError):  # what torch.distributed raises
        told = (str(error).splitlines() or [type(error).__name__])[0][:160]
        detail = "" if "gloo" in told else f" ({told})"  # which says no more than that
        return PipelineError(f"the connection to rank {rank} broke; it may have died{detail}")
    return error


class _Computer:
    """One stage's work on a message: the message for the next rank."""

    def __init__(self, stage: StageWork, part: Part) -> None:
        self._stage, self._part = stage, part

    def run(
        self, step: Step, body: bytes, spans: bytes, hidden: torch.Tensor | None
    ) -> RankMessage:
        """Compute a step.

        Args:
            body: the step as bytes; they are passed on as they came.
            spans, hidden: of the stages before.
        """
        self._stage.clock.start()
        hidden = self._stage.forward(step, hidden)
        is_awaited = True
        if self._part.is_last:
            results = self._stage.finish(step, hidden)
            is_awaited = bool(results)
            out = RankMessage("result", encode_result(step.step_id, results))
        else:
            out = RankMessage("step", body, hidden=hidden)
            if hidden.is_cuda:  # other threads' streams take it, and the span ends with the work
                torch.cuda.current_stream(hidden.device).record_event().synchronize()
        sent_bytes = out.num_bytes + len(spans)
        max_tokens = self._stage.max_tokens
        span = self._stage.clock.stop(
            is_awaited=is_awaited, sent_bytes=sent_bytes, max_tokens=max_tokens
        )
        out.spans = spans + encode_spans([span])
        return out


Hear = Callable[[RankMessage | BaseException], None]


class _Followers:
    """A leader's ways to the other ranks of its stage.

    They answer nothing but the last `stop`, and are listened to so that a death is noticed.
    """

    def __init__(self, part: Part, form: HiddenForm, hear: Hear) -> None:
        ranks = part.ranks[1:] if part.is_leader else ()
        self.senders = [_Sender(rank, form, hear) for rank in ranks]
        self._receivers = [_Receiver(rank, form, hear) for rank in ranks]

    def put(self, message: RankMessage) -> None:
        for each in self.senders:
            each.put(message)

    def join(self) -> None:
        """Wait until a `stop` is sent, and answered."""
        for sender in self.senders:
            sender.join()
        for receiver in self._receivers:
            receiver.join()


def serve(
    stage: StageWork,
    part: Part,
    form: HiddenForm,
    on_stop: Callable[[], None],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Do a rank's part of every step until rank 0 says stop; for all ranks but that one.

    Args:
        on_stop: called when it does, before a later stage hears it.
        release: called when a connection breaks; it ends this process's waits in sums.

    Raises:
        PipelineError: a neighbour is gone, or sends what does not fit.
    """
    inbox: queue.SimpleQueue[RankMessage | BaseException] = queue.SimpleQueue()
    failures: list[BaseException] = []

    def hear(message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            failures.append(message)
            release()
        inbox.put(message)

    def hear_follower(message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            hear(message)

    receiver = _Receiver(part.rank_before, form, hear)
    followers = _Followers(part, form, hear_follower)
    sender = _Sender(part.next_rank, form, hear)
    computer = _Computer(stage, part)
    while True:
        message = inbox.get()
        if isinstance(message, BaseException):
            raise message
        if message.kind in ("step", "stop"):
            followers.put(message)
        if message.kind == "step":
            step = decode_step(message.body)
            try:
                message = computer.run(step, message.body, message.spans, message.hidden)
            except PipelineError as error:
                if failures:  # by which it was released
                    raise failures[0] from error
                raise
        if message.kind == "stop":
            on_stop()
            followers.join()  # rank 0 hears of it last
        if part.is_leader or message.kind == "stop":
            sender.put(message)
        if message.kind == "stop":
            receiver.join()
            sender.join()
            return


class RingPipeline(QueuedPipeline):
    """Rank 0's end of the ring: the first stage, and the results of the last.

    Args:
        stage, part: of rank 0.
        form: of the hidden states.
        explain: told of a broken connection; returns the error that is known to have caused it.
        on_stop: called when all steps are done, before the other ranks hear that it is over.
        release: called when a rank has failed; it ends this process's waits in sums.
    """

    def __init__(
        self,
        stage: StageWork,
        part: Part,
        form: HiddenForm,
        explain: Callable[[str], FminferError],
        on_stop: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(partial(use_device, form.device))
        self._explain, self._on_stop, self._release = explain, on_stop, release
        assert part.rank == 0 and part.num_stages * part.num_shards > 1, "a ring has several ranks"
        self._computer = _Computer(stage, part)
        self._failure: BaseException | None = None  # the first one
        self._marks: queue.SimpleQueue[Mark] = queue.SimpleQueue()
        self._sender: _Sender | None = None  # None: this stage is the last, too
        self._followers = _Followers(part, form, self._hear_follower)
        if not part.is_last:
            self._sender = _Sender(part.next_rank, form, self.fail)
            self._receiver = _Receiver((part.num_stages - 1) * part.num_shards, form, self._take)
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Raise an error in whoever waits for a result; nothing more comes."""
        if isinstance(error, PipelineError):
            error = self._explain(str(error))
        self._failure = self._failure or error
        self.is_broken = True
        self._release()
        for each in filter(None, (self._sender, *self._followers.senders)):
            each.end()
        self._results.put(error)

    def submit(self, step: Step) -> None:
        """Send a step in.

        Raises:
            PipelineError, or what else made this rank fail: no result would come.
            UsageError: the pipeline was closed.
        """
        if self.is_broken:
            assert self._failure is not None, "it is broken by a failure"
            raise self._failure
        super().submit(step)

    def close(self) -> None:
        """Tell every rank to stop, and wait until the word has come round."""
        if self._is_closed:
            return
        super().close()
        if self.is_broken:
            return
        self._followers.join()
        if self._sender is not None:
            self._sender.join()
            self._receiver.join()

    def _work(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                if isinstance(step, Mark):
                    self._marks.put(step)
                    self._put(RankMessage("mark"))
                    continue
                body = encode_step(step)
                self._followers.put(RankMessage("step", body))
                self._put(self._computer.run(step, body, b"", None))
        except BaseException as error:
            self.fail(error)
        else:
            self._on_stop()
            self._followers.put(RankMessage("stop"))
            self._put(RankMessage("stop"))

    def _put(self, message: RankMessage) -> None:
        """Send a message to the next stage; with one stage, take it here."""
        (self._take if self._sender is None else self._sender.put)(message)

    def _hear_follower(self, message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            self.fail(message)

    def _take(self, message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            self.fail(message)
        elif message.kind == "result":
            self._results.put(decode_result(message.body, decode_spans(message.spans)))
        elif message.kind == "mark":
            self._results.put(self._marks.get())
