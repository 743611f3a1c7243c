"""The ranks of one pipeline: they join, exchange messages and end together.

It knows processes and machines, not layers or steps.
"""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import torch.distributed as dist

from fminfer.errors import FminferError
from fminfer.pipeline.addresses import interfaces
from fminfer.pipeline.meeting import Meeting, status_of
from fminfer.pipeline.watch import Fault

FOREVER = timedelta(days=365)  # a rank may wait for work as long as it likes; the watch sees deaths


class Group(Meeting):
    """This process as one of several ranks that share a model's layers."""

    def _meet(self, deadline: float, join_timeout_s: float) -> None:
        super()._meet(deadline, join_timeout_s)
        _choose_interface(self._where, self._joined)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", self._place.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=FOREVER,
        )

    def fail(self, error: BaseException) -> None:
        """Tell every rank that this one failed, and end it."""
        text = f"rank {self.rank}: {error}"
        if not isinstance(error, FminferError):
            text = f"rank {self.rank} failed: {error}\n"
            text += "".join(traceback.format_exception(error)).rstrip()
        self.die(self.watch.report(Fault(text, status_of(error))))

    def leave(self) -> None:
        """End in peace: every rank has heard that the run is over."""
        self.watch.stop()
        self.forget()
        if dist.is_initialized():
            dist.destroy_process_group()


def _choose_interface(mine: dict[str, str], joined: list[dict[str, str]]) -> None:
    """Let gloo and NCCL use an interface on which every other rank can reach this one.

    By itself gloo goes by the host's name, which often leads to the loopback interface.
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
    """Tell whether a rank runs on the machine that holds the store."""
    return fields["own"] == fields["store"] or fields["own"].startswith("127.")
