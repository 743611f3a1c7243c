"""Options of a server: where it listens, who may call it, and how much may wait."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from fminfer.cli.options.option_groups import REQUESTS, SERVER, in_group
from fminfer.cli.options.value_types import ByteSize, Duration, Words
from fminfer.core.config import EngineConfig
from fminfer.server.settings import LogLevel, ServerSettings

DEFAULTS, ENGINE_DEFAULTS = ServerSettings(), EngineConfig()
_option, _request_option = in_group(SERVER), in_group(REQUESTS)

SERVER_OPTIONS = [
    _option(
        "--host",
        default=DEFAULTS.host,
        show_default=True,
        help="Address to listen at. The default is reached from this machine only; 0.0.0.0 from "
        "any. Then ask for a key.",
    ),
    _option(
        "--port",
        type=int,
        default=DEFAULTS.port,
        show_default=True,
        help="Port to listen at. 0: any free one, which is printed.",
    ),
    _option(
        "--served-model-name",
        "served_model_names",
        multiple=True,
        type=Words(),
        help="Name of the model for clients. May be repeated.  [default: the model's own]",
    ),
    _option(
        "--api-key",
        "api_keys",
        multiple=True,
        type=Words(),
        help="Key that a client must send: Authorization: Bearer KEY. May be repeated; each opens. "
        "Other users of this machine can read it on a command line, so rather set "
        "FMINFER_API_KEY.  [default: none is asked for]",
    ),
    _option(
        "--queue-size",
        type=int,
        default=DEFAULTS.queue_size,
        show_default=True,
        help="Most requests that wait; further ones are refused with status 429. 0: no limit.",
    ),
    _option(
        "--max-body-size",
        "max_body_bytes",
        type=ByteSize(),
        default=DEFAULTS.max_body_bytes,
        help="Largest body of a request: 512K, 16M.  "
        f"[default: {DEFAULTS.max_body_bytes // 2**20}M]",
    ),
    _option(
        "--state",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder that keeps files and batches, also beyond a restart. With it the server has "
        "/v1/files and /v1/batches.  [default: none]",
    ),
    _option(
        "--max-upload-size",
        "max_upload_bytes",
        type=ByteSize(),
        default=DEFAULTS.max_upload_bytes,
        help="Largest file of /v1/files: 500M, 10G. Needs --state.  "
        f"[default: {DEFAULTS.max_upload_bytes // 2**30}G]",
    ),
    _option(
        "--allow-origin",
        "allowed_origins",
        multiple=True,
        type=Words(),
        help="Origin whose pages may call the server from a browser (CORS), such as "
        "https://example.org; * is any. May be repeated.  [default: none]",
    ),
    _option(
        "--allow-host",
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        type=Words(),
        help="Host that requests may be sent to beside localhost: a name, or name:port. May be "
        "repeated; others get status 403.  [default: only localhost, if --host is of this machine "
        "alone and no key is asked for; otherwise any]",
    ),
    _option(
        "--ssl-certfile",
        type=click.Path(path_type=Path),
        help="PEM file of the certificate: serve https.",
    ),
    _option(
        "--ssl-keyfile", type=click.Path(path_type=Path), help="PEM file of the certificate's key."
    ),
    _option(
        "--keep-alive",
        "keep_alive_s",
        type=Duration(),
        default=f"{DEFAULTS.keep_alive_s:g}",
        show_default=True,
        help="Time that an idle connection stays open. A proxy or client that reuses connections "
        "needs a shorter one.",
    ),
    _option(
        "--log-level",
        type=click.Choice(get_args(LogLevel), case_sensitive=False),
        default=DEFAULTS.log_level,
        show_default=True,
        help="What the server tells. critical: why it ends. error: its own faults, too. warning: "
        "what is strange about requests, too. info: every 10 s what it does, too. debug: a line "
        "for each response, too.",
    ),
    _option(
        "--grace",
        "grace_s",
        type=Duration(),
        default=f"{DEFAULTS.grace_s:g}",
        show_default=True,
        help="Time that running requests have to end once the server is told to stop. A second "
        "Ctrl-C ends it at once.",
    ),
    _option("-q", "--quiet", is_flag=True, help="Print only errors, and why a kernel is not used."),
    _option("-v", "--verbose", is_flag=True, help="Show tracebacks and library warnings."),
]
# Of those that a run has too, but with another meaning.
SERVED_REQUEST_OPTIONS = [
    _request_option(
        "--seed",
        type=int,
        default=ENGINE_DEFAULTS.seed,
        show_default=True,
        help="Seed of random weights. A request without a seed of its own draws by chance.",
    ),
    _request_option(
        "--check-model",
        is_flag=True,
        default=ENGINE_DEFAULTS.check_model,
        help="Refuse requests for another model, with status 404. Otherwise any name is accepted.",
    ),
]
