"""Where ranks find each other: torch's TCPStore, by address or through a shared folder.

It knows nothing of what the ranks will do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fminfer.errors import PipelineError, UsageError
from fminfer.ranks import RankFacts

TELL_AFTER_S = 5.0  # that this rank waits for others
SIOCGIFADDR = 0x8915  # Linux: an interface's address
RENDEZVOUS_FILES = "fminfer-rendezvous-" + "[0-9]" * 6 + ".json"


@dataclass(slots=True)
class StorePlace:
    """An open store, and what other connections to it need."""

    store: dist.TCPStore
    host: str
    port: int
    timeout_s: float
    is_holder: bool  # it is in this process
    file: Path | None = None  # of the rendezvous, if this process wrote it

    def connect(self) -> dist.TCPStore:
        """Open another connection; calls on one wait for each other."""
        if not self.is_holder:
            return _connect(self.host, self.port, self.timeout_s)
        try:
            return _connect(self.host, self.port, min(4.0, self.timeout_s))
        except PipelineError:
            raise PipelineError(
                f"rank 0 cannot reach itself at {self.host}:{self.port}; give an address of the "
                "machine that it runs on"
            ) from None

    def leave(self) -> None:
        """Remove the rendezvous file."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def open_store(facts: RankFacts, timeout_s: float) -> StorePlace:
    """Open the store, or connect to the one that another process has opened.

    It is in rank 0, or in torchrun's agent: of ranks that are told no number, whoever opens the
    store is rank 0.

    Raises:
        PipelineError: nobody opened it in time, or its port is taken.
    """
    if facts.folder is not None:
        return _through_folder(facts.folder, facts.rank, timeout_s)
    host, port = facts.host, facts.port
    if facts.listen_fd is not None:
        return _hold(host, port, facts.listen_fd, timeout_s)
    is_asked = facts.rank in (None, 0) if facts.holds_store is None else facts.holds_store
    if is_asked and (facts.rank == 0 or _is_here(host)):
        try:
            listener = _listen(host, port)
        except OSError as error:
            if facts.rank is not None:
                raise PipelineError(
                    f"rank {facts.rank} cannot listen at {host}:{port} ({error}). Is another run "
                    "using the port? Give --dist-url another"
                ) from error
        else:
            return _hold(host, port, listener.detach(), timeout_s)
    store = _connect(host, port, timeout_s)
    return StorePlace(store, host, port, timeout_s, is_holder=False)


def _hold(
    host: str, port: int, listen_fd: int, timeout_s: float, file: Path | None = None
) -> StorePlace:
    store = _open(host, port, listen_fd, timeout_s)
    return StorePlace(store, host, port, timeout_s, is_holder=True, file=file)


def _open(host: str, port: int, listen_fd: int, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(
        host if _is_loopback(host) else "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a store.

    torch's own waits hear no Ctrl-C, and one that meets a port of another program never ends; so
    they are on a thread that can be left behind.
    """
    started, is_told = time.monotonic(), False
    while not _answers(host, port):
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise PipelineError(_why_nobody(host, port, timeout_s))
        if waited_s > TELL_AFTER_S and not is_told:
            print(f"Waiting for rank 0 at {host}:{port} …", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(0.1)
    found: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            found.put(store)
        except Exception as error:
            found.put(error)

    threading.Thread(target=work, name="store", daemon=True).start()
    while time.monotonic() - started < timeout_s + 1:
        with contextlib.suppress(queue.Empty):
            store = found.get(timeout=0.1)
            if isinstance(store, Exception):
                break
            return store
    raise PipelineError(
        f"something answers at {host}:{port}, but it is no rank 0 of fminfer; is another program "
        "using the port? Give all ranks another"
    )


def _why_nobody(host: str, port: int, timeout_s: float) -> str:
    text = f"nobody answered at {host}:{port} within {timeout_s:g} s, where rank 0 was to be; "
    try:
        socket.gethostbyname(host)
    except OSError:
        return text + f"this machine knows no host {host}"
    return text + "is it started, and can this machine reach it?"


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the loopback only if that is what the address says, else on every interface.

    A machine's own name often leads to its loopback, where no other machine could reach it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host if _is_loopback(host) else "", port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "localhost"


def _is_here(host: str) -> bool:
    """Tell whether an address is this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _through_folder(folder: Path, rank: int | None, timeout_s: float) -> StorePlace:
    """Rank 0, or the first to come, writes its address into the folder; the others read it.

    Files are numbered: one that leads nowhere (a killed run left it) is followed by the next
    number, which only one rank can create. So two that find the old file agree on the new one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--rendezvous {folder} cannot be made a folder: {error}") from error
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        files = sorted(folder.glob(RENDEZVOUS_FILES))
        place = _join(files[-1], timeout_s) if files and rank != 0 else None
        if place is None and rank in (0, None):
            place = _found(folder, files, timeout_s)
        if place is not None:
            return place
        time.sleep(0.1)
    raise PipelineError(f"the ranks found no common store through {folder} in {timeout_s:g} s")


def _join(file: Path, timeout_s: float) -> StorePlace | None:
    """Connect to the store whose address a file holds; None: it leads nowhere."""
    try:
        fields = json.loads(file.read_text())
        host = next(host for host in fields["hosts"] if _answers(host, fields["port"]))
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    store, port = _connect(host, fields["port"], timeout_s), fields["port"]
    return StorePlace(store, host, port, timeout_s, is_holder=False)


def _found(folder: Path, old_files: list[Path], timeout_s: float) -> StorePlace | None:
    """Open a store and write its address; None: another rank was faster.

    Args:
        old_files: in order; none of them leads anywhere.
    """
    number = int(old_files[-1].stem.rpartition("-")[2]) + 1 if old_files else 0
    file = folder / RENDEZVOUS_FILES.replace("[0-9]" * 6, f"{number:06}")
    listener = _listen("", 0)
    port = listener.getsockname()[1]
    others = [address for address in interfaces().values() if not _is_loopback(address)]
    fields = {"hosts": others or ["127.0.0.1"], "port": port}
    draft = folder / f".{file.name}.{socket.gethostname()}.{os.getpid()}.{port}"
    draft.write_text(json.dumps(fields))
    try:
        os.link(draft, file)
    except FileExistsError:
        listener.close()
        return None
    finally:
        draft.unlink()
    for old in old_files:
        old.unlink(missing_ok=True)
    return _hold("127.0.0.1", port, listener.detach(), timeout_s, file)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def address_of(host: str) -> str:
    """Return a host's IPv4 address; a name that leads nowhere is returned as it is."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def own_address(towards: str) -> str:
    """Return this machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface; empty where the system is no Linux."""
    found: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
