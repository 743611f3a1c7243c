"""Odd names of files: none ends the run of a folder, and every name that is made can be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.claims import Claims
from fminfer.files.input_folders import describe_left_out, find_inputs
from fminfer.files.output_paths import make_output_paths
from fminfer.files.storage import RemoteFolders
from fminfer.job.overview import find_overviews
from tests.shards.answer_shards import answer_all, share

LINE = '{"prompt": "x", "max_tokens": 1, "temperature": 0}\n'
LONG = "x" * 240
LONGEST = "é" * 124  # 248 bytes


def answer_folder(folder: Path) -> None:
    files = share(folder)
    for file in files.iterate_files():
        if file is not None:
            answer_all(file)
    assert not files.refused


def make_odd(folder: Path) -> list[Path]:
    paths = [
        folder / f"{stem}.jsonl"
        for stem in (LONG, LONG + "y" * 9, LONGEST, "new\nline")
    ]
    try:
        (folder / os.fsdecode(b"caf\xe9.jsonl")).touch()
        paths.append(folder / os.fsdecode(b"caf\xe9.jsonl"))
    except OSError:  # this file system has names of Unicode only
        pass
    for path in paths:
        path.write_text(LINE * 2)
    return paths


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("~/answers.jsonl", "the shell expands ~ only where a word begins"),
        ("/proc/answers.jsonl", "is no regular file"),
    ],
)
def test_an_output_that_cannot_be_there_is_refused_at_once(
    tmp_path: Path, output: str, says: str
) -> None:
    """A folder "~" was to be made; of /proc it was said, after 5 s, that it had been moved."""
    (tmp_path / "a.jsonl").write_text(LINE)
    with pytest.raises(UsageError, match=says):
        make_output_paths([tmp_path / "a.jsonl"], Path(output))


def test_odd_names_are_answered_as_others(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 ended the run in the status file, long names in the claim."""
    paths = make_odd(tmp_path)
    answer_folder(tmp_path)
    (overview,) = find_overviews(tmp_path)
    assert [file.state for file in overview.files] == ["done"] * len(paths)
    assert {file.input for file in overview.files} == set(map(str, paths))
    outputs = [Path(file.output) for file in overview.files]
    assert {path.read_text().count("\n") for path in outputs} == {2}
    assert len(os.listdir(tmp_path)) == 3 * len(paths), (
        "input, answers and status of each"
    )
    assert not share(tmp_path).scan(), "all of them are complete"


def test_a_long_name_goes_on_after_a_kill_and_shows_in_another_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / f"{LONG}.jsonl").write_text(LINE * 2)
    (file,) = filter(None, [next(share(tmp_path, tmp_path / "out").iterate_files())])
    lines = file.read_lines(lambda line: None)
    answer_all(file, [next(lines)])
    file.abandon(KeyboardInterrupt())
    (overview,) = find_overviews(tmp_path / "out")
    assert [(state.state, state.num_answered) for state in overview.files] == [
        ("stopped", 1)
    ]
    again = share(tmp_path, tmp_path / "out")
    for file in filter(None, again.iterate_files()):
        assert file.kept.num_rows == 1
        answer_all(file)
    (overview,) = find_overviews(tmp_path / "out")
    (state,) = overview.files
    assert state.state == "done" and Path(state.output).read_text().count("\n") == 2


def test_the_command_takes_names_that_are_no_utf_8(tmp_path: Path) -> None:
    paths = make_odd(tmp_path)
    found = CliRunner().invoke(main, ["run", str(tmp_path), "--kernels", "off"])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert (
        found.exit_code == 0
        and f"{len(paths)} of {len(paths)} files done" in found.output
    )
    found = CliRunner().invoke(main, ["status", "--json", str(tmp_path)])
    files = json.loads(found.output)["files"]
    assert {file["input"] for file in files} == set(map(str, paths))
    status = next(tmp_path.glob("output_caf*.status.json"), None)
    if status is not None:
        found = CliRunner().invoke(
            main,
            ["status", str(tmp_path / json.loads(status.read_text())["input_file_id"])],
        )
        assert found.exit_code == 0 and "1 of 1 file done" in found.output


def test_a_link_to_a_file_of_the_same_folder_is_left_out(tmp_path: Path) -> None:
    """It was "given twice", and the folder was refused. Later it was passed over
    without a word."""
    (tmp_path / "b.jsonl").write_text(LINE)
    link = tmp_path / "a.jsonl"
    link.symlink_to("b.jsonl")
    assert [path.name for path in find_inputs([tmp_path])] == ["b.jsonl"]
    (told,) = describe_left_out([tmp_path])
    assert told.startswith(f"{link}: a link to a file of the folder")
    assert find_inputs([tmp_path, link])[1] == link, "as the advice says"
    (overview,) = find_overviews(tmp_path)
    assert [*overview.left_out] == [str(link)] and len(overview.files) == 1
    assert (
        f"left out: {link}: "
        in CliRunner().invoke(main, ["status", str(tmp_path)]).output
    )


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_links_to_one_file_elsewhere_are_inputs_of_their_own(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """The first was answered, three were passed over, and `status` told of none of them."""
    (tmp_path / "one.jsonl").write_text(LINE)
    folder = tmp_path / "links"
    folder.mkdir()
    for name in "abcd":
        make(folder / f"{name}.jsonl", tmp_path / "one.jsonl")
    inputs = find_inputs([folder])
    assert [path.stem for path in inputs] == [*"abcd"] and find_inputs(inputs) == inputs
    plan = make_output_paths(inputs, None)
    assert len(set(plan.outputs)) == 4 and not plan.refused
    (overview,) = find_overviews(folder)
    assert [file.input for file in overview.files] == [*map(str, inputs)]
    with pytest.raises(UsageError, match="is given twice"):
        find_inputs([folder, folder / "." / "a.jsonl"])


def test_a_file_that_cannot_be_read_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(LINE)
    opened = Path.open

    def refuse(path: Path, *arguments: str, **options: object) -> object:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    files = share(tmp_path)
    assert files.scan()
    for file in filter(None, files.iterate_files()):
        answer_all(file)
    assert (tmp_path / "output_b.jsonl").exists()
    assert "a.jsonl cannot be read: Permission denied" in "".join(
        files.refused.values()
    )


def test_a_claim_whose_folder_empties_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps claims young ended with an IndexError, and all claims went stale."""
    claim = Claims().acquire(tmp_path / "out.jsonl")
    assert claim is not None
    monkeypatch.setattr("fminfer.files.claims.os.listdir", lambda path: [])
    claim.beat()
    assert not claim.is_held()
    monkeypatch.setattr(
        "fminfer.files.claims.os.listdir", lambda path: ["²", claim.path.name]
    )
    claim = Claims().acquire(tmp_path / "other.jsonl")
    assert claim is not None and claim.is_held()


def test_copies_of_long_names_from_urls(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{LONG}.jsonl").write_text(LINE)
    folders = RemoteFolders(tmp_path / "work", is_quiet=True)
    (local,) = folders.fetch_inputs(f"file://{tmp_path}/in/{LONG}.jsonl")
    assert local.read_text() == LINE
