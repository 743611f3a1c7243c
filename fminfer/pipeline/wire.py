"""The wire between two ranks: a header, then what it announces.

It is torch.distributed, point to point.

Numbers and bytes go over gloo. Hidden states go over NCCL where every rank has a GPU of its own,
else over gloo, through the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import numpy as np
import orjson
import torch
import torch.distributed as dist

from fminfer.compute.values.step import (
    NO_TOKENS,
    NO_VECTORS,
    STEP_COLUMNS,
    ResultKind,
    Results,
    Step,
    StepResult,
    TokenLogprobs,
)
from fminfer.core.messages import StageSpan

Kind = Literal["step", "result", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RESULT_KINDS: tuple[ResultKind, ...] = get_args(ResultKind)
RESULT_COLUMNS = [each.name for each in fields(TokenLogprobs)]
HEADER_FIELDS = 4  # kind, span bytes, body bytes, tokens


@dataclass(slots=True)
class RankMessage:
    """A message of one rank to the next."""

    kind: Kind
    body: bytes = b""
    spans: bytes = b""  # of the stages it has been through
    hidden: torch.Tensor | None = field(default=None, repr=False)  # (tokens, hidden)

    @property
    def num_bytes(self) -> int:
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return 8 * HEADER_FIELDS + len(self.spans) + len(self.body) + hidden


@dataclass(slots=True, frozen=True)
class LinkSpec:
    """What both ends of a link have agreed on before they compute."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = None  # NCCL's; None: hidden states go over gloo


def use_own_stream(link: LinkSpec) -> AbstractContextManager[object]:
    """Let a thread's transfers run beside the compute of others; on a CPU they do anyway.

    Both ends wait for their stream, so what is handed to another thread is always complete.
    """
    if link.device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(link.device)
    return torch.cuda.stream(torch.cuda.Stream(link.device))  # type: ignore[no-untyped-call]


def send_message(message: RankMessage, rank: int, link: LinkSpec) -> None:
    """Send a message; it returns when the memory may be used again."""
    hidden = message.hidden
    tokens = 0 if hidden is None else len(hidden)
    header = [KINDS.index(message.kind), len(message.spans), len(message.body), tokens]
    dist.send(torch.tensor(header, dtype=torch.int64), rank)
    if message.spans or message.body:
        data = bytearray(message.spans + message.body)
        dist.send(torch.frombuffer(data, dtype=torch.uint8), rank)
    if hidden is not None and tokens:
        sent = hidden if link.group is not None else hidden.to("cpu")
        dist.send(sent.contiguous(), rank, group=link.group)
        _await_stream(link)


def receive_message(rank: int, link: LinkSpec) -> RankMessage:
    """Wait for a rank's next message."""
    header = torch.empty(HEADER_FIELDS, dtype=torch.int64)
    dist.recv(header, rank)
    kind, num_spans, num_body, tokens = header.tolist()
    data = torch.empty(num_spans + num_body, dtype=torch.uint8)
    hidden = None
    if len(data):
        dist.recv(data, rank)
    if tokens:
        hidden = _receive_hidden(rank, link, tokens)
    text = data.numpy().tobytes()
    return RankMessage(KINDS[kind], text[num_spans:], text[:num_spans], hidden)


def _receive_hidden(rank: int, link: LinkSpec, tokens: int) -> torch.Tensor:
    device = link.device if link.group is not None else torch.device("cpu")
    hidden = torch.empty((tokens, link.hidden_size), dtype=link.dtype, device=device)
    dist.recv(hidden, rank, group=link.group)
    hidden = hidden.to(link.device)
    _await_stream(link)
    # its memory is not reused before compute is done with it
    if link.device.type == "cuda":
        hidden.record_stream(torch.cuda.default_stream(link.device))
    return hidden


def _await_stream(link: LinkSpec) -> None:
    if link.device.type == "cuda":
        torch.cuda.current_stream(link.device).synchronize()


def encode_step(step: Step) -> bytes:
    """Return a step's bytes."""
    return _join_columns(step.step_id, [getattr(step, name) for name in STEP_COLUMNS])


def decode_step(data: bytes) -> Step:
    """Return the step of `encode_step`."""
    step_id, columns = _split_columns(data, STEP_COLUMNS.values())
    return Step(step_id, **dict(zip(STEP_COLUMNS, columns, strict=True)))


def encode_result(step_id: int, results: Results) -> bytes:
    """Return a result's bytes, without spans."""
    logprobs = [results.get(kind) or NO_TOKENS for kind in RESULT_KINDS]
    columns = [getattr(each, name) for each in logprobs for name in RESULT_COLUMNS]
    return _join_columns(step_id, [*columns, results.get("vectors", NO_VECTORS)])


def decode_result(data: bytes, spans: list[StageSpan]) -> StepResult:
    """Return the result of `encode_result`."""
    likes = [getattr(NO_TOKENS, name) for name in RESULT_COLUMNS] * len(RESULT_KINDS)
    step_id, columns = _split_columns(data, [*likes, NO_VECTORS])
    results: Results = {}
    for kind in RESULT_KINDS:
        logprobs = TokenLogprobs(*(next(columns) for _ in RESULT_COLUMNS))
        if len(logprobs):
            results[kind] = logprobs
    if len(vectors := next(columns)):
        results["vectors"] = vectors
    return StepResult(step_id, results, spans)


def encode_spans(spans: list[StageSpan]) -> bytes:
    """Return spans as lines of JSON, to which others may be appended."""
    return b"".join(
        orjson.dumps(span, option=orjson.OPT_APPEND_NEWLINE) for span in spans
    )


def decode_spans(data: bytes) -> list[StageSpan]:
    """Return the spans of `encode_spans`."""
    return [StageSpan(**orjson.loads(line)) for line in data.splitlines()]


def _join_columns(number: int, columns: list[np.ndarray]) -> bytes:
    """Return a number, the shape of each column, and the columns as bytes."""
    head = np.array(
        [number, *(size for each in columns for size in each.shape)], np.int64
    )
    return b"".join([head.tobytes(), *(each.tobytes() for each in columns)])


def _split_columns(
    data: bytes, likes: Iterable[np.ndarray]
) -> tuple[int, Iterator[np.ndarray]]:
    """Return the number and the columns of `_join_columns`; `likes` have their dtypes."""
    likes = list(likes)
    head = np.frombuffer(data, np.int64, 1 + sum(like.ndim for like in likes)).tolist()
    number, *sizes = head

    def read_columns() -> Iterator[np.ndarray]:
        start = 8 * len(head)
        place = 0
        for like in likes:
            shape = sizes[place : place + like.ndim]
            count = int(np.prod(shape))
            column = np.frombuffer(data, like.dtype, count, start)
            yield column.reshape(shape).copy()  # which is aligned
            start = start + count * like.itemsize
            place = place + like.ndim

    return number, read_columns()
