"""A journal's first line: it says of which run the rows are, by what must be the same."""

from __future__ import annotations

import json
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.core.version import DRAWING
from fminfer.files.streams import A_PIPE

Fingerprint = dict[str, str]  # what must be the same for rows to be kept; names are for people
INPUT = "the input"  # in a fingerprint: the bytes of the file
CLOCK = "the time that templates read"  # in a fingerprint: the first run's, which later ones keep
FORM = 2  # of a journal. Rows of form 1 had no keys, and are read as well
EXPLAINED = frozenset(
    {"the model", "the tokenizer", "--check-model"}
)  # digests that differ with --model-name


def head_line(fingerprint: Fingerprint) -> bytes:
    """Return a journal's first line."""
    return json.dumps({"fminfer_journal": FORM, "fingerprint": fingerprint}).encode() + b"\n"


def read_fingerprint(path: Path, head: bytes) -> Fingerprint:
    """Read a journal's first line.

    Raises:
        UsageError: it is none.
    """
    try:
        fields = json.loads(head)
        found = fields["fingerprint"]
        is_known = fields["fminfer_journal"] in (1, FORM) and isinstance(found, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_known = False
    if not is_known:
        raise UsageError(
            f"{path}: its first line is damaged, or another version's; what run its rows are of is "
            "not known. Give --restart to answer from the start, or another --output"
        )
    return {str(name): str(value) for name, value in found.items()}


def is_of_other_input(old: Fingerprint, new: Fingerprint) -> bool:
    """Tell whether rows are of a run like this over a file that has changed since.

    What a pipe held is not known.
    """
    inputs = old.get(INPUT), new.get(INPUT)
    is_same = {**old, INPUT: "", CLOCK: ""} == {**new, INPUT: "", CLOCK: ""}
    return is_same and inputs[0] != inputs[1] and not {None, A_PIPE} & {*inputs}


def show_changes(old: Fingerprint, new: Fingerprint) -> str:
    """Say what differs: flags first, and no digest that differs because a flag does."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name) and name != CLOCK]
    if "--model-name" in names:
        names = [name for name in names if name not in EXPLAINED]
    return "; ".join(
        f"{name} was {old.get(name, 'not given')}, is {new.get(name, 'not given')}"
        for name in sorted(names, key=lambda name: not name.startswith("--"))
    )


def check_fingerprint(path: Path, old: Fingerprint, new: Fingerprint) -> None:
    """Refuse rows of another run.

    Raises:
        UsageError: what differs.
    """
    if old.get(DRAWING) != new.get(DRAWING):
        raise UsageError(
            f"{path} belongs to a run of another version of fminfer: sampled answers are drawn in "
            "another way now. Finish that run with its own version; or answer from the start: give "
            "--restart (for all inputs), or another --output"
        )
    if changes := show_changes(old, new):
        raise UsageError(
            f"{path} belongs to a run that differs: {changes}. Repeat that run's command to go on "
            "with it; or answer from the start: move that file away, or give --restart (for all "
            "inputs), or another --output"
        )
