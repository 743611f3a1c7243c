"""What a server is told beside its engine: every option with its default, written once."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from fminfer.core.errors import UsageError
from fminfer.files.cache_place import CachePlace, find_place

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
DEFAULT_UPLOAD_BYTES = 2**30
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::([0-9]{0,5}))?")


@dataclass(slots=True, frozen=True)
class ServerSettings:
    """Options of one server.

    Raises:
        UsageError: a value outside its limits, a key or name that no client could send, or
            one of the two TLS files without the other.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()  # what /v1/models lists; empty: the model's own
    api_keys: tuple[str, ...] = ()  # any of them opens; empty: no key is asked for
    queue_size: int = 1000  # requests that may wait; 0: any number
    max_body_bytes: int = 16 * 2**20
    state: Path | None = None  # the folder of files and batches; None: there are none
    max_upload_bytes: int = DEFAULT_UPLOAD_BYTES  # of one file
    allowed_origins: tuple[str, ...] = ()  # of pages that may call (CORS); *: any
    allowed_hosts: tuple[str, ...] = ()  # that requests may be sent to, beside loopback names
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    keep_alive_s: float = 75.0  # that an idle connection stays open
    result_cache: Path | str | None = None  # a folder for answers; None: none is kept
    result_cache_bytes: int | None = None  # most room of these
    cache_size: int = 0  # requests whose answers are kept in memory
    cache_list_size: int = 1  # answers to one that draws without a seed; 1: none is kept
    log_level: LogLevel = "info"
    grace_s: float = 10.0  # that running requests have to end once the server is told to stop
    is_quiet: bool = False

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise UsageError("host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}; it must be 0 (any free one) to 65535")
        if self.queue_size < 0:
            raise UsageError(f"queue_size is {self.queue_size}; it must be 0 (no limit) or more")
        if self.cache_size < 0:
            raise UsageError(f"cache_size is {self.cache_size}; it must be 0 (none) or more")
        if self.cache_list_size > 1 and not self.cache_size:
            raise UsageError(
                f"cache_list_size is {self.cache_list_size}, and cache_size is 0: no answer is "
                "kept. Give --cache-size the number of requests whose answers to keep"
            )
        find_place(self.result_cache, self.result_cache_bytes)
        for name in ("cache_list_size", "max_body_bytes", "max_upload_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.state is None and self.max_upload_bytes != DEFAULT_UPLOAD_BYTES:
            raise UsageError("--max-upload-size has no effect without --state FOLDER")
        for name in ("keep_alive_s", "grace_s"):
            if not getattr(self, name) >= 0:  # a nan is refused, too
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 seconds or more")
        if self.log_level not in (allowed := get_args(LogLevel)):
            raise UsageError(
                f"log_level is {self.log_level!r}; it must be one of {', '.join(allowed)}"
            )
        if "" in self.served_model_names:
            raise UsageError("served_model_names holds an empty name; give each model a name")
        self._check_keys()
        for origin in self.allowed_origins:
            _check_origin(origin)
        for host in self.allowed_hosts:
            if split_host(host) is None:
                raise UsageError(
                    f"allowed_hosts holds {host!r}; give a name, or name:port, such as "
                    "llm.example.org or [fd00::1]:8000"
                )
        self._check_tls()

    @property
    def cache_place(self) -> CachePlace | None:
        """Where answers are kept on the disk; None: nowhere."""
        return find_place(self.result_cache, self.result_cache_bytes)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:  # a machine's own name often leads to its loopback
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return False
        address = split_host(f"[{found[0][4][0]}]")
        return address is not None and is_loopback_name(address[0])

    @property
    def hosts(self) -> frozenset[tuple[str, str]] | None:
        """Name and port of hosts that requests may be sent to; None: to any.

        A page can have its own name lead to this machine, and then call as if it came from here.
        Only a key, or the Host that its requests name, tells them from ours.
        """
        if not self.allowed_hosts and (self.api_keys or not self.is_loopback):
            return None
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(filter(None, map(split_host, (*self.allowed_hosts, own))))

    def _check_keys(self) -> None:
        """Refuse keys that no client could send, without showing them."""
        for number, key in enumerate(self.api_keys, 1):
            if not (key and key.isascii() and key.isprintable() and " " not in key):
                raise UsageError(
                    f"api_keys: key {number} of {len(self.api_keys)} is empty or has characters "
                    "that a header cannot carry; use letters, digits and signs, without spaces"
                )

    def _check_tls(self) -> None:
        files = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        for (name, path), other in zip(files.items(), reversed(files), strict=True):
            if path is not None and files[other] is None:
                raise UsageError(f"{name} is {path}, without {other}; give both, or neither")
            if path is not None and not path.is_file():
                raise UsageError(f"{name} is {path}, where there is no file; give a PEM file")


def _check_origin(origin: str) -> None:
    """Refuse what no browser sends as its Origin header."""
    if origin in ("*", "null"):
        return
    parts = urlsplit(origin)
    if not (parts.scheme and parts.netloc) or origin != f"{parts.scheme}://{parts.netloc}":
        raise UsageError(
            f"allowed_origins holds {origin!r}; give scheme, host and port without a path, such "
            "as https://example.org:8443, or * for any"
        )


def split_host(text: str) -> tuple[str, str] | None:
    """Return the name and port ("": none) of a Host header in one spelling; None: it is none."""
    found = _HOST.fullmatch(text.lower())
    if found is None:
        return None
    name = found[1] or found[2].removesuffix(".")
    with suppress(ValueError):
        address = ip_address(name)
        name = str(getattr(address, "ipv4_mapped", None) or address)
    return name, found[3] or ""


def is_loopback_name(name: str) -> bool:
    """Tell whether a name of `split_host` leads to the caller's own machine, whoever is asked."""
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
