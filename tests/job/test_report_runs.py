"""What runs keep for a report: time lines, the runs of a resumed output, `run --report` and
`--trace`."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.core.errors import MachineError, OutputError, StoppedError
from fminfer.core.messages import ConstraintMass
from fminfer.files.journal_rows import Counts
from fminfer.files.run_facts import (
    MAX_POINTS,
    MAX_RUNS,
    CurrentRun,
    Point,
    RunHistory,
    TimeLine,
    parse_runs,
    parse_time_line,
)
from fminfer.files.status_file import StatusFile, read_status, status_path
from fminfer.job.file_job import run_job
from fminfer.job.report.reported_outputs import find_runs, read_output
from fminfer.job.run_inputs import open_files
from fminfer.job.run_summary import JobSummary
from tests.job.report_outputs import (
    ASK,
    FLAGS,
    PLACES,
    call,
    make_report,
    read_page,
    text_of,
    tile,
)
from tests.line_bench import before_each_record


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=4)
    yield engine
    engine.close()


def write_rows(path: Path, number: int) -> Path:
    rows = (
        {"prompt": ASK.format(PLACES[n % 8]), "max_tokens": 3, "seed": n}
        for n in range(number)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(
    engine: fminfer.Engine, source: Path, output: Path, *, restart: bool = False
) -> JobSummary:
    """Answer a file as a run of its own."""
    facts = CurrentRun(place={"device": "cpu", "ready_s": 1.5})
    files = open_files(
        [source], [output], RunTerms("m", {}, restart=restart, current_run=facts)
    )
    summary = JobSummary("m", "float32", [source], [output])
    return run_job(engine, files, summary, is_quiet=True, current_run=facts)


@pytest.mark.parametrize("num_steps", [3, 1000, 50_000])
def test_a_time_line_is_short_and_loses_nothing(num_steps: int) -> None:
    rng = random.Random(num_steps)
    line = TimeLine()
    now_s = 0.0
    total = Point()
    for _ in range(num_steps):
        step = Point(
            rng.randrange(100), rng.randrange(9), rng.randrange(3), rng.randrange(64)
        )
        took_s = rng.choice([0.001, 0.02, 3.0])
        line.add(step, now_s, now_s + took_s)
        now_s += took_s
        total.add(step)
    assert len(line.points) <= MAX_POINTS and line.width_s * len(line.points) >= now_s
    assert num_steps < 1000 or len(line.points) > MAX_POINTS / 2
    found = Point()
    for point in line.points:
        assert min(point.num_fed, point.num_drawn, point.num_done) >= 0
        found.add(point)
    assert found == total
    assert parse_time_line(json.loads(json.dumps(line.to_dict()))) == line
    assert len(json.dumps(line.to_dict())) < 6000


def test_a_step_is_spread_over_the_time_that_it_took() -> None:
    line = TimeLine(1.0)
    line.add(Point(num_fed=40, most_running=3), 0.5, 4.5)
    assert [point.num_fed for point in line.points] == [5, 10, 10, 10, 5]
    assert {point.most_running for point in line.points} == {3}


def test_a_status_file_keeps_the_last_runs_and_counts_the_others() -> None:
    runs: list[dict[str, Any]] = []
    for number in range(MAX_RUNS + 5):
        facts = CurrentRun(id=str(number))
        assert RunHistory(facts, runs).to_list() == runs, "a run without rows is none"
        facts.begin()
        facts.add_row()
        history = RunHistory(facts, runs)
        runs = history.to_list()
        assert RunHistory(facts, runs).to_list()[-1]["id"] == str(number), (
            "once, also when taken again"
        )
    assert [run["id"] for run in runs] == [str(n) for n in range(5, MAX_RUNS + 5)]
    assert [run.get("runs_before", 0) for run in runs] == [5] + [0] * (MAX_RUNS - 1)
    history.drop_earlier_runs()
    assert len(history.to_list()) == 1


def test_a_resumed_run_adds_its_part(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 60)
    output = tmp_path / "out.jsonl"

    def stop_later(count: int) -> None:
        if count == 20:
            raise StoppedError("Interrupted.")

    with monkeypatch.context() as patch:
        before_each_record(patch, stop_later)
        with pytest.raises(StoppedError):
            answer(engine, source, output)
    page, _ = make_report(output)
    assert tile(page, "Rows answered") == "20" and "status: cancelled" in text_of(page)
    first = find_runs([read_output(output)])
    summary = answer(engine, source, output)
    assert summary.num_kept_rows == 20
    runs = find_runs([read_output(output)])
    assert [run.started_at for run in runs[:1]] == [first[0].started_at] and len(
        runs
    ) == 2
    num_done = [sum(point.num_done for point in run.time_line.points) for run in runs]
    assert num_done[1] == 40 and 20 <= num_done[0] <= 21  # one was lost with the stop
    assert runs[1].device == "cpu" and runs[1].ready_s == 1.5
    drawn = sum(p.num_drawn for run in runs for p in run.time_line.points)
    assert drawn > 100 and sum(run.num_tokens for run in runs) > drawn
    page, _ = make_report(output)
    assert "2 runs" in text_of(page) and page.count('class="break"') == 1
    assert tile(page, "Rows answered") == "60"
    answer(engine, source, output, restart=True)
    assert len(parse_runs(read_status(output))) == 1, (
        "none of the earlier rows is there"
    )


def test_files_of_one_run_share_its_time_line(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    sources = [write_rows(tmp_path / f"{name}.jsonl", 12) for name in "ab"]
    outputs = [tmp_path / f"out_{name}.jsonl" for name in "ab"]
    facts = CurrentRun()
    files = open_files(sources, outputs, RunTerms("m", {}, current_run=facts))
    summary = JobSummary("m", "float32", sources, outputs)
    run_job(engine, files, summary, is_quiet=True, current_run=facts)
    (run,) = find_runs([read_output(output) for output in outputs])
    assert sum(point.num_done for point in run.time_line.points) == 24
    assert 0 < run.seconds <= summary.wall_s


def test_a_run_that_fails_says_why(
    engine: fminfer.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 1)
    output = tmp_path / "out.jsonl"

    def fail(number: int) -> None:
        raise ZeroDivisionError("a fault")

    before_each_record(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        answer(engine, source, output)
    status = read_status(output)
    assert status is not None and status["status"] == "failed"
    assert status["errors"]["data"][0]["message"] == "ZeroDivisionError: a fault"


def test_a_run_whose_engine_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MachineError("no memory is left")

    monkeypatch.setattr("fminfer.job.model_answering.start_engine", fail)
    found = call("run", *FLAGS, write_rows(tmp_path / "in.jsonl", 1))
    assert found.exit_code == 1 and "no memory is left" in found.stderr
    assert "Loading fminfer-demo (" in found.stderr
    status = read_status(tmp_path / "output_in.jsonl")
    assert status is not None and status["status"] == "failed"
    assert status["errors"]["data"][0]["message"] == "MachineError: no memory is left"


def test_a_trace_names_each_rank_once_and_has_all_steps(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """As ui.perfetto.dev reads it; a later run replaces it."""
    source = write_rows(tmp_path / "in.jsonl", 3)
    trace = tmp_path / "trace.json"
    for number in range(2):
        output = tmp_path / f"out_{number}.jsonl"
        files = open_files([source], [output], RunTerms("m", {}))
        summary = JobSummary("m", "float32", [source], [output])
        before = engine.stats.num_steps
        run_job(engine, files, summary, is_quiet=True, trace=trace)

        name, *spans, end = json.loads(trace.read_bytes())
        assert (
            name["name"] == "thread_name"
            and name["args"] == {"name": "rank 0"}
            and end == {}
        )
        assert {(event["pid"], event["tid"], event["ph"]) for event in spans} == {
            (0, 0, "X")
        }
        assert [event["args"]["step"] for event in spans] == [
            *range(before, engine.stats.num_steps)
        ]
        assert spans[0]["ts"] == 0 and all(event["dur"] > 0 for event in spans)


def test_the_end_is_told_on_a_full_disk_without_the_runs(tmp_path: Path) -> None:
    """There may be room for what stands there already, and for no more."""

    def refuse(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out.jsonl"
    status = StatusFile(Path("in.jsonl"), output, "m", {}, Counts())
    status.set_status("in_progress")
    size = status_path(output).stat().st_size
    status.list_runs = lambda: [{"id": "x" * 9000}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", refuse)
        status.set_status("failed", "full")
    found = read_status(output)
    assert found is not None and found["status"] == "failed" and parse_runs(found) == []
    assert status_path(output).stat().st_size < size + 200


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 20)
    page = tmp_path / "r.html"
    found = call("run", *FLAGS, source, "--report", page)
    assert found.exit_code == 0 and found.output.endswith(f"jsonl\nreport    {page}\n")
    text, data = read_page(page)
    assert tile(text, "Rows answered") == "20" and len(data["rows"]) == 20
    assert tile(text, "Tokens/s computed") != "not known"
    said = text_of(text)
    assert "answer tokens/s drawn" in said and "1 run, " in said
    (run,) = parse_runs(read_status(tmp_path / "output_in.jsonl"))
    assert run["settings"] == {"--dtype": "float32", "--kernels": "off"}
    assert run["same_answers"] is False
    assert "Answers may depend on other rows" in said
    page.unlink()
    # everything is answered already
    again = call("run", "-q", *FLAGS, source, "--report", page)
    assert (
        again.exit_code == 0
        and again.output == ""
        and tile(read_page(page)[0], "Rows answered")
    )


def test_what_constraints_left_is_told(tmp_path: Path) -> None:
    """In the summary, in `--stats` and in the report; only of runs with constrained rows."""
    source = tmp_path / "in.jsonl"
    request = {"prompt": "Say it:", "structured_outputs": {"choice": ["a", "b"]}}
    rows = [request | {"prompt": f"{number}:"} for number in range(3)]
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    others = write_rows(tmp_path / "others.jsonl", 2)
    page = tmp_path / "r.html"
    stats = tmp_path / "stats.json"
    output = tmp_path / "output_in.jsonl"
    told = call("run", *FLAGS, source, "--report", page, "--stats", stats)
    assert told.exit_code == 0, told.output
    mass = orjson.loads(stats.read_bytes())["constraint_mass"]
    assert mass["num_rows"] == 3 and len(mass["worst"]) == 3
    assert mass["median"] == sorted(mass["worst"].values())[1] > 0
    assert set(mass["worst"]) == {"line 1", "line 2", "line 3"}
    (run,) = parse_runs(read_status(output))
    assert run["allowed"] == ConstraintMass(**mass).to_text()
    assert f"Allowed {run['allowed']}" in " ".join(text_of(read_page(page)[0]).split())
    assert "allowed   constraints left" in told.output

    told = call("run", *FLAGS, others, "--report", page, "--stats", stats)
    assert told.exit_code == 0 and "allowed" not in told.output
    assert orjson.loads(stats.read_bytes())["constraint_mass"] is None
    (run,) = parse_runs(read_status(tmp_path / "output_others.jsonl"))
    assert "allowed" not in run
    assert "Allowed" not in text_of(read_page(page)[0])


def test_two_files_are_named_with_their_worst_rows(tmp_path: Path) -> None:
    request = {"prompt": "1:", "structured_outputs": {"choice": ["a", "b"]}}
    for name in ("x.jsonl", "y.jsonl"):
        line = request | {"prompt": name}
        (tmp_path / name).write_bytes(orjson.dumps(line) + b"\n")
    told = call("run", *FLAGS, tmp_path / "x.jsonl", tmp_path / "y.jsonl")
    words = " ".join(told.output.split())
    for name in ("x.jsonl", "y.jsonl"):
        assert f"line 1 of {tmp_path / name} (" in words


def test_a_run_with_outputs_at_a_url_writes_its_report(tmp_path: Path) -> None:
    """It is made from what is here; and again, when all is answered there already."""
    source = write_rows(tmp_path / "in.jsonl", 4)
    page = tmp_path / "r.html"
    there = tmp_path / "there"
    there.mkdir()
    where = [
        "--output",
        f"{there.as_uri()}/",
        "--work-dir",
        tmp_path / "work",
        "--report",
        page,
    ]
    for _ in range(2):
        found = call("run", "-q", *FLAGS, source, *where)
        assert found.exit_code == 0, found.output
        assert tile(read_page(page)[0], "Rows answered") == "4"
        page.unlink()


def test_a_stopped_run_writes_the_report_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 40)
    page = tmp_path / "r.html"

    def stop_later(count: int) -> None:
        if count == 10:
            raise StoppedError("Interrupted.")

    before_each_record(monkeypatch, stop_later)
    found = call("run", *FLAGS, source, "--report", page)
    assert found.exit_code == 130 and "kept: 10." in found.output
    assert f"\nreport    {page}\n" in found.output
    assert tile(read_page(page)[0], "Rows answered") == "10"


def test_a_report_that_fails_costs_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 5)
    output = tmp_path / "output_in.jsonl"

    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("fminfer.job.answering.write_report", fail)
    stats = tmp_path / "stats.json"
    found = call(
        "run", *FLAGS, source, "--report", tmp_path / "r.html", "--stats", stats
    )
    assert found.exit_code == 1 and "was not written (a fault)" in found.output
    assert "5 answered, 0 in error" in found.output, "the summary"
    assert json.loads(stats.read_text())["num_rows"] == 5
    assert len(output.read_bytes().splitlines()) == 5
    status = read_status(output)
    assert status is not None and status["status"] == "completed"

    def fill_disk(*arguments: object, **options: object) -> None:
        raise OutputError("r.html cannot be written: the disk is full")

    monkeypatch.setattr("fminfer.job.answering.write_report", fill_disk)
    found = call("run", "-q", *FLAGS, source, "--report", tmp_path / "r.html")
    assert (
        found.exit_code == 1
        and "Error: r.html cannot be written: the disk" in found.output
    )
    monkeypatch.setattr("fminfer.job.answering.write_report", fail)

    def stop_later(count: int) -> None:
        if count == 2:
            raise StoppedError("Interrupted.")

    before_each_record(monkeypatch, stop_later)
    found = call("run", *FLAGS, source, "--restart", "--report", tmp_path / "r.html")
    assert found.exit_code == 130 and "r.html was not written: a fault." in found.output
    assert "Rows that are finished and kept: 2." in found.output


def test_where_a_report_cannot_be(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 1)
    page = tmp_path / "r.html"
    other = tmp_path / "other.jsonl"
    requests = '{"prompt": "kept"}\n'
    other.write_text(requests)
    for arguments, text in (
        ([source, "--output", "-", "--report", page], "those on stdout are not kept"),
        (["--prompt", "x", "--report", page], "leave out --report"),
        ([source, "--report", tmp_path / "no" / "r.html"], "there is no folder"),
        ([source, "--report", tmp_path], "is a folder; give the name of a file"),
        ([source, "--report", source], "is the input"),
        ([source, "--report", tmp_path / "output_in.jsonl"], "belongs to the answers"),
        ([source, "--report", other], "exists and is no HTML page"),
    ):
        found = call("run", *FLAGS, *arguments)
        assert found.exit_code == 2 and text in found.output, found.output
    assert (
        sorted(tmp_path.iterdir()) == [source, other] and other.read_text() == requests
    )
