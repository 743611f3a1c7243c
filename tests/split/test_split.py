"""`fminfer split`: which lines go together, where they go, and what is never lost."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fminfer.cli.app import main
from fminfer.contract.envelope import Line
from fminfer.contract.field_table import LINE_FIELDS
from fminfer.contract.request import RequestParams
from fminfer.core.errors import DamagedInputError, FminferError, OutputError, UsageError
from fminfer.files.claims import remove_all_claims
from fminfer.files.input_folders import find_inputs
from fminfer.files.line_reader import read_lines
from fminfer.files.split_folders import find_num_equal
from fminfer.files.streams import digest_file, find_zstd
from fminfer.split import splitting as split_parts
from fminfer.split.grouping import estimate_length, find_hyperparameters
from fminfer.split.manifest import (
    MANIFEST,
    MAX_BYTES,
    is_folder_name,
    make_folder_name,
    read_manifest,
    read_part_paths,
)
from fminfer.split.splitting import STAGING, SplitOptions, SplitSummary, split_file
from tests.conftest import num_examples
from tests.split_lines import make_lines

ODD_NAMES = st.text(
    st.one_of(st.sampled_from("a./%-_ \\\0é漢.json~"), st.characters()), max_size=60
)

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "split_queries.py"
zstd = find_zstd()
assert zstd is not None, "the tests need fminfer[zst]"


def split(
    source: Path,
    folder: Path,
    least: int = 100,
    chunk: int = 100_000,
    *,
    is_flat: bool = False,
) -> SplitSummary:
    return split_file(source, folder, SplitOptions(least, chunk, is_flat))


def write(folder: Path, *requests: dict[str, Any], name: str = "all.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def parts_of(folder: Path) -> dict[str, list[bytes]]:
    """Return each request file's lines, without their newlines."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().split(b"\n")[:-1]
        for path in sorted(folder.rglob("request_*.jsonl"))
    }


def prompts_of(folder: Path) -> dict[str, list[Any]]:
    return {
        name: [json.loads(line)["prompt"] for line in lines]
        for name, lines in parts_of(folder).items()
    }


def test_a_file_that_becomes_shorter_is_told(tmp_path: Path) -> None:
    index = split_parts.LineIndex(tmp_path / "in.jsonl")
    index.path.write_bytes(b"{}\n{")
    index.starts.extend([0, 3, 6])
    message = "in.jsonl became shorter while it was being split"
    with index.path.open("rb") as file, pytest.raises(FminferError, match=message):
        split_parts._copy_lines(index, [0, 1], file.fileno(), tmp_path / "part")


# --- which lines go together


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 1, "n": 2}, {"n": 2.0, "temperature": 1.0}),
        ({"stop": "b"}, {"stop": ["b"]}),
        ({"stop": ["b", "a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": []}, {}),
        ({"top_p": None}, {}),
        ({"echo": 0}, {"echo": False}),
        ({"logit_bias": {"5": 1, "6": 2}}, {"logit_bias": {"6": 2.0, "5": 1.0}}),
        ({"user": "a", "custom_id": "x", "prompt": "p"}, {"user": "b", "model": "m"}),
    ],
)
def test_equal_hyperparameters(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert json.dumps(find_hyperparameters(one)) == json.dumps(
        find_hyperparameters(other)
    )


# A constraint is made of several fields, which are of lines.
OF_PARTS = {each.name for each in fields(RequestParams)} - LINE_FIELDS - {"constraint"}


@pytest.mark.parametrize("name", sorted(OF_PARTS))
def test_every_sampling_field_counts(name: str, tmp_path: Path) -> None:
    source = write(
        tmp_path, {"prompt": "a", name: 0}, {"prompt": "b", name: 5}, {"prompt": "c"}
    )
    assert len(split(source, tmp_path / "parts").manifest.parts) == 3


@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("漢字", 2),
        ([1, 2, 3], 12),
        (["ab", "c"], 3),
        ([[1, 2], [3]], 12),
        (None, 0),
        (5, 0),
        ({}, 0),
        ([], 0),
        ([[[["deep"]]]], 4),
        ([None, True], 8),
    ],
)
def test_lengths(prompt: object, length: int) -> None:
    assert estimate_length({"prompt": prompt}) == length


def test_custom_ids_that_come_again_are_named(tmp_path: Path) -> None:
    """A run over the whole file refuses such a line; its parts were answered without a word."""
    ids = ["a", "b", "a", "\\u0062", *"ccccc", "\\ud800", "c"]
    rest = '"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": '
    lines = [
        f'{{"custom_id": "{name}", {rest}{number}}}}}'
        for number, name in enumerate(ids)
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    summary = split(tmp_path / "all.jsonl", tmp_path / "parts")
    assert summary.manifest.num_lines == 11
    assert (
        'come again: "a" of line 3, "b" of line 4, "c" of line 6, ' in summary.to_text()
    )
    assert '"c" of line 8, … (2 more). A run over' in summary.to_text()
    (tmp_path / "all.jsonl").write_text("\n".join(lines[:2]))
    assert (
        "come again" not in split(tmp_path / "all.jsonl", tmp_path / "parts").to_text()
    )


def test_the_order_of_parts_and_lines(tmp_path: Path) -> None:
    """Groups as first seen, long prompts first, equal lengths as they came, N from 0 an
    engine."""
    cold = {"temperature": 0, "max_tokens": 40_000}
    hot = {"temperature": 1}
    source = write(
        tmp_path,
        {"engine": "x", "prompt": "aa", **cold},
        {"model": "y", "prompt": "only", **cold},
        {"engine": "x", "prompt": "hot", **hot},
        {"engine": "x", "prompt": "bbb", **cold},
        {"engine": "x", "model": "y", "prompt": "cc", **cold},
        {"prompt": "nobody's"},
    )
    summary = split(source, tmp_path / "parts")
    assert prompts_of(tmp_path / "parts") == {
        "default/request_0.jsonl": ["nobody's"],
        "x/request_0.jsonl": ["bbb", "aa"],
        "x/request_1.jsonl": ["cc"],
        "x/request_2.jsonl": ["hot"],
        "y/request_0.jsonl": ["only"],
    }
    found = {part.path: list(part.lines) for part in summary.manifest.parts}
    assert found["x/request_0.jsonl"] == [4, 1] and found["x/request_1.jsonl"] == [5]


@pytest.mark.parametrize(
    ("max_tokens", "least", "chunk", "num_rows"),
    [
        (10, 100, 1000, 10),
        (200, 100, 1000, 5),
        (5000, 100, 1000, 1),
        (0, 0, 50, 50),
        (300.0, 1, 900, 3),
        (True, 1, 160, 10),
        ("ten", 1, 160, 10),
        (-4, 1, 160, 10),
        (None, 1, 160, 10),
    ],
)
def test_rows_of_a_part(
    max_tokens: object, least: int, chunk: int, num_rows: int, tmp_path: Path
) -> None:
    """The ancestor divided by a number above the chunk, and wrote nothing."""
    request = {"prompt": "a", "max_tokens": max_tokens}
    parts = split(
        write(tmp_path, *[request] * 60), tmp_path / "parts", least, chunk
    ).manifest.parts
    assert len(parts[0].lines) == min(num_rows, 60)
    assert len(parts) == -(-60 // num_rows)


# --- folders


@pytest.mark.parametrize(
    ("engine", "folder"),
    [
        ("gpt-j-6b", "gpt-j-6b"),
        ("org/model", "org/model"),
        ("漢字-é", "漢字-é"),
        (None, "default"),
        ("default", "%64efault"),
        ("..", "%2E."),
        ("/etc", "%empty/etc"),
        ("a//b/", "a/%empty/b/%empty"),
        ("../../x", "%2E./%2E./x"),
        (".split", "%2Esplit"),
        ("-rf", "%2Drf"),
        ("a b;$(rm)", "a%20b%3B%24%28rm%29"),
        ("50%", "50%25"),
        ("a\n\0", "a%0A%00"),
        ("\ud800", "%ED%A0%80"),
        ("manifest.json", "manifest%2Ejson"),
        ("a/output_request_0.jsonl.journal", "a/output_request_0%2Ejsonl.journal"),
    ],
)
def test_folder_names(engine: str | None, folder: str) -> None:
    assert make_folder_name(engine) == folder


@given(ODD_NAMES, ODD_NAMES)
@settings(max_examples=num_examples(300), deadline=None)
def test_folder_names_are_safe_and_differ(one: str, other: str) -> None:
    name = make_folder_name(one)
    assert is_folder_name(name) and len(name.encode()) <= MAX_BYTES
    assert (Path("/d") / name).resolve().is_relative_to("/d") and Path(
        "/d", name
    ) != Path("/d")
    assert os.path.normpath(name) == name, "no component is empty, . or .."
    assert (name == make_folder_name(other)) == (one == other)
    assert name != make_folder_name(None)


def test_long_names_differ_in_their_last_letter() -> None:
    names = {make_folder_name("漢" * 200 + letter) for letter in "abc"} | {
        make_folder_name("漢" * 200)
    }
    assert len(names) == 4 and all(is_folder_name(name) for name in names)


# --- lines


def test_lines_stay_as_they_are(tmp_path: Path) -> None:
    r"""The BOM goes; blank lines are left out; \r, spaces, bad UTF-8 and bad JSON stay."""
    lines = [
        b'{"prompt": "one"}\r',
        b"",
        b'  {"prompt":\t"two", "top_p": 1.00}  ',
        b" \t\r",
        b'{"prompt": "no end"',
        b"\xff\xfe",
        b"[1, 2]",
        b'{"max_tokens": 5}',
        b'{"prompt": "\\ud800", "engine": "\\ud800"}',
        b'{"prompt": "x", "a": ' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"prompt": "x", "a": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b', "top_p": 1e999}',
        b'{"prompt": "last, without a newline"}',
    ]
    source = tmp_path / "all.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    manifest = split(source, tmp_path / "parts").manifest
    found = parts_of(tmp_path / "parts")
    by_number = {
        number: raw
        for part in manifest.parts
        for number, raw in zip(part.lines, found[part.path], strict=True)
    }
    assert by_number == {i: line for i, line in enumerate(lines, 1) if line.strip()}
    assert read_manifest(tmp_path / "parts") == manifest


def test_shapes_are_told_apart(tmp_path: Path) -> None:
    request = {"prompt": "a", "max_tokens": 3, "model": "m"}
    source = write(
        tmp_path,
        request,
        {"request": request, "scenario": "s"},
        {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": request},
        {"custom_id": "2", "method": "GET", "url": "/v1/completions", "body": request},
    )
    parts = split(source, tmp_path / "parts").manifest.parts
    assert [(part.path, list(part.lines)) for part in parts] == [
        ("m/request_0.jsonl", [1, 2, 3]),
        ("default/request_0.jsonl", [4]),
    ]


def test_equal_lines_are_known_whatever_their_fields_hold(tmp_path: Path) -> None:
    """Half a surrogate pair in a field hid them from the run: its lines drew alike."""
    source = tmp_path / "all.jsonl"
    source.write_text('{"prompt": "a", "note": "\\ud800", "max_tokens": 100}\n' * 3)
    split(source, tmp_path / "parts", chunk=200)
    found = [
        find_num_equal(tmp_path / "parts" / name)
        for name in parts_of(tmp_path / "parts")
    ]
    assert [list(each or ()) for each in found] == [[0, 1], [2]]


def gz(data: bytes) -> bytes:
    return gzip.compress(data)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gz), ("a.jsonl.zst", zstd.compress)],
)
def test_packed_files_give_the_same_parts(
    name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = b"\n".join(make_lines(120, random.Random(3)))
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / name).write_bytes(pack(data))
    split(tmp_path / "plain.jsonl", tmp_path / "one", chunk=700)
    manifest = split(tmp_path / name, tmp_path / "two", chunk=700).manifest
    assert parts_of(tmp_path / "one") == parts_of(tmp_path / "two")
    assert manifest.digest == digest_file(tmp_path / name)
    assert not (tmp_path / "two" / STAGING).exists()


def test_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b'{"prompt": "a"}', b"", b'{"prompt": "bb"}\r']
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines))))
    manifest = split(Path("-"), tmp_path / "parts").manifest
    assert parts_of(tmp_path / "parts") == {
        "default/request_0.jsonl": [lines[2], lines[0]]
    }
    assert list(manifest.parts[0].lines) == [3, 1]
    assert manifest.source == "-" and manifest.digest.startswith("34 bytes"), (
        "of the copy"
    )


def test_a_json_array_becomes_lines(tmp_path: Path) -> None:
    source = tmp_path / "all.json"
    source.write_bytes(
        b'[{"prompt":\n  "a\\n"},\n {"prompt": "b", "n": 1\n2}, {"prompt": "cc"}]'
    )
    split(source, tmp_path / "parts")
    lines = [line for lines in parts_of(tmp_path / "parts").values() for line in lines]
    # What is no JSON must not become a request with n = 12.
    assert sorted(lines) == sorted(
        [b'{"prompt":"a\\n"}', b'{"prompt": "b", "n": 1 2}', b' {"prompt": "cc"}']
    )


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json"])
def test_a_file_that_breaks_off_is_not_split(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    data = b"[" + b",".join(b'{"prompt": "%d"}' % i for i in range(9000))
    source.write_bytes(data if name == "a.json" else gzip.compress(data)[:-500])
    with pytest.raises(DamagedInputError, match="breaks off at line"):
        split(source, tmp_path / "parts")
    assert (
        parts_of(tmp_path / "parts") == {}
        and not (tmp_path / "parts" / MANIFEST).exists()
    )


def test_a_file_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    read = split_parts.build_index

    def read_and_change(*arguments: Any) -> Any:
        index = read(*arguments)
        write(tmp_path, {"prompt": "another"}, {"prompt": "b"})
        return index

    monkeypatch.setattr(split_parts, "build_index", read_and_change)
    with pytest.raises(FminferError, match="changed while it was being split"):
        split(source, tmp_path / "parts")
    assert parts_of(tmp_path / "parts") == {}


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_bytes(b"\n \n")
    assert split(tmp_path / "all.jsonl", tmp_path / "parts").manifest.parts == []
    assert read_manifest(tmp_path / "parts").num_lines == 0


# --- a folder that was split into before


def test_stale_parts_are_removed(tmp_path: Path) -> None:
    """The ancestor left files with higher numbers, and they were answered with the new ones."""
    source = write(
        tmp_path, *[{"engine": f"e{i}/x", "prompt": str(i)} for i in range(4)]
    )
    split(source, tmp_path / "parts")
    (tmp_path / "parts" / "e3" / "notes.txt").write_text("mine")
    source = write(tmp_path, {"engine": "e1/x", "prompt": "new"})
    split(source, tmp_path / "parts")
    assert prompts_of(tmp_path / "parts") == {"e1/x/request_0.jsonl": ["new"]}
    left = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert left == ["e1", "e3", MANIFEST], "a folder that holds something else stays"


TRACES = ("", ".journal", ".errors", ".status")


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("part", ["a/request_0", "b/request_0"])
def test_answers_keep_their_requests(trace: str, part: str, tmp_path: Path) -> None:
    """Whether a part would change (a) or go (b), by answers or by what a run has begun."""
    source = write(
        tmp_path, {"engine": "a", "prompt": "1"}, {"engine": "b", "prompt": "2"}
    )
    folder = tmp_path / "parts"
    split(source, folder)
    before = parts_of(folder)
    folder_of, name = part.split("/")
    traces = {
        "": f"output_{name}.jsonl",
        ".journal": f"output_{name}.jsonl.journal",
        ".errors": f"output_{name}.errors.jsonl",
        ".status": f"output_{name}.status.json",
    }
    answers = folder / folder_of / traces[trace]
    answers.write_text("")
    split(source, folder)  # which changes nothing
    source = write(tmp_path, {"engine": "a", "prompt": "other"})
    with pytest.raises(UsageError, match="would change") as error:
        split(source, folder)
    assert str(answers) in str(error.value)
    assert parts_of(folder) == before and read_manifest(folder).num_lines == 2
    assert not (folder / STAGING).exists()


def test_requests_of_nobody_are_not_touched(tmp_path: Path) -> None:
    source = write(tmp_path, {"engine": "a", "prompt": "1"})
    mine = tmp_path / "parts" / "b" / "request_7.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"b/request_7\.jsonl"):
        split(source, tmp_path / "parts")
    assert mine.read_text() == "mine" and list(mine.parent.parent.iterdir()) == [
        mine.parent
    ]


class Killed(BaseException):
    """Stands for the end of the process."""


def test_killed_anywhere_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each change of a name in turn; parts are whole at any moment, and
    repeating mends all.

    Folder and staging are left as a killed process leaves them.
    """
    requests = [{"engine": f"e{i}", "prompt": str(i)} for i in range(3)]
    old = write(tmp_path, *requests, name="old.jsonl")
    requests = [{"engine": f"e{i}", "prompt": f"new {i}"} for i in range(1, 5)]
    new = write(tmp_path, *requests, name="new.jsonl")
    wanted = tmp_path / "wanted"
    split(new, wanted)
    sound = {
        line for path in (old, new) for line in path.read_bytes().split(b"\n") if line
    }
    real_replace = os.replace
    real_unlink = Path.unlink
    left = 0
    kills = 0

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def replace(*names: Any) -> None:
        count()
        real_replace(*names)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        count()
        real_unlink(path, missing_ok=missing_ok)

    for moment in range(30):
        folder = tmp_path / f"parts{moment}"
        split(old, folder)
        left = moment
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(Path, "unlink", unlink)
            patch.setattr(split_parts.shutil, "rmtree", lambda *_, **__: None)
            try:
                split(new, folder)
            except Killed:
                kills += 1
        remove_all_claims(folder / MANIFEST)  # as those of a process that is dead
        shown = parts_of(folder)
        assert all(
            set(shown[name]) <= sound for name in shown if not name.startswith(STAGING)
        )
        split(new, folder)
        assert parts_of(folder) == parts_of(wanted)
        assert read_manifest(folder).parts == read_manifest(wanted).parts
        assert not (folder / STAGING).exists()
    assert 6 < kills < 30, "it was killed at every moment, and then not any more"


def test_an_unfinished_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = split_parts.write_manifest

    def fail_if_complete(*given: Any, **named: Any) -> None:
        if not named:
            raise Killed
        real(*given, **named)

    source = write(tmp_path, {"prompt": "1"})
    monkeypatch.setattr(split_parts, "write_manifest", fail_if_complete)
    with pytest.raises(Killed):
        split(source, tmp_path / "parts")
    assert read_part_paths(tmp_path / "parts") == {"default/request_0.jsonl"}
    with pytest.raises(UsageError, match="was not finished; repeat"):
        read_manifest(tmp_path / "parts")


# --- the command


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "1"})
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="repeat the command"):
        split(source, tmp_path / "file")


def test_the_command_and_its_old_name(tmp_path: Path) -> None:
    source = write(
        tmp_path, {"engine": "a", "prompt": "1"}, {"engine": "a", "prompt": "22"}
    )
    flags = ["--input-file", str(source), "--generate-token-chunk-size", "100"]
    found = CliRunner().invoke(
        main, ["split", *flags, "--output-dir", str(tmp_path / "one")]
    )
    assert found.exit_code == 0, found.output
    assert (
        found.stdout == ""
        and "2 lines" in found.stderr
        and "fminfer merge" in found.stderr
    )
    flags += ["--min-generate-token", "100", "--output-dir", str(tmp_path / "two")]
    environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags],
        capture_output=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert parts_of(tmp_path / "one") == parts_of(tmp_path / "two")
    assert len(parts_of(tmp_path / "one")) == 2


def test_wrong_usage(tmp_path: Path) -> None:
    flags = ["--output-dir", str(tmp_path / "parts"), "--input-file"]
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none.jsonl", "does not exist"),
    ):
        found = CliRunner().invoke(main, ["split", *flags, str(path)])
        assert found.exit_code == 2 and reason in found.stderr


def test_flat_parts_stand_in_the_folder_itself(tmp_path: Path) -> None:
    source = write(tmp_path, {"engine": "a", "prompt": "1"}, {"prompt": "2"})
    expected = {"request_0.jsonl": ["1"], "request_1.jsonl": ["2"]}
    split(source, tmp_path / "parts", is_flat=True)
    assert prompts_of(tmp_path / "parts") == expected
    source = write(
        tmp_path, {"engine": "a", "prompt": "1"}, {"engine": "b", "prompt": "2"}
    )
    message = r"all.jsonl names 2 engines, whose parts --flat would mix: a, b\. Leave out --flat"
    with pytest.raises(UsageError, match=message):
        split(source, tmp_path / "parts", is_flat=True)
    assert prompts_of(tmp_path / "parts") == expected


def test_many_small_parts_are_told(tmp_path: Path) -> None:
    source = write(tmp_path, *[{"prompt": "a", "seed": i, "n": 1} for i in range(150)])
    flags = ["--input-file", str(source), "--output-dir", str(tmp_path / "parts")]
    found = CliRunner().invoke(main, ["split", *flags])
    assert "seed alone has 150 values" in found.stderr
    assert "parts     150 files for 150 sets of hyperparameters, in" in found.stderr


def test_a_run_over_the_whole_folder_does_not_answer_the_manifest(
    tmp_path: Path,
) -> None:
    split(write(tmp_path, {"prompt": "a"}), tmp_path / "parts")
    assert [path.name for path in find_inputs([tmp_path / "parts"])] == [
        "request_0.jsonl"
    ]


def test_each_line_is_in_one_part(tmp_path: Path) -> None:
    lines = make_lines(400, random.Random(1))
    source = tmp_path / "all.jsonl"
    source.write_bytes(b"\n".join(lines))
    manifest = split(source, tmp_path / "parts", chunk=1000).manifest
    expected = {line.number: line.raw for line in read_lines(source, 0)}
    found: dict[int, bytes] = {}
    for part in manifest.parts:
        read: list[Line] = list(read_lines(tmp_path / "parts" / part.path, 0))
        found |= {
            number: line.raw for number, line in zip(part.lines, read, strict=True)
        }
        assert part.digest == digest_file(tmp_path / "parts" / part.path)
    assert found == expected and manifest.num_lines == len(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "abcd"}, 4),
        ({"prompt": [1, 2]}, 8),
        ({"prompt": ["ab", [1]]}, 6),
        ({"prompt": 5}, 0),
        ({"messages": [{"role": "user", "content": "abc"}]}, 3),
        ({"input": "abc"}, 3),
        ({"query": "a", "documents": ["bc", "d"]}, 4),
    ],
)
def test_how_long_a_request_is(fields: dict[str, Any], expected: int) -> None:
    assert estimate_length(fields) == expected
