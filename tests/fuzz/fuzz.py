"""Mutates what comes from outside without end, and sees that only what is promised comes out.

    scripts/fuzz --minutes 10

The lines to begin with are in tests/fuzz/lines and in examples/queries; a line that
made a fault is put into tests/fuzz/lines, so that every later run begins with it.
Checked of a line: it becomes a request or a RequestError, and its record is one line of
JSON. Of a journal: only rows that were written come out, and the file can be gone on
with. Of a split's
manifest: it is refused in words, or every path in it stays in its folder and every line
comes once. Of words: a shell reads those of a job script as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import orjson

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.files.journal import Journal, journal_path
from fminfer.files.journal_rows import Row
from fminfer.files.line_reader import read_lines
from fminfer.runtime.lines.line_intake import LineIntake, LineRequest
from fminfer.split.manifest import MANIFEST, read_manifest, read_part_paths
from fminfer.split.splitting import SplitOptions, split_file
from fminfer.text.tokenizer import Tokenizer
from tests.fuzz.scripts import check_scripts

HERE = Path(__file__).parent
QUERIES = HERE.parent.parent / "examples" / "queries"
# Pieces that parsers trip over; they are put in, or in the place of others.
PIECES = [
    b"null",
    b"true",
    b"NaN",
    b"Infinity",
    b"-0",
    b"1e999",
    b"1E400",
    b"0.1e-9",
    b"9" * 40,
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b"\\",
    b'\\"',
    b'"',
    b"[]",
    b"{}",
    b"[[",
    b"]]",
    b"}",
    b"{",
    b",",
    b":",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\r\n",
    b"\n",
    b"\xe2\x80\xa8",
    b'"prompt":',
    b'"request":',
    b'"custom_id":',
    b'"body":',
    b'"n":',
    b'"stop":',
    b'"line":',
    b'"logprobs":',
    b'"max_tokens":',
    b'"seed":',
    b'"echo":true',
    b'"logit_bias":{"5":-100}',
    b"[" * 200,
    b'{"a":' * 200,
    b'"x"' * 50,
    "é\u202e👩\u200d👩".encode(),
    b"../",
    b"/etc/",
    b"request_0.jsonl",
    b'"path":',
    b'"lines":[1,1]',
    b'"num_rows":0',
    b"],\n",
]


def mutate(data: bytes, others: list[bytes], source: random.Random) -> bytes:
    """Change some bytes, or put pieces in, out, or from other lines."""
    changed = bytearray(data)
    for _ in range(source.randrange(1, 6)):
        place = source.randrange(len(changed) + 1)
        end = min(len(changed), place + source.choice((1, 2, 8, 40)))
        kind = source.randrange(6)
        if kind == 0:
            changed[place:end] = source.randbytes(end - place)
        elif kind == 1:
            del changed[place:end]
        elif kind == 2:
            changed[place:place] = source.choice(PIECES)
        elif kind == 3:
            changed[place:end] = source.choice(PIECES)
        elif kind == 4:
            other = source.choice(others)
            first = source.randrange(len(other) + 1)
            changed[place:end] = other[first : first + source.randrange(80)]
        else:
            changed[place:place] = changed[place:end] * source.randrange(1, 4)
    return bytes(changed)


def check_line(intake: LineIntake, raw: bytes, number: int) -> None:
    """Take a line in as a run does."""
    opened = intake.open(Line(0, number, raw))
    if isinstance(opened, LineRequest):
        opened = Record(opened.line, opened.envelope, {"choices": []})
    assert opened.error is None or opened.error.code != "internal_error", opened.error
    written = opened.to_json()
    assert b"\n" not in written, "a record of two lines"
    json.loads(written.decode("utf-8", "surrogatepass"))


def check_file(folder: Path, data: bytes, ending: str) -> None:
    """Read the bytes as a file."""
    path = folder / f"rows{ending}"
    path.write_bytes(data)
    numbers = [line.number for line in read_lines(path, 0)]
    assert numbers == sorted(set(numbers))


def check_journal(folder: Path, source: random.Random) -> None:
    """Mutate a journal, open it, go on with it, and read what it holds."""
    output = folder / "out.jsonl"
    journal_path(output).unlink(missing_ok=True)
    rows = [
        Row(
            number,
            source.random() < 0.2,
            (number, 0, 1),
            number,
            orjson.dumps({"n": number}),
        )
        for number in source.sample(range(1, 99), source.randrange(12))
    ]
    journal = Journal(output, {"the model": "a"})
    for row in rows:
        journal.append(row)
    journal.close()
    data = journal_path(output).read_bytes()
    lines = [row.to_line() for row in rows] or [b"\n"]
    journal_path(output).write_bytes(mutate(data, lines, source))
    try:
        journal = Journal(output, {"the model": "a"})
    except UsageError:
        return  # the head was hit
    written = {row.to_line() for row in rows}
    assert {row.to_line() for row in journal.read_rows()} <= written, (
        "a row that nobody wrote"
    )
    added = Row(1000, False, (1, 0, 1), 5, b'{"n":1000}')
    journal.append(added)
    journal.close()
    journal = Journal(output, {"the model": "a"})
    assert added in list(journal.read_rows()), "what is written after damage is lost"
    journal.close()


def make_split(folder: Path) -> None:
    """Split six lines into three parts, in `parts`."""
    engines = [b"a/b", b"c", b"a/b", b"c", b"d", b"a/b"]
    lines = [
        b'{"prompt":"x","max_tokens":5,"engine":"%s"}\n' % engine for engine in engines
    ]
    (folder / "all.jsonl").write_bytes(b"".join(lines))
    split_file(folder / "all.jsonl", folder / "parts", SplitOptions(100, 1000))


def sign(manifest: bytes) -> bytes:
    """Put the end of a manifest behind its parts, with a check that fits."""
    check = hashlib.blake2b(manifest, digest_size=8).hexdigest().encode()
    return manifest + b'],"check":"%s"}\n' % check


def check_manifest(folder: Path, source: random.Random) -> None:
    """Mutate a manifest, sign it so that it is looked at, and read it."""
    parts = folder / "parts"
    sound = folder / "sound"
    if not sound.exists():
        make_split(folder)
        sound.write_bytes((parts / MANIFEST).read_bytes())
    data = sound.read_bytes()
    if source.random() < 0.9:
        body = mutate(data.rpartition(b"],")[0], [data], source)
        (parts / MANIFEST).write_bytes(sign(body))
    else:
        (parts / MANIFEST).write_bytes(mutate(data, [data], source))
    for path in _read_any(parts):
        assert (parts / path).resolve().parent.is_relative_to(parts.resolve()), (
            "a way out"
        )
        assert (parts / path).parent != parts and Path(path).name.startswith("request_")


def _read_any(parts: Path) -> set[str]:
    try:
        manifest = read_manifest(parts)
    except UsageError:
        pass
    else:
        numbers = [number for part in manifest.parts for number in part.lines]
        assert (
            len(set(numbers)) == len(numbers) == manifest.num_lines and min(numbers) > 0
        )
    try:
        return read_part_paths(parts)
    except UsageError:
        return set()


def check_words(folder: Path, raw: bytes) -> None:
    """Make a file's name and two flags of a line, and job scripts of them."""
    words = [os.fsdecode(word) for word in raw.replace(b"\0", b"0").split(b" ", 2)]
    name = words[0].replace("/", "_")[:100].strip(".") or "x"
    check_scripts(folder, name, words[1:])


CHAT_TEMPLATE = (
    "{% for each in messages %}{{ each.role }}: {{ each.content }} {% endfor %}"
)


def corpus() -> list[bytes]:
    """Return the lines to begin with."""
    files = [*sorted(QUERIES.glob("*.jsonl")), *sorted((HERE / "lines").iterdir())]
    return [line for file in files for line in file.read_bytes().split(b"\n") if line]


def rounds(seed: int) -> Iterator[int]:
    """Do one thing after another; yield how many were done."""
    source = random.Random(seed)
    lines = corpus()
    limits = RequestLimits(
        2048,
        300,
        config=EngineConfig(strict=bool(seed % 2)),
        chat_template=CHAT_TEMPLATE,
    )
    intake = LineIntake(Intake(Tokenizer(None), limits))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for line in lines:
            check_line(intake, line, 1)
        number = 0
        while True:
            raw = mutate(source.choice(lines), lines, source)
            number += 1
            try:
                check_line(intake, raw, number)
                if number % 20 == 0:
                    check_file(folder, raw, source.choice((".json", ".jsonl")))
                    check_journal(folder, source)
                    check_manifest(folder, source)
                if number % 200 == 0:
                    check_words(folder, raw)
            except Exception:
                bad = HERE / "lines" / f"found_{seed}_{number}"
                bad.write_bytes(raw)
                print(f"seed {seed}, round {number}; the line is in {bad}")
                raise
            yield number


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--seed", default=int(time.time()), help="[default: the time]")
def main(minutes: float, seed: int) -> None:
    """Mutate lines, journals, manifests and job scripts for some minutes."""
    ends_s = time.monotonic() + minutes * 60
    number = next(number for number in rounds(seed) if time.monotonic() > ends_s)
    counts = f"{number:,} lines and {number // 20:,} files, journals and manifests"
    print(f"{counts}: nothing found (seed {seed})")


if __name__ == "__main__":
    main()
