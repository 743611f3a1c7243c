"""Lets the ranks of one run, or of one of its pipelines, meet and learn of each other."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from fminfer.core.errors import FminferError, PipelineError, StoppedError, printable
from fminfer.pipeline.addresses import LOOPBACK, address_of, is_here, listen, own_address
from fminfer.pipeline.handshake import secret_of_home
from fminfer.pipeline.meeting_folder import meet_in_folder
from fminfer.pipeline.ranks import RankFacts
from fminfer.pipeline.store_place import POLL_S, TELL_AFTER_S, StorePlace, connect, hold
from fminfer.pipeline.watch import HEAR_S, Fault, Watch


def open_store(facts: RankFacts, timeout_s: float) -> StorePlace:
    """Open the store, or connect to the one that another process has opened.

    It is in rank 0: of ranks that are told no number, whoever opens the store is rank 0.

    Raises:
        PipelineError: nobody opened it in time, its port is taken, or its secret is another.
        UsageError: there is no place for a secret, or for the rendezvous.
    """
    if facts.folder is not None:
        return meet_in_folder(facts.folder, facts.rank, facts.secret, timeout_s)
    secret = facts.secret or secret_of_home()
    if facts.agent is not None:
        return _through_agent(facts, facts.agent, secret, timeout_s)
    host, port = facts.host, facts.port
    if facts.listen_fd is not None:
        return hold(socket.socket(fileno=facts.listen_fd), host, secret, timeout_s)
    is_asked = facts.rank in (None, 0) if facts.holds_store is None else facts.holds_store
    if is_asked and (facts.rank == 0 or is_here(host)):
        try:
            return hold(listen(host, port), host, secret, timeout_s)
        except OSError as error:
            if facts.rank is not None:
                raise PipelineError(
                    f"rank {facts.rank} cannot listen at {host}:{port} ({error}). Is another run "
                    "using the port? Give --dist-url another"
                ) from error
    store = connect(host, port, secret, timeout_s, facts.prefix)
    return StorePlace(store, host, port, secret, timeout_s, facts.prefix)


def _through_agent(facts: RankFacts, prefix: str, secret: str, timeout_s: float) -> StorePlace:
    """Find the store by an address in that of torchrun's agent, which is open to everybody."""
    timeout = timedelta(seconds=timeout_s)
    try:
        agent = dist.TCPStore(facts.host, facts.port, None, False, timeout, wait_for_workers=False)
        told = dist.PrefixStore(f"fminfer/{prefix}", agent)
        if facts.rank == 0:
            host = LOOPBACK if facts.is_one_machine else facts.host
            place = hold(listen(host, 0), host, secret, timeout_s)
            told.set("address", json.dumps([place.host, place.port]))
            return place
        until_s = time.monotonic() + timeout_s
        while not told.check(["address"]):  # torch's own wait would not hear Ctrl-C
            if time.monotonic() > until_s:
                raise PipelineError(f"rank 0 did not come within {timeout_s:g} s")
            time.sleep(POLL_S)
        host, port = json.loads(told.get("address"))
    except dist.DistError as error:
        raise PipelineError(f"torchrun's own store does not answer: {error}") from error
    store = connect(host, port, secret, timeout_s)
    return StorePlace(store, host, port, secret, timeout_s)


End = Callable[[str], None]  # ends this process at once; it is told the kind of an error
STOP_POLL_S = 0.05
SEE_S = 1.0  # time to see that a child whose connection broke is dead
STAY_S = 60.0  # time for ranks to come and hear why there is no run


class Children(Protocol):
    """The other ranks, as the processes that rank 0 has started."""

    def why_ended(self) -> str:
        """Say which process has ended without being told to, and how; "": none."""

    def why_killed(self, wait_s: float) -> str:
        """Say which process a signal has ended within this time; "": none."""

    def end(self, wait_s: float) -> None:
        """End all processes; each has this time to end by itself."""


class Meeting:
    """This process among other ranks. All hear of it when one ends.

    Args:
        facts: its place.
        end: ends this process at once; None: it is not ours to end, and an error is raised.
        children: the other ranks, if this process has started them.
        join_timeout_s: how long the others may take to come.
        rank_timeout_s: how long one of them may be silent.
        prepare: called with this process's rank before it waits for the others; what it raises
            is told to them as well.

    Raises:
        PipelineError: a rank did not come, or two say that they are the same.
    """

    def __init__(
        self,
        facts: RankFacts,
        *,
        join_timeout_s: float,
        rank_timeout_s: float,
        prepare: Callable[[int], None] = lambda rank: None,
        end: End | None = None,
        children: Children | None = None,
    ) -> None:
        deadline = time.monotonic() + join_timeout_s
        self._end, self._children = end, children
        self._is_spawned = facts.parent is not None  # whoever started it speaks for it
        self._last_words = threading.Lock()  # held for good by the thread that ends the process
        self.fault: Fault | None = None  # what has ended the run, if the process goes on
        self.world_size = facts.world_size
        self._pipeline = facts.prefix.rstrip("/")  # its name, where there are several
        self._place = open_store(facts, join_timeout_s)
        self._store = self._place.store
        self.rank = self._take_rank(facts)
        self.watch = Watch(
            self._place.connect(),
            self.rank,
            self.world_size,
            timeout_s=rank_timeout_s,
            parent=facts.parent,
            on_fault=self.die,
            look=lambda: "" if children is None else children.why_ended(),
        )
        try:
            self._prepare(prepare)
            self._meet(deadline, join_timeout_s)
        except BaseException as error:
            self.forget()
            if isinstance(error, Exception):
                self.warn(error)
            self.watch.stop()
            raise

    def warn(self, error: Exception) -> None:
        """Tell the others why this rank ends, and give them time to hear it."""
        if isinstance(error, FminferError):
            self.watch.warn(Fault.of(error))
        else:
            self.watch.warn(Fault(f"rank {self.rank} failed: {error}"))

    def _prepare(self, prepare: Callable[[int], None]) -> None:
        """Do what needs no other rank; report its errors now, and to all ranks that come."""
        try:
            prepare(self.rank)
        except StoppedError:  # a signal: the process ends now, with the signal's status
            raise
        except FminferError as error:
            if self._is_spawned or not self._place.is_holder or self._end is None:
                raise
            fault = Fault.of(error)
            print(f"Error: {printable(fault.text)}", file=sys.stderr, flush=True)
            self.watch.warn(fault)  # this rank has said it, and stays
            until_s = time.monotonic() + STAY_S
            claims = [f"claim/{rank}" for rank in range(self.world_size)]
            while time.monotonic() < until_s and not self._store.check(claims):
                time.sleep(STOP_POLL_S)
            self.watch.warn(fault)  # which gives the last one time to hear it
            self.forget()
            self._end(fault.kind)

    def _meet(self, deadline: float, join_timeout_s: float) -> None:
        """Wait for the others, and learn on which machine each is."""
        address = address_of(self._place.host)
        self._where = {
            "host": socket.gethostname(),
            "store": address,  # as this rank reaches it
            "own": address if self._place.is_holder else own_address(address),
        }
        self._set("joined", self._where)
        self._await_all(deadline, join_timeout_s)
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
        return [rank for rank, host in enumerate(self.hosts) if host == self._where["host"]]

    def gather(self, name: str, value: object = None) -> list[Any]:
        """Publish this rank's value and wait for every rank's, in rank order.

        Args:
            value: JSON; None: it is published already.
        """
        if value is not None:
            self._set(name, value)
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _set(self, name: str, value: object) -> None:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def forget(self) -> None:
        """Take this run's address away, so that no other run finds it."""
        self._place.leave()

    def _take_rank(self, facts: RankFacts) -> int:
        known = int(self._store.compare_set("world_size", "", str(self.world_size)))
        if known != self.world_size:
            raise PipelineError(
                f"this rank was started with --world-size {self.world_size}, another with {known}"
            )
        rank = facts.rank
        if rank is None:
            rank = 0 if self._place.is_holder else self._store.add("order", 1)
        if rank >= self.world_size:
            raise PipelineError(
                f"{self.world_size} ranks have joined already (--world-size); this one is too many"
            )
        if self._store.add(f"claim/{rank}", 1) > 1:
            raise PipelineError(f"another process is rank {rank} already; give each its own --rank")
        return rank

    def _await_all(self, deadline: float, shown_s: float) -> None:
        tell_at, is_told = time.monotonic() + TELL_AFTER_S, self._is_spawned
        ranks, store = range(self.world_size), self._store
        while missing := [rank for rank in ranks if not store.check([f"joined/{rank}"])]:
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"rank {', '.join(map(str, missing))} did not come within {shown_s:g} s "
                    f"(--join-timeout); {self.world_size - len(missing)} of {self.world_size} "
                    "ranks are here"
                )
            if time.monotonic() > tell_at and not is_told:
                names = ", ".join(map(str, missing))
                print(f"Waiting for rank {names} …", file=sys.stderr, flush=True)
                is_told = True
            time.sleep(STOP_POLL_S)
        self._place.has_all.set()

    def explain(self, fault: Fault) -> Fault:
        """Add that a rank was killed, if this process can see it."""
        killed = "" if self._children is None else self._children.why_killed(SEE_S)
        return replace(fault, text=f"{fault.text}; {killed}") if killed else fault

    def fail(self, error: BaseException) -> None:
        """Tell every rank that this one failed, and end it."""
        text = f"rank {self.rank}: {error}"
        if not isinstance(error, FminferError):
            text = f"rank {self.rank} failed: {error}\n"
            text += "".join(traceback.format_exception(error)).rstrip()
        kind = error.kind if isinstance(error, FminferError) else FminferError.__name__
        self.die(self.watch.report(Fault(text, kind)))

    def die(self, fault: Fault) -> None:
        """End this rank at once: its threads wait for messages that will not come.

        If the process is not ours to end, whoever waits for the others is told by an error.
        """
        fault = self.explain(fault)
        if self._end is None:
            self.fault = fault
            self._store.close(fault.to_error())
            return
        self._last_words.acquire()
        # One voice is enough: that of a rank 0 that has started the others, and of who is to blame.
        is_own = fault.text.startswith((f"rank {self.rank} failed", f"rank {self.rank}:"))
        is_of_0 = re.match(r"rank 0\b(?! failed)", fault.text) is not None
        if self.rank == 0 or is_own or is_of_0 or not self._is_spawned:
            name = f"{self._pipeline}: " if self._pipeline else ""
            print(f"Error: {name}{printable(fault.text)}", file=sys.stderr, flush=True)
        if self._place.is_holder and self._children is None:
            time.sleep(HEAR_S)  # the store, from which the others hear it, ends with this process
        self.forget()
        self._end(fault.kind)
