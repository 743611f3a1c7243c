"""Files that fminfer writes replace files of its own, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.files.first_lines import holds_answers
from fminfer.files.ordered_output import errors_path
from fminfer.files.status_file import status_path
from fminfer.job import journaled_input

LINE = '{"prompt": "x", "max_tokens": 1, "temperature": 0}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    path.write_text(LINE + "no request\n")
    return path


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["run", *map(str, words)])
    return result.exit_code, result.output


@pytest.mark.parametrize("flag", ["--stats", "--trace", "--report"])
@pytest.mark.parametrize("text", [LINE, '{\n  "model_type": "opt"\n}\n', "[1, 2]\n"])
def test_a_file_that_no_run_wrote_is_not_replaced(
    source: Path, flag: str, text: str
) -> None:
    """`--stats requests.jsonl` put the summary in the place of the requests, and so did
    --trace."""
    kept = source.with_name("kept.jsonl")
    kept.write_text(text)
    status, told = run(source, flag, kept)
    assert status == 2 and f"{flag} {kept} exists and is no " in told
    assert kept.read_text() == text and not source.with_name("output_r.jsonl").exists()


@pytest.mark.parametrize("flag", ["--stats", "--trace", "--report"])
def test_what_a_power_cut_left_blank_is_replaced(source: Path, flag: str) -> None:
    """Zeros in the place of its own file stopped the repeat of a command."""
    path = source.with_name("it")
    path.write_bytes(bytes(2 << 20))
    status, told = run(source, flag, path)
    assert status == 3, told
    assert path.read_bytes().strip(b"\0")
    path.write_bytes(bytes(2 << 20) + b"x")  # such as a disk's image
    assert (
        run(source, "--restart", flag, path)[0] == 2 and path.read_bytes()[-1:] == b"x"
    )


def test_an_output_that_came_while_a_run_answered_is_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = source.with_name("output_r.jsonl")
    real = journaled_input.require_own_file

    def require_own(path: Path, *about: Any) -> None:
        output.write_text(LINE)
        real(path, *about)

    with monkeypatch.context() as patch:
        patch.setattr(journaled_input, "require_own_file", require_own)
        status, told = run(source)
    assert status == 2 and f"{output} exists and is no file of a run's answers" in told
    assert output.read_text() == LINE
    output.unlink()
    status, told = run(source)
    assert status == 3 and "kept" in told, "the rows were in the journal"


def test_a_rerun_replaces_what_a_run_wrote(source: Path) -> None:
    """Its own summary, timeline, page, answers, errors and status; and a file that is empty."""
    files = [source.with_name(name) for name in ("s.json", "t.json", "p.html")]
    files[0].touch()
    words = [
        source,
        "--stats",
        files[0],
        "--trace",
        files[1],
        "--report",
        files[2],
        "--restart",
    ]
    for _ in range(2):
        status, told = run(*words)
        assert status == 3, told
    assert json.loads(files[0].read_text())["num_rows"] == 1
    assert json.loads(files[1].read_text())


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999", "[" * 1023 + "]" * 1023])
@pytest.mark.parametrize("prompt", ['"a"', '"\\ud800"', "5"])
def test_a_rerun_replaces_answers_that_few_parsers_read(
    source: Path, value: str, prompt: str
) -> None:
    """Once all of its lines were answered, a run took its own output for another's."""
    first = f'{{"prompt":{prompt},"max_tokens":1,"note":{value}}}\n'
    for lines in (first, first, first + LINE):
        source.write_text(lines)
        status, told = run(source)
        assert status == 3 * (prompt != '"a"'), told
    if not value.startswith("["):
        written = [*source.parent.glob("output_r.*jsonl")]
        assert all(
            map(holds_answers, [path for path in written if path.stat().st_size])
        )


def test_a_summary_may_go_to_a_device(source: Path) -> None:
    assert run(source, "--stats", "/dev/null")[0] == 3


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize("which", ["output", "errors", "status"])
def test_what_stands_where_a_run_would_write_is_kept(
    source: Path, which: str, restart: list[str]
) -> None:
    """A user's own m.errors.jsonl was deleted, and n.status.json overwritten, without a word.

    --restart, which the message recommended, replaced a model's config.json by answers.
    """
    output = source.with_name("m.jsonl")
    places = {
        "output": output,
        "errors": errors_path(output),
        "status": status_path(output),
    }
    places[which].write_text('{"hello": "world"}\n')
    status, told = run(source, "--output", output, *restart)
    label = (
        "status file of this run"
        if which == "status"
        else f"file of this run's {which}"
    )
    assert status == 2 and f"the {label}, {places[which]} exists and is no " in told
    assert "--restart" not in told
    assert places[which].read_text() == '{"hello": "world"}\n'
    assert sorted(path.name for path in source.parent.iterdir()) == sorted(
        [source.name, places[which].name]
    )


def test_an_errors_file_that_came_beside_a_complete_output_is_kept(
    source: Path,
) -> None:
    source.write_text(LINE)
    assert run(source)[0] == 0
    errors = source.with_name("output_r.errors.jsonl")
    errors.write_text("hello world\n")
    assert run(source, "--restart")[0] == 2 and errors.read_text() == "hello world\n"


def test_a_picture_of_a_bench_replaces_pictures_only(tmp_path: Path) -> None:
    """`bench --plot` wrote over any file whose name ends in .svg, and that at its end."""
    kept = tmp_path / "kept.svg"
    kept.write_text("hello world\n")
    result = CliRunner().invoke(main, ["bench", "--plot", str(kept)])
    assert (
        result.exit_code == 2
        and f"{kept} exists and is no SVG picture" in result.output
    )


def test_moved_errors_are_known_by_all_their_fields(tmp_path: Path) -> None:
    """A line of a user's own that has some of them may be a request."""
    record: dict[str, Any] = {
        "line": 1,
        "custom_id": None,
        "error": {},
        "retryable": False,
        "request": {},
    }
    for left_out in (None, *record):
        path = tmp_path / f"{left_out}.jsonl"
        path.write_text(
            json.dumps({name: record[name] for name in record if name != left_out})
        )
        assert holds_answers(path) is (left_out is None), left_out
