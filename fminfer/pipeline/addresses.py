"""Addresses of machines: which are this one's, and where to listen."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: an interface's address
BACKLOG = 1024
PROBES = 3  # unanswered, after which a machine counts as gone
LOOPBACK = "127.0.0.1"


def listen(host: str, port: int) -> socket.socket:
    """Listen for the ranks that are told `host`.

    On its own address if that is of this machine, so that no other network reaches the port. A
    name gets every interface: a machine's own name often leads to its loopback, where no other
    machine could reach it.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    is_own = is_loopback(host) or (_is_number(host) and is_here(host))
    try:
        listener.bind((host if is_own else "", port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def end_when_silent(peer: socket.socket, timeout_s: float, *, is_always_read: bool) -> None:
    """Let the system end a connection whose other machine is silent for this time.

    It answers for a process that is alive, however long that says nothing.

    Args:
        is_always_read: the process at the other end always reads. To Linux, one that does not read
            looks like a machine that is gone. If it may stop reading, a silent machine is noticed
            only while no data is on its way. Otherwise it takes 15 minutes.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    turn_s = max(1, round(timeout_s / (PROBES + 1)))
    options = {"TCP_KEEPIDLE": turn_s, "TCP_KEEPINTVL": turn_s, "TCP_KEEPCNT": PROBES}
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
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # the system is no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


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
            return LOOPBACK
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


def _is_number(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
