"""A run that servers elsewhere answer: the same job, without a model in this process."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict

import click

from fminfer.answers.carrying_over import RunTerms
from fminfer.answers.line_counter import LineCounter
from fminfer.client.costs import BILLED_BEFORE, Costs, Tokens, read_billed_tokens
from fminfer.client.dialects import TRANSLATION
from fminfer.client.engine_key import read_engine_key
from fminfer.client.remote_engine import RemoteEngine, check_choices, make_remote_intake
from fminfer.client.remote_options import RemoteOptions
from fminfer.client.server_facts import ServerFacts
from fminfer.client.server_finding import find_servers
from fminfer.core.config import EngineConfig
from fminfer.core.option import options_of
from fminfer.core.version import __version__
from fminfer.engine.stats import EngineStats
from fminfer.files.journal_rows import Fingerprint
from fminfer.files.run_facts import CurrentRun
from fminfer.job.answering import AnsweringJob, answer_files, print_summary
from fminfer.job.run_paths import RunContext
from fminfer.job.run_summary import JobSummary
from fminfer.job.run_terms import make_run_terms


def run_remote(run: RunContext, options: RemoteOptions) -> JobSummary:
    """Answer the job's files by servers; return what the run did.

    Raises:
        ServerError: no server can go on.
        UsageError: a key, a model or a flag that is wrong.
    """
    with run.stopper.listening():
        key = read_engine_key(options, os.environ)

        def print_note(text: str) -> None:
            if not run.is_quiet:
                click.echo(text, err=True)

        servers = find_servers(options, run.config.model, key, print_note)
        job = _RemoteJob(run, options, servers, key)
        summary = answer_files(job)
        print_summary(job, summary)
    return summary


def compute_remote_fingerprint(config: EngineConfig, facts: ServerFacts) -> Fingerprint:
    """Return what answers depend on beside their lines, as far as servers tell it."""
    entry = json.dumps(facts.entry, sort_keys=True, default=str)
    fingerprint = {
        "fminfer's version": __version__,
        "--engine": "servers elsewhere",
        "the model": facts.model,
        "the servers' entry of the model": hashlib.blake2b(
            entry.encode(), digest_size=8
        ).hexdigest(),
        "the servers": facts.kind,
        "the translation of fields": TRANSLATION,
    }
    for name, option in options_of(EngineConfig).items():
        value = getattr(config, name)
        if option.alters and value not in (option.default, {}):
            fingerprint[option.told] = json.dumps(value, sort_keys=True)
    if config.model is None:
        fingerprint["--check-model"] = "on without --model-name"
    return fingerprint


class _RemoteJob(AnsweringJob):
    """A run, its files, and the servers that answer them."""

    def __init__(
        self,
        run: RunContext,
        options: RemoteOptions,
        servers: list[ServerFacts],
        key: str,
    ) -> None:
        facts = servers[0]
        assert run.output_paths is not None, "its paths are looked at before servers"
        fingerprint = compute_remote_fingerprint(run.config, facts)
        super().__init__(run, run.output_paths, fingerprint)
        self._options = options
        self._servers = servers
        self._key = key
        self._intake = make_remote_intake(run.config, facts)
        before = read_billed_tokens(
            [] if run.job.restart else self.output_paths.outputs
        )
        self._before = before
        self._engine: RemoteEngine | None = None
        self._costs = Costs.of_options(options, before)

    def make_terms(self) -> RunTerms:
        """Return what holds for every input."""
        table = self.run.job.table
        check_choices(table, self._servers[0])
        return make_run_terms(
            self.run,
            self.output_paths,
            self._servers[0].model,
            self.fingerprint,
            print_line=self.print_line,
            count_lines=lambda: LineCounter(self._intake),
            choose_text_field=self._intake.choose_text_field
            if table.has_template
            else None,
        )

    def make_summary(self) -> JobSummary:
        """Return the summary of a run that has answered nothing yet."""
        facts = self._servers[0]
        return JobSummary(
            model=facts.model,
            dtype="",
            inputs=self.output_paths.inputs,
            outputs=self.output_paths.outputs,
            limit=self.run.job.limit,
            table=self.output_paths.table,
            servers=[each.url for each in self._servers],
            server_kind=facts.kind,
        )

    def start_engine(
        self, summary: JobSummary, current_run: CurrentRun
    ) -> RemoteEngine:
        """Make the client; tell of the servers in the summary and the status files."""
        run = self.run
        end = None if self._costs is None else self._costs.find_end(EngineStats())
        if end is not None:
            raise end
        engine = self._engine = RemoteEngine(
            self._servers,
            self._options,
            self._key,
            self._intake,
            costs=self._costs,
            end_run=run.stopper.end_for,
            print_note=self.print_line,
        )
        if self._before != Tokens():  # an earlier run has got answers
            engine.trust_servers()
        if not run.is_quiet:
            self._intake.on_warning = self.print_line
        summary.device = "servers elsewhere"
        summary.start_to_ready_s = run.elapsed_s()
        current_run.place = {
            "device": summary.describe_servers(),
            "same_answers": False,
            BILLED_BEFORE: [*asdict(self._before).values()],
        }
        return engine

    def add_to_summary(self, summary: JobSummary) -> None:
        """Add to the summary what servers failed at, and what answers cost."""
        engine = self._engine
        if engine is None:
            return
        summary.num_sent_again = engine.num_sent_again
        summary.num_without_usage = engine.num_without_usage
        if self._costs is not None:
            summary.cost = self._costs.describe(engine.stats)
