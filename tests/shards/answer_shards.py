"""Answers a folder's files as a run does, but with a word instead of a model: a second a start.

`python answer_shards.py FOLDER LOG`: each row that is safely written is noted in LOG.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from fminfer.answers.carrying_over import RunTerms
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import StoppedError
from fminfer.files.input_folders import find_inputs
from fminfer.files.output_paths import OutputPaths, make_output_paths
from fminfer.job.journaled_input import JournaledInput
from fminfer.job.shared_folder import SharedFiles

PAUSE_S = 0.03  # at most, before a row


def share(
    folder: Path,
    output: Path | None = None,
    *,
    is_watching: bool = False,
    restart: bool = False,
) -> SharedFiles:
    def find() -> OutputPaths:
        return make_output_paths(find_inputs([folder], may_be_empty=True), output)

    return SharedFiles(
        find, RunTerms("none", {}, restart=restart), is_watching=is_watching
    )


def answer_all(file: JournaledInput, lines: Iterable[Line] | None = None) -> None:
    """Answer lines of a file, all of them if none are given."""
    for line in lines or file.read_lines(lambda line: None):
        file.add(
            Record(
                line, parse_envelope(line), result={"choices": [], "said": line.number}
            )
        )


def main(folder: Path, log: Path) -> None:
    files = share(folder)
    files.scan()
    with log.open("a", buffering=1) as notes:
        for file in files.iterate_files():
            if file is None:
                time.sleep(PAUSE_S)
                continue
            for line in file.read_lines(lambda line: None):
                time.sleep(random.uniform(0, PAUSE_S))
                file.add(
                    Record(line, parse_envelope(line), result={"said": line.number})
                )
                if not file.is_lost:
                    notes.write(f"{file.path.name} {line.number}\n")
            file.abandon(StoppedError("the end"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
