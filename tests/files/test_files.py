"""Files of all endings, stdin and stdout: nothing is lost, whatever the packing or the
damage."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.contract.envelope import Line
from fminfer.core.errors import UsageError
from fminfer.files import json_values, streams
from fminfer.files.input_folders import (
    describe_empty_files,
    describe_left_out,
    find_inputs,
    sort_folder,
)
from fminfer.files.json_values import explain_spread_objects, split_values
from fminfer.files.line_reader import count_lines, count_to_last_line, read_lines
from fminfer.files.output_paths import STDOUT, answers_path, require_output_paths
from fminfer.files.streams import CHUNK_BYTES, STDIN, find_zstd
from fminfer.job.overview import find_overviews
from fminfer.job.run_inputs import OrderedStream
from fminfer.split.merging import merge_parts
from fminfer.split.splitting import SplitOptions, split_file
from tests.conftest import run_files
from tests.forked import programs

zstd = find_zstd()
assert zstd is not None, "the tests need fminfer[zst]"
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd.compress,
}
ROWS = b"".join(
    b'{"prompt":"x","max_tokens":1,"temperature":0,"user":"%d"}\n' % i for i in range(5)
)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(PACK.get(path.suffix, bytes)(data))
    return path


def values(path: Path) -> list[tuple[int, Any]]:
    return [(line.number, json.loads(line.raw)) for line in read_lines(path, 0)]


def only(lines: Iterator[Line]) -> tuple[list[Line], Line]:
    """Return the sound lines, and the one that tells of the damage."""
    *sound, damaged = lines
    assert not [line for line in sound if line.damage] and damaged.damage
    return sound, damaged


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine("demo", dtype="float32", kernels="off")
    yield engine
    engine.close()


def job(engine: fminfer.Engine, inputs: list[Path], output: Path | None = None) -> Any:
    found = find_inputs(inputs)
    return run_files(engine, found, require_output_paths(found, output))


ROW = b'{"prompt": "den", "max_tokens": 2}'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b"[\n" + ROW + b",\n" + ROW + b"\n]\n"),
        ("a.jsonl", b"\xef\xbb\xbf [" + ROW + b"," + ROW + b"]"),
        ("a.ndjson", ROW + b"\n" + ROW),
        ("a.ndjson.gz", gzip.compress(ROW + b"\n" + ROW)),
        ("a.jsonl", gzip.compress(ROW + b"\n" + ROW)),
        ("a.json", zstd.compress(b"[" + ROW + b"," + ROW + b"]")),
        ("a.jsonl.gz", ROW + b"\n" + ROW),
        ("a.jsonl.zst", gzip.compress(ROW + b"\n" + ROW)),
    ],
    ids=[
        "array",
        "one line",
        "ndjson",
        "packed",
        "hidden",
        "array in zstd",
        "plain",
        "other",
    ],
)
def test_bytes_tell_a_files_form_and_not_its_name(
    tmp_path: Path, name: str, data: bytes
) -> None:
    """Each line of such a file was in error: it was read as its name says."""
    path = tmp_path / name
    path.write_bytes(data)
    assert find_inputs([path]) == find_inputs([tmp_path]) == [path]
    assert values(path) == [(1, json.loads(ROW)), (2, json.loads(ROW))]
    assert answers_path(path).name == "output_a.jsonl"
    summary = split_file(path, tmp_path / "parts", SplitOptions(1, 100))
    assert summary.manifest.num_lines == 2 and not summary.index.num_bad


@pytest.mark.parametrize("size", [1, 100_000], ids=["short", "long"])
@pytest.mark.parametrize(
    "first",
    [
        b'[{"role": "user"}]',
        b'[{"x": 1}',
        b'[{"x": 1}, ',
        b"[",
        b'[{"x": 1}, {"x": 2}]',
        b"[1]",
    ],
)
def test_a_first_line_that_is_an_array_costs_itself_alone(
    first: bytes, size: int, tmp_path: Path
) -> None:
    """It made an array of the file, in which all other lines were lost."""
    rows = [ROW, ROW, b'{"prompt": "%b"}' % (b"x" * size), ROW]
    path = write(tmp_path / "a.jsonl", b"\n".join([first, *rows]))
    if size > 1 and first.endswith(b"}]") and b"}, {" in first:
        pytest.skip("its first bytes are those of an array")
    assert [line.raw for line in read_lines(path, 0)] == [first, *rows]
    (tmp_path / "b.jsonl").write_bytes(b"[" * 5 + b'{"prompt": "%b"}' % (b"x" * size))
    assert len(list(read_lines(tmp_path / "b.jsonl", 0))) == 1


@pytest.mark.parametrize("text", [b"[%b, %b]", b"[\n%b,\n%b\n]", b"[ %b\n, %b ]\n\n"])
def test_an_array_longer_than_its_first_bytes_is_one(
    text: bytes, tmp_path: Path
) -> None:
    rows = [ROW] * 2, [b'{"prompt": "%b",\n"n": 1}' % (b"x" * 100_000), ROW]
    for first, second in rows:
        data = text % (first, b", ".join([second] * 3000))
        if len(first) > CHUNK_BYTES and b"\n" not in data[:CHUNK_BYTES]:
            continue  # its first bytes are those of one wrong line
        path = write(tmp_path / "a.jsonl", data)
        assert len(list(read_lines(path, 0))) == 3001


def test_a_pipes_lines_are_lines_whatever_the_first_one_is(tmp_path: Path) -> None:
    """Behind a first line that is an array, those were lost that had not been written yet."""
    os.mkfifo(tmp_path / "a.jsonl")
    threading.Thread(
        target=(tmp_path / "a.jsonl").write_bytes,
        args=(b'[{"x": 1}]\n' + ROW,),
        daemon=True,
    ).start()
    assert [line.raw for line in read_lines(tmp_path / "a.jsonl", 0)] == [
        b'[{"x": 1}]',
        ROW,
    ]


def test_a_part_of_wrong_lines_is_answered_line_by_line(tmp_path: Path) -> None:
    """`fminfer split` puts them into one part, of which `fminfer merge` wants every line."""
    part = write(tmp_path / "request_0.jsonl", b"a,b\n\0,d\ne,f\n")
    assert find_inputs([tmp_path]) == [part]
    assert [line.raw for line in read_lines(part, 0)] == [b"a,b", b"\0,d", b"e,f"]


def pack_tar(form: int) -> bytes:
    packed = io.BytesIO()
    member = tarfile.TarInfo("r.jsonl")
    member.size = len(ROWS)
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        archive.addfile(member, io.BytesIO(ROWS))
    return packed.getvalue()


OTHER_FORMS = {
    "UTF-16LE": ROW.decode().encode("utf-16-le"),
    "UTF-16BE": ROW.decode().encode("utf-16-be"),
    "text in UTF-16;": ROW.decode().encode("utf-16"),
    "CR alone": ROW + b"\r" + ROW + b"\r",
    "a table (CSV)": b"id,prompt\n1,den\n2,hall\n",
    "a Parquet table": b"PAR1\x15\x04",
    "a ZIP archive": b"PK\x03\x04\x14\0",
    "a page of the web": b"\n<!DOCTYPE html><html>",
    "bzip2": b"BZh91AY",
    "a tar archive": pack_tar(tarfile.GNU_FORMAT),
    "tar archive": pack_tar(tarfile.PAX_FORMAT),
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("what", OTHER_FORMS)
def test_what_holds_no_json_lines_is_named_by_its_bytes(
    tmp_path: Path, what: str
) -> None:
    """A run loaded the model, and then called each line bad JSON; a .csv was to be renamed."""
    path = write(tmp_path / "a.jsonl", OTHER_FORMS[what])
    with pytest.raises(
        UsageError, match=r"a\.jsonl cannot be answered: .*" + re.escape(what)
    ):
        find_inputs([path])
    with pytest.raises(UsageError, match=re.escape(what)):
        find_inputs([tmp_path])
    other = write(tmp_path / "b.jsonl", ROW)
    assert find_inputs([tmp_path]) == [other], "in a folder it costs itself"
    assert what in sort_folder(tmp_path).lost[path]
    (told,) = describe_left_out([tmp_path], has_lost=True)
    assert told.startswith(str(path)) and what in told
    (overview,) = find_overviews(tmp_path)
    assert [what in (file.why or "") for file in overview.files] == [True, False]
    renamed = path.rename(tmp_path / "a.csv")
    message = r"a\.csv has none of the endings .*" + re.escape(what)
    if what == "a table (CSV)":
        message = r"a\.csv is a table, and tables need a template\. Type: "
    with pytest.raises(UsageError, match=message):
        find_inputs([renamed])


def test_a_name_that_is_no_inputs_gets_advice_that_fits_its_bytes(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        UsageError, match=r"a\.txt has none of the endings .* are requests; rename"
    ):
        find_inputs([write(tmp_path / "a.txt", ROWS)])
    with pytest.raises(
        UsageError, match=r"b\.txt has none .*; it must hold JSON lines"
    ):
        find_inputs([write(tmp_path / "b.txt", b"Where is the hall?")])
    with pytest.raises(
        UsageError, match=r"holds no file to answer .*; it holds .*a\.txt, .*b\.txt"
    ):
        find_inputs([tmp_path])


def test_a_tar_archive_is_named_inside_gzip(tmp_path: Path) -> None:
    """Its lines were said to be requests, and r.tar.gz was to be renamed."""
    packed = pack_tar(tarfile.GNU_FORMAT)  # `write` compresses it
    for name, says in {
        "r.tar.gz": "none of the endings",
        "r.jsonl.gz": "be answered",
    }.items():
        path = write(tmp_path / name, packed)
        with pytest.raises(
            UsageError, match=rf"{says}.*; it is a tar|{says}: it is a tar"
        ):
            find_inputs([path])
    line = b'{"prompt": "' + b"x" * (257 - 12) + b'ustar"}\n'
    assert find_inputs([write(tmp_path / "text.jsonl", line)])


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", b""), write(tmp_path / "b.jsonl", ROW)]
    (told,) = describe_empty_files(find_inputs(paths))
    assert told.startswith(f"{paths[0]}: 0 bytes")
    found = CliRunner().invoke(main, ["check", *map(str, paths)])
    assert f"Warning: {told}." in found.output


def test_a_file_without_a_request_is_named_as_an_empty_one_is(tmp_path: Path) -> None:
    """Of line breaks alone, or an empty array, nothing was said, and the output was empty."""
    blank = write(tmp_path / "blank.jsonl", b"\n \r\n")
    array = write(tmp_path / "array.json", b"[ ]\n")
    (told,) = describe_empty_files([blank, array, write(tmp_path / "a.jsonl", ROW)])
    assert told.startswith(f"{blank}, {array}: 0 bytes, or only blank lines")


@pytest.mark.timeout(60)
def test_a_shells_pipe_is_read_and_answered_to_stdout(
    tmp_path: Path, engine: fminfer.Engine, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`fminfer run <(zcat …)`: /dev/fd/63 "has none of the endings; rename it"."""
    ends = os.pipe()
    os.write(ends[1], ROWS)
    os.close(ends[1])
    pipe = Path(f"/dev/fd/{ends[0]}")
    assert require_output_paths(find_inputs([pipe]), None) == [STDOUT]
    summary = job(engine, [pipe], tmp_path / "a.jsonl")
    os.close(ends[0])
    assert summary.num_rows == 5 and not summary.num_errors
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 5
    os.mkfifo(tmp_path / "pipe")
    assert find_inputs([tmp_path / "pipe"]) == [tmp_path / "pipe"]


@pytest.mark.parametrize(
    "name", ["resluts/a.jsonl", "resluts/deep/a.jsonl", "resluts/deep"]
)
def test_a_mistyped_output_makes_no_folders(tmp_path: Path, name: str) -> None:
    """The answers went to folders that nobody meant, and had to be searched for."""
    source = write(tmp_path / "a.jsonl", ROW)
    told = (
        f"there is no folder .*resluts.* \\(the nearest that is there is {tmp_path}\\)"
    )
    with pytest.raises(UsageError, match=f"--output .*{told}.* mkdir -p "):
        require_output_paths([source], tmp_path / name)
    assert require_output_paths([source], tmp_path / "new") == [
        tmp_path / "new" / "output_a.jsonl"
    ]
    split_file(source, tmp_path / "parts", SplitOptions(1, 100))
    with pytest.raises(UsageError, match=told):
        merge_parts(tmp_path / "parts", tmp_path / "resluts" / "a.jsonl")
    with pytest.raises(UsageError, match=told):
        split_file(source, tmp_path / "resluts" / "parts", SplitOptions(1, 100))
    assert not (tmp_path / "resluts").exists()


@pytest.mark.parametrize("how", PACK)
def test_lines_of_every_packing(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / f"a.jsonl{how}", b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"a":2}')
    assert values(path) == [(1, {"a": 1}), (4, {"a": 2})]
    assert count_lines(path) == (None if how else 2), (
        "packed files are not unpacked twice"
    )
    assert count_to_last_line(path) == ((None, 0) if how else (2, 4))


@pytest.mark.parametrize("how", PACK)
@pytest.mark.parametrize(
    "data",
    [
        b'[{"a":1},{"a":[2,"],["]}]',
        b'\xef\xbb\xbf \n[\n  {"a": 1},\r\n  {\n    "a": [2, "],["]\n  }\n]\n',
        b'{"a":1}\n{"a":[2,"],["]}\n',
        b'{\n  "a": 1\n}\n{\n  "a": [2, "],["]\n}',
    ],
)
def test_json_files_of_every_layout(tmp_path: Path, data: bytes, how: str) -> None:
    path = write(tmp_path / f"a.json{how}", data)
    assert values(path) == [(1, {"a": 1}), (2, {"a": [2, "],["]})]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_values_are_the_same_however_a_file_is_read(size: int) -> None:
    """Pieces end in strings, behind a backslash, and between any two signs."""
    values = [b'{"a":"x\\\\\\"],"}', b"[[1],{}]", b'{"":[{"b":2}]}']
    whole = b",".join(values) + b"]"
    pieces = (whole[start : start + size] for start in range(0, len(whole), size))
    assert [*split_values(pieces, is_array=True)] == values


def test_json_files_with_one_object_or_none(tmp_path: Path) -> None:
    assert values(write(tmp_path / "a.json", b'{"a":\n1}')) == [(1, {"a": 1})]
    assert values(write(tmp_path / "b.json", b'{"a":1}')) == [(1, {"a": 1})]
    for empty in (b"", b"[]", b" [ \n ] ", b"\n"):
        assert values(write(tmp_path / "c.json", empty)) == []


def test_a_bad_line_of_a_json_file_of_lines_costs_only_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'{"a":1}\n{"a":\n{"a":3}\n')
    assert [line.raw for line in read_lines(path, 0)] == [
        b'{"a":1}',
        b'{"a":',
        b'{"a":3}',
    ]


@pytest.mark.parametrize("bad", [b'{"a":1', b'{"a":"1', b"x", b"{}}"])
def test_a_bad_first_line_of_a_json_file_of_lines_costs_only_itself(
    tmp_path: Path, bad: bytes
) -> None:
    """It made the file look like objects over many lines, and everything behind it was lost."""
    path = write(tmp_path / "a.json", b"\n" + bad + b'\n{"a":2}\n{"a":3}')
    assert [line.raw for line in read_lines(path, 0)] == [bad, b'{"a":2}', b'{"a":3}']


@pytest.mark.parametrize("first", [b'{"a":1', b"{}}", b'{"a":1,}', b'{"a":[', b"x"])
@pytest.mark.parametrize("second", [b'{"a":1', b'{"a":"1', b"y", b'{"a":1,}'])
def test_two_bad_first_lines_of_a_json_file_of_lines_cost_only_themselves(
    tmp_path: Path, first: bytes, second: bytes
) -> None:
    """All lines behind them were lost, and with the name .jsonl none."""
    path = write(tmp_path / "a.json", first + b"\n" + second + b'\n{"a":3}\n{"a":4}')
    found = [line.raw for line in read_lines(path, 0)]
    assert found == [first, second, b'{"a":3}', b'{"a":4}']


def test_a_spread_object_may_hold_whole_objects_on_lines_of_their_own(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.json", b'{"a":\n{"b": 1}\n}\n{"a":\n2}')
    assert values(path) == [(1, {"a": {"b": 1}}), (2, {"a": 2})]


SAMPLE = (Path(__file__).parent.parent / "data" / "seed_request.jsonl").read_text()


def pasted(*, has_comma: bool) -> str:
    """Return the seed's own sample as it stands in its text: over lines, with a last comma."""
    text = json.dumps(json.loads(SAMPLE), indent=4)
    return text.removesuffix("\n}") + ",\n}" if has_comma else text


def test_the_seeds_own_sample_runs_on_the_demo_model(engine: fminfer.Engine) -> None:
    """It has 608 tokens, and the demo model's context was 512."""
    (record,) = engine.run([json.loads(SAMPLE)])
    assert record.error is None, record.error
    assert record.num_prompt_tokens == 608


def test_lines_that_were_looked_at_before_the_damage_are_not_lost(
    tmp_path: Path,
) -> None:
    """Up to 1,000 lines behind one that may begin a spread object were lost without a word."""
    lines = [b'{"prompt": "broken",', *(b' {"user": "%d"}' % i for i in range(3))]
    data = gzip.compress(b"\n".join([*lines, b'{"user": "4"}']))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data[:-8])  # its checksum and length
    sound, damaged = only(read_lines(path, 0))
    assert [line.raw for line in [*sound, damaged]] == [*lines, b'{"user": "4"}']
    assert [line.number for line in [*sound, damaged]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "text", [ROWS, ROWS.replace(b"{", b"{\n")], ids=["lines", "spread"]
)
def test_objects_before_damage_at_a_files_beginning_are_read(
    tmp_path: Path, text: bytes
) -> None:
    """The first 100 lines of a .json file, by which its layout is told, became one bad line."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text)[:-8])  # without its checksum and length
    sound, damaged = only(read_lines(path, 0))
    expected = [json.loads(line) for line in ROWS.splitlines()]
    assert [json.loads(line.raw) for line in sound] == expected and damaged.number == 6


def test_an_array_in_a_jsonl_file_is_read_line_by_line(tmp_path: Path) -> None:
    """Behind each line of it 1,000 more were looked at: 20,000 lines took 23 s."""
    num_taken = 0

    def numbered() -> Iterator[tuple[int, bytes]]:
        nonlocal num_taken
        for num_taken in range(1, 100):
            yield num_taken, b'  {"prompt": "x"},'

    assert next(explain_spread_objects(numbered())) == (1, b'  {"prompt": "x"},', "")
    assert num_taken == 1


@pytest.mark.parametrize("has_comma", [True, False])
def test_a_spread_object_is_explained_once_with_what_helps(
    tmp_path: Path, has_comma: bool
) -> None:
    """The seed's sample, pasted, got 14 errors, and their advice (jq) met its last comma."""
    text = pasted(has_comma=has_comma)
    num_lines = text.count("\n") + 1
    path = write(tmp_path / "a.jsonl", f"{SAMPLE}\n{text}\n{SAMPLE}".encode())
    lines = list(read_lines(path, 0))
    first = 3
    last = 2 + num_lines
    told = [line.fault for line in lines if line.fault]
    assert len(told) == num_lines and len(lines) == num_lines + 2
    assert (
        f"lines {first} to {last} are one object, spread over several lines" in told[0]
    )
    assert {f"the line is a piece of the object that begins in line {first}"} == set(
        told[1:]
    )
    # What it says helps: without the comma it is JSON, and a .json file may hold it.
    assert (
        f"a comma stands before a closing bracket (line {last - 1})" in told[0]
    ) == has_comma
    assert (
        "Remove that comma; then put the object on one line" in told[0]
    ) == has_comma
    assert ("Put the object on one line" in told[0]) != has_comma
    mended = text.split("\n")
    if has_comma:
        mended[-2] = mended[-2].removesuffix(",")
    (line,) = read_lines(write(tmp_path / "b.json", "\n".join(mended).encode()), 0)
    assert json.loads(line.raw) == json.loads(SAMPLE)


def test_pieces_that_are_no_object_are_lines_of_their_own(tmp_path: Path) -> None:
    rows = [
        '{"a": "cut',
        '{"a": 1}',
        '{"b":',
        "x}",
        "  ",
        '{"c": [',
        '{"a": 2}',
        '{"d":',
        "}",
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(rows).encode())
    found = [
        (line.number, line.raw.decode(), line.fault) for line in read_lines(path, 0)
    ]
    assert found == [(n, row, "") for n, row in enumerate(rows, start=1) if row.strip()]


def test_a_control_character_in_an_array_costs_only_its_element(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"a":"x\ty"},\n{"a":2}]')
    assert [line.raw.strip() for line in read_lines(path, 0)] == [
        b'{"a":"x\ty"}',
        b'{"a":2}',
    ]


def test_long_lines_and_many_chunks(tmp_path: Path) -> None:
    rows = [{"a": "é" * size} for size in (1, 200_000, 65_531, 65_532, 65_533, 3)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    array = json.dumps(rows, indent=1).encode()
    for name, data in [
        ("a.jsonl", lines),
        ("a.jsonl.gz", lines),
        ("a.json.zst", array),
    ]:
        assert [value for _, value in values(write(tmp_path / name, data))] == rows


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "b.json"])
def test_a_giant_line_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One line of 200 MB, in 194 KB of gzip, took 5.6 GB and wrote 1.2 GB of errors."""
    monkeypatch.setattr(json_values, "MAX_VALUE_BYTES", 300_000)
    giant = b'{"prompt": "' + b"\x01" * 5_000_000 + b'"}'
    data = b'{"a":1}\n' + giant + b'\n{"a":3}\n'
    if name == "b.json":
        data = b"[" + data.strip().replace(b"\n", b",") + b"]"
    first, second, third = read_lines(write(tmp_path / name, data), 0)
    assert (first.raw.strip(), third.raw.strip()) == (b'{"a":1}', b'{"a":3}')
    assert (
        second.number == 2 and giant.startswith(second.raw) and len(second.raw) < 1000
    )
    assert f"{len(giant):,} bytes" in second.fault and "300,000" in second.fault
    assert third.number == 3 and not third.fault


def test_the_command_lines_hyperparameters_replace_each_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    flags = [
        "--overwrite-request-args",
        "--generate-seq-length",
        "3",
        "--num-completions",
        "2",
    ]
    found = CliRunner().invoke(main, ["run", "-q", str(path), *flags])
    assert found.exit_code == 0, found.output
    for line, row in zip(
        (tmp_path / "output_a.jsonl").open(), ROWS.splitlines(), strict=True
    ):
        assert line.encode().startswith(b'{"request":' + row)
        assert json.loads(line)["result"]["usage"]["completion_tokens"] == 6
    found = CliRunner().invoke(main, ["run", str(path)])
    assert found.exit_code == 2 and "--overwrite-request-args was" in found.stderr
    found = CliRunner().invoke(main, ["run", str(path), "--overwrite-request-args"])
    assert found.exit_code == 2 and "nothing to overwrite with" in found.stderr


def test_bytes_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return super().read1(1)

    stdin = io.TextIOWrapper(Slow(b'\xef\xbb\xbf{"a":1}\n\n{"a":2}'))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert values(STDIN) == [(1, {"a": 1}), (3, {"a": 2})]
    assert not stdin.closed


@pytest.mark.parametrize("how", [".gz", ".zst"])
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_cut_off_file_gives_what_it_holds_and_says_so(
    tmp_path: Path, how: str, ending: str
) -> None:
    """A copy that broke off: the rows before are answered, and that others are lost is told."""
    rows = [{"a": i, "text": f"{i * 7919:x}"} for i in range(50_000)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    data = lines if ending == ".jsonl" else json.dumps(rows).encode()
    packed = PACK[how](data)
    path = tmp_path / f"a{ending}{how}"
    path.write_bytes(packed[: len(packed) // 2])
    sound, damaged = only(read_lines(path, 0))
    assert (
        len(sound) > 1000
        and [json.loads(line.raw) for line in sound] == rows[: len(sound)]
    )
    assert damaged.number == len(sound) + 1
    assert "cut off" in damaged.damage and "--restart" in damaged.damage


def test_a_damaged_checksum_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS)[:-8] + b"\0" * 8)
    sound, damaged = only(read_lines(path, 0))
    assert len(sound) == 5 and "CRC" in damaged.damage
    path.write_bytes(b"no gzip at all\0")
    sound, damaged = only(read_lines(path, 0))
    assert not sound and damaged.number == 1


@pytest.mark.parametrize(
    "data, num_sound, hint",
    [
        (
            b'[{"a":1},\n{"a":2},\n{"a":',
            2,
            "line 3: the array's last bracket is missing",
        ),
        (b'[{"a":1},\n{"a":"2\n"}]', 1, "line 2: a string is not closed"),
        (b'[{"a":1},]', 1, "comma"),
        (b'[{"a":1}] {"a":2}', 1, "behind the array's last bracket"),
        (b'{\n"a":1}\n{\n"a":', 1, "line 4: a bracket or a quote is not closed"),
    ],
)
def test_a_broken_json_file_gives_what_stands_before(
    tmp_path: Path, data: bytes, num_sound: int, hint: str
) -> None:
    sound, damaged = only(read_lines(write(tmp_path / "a.json", data), 0))
    assert len(sound) == num_sound and hint in damaged.damage


def test_damage_is_one_error_record_with_its_place(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"prompt":"x","max_tokens":1,\n"temperature":0}, {"prompt": "y"'
    )
    summary = job(engine, [path])
    assert (summary.num_rows, summary.num_errors) == (1, 1)
    (error,) = map(
        json.loads, (tmp_path / "output_a.errors.jsonl").read_text().splitlines()
    )
    assert error["line"] == 2 and error["error"]["code"] == "invalid_json"
    assert (
        "line 2" in error["error"]["message"] and error["request"] == '{"prompt": "y"'
    )
    (answer,) = (tmp_path / "output_a.jsonl").read_bytes().splitlines()
    assert answer.startswith(
        b'{"request":{"prompt":"x","max_tokens":1,"temperature":0},"result"'
    )


def test_a_folder_of_all_endings_and_its_outputs(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    array = b"[" + ROWS.strip().replace(b"\n", b",\n") + b"]"
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        write(tmp_path / name, ROWS)
    for name in ("d.json", "e.json.gz", "f.json.zst"):
        write(tmp_path / name, array)
    (tmp_path / "notes.txt").touch()
    summary = job(engine, [tmp_path])
    assert summary.num_rows == 30 and summary.num_errors == 0
    texts = {
        (tmp_path / f"output_{name}.jsonl").read_bytes().count(b"\n")
        for name in "abcdef"
    }
    assert texts == {5}, "plain files, named without .gz and .zst"
    users = [
        json.loads(line)
        for line in (tmp_path / "output_f.jsonl").read_text().splitlines()
    ]
    assert [record["request"]["user"] for record in users] == list("01234")
    assert [path.name[0] for path in find_inputs([tmp_path])] == list("abcdef")


def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        write(tmp_path / name, ROWS)
    with pytest.raises(UsageError, match=r"output_a\.jsonl, which also belongs"):
        require_output_paths(find_inputs([tmp_path]), None)


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ROWS)
    endings = ("jsonl.gz", "jsonl.zst", "json", "ndjson", "tsv", "txt", "xlsx", "arrow")
    for name in (f"b.{ending}" for ending in endings):
        with pytest.raises(
            UsageError, match="plain JSON lines; give a name that ends in"
        ):
            require_output_paths([source], tmp_path / name)
    with pytest.raises(UsageError, match="- is given twice"):
        find_inputs([STDIN, source, STDIN])
    status = write(tmp_path / "b.status.json", ROWS)
    with pytest.raises(UsageError, match="which is the input"):
        require_output_paths([status], tmp_path / "b.jsonl")


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl.zst", ROWS)
    monkeypatch.setattr(streams, "find_zstd", lambda: None)
    with pytest.raises(UsageError, match=r"pip install .*\[zst\]'"):
        find_inputs([path])


def test_stdout_is_in_input_order_as_soon_as_it_can_be() -> None:
    out = io.BytesIO()
    errors = list[bytes]()
    stream = OrderedStream(out, errors.append)
    for number in (1, 2, 5):
        stream.expect_record(0, number)
    stream.append(0, 2, b"two", is_error=False)
    assert out.getvalue() == b""
    stream.append(0, 1, b"one", is_error=True)
    assert out.getvalue() == b"two\n" and errors == [b"one"]
    stream.expect_record(1, 1)
    stream.append(1, 1, b"next file", is_error=False)
    stream.append(0, 5, b"five", is_error=False)
    assert out.getvalue() == b"two\nfive\nnext file\n"


def test_where_answers_go() -> None:
    source = Path("x/a.json.zst")
    output = Path("out.jsonl")
    assert require_output_paths([STDIN], None) == [STDOUT]
    assert require_output_paths([STDIN], output) == [output]
    assert require_output_paths([source, STDIN], Path("-")) == [STDOUT, STDOUT]
    assert require_output_paths([source, STDIN], None) == [
        Path("x/output_a.jsonl"),
        STDOUT,
    ]
    assert require_output_paths([source, STDIN], Path("there")) == [
        Path("there/output_a.jsonl"),
        Path("there/output_stdin.jsonl"),
    ]


def test_stdout_carries_records_only(
    engine: fminfer.Engine, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS + b'{"prompt":5}\n' + ROWS)
    summary = job(engine, [path], Path("-"))
    found = capsysbinary.readouterr()
    records = [json.loads(line) for line in found.out.splitlines()]
    assert [record["request"]["user"] for record in records] == list("0123401234")
    (error,) = map(json.loads, found.err.splitlines())
    assert error["line"] == 6 and error["error"]["code"] == "invalid_type"
    assert summary.num_errors == 1 and "stdout" in summary.to_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"], (
        "nothing beside it"
    )


def run_shell(
    command: str, rows: bytes, folder: Path
) -> subprocess.CompletedProcess[bytes]:
    environ = os.environ | {"PATH": programs(folder / "programs")}
    return subprocess.run(
        ["bash", "-c", command], input=rows, env=environ, capture_output=True
    )


def test_the_command_from_stdin_to_stdout(tmp_path: Path) -> None:
    found = run_shell("fminfer run -q -", ROWS + b"{}\n" + ROWS.strip(), tmp_path)
    assert found.returncode == 3
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [record["request"]["user"] for record in records] == list("0123401234")
    (error,) = map(json.loads, found.stderr.splitlines())
    assert error["error"]["code"] == "missing_prompt"


def test_a_reader_that_stops_ends_the_run(tmp_path: Path) -> None:
    command = "fminfer run -q - | head -n 1; exit ${PIPESTATUS[0]}"
    found = run_shell(command, ROWS * 2000, tmp_path)
    assert found.returncode == 1 and len(found.stdout.splitlines()) == 1
    assert found.stderr.decode().splitlines() == [
        "Error: whoever read the answers stopped reading"
    ]


def test_a_full_disk_behind_stdout(tmp_path: Path) -> None:
    found = run_shell("fminfer run -q - > /dev/full", ROWS, tmp_path)
    assert found.returncode == 1
    (line,) = found.stderr.decode().splitlines()
    assert line.startswith("Error: stdout cannot be written: No space left on device")


def test_strict_and_check_model_through_the_command(tmp_path: Path) -> None:
    rows = [
        {"user": "u"},
        {"colour": "red"},
        {"model": "opt"},
        {"engine": "fminfer-demo"},
    ]
    lines = [
        json.dumps({"prompt": "x", "max_tokens": 1, "logprobs": 1} | row)
        for row in rows
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    flags = [
        "--model-name",
        "demo",
        "--strict",
        "--check-model",
        "--token-format",
        "text",
        "-q",
    ]
    found = CliRunner().invoke(main, ["run", str(path), *flags])
    assert found.exit_code == 3, found.output
    errors = map(
        json.loads, (tmp_path / "output_a.errors.jsonl").read_text().splitlines()
    )
    assert [error["error"]["param"] for error in errors] == ["colour", "model"]
    answers = (tmp_path / "output_a.jsonl").read_text()
    assert answers.count("\n") == 2 and "Ġ" not in answers


OTHERS = [
    {"prompt": "x"},
    {"prompt": "x", "engine": "fminfer-demo"},
    {"prompt": "x", "model": "demo", "engine": ""},
    {"prompt": "x", "engine": "gpt-j-6b"},
    {"request": {"prompt": "x", "model": "meta-llama/Llama-3.1-8B"}},
]


def test_the_demo_model_does_not_answer_for_another(tmp_path: Path) -> None:
    """It did, with status 0 and under -q without a word, where --model-name was forgotten."""

    def call(command: str, *flags: str) -> tuple[int, str]:
        found = CliRunner().invoke(main, [command, str(tmp_path / "a.jsonl"), *flags])
        return found.exit_code, found.output

    lines = [json.dumps(each).encode() for each in OTHERS]
    for first in (3, 4):  # nothing was answered yet, so that nothing is begun
        write(tmp_path / "a.jsonl", b"\n".join([lines[0], *lines[first:]]))
        for command in ("run", "check"):
            status, told = call(command)
            assert status == 2 and "--model-name demo" in told, told
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert call("run", "-q", "--model-name", "demo") == (0, ""), "it was meant"
    assert call("run", "-q")[0] == 2
    write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert call("run", "-q", "--restart")[0] == 3
    errors = map(
        json.loads, (tmp_path / "output_a.errors.jsonl").read_text().splitlines()
    )
    assert [(each["line"], each["error"]["param"]) for each in errors] == [
        (4, "engine"),
        (5, "model"),
    ]
    assert call("check")[0] == 3
    status, told = call("run", "-q", "--model-name", "demo")
    assert status == 2 and "--check-model was on without --model-name" in told, told


def test_neither_a_pipe_nor_a_library_call_is_answered_by_the_demo_model_for_another() -> (
    None
):
    engine = fminfer.Engine(dtype="float32", kernels="off")
    records = {record.line.number: record for record in engine.run(OTHERS[2:])}
    engine.close()
    assert records[1].error is None and records[2].error is not None
    assert (
        "--model-name demo" in records[2].error.message and records[3].error is not None
    )
    found = CliRunner().invoke(main, ["run", "-q", "-"], input=json.dumps(OTHERS[3]))
    assert found.exit_code == 3 and '"param":"engine"' in found.output


@pytest.mark.parametrize("blank", [b"\n", b" ", b" \n\t"])
def test_blank_lines_before_the_first_one_need_no_memory(
    tmp_path: Path, blank: bytes
) -> None:
    """They were gathered: a gzip file of 1 MB took 6 GB, and so a server of batches."""
    num_blank = (4 << 20) // len(blank)
    path = tmp_path / "a.jsonl"
    with gzip.open(path, "wb", 1) as file:
        file.write(blank * num_blank + b"{}\n5")
    tracemalloc.start()
    found = values(path)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first = num_blank * blank.count(b"\n") + 1
    assert found == [(first, {}), (first + 1, 5)]
    assert most_bytes < 2 << 20
