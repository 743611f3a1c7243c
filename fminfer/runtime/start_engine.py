"""Makes the engine of a command, and informs the user."""

from __future__ import annotations

import click

from fminfer.compute.kernels.kernel_build import is_building
from fminfer.machine.user_cache import why_no_cache
from fminfer.models.checkpoint import Checkpoint
from fminfer.runtime.bars import LoadingBar, say
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.launch.processes import ProcessContext


def start_engine(run: ProcessContext, checkpoint: Checkpoint, compute: Compute) -> Engine:
    """Make the engine of a command, and print what the user should know about it."""
    config, is_quiet = run.config, run.is_quiet
    if config.model is None and config.random_init is None and not is_quiet:
        click.echo(
            "Using the demo model, which knows only the way between rooms; "
            "--model-name gives another.",
            err=True,
        )
    if not is_quiet and is_building():
        often = "each time" if why_no_cache() else "once"
        click.echo(
            f"Building kernels for this machine; this takes some seconds, {often}.", err=True
        )
    loading = LoadingBar(is_quiet=is_quiet)
    try:
        engine = Engine(config, checkpoint=checkpoint, on_progress=loading, compute=compute)
    finally:
        loading.close()
    if not is_quiet:
        engine.intake.on_warning = say
    if config.cuda_ids and engine.device.type == "cpu" and not is_quiet:
        click.echo("There is no GPU here: --cuda-id means nothing, the CPU computes.", err=True)
    if not is_quiet and (why := why_no_cache()):
        click.echo(f"Nothing is kept from run to run, which makes each slower: {why}.", err=True)
    if (told := engine.facts.streaming) and not is_quiet:
        click.echo(f"Offload: {told}.", err=True)
    elif config.offload != "off" and not is_quiet:
        click.echo("Offload: all layers fit, and stay in memory.", err=True)
    if why := engine.facts.why_plain if is_quiet else engine.facts.why_slower:
        click.echo(f"The run is slower than it could be: {why}.", err=True)
    return engine
