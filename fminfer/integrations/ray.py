"""The engine as a stage of Ray Data: rows of requests in, the same rows with their records out.

    requests = read_lines("shards/")  # or ray.data.read_parquet(…), or any other dataset
    answered = answer(requests, "/models/llama", concurrency=8, num_gpus=1)
    write_lines(answered, "answers.jsonl")  # or answered.write_parquet(…)

A row is a request. Its columns are the fields of one line (docs/contract.md, section
1): `prompt`, `max_tokens` and so on, or `request` with a struct of these, or what a
Batch line has; nulls are left out. A row with a column `line`, text or bytes, has that
as its line, whatever else it has. A column `number` is no field: it numbers the rows,
as lines of a file are.

An actor holds one engine. Where several share a machine, give each its `num_cpus` and a
`budget`, for each would take half of the memory that it finds free. With `engine`, it
holds a client of servers elsewhere, and no model.

Nothing is kept of a run that fails, unless Ray's `CheckpointConfig` does so
(docs/running.md). `fminfer run` goes on where it ended. It needs the extra `ray`; nothing
else imports it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import ray.data
import torch
from ray.data.expressions import monotonically_increasing_id

from fminfer.answers.line_counter import EqualLines
from fminfer.client.remote_engine import RemoteEngine
from fminfer.client.remote_options import RemoteOptions, check_no_model_flags
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.core.config import EngineConfig, make_config
from fminfer.core.errors import UsageError
from fminfer.core.option import options_of
from fminfer.files.input_folders import find_inputs
from fminfer.files.json_values import CutValue, cut_long_value
from fminfer.files.line_reader import read_lines as read_file
from fminfer.files.ordered_output import errors_path, writing_together
from fminfer.files.streams import STDIN
from fminfer.runtime.engine_api import Engine
from fminfer.runtime.job_engine import JobEngine
from fminfer.runtime.lines.runner import WINDOW

ROW = "fminfer_row"  # a column on the way to the actors: a number that no other row has
log = logging.getLogger(__name__)
LINES = pyarrow.schema(
    {
        "path": pyarrow.string(),
        "number": pyarrow.int64(),
        "line": pyarrow.large_binary(),
        "damage": pyarrow.string(),
        "is_cut": pyarrow.bool_(),
        "num_equal": pyarrow.int64(),
    }
)


def read_lines(*paths: str | Path) -> ray.data.Dataset:
    """Read files and folders as `fminfer run` does: a row a line, blank ones left out.

    They must be where every machine of the cluster sees them. Rows are `path`, `number` of the
    line in its file, the `line` itself, `damage` where it cannot be read, `is_cut` if it is too
    long and `line` is its beginning, and `num_equal`, the number of equal requests before it in
    its file. So answers are those of `fminfer run`, sampled ones too; only that the
    custom_ids of a Batch file are not compared, and that sampled answers are others with
    `request_args`, or where a chat template leaves out what two requests differ in.

    Raises:
        UsageError: a path that does not exist or has another ending; stdin.
    """
    files = find_inputs([Path(path) for path in paths])
    if not files or STDIN in files:
        raise UsageError("give files or folders; actors have no stdin")
    rows = [{"path": str(file.resolve())} for file in files]
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        _read_files, batch_size=1, batch_format="pyarrow"
    )


def answer(
    dataset: ray.data.Dataset,
    model: str | None = None,
    *,
    concurrency: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    batch_size: int = WINDOW,
    **options: Any,
) -> ray.data.Dataset:
    """Answer every row once; a row that is wrong gets an error record and costs no other.

    Args:
        model: a folder that every machine sees, or a hub id; None is the demo model.
            With `engine`, the servers' name of it; None: the only one that they have.
        concurrency: actors, each with an engine of its own.
        num_cpus: of each actor, which computes with as many threads. One CPU of the cluster must
            be left, for rows are read by tasks of their own.
        num_gpus: of each actor; with 0 the CPU computes.
        batch_size: rows that an actor takes at a time, and answers before it takes
            more. With few it runs few at once; with too many, other actors get none.
        options: other fields of `EngineConfig`. `engine` is the base URL of servers that
            answer in place of a model here, with commas between several. With it, further
            fields of `RemoteOptions` that `fminfer serve` has. The servers' key is
            FMINFER_ENGINE_KEY of the actors' environment. Ray shows arguments, so it is none.

    Returns:
        The rows with two columns more: `record`, the JSON text that `fminfer run`
        writes for such a line, and `is_error`. Equal sampled rows without a seed draw
        differently: by their column `number`, a whole number; without one by a number
        that Ray gives them, which may be another in another run.

    Raises:
        UsageError: an option that cannot be.
    """
    _parse_options(model, options)  # what is wrong is raised here, not by an actor
    _warn_of_waiting(concurrency * num_cpus)
    numbered = dataset.with_column(ROW, monotonically_increasing_id())
    # A file may be one block, and actors take whole blocks.
    return numbered.repartition(target_num_rows_per_block=batch_size).map_batches(
        Answer,
        fn_constructor_kwargs={"model": model, "num_cpus": num_cpus} | options,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=concurrency),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        udf_modifying_row_count=False,
    )


def write_lines(dataset: ray.data.Dataset, output: str | Path) -> None:
    """Write records as `fminfer run` does: answers to a .jsonl file, errors to one beside it.

    They come in the order of the dataset's rows, and under their names when all are written.
    """
    dataset.context.execution_options.preserve_order = True
    with writing_together(Path(output), errors_path(Path(output))) as files:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            for record, is_error in zip(
                batch["record"], batch["is_error"], strict=True
            ):
                files[is_error.as_py()].write(record.as_py().encode() + b"\n")


class Answer:
    """Adds `record` and `is_error` to the rows of pyarrow tables; Ray makes one an actor."""

    def __init__(
        self, model: str | None = None, *, num_cpus: float = 1, **options: Any
    ) -> None:
        config, remote = _parse_options(model, options)
        # each computes with its own threads
        if config.num_ranks > 1:
            options = {"threads": max(1, int(num_cpus) // config.num_ranks)} | options
        # torch would take every core of the machine
        torch.set_num_threads(max(1, int(num_cpus)))
        self._engine: JobEngine = (
            Engine(model, **options)
            if remote is None
            else RemoteEngine.connect(config, remote, log.warning)
        )
        # Lines that differ may then be equal, which whoever has read them could not count.
        self._is_overwriting = bool(config.request_args)

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Answer one batch.

        Raises:
            UsageError: it has a column that is to be added.
        """
        clashing = {"record", "is_error"} & set(batch.column_names)
        if clashing:
            raise UsageError(
                f"the rows have {' and '.join(sorted(clashing))} already; drop or rename "
                "what is there"
            )
        rows = batch.to_pylist(maps_as_pydicts="lossy")
        lines = [
            _make_line(row, place, is_overwriting=self._is_overwriting)
            for place, row in enumerate(rows)
        ]
        places = {id(line): place for place, line in enumerate(lines)}
        records = [""] * len(lines)
        errors = [False] * len(lines)
        for record in self._engine.runs.run(lines, WINDOW):
            place = places.pop(id(record.line))
            records[place] = record.to_json().decode()
            errors[place] = record.error is not None
        assert not places, "a row without a record"
        for text, num_rows in self._engine.warnings.items():
            log.warning("%s (%s rows of %s)", text, num_rows, len(lines))
        if ROW in batch.column_names:
            batch = batch.drop_columns(ROW)
        batch = batch.append_column(
            "record", pyarrow.array(records, pyarrow.large_string())
        )
        return batch.append_column("is_error", pyarrow.array(errors, pyarrow.bool_()))


def _parse_options(
    model: str | None, options: dict[str, Any]
) -> tuple[EngineConfig, RemoteOptions | None]:
    """Return an actor's options; those of servers are None where it has a model."""
    if options.get("engine") is None:
        return make_config(model, **options), None
    names = {
        name
        for name, each in options_of(RemoteOptions).items()
        if "serve" in each.commands
    }
    config = make_config(
        model, **{name: options[name] for name in options.keys() - names}
    )
    check_no_model_flags(config)
    return config, RemoteOptions(
        **{name: options[name] for name in options.keys() & names}
    )


def _warn_of_waiting(num_actor_cpus: float) -> None:
    num_cpus = ray.cluster_resources().get("CPU", 0)
    if num_cpus < num_actor_cpus + 1:
        log.warning(
            "the actors take %s of the cluster's %s CPUs, and reading rows takes one: "
            "unless the cluster grows, it waits for ever. Lower concurrency or "
            "num_cpus",
            num_actor_cpus,
            num_cpus,
        )


def _make_line(
    row: dict[str, Any], place: int, *, is_overwriting: bool = False
) -> Line:
    """Return a row's line, with what sets it apart from equal ones."""
    row_id = row.pop(ROW, place)
    line = row.get("line")
    number = _parse_number(row.pop("number", None), row_id + 1)
    if isinstance(line, str | bytes):
        raw = line.encode() if isinstance(line, str) else line
        num_equal = (
            number if is_overwriting else _parse_number(row.get("num_equal"), number)
        )
        damage = row.get("damage") or ""
        if row.get("is_cut") is True:
            return Line(
                0, number, raw, "", num_equal, is_alone=True, fault=damage, is_cut=True
            )
        return _make_whole_line(raw, number, num_equal, damage)
    try:
        return _make_whole_line(
            json.dumps(_make_plain_value(row)).encode(), number, number
        )
    except (TypeError, ValueError, RecursionError) as error:
        return Line(
            source=0,
            number=number,
            raw=repr(row).encode(errors="replace"),
            damage=f"the row is no JSON: {error}. Give its columns types that JSON has",
            num_equal=number,
            is_alone=True,
        )


def _make_whole_line(raw: bytes, number: int, num_equal: int, damage: str = "") -> Line:
    """Return a line, cut if it is longer than a line of a file may be."""
    line = cut_long_value(raw)
    if isinstance(line, CutValue):
        return Line(
            source=0,
            number=number,
            raw=line.head,
            num_equal=num_equal,
            is_alone=True,
            fault=line.fault,
            is_cut=True,
        )
    return Line(0, number, line, damage, num_equal, is_alone=True)


def _parse_number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _make_plain_value(value: Any) -> Any:
    """Return a row's value as JSON has it, without nulls, which stand for absent members."""
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, dict):
        return {
            name: _make_plain_value(member)
            for name, member in value.items()
            if member is not None
        }
    return (
        [_make_plain_value(item) for item in value]
        if isinstance(value, list)
        else value
    )


def _read_files(batch: pyarrow.Table) -> Iterator[pyarrow.Table]:
    """Read each file from its start to its end, for equal requests are counted."""
    for path in batch["path"].to_pylist():
        equal = EqualLines()
        rows = []
        for line in read_file(Path(path), 0):
            num_equal = equal.count(line, parse_envelope(line))
            damage = line.damage or line.fault
            row = (path, line.number, line.raw, damage, line.is_cut, num_equal)
            rows.append(dict(zip(LINES.names, row, strict=True)))
            if len(rows) == WINDOW:
                yield pyarrow.Table.from_pylist(rows, LINES)
                rows = []
        yield pyarrow.Table.from_pylist(rows, LINES)
