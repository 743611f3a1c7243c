"""A config, a tokenizer and weights that come from elsewhere: other folders, sizes, the hub."""

from __future__ import annotations

import gzip
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

import fminfer
from fminfer.cli.app import main
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.core.partition import Part
from fminfer.models.checkpoint import open_model
from fminfer.models.known_sizes import ALIASES, SIZES, check_split, find_size_fields
from fminfer.models.origins import check_tensors
from fminfer.models.tensor_specs import TIED, stage_specs
from fminfer.plan.planning import plan_ahead
from tests.conftest import save_byte_tokenizer

ROW: dict[str, Any] = {
    "prompt": "north",
    "max_tokens": 5,
    "temperature": 0,
    "logprobs": 1,
}


def answer(model: str | None, **options: Any) -> Any:
    engine = fminfer.Engine(model, dtype="float32", kernels="off", **options)
    (record,) = engine.run([ROW])
    engine.close()
    assert record.error is None, record.error
    return record.result["choices"]


@pytest.fixture
def scattered(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path
) -> tuple[Path, Path, Path]:
    """Give three folders: of weights alone, of a config, of a tokenizer."""
    weights, config, tokenizer = (
        tmp_path / name for name in ("weights", "config", "tokenizer")
    )
    for folder in (weights, config, tokenizer):
        folder.mkdir()
    for file in llama_checkpoint[0].iterdir():
        is_weight = file.suffix == ".safetensors"
        is_config = file.name in ("config.json", "generation_config.json")
        shutil.copy(file, weights if is_weight else config if is_config else tokenizer)
    return weights, config, tokenizer


def test_a_folder_without_config_and_tokenizer_runs_with_those_of_others(
    llama_checkpoint: tuple[Path, Any], scattered: tuple[Path, Path, Path]
) -> None:
    weights, config, tokenizer = map(str, scattered)
    expected = answer(str(llama_checkpoint[0]))
    assert answer(weights, model_config=config, tokenizer=tokenizer) == expected
    file = str(scattered[1] / "config.json")
    assert answer(weights, model_config=file, tokenizer=tokenizer) == expected


def test_the_refusals_name_the_flags(scattered: tuple[Path, Path, Path]) -> None:
    weights, config, _ = map(str, scattered)
    with pytest.raises(CheckpointError, match=r"no config.json.*--model-config"):
        open_model(EngineConfig(model=weights))
    with pytest.raises(
        CheckpointError, match=r"no tokenizer.*--tokenizer.*--skip-tokenizer-init"
    ):
        fminfer.Engine(weights, model_config=config)
    with pytest.raises(
        CheckpointError, match=r"'nowhere' is neither a config.json.*bloom-176b"
    ):
        open_model(EngineConfig(model=weights, model_config="nowhere"))
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        file = str(scattered[1] / "config.json")
        open_model(EngineConfig(model=weights, model_config=config, tokenizer=file))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"model_config": "bloom-560m"},
            "--model-config is 'bloom-560m'; give the model too",
        ),
        ({"revision": "main"}, "--revision is 'main'; give the model too"),
        (
            {"model": "a", "tokenizer": "b", "skip_tokenizer_init": True},
            "give one of them",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EngineConfig(**options)


def test_another_config_or_tokenizer_is_another_run(
    llama_checkpoint: tuple[Path, Any], scattered: tuple[Path, Path, Path]
) -> None:
    weights, config, tokenizer = map(str, scattered)

    def fingerprint(**options: Any) -> dict[str, str]:
        run = EngineConfig(model=weights, dtype="float32", **options)
        return plan_ahead(run, open_model(run)).fingerprint()

    first = fingerprint(model_config=config, tokenizer=tokenizer)
    assert (
        fingerprint(model_config=f"{config}/config.json", tokenizer=tokenizer) == first
    )
    fields = json.loads((scattered[1] / "config.json").read_text())
    other = scattered[1] / "other.json"
    other.write_text(json.dumps(fields | {"rms_norm_eps": 0.125}))
    changed = fingerprint(model_config=str(other), tokenizer=tokenizer)
    assert [k for k in first if first[k] != changed[k]] == ["the model"]
    file = scattered[2] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 9}))
    changed = fingerprint(model_config=config, tokenizer=tokenizer)
    assert [k for k in first if first[k] != changed[k]] == ["the tokenizer"]


def test_ends_of_a_config_from_elsewhere_count(
    scattered: tuple[Path, Path, Path],
) -> None:
    weights, config, tokenizer = scattered
    (config / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    options = {"model_config": str(config), "tokenizer": str(tokenizer)}
    assert open_model(EngineConfig(model=str(weights), **options)).eos_ids == {7, 8}
    (weights / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_model(EngineConfig(model=str(weights), **options)).eos_ids == {9}


def test_random_weights_with_a_real_tokenizer(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    found = answer(
        None, random_init="llama-160m", tokenizer=str(tmp_path), max_layers=1
    )
    expected = answer(None, random_init="llama-160m", max_layers=1)
    assert [each["logprobs"]["token_logprobs"] for each in found] == [
        each["logprobs"]["token_logprobs"] for each in expected
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><html>", r"is a web page.*/resolve/"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1",
            r"is a pointer.*lfs pull",
        ),
        (gzip.compress(b"{}", mtime=0), "is compressed by gzip; unpack it"),
        (b'{"version": "1.0", "added_', r"is broken \(no JSON.*; fetch it again"),
    ],
    ids=["page", "pointer", "gzip", "cut"],
)
def test_files_that_are_something_else_say_so(
    content: bytes, says: str, scattered: tuple[Path, Path, Path]
) -> None:
    weights, config, tokenizer = scattered
    shutil.copy(config / "config.json", weights)
    (tokenizer / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer.json {says}"):
        fminfer.Engine(str(weights), tokenizer=str(tokenizer))
    (weights / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config.json {says}"):
        fminfer.Engine(str(weights), tokenizer=str(tokenizer))


class Hub:
    """Stands for the hub: a repository of files, fetched into a folder of its commit."""

    def __init__(self, folder: Path, files: Path, names: list[str]) -> None:
        self.folder = folder / ("0" * 40)
        self._files = files
        self._names = names
        self.asked: list[tuple[str | None, list[str]]] = []
        self.is_there = True

    def snapshot_download(
        self, name: str, allow_patterns: list[str], revision: str | None
    ) -> str:
        self.asked.append((revision, allow_patterns))
        self.folder.mkdir(exist_ok=True)
        for each in self._names if self.is_there else []:
            if any(fnmatch(each, pattern) for pattern in allow_patterns):
                source = self._files / each
                (self.folder / each).parent.mkdir(exist_ok=True)
                if source.exists():
                    shutil.copy(source, self.folder)
                else:
                    (self.folder / each).touch()
        return str(self.folder)

    def model_info(self, name: str, revision: str | None) -> Any:
        if not self.is_there:
            raise OSError("no connection")
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=n) for n in self._names]
        )


@pytest.fixture
def hub(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Hub:
    names = [file.name for file in llama_checkpoint[0].iterdir()]
    hub = Hub(
        tmp_path,
        llama_checkpoint[0],
        [*names, "pytorch_model.bin", "onnx/model.safetensors"],
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info",
        lambda self, name, revision: hub.model_info(name, revision),
    )
    return hub


def test_the_hub_gives_weights_in_one_form(hub: Hub) -> None:
    config = EngineConfig(model="some/model", revision="v2")
    folder = open_model(config).folder
    assert folder is not None
    names = {file.name for file in folder.iterdir()}
    assert "model.safetensors" in names and "pytorch_model.bin" not in names
    revisions = [revision for revision, _ in hub.asked]
    assert revisions == ["v2", "v2", "0" * 40], (
        "a branch may move between two downloads"
    )
    hub._names = [name for name in hub._names if not name.endswith("safetensors")]
    open_model(config)
    assert "pytorch_model*.bin" in hub.asked[-1][1]


def test_without_a_connection_the_cache_is_used(
    hub: Hub, llama_checkpoint: tuple[Path, Any]
) -> None:
    open_model(EngineConfig(model="some/model"))
    hub.is_there = False
    assert answer("some/model") == answer(str(llama_checkpoint[0]))


def test_a_config_and_a_tokenizer_of_the_hub(
    hub: Hub, llama_checkpoint: tuple[Path, Any], scattered: tuple[Path, Path, Path]
) -> None:
    options = {"model_config": "some/model", "tokenizer": "some/model"}
    assert answer(str(scattered[0]), **options) == answer(str(llama_checkpoint[0]))
    patterns = [pattern for _, each in hub.asked for pattern in each]
    assert not [
        pattern for pattern in patterns if "safetensors" in pattern or "bin" in pattern
    ]


# Parameters in billions, as published.
PARAMETERS = {
    "llama-160m": 0.162,
    "llama-7b": 6.738,
    "llama-8b": 8.030,
    "llama-70b": 70.554,
    "llama-405b": 405.853,
    "bloom-560m": 0.559,
    "bloom-7b1": 7.069,
    "bloom-176b": 176.247,
    "deepseek-v3": 671.026,
    "gpt-j-6b": 6.051,
    "gpt-neox-20b": 20.555,
    "gpt3-175b": 174.6,
    "opt-125m": 0.125,
    "opt-1.3b": 1.316,
    "opt-6.7b": 6.659,
    "opt-30b": 29.97,
    "opt-66b": 65.7,
    "opt-175b": 174.6,
    "bert-base": 0.109,
    "t5-small": 0.0605,
    "t5-11b": 11.307,
    "ul2": 19.46,
}


@pytest.mark.parametrize("size", sorted(SIZES))
def test_sizes_are_those_that_their_names_say(size: str) -> None:
    checkpoint = open_model(EngineConfig(random_init=size))
    model = checkpoint.model
    specs = stage_specs(model, Part(0, 1, 0, len(model.layers)))
    if checkpoint.config.tie_word_embeddings:
        specs = {name: spec for name, spec in specs.items() if name not in TIED}
    total = sum(spec.size for spec in specs.values())
    assert total / 1e9 == pytest.approx(PARAMETERS[size], rel=0.005)


def test_names_of_earlier_systems_are_sizes() -> None:
    for alias, size in ALIASES.items():
        assert find_size_fields(alias) == SIZES[size]
    with pytest.raises(UsageError, match="70"):
        check_split(EngineConfig(random_init="175b", stage_layers=(30, 30)), 2)


def test_check_takes_them_from_the_command_line(
    llama_checkpoint: tuple[Path, Any],
    scattered: tuple[Path, Path, Path],
    tmp_path: Path,
) -> None:
    """A vocabulary joined to a config of another model is refused as well."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    weights, config, tokenizer = map(str, scattered)
    arguments = ["check", str(rows), "--model", weights, "--tokenizer", tokenizer]
    found = CliRunner().invoke(main, [*arguments, "--model-config", config])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(main, [*arguments, "--model-config", "llama-160m"])
    assert found.exit_code == 1 and "config.json asks for" in found.output


def test_a_tokenizer_without_any_config_is_of_the_kind_that_the_config_says(
    scattered: tuple[Path, Path, Path], llama_checkpoint: tuple[Path, Any]
) -> None:
    """OPT's folders of old had tokenizer.json, vocab.json and merges.txt, and no config."""
    weights, config, tokenizer = scattered
    (tokenizer / "tokenizer_config.json").unlink()
    shutil.copy(tokenizer / "tokenizer.json", weights)
    found = answer(str(weights), model_config=str(config))
    assert found == answer(str(llama_checkpoint[0]))


def test_check_needs_no_weights(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """A config and an index tell before hundreds of gigabytes are fetched."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    folder = tmp_path / "small"
    shutil.copytree(llama_checkpoint[0], folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    def check(*flags: str) -> Any:
        return CliRunner().invoke(
            main, ["check", str(rows), "--model", str(folder), *flags]
        )

    assert check().exit_code == 1 and "holds no .safetensors file" in check().output
    found = check("--no-weights")
    assert found.exit_code == 0, found.output
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")})
    )
    assert check("--no-weights").exit_code == 0
    index.write_text(json.dumps({"weight_map": {"more.weight": "model-1.safetensors"}}))
    found = check("--no-weights")
    assert found.exit_code == 1 and "lacks 30 of the model's tensors" in found.output, (
        found.output
    )


def test_a_folder_has_no_revisions(llama_checkpoint: tuple[Path, Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"--revision is 'v2', and .* is a folder"
    ):
        open_model(EngineConfig(model=str(llama_checkpoint[0]), revision="v2"))


def test_a_cut_config_is_named(scattered: tuple[Path, Path, Path]) -> None:
    weights, config, _ = scattered
    (weights / "config.json").write_text((config / "config.json").read_text()[:50])
    with pytest.raises(
        CheckpointError, match=r"config.json is broken \(no JSON: .*fetch it again"
    ):
        open_model(EngineConfig(model=str(weights)))


def test_a_part_that_its_neighbours_name_is_missed(
    llama_checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    shutil.copytree(llama_checkpoint[0], folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"
    ):
        check_tensors(open_model(EngineConfig(model=str(folder))))
