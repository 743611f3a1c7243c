"""The ranks of one run: they join, learn each other's facts, and end together.

It knows processes and machines, not layers or steps.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fminfer.errors import FminferError, PipelineError
from fminfer.pipeline.store import StorePlace, interfaces, open_store, own_address
from fminfer.pipeline.watch import Watch
from fminfer.ranks import RankFacts, is_spawned

FOREVER = timedelta(days=365)  # a rank may wait for work as long as it likes; the watch sees deaths
STORE_IS_GONE = "rank 0, which holds the ranks together, is gone"


class Group:
    """This process as one of several ranks.

    Args:
        facts: its place.
        join_timeout_s: how long the others may take to come.
        rank_timeout_s: how long one of them may be silent.

    Raises:
        PipelineError: a rank did not come, or two say that they are the same.
    """

    def __init__(self, facts: RankFacts, *, join_timeout_s: float, rank_timeout_s: float) -> None:
        started = time.monotonic()
        self.world_size = facts.world_size
        self._place = open_store(facts, join_timeout_s)
        self._store = dist.PrefixStore("fminfer", self._place.store)
        self.rank = self._take_rank(facts)
        watch_store = dist.PrefixStore("fminfer", self._place.connect())
        self.watch = Watch(
            watch_store,
            self.rank,
            self.world_size,
            timeout_s=rank_timeout_s,
            parent=facts.parent,
            on_fault=self._die,
        )
        self._set("joined", {"host": socket.gethostname()})
        self._await_all(join_timeout_s - (time.monotonic() - started), join_timeout_s)
        joined = self.gather("joined")
        same_host = [r for r, fields in enumerate(joined) if fields["host"] == socket.gethostname()]
        self.local_rank, self.local_size = same_host.index(self.rank), len(same_host)
        self.watch.all_joined.set()
        _choose_interface(self._place)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", self._place.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=FOREVER,
        )

    def gather(self, name: str, value: object = None) -> list[Any]:
        """Publish this rank's value and wait for every rank's, in rank order.

        Args:
            value: JSON; None: it is published already.
        """
        if value is not None:
            self._set(name, value)
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.wait(keys, FOREVER)
            return [json.loads(self._store.get(key)) for key in keys]
        except dist.DistNetworkError as error:
            raise PipelineError(STORE_IS_GONE) from error

    def fail(self, error: BaseException) -> None:
        """Tell every rank that this one failed, and end it."""
        text = str(error)
        if not isinstance(error, FminferError):
            text = f"rank {self.rank} failed: {error}\n"
            text += "".join(traceback.format_exception(error)).rstrip()
        self._die(self.watch.report(text))

    def leave(self) -> None:
        """End in peace: every rank has heard that the run is over."""
        self.watch.stop()
        self._place.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _set(self, name: str, value: object) -> None:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def _take_rank(self, facts: RankFacts) -> int:
        rank = self._store.add("order", 1) - 1 if facts.rank is None else facts.rank
        if rank >= self.world_size:
            raise PipelineError(
                f"{self.world_size} ranks have joined already (--world-size); this one is too many"
            )
        if self._store.add(f"claim/{rank}", 1) > 1:
            raise PipelineError(f"another process is rank {rank} already; give each its own --rank")
        return rank

    def _await_all(self, timeout_s: float, shown_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in range(self.world_size):
            left = max(0.01, deadline - time.monotonic())
            try:
                self._store.wait([f"joined/{rank}"], timedelta(seconds=left))
            except dist.DistStoreError:
                missing = [r for r in range(self.world_size) if not self._has_joined(r)]
                if missing:
                    text = (
                        f"rank {', '.join(map(str, missing))} did not come within {shown_s:g} s "
                        f"(--join-timeout); {self.world_size - len(missing)} of {self.world_size} "
                        "ranks are here"
                    )
                    self.watch.warn(text)
                    raise PipelineError(text) from None
            except dist.DistNetworkError as error:
                raise PipelineError(STORE_IS_GONE) from error

    def _has_joined(self, rank: int) -> bool:
        return bool(self._store.check([f"joined/{rank}"]))

    def _die(self, fault: str) -> None:
        """End this rank at once: its threads wait for messages that will not come."""
        # Under the launcher one voice is enough: rank 0's, unless it is the one to blame.
        is_heard = self.rank == 0 or not is_spawned() or f"rank {self.rank} failed" in fault
        if is_heard or fault.startswith("rank 0"):
            print(f"Error: {fault}", file=sys.stderr, flush=True)
        self._place.leave()
        os._exit(1)


def _choose_interface(place: StorePlace) -> None:
    """Let gloo use the interface that leads to the store; by itself it goes by the host's name."""
    address = own_address(place.host)
    for name, found in interfaces().items():
        if found == address or (found.startswith("127.") and address.startswith("127.")):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
