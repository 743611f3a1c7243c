"""The pipeline of several ranks: hidden states go from stage to stage, results back to rank 0.

A rank computes while a second thread receives the next message and a third sends the last one.
So transfers hide behind compute. Where ranks share a stage, its leader passes each step
on to the others before it computes its own shard of it.

With three stages and three micro-batches in flight, every stage always has work. The step
behind 1 on the same rows, here 1', needs the tokens that 1 drew:

    time →      | t0 | t1 | t2 | t3 | t4 | t5 | t6 |
    stage 0     | 1  | 2  | 3  | 1' | 2' | 3' | …  |    tokens in
    stage 1     |    | 1  | 2  | 3  | 1' | 2' | 3' |    hidden states of stage 0
    stage 2     |    |    | 1  | 2  | 3  | 1' | 2' |    hidden states of stage 1
    results     |    |    |    | 1  | 2  | 3  | 1' |    to rank 0, which forms 1', 2', …
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from fminfer.compute.values.step import Results, Step
from fminfer.core.errors import FminferError, PipelineError
from fminfer.core.messages import StageSpan
from fminfer.core.partition import Part
from fminfer.machine.device import use_device
from fminfer.pipeline.local import QueuedPipeline
from fminfer.pipeline.wire import (
    LinkSpec,
    RankMessage,
    decode_result,
    decode_spans,
    decode_step,
    encode_result,
    encode_spans,
    encode_step,
    receive_message,
    send_message,
    use_own_stream,
)

CLOSE_TIMEOUT_S = 10.0  # time for the stop message to go round
OnMessage = Callable[[RankMessage | BaseException], None]


class StageClock(Protocol):
    """Times a stage's steps, one after another."""

    def start(self) -> None:
        """Begin a step."""

    def stop(
        self, *, is_awaited: bool, sent_bytes: int = 0, max_tokens: int = 0
    ) -> StageSpan:
        """End the step that was begun, and return when it was."""


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


class _Sender(threading.Thread):
    """Sends messages to one rank, in order, until a `stop`."""

    def __init__(self, rank: int, link: LinkSpec, on_error: OnMessage) -> None:
        super().__init__(name=f"to-rank-{rank}", daemon=True)
        self._rank = rank
        self._link = link
        self._on_error = on_error
        self._messages: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self.start()

    def put(self, message: RankMessage | None) -> None:
        """Send a message; None: nothing more, once what waits is sent, as a rank has failed."""
        self._messages.put(message)

    def run(self) -> None:
        with _reporting_errors(self._rank, self._link, self._on_error):
            while (message := self._messages.get()) is not None:
                send_message(message, self._rank, self._link)
                if message.kind == "stop":
                    return


class _Receiver(threading.Thread):
    """Hands on what one rank sends, until a `stop`."""

    def __init__(self, rank: int, link: LinkSpec, on_message: OnMessage) -> None:
        super().__init__(name=f"from-rank-{rank}", daemon=True)
        self._rank = rank
        self._link = link
        self._on_message = on_message
        self.start()

    def run(self) -> None:
        with _reporting_errors(self._rank, self._link, self._on_message):
            is_over = False
            while not is_over:
                message = receive_message(self._rank, self._link)
                self._on_message(message)
                is_over = message.kind == "stop"


@contextmanager
def _reporting_errors(rank: int, link: LinkSpec, on_error: OnMessage) -> Iterator[None]:
    """Hand on the error that ends a thread's transfers, with the rank that they led to."""
    try:
        with use_own_stream(link):
            yield
    except RuntimeError as error:  # what torch.distributed raises
        first_line = (str(error).splitlines() or [type(error).__name__])[0][:160]
        detail = "" if "gloo" in first_line else f" ({first_line})"  # gloo says no more
        text = f"the connection to rank {rank} broke; it may have died{detail}"
        on_error(PipelineError(text))
    except BaseException as error:
        on_error(error)


class _RankWork:
    """What every rank does with a message, before it goes on to the next stage.

    The other ranks of its stage answer only the last `stop`. This rank receives from them
    to notice a death.
    """

    def __init__(
        self, stage: StageWork, part: Part, link: LinkSpec, on_error: OnMessage
    ) -> None:
        def on_message(message: RankMessage | BaseException) -> None:
            if isinstance(message, BaseException):
                on_error(message)

        self._stage = stage
        self._part = part
        ranks = part.ranks[1:] if part.is_leader else ()
        self.followers = [_Sender(rank, link, on_error) for rank in ranks]
        self._listeners = [_Receiver(rank, link, on_message) for rank in ranks]

    def process(self, message: RankMessage, step: Step | None = None) -> RankMessage:
        """Return the message for the next stage; `step`: that of the message, if it is known."""
        if message.kind in ("step", "stop"):
            for each in self.followers:
                each.put(message)
        if message.kind != "step":
            return message
        return self._compute(step or decode_step(message.body), message)

    def _compute(self, step: Step, message: RankMessage) -> RankMessage:
        self._stage.clock.start()
        hidden = self._stage.forward(step, message.hidden)
        is_awaited = True
        if self._part.is_last:
            results = self._stage.finish(step, hidden)
            is_awaited = bool(results)
            out = RankMessage("result", encode_result(step.step_id, results))
        else:
            out = RankMessage("step", message.body, hidden=hidden)
            # other threads' streams send it, and the span ends with the work
            if hidden.is_cuda:
                torch.cuda.current_stream(hidden.device).record_event().synchronize()
        sent_bytes = out.num_bytes + len(message.spans)
        max_tokens = self._stage.max_tokens
        span = self._stage.clock.stop(
            is_awaited=is_awaited, sent_bytes=sent_bytes, max_tokens=max_tokens
        )
        out.spans = message.spans + encode_spans([span])
        return out

    def join(self) -> None:
        """Wait until the other ranks of the stage have got a `stop`, and answered it."""
        for each in (*self.followers, *self._listeners):
            each.join(CLOSE_TIMEOUT_S)


def serve_stage(
    stage: StageWork,
    part: Part,
    link: LinkSpec,
    on_stop: Callable[[], None],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Compute the stage of a rank other than 0 in every step, until rank 0 says stop.

    Args:
        on_stop: called when it does, before a later stage knows it.
        release: called when a connection breaks; it ends this process's waits in sums.
    """
    inbox: queue.SimpleQueue[RankMessage | BaseException] = queue.SimpleQueue()
    failures: list[BaseException] = []

    def on_message(message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            failures.append(message)
            release()
        inbox.put(message)

    receiver = _Receiver(part.previous_rank, link, on_message)
    sender = _Sender(part.next_rank, link, on_message)
    work = _RankWork(stage, part, link, on_message)
    is_over = False
    while not is_over:
        message = inbox.get()
        if isinstance(message, BaseException):
            raise message
        try:
            message = work.process(message)
        except PipelineError as error:
            if failures:  # by which it was released
                raise failures[0] from error
            raise
        is_over = message.kind == "stop"
        if failures and not is_over:  # an aborted sum may look as if it were done
            raise failures[0]
        if is_over:
            on_stop()
            work.join()  # rank 0 knows it last
        if part.is_leader or is_over:
            sender.put(message)
    receiver.join(CLOSE_TIMEOUT_S)
    sender.join(CLOSE_TIMEOUT_S)


class RingPipeline(QueuedPipeline):
    """Rank 0's end of the ring: the first stage, and the results of the last.

    Args:
        explain: returns the error that is known to have caused a broken connection.
        on_stop: called when all steps are done, before the other ranks know that it is over.
        release: called when a rank has failed; it ends this process's waits in sums.
    """

    def __init__(
        self,
        stage: StageWork,
        part: Part,
        link: LinkSpec,
        explain: Callable[[str], FminferError],
        on_stop: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(partial(use_device, link.device))
        self._explain = explain
        self._on_stop = on_stop
        self._release = release
        assert part.rank == 0 and part.num_stages * part.num_shards > 1, (
            "a ring has several ranks"
        )
        # of the steps whose results are due
        self._epochs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ring: list[_Sender | _Receiver] = []  # of other stages
        self._send_on: Callable[[RankMessage], None] = (
            self._receive_message
        )  # with one stage
        self._rank_work = _RankWork(stage, part, link, self._receive_message)
        if not part.is_last:
            sender = _Sender(part.next_rank, link, self._receive_message)
            self._send_on = sender.put
            self._ring = [
                sender,
                _Receiver(part.previous_rank, link, self._receive_message),
            ]
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, PipelineError):
            error = self._explain(str(error))
        super().fail(error)
        # On a thread, because aborting the sums of a hanging GPU may block.
        threading.Thread(target=self._release, name="releasing", daemon=True).start()
        for each in (*self._ring, *self._rank_work.followers):
            if isinstance(each, _Sender):
                each.put(None)

    def _run_steps(self) -> None:
        try:
            while (entry := self._steps.get()) is not None:
                epoch, step = entry
                self._epochs.put(epoch)
                self._send_on(
                    self._rank_work.process(
                        RankMessage("step", encode_step(step)), step
                    )
                )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames hold weights
            self.fail(error)
        else:
            self._on_stop()
            self._send_on(self._rank_work.process(RankMessage("stop")))
            self._rank_work.join()
            for each in self._ring:  # these end, too, once the stop has come round
                each.join(CLOSE_TIMEOUT_S)

    def _receive_message(self, message: RankMessage | BaseException) -> None:
        if isinstance(message, BaseException):
            self.fail(message)
        elif message.kind == "result":
            result = decode_result(message.body, decode_spans(message.spans))
            self._deliver_result(self._epochs.get(), result)
