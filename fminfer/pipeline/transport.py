"""The wire between two ranks: a header, then what it announces (torch.distributed, point to point).

Numbers and bytes go over gloo. Hidden states go over NCCL where every rank has a GPU of its own,
else over gloo, through the host's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist

from fminfer.core.errors import PipelineError

MAGIC = 0x666D696E66657231  # "fminfer1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Kind = Literal["step", "result", "mark", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEADER_FIELDS = 7  # magic, kind, span bytes, body bytes, tokens, hidden size, dtype


@dataclass(slots=True)
class RankMessage:
    """What one rank tells the next."""

    kind: Kind
    body: bytes = b""
    spans: bytes = b""  # of the stages it has been through
    hidden: torch.Tensor | None = field(default=None, repr=False)  # (tokens, hidden)

    @property
    def num_bytes(self) -> int:
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return 8 * HEADER_FIELDS + len(self.spans) + len(self.body) + hidden


@dataclass(slots=True, frozen=True)
class HiddenForm:
    """What both ends of a link must agree on."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = None  # NCCL's; None: hidden states go over gloo


def use_own_stream(form: HiddenForm) -> AbstractContextManager[object]:
    """Let a thread's transfers run beside the compute of others; on a CPU they do anyway.

    Both ends wait for their stream, so what is handed to another thread is always complete.
    """
    if form.device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(form.device)
    return torch.cuda.stream(torch.cuda.Stream(form.device))  # type: ignore[no-untyped-call]


def send(message: RankMessage, rank: int, form: HiddenForm) -> None:
    """Send a message; it returns when the memory may be used again."""
    hidden = message.hidden
    tokens, size, dtype = 0, 0, 0
    if hidden is not None:
        tokens, size = hidden.shape
        dtype = DTYPES.index(hidden.dtype)
    kind = KINDS.index(message.kind)
    header = [MAGIC, kind, len(message.spans), len(message.body), tokens, size, dtype]
    dist.send(torch.tensor(header, dtype=torch.int64), rank)
    for part in (message.spans, message.body):
        if part:
            dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), rank)
    if hidden is not None and tokens:
        if form.group is not None:
            dist.send(hidden.contiguous(), rank, group=form.group)
        else:
            dist.send(hidden.to("cpu").contiguous(), rank)
        _await_stream(form)


def receive(rank: int, form: HiddenForm) -> RankMessage:
    """Wait for a rank's next message.

    Raises:
        PipelineError: what arrives is not what this rank expects.
    """
    header = torch.empty(HEADER_FIELDS, dtype=torch.int64)
    dist.recv(header, rank)
    magic, kind, num_spans, num_body, tokens, size, dtype = header.tolist()
    if magic != MAGIC or not 0 <= kind < len(KINDS):
        raise PipelineError(f"rank {rank} sent something that is no message of this version")
    spans, body = (_receive_bytes(count, rank) for count in (num_spans, num_body))
    hidden = None
    if tokens:
        hidden = _receive_hidden(rank, form, (tokens, size), DTYPES[dtype])
    return RankMessage(KINDS[kind], body, spans, hidden)


def _receive_bytes(count: int, rank: int) -> bytes:
    if not count:
        return b""
    data = torch.empty(count, dtype=torch.uint8)
    dist.recv(data, rank)
    return data.numpy().tobytes()


def _receive_hidden(
    rank: int, form: HiddenForm, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    if shape[1] != form.hidden_size or dtype != form.dtype:
        raise PipelineError(
            f"rank {rank} sends hidden states of size {shape[1]} in {dtype}; this rank expects "
            f"{form.hidden_size} in {form.dtype}. Start every rank with the same model and --dtype"
        )
    device = form.device if form.group is not None else torch.device("cpu")
    hidden = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(hidden, rank, group=form.group)
    hidden = hidden.to(form.device)
    _await_stream(form)
    if form.device.type == "cuda":  # its memory is not reused before compute is done with it
        hidden.record_stream(torch.cuda.default_stream(form.device))
    return hidden


def _await_stream(form: HiddenForm) -> None:
    if form.device.type == "cuda":
        torch.cuda.current_stream(form.device).synchronize()
