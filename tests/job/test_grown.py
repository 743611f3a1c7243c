"""Inputs that have grown or changed: what is taken is what answering all would give."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import fminfer
from fminfer.answers.carrying_over import RunTerms
from fminfer.cli.app import main
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.core.errors import StoppedError, UsageError
from fminfer.files.completed import is_complete
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import identify_input
from fminfer.files.ordered_output import errors_path
from fminfer.files.output_paths import OutputPaths
from fminfer.files.status_file import read_status, status_path
from fminfer.files.streams import digest_file
from fminfer.job import journaled_input
from fminfer.job.overview import find_overviews
from fminfer.job.run_summary import JobSummary
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine import other_work
from fminfer.models.checkpoint import open_model
from fminfer.runtime.lines.runner import LOOKAHEAD
from fminfer.runtime.load.assembly import make_line_counting
from tests.conftest import IS_ALL, more, run_files
from tests.files.test_journal import kill_at
from tests.job.test_try_again import bury_claims, close_all
from tests.line_bench import before_each_record

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HOT = {"max_tokens": 4, "temperature": 1.5, "ignore_eos": True}
CountLines = Callable[[], Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fminfer.Engine]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    engine = fminfer.Engine(
        dtype="float32", kernels="off", max_rows=4, chat_template=str(template)
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def counting(engine: fminfer.Engine) -> CountLines:
    return make_line_counting(engine.config, open_model(engine.config))


def write(path: Path, lines: list[Any]) -> None:
    """Write requests, and bytes as they are, a line each."""
    rows = [
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    ]
    path.write_bytes(b"".join(row + b"\n" for row in rows))


def stop_after(
    engine: fminfer.Engine, count: int, source: Path, output: Path, **terms: Any
) -> None:
    """Answer a file up to so many records, if it has more."""

    def stop_early(number: int) -> None:
        if number == count:
            raise StoppedError("enough")

    with pytest.MonkeyPatch.context() as patch:
        before_each_record(patch, stop_early)
        with contextlib.suppress(StoppedError):
            run_files(engine, [source], [output], **terms)


def read(output: Path) -> tuple[list[Any], list[Any]]:
    """Return the records of an output and its errors, without what no two runs have in
    common."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for records, path in zip(found, (output, errors_path(output)), strict=True):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            record = json.loads(line)
            result = (
                record.get("result") or (record.get("response") or {}).get("body") or {}
            )
            result.get("usage", {}).pop("prompt_tokens_details", None)
            result.pop("request_time", None)
            result.pop("created", None)
            records.append(record)
    return found


def batch(custom_id: str, body: Any, url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_a_file_that_has_grown(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines: list[Any] = [HOT | {"prompt": f"p{n}"} for n in range(6)]
    write(source, lines)
    run_files(engine, [source], [output])
    before = output.read_bytes().splitlines()
    assert is_complete(output, source) and find_overviews(source)[0].count("done") == 0
    new = HOT | {"prompt": "new"}
    write(source, [new, *lines[:2], *lines[3:][::-1], new])
    (overview,) = find_overviews(output)
    assert overview.files[0].state == "stopped" and "changed" in str(
        overview.files[0].why
    )
    assert not is_complete(output, source)
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_rows, summary.num_kept_rows) == (2, 5)
    assert (summary.num_taken_rows, summary.num_left_out_rows) == (5, 1)
    assert (
        "5 earlier answers taken, 1 left out because its line is gone"
        in summary.to_text()
    )
    assert summary.to_dict()["num_taken_rows"] == 5
    found = output.read_bytes().splitlines()
    assert found[1:6] == [before[n] for n in (0, 1, 5, 4, 3)], "byte for byte"
    status: Any = read_status(output)
    assert status["request_counts"] == {"total": 7, "completed": 7, "failed": 0}
    assert status["usage"]["output_tokens"] == 28
    again = run_files(engine, [source], [output], count_lines=counting)
    assert (again.num_kept_rows, again.num_taken_rows) == (7, 0)
    assert "changed" not in again.to_text()


def test_all_rows_of_an_output_are_asked_at_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that reads the clock gave rows of one output different prompts."""
    template = tmp_path / "clock.jinja"
    template.write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    engine = fminfer.Engine(
        dtype="float32", kernels="off", max_rows=1, chat_template=str(template)
    )
    asked = {
        "messages": [{"role": "user", "content": ""}],
        "max_tokens": 1,
        "temperature": 0,
    }
    lines: list[Any] = [
        asked | {"return_token_ids": True, "user": f"u{n}"} for n in range(6)
    ]
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    counting = make_line_counting(engine.config, open_model(engine.config))

    def years() -> set[str]:
        records = [json.loads(line) for line in output.read_bytes().splitlines()]
        prompts = [each["result"]["choices"][0]["prompt_token_ids"] for each in records]
        return {engine.tokenizer.decode(ids) for ids in prompts}

    def set_year(year: int) -> None:
        monkeypatch.setattr(
            journaled_input, "read_clock", lambda: f"{year}-01-01T00:00:00+00:00"
        )

    write(source, lines[:4])
    set_year(2001)
    stop_after(engine, 1, source, output)
    set_year(2002)
    run_files(engine, [source], [output], limit=3)
    assert years() == {"2001"}, "from the journal"
    set_year(2003)
    run_files(engine, [source], [output])
    assert years() == {"2001"}, "from a complete output that is opened again"
    write(source, lines)
    set_year(2004)
    run_files(engine, [source], [output], count_lines=counting)
    assert years() == {"2001"}, "from answers to an earlier form of the input"
    set_year(2005)
    run_files(engine, [source], [output], restart=True)
    assert years() == {"2005"}
    engine.close()


def make_lines(kind: str, source: random.Random, count: int) -> list[Any]:
    """Return lines of one kind, or of all; many mean the same, in other bytes too."""
    lines: list[Any] = []
    for _ in range(count):
        shape = (
            source.choice(["bare", "wrapped", "batch", "chat"])
            if kind == "mixed"
            else kind
        )
        more = source.choice([{}, {}, {}, {"temperature": 0}, {"seed": 3}])
        body: dict[str, Any] = HOT | {"prompt": source.choice("xyz")} | more
        if source.random() < 0.3:  # equal in other bytes
            body = dict(reversed(body.items())) | {"max_tokens": 4.0}
        if shape == "chat":
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if source.random() < 0.1:
            body["top_p"] = 7  # refused
        if shape == "wrapped":
            lines.append(
                {
                    "note": source.randrange(3),
                    "request": body,
                    "more": [1, {"result": 2}],
                }
            )
        elif shape == "batch":
            lines.append(batch(f"id{source.randrange(40)}", body))
        else:
            lines.append(body)
    return lines


def edit(lines: list[Any], kind: str, source: random.Random) -> list[Any]:
    """Change some lines of a file, and their order."""
    lines = [*lines]
    for _ in range(source.randrange(1, 6)):
        place = source.randrange(len(lines) + 1)
        how = source.choice(["add", "add", "append", "remove", "move", "blank", "bad"])
        new = make_lines(kind, source, 1)[0]
        if how == "append":
            lines.append(new)
        elif how in ("remove", "move") and place < len(lines):
            line = lines.pop(place)
            if how == "move":
                lines.insert(source.randrange(len(lines) + 1), line)
        else:
            lines.insert(place, {"add": new, "blank": b"", "bad": b"{no"}.get(how, new))
    return lines


ANCHOR = {"prompt": "anchor", "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=more) for seed in (2, 3))]
)
@pytest.mark.parametrize("kind", ["bare", "wrapped", "batch", "chat", "mixed"])
def test_random_edits_give_what_answering_all_would_give(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path, kind: str, seed: int
) -> None:
    """Through three edits in a row, some after a run that was broken off."""
    source = random.Random(f"{kind} {seed}")
    path = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    anchor = batch("anchor", ANCHOR) if kind == "batch" else ANCHOR
    lines = [anchor, *make_lines(kind, source, 14)]
    num_taken = 0
    for turn in range(4):
        write(path, lines)
        if turn % 2 == seed % 2 and turn < 3:
            stop_after(engine, 2 if turn else 9, path, output, count_lines=counting)
        else:
            summary = run_files(engine, [path], [output], count_lines=counting)
            num_taken += summary.num_taken_rows
            whole = tmp_path / f"whole_{turn}.jsonl"
            run_files(engine, [path], [whole])
            assert read(output) == read(whole)
            assert {name.name for name in tmp_path.glob("out*")} <= {
                "out.jsonl",
                "out.errors.jsonl",
                "out.status.json",
            }
        lines = [anchor, *edit(lines[1:], kind, source)]
    assert num_taken > 3


@pytest.mark.parametrize("most", [1 << 17, 0])
def test_equal_lines_keep_their_numbers(
    engine: fminfer.Engine,
    counting: CountLines,
    tmp_path: Path,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nth of them draws as the nth, whatever its `custom_id`: the answers move.

    Also where too many are new to keep their numbers in memory.
    """
    monkeypatch.setattr("fminfer.answers.carrying_over.MAX_REPEATS", most)
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    body = HOT | {"prompt": "x"}
    write(source, [batch(f"c{n}", body) for n in range(5)])
    run_files(engine, [source], [output])
    before = [record["response"]["body"]["choices"] for record in read(output)[0]]
    assert len({str(each) for each in before}) == 5
    old = [batch(f"c{n}", body) for n in range(5)]
    write(source, [batch("new", body), *old, batch("last", body)])
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_rows, summary.num_taken_rows, summary.num_left_out_rows) == (
        2,
        5,
        0,
    )
    records = read(output)[0]
    assert [record["custom_id"] for record in records] == [
        "new",
        "c0",
        "c1",
        "c2",
        "c3",
        "c4",
        "last",
    ]
    assert [record["response"]["body"]["choices"] for record in records][:5] == before
    ids = [record["id"] for record in records]
    requests = [record["response"]["request_id"] for record in records]
    assert len({*ids}) == len({*requests}) == 7


def test_equal_greedy_lines_of_one_file_have_ids_of_their_own(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [batch(f"c{n}", ANCHOR) for n in range(5)])
    run_files(engine, [source], [output])
    assert len({record["response"]["request_id"] for record in read(output)[0]}) == 5


def test_a_duplicate_custom_id_is_refused_though_its_answer_is_known(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [batch(f"c{n}", HOT | {"prompt": f"p{n}"}) for n in range(3)]
    write(source, lines)
    run_files(engine, [source], [output])
    write(
        source, [*lines, batch("c1", lines[2]["body"]), batch("c9", lines[1]["body"])]
    )
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_rows, summary.num_errors, summary.num_taken_rows) == (1, 1, 3)
    assert summary.errors_by_code == {"duplicate_custom_id": 1}


def test_no_answer_is_thrown_away_for_another_file(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """Another file was named by mistake, or the file was emptied: nothing is taken, all
    stays."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [HOT | {"prompt": f"p{n}"} for n in range(3)])
    run_files(engine, [source], [output])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    for lines in ([], [HOT | {"prompt": "other"}]):
        write(source, lines)
        with pytest.raises(
            UsageError, match=r"the input was .*none of the answers \(3\).*--rest"
        ):
            run_files(engine, [source], [output], count_lines=counting)
        assert {
            path.name: path.read_bytes() for path in tmp_path.glob("out*")
        } == before
    summary = run_files(engine, [source], [output], restart=True, count_lines=counting)
    assert (summary.num_rows, summary.num_taken_rows) == (1, 0)


def test_restart_answers_all(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [ANCHOR])
    run_files(engine, [source], [output])
    write(source, [ANCHOR, ANCHOR | {"prompt": "b"}])
    summary = run_files(engine, [source], [output], restart=True, count_lines=counting)
    assert (summary.num_rows, summary.num_kept_rows) == (2, 0)


def test_other_settings_are_refused_by_name(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    from fminfer.job.run_inputs import open_files

    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [ANCHOR])
    run_files(engine, [source], [output])
    write(source, [ANCHOR, ANCHOR])
    with pytest.raises(UsageError, match="--seed was not given, is 5"):
        open_files(
            [source], [output], RunTerms("m", {"--seed": "5"}, count_lines=counting)
        )


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_limit_throws_no_answer_away(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path, is_whole: bool
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [HOT | {"prompt": f"p{n}"} for n in range(6)]
    new = HOT | {"prompt": "new"}
    write(source, lines)
    if is_whole:
        run_files(engine, [source], [output], limit=4)
    else:
        stop_after(engine, 3, source, output, limit=4)
    write(source, [new, new, *lines])
    with pytest.raises(
        UsageError,
        match=r"beyond the first 3 \(\d\); give a larger --limit or none .* or --restart$",
    ):
        run_files(engine, [source], [output], limit=3, count_lines=counting)
    summary = run_files(engine, [source], [output], limit=7, count_lines=counting)
    assert (summary.num_taken_rows, summary.num_left_out_rows) == (
        4 - (not is_whole),
        0,
    )
    assert len(read(output)[0]) == 7
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_rows, summary.num_kept_rows, summary.num_taken_rows) == (
        1,
        7,
        0,
    )


def test_equal_lines_beyond_a_limit_are_no_hindrance(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """They have answers, which lines within the limit have taken as well."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    greedy = [HOT | {"prompt": name, "temperature": 0} for name in "ab"]
    write(source, greedy * 2)
    run_files(engine, [source], [output], limit=2)
    write(source, greedy * 3)
    summary = run_files(engine, [source], [output], limit=3, count_lines=counting)
    assert (summary.num_rows, summary.num_taken_rows, summary.num_left_out_rows) == (
        0,
        3,
        0,
    )


def test_it_tells_how_far_it_is(
    engine: fminfer.Engine,
    counting: CountLines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing where it takes no time, as here; otherwise a line now and then."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [HOT | {"prompt": f"p{n}"} for n in range(4)]
    told: list[str] = []
    for number, every_s in ((2, 5.0), (3, 5.0), (4, 0.0)):
        monkeypatch.setattr("fminfer.answers.earlier_answers.PRINT_EVERY_S", every_s)
        monkeypatch.setattr("fminfer.answers.earlier_answers.CHECK_EVERY", 2)
        write(source, lines[:number])
        assert told == []
        run_files(
            engine, [source], [output], count_lines=counting, print_progress=told.append
        )
    assert told == [
        "Reading earlier answers: 0",
        "Reading earlier answers: 2",
        "Taking them: 2 of 3",
    ]


def test_packed_files_and_a_lost_newline(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    lines = [json.dumps(HOT | {"prompt": f"p{n}"}).encode() for n in range(4)]
    packed = tmp_path / "a.jsonl.gz"
    plain = tmp_path / "b.jsonl"
    packed.write_bytes(gzip.compress(b"\n".join(lines)))
    plain.write_bytes(b"\n".join(lines) + b"\n")
    for source, pack in ((packed, gzip.compress), (plain, bytes)):
        output = tmp_path / f"out_{source.name}"
        run_files(engine, [source], [output])
        source.write_bytes(pack(b"\n".join(lines[1:])))
        summary = run_files(engine, [source], [output], count_lines=counting)
        assert (
            summary.num_rows,
            summary.num_taken_rows,
            summary.num_left_out_rows,
        ) == (0, 3, 1)
        assert len(read(output)[0]) == 3


def test_rows_that_failed_are_judged_again(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """Lasting errors, and one that the machine had: its equal lines may draw by another
    number."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    same = HOT | {"prompt": "x"}
    lines = [same, b"{no", same | {"top_p": 9}, same, HOT | {"prompt": "y"}]
    write(source, lines)
    with pytest.MonkeyPatch.context() as patch:
        fail_on_second(patch)
        run_files(engine, [source], [output])
    assert len(read(output)[0]) == 2 and len(read(output)[1]) == 3
    write(source, [*lines, same])
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_taken_rows, summary.num_left_out_rows) == (1, 1)
    run_files(engine, [source], [tmp_path / "whole.jsonl"])
    assert read(output) == read(tmp_path / "whole.jsonl")


def fail_on_second(patch: pytest.MonkeyPatch) -> None:
    """Let the second request that is prepared fail as if through the machine."""
    from fminfer.core.errors import RequestError
    from fminfer.engine.intake import Intake

    prepare = Intake.prepare
    calls = iter(range(100))

    def failing(self: Intake, *args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise RequestError("out_of_memory", "it did not fit")
        return prepare(self, *args, **options)

    patch.setattr(Intake, "prepare", failing)


def test_an_output_without_answers_is_no_hindrance(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [b"{no"])
    run_files(engine, [source], [output])
    write(source, [b"{no", ANCHOR])
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert (summary.num_rows, summary.num_errors) == (1, 1)
    assert len(read(output)[0]) == 1


@pytest.mark.parametrize("kind", ["answers", "errors", "no status", "damaged journal"])
def test_what_was_edited_by_hand_is_refused(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [ANCHOR, ANCHOR | {"prompt": "b"}, b"{no"]
    write(source, lines)
    if kind == "damaged journal":
        stop_after(engine, 2, source, output)
        path = journal_path(output)
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"fminfer_journal": 2', b'"fminfer_journal": 9'))
    else:
        run_files(engine, [source], [output])
        if kind == "no status":
            status_path(output).unlink()
        else:
            edited = output if kind == "answers" else errors_path(output)
            edited.write_bytes(edited.read_bytes().replace(b"e", b"E", 1))
    write(source, [*lines, ANCHOR | {"prompt": "c"}])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    message = {
        "no status": "nothing tells which",
        "damaged journal": "first line is damaged",
    }
    with pytest.raises(
        UsageError, match=message.get(kind, "not as it was written.*--restart")
    ):
        run_files(engine, [source], [output], count_lines=counting)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before


def test_rows_of_an_older_journal_are_kept_for_the_same_input_only(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """They tell no request; so nobody would know which line of another file they answer."""
    import re
    import zlib

    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [HOT | {"prompt": f"p{n}"} for n in range(5)]
    write(source, lines)
    stop_after(engine, 4, source, output)
    path = journal_path(output)
    head, *rows = path.read_bytes().splitlines(keepends=True)
    old = [head.replace(b'"fminfer_journal": 2', b'"fminfer_journal": 1')]
    for row in rows:
        start, record = re.fullmatch(
            rb'(.*?)"key":"[0-9a-f]{32}","check":"[0-9a-f]{8}","record":(.*)\}\n', row
        ).groups()  # type: ignore[union-attr]
        start += b'"check":"'
        old.append(
            start
            + b'%08x","record":%s}\n' % (zlib.crc32(record, zlib.crc32(start)), record)
        )
    path.write_bytes(b"".join(old))
    write(source, [*lines, ANCHOR])
    with pytest.raises(
        UsageError, match=r"older version does not tell its request.*--restart"
    ):
        run_files(engine, [source], [output], count_lines=counting)
    write(source, lines)
    assert (
        run_files(engine, [source], [output], count_lines=counting).num_kept_rows == 4
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_it_can_be_killed_at_every_step(
    engine: fminfer.Engine,
    counting: CountLines,
    tmp_path: Path,
    is_whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before and after each system call that changes a file (every second): no answer
    is lost."""
    # threads of killed runs are many
    monkeypatch.setattr(other_work, "PROC", tmp_path / "no")
    template = tmp_path / "template"
    template.mkdir()
    names = ("in.jsonl", "out.jsonl")
    source, output = (template / name for name in names)
    old = [batch(f"c{n}", HOT | {"prompt": f"p{n % 3}"}) for n in range(6)]
    write(source, old)
    if is_whole:
        run_files(engine, [source], [output])
    else:
        stop_after(engine, 5, source, output)
    write(
        source,
        [old[5], batch("new", HOT | {"prompt": "new"}), *old[:3], b"{no", old[4]],
    )
    run_files(engine, [source], [tmp_path / "whole.jsonl"])
    expected = read(tmp_path / "whole.jsonl")
    wanted = answers_in(output) & answers_in(tmp_path / "whole.jsonl")
    assert len(wanted) >= 3
    # The state after one call is that before the next.
    for moment in range(0 if IS_ALL or is_whole else 2, 400, 2 if IS_ALL else 4):
        folder = tmp_path / str(moment)
        shutil.copytree(template, folder)
        source, output = (folder / name for name in names)

        def work(source: Path = source, output: Path = output) -> None:
            run_files(engine, [source], [output], count_lines=counting)

        was_killed = kill_at(moment, work, monkeypatch)
        if was_killed:
            close_all(journal_path(output))
            bury_claims(output)
            assert answers_in(output) >= wanted
            run_files(engine, [source], [output], count_lines=counting)
        assert read(output) == expected
        shown = {path.name for path in folder.iterdir()}
        assert shown == {*names, "out.errors.jsonl", "out.status.json"}
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert moment > 20, "there are so many steps at least"


def answers_in(output: Path) -> set[str]:
    """Return the choices that are kept in an output or its journal."""
    found = output.read_text() if output.exists() else ""
    path = journal_path(output)
    found += path.read_text() if path.exists() else ""
    texts = {
        line.partition('"choices"')[2].partition('"usage"')[0]
        for line in found.splitlines()
    }
    return texts - {""}


def test_two_runs_on_one_grown_file(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """The second waits for nothing: it is refused while the first holds the file."""
    from fminfer.job.journaled_input import JournaledInput

    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [ANCHOR])
    run_files(engine, [source], [output])
    write(source, [ANCHOR, ANCHOR | {"prompt": "b"}])
    first, second = (
        JournaledInput(source, 0, output, RunTerms("m", {}, count_lines=counting))
        for _ in range(2)
    )
    first.begin()
    assert first.carried.num_answered == 1
    second.begin()  # what the first has made is its own now
    assert (second.carried.num_answered, second.kept.num_rows) == (0, 1)
    assert next(first.read_lines(lambda line: None)).number == 2
    with pytest.raises(UsageError, match=r"in use|being written"):
        next(second.read_lines(lambda line: None))
    first.abandon(KeyboardInterrupt())


def test_answers_that_another_run_is_writing_are_not_taken(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    write(source, [ANCHOR, ANCHOR])
    stop_after(engine, 1, source, output)
    write(source, [ANCHOR, ANCHOR, ANCHOR])
    with journal_path(output).open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            UsageError, match=f"in use: another process writes {output}"
        ):
            run_files(engine, [source], [output], count_lines=counting)
    assert (
        run_files(engine, [source], [output], count_lines=counting).num_taken_rows == 3
    )


def test_lines_that_are_passed_over_are_counted(counting: CountLines) -> None:
    """Those that were refused are not, and end no run."""
    counter = counting()
    body = json.dumps(HOT | {"prompt": "x"}).encode()
    for number, raw in enumerate([body, b"{no", b'{"prompt": 1, "top_p": 7}', body], 1):
        counter.add_answered_line(Line(0, number, raw))
    line = Line(0, 5, body)
    assert counter.count(line, parse_envelope(line)) == 2


def test_a_run_that_begins_anew_in_between(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """Its journal has other rows than those that were taken, and as many."""
    from fminfer.job.journaled_input import JournaledInput

    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [HOT | {"prompt": f"p{n}"} for n in range(4)]
    write(source, lines[:2])
    run_files(engine, [source], [output])
    write(source, lines[::-1])
    file = JournaledInput(source, 0, output, RunTerms("m", {}, count_lines=counting))
    file.begin()
    stop_after(engine, 2, source, output, restart=True)
    passed: list[int] = []
    left = [
        (line.number, line.num_equal)
        for line in file.read_lines(lambda e: passed.append(e.number))
    ]
    assert left == [(3, None), (4, None)] and passed == [1, 2]
    file.abandon(KeyboardInterrupt())


def test_a_folder_whose_files_grow(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """Runs that share a folder take up a file that has changed since it was complete."""
    from fminfer.job.file_job import run_job

    sources = [tmp_path / f"{name}.jsonl" for name in "ab"]
    outputs = [tmp_path / f"output_{name}.jsonl" for name in "ab"]
    for source in sources:
        write(source, [ANCHOR])

    def share() -> JobSummary:
        files = SharedFiles(
            lambda: OutputPaths(sources, outputs),
            RunTerms("m", {}, count_lines=counting),
            is_watching=False,
        )
        is_left = files.scan()
        summary = JobSummary("m", "float32", sources, outputs)
        return run_job(engine if is_left else None, files, summary, is_quiet=True)

    assert share().num_rows == 2
    time.sleep(0.01)
    write(sources[1], [ANCHOR, ANCHOR | {"prompt": "b"}])
    summary = share()
    assert (summary.num_rows, summary.num_kept_rows, summary.num_taken_rows) == (
        1,
        2,
        1,
    )
    assert share().num_kept_rows == 3
    assert os.listdir(tmp_path).count("output_b.jsonl") == 1


def test_an_edit_in_the_middle_of_a_run_costs_no_answer(
    engine: fminfer.Engine, counting: CountLines, tmp_path: Path
) -> None:
    """The run ends, and the next one takes what is still asked."""
    source = tmp_path / "a.jsonl"
    output = tmp_path / "out.jsonl"
    short = HOT | {"max_tokens": 1}
    lines = [short | {"prompt": f"p{n % 5}", "user": f"{n} " * 500} for n in range(150)]
    write(source, lines)

    def change(number: int) -> None:
        if number == 5:
            write(source, [HOT | {"prompt": "new"}, *lines])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fminfer.job.file_job.WINDOW", LOOKAHEAD)
        before_each_record(patch, change)
        with pytest.raises(
            UsageError, match=r"changed while it was being answered\. Run"
        ):
            run_files(engine, [source], [output], count_lines=counting)
    summary = run_files(engine, [source], [output], count_lines=counting)
    assert summary.num_taken_rows > 5
    run_files(engine, [source], [tmp_path / "whole.jsonl"])
    assert read(output) == read(tmp_path / "whole.jsonl")


def test_the_command(tmp_path: Path) -> None:
    """`fminfer run` twice over a file that grows; the second time nothing is left to compute."""
    source = tmp_path / "a.jsonl"
    stats = tmp_path / "stats.json"
    command = [
        "run",
        str(source),
        "--stats",
        str(stats),
        "--dtype",
        "float32",
        "--kernels",
        "off",
    ]
    lines = [ANCHOR | {"prompt": text} for text in "abc"]
    found = []
    for some in (lines[:2], lines, lines[1:], lines[1:]):
        write(source, some)
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        told = json.loads(stats.read_text())
        names = ("num_rows", "num_kept_rows", "num_taken_rows", "num_left_out_rows")
        found.append(([told[name] for name in names], bool(told["device"])))
    assert found == [
        ([2, 0, 0, 0], True),
        ([1, 2, 2, 0], True),
        ([0, 2, 2, 1], False),
        ([0, 2, 0, 0], False),  # no model was loaded
    ]
    result = CliRunner().invoke(main, [*command, "--seed", "7"])
    assert result.exit_code == 2 and "--seed was 1, is 7" in result.output


def test_errors_of_another_form_of_a_file_are_not_kept(tmp_path: Path) -> None:
    """An error said to rename pretty.jsonl to .json; then the same errors were kept for ever.

    The bytes and the output's name are the same, but other requests are read from them.
    """
    request = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    source = tmp_path / "pretty.jsonl"
    output = tmp_path / "output_pretty.jsonl"
    source.write_text("\n".join(json.dumps(request, indent=2) for _ in range(2)) + "\n")
    first = CliRunner().invoke(main, ["run", str(source)])
    assert first.exit_code == 3 and errors_path(output).exists()

    source = source.rename(tmp_path / "pretty.json")
    again = CliRunner().invoke(main, ["run", str(source)])
    assert again.exit_code == 0, again.output
    answers = output.read_bytes()
    assert answers.count(b"\n") == 2 and not errors_path(output).exists()

    status = json.loads(status_path(output).read_text())
    assert status["metadata"]["the input"].endswith("), read as JSON values")
    third = CliRunner().invoke(main, ["run", str(source)])
    assert third.exit_code == 0 and output.read_bytes() == answers
    assert "2 kept from earlier runs" in third.stderr


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "array.jsonl", "array.json", "a.json.gz"]
)
def test_an_input_that_any_name_reads_alike_has_its_old_digest(
    tmp_path: Path, name: str
) -> None:
    """Journals of earlier versions go on."""
    rows = [json.dumps({"prompt": text}) for text in "ab"]
    text = f"[{', '.join(rows)}]" if name.startswith("array") else "\n".join(rows)
    path = tmp_path / name
    path.write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    assert identify_input(path) == digest_file(path)
