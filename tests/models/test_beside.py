"""What lies beside a model: each file is used, refused by name, or shown to change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import fminfer
from fminfer.cli.app import main
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.models.checkpoint import open_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.model_folder import fetch_model
from fminfer.models.origins import check_tensors
from fminfer.plan.planning import plan_ahead
from fminfer.text.tokenizer import Tokenizer
from tests.models.test_elsewhere import Hub

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
POOLING = [
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
]
RANKER = [
    {
        "idx": 1,
        "path": "1_LogitScore",
        "type": "sentence_transformers.models.LogitScore",
    }
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def add_adapter(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    save_file({"lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(EngineConfig(str(folder), **options))
    return str(caught.value)


def answer(folder: Path, **options: Any) -> Any:
    engine = fminfer.Engine(str(folder), dtype="float32", kernels="off", **options)
    (record,) = engine.run(
        [{"prompt": "north <|later|>", "max_tokens": 4, "temperature": 0}]
    )
    engine.close()
    assert record.result is not None, record.error
    return record.result["choices"], record.num_prompt_tokens


def test_an_adapter_alone_names_its_model_and_the_remedy(tmp_path: Path) -> None:
    """It was told to fetch a config.json."""
    add_adapter(tmp_path / "lora")
    for options in ({}, {"without_adapter": True}):
        said = refusal(tmp_path / "lora", **options)
        assert (
            "holds a LORA adapter alone" in said and "meta-llama/Llama-3.1-8B" in said
        )
        assert "merge_and_unload" in said and "--without-adapter" not in said
    (tmp_path / "lora" / "adapter_config.json").write_text("[broken")
    assert "adapter_config.json is broken (no JSON" in refusal(tmp_path / "lora")


def test_a_model_with_an_adapter_is_answered_without_it_only_if_a_flag_says_so(
    model: Path,
) -> None:
    """The adapter was left out in silence, so that the base model answered in its place."""
    plain = answer(model)
    before = plan_ahead(
        EngineConfig(str(model)), open_model(EngineConfig(str(model)))
    ).fingerprint()
    add_adapter(model)
    said = refusal(model)
    assert (
        "a model and beside it a LORA adapter" in said and "--without-adapter" in said
    )
    assert answer(model, without_adapter=True) == plain
    config = EngineConfig(str(model), without_adapter=True)
    assert plan_ahead(config, open_model(config)).fingerprint() == before, (
        "answers do not depend on the flag"
    )
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "part.safetensors")
    check_tensors(open_model(config))  # the adapter's tensors are none of the model's
    assert len(tensors) > 1


@pytest.mark.parametrize("command", ["run", "check", "bench", "serve"])
def test_the_flag_is_on_every_command_with_a_model(command: str) -> None:
    assert (
        main.commands[command]
        .make_context(command, ["--without-adapter"])
        .params["without_adapter"]
    )


def test_a_job_of_a_folder_with_an_adapter_is_not_sent(tmp_path: Path) -> None:
    """The job would only be refused once it runs."""
    add_adapter(tmp_path / "lora")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    arguments = [
        "submit",
        "--scheduler",
        "lsf",
        "--dry-run",
        "--infer-data",
        tmp_path / "a.jsonl",
    ]
    arguments += ["--", "--model-name", tmp_path / "lora"]
    found = CliRunner().invoke(main, [*map(str, arguments)])
    assert found.exit_code != 0 and "merge_and_unload" in found.output


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "modules.json",
            POOLING,
            "the modules Pooling in this order, which does not run",
        ),
        (
            "quantize_config.json",
            {"bits": 4},
            "are quantized, as its quantize_config.json says",
        ),
        (
            "quant_config.json",
            {"w_bit": 4},
            "are quantized, as its quant_config.json says",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8"}},
            "are quantized, as its hf_quant_config.json says",
        ),
    ],
)
def test_files_that_tell_of_another_model_refuse_it(
    file: str, content: object, says: str, model: Path
) -> None:
    """They were not looked at: an embedding model of Qwen's form wrote texts."""
    (model / file).write_text(json.dumps(content))
    assert says in refusal(model)


def test_files_beside_a_model_that_change_nothing(model: Path) -> None:
    """A projector of images, and modules that pool nothing."""
    plain = answer(model)
    (model / "model.mmproj").write_bytes(b"GGUF")
    (model / "mmproj-f16.gguf").write_bytes(b"GGUF")
    (model / "modules.json").write_text(json.dumps(RANKER))
    none = {"producer": {}, "quantization": {"quant_algo": None}}
    (model / "hf_quant_config.json").write_text(json.dumps(none))
    (model / "quant_config.json").write_text('{"quant_method": null}')
    assert answer(model) == plain
    (model / "modules.json").write_text("[" * 100_000)
    assert "modules.json is broken (RecursionError" in refusal(model)


@pytest.mark.parametrize("has_old_files", [False, True])
def test_added_tokens_are_those_that_transformers_adds(
    has_old_files: bool, model: Path
) -> None:
    """added_tokens.json counts with a tokenizer of the old form, and beside
    tokenizer.json not."""
    if has_old_files:
        (model / "tokenizer.json").unlink()
        pieces = dict(zip([*map(chr, range(33, 127)), "Ġ"], range(95), strict=True))
        (model / "vocab.json").write_text(json.dumps(pieces))
        (model / "merges.txt").write_text("#version: 0.2\n")
        fields = {
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "!",
            "eos_token": "!",
        }
        (model / "tokenizer_config.json").write_text(json.dumps(fields))
    size = len(transformers.AutoTokenizer.from_pretrained(model))
    (model / "added_tokens.json").write_text(json.dumps({"<|later|>": size}))
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    ids = Tokenizer.load(model).encode("a <|later|>b", add_special_tokens=True).ids
    assert [*ids] == theirs("a <|later|>b")["input_ids"]


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_gguf_alone_names_the_file_to_give(
    has_config: bool, tmp_path: Path
) -> None:
    """Which of several files is meant only its user knows."""
    for name in ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-f16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    if has_config:
        shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"GGUF, llama.cpp's form") as caught:
        check_tensors(open_model(EngineConfig(str(tmp_path))))
    says = (
        "(m-Q4_K_M.gguf and 1 more); give one by its name: --model-name "
        f"{tmp_path}/m-Q4_K_M.gguf"
    )
    assert says in str(caught.value)


def test_a_gguf_file_that_is_not_there_or_broken_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf is broken (" in refusal(tmp_path / "m.gguf")
    assert "there is no file nowhere/m.gguf" in refusal(Path("nowhere") / "m.gguf")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    arguments = [
        "submit",
        "--scheduler",
        "lsf",
        "--dry-run",
        "--infer-data",
        tmp_path / "a.jsonl",
    ]
    for name, says in (("m.gguf", ""), ("n.gguf", "there is no file")):
        command = [*arguments, "--", "--model-name", tmp_path / name]
        found = CliRunner().invoke(main, [*map(str, command)])
        assert says in found.output and bool(found.exit_code) == bool(says), (
            found.output
        )
    assert "give it by --model-name" in refusal(
        DEMO_MODEL, model_config=str(tmp_path / "m.gguf")
    )


def test_a_model_of_the_hub_is_looked_at_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id of -GGUF had no config.json, an adapter's no config, and both said so only."""
    files = tmp_path / "files"
    hub = Hub(tmp_path, files, ["m-Q4_K_M.gguf"])
    files.mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info",
        lambda self, name, revision: hub.model_info(name, None),
    )
    with pytest.raises(
        CheckpointError, match=r"hf download some/m-GGUF m-Q4_K_M\.gguf --local-dir"
    ):
        open_model(EngineConfig("some/m-GGUF"))
    add_adapter(files)
    hub._names = [file.name for file in files.iterdir()]
    with pytest.raises(CheckpointError, match="some/lora holds a LORA adapter alone"):
        open_model(EngineConfig("some/lora"))
    hub._names += ["pytorch_model.bin"]
    folder = fetch_model("some/lora")
    assert (folder / "pytorch_model.bin").exists()
    assert not (folder / "adapter_model.safetensors").exists(), (
        "the adapter came for the model"
    )


def test_the_demo_model_has_a_name_and_a_folder_goes_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model-name demo` was asked of the hub."""
    assert open_model(EngineConfig("demo")).name == "fminfer-demo"
    assert open_model(EngineConfig("demo")).folder == DEMO_MODEL
    add_adapter(model.rename(model.with_name("demo")))
    monkeypatch.chdir(model.parent)
    assert "demo holds a model and beside it" in refusal(Path("demo"))
    with pytest.raises((CheckpointError, UsageError)):
        open_model(EngineConfig("demo", model_type="llama2"))
