"""What holds for every input of a run: its settings, its template for rows, and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fminfer.answers.carrying_over import RunTerms
from fminfer.answers.line_counter import LineCounter
from fminfer.contract.request import TextField
from fminfer.core.config import EngineConfig
from fminfer.core.option import options_of
from fminfer.files.journal_rows import LINE_NUMBERS, Fingerprint
from fminfer.files.output_paths import OutputPaths
from fminfer.files.run_facts import CurrentRun
from fminfer.files.tables.result_columns import make_result_columns
from fminfer.files.tables.row_template import RowTemplate
from fminfer.files.tables.table_file import open_table
from fminfer.files.tables.table_options import RowRequests
from fminfer.files.tables.table_writer import TableOutput
from fminfer.job.run_paths import RunContext

HIDDEN_OPTIONS = ("model", "request_args")  # that name_settings leaves out
MAX_CHARS = 200  # of a setting


def make_run_terms(
    run: RunContext,
    output_paths: OutputPaths,
    model_name: str,
    fingerprint: Fingerprint,
    *,
    print_line: Callable[[str], None],
    count_lines: Callable[[], LineCounter] | None,
    choose_text_field: Callable[..., TextField] | None,
) -> RunTerms:
    """Return what holds for every input of a run.

    Args:
        fingerprint: of what answers, without what a template and flags of records add.
        count_lines: begins to count a file's lines; None: answers to a changed file are
            not used.
        choose_text_field: as the intake has it; None: inputs are no tables.

    Raises:
        UsageError: a template is wrong, or a table cannot be read or written.
    """
    row_template = _make_row_template(run, choose_text_field, output_paths.inputs)
    if row_template is not None and run.job.truth is not None:
        for path in output_paths.inputs:
            table = open_table(path, row_template.delimiter)
            table.check_column(run.job.truth, f"--truth {run.job.truth}")

    if row_template is not None:
        fingerprint = fingerprint | row_template.fingerprint
    if run.job.has_line_numbers:
        fingerprint = fingerprint | {LINE_NUMBERS: "on"}

    return RunTerms(
        model=model_name,
        fingerprint=fingerprint,
        restart=run.job.restart,
        limit=run.job.limit,
        count_lines=count_lines,
        current_run=CurrentRun(settings=name_settings(run.config)),
        print_progress=print_line,
        table=_make_table_output(output_paths, row_template, run.job.prefix or ""),
        has_line_numbers=run.job.has_line_numbers,
        row_template=row_template,
    )


def _make_row_template(
    run: RunContext,
    choose_text_field: Callable[..., TextField] | None,
    inputs: Sequence[Path],
) -> RowTemplate | None:
    """Return what makes requests of the inputs' rows; None: they are no tables."""
    if choose_text_field is None:
        return None
    requests = RowRequests(run.job.table, run.job.prompt_fields, is_raw=run.job.is_raw)
    return requests.make_template(choose_text_field, inputs)


def _make_table_output(
    paths: OutputPaths, row_template: RowTemplate | None, prefix: str
) -> TableOutput | None:
    """Return the table to write beside the records, once it is sure that it can be; or None."""
    if paths.table is None or row_template is None:
        return None
    columns = make_result_columns(row_template.fields, prefix, row_template.columns)
    table = TableOutput(paths.table, columns, row_template.delimiter)
    table.check_input(open_table(paths.inputs[0], row_template.delimiter))
    return table


def name_settings(config: EngineConfig) -> dict[str, str]:
    """Return the engine's options that are not the defaults, for the status file."""
    return {
        each.told: str(getattr(config, name))[:MAX_CHARS]
        for name, each in options_of(EngineConfig).items()
        if name not in HIDDEN_OPTIONS and getattr(config, name) != each.default
    }
