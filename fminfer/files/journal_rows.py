"""One row of a journal: a line of JSON with a checksum, which a crash may tear or damage.

    {"line":7,"kind":"answer","tokens":[5,0,3],"input":"8c736521","key":"9f…","check":"1d3a…",
    "record":{…}}

`record` stands there in the very bytes that the output will hold. `key` is `contract.record`'s, by
which a run over a changed file finds the answer. Rows of older versions have none. Between it and
`check`, a run that writes vectors as .npy has `vector`, in base64.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from typing import NamedTuple

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
    is_ours: bool = False  # an error that another run may not meet, such as too little memory
    key: bytes = b""  # of the request and its draws; b"": not known
    vector: bytes = b""  # float32 numbers that stand beside the record, in a file of their own

    @property
    def kind(self) -> str:
        return ("fault" if self.is_ours else "error") if self.is_error else "answer"

    def to_line(self) -> bytes:
        """Return the journal's line, with its newline."""
        head = b'{"line":%d,"kind":"%s","tokens":[%d,%d,%d],"input":"%08x",%s%s"check":"' % (
            self.number,
            self.kind.encode(),
            *self.tokens,
            self.input_crc,
            b'"key":"%s",' % self.key.hex().encode() if self.key else b"",
            b'"vector":"%s",' % b64encode(self.vector) if self.vector else b"",
        )
        check = zlib.crc32(self.record, zlib.crc32(head))
        return head + b'%08x","record":' % check + self.record + b"}\n"


def read_row(line: bytes) -> Row | None:
    """Read a line of a journal; None: it is torn or damaged."""
    match = _ROW.match(line)
    if match is None or line[-2:] != b"}\n":
        return None
    record = line[match.end() : -2]
    if zlib.crc32(record, zlib.crc32(line[: match.start("check")])) != int(match["check"], 16):
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
