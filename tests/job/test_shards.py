"""Several runs over one folder: no file is answered twice, and none is lost."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import InUseError, RequestError, StoppedError, UsageError
from fminfer.files import claims as claims_module
from fminfer.files.claims import (
    BEAT_S,
    STALE_S,
    TRUSTED_S,
    Claims,
    read_claims,
    remove_dead_claims,
)
from fminfer.files.journal_rows import RowCounts
from fminfer.files.output_paths import OutputPaths, require_output_paths
from fminfer.files.status_file import read_status
from fminfer.job import shared_folder
from fminfer.job.file_job import run_job
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.run_inputs import open_files
from fminfer.job.run_summary import JobSummary
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine import liveness
from tests.conftest import IS_ALL
from tests.shards import answer_shards
from tests.shards.answer_shards import share

SCRIPT = Path(answer_shards.__file__)
NUM_ROUNDS = int(os.environ.get("FMINFER_SHARD_ROUNDS", "2" if IS_ALL else "1"))
NUM_RUNS = 8
NUM_SHARDS = 50
NUM_LINES = 20


def write_shards(folder: Path, num: int, num_lines: int = 3) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"request_{i}.jsonl" for i in range(num)]
    for i, path in enumerate(paths):
        line = '{"prompt":"shard %d","max_tokens":2,"temperature":0,"user":"%d"}\n'
        path.write_text("".join(line % (i, n) for n in range(num_lines)))
    return paths


def answer(file: JournaledInput) -> None:
    for line in file.read_lines(lambda line: None):
        file.add(Record(line, parse_envelope(line), result={"said": line.number}))


def open_first(folder: Path) -> JournaledInput:
    return next(file for file in share(folder).iterate_files() if file is not None)


@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_runs_that_are_killed_at_random(tmp_path: Path, number: int) -> None:
    """Eight runs over 50 files, killed and started again; each row is answered and
    written once."""
    chance = random.Random(number)
    paths = write_shards(tmp_path / "in", NUM_SHARDS, NUM_LINES)
    outputs = [path.with_name(f"output_{path.name}") for path in paths]
    logs: list[Path] = []

    def start() -> subprocess.Popen[bytes]:
        logs.append(tmp_path / f"{len(logs)}.log")
        command = [sys.executable, str(SCRIPT), str(tmp_path / "in"), str(logs[-1])]
        return subprocess.Popen(command, cwd=SCRIPT.parent.parent.parent)

    runs = [start() for _ in range(NUM_RUNS)]
    num_killed = 0
    deadline = time.monotonic() + 300
    while not all(output.exists() for output in outputs):
        assert time.monotonic() < deadline
        time.sleep(chance.uniform(0, 0.3))
        place = chance.randrange(NUM_RUNS)
        if runs[place].poll() is None and num_killed < 3 * NUM_RUNS:
            runs[place].kill()
            num_killed += 1
        if runs[place].wait() in (0, -9):
            runs[place] = start()
    assert {run.wait() for run in runs} <= {0, -9}
    assert num_killed >= 4
    for path, output in zip(paths, outputs, strict=True):
        said = [
            json.loads(line)["result"]["said"]
            for line in output.read_bytes().splitlines()
        ]
        assert said == [*range(1, NUM_LINES + 1)], path
    noted = Counter(
        line for log in logs if log.exists() for line in log.read_text().splitlines()
    )
    assert [line for line, count in noted.items() if count > 1] == []
    # A row whose run was killed before it noted it is in the file all the same.
    assert NUM_SHARDS * NUM_LINES - num_killed <= len(noted) <= NUM_SHARDS * NUM_LINES
    assert not share(tmp_path / "in").scan(), (
        "which also removes dead claims of complete files"
    )
    left = [path.name for path in (tmp_path / "in").iterdir() if ".claim" in path.name]
    left += [
        path.name
        for path in (tmp_path / "in").iterdir()
        if path.name.endswith(".journal")
    ]
    assert left == []


def test_a_claim_is_one_processs(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    mine = Claims()
    theirs = Claims()
    claim = mine.acquire(output)
    assert claim is not None and claim.is_held()
    assert theirs.acquire(output) is None
    assert theirs.acquire(tmp_path / "other.jsonl") is not None
    claim.release()
    assert not read_claims(output)
    again = theirs.acquire(output)
    assert again is not None and again.is_held()


def test_a_dead_processs_claim_is_taken_over(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    code = "import sys; from pathlib import Path; from fminfer.files.claims import Claims\n"
    code += "assert Claims().acquire(Path(sys.argv[1])); print('ready', flush=True); input()"
    command = [sys.executable, "-c", code, str(output)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    assert Claims().acquire(output) is None
    process.kill()
    process.wait()
    (found,) = read_claims(output)
    assert found.is_dead and found.owner is not None and found.owner.pid == process.pid
    taken = Claims().acquire(output)
    assert taken is not None and [claim.number for claim in read_claims(output)] == [
        1,
        2,
    ]
    remove_dead_claims(output)
    assert [claim.path for claim in read_claims(output)] == [
        taken.path
    ] and taken.is_held()


def test_a_claim_torn_by_a_kill_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks alive for a second, but a run that ended then would leave the file."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.1)
    (path,) = write_shards(tmp_path / "in", 1)
    claims = path.with_name(f"output_{path.name}.claim")
    claims.mkdir()
    (claims / "1").touch()  # its owner was killed before it wrote its name
    files = share(tmp_path / "in")
    assert files.scan()
    looks = files.iterate_files()
    assert next(looks) is None and files.num_elsewhere == 1
    file = next(look for look in looks if look is not None)
    assert file.path == path
    answer(file)
    assert not list(looks) and files.is_finished and not claims.exists()


def test_a_claim_that_came_and_went_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run claimed the file between two looks, and gave it back."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.1)
    (path,) = write_shards(tmp_path / "in", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "acquire", lambda claims, output: None)
        files = share(tmp_path / "in")
        looks = files.iterate_files()
        assert next(looks) is None
    file = next(look for look in looks if look is not None)
    assert file.path == path


def test_a_killed_process_lives_until_its_last_thread_has_ended() -> None:
    """Its first thread is a zombie by then, but it may hold locks."""
    code = "import ctypes, threading\n"
    code += "threading.Thread(target=input).start()\n"
    code += "print('ready', flush=True)\n"
    code += "ctypes.CDLL(None).pthread_exit(0)\n"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started = liveness._read_start_time(process.pid)
    assert started and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    stat = Path(f"/proc/{process.pid}/stat")
    assert liveness.wait_until(lambda: ") Z " in stat.read_text(), 10)
    assert liveness._read_start_time(process.pid) == started
    process.kill()
    process.wait()
    assert not liveness._read_start_time(process.pid)


def test_another_machines_claim_is_judged_by_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    first = Claims().acquire(output)
    assert first is not None
    monkeypatch.setattr(liveness, "make_machine_name", lambda namespace: "another")
    os.utime(first.path, (time.time() - STALE_S + 5,) * 2)
    assert Claims().acquire(output) is None
    os.utime(first.path, (time.time() - STALE_S - 5,) * 2)
    second = Claims().acquire(output)
    assert second is not None and second.is_held()
    # The first slept; it wakes, and finds out before it writes.
    first._beat_s -= TRUSTED_S + 1
    assert not first.is_held()
    second.beat()
    assert second.is_held()
    first.release()
    second.beat()
    assert second.is_held() and second.path.exists()


def test_a_number_that_is_used_again_is_another_claim(tmp_path: Path) -> None:
    """Whoever slept while its claim was taken over, given back and taken anew has lost it."""
    output = tmp_path / "out.jsonl"
    first = Claims().acquire(output)
    assert first is not None
    first.path.unlink()
    second = Claims().acquire(output)
    assert second is not None and second.path == first.path
    first.beat()
    assert not first.is_held()
    first.release()
    second.beat()
    assert second.is_held()


def test_a_process_of_this_machine_that_sleeps_keeps_its_claim(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    claim = Claims().acquire(output)
    assert claim is not None
    os.utime(claim.path, (time.time() - 2 * STALE_S,) * 2)
    assert Claims().acquire(output) is None


def test_a_process_that_is_not_shown_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc shows a user only what is theirs, others' processes are not dead."""
    output = tmp_path / "out.jsonl"
    assert Claims().acquire(output) is not None
    monkeypatch.setattr(liveness, "_read_start_time", lambda pid: None)
    assert Claims().acquire(output) is None


def test_a_claim_that_is_beaten_stays_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "BEAT_S", 0.05)
    claim = Claims().acquire(tmp_path / "out.jsonl")
    assert claim is not None
    os.utime(claim.path, (time.time() - 1000,) * 2)
    deadline = time.monotonic() + 20
    while read_claims(tmp_path / "out.jsonl")[0].age_s > BEAT_S:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_that_saw_the_same_dead_claim(tmp_path: Path) -> None:
    """One was slow: meanwhile the other took over, gave back, and a third has it anew."""
    output = tmp_path / "out.jsonl"
    third = Claims().acquire(output)  # number 1 again
    assert third is not None
    slow = third.path.with_name("2")
    slow.write_text("")
    os.utime(slow, (time.time() - 2 * STALE_S,) * 2)
    assert Claims().acquire(output) is None, "the third lives"
    assert third.path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"host": 1}', '{"pid": {}}', "nan", "[" * 9999]
)
def test_a_claim_that_says_nothing(tmp_path: Path, text: str) -> None:
    output = tmp_path / "out.jsonl"
    path = tmp_path / "out.jsonl.claim" / "7"
    path.parent.mkdir()
    path.write_text(text)
    assert Claims().acquire(output) is None, "it may be being written"
    os.utime(path, (time.time() - 2 * STALE_S,) * 2)
    assert Claims().acquire(output) is not None


def test_rows_that_come_after_a_take_over_are_not_written(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 1)
    first = open_first(tmp_path / "in")
    lines = list(first.read_lines(lambda line: None))
    first.add(Record(lines[0], parse_envelope(lines[0]), result={"said": 1}))
    assert first.hold.claim is not None and first.journal is not None
    sleeper = first.hold.claim.path
    os.utime(sleeper, (time.time() - 2 * STALE_S,) * 2)
    os.close(first.journal._fd)  # and its lock, as where there are none
    first.journal._fd = os.open(os.devnull, os.O_RDWR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "make_machine_name", lambda namespace: "another")
        second = open_first(tmp_path / "in")
        answer(second)
    before = second.output.read_bytes()
    first.hold.claim._beat_s -= 2 * TRUSTED_S
    for line in lines[1:]:
        first.add(Record(line, parse_envelope(line), result={"said": "late"}))
    assert first.is_lost and first.is_settled and not first.is_finished
    assert second.is_finished and second.output.read_bytes() == before
    assert b"late" not in before and before.count(b"\n") == 3
    assert second.kept.num_rows == 1
    status = read_status(second.output)
    assert status is not None and status["status"] == "completed"


def lose(file: JournaledInput) -> None:
    """Let another machine take a file over from a run that sleeps."""
    assert file.hold.claim is not None
    file.hold.claim.path.unlink()
    file.hold.claim.beat()
    assert not file.hold.claim.is_held()


def test_a_file_that_was_lost_is_taken_again_when_it_comes_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run must not end with 0 as if it were answered."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    write_shards(tmp_path / "in", 1)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    first = open_next(turns)
    lines = list(first.read_lines(lambda line: None))
    lose(first)
    record = Record(lines[0], parse_envelope(lines[0]), result={"said": 1})
    assert not first.add(record) and first.is_lost
    again = open_next(turns)
    assert again.path == first.path and again is not first
    answer(again)
    assert list(turns) == [] and mine.is_finished and again.is_finished


def test_each_file_that_was_lost_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was lost just when another was refused was missed: its rows stayed unanswered."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    paths = write_shards(tmp_path / "in", 2)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    one = open_next(turns)
    two = open_next(turns)
    lines = [list(file.read_lines(lambda line: None)) for file in (one, two)]
    lose(one)
    one.add(Record(lines[0][0], parse_envelope(lines[0][0]), result={"said": 1}))
    again = open_next(turns)
    assert again.path == paths[0]
    mine.abandon_file(again, UsageError("it was changed"))
    lose(two)
    two.add(Record(lines[1][0], parse_envelope(lines[1][0]), result={"said": 1}))
    assert open_next(turns).path == paths[1]


def take_over(file: JournaledInput, *, fails: bool = False) -> JournaledInput:
    """Let a run on another machine take a file over from one that sleeps, and answer it."""
    lose(file)
    if file.journal is not None:  # which has no lock, as on a file system without them
        fcntl.flock(file.journal._fd, fcntl.LOCK_UN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "make_machine_name", lambda namespace: "another")
        other = open_first(file.path.parent)
        for line in other.read_lines(lambda line: None):
            error = RequestError("out_of_range", "no") if fails else None
            result = None if fails else {"said": line.number}
            other.add(Record(line, parse_envelope(line), result=result, error=error))
    assert other.is_finished
    return other


@pytest.mark.parametrize(
    "error", [InUseError("another run's"), UsageError("it was changed")]
)
def test_what_another_run_has_finished_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UsageError
) -> None:
    """A file that could not be opened at its turn was told as refused, though it was
    complete."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    write_shards(tmp_path / "in", 1)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    file = open_next(turns)
    mine.abandon_file(file, error)
    assert bool(mine.refused) == (type(error) is UsageError), "one in use may come free"
    answer(open_first(tmp_path / "in"))
    assert list(turns) == [] and mine.is_finished
    assert mine.refused == {} and mine.kept == RowCounts(3, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_named_file_that_another_run_has_completed_is_done(
    tmp_path: Path, fails: bool
) -> None:
    """It was told as taken over and to be run again, with status 2, though it was complete."""
    (path,) = write_shards(tmp_path / "in", 1)
    output = require_output_paths([path], None)[0]
    files = open_files([path], [output], RunTerms("none", {}))
    (file,) = files.files
    assert isinstance(file, JournaledInput)
    lines = list(file.read_lines(lambda line: None))
    assert file.add(Record(lines[0], parse_envelope(lines[0]), result={"said": 1}))
    take_over(file, fails=fails)
    assert not file.add(
        Record(lines[1], parse_envelope(lines[1]), result={"said": "late"})
    )
    files.check_none_lost()
    summary = run_job(
        None, files, JobSummary("m", "d", [path], [output]), is_quiet=True
    )
    assert summary.has_errors == fails and summary.num_kept_rows == 2
    assert f"{output} was completed by another run" in summary.to_text()
    assert b"late" not in output.read_bytes()


def sum_up(inputs: SharedFiles, num_rows: int) -> JobSummary:
    """Return the summary of a run that has answered so many rows."""
    summary = JobSummary("m", "d", [], [], num_rows=num_rows)
    inputs.add_to_summary(summary)
    return summary


def test_rows_of_a_file_that_another_run_has_completed_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that lost it counted them as its own, and again as those of the other run."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    write_shards(tmp_path / "in", 2, 5)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    file = open_next(turns)
    lines = list(file.read_lines(lambda line: None))
    for line in lines[:2]:
        assert file.add(Record(line, parse_envelope(line), result={"said": 1}))
    take_over(file)
    assert not file.add(
        Record(lines[2], parse_envelope(lines[2]), result={"said": "late"})
    )
    for other in turns:
        if other is not None:
            answer(other)
    summary = sum_up(mine, 2 + 5)
    assert (summary.num_rows, summary.num_kept_rows) == (7, 3)
    assert mine.num_saved_rows is not None and mine.num_rows == 7


def test_rows_of_a_file_that_is_taken_again_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run had answered before it lost the file counted as kept when it had it again."""
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    write_shards(tmp_path / "in", 1, 5)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    file = open_next(turns)
    lines = list(file.read_lines(lambda line: None))
    for line in lines[:2]:
        assert file.add(Record(line, parse_envelope(line), result={"said": 1}))
    lose(file)
    assert not file.add(
        Record(lines[2], parse_envelope(lines[2]), result={"said": "late"})
    )
    other = open_first(tmp_path / "in")  # it answers one, and ends
    line = next(other.read_lines(lambda line: None))
    assert line.number == 3 and other.add(
        Record(line, parse_envelope(line), result={"said": 1})
    )
    other.abandon(StoppedError("Interrupted."))
    again = open_next(turns)
    answer(again)
    assert list(turns) == [] and mine.num_saved_rows == 5 and mine.num_rows == 4
    file.num_damaged_rows = again.num_damaged_rows = file.num_tried_rows = 1
    summary = sum_up(mine, 2 + 2)
    assert (summary.num_rows, summary.num_kept_rows) == (4, 1)
    assert summary.num_damaged_rows == summary.num_tried_rows == 1, (
        "the same, found twice"
    )


def test_a_named_file_that_was_lost_is_told(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "in", 1)
    output = require_output_paths([path], None)[0]
    files = open_files([path], [output], RunTerms("m", {}))
    (file,) = files.files
    assert isinstance(file, JournaledInput)
    lines = list(file.read_lines(lambda line: None))
    lose(file)
    file.add(Record(lines[0], parse_envelope(lines[0]), result={"said": 1}))
    with pytest.raises(InUseError, match="taken over"):
        files.check_none_lost()


def test_what_others_answer_is_left_to_them(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "in", 3)
    theirs = Claims()
    claim = theirs.acquire(paths[1].with_name("output_request_1.jsonl"))
    assert claim is not None
    mine = share(tmp_path / "in")
    assert mine.scan()
    opened = []
    for file in mine.iterate_files():
        if file is not None:
            opened.append(file.path)
            answer(file)
    assert (
        opened == [paths[0], paths[2]] and mine.num_elsewhere == 1 and mine.is_finished
    )
    claim.release()
    assert share(tmp_path / "in").scan()


def test_files_that_other_runs_take_at_this_moment_are_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Claims()

    def look_a_moment_earlier(outputs: list[Path]) -> set[Path]:
        found = claims_module.find_claimed(outputs)
        assert all(theirs.acquire(output) for output in outputs)
        return found

    write_shards(tmp_path / "in", 2)
    mine = share(tmp_path / "in")
    assert mine.scan()
    monkeypatch.setattr(shared_folder, "find_claimed", look_a_moment_earlier)
    assert list(mine.iterate_files()) == []
    assert sum_up(mine, 0).num_files_elsewhere == 2


def test_a_restart_throws_no_answers_away_that_a_run_of_other_settings_has_given_since(
    tmp_path: Path,
) -> None:
    (path,) = write_shards(tmp_path / "in", 1)
    (output,) = require_output_paths([path], None)

    def share_with(seed: str) -> SharedFiles:
        terms = RunTerms("none", {"--seed": seed}, restart=True)
        return SharedFiles(
            lambda: OutputPaths([path], [output]), terms, is_watching=False
        )

    mine = share_with("1")
    theirs = share_with("2")
    assert mine.scan() and theirs.scan()
    answer(open_next(theirs.iterate_files()))
    answers = output.read_bytes()
    assert (
        next(mine.iterate_files(), "the end") == "the end"
        and output.read_bytes() == answers
    )
    assert "--seed was 2, is 1" in mine.refused[str(path)]


def test_a_file_of_another_model_is_refused_and_the_others_answered(
    tmp_path: Path,
) -> None:
    """What is wrong with a file before the model is loaded ends the run; later it costs
    itself."""
    paths = write_shards(tmp_path / "in", 3)
    for file in share(tmp_path / "in").iterate_files():
        if file is not None:
            answer(file)
    paths[1].write_text('{"prompt":"changed"}\n')
    os.utime(paths[1], (time.time() + 100,) * 2)
    mine = share(tmp_path / "in")
    assert mine.scan()
    assert [file for file in mine.iterate_files() if file is not None] == []
    assert list(mine.refused) == [str(paths[1])]
    assert "the input was" in mine.refused[str(paths[1])]


def test_other_settings_than_those_of_a_stopped_run_are_told_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    """The model was loaded and other files were answered before the summary told it."""

    def share_with(dtype: str, *, restart: bool = False) -> SharedFiles:
        terms = RunTerms("none", {"the dtype": dtype, "--seed": "1"}, restart=restart)
        plan = OutputPaths(paths, require_output_paths(paths, None))
        return SharedFiles(lambda: plan, terms, is_watching=False)

    paths = write_shards(tmp_path / "in", 3)
    file = next(filter(None, share_with("float32").iterate_files()))
    answer_shards.answer_all(file, [next(file.read_lines(lambda line: None))])
    file.abandon(StoppedError("the end"))

    with pytest.raises(UsageError, match="the dtype was float32, is bfloat16"):
        share_with("bfloat16").scan()
    assert share_with("float32").scan() and share_with("bfloat16", restart=True).scan()
    with paths[0].open("a") as more:
        more.write('{"prompt":"more"}\n')
    assert share_with("float32").scan(), (
        "answers to lines that are still there are kept"
    )
    with pytest.raises(UsageError, match="the dtype was float32, is bfloat16"):
        share_with("bfloat16").scan()


def test_a_changed_file_with_an_old_date_is_not_taken_for_answered(
    tmp_path: Path,
) -> None:
    """As rsync -a and cp -p make them."""
    paths = write_shards(tmp_path / "in", 2)
    for file in share(tmp_path / "in").iterate_files():
        if file is not None:
            answer(file)
    with paths[1].open("a") as more:
        more.write('{"prompt":"more"}\n')
    os.utime(paths[1], (time.time() - 3600,) * 2)
    mine = share(tmp_path / "in")
    assert (
        mine.scan()
        and [file for file in mine.iterate_files() if file is not None] == []
    )
    assert list(mine.refused) == [str(paths[1])]


def test_a_complete_file_that_was_edited_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 3)
    for file in share(tmp_path / "in").iterate_files():
        if file is not None:
            answer(file)
    edited = next((tmp_path / "in").rglob("output_request_1.jsonl"))
    edited.write_bytes(b"")
    with pytest.raises(UsageError, match=rf"{edited.name} is not as it was written"):
        share(tmp_path / "in").scan()
    edited.unlink()
    assert share(tmp_path / "in").scan(), "its input is answered again"


def test_errors_of_complete_files_are_counted(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 1)
    file = open_first(tmp_path / "in")
    for line in file.read_lines(lambda line: None):
        file.add(
            Record(line, parse_envelope(line), error=RequestError("out_of_range", "no"))
        )
    again = share(tmp_path / "in")
    assert not again.scan() and again.kept == RowCounts(3, 3)


def test_a_file_that_goes_ends_nothing(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "in", 3)
    mine = share(tmp_path / "in")
    assert mine.scan()
    turns = mine.iterate_files()
    answer(open_next(turns))
    paths[1].unlink()
    file = open_next(turns)
    assert file.path == paths[2]
    answer(file)
    assert list(turns) == [] and mine.is_finished
    assert not list((tmp_path / "in").glob("output_request_1*"))


def open_next(turns: Iterator[JournaledInput | None]) -> JournaledInput:
    return next(file for file in turns if file is not None)


def test_watching_takes_files_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    (tmp_path / "in").mkdir()
    mine = share(tmp_path / "in", is_watching=True)
    turns = mine.iterate_files()
    assert mine.scan() and next(turns) is None
    paths = write_shards(tmp_path / "in", 2)
    assert next(turns) is None, "they may not be whole yet"
    time.sleep(0.02)
    os.utime(paths[1], (time.time() - 10,) * 2)
    file = next(turns)
    while file is None:
        file = next(turns)
    assert file.path == paths[1]
    answer(file)
    assert next(turns) is None and not mine.is_finished


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
@pytest.mark.parametrize(
    ("age_s", "is_taken"), [(1.0, False), (10.0, True), (-10.0, True)]
)
def test_a_watched_file_is_as_old_as_the_disks_clock_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    skew_s: float,
    age_s: float,
    is_taken: bool,
) -> None:
    """A clock an hour late let files wait for an hour; one an hour early took them half
    written."""
    (tmp_path / "in").mkdir()
    (path,) = write_shards(tmp_path / "in", 1)
    os.utime(path, (time.time() - age_s,) * 2)
    mine = share(tmp_path / "in", is_watching=True)
    mine._paths = mine._find_paths()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + skew_s)
    assert [found for found, _ in mine._find_free_files()] == [path] * is_taken


def test_a_run_with_an_engine(tmp_path: Path) -> None:
    """Another run has a file; when its process is dead, the file is taken over and resumed."""
    engine = fminfer.Engine(dtype="float32", budget=2048)
    paths = write_shards(tmp_path / "in", 4, 5)
    outputs = require_output_paths(paths, None)
    other = Claims().acquire(outputs[2])
    assert other is not None

    def run() -> JobSummary:
        inputs = SharedFiles(
            lambda: OutputPaths(paths, outputs), RunTerms("m", {}), is_watching=False
        )
        inputs.scan()
        return run_job(
            engine, inputs, JobSummary("m", "d", paths, outputs), is_quiet=True
        )

    summary = run()
    assert summary.num_rows == 15 and summary.num_files_elsewhere == 1
    assert summary.outputs == [outputs[0], outputs[1], outputs[3]]
    assert "other runs are answering 1 file\n" in summary.to_text()
    other.release()
    summary = run()
    assert summary.num_rows == 5 and summary.outputs == [outputs[2]]
    assert all(output.read_bytes().count(b"\n") == 5 for output in outputs)


def test_a_run_that_waits_answers_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SCAN_EVERY_S", 0.01)
    (path,) = write_shards(tmp_path / "in", 1)
    (output,) = require_output_paths([path], None)
    os.utime(path, (time.time() - 10,) * 2)
    num_looks = itertools.count()

    def find() -> OutputPaths:
        if output.exists():
            raise StoppedError("Interrupted.")
        return (
            OutputPaths([path], [output])
            if next(num_looks) > 2
            else OutputPaths([], [])
        )

    inputs = SharedFiles(find, RunTerms("m", {}), is_watching=True)
    assert inputs.scan()
    engine = fminfer.Engine(dtype="float32", kernels="off")
    with contextlib.closing(engine), pytest.raises(StoppedError, match="Interrupted"):
        run_job(engine, inputs, JobSummary("m", "d", [], []), is_quiet=True)
    assert output.read_bytes().count(b"\n") == 3


def test_an_interrupted_run_gives_its_claims_back(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 2)
    file = open_first(tmp_path / "in")
    assert read_claims(file.output)
    file.abandon(StoppedError("Interrupted."))
    assert not read_claims(file.output)
