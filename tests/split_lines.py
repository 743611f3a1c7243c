"""Lines of all kinds for the tests of split and merge, and a stub that answers parts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import Record
from fminfer.contract.request import parse_request
from fminfer.core.errors import RequestError
from fminfer.files.output_paths import answers_path
from fminfer.job.journaled_input import JournaledInput

ENGINES = ["gpt-j-6b", "org/模型", "a b", "..", None, "default", "%", "org"]
BAD = [
    b'{"prompt": "torn',
    b"\xff\xfe\r",
    b"[1]",
    b'{"prompt": "comma",}',
    b"\x00",
    b"null",
]


def make_lines(count: int, source: random.Random) -> list[bytes]:
    """Return requests in all shapes, blank and bad lines; each of its own bytes, if not
    blank."""
    lines = []
    for number in range(count):
        kind = source.random()
        if kind < 0.05:
            lines.append(source.choice([b"", b"\r", b"  \t"]))
        elif kind < 0.1:
            lines.append(source.choice(BAD) + b"%d" % number)
        else:
            lines.append(_make_request(number, source))
    return lines


def answer_part(part: Path) -> None:
    """Answer a part as a run does: through its journal, with errors and a status file."""
    file = JournaledInput(
        part, 0, answers_path(part), RunTerms("stub", {}, started_s=0.0)
    )
    file.begin()
    for line in file.read_lines(lambda _: None):
        envelope = parse_envelope(line)
        try:
            if envelope.error is not None:
                raise envelope.error
            parse_request(envelope.fields, max_logprobs=100)
        except RequestError as error:
            file.add(Record(line, envelope, error=error))
        else:
            file.add(Record(line, envelope, {"choices": [{"text": f"é{line.number}"}]}))


def _make_request(number: int, source: random.Random) -> bytes:
    request: dict[str, Any] = {"prompt": f"{number} " + "x" * source.randrange(60)}
    if (engine := source.choice(ENGINES)) is not None:
        request[source.choice(["engine", "model"])] = engine
    request["max_tokens"] = source.choice([1, 1.0, 16, 200])
    request["stop"] = source.choice(
        ["\n", ["\n"], ["b", "a"], ["a", "b", "a"], None, []]
    )
    request["temperature"] = source.choice([0, 0.0, 1, 3, "hot"])
    if source.random() < 0.1:
        request["prompt"] = [number, 5, 7]
    if source.random() < 0.05:
        del request["prompt"]
        request["user"] = str(number)
    names = list(request)
    source.shuffle(names)
    request = {name: request[name] for name in names}
    shape = source.random()
    if shape < 0.2 and "prompt" in request:
        line: dict[str, Any] = {"request": request, "scenario": number, "line": 5}
    elif shape < 0.4:
        line = {
            "custom_id": f"id{number // 2}",
            "method": source.choice(["POST", "POST", "GET"]),
        }
        line |= {"url": "/v1/completions", "body": request}
    else:
        line = request
    spaced = json.dumps(line, ensure_ascii=source.random() < 0.5)
    return spaced.encode() + source.choice([b"", b"", b"\r", b" "])
