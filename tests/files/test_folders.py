"""What stands in folders: requests, what runs wrote, and files that are neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.input_folders import find_inputs, sort_folder
from fminfer.files.output_paths import make_output_paths
from fminfer.files.status_file import status_path
from fminfer.files.storage import RemoteFolders
from fminfer.job.overview import UNLIKE, find_overviews
from fminfer.job.run_paths import JobPaths
from fminfer.split.merging import merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.shards.answer_shards import answer_all, share

LINE = '{"prompt": "x", "max_tokens": 1, "temperature": 0}\n'
BATCH = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": '
    '{"prompt": "x"}}\n'
)
LOOP = Path(__file__).parent.parent.parent / "examples" / "run_shards.sh"


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def answer_folder(folder: Path) -> None:
    for file in filter(None, share(folder).iterate_files()):
        answer_all(file)


def run(*arguments: object) -> tuple[int, str]:
    flags = ["--model-name", "demo", "--kernels", "off"]
    found = CliRunner().invoke(main, ["run", *flags, *map(str, arguments)])
    return found.exit_code, found.output


def split(folder: Path, *engines: str | None, is_flat: bool = False) -> Path:
    rows = [
        {"prompt": str(i), "max_tokens": 1, "temperature": 0}
        for i in range(len(engines))
    ]
    source = folder / "all.jsonl"
    lines = [
        json.dumps(row | ({"engine": engine} if engine else {}))
        for row, engine in zip(rows, engines, strict=True)
    ]
    source.write_text("\n".join(lines))
    split_file(source, folder / "parts", SplitOptions(100, 100, is_flat))
    return folder / "parts"


def test_a_run_over_a_folder_ends_with_its_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at the folder every two seconds, and idled until the next look."""
    monkeypatch.setattr("fminfer.job.shared_folder.SCAN_EVERY_S", 1e9)
    (tmp_path / "a.jsonl").write_text(LINE)
    files = share(tmp_path)
    assert files.scan()
    turns: Iterator[object] = files.iterate_files()
    file = files.files[0] if next(turns) is not None else None
    assert file is not None
    lines = list(file.read_lines(lambda line: None))
    assert next(turns) is None, "its rows run"
    answer_all(file, lines)
    assert next(turns, "the end") == "the end" and files.is_finished


def test_merged_and_moved_answers_are_no_input(tmp_path: Path) -> None:
    """`merge --output parts/answers.jsonl` made a file that the next run answered."""
    parts = split(tmp_path, "gpt-j", "gpt-j", None)
    for folder in (parts / "gpt-j", parts / "default"):
        answer_folder(folder)
    merge_parts(parts, parts / "gpt-j" / "answers.jsonl")
    (parts / "gpt-j" / "output_request_0.jsonl").rename(parts / "gpt-j" / "moved.jsonl")
    status_path(parts / "gpt-j" / "output_request_0.jsonl").unlink()
    assert names(find_inputs([parts / "gpt-j"])) == [
        "request_0.jsonl",
        "request_1.jsonl",
    ]
    (answers,) = sort_folder(parts / "gpt-j").left_out.values()
    assert names(answers) == ["answers.jsonl", "moved.jsonl"]
    overviews = find_overviews(parts)
    assert [len(overview.files) for overview in overviews] == [1, 2]
    assert "moved.jsonl: answers of a run" in run(parts / "gpt-j")[1]
    (tmp_path / "only").mkdir()
    (parts / "gpt-j" / "answers.jsonl").rename(tmp_path / "only" / "answers.jsonl")
    with pytest.raises(
        UsageError, match=r"holds no file to answer .*answers\.jsonl: answers of a"
    ):
        find_inputs([tmp_path / "only"])


def test_answers_of_every_shape_are_known(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(BATCH + BATCH)  # a custom_id twice: an error
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    assert run(tmp_path)[0] == 3
    for number, name in enumerate(["output_in.jsonl", "output_in.errors.jsonl"]):
        (tmp_path / name).rename(tmp_path / f"kept_{number}.jsonl")
    (tmp_path / "output_bad.errors.jsonl").rename(tmp_path / "kept_2.jsonl")
    assert names(find_inputs([tmp_path])) == ["bad.jsonl", "in.jsonl"]
    # An old output whose answers are gone is a file of requests again.
    (tmp_path / "old.jsonl").write_text(
        '{"request": {"prompt": "x"}, "result": null}\n'
    )
    assert "old.jsonl" in names(find_inputs([tmp_path]))


def test_a_pair_that_would_share_an_output_costs_itself(tmp_path: Path) -> None:
    """The whole folder was refused, by `status` even."""
    for name in ("a.jsonl", "q.jsonl", "q.json", "z.jsonl"):
        (tmp_path / name).write_text(LINE)
    status, told = run(tmp_path)
    assert status == 2 and (tmp_path / "output_a.jsonl").exists()
    assert (tmp_path / "output_z.jsonl").exists() and not (
        tmp_path / "output_q.jsonl"
    ).exists()
    for name, other in (("q.jsonl", "q.json"), ("q.json", "q.jsonl")):
        assert f"the answers to {tmp_path / name} would be written to" in told
        assert f"also belongs to the answers to {tmp_path / other}; rename one" in told
    (overview,) = find_overviews(tmp_path)
    assert [(Path(file.output).name, file.state) for file in overview.files] == [
        ("output_a.jsonl", "done"),
        ("output_q.jsonl", "waiting"),
        ("output_z.jsonl", "done"),
    ]
    found = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert (
        "q.json: the answers to" in found.output
        and "rename one of the two" in found.output
    )
    status, told = run(tmp_path, "--stats", tmp_path / "q.json")
    assert (
        status == 2
        and "is the input" in told
        and (tmp_path / "q.json").read_text() == LINE
    )
    (tmp_path / "q.json").unlink()
    assert not make_output_paths(find_inputs([tmp_path]), None).refused, (
        "the trouble is over"
    )


def test_a_link_to_a_lost_file_costs_itself(tmp_path: Path) -> None:
    """A run over a folder passed it over without a word, and ended with 0: a shard was lost."""
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "lost.jsonl").symlink_to("gone/b.jsonl")
    status, told = run(tmp_path)
    assert status == 2 and (tmp_path / "output_a.jsonl").exists()
    reason = (
        f"{tmp_path / 'lost.jsonl'} is a link to gone/b.jsonl, which cannot be reached"
    )
    assert (
        f"Left out: {reason}" in told
        and f"refused   {tmp_path / 'lost.jsonl'}: " in told
    )
    status, told = run(tmp_path, "-q")
    assert status == 2 and f"Left out: {reason}" in told, "-q ended with 2 and no word"
    (overview,) = find_overviews(tmp_path)
    assert [file.state for file in overview.files] == ["done", "waiting"]
    assert overview.files[1].why == f"{reason}; mend the link, or remove it"
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "b.jsonl").write_text(LINE)
    assert run(tmp_path)[0] == 0, "the trouble is over"


def test_a_lost_part_of_a_split_is_named(tmp_path: Path) -> None:
    parts = split(tmp_path, "gpt-j", "gpt-j")
    lost = parts / "gpt-j" / "request_1.jsonl"
    lost.unlink()
    lost.symlink_to("gone.jsonl")
    status, told = run(parts, "--limit", 1)
    assert status == 2 and f"Left out: {lost} is a link to gone.jsonl" in told


def test_a_watched_folder_may_hold_a_lost_link_only(tmp_path: Path) -> None:
    """Its file may be mounted later."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").symlink_to("../b.jsonl")
    remote = RemoteFolders(tmp_path, is_quiet=True)
    job = JobPaths(
        paths=[tmp_path / "in"], is_quiet=True, remote=remote, is_watching=True
    )
    assert [*job.find_output_paths().refused] == [tmp_path / "in" / "a.jsonl"]
    (tmp_path / "b.jsonl").write_text(LINE)
    assert not job.find_output_paths().refused and names(
        job.find_output_paths().inputs
    ) == ["a.jsonl"]


def test_what_a_folder_holds_beside_files_to_answer_is_named_few_at_a_time(
    tmp_path: Path,
) -> None:
    """Names in capitals and pipes were left out in silence."""
    for number in range(7):
        (tmp_path / f"{number}.JSONL").write_text(LINE)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl.gz").mkdir()
    (tmp_path / "output_a.JSONL").write_text(LINE)
    with pytest.raises(
        UsageError, match=r"holds no file to answer .*an ending in capitals"
    ):
        find_inputs([tmp_path])
    (tmp_path / "a.jsonl").write_text(LINE)
    capitals, others = sort_folder(tmp_path).left_out.values()
    assert names(others) == ["folder.jsonl.gz", "pipe.jsonl"]
    status, told = run(tmp_path)
    assert status == 0
    shown = ", ".join(str(path) for path in capitals[:5])
    assert f"Left out: {shown}, … (7 in all): an ending in capitals; rename" in told
    assert f"Left out: {others[0]}, {others[1]}: a pipe, a device or a folder" in told
    for command in (
        ["check"],
        ["submit", "--scheduler", "slurm", "--dry-run", "--infer-data"],
    ):
        found = CliRunner().invoke(main, [*command, str(tmp_path)])
        assert (
            found.exit_code == 0 and f"Left out: {shown}, … (7 in all)" in found.stderr
        )


def test_a_warning_of_a_line_names_its_file_if_there_are_several(
    tmp_path: Path,
) -> None:
    """A run over eleven files warned of line 1, and did not say of which."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(
            LINE if name == "a.jsonl" else '{"prompt": "x", "colour": 1}\n'
        )
    assert (
        f"Warning: line 1 of {tmp_path / 'b.jsonl'}: " in run(tmp_path, "--limit", 1)[1]
    )
    for file in tmp_path.glob("output_*"):
        file.unlink()
    assert "Warning: line 1: " in run(tmp_path / "b.jsonl", "--limit", 1)[1]


def test_status_counts_what_a_run_over_the_folder_answers(tmp_path: Path) -> None:
    """It left out a file without a right line, also a part of a split."""
    (tmp_path / "a.jsonl").write_text("not json\n" + LINE)
    (tmp_path / "broken.json.gz").write_text("no gzip")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.json").write_text('{"name": "x", "version": 3}\n')
    (tmp_path / "typo.jsonl").write_text('{"prompt": "one brace is missing"\n')
    for number, text in enumerate(
        ('{"fminfer": 5}', '{"request_counts": 7}', '{"status": {}}')
    ):
        (tmp_path / f"another_{number}.status.json").write_text(text)
    (overview,) = find_overviews(tmp_path)
    inputs = [Path(file.input or "") for file in overview.files]
    assert inputs == find_inputs([tmp_path]) and len(inputs) == 5
    assert [file.why for file in overview.files] == [None, *[UNLIKE] * 4]
    assert (
        "typo.jsonl: none of its"
        in CliRunner().invoke(main, ["status", str(tmp_path)]).output
    )
    source = tmp_path / "a.jsonl"
    source.write_text('not json\n{"prompt": "x", "engine": "gpt-j"}\n')
    split_file(source, tmp_path / "parts", SplitOptions(100, 1))
    overviews = find_overviews(tmp_path / "parts")
    assert [len(overview.files) for overview in overviews] == [1, 1], (
        "default/ and gpt-j/"
    )


def test_status_leaves_out_folders_of_notes_below(tmp_path: Path) -> None:
    """`status .` counted every .json and .jsonl file as an input that waits."""
    for folder, text in (
        ("data", '{"text": "x", "label": 1}\n'),
        ("chats", '{"messages": []}\n'),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(text)
        (tmp_path / folder / "notes.json").write_text('{"name": "x", "version": 3}\n')
    (overview,) = find_overviews(tmp_path)
    assert overview.path == str(tmp_path / "chats") and len(overview.files) == 2
    shutil.rmtree(tmp_path / "chats")
    with pytest.raises(UsageError, match="neither requests"):
        find_overviews(tmp_path)


def test_a_split_folder_gives_the_parts_of_its_engine(tmp_path: Path) -> None:
    """`run parts` said that it held no file; parts of facebook/opt-66b lie two levels below."""
    parts = split(tmp_path, "facebook/opt-66b", "facebook/opt-66b")
    assert [path.relative_to(parts).as_posix() for path in find_inputs([parts])] == [
        "facebook/opt-66b/request_0.jsonl",
        "facebook/opt-66b/request_1.jsonl",
    ]
    answer_folder(parts)
    merge_parts(parts, parts / "answers.jsonl")
    assert (parts / "answers.jsonl").read_text().count("\n") == 2
    assert len(find_inputs([parts])) == 2
    # A split that was killed leaves its own folder; `jobs` is made by fminfer submit.
    for name in (".split/gpt-j/request_0.jsonl", "jobs/notes.jsonl"):
        (parts / name).parent.mkdir(parents=True)
        (parts / name).write_text(LINE)
    assert len(find_inputs([parts])) == 2
    assert [len(overview.files) for overview in find_overviews(parts)] == [2, 1]
    manifest = (parts / "manifest.json").read_text()
    (parts / "manifest.json").write_text(manifest.replace(":true", ":false", 1))
    with pytest.raises(UsageError, match="was not finished"):
        find_inputs([parts])
    for text in ('{"name": "of another tool"}', None):
        (parts / "manifest.json").unlink()
        if text is not None:
            (parts / "manifest.json").write_text(text)
        with pytest.raises(UsageError, match="holds no file"):
            find_inputs([parts])


def test_a_split_folder_of_several_engines_names_them(tmp_path: Path) -> None:
    parts = split(tmp_path, "facebook/opt-66b", "gpt-j", "gpt-j")
    with pytest.raises(
        UsageError, match=r"the parts of 2 engines\. Answer each"
    ) as found:
        find_inputs([parts])
    assert f"{parts}/facebook/opt-66b (1 file)" in str(found.value)
    assert str(found.value).endswith(f"{parts}/gpt-j (2 files)")


def test_a_split_folder_whose_parts_are_gone_holds_no_file(tmp_path: Path) -> None:
    parts = split(tmp_path, "gpt-j")
    shutil.rmtree(parts / "gpt-j")
    with pytest.raises(UsageError, match="holds no file to answer"):
        find_inputs([parts])


def test_a_flat_split_is_answered_and_merged(tmp_path: Path) -> None:
    parts = split(tmp_path, "gpt-j", None, "gpt-j", is_flat=True)
    assert names(find_inputs([parts])) == [f"request_{i}.jsonl" for i in range(3)]
    answer_folder(parts)
    merge_parts(parts, tmp_path / "answers.jsonl")
    texts = [
        json.loads(line)["request"]["prompt"]
        for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    ]
    assert texts == ["0", "1", "2"]
    with pytest.raises(
        UsageError, match=r"names 2 engines.*--flat would mix: gpt-j, opt"
    ):
        split(tmp_path / "parts", "gpt-j", "opt", is_flat=True)


def loop(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the loop over a folder with a `python` that does nothing."""
    path = folder.parent / "bin"
    path.mkdir(exist_ok=True)
    (path / "python").write_text("#!/bin/sh\nexit 0\n")
    (path / "python").chmod(0o755)
    return subprocess.run(
        [LOOP, folder],
        env=os.environ | environment | {"PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_loop_of_shards_says_what_it_does_not_answer(tmp_path: Path) -> None:
    """It ended with 0 where its folder held no shard, and passed those above its last
    id over."""
    parts = split(tmp_path, "facebook/opt-66b", "gpt-j")
    found = loop(parts)
    assert found.returncode == 2 and "holds no request_<i>.jsonl" in found.stderr
    assert f"{parts}/facebook/opt-66b\n{parts}/gpt-j\n" in found.stderr
    for number in ("2", "10", "011"):
        (parts / "gpt-j" / f"request_{number}.jsonl").write_text(LINE)
    found = loop(parts / "gpt-j", MAX_ID="10")
    assert found.returncode == 0 and "give MAX_ID=11" in found.stderr
    assert "request_2.jsonl" in found.stdout and "request_10.jsonl" not in found.stdout
    assert not loop(parts / "gpt-j", MAX_ID="11").stderr


def test_a_part_is_not_split_into_its_own_folder(tmp_path: Path) -> None:
    """The other parts were removed, and their requests lost."""
    parts = split(tmp_path, "gpt-j", "gpt-j")
    with pytest.raises(UsageError, match=r"is a part in .* would remove"):
        split_file(parts / "gpt-j" / "request_1.jsonl", parts, SplitOptions(100, 100))
    assert len(find_inputs([parts])) == 2


@pytest.mark.parametrize("flag", ["--stats", "--trace"])
@pytest.mark.parametrize("name", ["a.jsonl", "output_a.jsonl", "output_a.status.json"])
def test_statistics_are_not_written_over_the_files_of_the_run(
    tmp_path: Path, flag: str, name: str
) -> None:
    """`--stats requests.jsonl` put the statistics in the input's place."""
    (tmp_path / "a.jsonl").write_text(LINE)
    status, told = run(tmp_path / "a.jsonl", flag, tmp_path / name)
    assert (
        status == 2
        and f"{flag} {tmp_path / name}" in told
        and "give another name" in told
    )
    assert (tmp_path / "a.jsonl").read_text() == LINE
