"""`fminfer serve`: answer HTTP requests until told to stop."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import click

from fminfer.cli.config_file import NOTICES, ConfiguredCommand, print_notices
from fminfer.cli.flags import make_flags
from fminfer.cli.old_command_lines import OLD_SERVE_OPTIONS, apply_old_serve_flags
from fminfer.cli.process import Ending, importing_engine, starting_process
from fminfer.client.remote_options import RemoteOptions, check_no_model_flags
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.option import pop_options
from fminfer.machine.installation import describe_install
from fminfer.pipeline.ranks import RankConfig
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.runtime.launch.role import Role, find_role
from fminfer.server.settings import ServerSettings

# What the extra brings, as it is imported.
EXTRA = (
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "python_multipart",
    "swagger_ui_bundle",
    "starlette",
)


class _ServeCommand(ConfiguredCommand):
    """Accepts the start line of EnergonAI's services, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags, and translate MODEL and the old ones."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            ctx.meta.setdefault(NOTICES, []).extend(apply_old_serve_flags(ctx))
        return rest


@click.command(
    cls=_ServeCommand,
    settings_of="serve",
    params=[*make_flags("serve"), *OLD_SERVE_OPTIONS],
)
@click.argument("model_argument", required=False, metavar="[MODEL]")
def serve(**options: Any) -> None:
    """Answer HTTP requests in OpenAI's form.

    \b
    fminfer serve /models/llama
    fminfer serve --model-name /models/llama --host 0.0.0.0 --port 8000
    fminfer serve --model-name /models/llama --state ~/batches  # /v1/files, /v1/batches
    fminfer serve --config fminfer.toml
    \f
    \b
    fminfer serve --model-name /models/opt-30b --world-size 4
    fminfer serve --engine http://host:8000/v1 --state ~/batches  # batches alone

    It has the engine of fminfer run, and its ranks. It needs the extra
    serve; without it the command that installs it is printed.

    Every flag is also a key of --config's file, and a variable: FMINFER_API_KEY=key1,key2 is
    --api-key. The start lines of EnergonAI's services work, too (docs/coming_from.md).

    \b
    Exit status: 0 told to stop, and every request that ran has its answer; 1 it failed;
    2 wrong usage; 129 hung up, 130 interrupted, 143 terminated before that.
    """
    ending = Ending(
        options["grace_s"],
        is_quiet=options["is_quiet"],
        is_verbose=options["is_verbose"],
    )
    try:
        settings = pop_options(ServerSettings, options)
        ranks = pop_options(RankConfig, {**options})
        config = pop_options(EngineConfig, options)
        remote = pop_options(RemoteOptions, options)
        if remote.engine is not None:
            check_no_model_flags(ranks, config)
            _require_state(settings)
        role = find_role(ranks, os.environ if remote.engine is None else {})
        if role.is_first:
            print_notices(is_quiet=settings.is_quiet)
            _require_extra()
            _warn_of_missing_key(settings)
        _run_server(settings, config, role, ending, remote)
    except (Exception, KeyboardInterrupt) as error:
        ending.fail(error)


def _require_extra() -> None:
    """Raise if packages of the extra are missing."""
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"fminfer serve needs {', '.join(missing)}, which the extra installs: "
            f"{describe_install('serve')}"
        )


def _warn_of_missing_key(settings: ServerSettings) -> None:
    if not settings.is_loopback and not settings.api_keys:
        click.echo(
            f"Warning: --host {settings.host} without a key: whoever reaches this "
            "machine can use the model. Set FMINFER_API_KEY, or leave --host out.",
            err=True,
        )


def _require_state(settings: ServerSettings) -> None:
    """Raise for a server that would have no route."""
    if settings.state is None:
        raise UsageError(
            "--engine has servers elsewhere answer, and this one then serves files and "
            "batches alone; give --state FOLDER, which keeps them"
        )


def _run_server(
    settings: ServerSettings,
    config: EngineConfig,
    role: Role,
    ending: Ending,
    remote: RemoteOptions,
) -> None:
    """Do this process's part of a server."""
    with starting_process(
        ProcessContext, config, role, ending, is_quiet=settings.is_quiet
    ) as process:
        if remote.engine is None or settings.state is None:
            with importing_engine(config, role):
                from fminfer.server.http import serve_process
            serve_process(process, settings)
        else:
            from fminfer.server.remote_serving import serve_remote

            serve_remote(process, settings, settings.state, remote)
