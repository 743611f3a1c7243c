"""Job scripts: what bash reads, templates of users, and those that docs/clusters.md shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fminfer.cli.app import main
from fminfer.cluster.job_scripts import TEMPLATES, ScriptTemplate, quote
from fminfer.core.errors import UsageError
from tests.conftest import make_model, num_examples, save_byte_tokenizer
from tests.fakes import cluster
from tests.fuzz.scripts import check_scripts

ROOT = Path(__file__).parent.parent.parent
FAKES = Path(__file__).parent.parent / "fakes"
DOCS = ROOT / "docs" / "clusters.md"
# Anything but a NUL, which neither a file's name nor an argument can hold; also bytes
# that are no text, as os.fsdecode gives them.
PIECES = st.sampled_from(
    ["'", '"', "$(false)", "`", "\\", "\n", "\r", "#", "{{", "%}", "~", "*", "\udcff"]
)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.lists(st.text(CHARACTERS, max_size=4) | PIECES).map("".join)
NAME = TEXT.map(lambda text: text.replace("/", "_")).filter(
    lambda text: text not in ("", ".", "..")
)


@settings(
    max_examples=num_examples(75),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=NAME, flags=st.lists(TEXT, max_size=3))
@example(name="a\nEOF\n'", flags=["", "-", "'\n'", "$HOME"])
# bash's read drops a byte of it where it expects UTF-8
@example(name="\x01\udcec\x01", flags=[])
def test_bash_reads_what_was_meant(name: str, flags: list[str], tmp_path: Path) -> None:
    check_scripts(tmp_path, name, flags)


@given(words=st.lists(TEXT))
def test_quoted_words_are_read_back(words: list[str]) -> None:
    quoted = quote(words)
    assert not re.search(r"[\n\r]", quoted)
    if "$'" not in quoted:  # which bash alone reads: see the test above
        assert shlex.split(quoted) == words


@pytest.mark.parametrize("scheduler", ["slurm", "lsf"])
@pytest.mark.parametrize("mode", ["each", "array", "ranks"])
def test_no_name_is_an_order_to_the_scheduler(
    scheduler: str, mode: str, tmp_path: Path
) -> None:
    """A newline in a file's name or a flag made the rest a line of the script: `#BSUB
    -q other`."""
    sign = "#SBATCH" if scheduler == "slurm" else "#BSUB"
    (tmp_path / f"a\n{sign} -q other\n'.jsonl").touch()
    data = tmp_path / f"x\n{sign} -P paid"
    data.mkdir()
    shutil.copy(next(tmp_path.glob("a*")), data)
    arguments = [
        "submit",
        "--scheduler",
        scheduler,
        "--mode",
        mode,
        "--infer-data",
        str(data),
    ]
    flags = [
        "--dry-run",
        "--job-dir",
        str(tmp_path),
        "--",
        "--model-type",
        f"y\n{sign} -P free",
    ]
    shown = CliRunner().invoke(main, [*arguments, *flags])
    assert shown.exit_code == 0, shown.output
    script = shown.stdout[shown.stdout.index("#!/bin/bash") :]
    for word in ("other", "paid", "free"):
        assert not re.search(rf"(?m)^{sign} -. {word}", script), script


VALUES = {
    **{
        "command": ["fminfer", "run", "a b"],
        "mode": "each",
        "queue": None,
        "time": "4:00",
    },
    **{
        "gpus": 2,
        "nodes": 1,
        "tasks": 1,
        "launcher": ["srun"],
        "directives": (),
        "job_dir": "/j",
    },
    **{"max_requeues": 20, "file_list": "/list"},
}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "#!/bin/bash\n\n{{ no_such }}\n",
            r"line 3: 'no_such' is undefined; .*command, directives",
        ),
        ("a\n{% if x %}\n", "line 2: .*end of template"),
        ("a\n{{ command | qoute }}\n", "line 2: No filter named 'qoute'"),
        ("\n\n{{ nodes // 0 }}", "line 3: .*division"),
        ("{% include 'no_such' %}", "line 1: 'no_such' not found"),
        (b"\xff\xfe", "cannot be read"),
        (None, "there is no such file"),
    ],
)
def test_a_wrong_template_is_told_with_its_line(
    text: str | bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "my.sh.j2"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UsageError, match=says) as error:
        ScriptTemplate(path).render(VALUES)
    assert str(path) in str(error.value)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """As a user gives it: the words quoted, a value that was not given none."""
    path = tmp_path / "my.sh.j2"
    path.write_text(
        "#!/bin/sh\n{% if queue %}no{% endif %}\nmodule load x\n{{ command | quote }}\n"
    )
    (tmp_path / "a b.jsonl").touch()
    arguments = [
        "submit",
        "--scheduler",
        "lsf",
        "--infer-data",
        str(tmp_path),
        "--dry-run",
    ]
    shown = CliRunner().invoke(main, [*arguments, "--template", str(path)])
    assert shown.exit_code == 0, shown.output
    assert re.search(
        rf"\nmodule load x\n.*fminfer run --infer-data '{tmp_path}/a b.jsonl'\n",
        shown.stdout,
    )
    path.write_text("\n{{ accoount }}")
    wrong = CliRunner().invoke(main, [*arguments, "--template", str(path)])
    assert wrong.exit_code == 2 and "line 2: 'accoount' is undefined" in wrong.stderr


def test_templates_are_installed_with_the_package() -> None:
    """They are data, which setuptools leaves out unless it is told."""
    assert "cluster/templates/*.j2" in (ROOT / "setup.cfg").read_text()
    assert len(list(TEMPLATES.glob("*.sh.j2"))) == 2


def examples() -> list[tuple[str, str]]:
    """Return the commands of the docs and what they print, up to a line of three dots."""
    blocks = re.findall(
        r"^```console\n\$ (.*)\n([^`]*?)\n?```$", DOCS.read_text(), re.MULTILINE
    )
    return [(command, said) for command, said in blocks]


def run_example(command: str, root: Path) -> str:
    """Run a command of the docs in the folder that stands for /data; return what it prints."""
    model = root / "models" / "llama-70b"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text('{"num_hidden_layers": 80}')
    command = command.replace("/models/llama-70b", str(model))
    shown = CliRunner().invoke(main, shlex.split(command)[1:])
    assert shown.exit_code == 0, shown.output
    text = shown.stdout.replace(str(model), "/models/llama-70b").replace(
        str(root), "/data"
    )
    # a digest of paths
    return re.sub(r"(llama-70b\.)[0-9a-f]{8}", r"\g<1>5f0c21ab", text)


@pytest.mark.parametrize(("command", "said"), examples())
def test_the_docs_show_what_is_sent(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shards" / "llama-70b"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"request_{number}.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fminfer.cli.submit_command._find_program",
        lambda: ["/home/me/.venv/bin/fminfer"],
    )
    printed = run_example(command, tmp_path)
    beginning, _, rest = said.partition("\n…")
    assert "#!/bin/bash" in beginning and "fminfer run" in beginning and not rest
    assert printed.startswith(beginning) and (
        said.endswith("\n…") or printed.strip() == said
    )


def test_the_docs_show_every_kind_for_both() -> None:
    commands = [command for command, _ in examples()]
    for scheduler in ("slurm", "lsf"):
        own = [command for command in commands if f"--scheduler {scheduler}" in command]
        assert len(own) == 3 and sum("--mode " not in command for command in own) == 1
        assert any("--mode array" in c for c in own) and any(
            "--mode ranks" in c for c in own
        )


def steps() -> list[str]:
    """Return the commands of "From one file to one file", in their order, without comments."""
    block = re.search(
        r"## From one file to one file\n```bash\n(.*?)```", DOCS.read_text(), re.DOTALL
    )
    assert block is not None
    without_comments = re.sub(r"\s+#.*$", "", block[1], flags=re.MULTILINE)
    return without_comments.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("scheduler", ["slurm", "lsf"])
def test_the_docs_way_from_one_file_to_one_file(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands in their order; a job's four ranks are played by one process of the tests."""
    commands = steps()
    names = [shlex.split(command)[1] for command in commands]
    assert names == ["split", "check", "submit", "status", "merge"]
    model = tmp_path / "models" / "llama-70b"
    queue = tmp_path / "queue"
    make_model("llama", 6).save_pretrained(model)
    save_byte_tokenizer(model)
    queue.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_CLUSTER", str(queue))
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(
        "fminfer.cli.submit_command._find_program",
        lambda: [str(FAKES / "stub_fminfer")],
    )
    requests = [
        {"engine": "llama-70b", "prompt": f"{i}", "max_tokens": 1 + i} for i in range(4)
    ]
    lines = [json.dumps(request) for request in requests]
    Path("requests.jsonl").write_text("\n".join(lines))

    def run(*words: str) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, (words, done.output)
        return done.output

    said = {}
    for name, command in zip(names, commands, strict=True):
        words = shlex.split(command.replace("/models/llama-70b", str(model)))[1:]
        words = [scheduler if word == "slurm" else word for word in words]
        said[name] = run(*words)
        if name == "submit":
            statuses = cluster.run_queue()
            assert statuses and set(statuses) == {0}
            for output in Path("shards").rglob("output_*"):  # the stub's
                output.unlink()
            for text in (queue / "ran.jsonl").read_text().splitlines():
                arguments = json.loads(text)
                assert arguments[1:3] == ["--world-size", "4"]
                run("run", *arguments[3:], "--quiet", "--kernels", "off")
    answers = [
        json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()
    ]
    assert [answer["request"] for answer in answers] == requests
    assert "4 of 4 files done" in said["status"] and "shards/llama-70b" in said["check"]
