"""Weights beside those that are read: another model's are refused, the same model's are
named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fminfer.cli.app import main
from fminfer.core.config import EngineConfig
from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import open_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.models.origins import check_tensors
from fminfer.models.stored.rival_weights import check_rival_files, describe_unread_files
from fminfer.models.stored.tensor_table import TensorFiles, WeightHeaders
from tests.encoder_families import make_encoder
from tests.models.test_encoders import dense_folder

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo model, in one file."""
    copy = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    tensors = TensorFiles(copy)
    held = {name: tensors.read(name).clone() for name in tensors.shapes}
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    save_file(held, copy / ONE)
    return copy


def changed(tensors: Tensors) -> Tensors:
    """Return the weights of another training."""
    torch.manual_seed(0)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape)
        for name, tensor in tensors.items()
    }


def save_shards(folder: Path, tensors: Tensors, *, has_index: bool) -> None:
    names = [*tensors]
    homes: dict[str, str] = {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, folder / file)
        homes |= dict.fromkeys(some, file)
    if has_index:
        (folder / INDEX).write_text(json.dumps({"weight_map": homes}))


def open_folder(folder: Path) -> None:
    check_tensors(open_model(EngineConfig(str(folder))))


def save_beside(folder: Path, form: str, tensors: Tensors) -> str:
    """Save weights beside the one file; return a name that a message has to have."""
    if form.startswith("shards"):
        save_shards(folder, tensors, has_index=form == "shards and index")
        return "model-00001-of-00002.safetensors"
    name = "model.fp16.safetensors" if form == "float16" else "pytorch_model.bin"
    if form == "float16":
        save_file({n: tensor.half() for n, tensor in tensors.items()}, folder / name)
    elif form == "without a base":
        bare = {n.removeprefix("model."): tensor for n, tensor in tensors.items()}
        torch.save(bare, folder / name)
    else:
        torch.save(tensors, folder / name)
    return name


FORMS = ["shards and index", "shards", "bin", "float16", "without a base"]


@pytest.mark.parametrize("form", FORMS)
def test_another_model_s_weights_are_refused_with_the_names_of_both(
    form: str, folder: Path
) -> None:
    """A model saved over an older one: the old weights answered, or the new ones, in silence."""
    name = save_beside(folder, form, changed(load_file(folder / ONE)))
    with pytest.raises(CheckpointError, match="holds two models") as caught:
        open_folder(folder)
    assert f"{ONE} and {name} differ in the tensor" in str(caught.value)
    assert "Delete what is not the model's" in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_weights_in_two_forms_are_named(form: str, folder: Path) -> None:
    """Many published folders hold a model twice."""
    name = save_beside(folder, form, load_file(folder / ONE))
    open_folder(folder)
    told = describe_unread_files(folder)
    assert told.startswith(f"Weights are read from {ONE}. Not read: ") and name in told


def test_what_float16_cannot_hold_is_no_difference(folder: Path) -> None:
    """GPT-NeoX's -1e9 for masks is infinite in a float16 copy, and two models were reported."""
    tensors = load_file(folder / ONE) | {"masked_bias": torch.tensor([-1e9])}
    save_file(tensors, folder / ONE)
    save_beside(folder, "float16", tensors)
    assert "model.fp16.safetensors" in describe_unread_files(folder)
    check_rival_files(folder, WeightHeaders())


def test_a_dense_layer_in_two_forms(tmp_path: Path) -> None:
    """A folder of sentence-transformers holds weights in folders of its modules, too."""
    dense_folder(make_encoder("bert"), tmp_path)
    dense = tmp_path / "2_Dense"
    tensors = torch.load(dense / "pytorch_model.bin")
    save_file(tensors, dense / ONE)
    open_folder(tmp_path)
    torch.save(changed(tensors), dense / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds two models"):
        open_folder(tmp_path)


def test_another_shape_is_another_model(folder: Path) -> None:
    tensors = load_file(folder / ONE)
    name = next(n for n, tensor in tensors.items() if tensor.dim() == 2)
    torch.save({name: torch.cat([tensors[name]] * 2)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="differ in the tensor"):
        open_folder(folder)


def test_what_lies_beside_sound_weights(folder: Path) -> None:
    """A file of Mistral's own names, one that git-LFS left out, a GGUF file, an adapter."""
    assert describe_unread_files(folder) == ""
    tensors = load_file(folder / ONE)
    (folder / ONE).unlink()
    save_shards(folder, tensors, has_index=False)
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(2)},
        folder / "consolidated.safetensors",
    )
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "pytorch_model.bin").write_text(pointer)
    (folder / "m-Q8_0.gguf").write_bytes(b"GGUF")
    (folder / "mmproj-f16.gguf").write_bytes(b"GGUF")
    save_file({"lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    packed = {name: torch.zeros(4, 1, dtype=torch.uint8) for name in tensors}
    save_file(packed, folder / "consolidated.4bit.safetensors")
    open_folder(folder)
    assert describe_unread_files(folder) == (
        "Weights are read from model-00001-of-00002.safetensors and 1 more. Not read: "
        "adapter_model.safetensors, consolidated.4bit.safetensors, consolidated.safetensors and "
        "2 more."
    )


def test_an_index_of_files_that_are_not_there(folder: Path) -> None:
    """An old index stayed beside whole parts; `fetch it` was the only remedy."""
    tensors = load_file(folder / ONE)
    homes = dict.fromkeys(tensors, "model-00001-of-00005.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))
    open_folder(folder)  # transformers reads the one file, too

    (folder / ONE).unlink()
    assert describe_unread_files(folder) == ""
    save_shards(folder, tensors, has_index=False)
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00005") as caught:
        open_folder(folder)
    parts = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    assert f"If {parts} hold the model, delete {INDEX}" in str(caught.value)
    (folder / INDEX).unlink()
    open_folder(folder)


def test_the_run_names_what_it_does_not_read(folder: Path) -> None:
    save_beside(folder, "bin", load_file(folder / ONE))
    requests = folder.parent / "a.jsonl"
    requests.write_text('{"prompt": "north", "max_tokens": 1}\n')
    arguments: list[Any] = ["run", requests, "--model-name", folder, "--output", "-"]
    found = CliRunner().invoke(main, [*map(str, arguments)])
    assert found.exit_code == 0, found.output
    assert "Not read: pytorch_model.bin." in found.output
