"""A model that is given where requests are read is named, and never answered or written into."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.files.input_folders import find_inputs
from fminfer.files.input_models import check_no_models, name_model
from fminfer.models.known_sizes import DEMO_MODEL

LINE = '{"prompt": "a", "max_tokens": 1, "temperature": 0}\n'
CONFIG = '{"model_type": "llama"}'
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "my model"))


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    path.write_text(LINE)
    return path


def run(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(main, [*map(str, words)], terminal_width=1000)
    return found.exit_code, found.output


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL"],
        ["run", "MODEL"],
        ["run", "MODEL", "REQUESTS"],
        ["run", "REQUESTS", "MODEL/model.safetensors"],
        ["run", "--infer-data", "MODEL", "--watch"],
        ["run", "--prompt", "hi", "MODEL"],
        ["run", "MODEL/config.json", "MODEL/tokenizer.json"],
        ["check", "MODEL"],
        ["status", "MODEL"],
        ["report", "MODEL/model.safetensors"],
        ["split", "--input-file", "MODEL/model.safetensors", "--output-dir", "MODEL"],
        ["submit", "--scheduler", "slurm", "--dry-run", "--infer-data", "MODEL"],
    ],
)
def test_a_model_is_named_with_the_command_to_type(
    model: Path, requests: Path, words: list[str]
) -> None:
    """The demo model answered the model's own JSON files, and left 12 files in its folder."""
    before = {path: path.read_bytes() for path in model.iterdir()}
    asked = [
        word.replace("MODEL", str(model)).replace("REQUESTS", str(requests))
        for word in words
    ]
    status, told = run(*asked)
    answered = requests if "REQUESTS" in words else "requests.jsonl"
    command = f"fminfer run {answered} --model-name '{model}'"
    command = (
        command.replace("requests.jsonl", "--prompt hi")
        if "--prompt" in words
        else command
    )
    assert status == 2 and command in told
    assert {path: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        ["run", "REQUESTS", "--output", "MODEL"],
        ["split", "--input-file", "REQUESTS", "--output-dir", "MODEL"],
    ],
)
def test_nothing_is_written_into_a_model(
    model: Path, requests: Path, words: list[str]
) -> None:
    """Whoever wrote --output for --model-name got answers and parts beside the model's
    weights."""
    before = sorted(model.iterdir())
    names = {"MODEL": str(model), "REQUESTS": str(requests)}
    status, told = run(*[names.get(word, word) for word in words])
    assert status == 2 and f"{words[-2]} {model} is a model's folder" in told
    assert f"--model-name '{model}'" in told and sorted(model.iterdir()) == before


MODELS = {
    "weights alone": {"model.safetensors": ""},
    "a GGUF file": {"q4.gguf": "GGUF"},
    "a config": {"config.json": CONFIG},
    "an adapter": {"adapter_config.json": '{"peft_type": "LORA"}'},
    "sentence-transformers": {"modules.json": '[{"idx": 0, "path": ""}]'},
    "Meta's own form": {"params.json": '{"dim": 8, "n_layers": 2}'},
    "a config and a log": {
        "config.json": CONFIG,
        "model.safetensors": "",
        "log.jsonl": "{}",
    },
    "with requests in it": {
        "config.json": CONFIG,
        "model.safetensors": "",
        "r.jsonl": LINE,
    },
}
FOLDERS = {
    "an own config.json": {"config.json": '{"seed": 1}', "r.jsonl": LINE},
    "a config of a model": {"config.json": CONFIG, "r.jsonl": LINE},
    "weights beside": {"x.gguf": "GGUF", "y.bin": "", "r.jsonl": LINE},
    "requests in .json": {"x.gguf": "GGUF", "r.json": LINE},
    "lines without a request": {"x.bin": "", "r.jsonl": "{}\n"},
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("kind", MODELS)
def test_folders_that_are_models(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, MODELS[kind])
    with pytest.raises(
        UsageError, match="is a model, and not a file of requests"
    ) as error:
        find_inputs([tmp_path])
    named = f"To answer {tmp_path / 'r.jsonl'}, name that file itself"
    assert (named in str(error.value)) == (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_requests_that_hold_other_files(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, FOLDERS[kind])
    names = {path.name for path in find_inputs([tmp_path])}
    assert {"r.jsonl", "r.json"} & names


@pytest.mark.parametrize(
    "name", ["a.gguf", "a.safetensors", "a.bin", "a.pt", "sha256-1"]
)
def test_files_that_are_models(tmp_path: Path, requests: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF\3\0\0\0" if name in ("a.gguf", "sha256-1") else bytes(64))
    model = path if name in ("a.gguf", "sha256-1") else tmp_path
    with pytest.raises(UsageError) as error:
        find_inputs([requests, path])
    assert f"fminfer run {requests} --model-name {model}" in str(error.value)


def test_files_of_requests_with_odd_endings_are_told_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_text(LINE)
    with pytest.raises(UsageError, match="its lines are requests; rename it"):
        find_inputs([path])


@pytest.mark.parametrize("prefix", ["", "https://huggingface.co/", "https://hf.co/"])
@pytest.mark.parametrize("command", [[], ["run"], ["check"]])
def test_models_of_the_hub(prefix: str, command: list[str]) -> None:
    status, told = run(*command, prefix + HUB)
    assert status == 2 and f"fminfer run requests.jsonl --model-name {HUB}" in told


def test_paths_that_do_not_exist_are_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    for path in ("parts/a", "nowhere/a.jsonl", "a", "a/b/c", "../a", "/a/b", "-"):
        assert name_model(path) == ""
    os.symlink("nowhere", "parts/link")
    check_no_models([Path("parts/link"), Path("parts")])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert name_model(Path()) == "."
