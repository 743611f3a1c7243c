"""Lets the ranks of a run, or of one of its pipelines, meet, exchange values and end."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from fminfer.core.errors import (
    FminferError,
    PipelineError,
    StoppedError,
    UsageError,
    make_printable,
)
from fminfer.machine.liveness import wait_until
from fminfer.pipeline.finding import list_interfaces, open_store
from fminfer.pipeline.ranks import RankPlace, Spread
from fminfer.pipeline.store import TELL_AFTER_S
from fminfer.pipeline.watch import HEAR_S, Fault, Watch

# ends this process at once; its argument is the kind of an error
End = Callable[[str], None]
STOP_POLL_S = 0.05
SEE_S = 1.0  # time to see that a child whose connection broke is dead
STAY_S = 60.0  # time for ranks to come and hear why there is no run
END_S = 10.0  # time for ranks to end after the stop message
# a rank may wait for work without limit; the watch sees deaths
FOREVER = timedelta(days=365)


class Children(Protocol):
    """The other ranks, as the processes that rank 0 has started."""

    def why_ended(self) -> str:
        """Say which one has ended without an order to, and how; "": none."""

    def why_killed(self, wait_s: float) -> str:
        """Say which one a signal has ended within this time; "": none."""

    def end(self, wait_s: float) -> None:
        """End all; each has this time to end by itself."""


class Meeting:
    """This process among other ranks. All of them learn it when one ends.

    Args:
        place: its place.
        prepare: called with this process's rank before it waits for the others; what it raises
            is announced to them as well.
        end: ends this process at once; None: it is not ours to end, and an error is raised.
        children: the other ranks, if this process has started them.

    Raises:
        PipelineError: a rank did not come, or two say that they are the same.
    """

    def __init__(
        self,
        place: RankPlace,
        spread: Spread,
        prepare: Callable[[int], None] = lambda rank: None,
        end: End | None = None,
        children: Children | None = None,
    ) -> None:
        deadline_s = time.monotonic() + spread.join_timeout_s
        self.spread = spread
        self._end = end
        self._children = children
        self._is_spawned = place.parent is not None  # whoever started it speaks for it
        # held for ever by the thread that ends the process
        self._last_words = threading.Lock()
        # what has ended the run, if the process goes on
        self.fault: Fault | None = None
        self.world_size = place.world_size
        self._pipeline = place.prefix.rstrip("/")  # its name, where there are several
        self._store = open_store(place, spread.join_timeout_s)
        self._is_holder = self._store.holder is not None
        self.rank = self._claim_rank(place)
        self.watch = Watch(
            self._store.open_connection(spread.join_timeout_s),
            self.rank,
            self.world_size,
            timeout_s=spread.rank_timeout_s,
            parent=place.parent,
            on_fault=self.end_rank,
            find_trouble=lambda: "" if children is None else children.why_ended(),
        )
        try:
            self._prepare(prepare)
            self._join_ranks(deadline_s)
        except BaseException as error:
            self._store.hide_address()
            if isinstance(error, Exception):
                self.announce_error(error)
            self.watch.stop()
            raise

    def announce_error(self, error: Exception) -> None:
        """Announce to the others why this rank ends, and wait until they can know it."""
        is_ours = isinstance(error, FminferError)
        self.watch.announce_fault(
            Fault.from_error(error, "" if is_ours else f"rank {self.rank} failed: ")
        )

    def _prepare(self, prepare: Callable[[int], None]) -> None:
        """Do what needs no other rank; report its errors now, and to all ranks that come."""
        try:
            prepare(self.rank)
        except StoppedError:  # a signal: the process ends now, with the signal's status
            raise
        except FminferError as error:
            if self._is_spawned or not self._is_holder or self._end is None:
                raise
            fault = Fault.from_error(error)
            print(f"Error: {make_printable(fault.text)}", file=sys.stderr, flush=True)
            self.watch.announce_fault(fault)  # this rank has said it, and stays
            claims = [f"claim/{rank}" for rank in range(self.world_size)]
            wait_until(lambda: self._store.check(claims), STAY_S)
            self.watch.announce_fault(fault)  # which gives the last one time to hear it
            self._store.hide_address()
            self._end(fault.kind)

    def _join_ranks(self, deadline_s: float) -> None:
        """Wait for the others, and learn on which machine each is."""
        own_address, store = self._store.ends
        self._where = {"host": socket.gethostname(), "store": store, "own": own_address}
        self._publish("joined", self._where)
        self._await_ranks(deadline_s)
        self._joined: list[dict[str, str]] = self.gather("joined")
        self.local_rank = self.local_ranks.index(self.rank)
        self.local_size = len(self.local_ranks)
        self.watch.all_joined.set()

    @property
    def hosts(self) -> list[str]:
        """Return the machine of each rank."""
        return [where["host"] for where in self._joined]

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks of this machine."""
        return [
            rank for rank, host in enumerate(self.hosts) if host == self._where["host"]
        ]

    def gather(self, name: str, value: object = None) -> list[Any]:
        """Wait for every rank's value, in rank order; publish this rank's first, if any."""
        if value is not None:
            self._publish(name, value)
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _publish(self, name: str, value: object) -> None:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def _claim_rank(self, place: RankPlace) -> int:
        known = int(self._store.compare_set("world_size", "", str(self.world_size)))
        if known != self.world_size:
            raise PipelineError(
                f"this rank was started with --world-size {self.world_size}, another "
                f"with {known}"
            )
        rank = place.rank
        if rank is None:
            rank = 0 if self._is_holder else self._store.add("order", 1)
        if rank >= self.world_size:
            raise PipelineError(
                f"{self.world_size} ranks have joined already (--world-size); this one "
                "is too many"
            )
        if self._store.add(f"claim/{rank}", 1) > 1:
            raise PipelineError(
                f"another process is rank {rank} already; give each its own --rank"
            )
        return rank

    def _await_ranks(self, deadline_s: float) -> None:
        tell_at_s = math.inf if self._is_spawned else time.monotonic() + TELL_AFTER_S
        while missing := [
            rank
            for rank in range(self.world_size)
            if not self._store.check([f"joined/{rank}"])
        ]:
            names = ", ".join(map(str, missing))
            if time.monotonic() > deadline_s:
                raise PipelineError(
                    f"rank {names} did not come within {self.spread.join_timeout_s:g} s "
                    f"(--join-timeout); {self.world_size - len(missing)} of {self.world_size} "
                    "ranks are here"
                )
            if time.monotonic() > tell_at_s:
                print(f"Waiting for rank {names} …", file=sys.stderr, flush=True)
                tell_at_s = math.inf
            time.sleep(STOP_POLL_S)
        self._store.has_all.set()

    def explain_fault(self, fault: Fault) -> Fault:
        """Add that a rank was killed, if this process can see it."""
        killed = "" if self._children is None else self._children.why_killed(SEE_S)
        return replace(fault, text=f"{fault.text}; {killed}") if killed else fault

    def fail_rank(self, error: BaseException) -> None:
        """Report to every rank that this one failed, and end it."""
        fault = Fault.from_error(error, f"rank {self.rank}: ")
        if not isinstance(error, FminferError):
            trace = "".join(traceback.format_exception(error)).rstrip()
            fault = Fault.from_error(error, f"rank {self.rank} failed: ", f"\n{trace}")
        self.end_rank(self.watch.report_fault(fault))

    def end_rank(self, fault: Fault) -> None:
        """End this rank at once: its threads wait for messages that will not come.

        If the process is not ours to end, whoever waits for the others gets an error.
        """
        fault = self.explain_fault(fault)
        if self._end is None:
            self.fault = fault
            self._store.close(fault.to_error())
            return
        self._last_words.acquire()
        # One voice is enough: that of a rank 0 that has started the others, and of who
        # is to blame.
        is_own = fault.text.startswith(
            (f"rank {self.rank} failed", f"rank {self.rank}:")
        )
        is_of_0 = re.match(r"rank 0\b(?! failed)", fault.text) is not None
        if self.rank == 0 or is_own or is_of_0 or not self._is_spawned:
            name = f"{self._pipeline}: " if self._pipeline else ""
            print(
                f"Error: {name}{make_printable(fault.text)}",
                file=sys.stderr,
                flush=True,
            )
        if self._is_holder and self._children is None:
            # the store, from which the others hear it, ends with this process
            time.sleep(HEAR_S)
        self._store.hide_address()
        self._end(fault.kind)


class Group(Meeting):
    """This process as one of several ranks that share a model's layers."""

    def _join_ranks(self, deadline_s: float) -> None:
        super()._join_ranks(deadline_s)
        _choose_interface(self._where, self._joined)
        self._connect_torch()

    def _connect_torch(self) -> None:
        """Let torch connect the ranks on a thread, as it sees neither signals nor faults."""
        errors: list[Exception] = []

        def connect() -> None:
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore("gloo", self._store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=FOREVER,
                )
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=connect, name="connecting", daemon=True)
        thread.start()
        while thread.is_alive():
            if self.fault is not None:
                raise self.fault.to_error()
            thread.join(STOP_POLL_S)
        for error in errors:
            raise error

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Announce to the other ranks, which wait for rank 0, why its work ends."""
        try:
            yield
        except (PipelineError, StoppedError):
            raise
        except BrokenPipeError:
            self.watch.announce_fault(Fault("whoever read the answers stopped reading"))
            raise
        except Exception as error:
            self.announce_error(error)
            if isinstance(error, FminferError):
                raise
            raise RuntimeError(f"rank 0 failed: {error}") from error
        finally:
            self._store.hide_address()

    def close(self, *, has_failed: bool = False) -> None:
        """End in good order, or after a failure end the ranks that this process has started."""
        self.watch.stop()
        self._store.hide_address()
        if not has_failed:
            _destroy_torch_group()
        if self._children is not None:
            self._children.end(0.0 if has_failed else END_S)
        if self._store.holder is not None:
            self._store.holder.close()
        self.watch.disconnect()
        self._store.disconnect()
        if has_failed and self._end is None:
            with suppress(Exception):  # its connections are broken
                _destroy_torch_group()


def _destroy_torch_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def check_agreement(meeting: Meeting, key: str, mine: dict[str, Any]) -> None:
    """Check that this rank was started for the same run as rank 0."""
    theirs = meeting.gather(key, mine)[0]
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise PipelineError(
                f"{name} is {mine.get(name)} on rank {meeting.rank} and "
                f"{theirs.get(name)} on rank 0; start every rank with the same model "
                "and options"
            )


def require_no_group() -> None:
    """Check that no other engine or program in this process has a group of torch."""
    if dist.is_initialized():
        raise UsageError(
            "this process has a torch.distributed group, and an engine of several "
            "ranks needs one of its own. Close the other engine, or make this one in "
            "another process"
        )


def _choose_interface(mine: dict[str, str], joined: list[dict[str, str]]) -> None:
    """Let gloo and NCCL use an interface on which every other rank can reach this one.

    gloo's own choice is the host's name, which often leads to the loopback interface.
    """
    away = [fields["store"] for fields in joined if not _is_beside_store(fields)]
    address = mine["own"]
    if away and _is_beside_store(mine):
        address = away[0]  # by which a rank of another machine has found this machine
    for name, its_address in list_interfaces().items():
        if its_address == address or (not away and its_address.startswith("127.")):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # as it is, no prefix
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return


def _is_beside_store(fields: dict[str, str]) -> bool:
    """Return whether a rank runs on the machine that holds the store."""
    return fields["own"] == fields["store"] or fields["own"].startswith("127.")
