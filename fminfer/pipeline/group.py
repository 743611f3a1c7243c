"""The ranks of one pipeline: they join, exchange messages and end together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from fminfer.core.errors import FminferError, PipelineError, StoppedError, UsageError
from fminfer.pipeline.addresses import interfaces
from fminfer.pipeline.meeting import STOP_POLL_S, Meeting
from fminfer.pipeline.watch import Fault

END_S = 10.0  # time for ranks to end once they were told to stop
FOREVER = timedelta(days=365)  # a rank may wait for work without limit; the watch sees deaths


class Group(Meeting):
    """This process as one of several ranks that share a model's layers."""

    def _meet(self, deadline: float, join_timeout_s: float) -> None:
        super()._meet(deadline, join_timeout_s)
        _choose_interface(self._where, self._joined)
        self._connect()

    def _connect(self) -> None:
        """Let torch connect the ranks on a thread, because it hears neither signals nor faults."""
        thread = _Connecting(self._place.store, self.rank, self.world_size)
        thread.start()
        while thread.is_alive():
            if self.fault is not None:
                raise self.fault.to_error()
            thread.join(STOP_POLL_S)
        if thread.error is not None:
            raise thread.error

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks, which wait for rank 0, why its work ends."""
        try:
            yield
        except (PipelineError, StoppedError):
            raise
        except BrokenPipeError:
            self.watch.warn(Fault("whoever read the answers stopped reading"))
            raise
        except Exception as error:
            self.warn(error)
            if isinstance(error, FminferError):
                raise
            raise RuntimeError(f"rank 0 failed: {error}") from error
        finally:
            self.forget()

    def leave(self) -> None:
        """End in good order: every rank has heard that the run is over."""
        self.watch.stop()
        self.forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._close(END_S)

    def abandon(self) -> None:
        """End the ranks that this process has started, whatever they do; it goes on by itself."""
        self.watch.stop()
        self.forget()
        self._close(0.0)
        if self._end is None and dist.is_initialized():
            with suppress(Exception):  # its connections are broken
                dist.destroy_process_group()

    def _close(self, wait_s: float) -> None:
        if self._children is not None:
            self._children.end(wait_s)
        if self._place.holder is not None:
            self._place.holder.close()
        self.watch.leave()
        self._store.leave()


def require_no_group() -> None:
    """Refuse several ranks in a process that has torch's group of another engine or program.

    Raises:
        UsageError: it has.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process has a torch.distributed group, and an engine of several ranks needs one "
            "of its own. Close the other engine, or make this one in another process"
        )


class _Connecting(threading.Thread):
    """Makes torch's group of all ranks."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(name="connecting", daemon=True)
        self._store, self._rank, self._world_size = store, rank, world_size
        self.error: Exception | None = None

    def run(self) -> None:
        """Connect, or keep the error."""
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", self._store),
                rank=self._rank,
                world_size=self._world_size,
                timeout=FOREVER,
            )
        except Exception as error:
            self.error = error


def _choose_interface(mine: dict[str, str], joined: list[dict[str, str]]) -> None:
    """Let gloo and NCCL use an interface on which every other rank can reach this one.

    gloo's own choice is the host's name, which often leads to the loopback interface.
    """
    away = [fields["store"] for fields in joined if not _is_beside_store(fields)]
    address = mine["own"]
    if away and _is_beside_store(mine):
        address = away[0]  # by which a rank of another machine has found this machine
    for name, found in interfaces().items():
        if found == address or (not away and found.startswith("127.")):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # as it is, no prefix
            return


def _is_beside_store(fields: dict[str, str]) -> bool:
    """Return whether a rank runs on the machine that holds the store."""
    return fields["own"] == fields["store"] or fields["own"].startswith("127.")
