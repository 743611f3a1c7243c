"""Where ranks meet: at an address, through torchrun's own store, or in a folder.

A folder is on one machine, or on several that share a disk. Its store listens on the loopback
interface until a rank of another machine asks for more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fminfer.core.errors import PipelineError, UsageError
from fminfer.machine.liveness import create_file_once, make_machine_name, wait_until
from fminfer.pipeline.handshake import (
    NoStoreError,
    WrongSecretError,
    read_home_secret,
    read_private_file,
)
from fminfer.pipeline.ranks import HOW_TO_SHARE, RankPlace
from fminfer.pipeline.store import Store, connect_to_store, hold_store

SIOCGIFADDR = 0x8915  # Linux: an interface's address
BACKLOG = 1024
PROBES = 3  # unanswered, after which a machine counts as gone
LOOPBACK = "127.0.0.1"
POLL_S = 0.1
AWAY_POLL_S = 0.5
TORN_S = 5.0  # time for the creator of a file to fill it
# time for a greeting at the address: the port may be another program's by now
GREET_S = 20.0
# time for the holder to see, on a shared disk, that a rank is on another machine
AWAY_S = 30.0
FILES = "fminfer-rendezvous-" + "[0-9]" * 6 + ".json"


def open_store(place: RankPlace, timeout_s: float) -> Store:
    """Open the store, or connect to the one that another process has opened.

    It is in rank 0: of ranks that have no number, whoever opens the store is rank 0.
    """
    if place.folder is not None:
        return _open_store_in_folder(place.folder, place.rank, place.secret, timeout_s)
    secret = place.secret or read_home_secret()
    if place.agent is not None:
        return _open_store_through_agent(place, secret, timeout_s)
    host = place.host
    port = place.port
    if place.listen_fd is not None:
        return hold_store(
            socket.socket(fileno=place.listen_fd), host, secret, timeout_s
        )
    if place.opens_store and (place.rank == 0 or is_here(host)):
        try:
            return hold_store(open_listener(host, port), host, secret, timeout_s)
        except OSError as error:
            if place.rank is not None:
                raise PipelineError(
                    f"rank {place.rank} cannot listen at {host}:{port} ({error}). Is "
                    "another run using the port? Give --dist-url another"
                ) from error
    return connect_to_store(host, port, secret, timeout_s, place.prefix)


def _open_store_through_agent(place: RankPlace, secret: str, timeout_s: float) -> Store:
    """Find the store by an address in that of torchrun's agent, which is open to everybody."""
    timeout = timedelta(seconds=timeout_s)
    try:
        agent = dist.TCPStore(
            place.host, place.port, None, False, timeout, wait_for_workers=False
        )
        keys = dist.PrefixStore(f"fminfer/{place.agent}", agent)
        if place.rank == 0:
            host = LOOPBACK if place.is_one_machine else place.host
            store = hold_store(open_listener(host, 0), host, secret, timeout_s)
            keys.set("address", json.dumps([host, store.port]))
            return store
        # torch's own wait would not hear Ctrl-C.
        if not wait_until(lambda: keys.check(["address"]), timeout_s):
            raise PipelineError(f"rank 0 did not come within {timeout_s:g} s")
        host, port = json.loads(keys.get("address"))
    except dist.DistError as error:
        raise PipelineError(f"torchrun's own store does not answer: {error}") from error
    return connect_to_store(host, port, secret, timeout_s)


def _open_store_in_folder(
    folder: Path, rank: int | None, secret: str | None, timeout_s: float
) -> Store:
    """Open a store and write its address into a folder, or connect to the one written there.

    Rank 0, or the first to come, writes it; the others read it.

    Files are numbered: one that leads nowhere (a killed run left it) is followed by the next
    number, which only one rank can create. So two that find the old file agree on the new one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--rendezvous {folder} cannot be made a folder: {error}"
        ) from error
    until_s = time.monotonic() + timeout_s
    seen_s: dict[Path, float] = {}  # when this rank first saw a file
    while time.monotonic() < until_s:
        store = None
        files = sorted(folder.glob(FILES))
        if files and rank != 0:
            # once: its holder may write another meanwhile
            fields = _read_address_file(files[-1], secret)
            store = _connect_by_file(files[-1], fields, secret, timeout_s)
            age_s = time.monotonic() - seen_s.setdefault(files[-1], time.monotonic())
            if store is None and _may_lead_soon(files[-1], fields, age_s):
                time.sleep(AWAY_POLL_S if fields else POLL_S)
                continue
        if store is None and rank in (0, None):
            store = _create_store(folder, files, secret, timeout_s)
        if store is not None:
            return store
        time.sleep(POLL_S)
    raise PipelineError(
        f"the ranks found no common store through {folder} in {timeout_s:g} s"
    )


def _read_address_file(file: Path, secret: str | None) -> dict[str, Any]:
    """Return what a rendezvous file says, or nothing if it is torn or gone.

    Without a secret of the environment it stands in the file, which must be this user's alone.
    """
    try:
        fields = json.loads(
            read_private_file(file) if secret is None else file.read_text()
        )
    except PermissionError as error:
        raise UsageError(
            f"{file} cannot be read: all ranks must be one user's"
        ) from error
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(fields, dict) and isinstance(fields.get("port"), int)
    return fields if is_whole and isinstance(fields.get("hosts"), list) else {}


def _connect_by_file(
    file: Path, fields: dict[str, Any], secret: str | None, timeout_s: float
) -> Store | None:
    """Connect to the store whose address a file holds; None: it leads nowhere."""
    used = secret or str(fields.get("secret", ""))
    for host in fields.get("hosts", ()):
        if is_loopback(host) and not _is_on_this_machine(fields):
            continue
        try:
            return Store(host, fields["port"], used, min(GREET_S, timeout_s))
        except (OSError, EOFError, NoStoreError):
            continue
        except WrongSecretError as error:
            # the port of a run that was killed is another's by now
            if secret is None and used:
                continue
            raise PipelineError(f"{file}: {error}. {HOW_TO_SHARE}") from None
    return None


def _is_on_this_machine(fields: dict[str, Any]) -> bool:
    return fields.get("machine") == machine_id()


def _may_lead_soon(file: Path, fields: dict[str, Any], age_s: float) -> bool:
    """Return whether a file may lead to a store soon; ask a holder that is away to listen."""
    if not fields:
        return age_s < TORN_S
    if _is_on_this_machine(fields) or fields["hosts"] != [LOOPBACK] or age_s >= AWAY_S:
        return False
    try:
        _away_mark(file).touch()
    except OSError as error:
        raise UsageError(f"{file.parent} cannot be written: {error}") from error
    return True


def _away_mark(file: Path) -> Path:
    """Return the file that exists once a rank is on another machine than the holder."""
    return file.with_suffix(".away")


def _create_store(
    folder: Path, old_files: list[Path], secret: str | None, timeout_s: float
) -> Store | None:
    """Open a store and write its address; None: another rank was faster.

    None of the old files leads anywhere. Without a secret of the environment one is made.
    """
    number = int(old_files[-1].stem.rpartition("-")[2]) + 1 if old_files else 0
    file = folder / FILES.replace("[0-9]" * 6, f"{number:06}")
    listener = open_listener(LOOPBACK, 0)
    used = secret or secrets.token_hex(32)
    fields = {
        "machine": machine_id(),
        "hosts": [LOOPBACK],
        "port": listener.getsockname()[1],
    }
    fields |= {} if secret else {"secret": used}
    try:
        is_first = create_file_once(file, json.dumps(fields).encode(), 0o600)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}") from error
    if not is_first:
        listener.close()
        return None
    for old in old_files:
        _remove_address_file(old)
    store = hold_store(listener, LOOPBACK, used, timeout_s)
    store.on_hide = lambda: _remove_address_file(file)
    threading.Thread(
        target=_serve_other_machines,
        args=(store, file, fields),
        name="away",
        daemon=True,
    ).start()
    return store


def _remove_address_file(file: Path) -> None:
    file.unlink(missing_ok=True)
    _away_mark(file).unlink(missing_ok=True)


def _serve_other_machines(store: Store, file: Path, fields: dict[str, Any]) -> None:
    """Listen on every interface once a rank of another machine has asked for it."""
    others = [
        address for address in list_interfaces().values() if not is_loopback(address)
    ]
    while others and not store.has_all.wait(AWAY_POLL_S):
        # which asks the disk, not a cache
        if not list(file.parent.glob(_away_mark(file).name)):
            continue
        listener = open_listener("", 0)
        assert store.holder is not None
        store.holder.listen_at(listener)
        draft = file.with_name(
            f".{file.name}.{socket.gethostname()}.{os.getpid()}.{store.port}"
        )
        address = fields | {"hosts": others, "port": listener.getsockname()[1]}
        create_file_once(draft, json.dumps(address).encode(), 0o600)
        os.replace(draft, file)
        return


def open_listener(host: str, port: int) -> socket.socket:
    """Listen for the ranks that connect to `host`.

    On its own address if that is of this machine, so that no other network reaches the port. A
    name gets every interface: a machine's own name often leads to its loopback.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    is_address = host.replace(".", "").isdigit()
    is_of_machine = is_loopback(host) or (is_address and is_here(host))
    try:
        listener.bind((host if is_of_machine else "", port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def set_silence_limit(
    peer: socket.socket, timeout_s: float, *, is_always_read: bool
) -> None:
    """Let the system end a connection whose other machine is silent for this time.

    Args:
        is_always_read: the process at the other end always reads. To Linux, one that does
            not read looks like a machine that is gone. If it may stop reading, a silent
            machine is noticed only while no data is on its way. Otherwise it takes 15 minutes.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, round(timeout_s / (PROBES + 1)))
    options = {"TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": PROBES}
    if is_always_read:
        options["TCP_USER_TIMEOUT"] = max(1, round(timeout_s * 1000))
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has each
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(host: str) -> bool:
    """Return whether an address is of the loopback interface; of names only localhost is."""
    return host.startswith("127.") or host == "localhost"


def is_here(host: str) -> bool:
    """Return whether an address is this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def machine_id() -> str:
    """Name what shares this process's loopback interface: a machine, or a container of it."""
    return f"{socket.gethostname()} {make_machine_name('net')}"


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface; empty where the system is no Linux."""
    addresses: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                addresses[name] = socket.inet_ntoa(
                    fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]
                )
    return addresses
