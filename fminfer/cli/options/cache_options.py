"""Options of answers that are kept: on the disk, for runs and servers, and in a server's memory."""

from __future__ import annotations

from pathlib import Path

from fminfer.cli.options.option_groups import SERVER, SPEED, in_group
from fminfer.cli.options.value_types import ByteSize, PathOrUrl
from fminfer.files.cache_place import DEFAULT_BYTES
from fminfer.server.settings import ServerSettings

DEFAULTS = ServerSettings()
_option, _server_option = in_group(SPEED), in_group(SERVER)

RESULT_CACHE_OPTIONS = [
    _option(
        "--result-cache",
        metavar="FOLDER",
        type=PathOrUrl(path_type=Path),
        help="Keep answers here, and take them for equal requests of other runs and servers. Only "
        "greedy and scored requests, and those with a seed of their own.  [default: none is kept]",
    ),
    _option(
        "--result-cache-size",
        "result_cache_bytes",
        type=ByteSize(),
        help="Most room of these answers: 500M, 10G. The one that was not used for longest goes "
        f"first.  [default: {DEFAULT_BYTES // 2**30}G]",
    ),
]
SERVED_CACHE_OPTIONS = [
    _server_option(
        "--cache-size",
        type=int,
        default=DEFAULTS.cache_size,
        show_default=True,
        help="Keep the answers of so many requests in memory, for equal ones.",
    ),
    _server_option(
        "--cache-list-size",
        type=int,
        default=DEFAULTS.cache_list_size,
        show_default=True,
        help="Above 1, also answer requests that draw without a seed from memory: once so many "
        "answers to one are there, one of them comes back at random. Needs --cache-size.",
    ),
]
