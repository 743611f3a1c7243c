"""`fminfer merge`: every line once, in order, verbatim; or nothing, and what is missing."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import make_line_id
from fminfer.core.errors import FminferError, InUseError, OutputError, UsageError
from fminfer.files.claims import claiming_output
from fminfer.files.input_folders import find_inputs
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import errors_path
from fminfer.files.output_paths import answers_path
from fminfer.files.status_file import status_path
from fminfer.split import merging
from fminfer.split.manifest import MANIFEST, SplitPart, read_manifest
from fminfer.split.merging import describe_ranges, merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.forked import run_forked
from tests.split_lines import answer_part, make_lines

NUM_LINES = int(os.environ.get("FMINFER_ROUND_TRIP_LINES", "2000"))
ROOT = Path(__file__).parent.parent.parent


def split(source: Path, folder: Path, chunk: int = 1000) -> list[Path]:
    """Split a file; return the parts."""
    parts = split_file(source, folder, SplitOptions(100, chunk)).manifest.parts
    return [folder / part.path for part in parts]


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """A folder of answered parts: a good line of each of three engines, and bad ones of one."""
    lines = [
        b'{"prompt": "%d", "engine": "%s"}' % (i, b"abc"[i % 3 :][:1])
        for i in range(12)
    ]
    lines[4] = lines[7] = b'{"engine": "b"}'
    (tmp_path / "all.jsonl").write_bytes(b"\n".join(lines))
    for part in split(tmp_path / "all.jsonl", tmp_path / "parts"):
        answer_part(part)
    return tmp_path / "parts"


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def member(record: bytes, name: bytes) -> bytes:
    """Return what follows a name in a record, to its end."""
    return record.partition(b'"%s":' % name)[2]


def check_error(record: bytes, line: Line, own_line: int) -> None:
    """See that an error is its line's own, but for the number."""
    envelope = parse_envelope(line)
    assert json.loads(record)["line"] == line.number
    if envelope.shape == "batch":
        own = make_line_id(Line(0, own_line, line.raw), envelope)
        assert json.loads(record)["id"] == f"batch_req_{own}"
    else:
        assert member(record, b"request").startswith(envelope.request)


def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split, answer each part as a run does, merge: each line once, in order, byte for byte.

    FMINFER_ROUND_TRIP_LINES=100000 does more.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # of hundreds of journals
    lines = make_lines(NUM_LINES, random.Random(11))
    source = tmp_path / "all.jsonl"
    folder = tmp_path / "parts"
    output = tmp_path / "merged.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    for path in split(source, folder, chunk=max(1000, NUM_LINES)):
        answer_part(path)
    summary = merge_parts(folder, output)
    own_lines: dict[int, int] = {}  # the number that a line has in its part
    for part in read_manifest(folder).parts:
        own_lines |= {number: row for row, number in enumerate(part.lines, 1)}
    answers = iter(output.read_bytes().split(b"\n")[:-1])
    errors = iter(errors_path(output).read_bytes().split(b"\n")[:-1])
    error = next(errors)
    num_answers = 0
    num_errors = 0
    for line in read_lines(source, 0):
        envelope = parse_envelope(line)
        own_id = make_line_id(
            Line(0, own_lines[line.number], line.raw), envelope
        ).encode()
        is_error = error.startswith(
            (b'{"line":%d,' % line.number, b'{"id":"batch_req_' + own_id)
        )
        num_errors += is_error
        if is_error:
            check_error(error, line, own_lines[line.number])
            error = next(errors, b"")
            continue
        num_answers += 1
        answer = next(answers)
        if envelope.shape == "batch":
            assert answer.startswith(b'{"id":"batch_req_' + own_id)
        else:
            text = f"é{own_lines[line.number]}"
            start = (
                b'{"request":' + envelope.request + b',"result":{"choices":[{"text":"'
            )
            assert answer.startswith(start + text.encode() + b'"')
    assert (next(answers, None), error) == (None, b""), "nothing else"
    assert (summary.num_answers, summary.num_errors) == (num_answers, num_errors)
    assert num_errors > NUM_LINES // 10 < num_answers, "both kinds were there"
    assert sorted(
        path.name for path in tmp_path.iterdir() if "merged" in path.name
    ) == [
        "merged.errors.jsonl",
        "merged.jsonl",
    ]


FOREIGN = (
    b"\xff\xfe\x81]",
    b"<html>no</html>",
    b"\x1f\x8b\x08x",
    b"PAR1",
    b"BZh9",
    b"[5, 6]",
    b"a,b",
)


@pytest.mark.parametrize("rows", [1, 100], ids=["alone", "together"])
def test_a_wrong_line_that_begins_as_another_kind_of_file_costs_itself(
    rows: int, tmp_path: Path
) -> None:
    """A part that began with one was refused, or taken for packed, and never could be merged."""
    good = b'{"prompt": "a", "max_tokens": 2}'
    lines = [line for wrong in FOREIGN for line in (good, wrong)]
    (tmp_path / "all.jsonl").write_bytes(b"\n".join(lines))
    parts = split(tmp_path / "all.jsonl", tmp_path / "parts", chunk=100 * rows)
    command = ["run", *map(str, find_inputs(parts)), "-q"]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 3, found.output
    merged = tmp_path / "merged.jsonl"
    summary = merge_parts(tmp_path / "parts", merged)
    assert (summary.num_answers, summary.num_errors) == (len(FOREIGN), len(FOREIGN))
    errors = [
        json.loads(line) for line in errors_path(merged).read_bytes().splitlines()
    ]
    assert [error["line"] for error in errors] == [*range(2, 2 * len(FOREIGN) + 1, 2)]


def test_the_command_ends_with_3_if_there_are_errors(answered: Path) -> None:
    output = answered.parent / "m.jsonl"
    flags = ["merge", "--input-dir", str(answered), "--output"]
    found = CliRunner().invoke(main, [*flags, str(output)])
    assert found.exit_code == 3 and found.stdout == "", found.output
    assert "10 answers" in found.stderr and "2 lines" in found.stderr
    errors = [
        json.loads(line) for line in errors_path(output).read_bytes().splitlines()
    ]
    assert [error["line"] for error in errors] == [5, 8]
    found = CliRunner().invoke(main, [*flags, str(output)])
    assert found.exit_code == 3 and f"{output} is already there" in found.stderr
    output.write_bytes(output.read_bytes().replace(b"1", b"2", 1))
    found = CliRunner().invoke(main, [*flags, str(output)])
    assert found.exit_code == 2 and "exists; move it away" in found.stderr


def test_no_errors_no_file(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_bytes(b'{"prompt": "a"}\n\n{"prompt": "bb"}')
    for part in split(tmp_path / "all.jsonl", tmp_path / "parts"):
        answer_part(part)
    output = tmp_path / "new" / "m.jsonl"
    output.parent.mkdir()
    output.symlink_to("nothing")  # it is no file, and is replaced
    flags = ["merge", "--input-dir", str(tmp_path / "parts"), "--output", str(output)]
    assert CliRunner().invoke(main, flags).exit_code == 0
    assert [path.name for path in output.parent.iterdir()] == ["m.jsonl"]
    prompts = [
        json.loads(line)["request"]["prompt"]
        for line in output.read_bytes().splitlines()
    ]
    assert prompts == ["a", "bb"]


def test_a_source_that_has_changed_is_told(tmp_path: Path) -> None:
    """Lines that were added or removed after the split were passed over without a word."""
    source = tmp_path / "all.jsonl"
    parts = tmp_path / "parts"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for part in split(source, parts):
        answer_part(part)

    def merge(output: str) -> str:
        flags = ["merge", "--input-dir", str(parts), "--output", str(tmp_path / output)]
        found = CliRunner().invoke(main, flags)
        assert found.exit_code == 0 and "merged    2 answers" in found.stderr
        return found.stderr

    assert "Warning" not in merge("same.jsonl")
    for size, text in ((48, '{"prompt": "a"}\n' * 3), (16, '{"prompt": "b"}\n')):
        source.write_text(text)
        said = merge(f"{size}.jsonl")
        assert (
            f"Warning: {source} has changed since it was split: it had 32 bytes ("
            in said
        )
        assert (
            f"and has {size} bytes (" in said and "split it into another folder" in said
        )
    source.unlink()
    assert "Warning" not in merge("gone.jsonl"), "its answers can be merged without it"


# --- what is missing


def test_missing_parts_are_named_with_each_engines_own_command(answered: Path) -> None:
    """One command named the parts of two engines: it would answer one of them by a
    wrong model."""
    (answered / "a" / "output_request_0.jsonl").unlink()
    shutil.rmtree(answered / "c")
    before = files_of(answered.parent)
    output = answered.parent / "m.jsonl"
    flags = ["merge", "--input-dir", str(answered), "--output", str(output)]
    found = CliRunner().invoke(main, flags)
    assert found.exit_code == 1
    assert (
        "8 of 12 lines" in found.stderr
        and "lines 1, 3-4, 6-7, 9-10, 12." in found.stderr
    )
    commands = [
        line for line in found.stderr.split("\n") if line.startswith("  fminfer run")
    ]
    assert commands == [
        f"  fminfer run {answered}/{name}/request_0.jsonl --model-name 'MODEL of {name}'"
        for name in "ac"
    ]
    assert files_of(answered.parent) == before, "nothing is written"


def test_a_part_that_was_begun_is_not_merged(answered: Path) -> None:
    answers = answers_path(answered / "b" / "request_0.jsonl")
    status = status_path(answers)
    text = status.read_text()
    # such as a run with --restart
    for wrong in ("in_progress", "finalizing", "failed"):
        status.write_text(json.dumps(json.loads(text) | {"status": wrong}))
        with pytest.raises(FminferError, match=r"b/request_0.jsonl \(not finished\)"):
            merge_parts(answered, answered.parent / "m.jsonl")
    status.unlink()
    journal_path(answers).write_text("")
    with pytest.raises(FminferError, match=r"b/request_0.jsonl \(not finished\)"):
        merge_parts(answered, answered.parent / "m.jsonl")
    answers.unlink()
    with pytest.raises(FminferError, match=r"b/request_0.jsonl \(not finished\)"):
        merge_parts(answered, answered.parent / "m.jsonl")


def test_many_missing_parts_are_named_by_their_folders(tmp_path: Path) -> None:
    requests = [{"prompt": "a", "engine": "a b", "seed": i, "n": 1} for i in range(40)]
    source = tmp_path / "all.jsonl"
    source.write_text("\n\n".join(map(json.dumps, requests)))
    split(source, tmp_path / "parts")
    with pytest.raises(FminferError) as error:
        merge_parts(tmp_path / "parts", tmp_path / "m.jsonl")
    message = str(error.value)
    assert "lines 1, 3, 5" in message and "and 30 more places" in message
    assert message.endswith(
        f"fminfer run {tmp_path}/parts/a%20b --model-name 'MODEL of a b'"
    )


def test_ranges() -> None:
    def of(*lines: list[int]) -> str:
        return describe_ranges(
            [SplitPart("", None, {}, "", array("q", some)) for some in lines]
        )

    assert of([1]) == "1" and of([3, 1], [2]) == "1-3" and of([9, 7, 1]) == "1, 7, 9"


# --- answers of another part


def test_answers_to_another_file(answered: Path) -> None:
    """As when a folder was split anew and the answers were put back."""
    shutil.copy(
        status_path(answers_path(answered / "a" / "request_0.jsonl")),
        status_path(answers_path(answered / "c" / "request_0.jsonl")),
    )
    with pytest.raises(FminferError, match=r"another file than c/request_0\.jsonl"):
        merge_parts(answered, answered.parent / "m.jsonl")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "output_request_0.jsonl",
            lambda data: data + b'{"request":{}}',
            "more than the 4 lines",
        ),
        ("output_request_0.jsonl", lambda data: b"", "answers to 2 of the 4 lines"),
        (
            "output_request_0.errors.jsonl",
            lambda data: b"",
            "answers to 2 of the 4 lines",
        ),
        ("output_request_0.errors.jsonl", lambda data: data + data, "is of no line"),
        (
            "output_request_0.errors.jsonl",
            lambda data: data.replace(b'{"line":3', b'{"line":5'),
            "is of no line",
        ),
        (
            "output_request_0.errors.jsonl",
            lambda data: data.replace(b'{"line":3', b'{"line":0'),
            "is of no line",
        ),
        (
            "output_request_0.errors.jsonl",
            lambda data: b"garbage\n" + data,
            "is of no line",
        ),
        (
            "output_request_0.errors.jsonl",
            lambda data: b'{"id":"batch_req_%s"}\n' % (b"0" * 32) + data,
            "is of no line",
        ),
    ],
)
def test_counts_that_do_not_fit(
    name: str, change: Callable[[bytes], bytes], reason: str, answered: Path
) -> None:
    path = answered / "b" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FminferError, match=reason):
        merge_parts(answered, answered.parent / "m.jsonl")
    assert not (answered.parent / "m.jsonl").exists()


def test_batch_errors_of_earlier_versions_need_the_part_as_it_was(
    tmp_path: Path,
) -> None:
    """They did not say their line."""
    line = {
        "custom_id": "1",
        "method": "GET",
        "url": "/v1/completions",
        "body": {"prompt": "a"},
    }
    (tmp_path / "all.jsonl").write_text(json.dumps(line))
    (part,) = split(tmp_path / "all.jsonl", tmp_path / "parts")
    answer_part(part)
    errors = errors_path(answers_path(part))
    written = errors.read_bytes()
    assert written.endswith(b',"error":null,"line":1}\n')
    errors.write_bytes(written.replace(b',"line":1', b""))
    assert merge_parts(tmp_path / "parts", tmp_path / "m.jsonl").num_errors == 1
    part.write_text("{}\n" + part.read_text())
    with pytest.raises(FminferError, match="is not as it was split"):
        merge_parts(tmp_path / "parts", tmp_path / "n.jsonl")


def test_answers_of_the_old_tool(answered: Path) -> None:
    """They have no status, no errors file, and perhaps no last newline."""
    for part in sorted(answered.rglob("request_*.jsonl")):
        answers = answers_path(part)
        status_path(answers).unlink()
        errors_path(answers).unlink(missing_ok=True)
        lines = part.read_bytes().split(b"\n")[:-1]
        answers.write_bytes(
            b"\n".join(b'{"request": %s, "result": {}}' % line for line in lines)
        )
    output = answered.parent / "m.jsonl"
    assert merge_parts(answered, output).num_answers == 12
    lines = (answered.parent / "all.jsonl").read_bytes().split(b"\n")
    assert output.read_bytes() == b"".join(
        b'{"request": %s, "result": {}}\n' % line for line in lines
    )


# --- the output


@pytest.mark.parametrize("name", ["m.json", "m.jsonl.gz", "-", "parts", "all.jsonl"])
def test_outputs_that_cannot_be(name: str, answered: Path) -> None:
    before = files_of(answered.parent)
    with pytest.raises(UsageError):
        merge_parts(answered, Path("-") if name == "-" else answered.parent / name)
    assert files_of(answered.parent) == before


def test_a_source_that_looks_like_an_errors_file_is_kept(answered: Path) -> None:
    (answered.parent / "all.jsonl").rename(answered.parent / "x.errors.jsonl")
    with pytest.raises(UsageError, match="exists"):
        merge_parts(answered, answered.parent / "x.jsonl")


def test_no_folder_and_no_manifest(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=f"no {MANIFEST}"):
            merge_parts(folder, tmp_path / "m.jsonl")


def test_a_disk_that_fails(answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(answered.parent)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "write_all", fail)
    with pytest.raises(OutputError, match=r"No space left on device\. Nothing"):
        merge_parts(answered, answered.parent / "m.jsonl")
    assert files_of(answered.parent) == before


def test_the_answers_come_last(answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are, all is complete, whenever the merge was killed."""
    real = os.replace
    renamed = []

    def replace(draft: Path, final: Path) -> None:
        renamed.append(final.name)
        real(draft, final)

    monkeypatch.setattr(os, "replace", replace)
    merge_parts(answered, answered.parent / "m.jsonl")
    assert renamed == ["m.errors.jsonl", "m.jsonl"]


def test_answers_that_change_meanwhile(
    answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = merging._compute_places

    def place_and_change(*arguments: Any) -> Any:
        answers = answered / "c" / "output_request_0.jsonl"
        answers.write_bytes(answers.read_bytes().replace(b'"text"', b'"changed"'))
        return place(*arguments)

    monkeypatch.setattr(merging, "_compute_places", place_and_change)
    with pytest.raises(FminferError, match="changed while"):
        merge_parts(answered, answered.parent / "m.jsonl")
    assert not (answered.parent / "m.jsonl").exists()


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    """More parts than files that a process may open."""
    (tmp_path / "all.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "a", "seed": i}) for i in range(150))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 12, hard))
    try:
        for part in split(tmp_path / "all.jsonl", tmp_path / "parts"):
            answers_path(part).write_bytes(b'{"result":1}\n')
        assert merge_parts(tmp_path / "parts", tmp_path / "m.jsonl").num_answers == 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_the_demo_model(tmp_path: Path) -> None:
    """Split, run each engine's parts, merge: the same greedy answers as a run of the
    whole file."""
    queries = ROOT / "examples" / "queries"
    source = tmp_path / "all.jsonl"
    folder = tmp_path / "parts"
    names = ("plain", "bad_lines", "wrapped", "stop", "batch")
    source.write_bytes(
        b"\n".join((queries / f"{name}.jsonl").read_bytes() for name in names)
    )
    split(source, folder)
    engines = sorted({path.parent for path in folder.rglob("request_*.jsonl")})
    assert len(engines) > 1
    for inputs in (engines, [source]):
        done = run_forked(["run", "-q", "--kernels", "off", *inputs])
        assert done.returncode == 3, done.stderr
    summary = merge_parts(folder, tmp_path / "m.jsonl")
    whole = answers_path(source)
    assert summary.num_errors > 5
    for place in (Path, errors_path):
        merged, expected = (
            [
                _comparable(json.loads(line))
                for line in place(path).read_bytes().split(b"\n")[:-1]
            ]
            for path in (tmp_path / "m.jsonl", whole)
        )
        assert merged == expected


def _comparable(record: dict[str, object]) -> object:
    """Return what does not depend on times, and on where in its file a Batch line stood."""
    result = record.get("result") or record.get("response")
    if not isinstance(result, dict):
        return record
    body = result.get("body", result)
    texts = [
        (choice["text"], choice["finish_reason"]) for choice in body.get("choices", [])
    ]
    return record.get("request"), record.get("custom_id"), texts, body.get("error")


def test_a_merge_beside_another_is_refused(answered: Path) -> None:
    """Both wrote into one draft: one said "merged", and the other's file had less."""
    output = answered.parent / "m.jsonl"
    with (
        claiming_output(output),
        pytest.raises(InUseError, match="is being written by process"),
    ):
        merge_parts(answered, output)
    assert merge_parts(answered, output).num_answers == 10
    assert {*answered.parent.glob("m.*")} == {output, errors_path(output)}


def test_a_repeated_merge_says_that_it_is_there(answered: Path) -> None:
    output = answered.parent / "m.jsonl"
    assert not merge_parts(answered, output).was_there
    before = output.read_bytes(), errors_path(output).read_bytes()
    assert merge_parts(answered, output).was_there
    assert (output.read_bytes(), errors_path(output).read_bytes()) == before
    errors_path(output).write_bytes(b"mine\n")
    with pytest.raises(UsageError, match=r"m.errors.jsonl exists; move it away"):
        merge_parts(answered, output)
    assert errors_path(output).read_bytes() == b"mine\n"


def test_a_status_that_cannot_be_read_ends_a_merge(answered: Path) -> None:
    """It counted as none, as beside answers of an older tool: what it says was not looked at."""
    part = next(iter(read_manifest(answered).parts))
    status_path(answers_path(answered / part.path)).write_bytes(b"{")
    with pytest.raises(UsageError, match="cannot be read, or is damaged"):
        merge_parts(answered, answered.parent / "m.jsonl")
    assert not (answered.parent / "m.jsonl").exists()


def test_parts_whose_vectors_stand_apart_are_refused(
    answered: Path, tmp_path: Path
) -> None:
    part = next(answered.rglob("request_*.jsonl"))
    status = json.loads(status_path(answers_path(part)).read_text())
    status["fminfer"] = {"written": {"vectors": {}}}
    status_path(answers_path(part)).write_text(json.dumps(status))
    with pytest.raises(
        UsageError, match=r"are in a \.npy file, .*without --embeddings npy"
    ):
        merge_parts(answered, tmp_path / "merged.jsonl")
