"""Makes the engine of a command by the role of its process, and informs the user."""

from __future__ import annotations

from collections.abc import Callable

import click

from fminfer.compute.kernels.kernel_build import is_building
from fminfer.core.config import EngineConfig
from fminfer.core.errors import printable
from fminfer.machine.user_cache import why_no_cache
from fminfer.models.checkpoint import Checkpoint
from fminfer.pipeline.group import Group
from fminfer.runtime.bars import LoadingBar, write_beside_bar
from fminfer.runtime.build.agreement import require_room_for_all
from fminfer.runtime.build.one_pipeline import OnePipeline
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.launch.leading import lead_ranks
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_process import TeamPipeline, start_pipelines

MakeEngine = Callable[[Checkpoint, LoadingBar], Engine]


def own_engine(run: ProcessContext) -> MakeEngine:
    """Return a function that makes the engine; this process has started the others."""
    config, spread, children = run.config, run.role.spread, run.children

    def make(checkpoint: Checkpoint, loading: LoadingBar) -> Engine:
        if spread.num_pipelines > 1:
            require_room_for_all(config, checkpoint, spread)
            return engine_of_several(
                config,
                checkpoint,
                lambda: start_pipelines(children, config, spread, run.child_options),
            )
        group = None
        if children.all:
            group = lead_ranks(config, children, spread, run.child_options, run.end)
        return engine_of_one(config, checkpoint, loading, group)

    return make


def engine_of_one(
    config: EngineConfig, checkpoint: Checkpoint, loading: LoadingBar, group: Group | None
) -> Engine:
    """Return an engine over one pipeline, whose other ranks are met already."""
    return Engine(
        config,
        checkpoint=checkpoint,
        compute=lambda config, checkpoint, tokenizer: OnePipeline(
            config, checkpoint, tokenizer, on_progress=loading, group=group
        ),
    )


def engine_of_several(
    config: EngineConfig, checkpoint: Checkpoint, start: Callable[[], list[TeamPipeline]]
) -> Engine:
    """Return an engine over several pipelines."""
    return Engine(
        config,
        checkpoint=checkpoint,
        compute=lambda config, checkpoint, tokenizer: Team(checkpoint, start, say),
    )


def start_engine(run: ProcessContext, make: Callable[[LoadingBar], Engine]) -> Engine:
    """Make the engine, and print what the user should know about it."""
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
        engine = make(loading)
    finally:
        loading.close()
    if not is_quiet:
        engine.tell_warnings(say)
    if config.cuda_ids and engine.device.type == "cpu" and not is_quiet:
        click.echo("There is no GPU here: --cuda-id means nothing, the CPU computes.", err=True)
    if not is_quiet and (why := why_no_cache()):
        click.echo(f"Nothing is kept from run to run, which makes each slower: {why}.", err=True)
    if why := engine.facts.why_plain if is_quiet else engine.facts.why_slower:
        click.echo(f"The run is slower than it could be: {why}.", err=True)
    return engine


def say(text: str) -> None:
    """Tell the user something while rows run."""
    write_beside_bar(printable(text).encode())
