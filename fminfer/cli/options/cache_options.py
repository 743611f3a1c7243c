"""Options of answers that are kept: on the disk, for runs and servers, and in a server's memory."""

from __future__ import annotations

from pathlib import Path

from fminfer.cli.options.option_groups import KEPT, in_group
from fminfer.cli.options.value_types import ByteSize, PathOrUrl
from fminfer.files.cache_place import DEFAULT_BYTES
from fminfer.server.settings import ServerSettings

DEFAULTS = ServerSettings()
_option = in_group(KEPT)

RESULT_CACHE_OPTIONS = [
    _option(
        "--result-cache",
        metavar="FOLDER",
        type=PathOrUrl(path_type=Path),
        help="Keep answers here, and take them for equal requests of other runs and servers. This "
        "serves greedy and scored requests, and those with a seed of their own.  [default: none is "
        "kept]",
    ),
    _option(
        "--result-cache-size",
        "result_cache_bytes",
        type=ByteSize(),
        help="Most disk space of these answers: 500M, 10G. The one that was not used for longest "
        f"goes first.  [default: {DEFAULT_BYTES // 2**30}G]",
    ),
]
SERVED_CACHE_OPTIONS = [
    _option(
        "--cache-size",
        metavar="N",
        type=int,
        default=DEFAULTS.cache_size,
        show_default=True,
        help="Also keep in memory the answers to the last N requests, for equal ones. 0: none.",
    ),
    _option(
        "--cache-list-size",
        metavar="N",
        type=int,
        default=DEFAULTS.cache_list_size,
        show_default=True,
        help="Above 1: also keep in memory N answers to each request that draws without a seed. "
        "Once N are there, one of them comes back at random. Needs --cache-size.",
    ),
]
