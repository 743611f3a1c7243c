"""The parts of a run's inputs, each alone: who may write, what was read, what is
counted, told."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fminfer.answers.carrying_over import RunTerms
from fminfer.core.config import EngineConfig, ModelOptions
from fminfer.core.errors import InUseError, StoppedError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.claims import Claims, Hold, read_claims
from fminfer.files.completed import find_completed, require_completed
from fminfer.files.journal_rows import Counts, RowCounts
from fminfer.files.line_reader import InputFile
from fminfer.files.ordered_output import write_ordered_output
from fminfer.files.output_paths import STDOUT, require_output_paths
from fminfer.files.status_file import StatusFile, read_status
from fminfer.files.storage import RemoteFolders
from fminfer.job import model_answering
from fminfer.job.run_inputs import NamedFiles, RunInputs, open_files
from fminfer.job.run_paths import JobPaths, check_no_other_model
from fminfer.job.run_summary import JobSummary
from fminfer.job.shared_folder import SharedFiles
from fminfer.pipeline.ranks import ALONE
from tests.job.report_outputs import call
from tests.shards.answer_shards import share
from tests.split_lines import answer_part

FINGERPRINT = {"the input": "3 bytes", "--seed": "1"}


def test_a_hold_is_one_runs_until_it_is_given_back(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    mine = Hold(output, Claims())
    theirs = Hold(output, Claims())
    mine.acquire()
    mine.acquire()
    assert mine.is_held() and len(read_claims(output)) == 1
    for ask in (theirs.check_free, theirs.acquire):
        with pytest.raises(InUseError, match="is being written by process"):
            ask()
    mine.release()
    theirs.check_free()
    assert theirs.is_held(), "there is no claim that could be lost"
    theirs.acquire()
    theirs.mark_lost()
    assert theirs.is_lost and not mine.is_lost and read_claims(output) == []


def test_a_hold_for_a_moment_leaves_the_claim_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    hold = Hold(output, Claims())
    with pytest.raises(ZeroDivisionError), hold.acquired():
        assert hold.claim is not None
        raise ZeroDivisionError
    assert hold.claim is None and read_claims(output) == []
    hold.acquire()
    with hold.acquired():
        pass
    assert hold.claim is not None and len(read_claims(output)) == 1


def test_an_input_file_knows_whether_it_was_edited(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n")
    file = InputFile(path, 0, None)
    assert not file.update_digest()
    os.utime(path, (1, 1))
    assert not file.update_digest(), "its bytes are the same"
    path.write_bytes(b"3\n4\n5\n")
    assert file.update_digest() and not file.update_digest()
    assert [line.raw for line in file.read_lines()] == [
        b"3",
        b"4",
        b"5",
    ] and file.is_read
    file = InputFile(path, 0, None)
    path.write_bytes(b"6\n")
    with pytest.raises(
        UsageError, match=r"a\.jsonl was changed while it was being answered"
    ):
        list(file.read_lines())
    assert not file.is_read


@pytest.mark.parametrize(
    "limit, says", [(None, "3 lines of .* now it has 2"), (2, "first 2 lines")]
)
def test_an_input_file_knows_when_all_is_answered(
    tmp_path: Path, limit: int | None, says: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n" if limit is None else b"1\n2\n3\n")
    file = InputFile(path, 0, limit)
    assert not file.has_all_answers(2, 2), "it was not read yet"
    assert len(list(file.read_lines())) == 2
    assert not file.has_all_answers(1, 1) and file.has_all_answers(2, 2)
    with pytest.raises(UsageError, match=says):
        file.has_all_answers(3, 3)


def test_counts_tell_own_rows_from_those_of_others() -> None:
    counts = Counts(num_rows=9)
    counts.start_from(Counts(0, 2, 1, 6, 0, 4))
    counts.add(is_error=False, tokens=(3, 1, 2))
    counts.add(is_error=True, tokens=(0, 0, 0))
    assert (counts.done, counts.kept, counts.by_this_run) == (
        RowCounts(5, 2),
        RowCounts(3, 1),
        RowCounts(2, 1),
    )
    assert (counts.input_tokens, counts.cached_tokens, counts.output_tokens) == (
        9,
        1,
        6,
    )
    counts.adopt_completed(Counts(9, 7, 2))
    assert (counts.done, counts.kept, counts.by_this_run) == (
        RowCounts(9, 2),
        RowCounts(7, 1),
        RowCounts(2, 1),
    )


@pytest.mark.parametrize(
    "error, status, says",
    [
        (StoppedError("Out of time.", "out_of_time"), "expired", None),
        (KeyboardInterrupt(), "cancelled", None),
        (ValueError("it burns"), "failed", "ValueError: it burns"),
    ],
)
def test_a_status_says_why_a_run_ended(
    tmp_path: Path, error: BaseException, status: str, says: str | None
) -> None:
    output = tmp_path / "out.jsonl"
    StatusFile(Path("in.jsonl"), output, "m", {}, Counts()).end_with_error(error)
    found = read_status(output)
    assert found is not None and found["status"] == status and found[f"{status}_at"]
    assert (found["errors"] and found["errors"]["data"][0]["message"]) == says


def test_a_status_says_when_answers_are_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are those of OpenAI's Batch object."""
    path = tmp_path / "a.jsonl"
    output = tmp_path / "output_a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    seen: list[Any] = []

    def look_and_put_in_order(*names: Any, **how: Any) -> Any:
        seen.append((read_status(output) or {})["status"])
        return write_ordered_output(*names, **how)

    monkeypatch.setattr(
        "fminfer.job.journaled_input.write_ordered_output", look_and_put_in_order
    )
    answer_part(path)
    status = read_status(output) or {}
    assert seen == ["finalizing"] and status["status"] == "completed"
    assert status["in_progress_at"] <= status["finalizing_at"] <= status["completed_at"]


def test_what_is_complete_says_which_run_made_it(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="nothing tells which run wrote it"):
        require_completed(output, Path("in.jsonl"), FINGERPRINT)
    counts = Counts(3)
    counts.start_from(Counts(0, 2, 1))
    status = StatusFile(Path("in.jsonl"), output, "m", FINGERPRINT, counts, limit=3)
    status.input_changed_ns = 7
    status.set_status("in_progress")
    assert find_completed(output) is None
    status.set_status("completed")
    found = require_completed(output, Path("in.jsonl"), FINGERPRINT)
    assert (found.counts.num_rows, found.counts.done, found.limit) == (
        3,
        RowCounts(3, 1),
        3,
    )
    assert found.is_of_input_changed_at(7) and not found.is_of_input_changed_at(8)
    assert [found.has_rows_left(limit, 0.0) for limit in (2, 3, 4, None)] == [
        False,
        False,
        True,
        True,
    ]
    found.check_settings({"--seed": "1"})
    with pytest.raises(UsageError, match="--seed was 1"):
        found.check_settings({"--seed": "2"})
    with pytest.raises(UsageError, match="--seed was 1"):
        require_completed(output, Path("a.jsonl"), {"the input": "other bytes"})
    with pytest.raises(UsageError, match="not known before it is read"):
        require_completed(output, Path("-"), FINGERPRINT | {"the input": "a pipe"})


@pytest.mark.parametrize("kind", ["named", "shared"])
def test_named_and_shared_files_are_inputs_of_one_kind(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    output = tmp_path / "output_a.jsonl"
    inputs: RunInputs
    if kind == "named":
        inputs = open_files([path], [output], RunTerms("none", {}))
    else:
        inputs = shared = share(tmp_path)
        assert shared.scan()
    assert type(inputs) is (NamedFiles if kind == "named" else SharedFiles)
    assert inputs.num_rows == 1 and not inputs.is_finished
    file = next(each for each in inputs.iterate_files() if each is not None)
    assert list(inputs.files) == [file] and inputs.num_saved_rows == 0
    error = UsageError("it was edited")
    if kind == "named":
        with pytest.raises(UsageError, match="it was edited"):
            inputs.abandon_file(file, error)
    else:
        inputs.abandon_file(file, error)
    inputs.abandon(error)
    assert not read_claims(output) and file.is_settled
    answer_part(path)
    summary = JobSummary("m", "d", [path], [output])
    again = share(tmp_path) if kind == "shared" else inputs
    if isinstance(again, SharedFiles):
        again.scan()
    again.check_none_lost()
    again.add_to_summary(summary)
    assert summary.num_kept_rows == 1 and summary.num_rows == 0


def test_of_a_stream_the_next_run_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    files = open_files([path], [STDOUT], RunTerms("none", {}))
    assert (
        files.num_saved_rows is None and files.num_rows == 1 and not files.is_finished
    )


def test_devices_and_pipes_are_no_place_for_answers(tmp_path: Path) -> None:
    """`--output /dev/null` said that /dev/null/output_a.jsonl is not a folder."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for name in ("/dev/null", "/dev/stdout", "/dev/fd/1", str(pipe)):
        with pytest.raises(UsageError, match=r"no regular file.*--output - for stdout"):
            require_output_paths([tmp_path / "a.jsonl"], Path(name))
    assert require_output_paths([tmp_path / "a.jsonl"], tmp_path) == [
        tmp_path / "output_a.jsonl"
    ]
    if Path("/dev/shm").is_dir():
        require_output_paths([tmp_path / "a.jsonl"], Path("/dev/shm"))


def test_a_later_line_of_another_model_costs_only_itself(tmp_path: Path) -> None:
    """The first lines tell that --model-name was forgotten; a large file is not read for it."""
    path = tmp_path / "a.jsonl"
    for num_before, is_refused in ((99, True), (100, False)):
        path.write_text(
            '{"prompt": "x"}\n' * num_before + '{"prompt": "x", "model": "other"}\n'
        )
        with pytest.raises(UsageError, match="other") if is_refused else nullcontext():
            check_no_other_model(ModelOptions(), [path])


def test_a_rank_that_is_started_by_hand_refuses_lines_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads them before the ranks meet; here it meets nobody."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "model": "other"}\n')
    remote = RemoteFolders(tmp_path, is_quiet=True)
    job = JobPaths(paths=[path], is_quiet=True, remote=remote)
    run: Any = SimpleNamespace(
        job=job,
        config=EngineConfig(),
        output_paths=None,
        role=SimpleNamespace(spread=ALONE),
    )
    monkeypatch.setattr(
        model_answering, "lead_or_join", lambda run, opening, lead: opening(0)
    )
    with pytest.raises(UsageError, match='model is "other", and no --model-name'):
        model_answering.run_process(run)


def test_a_watched_folder_has_no_single_output(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    found = call("run", tmp_path, "--watch", "--output", tmp_path / "out.jsonl")
    assert found.exit_code == 2 and "--watch needs a folder for many" in found.stderr


def test_one_is_not_many() -> None:
    """Summaries said `1 rows`."""
    assert [with_noun(number, "failed row") for number in (0, 1, 1234)] == [
        "0 failed rows",
        "1 failed row",
        "1,234 failed rows",
    ]
    stats = {
        "num_put_back": 1,
        "num_cut_off": 1,
        "num_open_thoughts": 1,
        "num_ended_thoughts": 1,
        "num_truncated_thoughts": 1,
        "num_apart": 0,
        "num_again_tokens": 1,
        "num_cached_tokens": 0,
    }
    stats |= {
        "num_copied_requests": 1,
        "num_prompt_tokens": 3,
        "num_generated_tokens": 2,
    }
    summary = JobSummary("m", "float32", [], [], device="cpu", num_threads=1, limit=1)
    summary.engine = stats | {"stages": []}
    summary.num_damaged_rows = summary.num_files_elsewhere = 1
    summary.errors_by_code = {"out_of_memory": 1}
    summary.warnings = {"it is odd": 1}
    text = summary.to_text()
    for words in (
        "1 thread)",
        "1 row lost their KV cache",
        "1 answer by max_tokens",
        "again: 1 token\n",
        "1 request had",
        "1 file\n",
        "1 failed row again",
        "it is odd (1 row)",
        "first 1 request of",
        "1 row of earlier runs",
    ):
        assert words in text, (words, text)
