"""Where ranks find each other: an address, a shared folder, or the store of torchrun's agent."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from fminfer.core.errors import PipelineError
from fminfer.pipeline.addresses import LOOPBACK, is_here, listen
from fminfer.pipeline.meeting_folder import meet_in_folder
from fminfer.pipeline.ranks import RankFacts
from fminfer.pipeline.secret import secret_of_home
from fminfer.pipeline.store_place import POLL_S, StorePlace, connect, hold


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
