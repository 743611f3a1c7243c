"""The lines of a journal: its head, and rows, which a crash may damage; and their counts.

The first line says of which run the rows are, by what must be the same. A row has a checksum:

    {"line":7,"kind":"answer","tokens":[5,0,3],"input":"8c736521","key":"9f…","check":"1d3a…",
    "record":{…}}

`record` stands there in the very bytes that the output will hold. `key` is `contract.record`'s;
rows of older versions have none. Before `check` may stand a `vector`, in base64.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fminfer.core.errors import UsageError
from fminfer.core.version import DRAWING
from fminfer.files.streams import A_PIPE

# what must be the same for rows to be kept; names are for people
Fingerprint = dict[str, str]
INPUT = "the input"  # in a fingerprint: the bytes of the file
# in a fingerprint: the first run's, which later ones keep
CLOCK = "the time that templates read"
LINE_NUMBERS = "--line-numbers"  # in a fingerprint: records name their lines
FORM = 2  # of a journal. Rows of form 1 had no keys, and are read as well
# digests that differ with --model-name
_DIGEST = re.compile(r"^(?=.*[a-f])[0-9a-f]{16}$")  # of a flag's value; no number
EXPLAINED = frozenset({"the model", "the tokenizer", "--check-model"})


def make_head_line(fingerprint: Fingerprint) -> bytes:
    """Return a journal's first line."""
    return (
        json.dumps({"fminfer_journal": FORM, "fingerprint": fingerprint}).encode()
        + b"\n"
    )


def parse_fingerprint(path: Path, head: bytes) -> Fingerprint:
    """Parse a journal's first line; raise a UsageError if it is none."""
    try:
        fields = json.loads(head)
        fingerprint = fields["fingerprint"]
        is_known = fields["fminfer_journal"] in (1, FORM) and isinstance(
            fingerprint, dict
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_known = False
    if not is_known:
        raise UsageError(
            f"{path}: its first line is damaged, or another version's; what run its "
            "rows are of is not known. Give --restart to answer from the start, or "
            "another --output"
        )
    return {str(name): str(value) for name, value in fingerprint.items()}


def is_of_other_input(old: Fingerprint, new: Fingerprint) -> bool:
    """Tell whether rows are of a run like this over a file, no pipe, that has changed since."""
    inputs = old.get(INPUT), new.get(INPUT)
    is_same = {**old, INPUT: "", CLOCK: ""} == {**new, INPUT: "", CLOCK: ""}
    return is_same and inputs[0] != inputs[1] and not {None, A_PIPE} & {*inputs}


def describe_changes(old: Fingerprint, new: Fingerprint) -> str:
    """Say what differs: flags first, and no digest that differs because a flag does."""
    names = [
        name
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name != CLOCK
    ]
    if "--model-name" in names:
        names = [name for name in names if name not in EXPLAINED]
    return "; ".join(
        _describe_change(name, old.get(name, "not given"), new.get(name, "not given"))
        for name in sorted(names, key=lambda name: not name.startswith("--"))
    )


def _describe_change(name: str, old: str, new: str) -> str:
    """Say how a setting differs; the digests of a flag's values are not shown."""
    if not name.startswith("--"):
        return f"{name} was {old}, is {new}"
    if _DIGEST.fullmatch(old) and _DIGEST.fullmatch(new):
        return f"it had {'other' if ' and ' in name else 'another'} {name}"
    old_text = _DIGEST.sub("given", old)
    new_text = _DIGEST.sub("given", new)
    return f"{name} was {old_text}, is {new_text}"


def check_fingerprint(path: Path, old: Fingerprint, new: Fingerprint) -> None:
    """Raise a UsageError if rows are another run's; it says what differs."""
    if old.get(DRAWING) != new.get(DRAWING):
        raise UsageError(
            f"{path} belongs to a run of another version of fminfer: sampled answers "
            "are drawn in another way now. Finish that run with its own version; or "
            "answer from the start: give --restart (for all inputs), or another "
            "--output"
        )
    if changes := describe_changes(old, new):
        raise UsageError(
            f"{path} belongs to a run that differs: {changes}. Repeat that run's "
            "command to go on with it; or answer from the start: move that file away, "
            "or give --restart (for all inputs), or another --output"
        )


def check_settings(path: Path, old: Fingerprint, new: Fingerprint) -> None:
    """Raise a UsageError if rows are of another run, with what differs. Inputs do not count."""
    check_fingerprint(path, old | {INPUT: ""}, new | {INPUT: ""})


_ROW = re.compile(
    rb'\{"line":(\d{1,18}),"kind":"(answer|error|fault)","tokens":\[(\d+),(\d+),(\d+)\],'
    rb'"input":"([0-9a-f]{8})",(?:"key":"([0-9a-f]{32})",)?(?:"vector":"([0-9A-Za-z+/=]*)",)?'
    rb'"check":"(?P<check>[0-9a-f]{8})","record":'
)


class Row(NamedTuple):
    """A finished row. Tokens: of the prompt, those of it not computed again, and drawn ones."""

    number: int  # of the input's line, from 1
    is_error: bool
    tokens: tuple[int, int, int]
    input_crc: int  # of the input's line
    record: bytes
    # an error that another run may not meet, such as too little memory
    is_ours: bool = False
    key: bytes = b""  # of the request and its draws; b"": not known
    # float32 numbers that stand beside the record, in a file of their own
    vector: bytes = b""

    @property
    def kind(self) -> str:
        return ("fault" if self.is_ours else "error") if self.is_error else "answer"

    def to_line(self) -> bytes:
        """Return the journal's line, with its newline."""
        head = (
            b'{"line":%d,"kind":"%s","tokens":[%d,%d,%d],"input":"%08x",%s%s"check":"'
            % (
                self.number,
                self.kind.encode(),
                *self.tokens,
                self.input_crc,
                b'"key":"%s",' % self.key.hex().encode() if self.key else b"",
                b'"vector":"%s",' % b64encode(self.vector) if self.vector else b"",
            )
        )
        check = zlib.crc32(self.record, zlib.crc32(head))
        return head + b'%08x","record":' % check + self.record + b"}\n"


def parse_row(line: bytes) -> Row | None:
    """Parse a line of a journal; None: it is torn or damaged."""
    match = _ROW.match(line)
    if match is None or line[-2:] != b"}\n":
        return None
    record = line[match.end() : -2]
    if zlib.crc32(record, zlib.crc32(line[: match.start("check")])) != int(
        match["check"], 16
    ):
        return None
    number, kind, *tokens, input_crc, key, vector, _ = match.groups()
    return Row(
        int(number),
        kind != b"answer",
        (int(tokens[0]), int(tokens[1]), int(tokens[2])),
        int(input_crc, 16),
        record,
        kind == b"fault",
        bytes.fromhex(key.decode()) if key else b"",
        b64decode(vector or b""),
    )


@dataclass(slots=True, frozen=True)
class RowCounts:
    """Rows that have their record, and how many of these are errors."""

    num_rows: int = 0
    num_errors: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.num_rows + other.num_rows, self.num_errors + other.num_errors
        )

    def minus(self, other: RowCounts) -> RowCounts:
        """Subtract rows that are counted elsewhere."""
        return RowCounts(
            max(0, self.num_rows - other.num_rows),
            max(0, self.num_errors - other.num_errors),
        )


@dataclass(slots=True)
class Counts:
    """What was done of one input. Tokens are those of answered lines, as in `usage`."""

    num_rows: int = 0  # known so far: all of them once the input is read
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kept: RowCounts = RowCounts()  # of those, answered or refused by other runs

    @property
    def done(self) -> RowCounts:
        return RowCounts(self.num_completed + self.num_failed, self.num_failed)

    @property
    def by_this_run(self) -> RowCounts:
        """Count what this run has done itself."""
        return self.done.minus(self.kept)

    def add(self, *, is_error: bool, tokens: Sequence[int]) -> None:
        """Count a record; tokens: of the prompt, those not computed again, drawn ones."""
        self.num_failed += is_error
        self.num_completed += not is_error
        self.input_tokens += tokens[0]
        self.cached_tokens += tokens[1]
        self.output_tokens += tokens[2]

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those not computed again, and drawn ones."""
        return self.input_tokens, self.cached_tokens, self.output_tokens

    def start_from(self, earlier: Counts) -> None:
        """Begin with what earlier runs have done."""
        self.num_completed = earlier.num_completed
        self.num_failed = earlier.num_failed
        self.input_tokens, self.cached_tokens, self.output_tokens = earlier.tokens
        self.kept = self.done

    def adopt_completed(self, whole: Counts) -> None:
        """Count the rows with which another run has completed the output.

        Rows of this run stay its own.
        """
        by_this_run = self.by_this_run
        self.num_rows = whole.num_rows
        self.num_completed = whole.num_completed
        self.num_failed = whole.num_failed
        self.kept = self.done.minus(by_this_run)
