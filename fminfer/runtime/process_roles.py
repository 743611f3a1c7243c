"""What a process of the command does by its role: it makes an engine, or is a rank of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import click
import transformers

from fminfer.compute.kernels.kernel_build import describe_shipped_fault, is_building
from fminfer.core.errors import FminferError, StoppedError
from fminfer.core.terminal import find_width, wrap_lines
from fminfer.machine.user_cache import describe_cache_fault
from fminfer.models.stored.rival_weights import describe_unread_files
from fminfer.pipeline.group import End, Group
from fminfer.pipeline.ranks import RankPlace
from fminfer.plan.run_plan import RunPlan, name_of
from fminfer.runtime.bars import LoadingBar, say
from fminfer.runtime.computing import Compute, start_computing
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.launch.processes import ProcessContext, Processes
from fminfer.runtime.launch.role import Role, Task
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.load.one_pipeline import OnePipeline, serve_rank
from fminfer.runtime.team.team_apart import Apart
from fminfer.runtime.team.team_core import Team
from fminfer.runtime.team.team_member import serve_pipeline

Led = TypeVar("Led")
Lead = Callable[[RunPlan, Compute], Led]


def lead_or_join(
    process: ProcessContext, prepare: Opening, lead: Lead[Led]
) -> Led | None:
    """Lead the engine if this is its first process; otherwise be a rank of it, until it ends.

    Args:
        prepare: is called by ranks that are started apart, before they meet.
        lead: makes the engine, given the plan and what computes for it, and does the command's
            work with it.
    """
    if not process.is_verbose:
        transformers.logging.set_verbosity_error()
    with process.stopper.listening():
        facts = process.role.facts
        if facts is None:
            with _naming_rank_0() if process.role.kind == "starter" else nullcontext():
                compute = partial(start_computing, run=process)
                return lead(prepare.plan_run(), compute)
        if process.role.spread.num_pipelines > 1:
            return _join_several_pipelines(process, facts, prepare, lead)
        group = Group(facts, process.role.spread, prepare, process.end)
        if group.rank > 0:
            process.stopper.defer_to_rank_0()
            serve_rank(group, prepare.plan_run)
            return None
        with group.reporting_errors():
            return lead(prepare.plan_run(group), partial(OnePipeline, group=group))


def _join_several_pipelines(
    process: ProcessContext, facts: RankPlace, prepare: Opening, lead: Lead[Led]
) -> Led | None:
    """Be one of the ranks of several pipelines; rank 0 leads all of them."""
    config = process.config
    apart = Apart(facts, process.role.spread, prepare, process.end)
    try:
        plan = prepare.plan_run()
        apart.find_place(plan.fingerprint())
    except StoppedError:
        raise
    except Exception as error:
        apart.fail_rank(error)
        raise
    if apart.rank == 0:

        def compute(plan: RunPlan, *others: object) -> Team:
            start = partial(apart.start_pipelines, config, process.child_options)
            return Team(plan, start, say)

        with apart.leading():
            return lead(plan, compute)
    process.stopper.defer_to_rank_0()
    if apart.await_start():
        role = Role("rank", apart.spread, *apart.join_pipeline())
        try:
            _serve_in_pipeline(role, Opening(config, plan=plan), process.end)
        except FminferError as error:
            error.args = (f"{apart.pipeline_name}: {error}",)
            raise
    return None


@contextmanager
def _naming_rank_0() -> Iterator[None]:
    """Add the rank's name to an error that is not the user's."""
    try:
        yield
    except (FminferError, OSError):
        raise
    except Exception as error:
        raise RuntimeError(f"rank 0 failed: {error}") from error


def do_task(task: Task, ranks: Processes, end: End) -> None:
    """Do the task that the starting process has sent, with the ranks that this one has
    started."""
    role = task.role
    opening = Opening(task.config, role.spread, is_computing=True)
    if role.facts is not None:
        _serve_in_pipeline(role, opening, end)
        return
    group = None
    if ranks.all:
        facts = ranks.assign_ranks(task.config, role.spread, task.child_options)
        group = Group(facts, role.spread, end=end, children=ranks)
    try:
        serve_pipeline(group, role, opening.plan_run)
    except FminferError as error:
        error.is_reported_elsewhere = (
            True  # by the run, whose stderr is this process's, too
        )
        raise


def _serve_in_pipeline(role: Role, opening: Opening, end: End) -> None:
    """Meet the other ranks of a pipeline, if it has others, and compute one of its stages."""
    if role.facts is None:
        serve_pipeline(None, role, opening.plan_run)
        return
    group = Group(role.facts, role.spread, opening, end)
    if role.link is None:
        serve_rank(group, opening.plan_run)
        return
    with group.reporting_errors():
        serve_pipeline(group, role, opening.plan_run)


def start_engine(run: ProcessContext, plan: RunPlan, compute: Compute) -> Engine:
    """Make the engine of a command, and print what the user should know about it."""
    config = run.config
    is_quiet = run.is_quiet

    def print_note(text: str) -> None:
        if not is_quiet:
            click.echo(wrap_lines(text, find_width(sys.stderr)), err=True)

    if config.is_unnamed_demo:
        print_note(
            "Using the demo model, which knows only the way between rooms; "
            "--model-name gives another."
        )
    folder = plan.checkpoint.folder
    if folder is not None and (unread := describe_unread_files(folder)):
        print_note(unread)
    if scheme := plan.checkpoint.architecture.scheme:
        print_note(f"Of this model {scheme.describe(name_of(plan.dtype))}.")
    if fault := describe_shipped_fault():
        print_note(f"The kernels that came with fminfer are not used: {fault}.")
    if is_building():
        often = "each time" if describe_cache_fault() else "once"
        print_note(
            f"Building kernels for this machine; this takes some seconds, {often}."
        )
    with closing(LoadingBar(is_quiet=is_quiet)) as loading:
        engine = Engine(config, plan=plan, on_progress=loading, compute=compute)
    if not is_quiet:
        engine.intake.on_warning = say
    if config.cuda_ids and engine.device.type == "cpu":
        print_note("There is no GPU here: --cuda-id means nothing, the CPU computes.")
    if not is_quiet and (why := describe_cache_fault()):
        print_note(f"Nothing is kept from run to run, which makes each slower: {why}.")
    if note := engine.tokenizer.note:
        print_note(f"{note}.")
    if streaming := engine.facts.streaming:
        print_note(f"Offload: {streaming}.")
    elif config.offload != "off":
        print_note("Offload: all layers fit, and stay in memory.")
    if (
        why := engine.facts.measured.why_plain
        if is_quiet
        else engine.facts.measured.why_slower
    ):
        click.echo(f"The run is slower than it could be: {why}.", err=True)
    return engine
