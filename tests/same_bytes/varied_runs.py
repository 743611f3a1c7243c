"""Runs over the same lines in other orders, by other options, beside and after others."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import fminfer
from tests.faults.torture import kept_records
from tests.forked import Forked, run_forked
from tests.same_bytes.mixed_lines import (
    Lines,
    count_candidates,
    make_earlier_lines,
    make_short_answers,
    order_names,
)
from tests.same_bytes.tiny_models import Kind
from tests.server.batch_calls import content, create, wait_for_end
from tests.server.running import Running, running

Answers = dict[str, Any]  # by the names of the lines
Way = Literal["alone", "preempted", "warm", "killed", "served"]

SCARCE_BUDGET = 1600  # tokens of the KV cache, fewer than the rows of a run need
NUM_CLIENTS = 6
ANSWER_S = 300.0  # most time of a forked run
# What of a result is the same in each run; usage tells how much was cached.
SAME_FIELDS = ("choices", "data")


@dataclass(frozen=True, slots=True)
class VariedRun:
    """In which order, and by which options, lines are answered."""

    order: int
    max_rows: int
    chunk_size: int
    threads: int
    num_stages: int
    way: Way = "alone"
    num_pipelines: int = 1

    @property
    def name(self) -> str:
        return (
            f"{self.way}: order {self.order}, {self.max_rows} rows, chunks of "
            f"{self.chunk_size}, {self.threads} threads, {self.num_stages} stages, "
            f"{self.num_pipelines} pipelines"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine."""
        options: dict[str, Any] = {
            "max_rows": self.max_rows,
            "chunk_size": self.chunk_size,
            "threads": self.threads,
            "token_format": "text",
            "budget": 40_000,
        }
        if self.num_stages > 1:
            options["world_size"] = self.num_stages
        if self.num_pipelines > 1:
            options["data_group_size"] = self.num_pipelines
        return options


# The first is what others are compared with. Twelve runs hold every pair of a value of
# the first, second or last column with a chunk, a number of threads or of stages. Of the
# others' pairs, 16 and 20 of two columns, they hold what fits. The sample is the first ones.
RUNS = (
    VariedRun(0, 64, 512, 1, 1),
    VariedRun(2, 17, 64, 1, 1),
    VariedRun(3, 1, 512, 2, 1, "warm"),
    VariedRun(3, 64, 64, 1, 1, "preempted"),
    VariedRun(1, 64, 512, 2, 1, "served"),
    VariedRun(1, 3, 64, 1, 1, "warm"),
    VariedRun(2, 3, 64, 2, 1, "killed"),
    VariedRun(3, 3, 512, 2, 2),
    VariedRun(1, 1, 512, 1, 2, "killed"),
    VariedRun(0, 17, 512, 2, 2, "preempted"),
    VariedRun(0, 1, 64, 1, 2, "served"),
    VariedRun(2, 64, 512, 1, 2, "warm"),
)


@dataclass(frozen=True, slots=True)
class RunBench:
    """A model's folder, its lines, and where runs may write."""

    model: Path
    kind: Kind
    dtype_options: dict[str, Any]
    lines: Lines
    folder: Path
    path: str = "/v1/completions"  # where a server is asked
    scarce_budget: int = SCARCE_BUDGET

    def answer(self, run: VariedRun) -> Answers:
        """Answer the lines that the run has rows for; return what must be the same."""
        answer_lines = self._answer_alone
        if run.way == "killed":
            answer_lines = self._answer_killed
        if run.way == "served":
            answer_lines = self._answer_served

        answers = answer_lines(run)
        assert answers.keys() == {*self._order_names(run)}, "each line has one answer"
        return answers

    def _order_names(self, run: VariedRun) -> list[str]:
        """Return the names of the run's lines; candidates of one line run together."""
        return [
            name
            for name in order_names(self.lines, run.order)
            if count_candidates(self.lines[name]) <= run.max_rows
        ]

    def _open_engine(self, run: VariedRun) -> fminfer.Engine:
        options = run.options
        if run.way == "preempted":
            options["budget"] = self.scarce_budget
        return fminfer.Engine(str(self.model), **self.dtype_options, **options)

    def _answer_alone(self, run: VariedRun) -> Answers:
        """Answer lines by an engine, which may have answered others before."""
        is_preempted = run.way == "preempted" and self.kind != "vectors"
        earlier_lines: list[dict[str, Any]] = []
        if run.way == "warm":
            earlier_lines = make_earlier_lines(self.kind)
        if is_preempted:
            earlier_lines = make_short_answers()

        names = self._order_names(run)
        with self._open_engine(run) as engine:
            earlier = list(engine.run(earlier_lines))
            assert all(record.error is None for record in earlier)
            records = list(engine.run([self.lines[name] for name in names]))
            num_put_back = engine.stats.num_put_back
        if is_preempted:
            assert num_put_back, "no row was preempted"

        answers = {}
        for record in records:
            assert record.error is None, record.error
            result = record.to_dict()["result"]
            answers[names[record.line.number - 1]] = same_fields(result)
        return answers

    def _answer_killed(self, run: VariedRun) -> Answers:
        """Answer lines by the command, which is killed once a third is on disk."""
        stem = f"{run.order}-{run.max_rows}"
        source = self.folder / f"{stem}.jsonl"
        output = self.folder / f"{stem}.answers.jsonl"
        names = self._order_names(run)
        wrapped = [{"name": name, "request": self.lines[name]} for name in names]
        source.write_text("".join(json.dumps(line) + "\n" for line in wrapped))

        words = ["run", str(source), "--output", str(output)]
        options = {"model_name": self.model} | self.dtype_options | run.options
        for option, value in options.items():
            words += [f"--{option.replace('_', '-')}", str(value)]
        begun = Forked(words)
        end_s = time.monotonic() + ANSWER_S
        while len(kept_records(output)) < len(names) // 3:
            assert begun.returncode is None, begun.communicate()
            assert time.monotonic() < end_s, "it hangs"
            time.sleep(0.002)
        begun.kill()
        begun.wait()
        assert not output.exists(), "it was too late to kill it"

        resumed = run_forked(words, timeout=ANSWER_S)
        assert resumed.returncode == 0, resumed.stderr
        records = map(json.loads, output.read_text().splitlines())
        return {each["name"]: same_fields(each["result"]) for each in records}

    def _answer_served(self, run: VariedRun) -> Answers:
        """Answer every other line as a live request, beside a batch of the rest."""
        names = self._order_names(run)
        path = "/v1/embeddings" if self.kind == "vectors" else self.path
        state = self.folder / f"state-{run.order}"
        bodies = {
            name: {"model": str(self.model)} | line for name, line in self.lines.items()
        }
        batch_lines = [
            json.dumps(
                {
                    "custom_id": name,
                    "method": "POST",
                    "url": path,
                    "body": bodies[name],
                }
            ).encode()
            for name in names[::2]
        ]
        with (
            self._open_engine(run) as engine,
            running(engine, state=state) as server,
            ThreadPoolExecutor(NUM_CLIENTS) as clients,
        ):
            batch = create(server, batch_lines, endpoint=path)
            ask = partial(ask_live, server, path, bodies)
            answers = dict(clients.map(ask, names[1::2]))
            records = content(server, wait_for_end(server, batch)["output_file_id"])
        for record in records:
            answers[record["custom_id"]] = same_fields(record["response"]["body"])
        return answers


def ask_live(
    server: Running, path: str, bodies: Lines, name: str
) -> tuple[str, dict[str, Any]]:
    """Ask one request; return its name and its answer."""
    answer = server.post(path, bodies[name])
    assert answer.status == 200, answer.body
    return name, same_fields(answer.json)


def same_fields(result: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a result that hold texts, ids, logprobs and vectors."""
    return {name: result[name] for name in SAME_FIELDS if name in result}
