"""The commands over which faults go: what stands in their folder, and what they are to leave."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import fminfer
from tests.faults.preload import Plan, Warm

Words = list[str | Path]
Result = dict[str, Any]  # of each file that a command leaves, what has to be equal
DEMO = Path(fminfer.__file__).parent / "demo_model"
# What tells when and how fast an answer came, and beside what.
VOLATILE = ("request_time", "created", "prompt_tokens_details")
FLAGS: Words = ["-q", "--dtype", "float32", "--max-rows", "8"]


@dataclass(frozen=True)
class Command:
    """A command, and how it is judged.

    Args:
        words: of it, given its folder.
        read: what it has left, as it must be equal; raises what is wrong.
        statuses: with which it ends well.
        beside: of another one that runs at the same time.
        leaves: names of what may be left.
        is_synced: what it has left is on the disk when it ends; else it can be made again.
        writes: it does not only look.
    """

    name: str
    prepare: Callable[[Warm], None]
    words: Callable[[Path], Words]
    read: Callable[[Path], Result]
    statuses: tuple[int, ...] = (0,)
    beside: Callable[[Path], Words] | None = None
    leaves: tuple[str, ...] = ()
    is_synced: bool = True
    writes: bool = True


def plain(value: Any) -> Any:
    """Return a record without what differs between runs."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in VOLATILE}
    return [plain(each) for each in value] if isinstance(value, list) else value


def records(path: Path) -> list[Any]:
    """Return the records of a file."""
    return [plain(json.loads(line)) for line in path.read_bytes().splitlines()]


def outputs(folder: Path) -> Result:
    """Read all outputs, errors and vectors of a folder, and see that the status files say so."""
    found: Result = {}
    for path in sorted(folder.rglob("out*")):
        if path.is_dir() or path.name.endswith((".journal", ".ordered", ".new")):
            continue
        name = str(path.relative_to(folder))
        if path.name.endswith(".status.json"):
            status = json.loads(path.read_bytes())
            found[name] = [
                status["status"],
                status["request_counts"],
                status["fminfer"]["limit"],
            ]
        elif path.suffix == ".jsonl":
            found[name] = records(path)
        elif path.suffix == ".npy":
            found[name] = path.read_bytes()
    return found


def line_of(number: int) -> dict[str, Any]:
    """Return a line: sampled or not, equal to others or not."""
    row: dict[str, Any] = {"prompt": f"room {number % 5}", "max_tokens": 3 + number % 4}
    return row | {"ignore_eos": True, "temperature": 0.9 if number % 2 else 0}


def write_lines(path: Path, num_lines: int, *, has_errors: bool = True) -> None:
    """Write lines, of which two are wrong."""
    lines = [json.dumps(line_of(number)) for number in range(num_lines)]
    path.write_text(
        "\n".join([*lines, *(['{"prompt": 5}', "no json"] * has_errors)]) + "\n"
    )


def _ok(warm: Warm, words: Words, *statuses: int) -> None:
    """Run a command that prepares a folder."""
    found = warm.run(words)
    assert found.status in (statuses or (0,)), found


def _run(folder: Path) -> Words:
    return ["run", folder / "in.jsonl", "--output", folder / "out.jsonl", *FLAGS]


def _write_input(warm: Warm) -> None:
    write_lines(warm.folder / "in.jsonl", 10)


def _kill_run(warm: Warm) -> None:
    _write_input(warm)
    assert warm.run(_run(warm.folder), Plan("pwrite", 6, "kill")).status == -9


def _grow(warm: Warm) -> None:
    source = warm.folder / "in.jsonl"
    _write_input(warm)
    _ok(warm, _run(warm.folder), 3)
    lines = source.read_text().splitlines()
    more = [json.dumps(line_of(number)) for number in range(20, 24)]
    source.write_text("\n".join([*more[:2], *lines[1:], *more[2:]]) + "\n")


def _run_folder(folder: Path) -> Words:
    return ["run", folder / "ins", "--output", folder / "outs", *FLAGS]


def _write_folder(warm: Warm) -> None:
    (warm.folder / "ins").mkdir()
    (warm.folder / "outs").mkdir()
    for number in range(3):
        write_lines(warm.folder / "ins" / f"part{number}.jsonl", 4 + number)


def _folder_outputs(folder: Path) -> Result:
    return outputs(folder / "outs") | {
        str(path.relative_to(folder)): records(path)
        for path in folder.glob("outs/*.jsonl")
    }


def _kill_folder(warm: Warm) -> None:
    _write_folder(warm)
    assert warm.run(_run_folder(warm.folder), Plan("pwrite", 9, "kill")).status == -9


def _split(folder: Path) -> Words:
    words: Words = [
        "split",
        "--input-file",
        folder / "in.jsonl",
        "--output-dir",
        folder / "parts",
    ]
    return [
        *words,
        "--generate-token-chunk-size",
        "12",
        "--min-generate-token",
        "1",
        "--flat",
    ]


def _read_parts(folder: Path) -> Result:
    files = [path for path in sorted((folder / "parts").rglob("*")) if path.is_file()]
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        # the repeat removes them
        if path.parent.suffix != ".claim" and path.suffix != ".new"
    }
    manifest = json.loads(found.pop("parts/manifest.json"))
    return found | {
        "manifest": {key: manifest[key] for key in manifest if "time" not in key}
    }


def _prepare_merge(warm: Warm) -> None:
    _write_input(warm)
    _ok(warm, _split(warm.folder))
    _ok(warm, ["run", warm.folder / "parts", *FLAGS], 3)


def _merge(folder: Path) -> Words:
    return ["merge", "--input-dir", folder / "parts", "--output", folder / "out.jsonl"]


def _copy_model(warm: Warm) -> None:
    shutil.copytree(DEMO, warm.folder / "model")


def _quantize(folder: Path) -> Words:
    return ["quantize", "--model-name", folder / "model", "--output", folder / "small"]


def _read_small(folder: Path) -> Result:
    paths = sorted((folder / "small").rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.is_file()
    }


def _prepare_load(warm: Warm) -> None:
    _copy_model(warm)
    write_lines(warm.folder / "in.jsonl", 4)


def _load(folder: Path) -> Words:
    return [*_run(folder), "--model-name", folder / "model"]


def _save_bert(folder: Path) -> NoReturn:
    from tests.vector_models import save_bert

    save_bert(folder)
    os._exit(0)


def _prepare_embeddings(warm: Warm) -> None:
    model = warm.scratch / "bert"
    if not model.exists():
        assert (
            warm.wait(warm.fork(lambda: _save_bert(model), warm.scratch / "said")) == 0
        )
    shutil.copytree(model, warm.folder / "model")
    lines = [{"input": f"w{number} w{number % 7}"} for number in range(9)]
    text = "\n".join(map(json.dumps, lines))
    (warm.folder / "in.jsonl").write_text(f'{text}\n{{"input": 5}}\n')


def _embed(folder: Path) -> Words:
    return [*_run(folder), "--model-name", folder / "model", "--embeddings", "npy"]


def _run_cached(folder: Path) -> Words:
    return [*_run(folder), "--result-cache", folder / "kept"]


def _prepare_cache(warm: Warm) -> None:
    _write_input(warm)
    other = warm.scratch / "other.jsonl"
    write_lines(other, 5, has_errors=False)
    words: Words = [
        "run",
        other,
        "--output",
        warm.scratch / "answers.jsonl",
        "--restart",
        *FLAGS,
    ]
    _ok(warm, [*words, "--result-cache", warm.folder / "kept"])


def _prepare_report(warm: Warm) -> None:
    _write_input(warm)
    _ok(warm, _run(warm.folder), 3)


def _report(folder: Path) -> Words:
    return ["report", folder / "out.jsonl", "--out", folder / "page.html"]


def _read_page(folder: Path) -> Result:
    page = (folder / "page.html").read_text()
    assert page.rstrip().endswith("</html>"), "the page is cut off"
    times = r"\d\d:\d\d(:\d\d)?|\d{4}-\d\d-\d\d|[\d.]+ ?(ms|s)\b"
    return {"page.html": re.sub(times, "", page)}


def _run_told(folder: Path) -> Words:
    beside: Words = ["--stats", folder / "stats.json", "--trace", folder / "trace.json"]
    return [*_run(folder), *beside, "--report", folder / "page.html"]


def _read_told(folder: Path) -> Result:
    # They are of the run that wrote them, and none are written of one that was complete before.
    for name in ("stats.json", "page.html"):
        if (path := folder / name).exists():
            text = path.read_text().rstrip()
            assert text.endswith(("}", "</html>")), f"{name} is cut off"
    return outputs(folder)


def _status(folder: Path) -> Words:
    return ["status", folder / "outs"]


def _check(folder: Path) -> Words:
    return ["check", folder / "in.jsonl"]


def _nothing(_: Path) -> Result:
    return {}


COMMANDS: Sequence[Command] = (
    Command("run", _write_input, _run, outputs, (3,)),
    Command("resume", _kill_run, _run, outputs, (3,)),
    Command("grown", _grow, _run, outputs, (3,)),
    Command(
        "workers", _write_folder, _run_folder, _folder_outputs, (0, 3), _run_folder
    ),
    Command("claims", _kill_folder, _run_folder, _folder_outputs, (0, 3), _run_folder),
    Command("load", _prepare_load, _load, outputs, (3,)),
    Command("embeddings", _prepare_embeddings, _embed, outputs, (3,)),
    Command("kept", _prepare_cache, _run_cached, outputs, (3,), leaves=("kept",)),
    Command("told", _write_input, _run_told, _read_told, (3,)),
    Command("split", _write_input, _split, _read_parts),
    Command("merge", _prepare_merge, _merge, outputs, (3,)),
    Command("quantize", _copy_model, _quantize, _read_small),
    Command("report", _prepare_report, _report, _read_page, is_synced=False),
    Command("status", _kill_folder, _status, _nothing, (0, 1), writes=False),
    Command("check", _write_input, _check, _nothing, (0, 1, 3), writes=False),
)
