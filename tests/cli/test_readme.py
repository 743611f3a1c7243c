"""The commands of README and docs/running.md, run in order as a newcomer would paste them."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from examples.label_reviews import read_reviews
from fminfer.cli.app import main
from tests.conftest import make_model, save_byte_tokenizer
from tests.forked import programs

ROOT = Path(__file__).parent.parent.parent
FAKES = Path(__file__).parent.parent / "fakes"
PAGES = [ROOT / "README.md", ROOT / "docs" / "running.md"]
# What a test has no machine, network or minutes for. Of those that call fminfer, flags
# are parsed.
NOT_RUN = re.compile(
    r"scripts/|git |pip |python3 -m venv|\.venv/|torchrun |srun |python -m fminfer"
    r"|fminfer serve |.*--rendezvous|.*s3://|.*--calibrate"
)
# Stand-ins for the reviews that pip fetches: number, mean rating, text.
REVIEWS = """1_1\t-1.5\tThe lid broke in a week.
1_2\t0.9\tIt is a lid.
1_3\t1.0\tGreat {lid}!
"""
SHIM = """#!/bin/sh
{fminfer} "$@"
status=$?
echo "$status $*" >> {log}
exit $status
"""


def blocks(language: str = "bash") -> list[str]:
    found = (
        re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)
        for page in PAGES
    )
    return [block for page in found for block in page]


def commands(block: str) -> list[str]:
    """Split a block into commands; what follows << is part of its own."""
    joined = block.replace("\\\n", " ")
    return re.findall(
        r"^[^\n]*<<'END'\n.*?\nEND\n|^[^\n]+\n", joined, flags=re.S | re.M
    )


def save_reviews(package: Path) -> None:
    """Write a package with the reviews where vaderSentiment 0.5 has them."""
    content = REVIEWS.encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    with zipfile.ZipFile(package, "w") as file:
        file.writestr(
            "vaderSentiment-0.5/additional_resources/hutto.tar.gz", packed.getvalue()
        )


def save_model(folder: Path) -> None:
    """Save a random llama of bytes: the example needs room in the context, and an EOS."""
    make_model("llama").save_pretrained(folder)
    save_byte_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 1024, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_flags_of_every_command_are_known() -> None:
    """Also of those that no test can run."""
    found = 0
    for line in "".join(blocks()).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "fminfer" not in words or words[0] in ("cat", "git", "pip", "python"):
            continue
        name, *rest = words[words.index("fminfer") + 1 :]
        command = main.commands[name]
        arguments = [word.replace("$MODEL", "model") for word in rest]
        if "--" in arguments:  # submit's: the rest goes to run
            place = arguments.index("--")
            main.commands["run"].make_context("run", arguments[place + 1 :])
        if "--help" not in arguments:
            command.make_context(name, arguments)
        found += 1
    assert found >= 20


@pytest.mark.timeout(300)
def test_every_command_works_after_those_before_it(tmp_path: Path) -> None:
    """The second example failed after the first: "belongs to a run that differs"."""
    save_model(tmp_path / "model")
    script = []
    for command in [each for block in blocks() for each in commands(block)]:
        if command.startswith("MODEL="):
            command = f"MODEL={tmp_path / 'model'}\n"
        if not NOT_RUN.match(command):
            script.append(command)
    log = tmp_path / "log"
    path = programs(tmp_path / "programs")
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "fminfer").write_text(
        SHIM.format(fminfer=path.partition(":")[0] + "/fminfer", log=log)
    )
    (shims / "fminfer").chmod(0o755)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    save_reviews(tmp_path / "here" / "vaderSentiment-0.5.zip")
    environment = os.environ | {
        "PATH": f"{shims}:{FAKES}:{path}",
        "PYTHONPATH": str(ROOT),
        "FAKE_CLUSTER": str(tmp_path / "cluster"),
    }
    done = subprocess.run(
        ["bash", "-c", "".join(script)],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
    )
    told = log.read_text().splitlines()
    runs = [line for line in script if line.startswith("fminfer ")]
    assert len(told) == len(runs) >= 14, done.stderr
    for line in told:
        # The second request is wrong on purpose.
        has_errors = re.match(r"\d+ (run|check|merge) .*(requests\.jsonl|parts)", line)
        assert line[0] == ("3" if has_errors else "0"), f"{line}\n{done.stderr}"
    assert '"text":" north east east east east east"' in done.stdout
    assert "it must be from 0 to 2" in done.stdout
    check_labels(tmp_path / "here", "\n".join(blocks("python")))


def check_labels(folder: Path, examples: str) -> None:
    """Hold the table of the README's run to what the README says, as polars and pandas do."""
    modules = {"pl": pytest.importorskip("polars"), "pd": pytest.importorskip("pandas")}
    shown = re.findall(r"^labels = .*?^right = [^\n]*", examples, flags=re.S | re.M)
    rights = []
    for example in shown:
        names: dict[str, Any] = dict(modules)
        exec(
            example.replace('"labels.parquet"', repr(f"{folder}/labels.parquet")), names
        )
        rights.append(names["right"])
        labels = names["labels"]
        assert list(labels["text"]) == ["The lid broke in a week.", "Great {lid}!"]
        for row in range(2):
            answer = labels["answer"][row].strip()
            assert labels[answer][row] == labels["label_probability"][row] >= 0.5
        assert len(names["unsure"]) == sum(
            each < 0.6 for each in labels["label_probability"]
        )
    assert len(rights) == 2 and rights[0] == rights[1]
    assert "Accuracy" in (folder / "labels.html").read_text()


def test_the_example_writes_clear_reviews(tmp_path: Path) -> None:
    """The second review is left out: it has no clear rating."""
    save_reviews(tmp_path / "package.zip")
    assert list(read_reviews(tmp_path / "package.zip")) == [
        ("The lid broke in a week.", "negative"),
        ("Great {lid}!", "positive"),
    ]


def test_pandas_reads_answers_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dtype=False, ids such as 007 became numbers."""
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    row = {
        "request": {"prompt": "a"},
        "result": {"choices": [{"text": " b"}]},
        "id": "007",
    }
    (tmp_path / "output_requests.jsonl").write_text(json.dumps(row) + "\n")
    (shown,) = [block for block in blocks("python") if "pd.read_json" in block]
    found = {"pd": pandas}
    exec(shown, found)
    assert list(found["texts"]) == [" b"] and list(found["answers"]["id"]) == ["007"]


def test_the_shell_completes_commands_and_flags() -> None:
    (line,) = re.findall(r"eval \"\$\(([^)]+)\)", PAGES[1].read_text())
    name, value = line.split()[0].split("=")
    words = {"COMP_WORDS": "fminfer run --outp", "COMP_CWORD": "2"}
    asked = words | {name: value.replace("source", "complete")}
    found = CliRunner().invoke(main, prog_name="fminfer", env=asked)
    assert found.output.split() == ["plain,--output"]
    script = CliRunner().invoke(main, prog_name="fminfer", env={name: value})
    assert "complete -o nosort -F" in script.output


def test_linked_files_and_sections_exist() -> None:
    """Of every page; a link to a section is made of its heading, as GitHub does."""
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text()
        for path, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {path}"
            if section:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.M)
                names = [
                    re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-")
                    for each in headings
                ]
                assert section in names, f"{page.name}: {path}#{section}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("text", [None, "hello", "{}\n", "[]\n"])
def test_the_labels_example_names_a_wrong_file(
    tmp_path: Path, text: str | None
) -> None:
    """It ended with a traceback of Python."""
    path = tmp_path / "wrong"
    if text is not None:
        path.write_text(text)
    script = ROOT / "examples" / "label_reviews.py"
    done = subprocess.run(
        [sys.executable, script, path], capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and str(path) in done.stderr
        and "Traceback" not in done.stderr
    )
