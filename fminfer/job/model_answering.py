"""The run's own process: it opens the model, makes the engine, and answers."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.record import Choice
from fminfer.core.errors import FminferError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.line_reader import is_input_name
from fminfer.files.output_paths import STDOUT, OutputPaths
from fminfer.files.run_facts import CurrentRun
from fminfer.files.status_file import check_vectors_owned
from fminfer.job.answering import AnsweringJob, answer_files, print_summary
from fminfer.job.run_paths import RunContext, check_no_other_model
from fminfer.job.run_summary import JobSummary
from fminfer.job.run_terms import make_run_terms
from fminfer.machine.processor import read_chosen_name
from fminfer.plan.run_plan import RunPlan, name_of
from fminfer.runtime.computing import Compute
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.lines.line_intake import FILLS
from fminfer.runtime.load.agreement import Opening
from fminfer.runtime.load.assembly import (
    find_vectors,
    load_tokenizer,
    make_intake,
    make_line_counting,
)
from fminfer.runtime.process_roles import lead_or_join, start_engine


def run_process(run: RunContext) -> JobSummary | None:
    """Answer the job, or do another rank's part of it; that one has no summary."""
    output_paths = run.output_paths

    def find_files() -> None:
        nonlocal output_paths
        output_paths = output_paths or run.job.find_output_paths()
        check_no_other_model(
            run.config, output_paths.inputs, has_rows=run.job.table.has_template
        )

    def lead(run_plan: RunPlan, compute: Compute) -> JobSummary:
        assert output_paths is not None, "rank 0 has its paths before it meets others"
        return _answer_job(_ModelJob(run, output_paths, run_plan, compute))

    opening = Opening(run.config, run.role.spread, prepare=find_files)
    return lead_or_join(run, opening, lead)


MAX_CHAT_TOKENS = 1024  # of the answer to --prompt, if it does not say


class _ModelJob(AnsweringJob):
    """A run, its files, and the model that answers them."""

    def __init__(
        self,
        run: RunContext,
        output_paths: OutputPaths,
        run_plan: RunPlan,
        compute: Compute,
    ) -> None:
        super().__init__(run, output_paths, run_plan.fingerprint())
        self.run_plan = run_plan
        self.checkpoint = run_plan.checkpoint
        self._compute = compute
        self._engine: Engine | None = None
        self.facts = find_vectors(self.checkpoint)  # of a model that gives vectors
        self.has_npy = run.config.embeddings == "npy"
        self.is_awaited = (
            run.role.kind == "apart" and run.role.spread.num_pipelines == 1
        )

    def make_terms(self) -> RunTerms:
        """Return what holds for every input."""
        config = self.run.config
        if self.has_npy:
            _check_npy(self)
        choose_text_field = None
        if self.run.job.table.has_template:
            tokenizer = load_tokenizer(config, self.checkpoint)
            intake = make_intake(config, self.checkpoint, tokenizer)
            choose_text_field = intake.choose_text_field
        return make_run_terms(
            self.run,
            self.output_paths,
            self.checkpoint.name,
            self.fingerprint,
            print_line=self.print_line,
            # A file of vectors does not say which line an answer is of, once lines
            # have moved.
            count_lines=None
            if self.has_npy
            else make_line_counting(config, self.checkpoint),
            choose_text_field=choose_text_field,
        )

    def make_summary(self) -> JobSummary:
        """Return the summary of a run that has answered nothing yet."""
        return JobSummary(
            model=self.checkpoint.name,
            dtype=name_of(self.run_plan.dtype),
            inputs=self.output_paths.inputs,
            outputs=self.output_paths.outputs,
            kv_dtype=name_of(self.run_plan.kv_dtype),
            weight_dtype=self.run_plan.held_in,
            limit=self.run.job.limit,
            has_npy=self.has_npy,
            table=self.output_paths.table,
        )

    def load_engine(self) -> Engine:
        """Load the weights."""
        return start_engine(self.run, self.run_plan, self._compute)

    def start_engine(self, summary: JobSummary, current_run: CurrentRun) -> Engine:
        """Load the weights; tell of the engine in the summary and the status files."""
        run = self.run
        if not run.is_quiet:
            click.echo(f"Loading {self.checkpoint.name} ({summary.types}) …", err=True)
        engine = self._engine = self.load_engine()
        facts = engine.facts
        summary.device = str(engine.device)
        summary.start_to_ready_s = run.elapsed_s()
        summary.weight_dtype = facts.weight_dtype  # the kernels' build may have failed
        summary.why_slower = facts.measured.why_slower
        summary.why_dependent = facts.measured.why_dependent
        summary.same_answers = not summary.why_dependent
        summary.num_threads = facts.measured.num_threads
        summary.cpu_limit = read_chosen_name()
        summary.num_ranks = facts.num_ranks
        current_run.place = {
            "device": summary.device,
            "num_threads": summary.num_threads,
            "same_answers": summary.same_answers,
            "ready_s": round(summary.start_to_ready_s, 3),
        }
        return engine

    def add_to_summary(self, summary: JobSummary) -> None:
        """Add the peak memory of each rank to the summary, with the last reports of all."""
        if self._engine is not None:
            summary.ranks = self._engine.memory


def _answer_job(job: _ModelJob) -> JobSummary:
    """Answer the job's files, or the requests that it makes up, or its one prompt."""
    job_paths = job.run.job
    synthetic = job.run.job.synthetic
    if job_paths.prompt is not None:
        return _answer_prompt(job, job_paths.prompt)
    if synthetic is None:
        summary = answer_files(job)
    else:
        if job.facts is not None:
            raise UsageError(
                f"made-up requests draw tokens, and {job.checkpoint.name} gives vectors; give a "
                "file, or time it by fminfer bench"
            )
        with tempfile.TemporaryDirectory(prefix="fminfer-") as folder:
            path = Path(folder) / "made_up.jsonl"
            synthetic.write_requests(
                path,
                vocab_size=job.checkpoint.config.vocab_size,
                context_length=job.checkpoint.context_length,
                max_logprobs=job.run.config.max_logprobs,
                seed=job.run.config.seed,
            )
            job.run = replace(job.run, job=job_paths.with_input(path))
            job.output_paths = job.run.job.find_output_paths()
            summary = answer_files(job)
        summary.made_up = synthetic.describe(summary.wall_s)
    print_summary(job, summary)
    return summary


def _answer_prompt(job: _ModelJob, prompt: str) -> JobSummary:
    """Print the answer to one prompt, how it was asked, and what is odd about the answer."""
    if job.facts is not None:
        does = "scores texts or has classes" if job.facts.is_scored else "gives vectors"
        raise UsageError(
            f"--prompt prints a text, and {job.checkpoint.name} {does}; put the text "
            "into a line, "
            'as in: echo \'{"input": "a text"}\' | fminfer run - --model-name '
            f"{shlex.quote(str(job.run.config.model))}"
        )
    with closing(job.load_engine()) as engine:
        summary = JobSummary(job.checkpoint.name, str(engine.device), [], [])
        request = _make_request(job.run, prompt, engine)
        engine.intake.on_warning = lambda text: (
            None if FILLS.kind in text else job.print_line(text)
        )
        job.print_line(_describe_asking(request, engine, is_raw=job.run.job.is_raw))
        if is_input_name(prompt) and os.path.exists(prompt):
            job.print_line(
                f"The prompt is the text {prompt}. The file's lines: fminfer run {prompt}."
            )
        with job.using_kept_answers(engine, summary):
            (record,) = engine.run([request])
    if record.error is not None:
        raise FminferError(f"{record.error.message} ({record.error.code})")
    for number, choice in enumerate(record.choices, start=1):
        click.echo(choice.text)
        which = "The answer" if len(record.choices) == 1 else f"Answer {number}"
        for oddity in _find_oddities(choice, request, engine):
            job.print_line(f"{which} {oddity}.")
    return summary


def _make_request(run: RunContext, prompt: str, engine: Engine) -> dict[str, Any]:
    """Return the request of `--prompt`."""
    most = min(MAX_CHAT_TOKENS, engine.context_length // 2)
    request = engine.make_request(
        prompt, is_raw=run.job.is_raw, **run.job.prompt_fields
    )
    if "messages" in request and len(prompt) < most:  # small models may go on and on
        request = {"max_tokens": most} | request
    return request


def _describe_asking(request: dict[str, Any], engine: Engine, *, is_raw: bool) -> str:
    """Say whether a prompt is asked as a chat or completed, and how to get the other."""
    if "messages" in request:
        text = "Asking it as a chat, by the model's template; --raw completes it as plain text."
        if request.get("temperature") == 0:
            text += " The likeliest tokens are taken (--temperature)."
        return text
    why = "--raw" if is_raw else "this model has no chat template"
    if engine.intake.has_chat_template and not is_raw:
        why = "--echo-prompt and --best-of are not of chats"
    most = with_noun(request["max_tokens"], "token")
    return f"Completing it as plain text ({why}), by at most {most} (--generate-seq-length)."


def _find_oddities(
    choice: Choice, request: dict[str, Any], engine: Engine
) -> Iterator[str]:
    """Say whether an answer has no words, or was cut, and why."""
    stop = choice.fields.get("stop_reason")
    is_cut = choice.fields["finish_reason"] == "length"
    if not choice.text.strip():
        ended = "" if is_cut else "; the model ended it by itself"
        yield "has no words" + (
            f"; --stop {stop!r} ended it" if isinstance(stop, str) else ended
        )
    if is_cut and "max_tokens" in request:
        most = with_noun(request["max_tokens"], "token")
        yield f"was cut at its limit of {most}; --generate-seq-length N sets another"
    elif is_cut:
        yield (
            f"was cut: the context ({engine.context_length:,} tokens) or KV cache "
            f"({engine.stats.num_kv_tokens:,}) was full"
        )


def _check_npy(job: _ModelJob) -> None:
    """Raise a UsageError if a run has no vectors to write, or no place for them."""
    if job.facts is None or job.facts.is_scored:
        does = "generates text" if job.facts is None else "scores texts"
        raise UsageError(
            "--embeddings npy is of models that give embeddings, and "
            f"{job.checkpoint.name} {does}; leave it out"
        )
    if STDOUT in job.output_paths.outputs:
        raise UsageError(
            "--embeddings npy writes a file beside the output; give --output FILE"
        )
    for output in job.output_paths.outputs:
        check_vectors_owned(output)
