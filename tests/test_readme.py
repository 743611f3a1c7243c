"""The README's commands, run in their order as a newcomer would paste them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fminfer.cli import main
from tests.conftest import make_model, save_byte_tokenizer
from tests.forked import programs

ROOT = Path(__file__).parent.parent
FAKES = Path(__file__).parent / "fakes"
# What a test has no machine, network or minutes for. Of those that call fminfer, flags are parsed.
NOT_RUN = re.compile(
    r"scripts/|pip |python3 -m venv|\.venv/|export PATH|torchrun |srun |python -m fminfer"
    r"|.*--rendezvous|.*s3://"
)
SHIM = """#!/bin/sh
{fminfer} "$@"
status=$?
echo "$status $*" >> {log}
exit $status
"""


def blocks() -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def commands(block: str) -> list[str]:
    """Split a block into commands; what follows << is part of its own."""
    joined = block.replace("\\\n", " ")
    return re.findall(r"^[^\n]*<<'END'\n.*?\nEND\n|^[^\n]+\n", joined, flags=re.S | re.M)


def test_the_flags_of_every_command_are_known() -> None:
    """Also of those that no test can run."""
    found = 0
    for line in "".join(blocks()).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "fminfer" not in words or words[0] in ("cat", "pip", "python"):
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
    assert found >= 12


@pytest.mark.timeout(300)
def test_every_command_works_after_those_before_it(tmp_path: Path) -> None:
    """The second example failed after the first: "belongs to a run that differs"."""
    make_model("llama").save_pretrained(tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    script = []
    for command in [each for block in blocks() for each in commands(block)]:
        if command.startswith("MODEL="):
            command = f"MODEL={tmp_path / 'model'}\n"
        if not NOT_RUN.match(command):
            script.append(command)
    log = tmp_path / "log"
    path, shims = programs(tmp_path / "programs"), tmp_path / "shims"
    shims.mkdir()
    (shims / "fminfer").write_text(
        SHIM.format(fminfer=path.partition(":")[0] + "/fminfer", log=log)
    )
    (shims / "fminfer").chmod(0o755)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "here").mkdir()
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
    assert len(told) == len(runs) >= 10, done.stderr
    for line in told:
        # The second request is wrong on purpose.
        has_errors = re.match(r"\d+ (run|check|merge)(?! --help| --prompt| .*--input-seq)", line)
        assert line[0] == ("3" if has_errors else "0"), f"{line}\n{done.stderr}"
    assert '"text":" north east east east east east"' in done.stdout
    assert "it must be from 0 to 2" in done.stdout


def test_every_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert examples
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("1 ")


def test_linked_files_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / path).exists(), path
