"""Tells by its first lines whether a file holds requests, answers of a run, or neither."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from fminfer.contract.record import parse_record
from fminfer.core.errors import FminferError
from fminfer.files.line_reader import read_first_bytes, read_lines
from fminfer.files.streams import (
    PART_NAME,
    explain_bytes,
    explain_text,
    find_split_folder,
    read_changed_ns,
)

NUM_LOOKED_AT = 5  # lines that decide whether a file holds requests
REQUEST_KEYS = frozenset(
    {"prompt", "request", "body", "messages", "max_tokens", "input"}
)
Kind = Literal["answers", "requests", ""]  # what a file's first lines hold


def holds_answers(path: Path) -> bool:
    """Tell whether a file is one that fminfer wrote, by its first line."""
    return classify_lines(path)[0] == "answers"


def holds_requests(path: Path) -> bool:
    """Tell whether one of a file's first lines looks like a request."""
    return classify_lines(path)[0] == "requests"


def describe_trouble(path: Path) -> str:
    """Say what a file without JSON lines is, and what to do; "": it may hold JSON lines."""
    return classify_lines(path)[1]


def classify_lines(path: Path) -> tuple[Kind, str]:
    """Return what a file's first lines hold, and what is wrong with it."""
    if not path.is_file():  # a pipe can be read only once
        return "requests", ""
    try:
        return _classify_file(path, read_changed_ns(path))
    except FminferError:  # told where it is opened
        return "", ""


@lru_cache(maxsize=100_000)
def _classify_file(path: Path, changed_at: int) -> tuple[Kind, str]:
    """Return what a file's first lines hold, and what is wrong. A changed file is read anew."""
    head = read_first_bytes(path)
    # which may end in CR
    is_spread = ".json" in path.suffixes and head.lstrip().startswith(b"{")
    # a part may hold wrong lines alone
    is_known = is_spread or PART_NAME.fullmatch(path.name)
    trouble = explain_bytes(head) or ("" if is_known else explain_text(head))
    if trouble and not find_split_folder(path):
        return "", trouble
    kind: Kind = ""
    for number, line in enumerate(islice(read_lines(path, 0), NUM_LOOKED_AT)):
        try:
            fields = parse_record(line.raw)
        except ValueError:
            continue
        if number == 0 and _is_record(fields):
            return "answers", ""
        if REQUEST_KEYS & fields.keys():
            kind = "requests"
    return kind, ""


def _is_record(fields: dict[str, object]) -> bool:
    """Tell whether a line is one of an output or of an errors file, in any shape."""
    result = fields.get("result")
    response = fields.get("response")
    if "request" in fields and isinstance(result, dict):
        made = {"data", "results", "output"} & result.keys() and "usage" in result
        return bool(made) or "choices" in result
    if str(fields.get("id")).startswith("batch_req_") and isinstance(response, dict):
        return "status_code" in response
    return {"line", "custom_id", "error", "retryable", "request"} <= fields.keys()
