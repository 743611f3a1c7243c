"""The options of a server beside its engine's, each with its default, written once."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fminfer.answers.cache_place import KeptAnswers
from fminfer.core.errors import UsageError
from fminfer.core.option import Amount, Bytes, Count, Folder, Seconds, option
from fminfer.machine.stopper import ProcessOptions

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
DEFAULT_LIMITS = (200 * 2**20, 50_000)  # bytes and lines of a file, as OpenAI has them
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::([0-9]{0,5}))?")


_option = partial(option, group="Server", commands=("serve",))


@dataclass(frozen=True)
class ServerSettings(KeptAnswers, ProcessOptions):
    """Options of one server."""

    host: str = _option(
        "Address to listen on. Only this machine reaches the default; any machine reaches "
        "0.0.0.0, so set --api-key for it.",
        default="127.0.0.1",
        is_positional=True,
        old={"--http_host": {}, "server_host": {}},
    )
    port: int = _option(
        "Port to listen on. 0: any free one, which is printed.",
        default=8000,
        old={"--http_port": {}, "server_port": {}},
    )
    served_model_names: tuple[str, ...] = _option(
        "Name of the model for clients. May be repeated.  [default: the model's own]",
        flags=("--served-model-name",),
    )
    api_keys: tuple[str, ...] = _option(
        "Key that a client must send: Authorization: Bearer KEY. May be repeated; any "
        "of them is accepted. Other users of this machine see command lines, so prefer "
        "FMINFER_API_KEY.  [default: none is asked for]",
        flags=("--api-key",),
    )
    queue_size: Amount = _option(
        "Most requests that wait; further ones are refused with status 429. 0: no limit.",
        default=1000,
        old={"--queue_size": {}, "executor_max_queue_size": {}},
    )
    max_body_bytes: Bytes = _option(
        "Largest body of a request: 512K, 16M.", default=16 * 2**20
    )
    state: Folder | None = _option(
        "Folder that keeps files and batches across restarts. With it the server has "
        "/v1/files and /v1/batches.  [default: none]"
    )
    max_upload_bytes: Bytes = _option(
        "Largest file of /v1/files: 500M, 10G. Needs --state.",
        default=DEFAULT_LIMITS[0],
    )
    max_batch_lines: Count = _option(
        "Most lines of a file of /v1/files, blank ones among them. Needs --state.",
        default=DEFAULT_LIMITS[1],
        metavar="N",
    )
    allowed_origins: tuple[str, ...] = _option(
        "Origin whose pages may call the server from a browser (CORS), such as "
        "https://example.org; * is any. May be repeated.  [default: none]",
        flags=("--allow-origin",),
        old={"allow_cors": {"true": ["*"]}},
    )
    allowed_hosts: tuple[str, ...] = _option(
        "Host that requests may be sent to beside localhost: a name, or name:port. May be "
        "repeated; others get status 403.  [default: only localhost if --host is a loopback "
        "address and there is no --api-key; otherwise any]",
        flags=("--allow-host", "--allowed-host"),
    )
    ssl_certfile: Path | None = _option("PEM file of the certificate: serve https.")
    ssl_keyfile: Path | None = _option("PEM file of the certificate's key.")
    keep_alive_s: Seconds = _option(
        "Time that an idle connection stays open. A proxy or client that reuses "
        "connections must close them sooner.",
        default=75.0,
        old={"timeout_keep_alive": {}},
    )
    log_level: LogLevel = _option(
        "What the server logs; each level adds to the ones before. critical: why it "
        "ends. error: its own faults. warning: what is strange about requests. info: "
        "every 10 s what it does. debug: a line for each response.",
        default="info",
    )
    cache_size: Amount = _option(
        "Also keep in memory the answers to the last N requests, for equal ones. 0: none.",
        default=0,
        group="Kept answers",
        metavar="N",
    )
    cache_list_size: Count = _option(
        "Above 1: also keep in memory N answers to each request that draws without a seed. Once "
        "there are N, one of them is returned at random. Needs --cache-size.",
        default=1,
        group="Kept answers",
        metavar="N",
    )

    def check(self) -> None:
        """Raise for values that cannot be, and for those that no client could send."""
        if not self.host.strip():
            raise UsageError(
                "host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all"
            )
        if not 0 <= self.port <= 65535:
            raise UsageError(
                f"port is {self.port}; it must be 0 (any free one) to 65535"
            )
        if self.cache_list_size > 1 and not self.cache_size:
            raise UsageError(
                f"cache_list_size is {self.cache_list_size}, and cache_size is 0: no answer is "
                "kept. Give --cache-size the number of requests whose answers to keep"
            )
        if (
            self.state is None
            and (self.max_upload_bytes, self.max_batch_lines) != DEFAULT_LIMITS
        ):
            raise UsageError(
                "--max-upload-size and --max-batch-lines have no effect without --state FOLDER"
            )
        self._check_keys()
        for origin in self.allowed_origins:
            _check_origin(origin)
        for host in self.allowed_hosts:
            if parse_host(host) is None:
                raise UsageError(
                    f"allowed_hosts holds {host!r}; give a name, or name:port, such as "
                    "llm.example.org or [fd00::1]:8000"
                )
        self._check_tls()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:  # a machine's own name often leads to its loopback
            addresses = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError):
            return False
        address = parse_host(f"[{addresses[0][4][0]}]")
        return address is not None and is_loopback_name(address[0])

    @property
    def hosts(self) -> frozenset[tuple[str, str]] | None:
        """Name and port of hosts that requests may be sent to; None: to any.

        A page can have its own name lead to this machine, and then call as if it came from here.
        Only a key, or the Host that its requests name, tells them from ours.
        """
        if not self.allowed_hosts and (self.api_keys or not self.is_loopback):
            return None
        host = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(filter(None, map(parse_host, (*self.allowed_hosts, host))))

    def _check_keys(self) -> None:
        """Raise for keys that no client could send, without showing them."""
        for number, key in enumerate(self.api_keys, 1):
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise UsageError(
                    f"api_keys: key {number} of {len(self.api_keys)} has characters that a "
                    "header cannot carry; use letters, digits and signs, without spaces"
                )

    def _check_tls(self) -> None:
        files = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        for (name, path), other in zip(files.items(), reversed(files), strict=True):
            if path is not None and files[other] is None:
                raise UsageError(
                    f"{name} is {path}, without {other}; give both, or neither"
                )
            if path is not None and not path.is_file():
                raise UsageError(
                    f"{name} is {path}, where there is no file; give a PEM file"
                )


def _check_origin(origin: str) -> None:
    """Raise for what no browser sends as its Origin header."""
    if origin in ("*", "null"):
        return
    parts = urlsplit(origin)
    if (
        not (parts.scheme and parts.netloc)
        or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        raise UsageError(
            f"allowed_origins holds {origin!r}; give scheme, host and port without a path, such "
            "as https://example.org:8443, or * for any"
        )


def parse_host(text: str) -> tuple[str, str] | None:
    """Return the name and port ("": none) of a Host header in one spelling; None: it is none."""
    match = _HOST.fullmatch(text.lower())
    if match is None:
        return None
    name = match[1] or match[2].removesuffix(".")
    with suppress(ValueError):
        address = ip_address(name)
        name = str(getattr(address, "ipv4_mapped", None) or address)
    return name, match[3] or ""


def is_loopback_name(name: str) -> bool:
    """Whether a name of `parse_host` always leads to the caller's own machine."""
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
