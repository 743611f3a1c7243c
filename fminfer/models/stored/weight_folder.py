"""Finds the files that hold a model's weights, and their form. It needs no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import (
    GGUF,
    check_no_impostor,
    gguf_only_error,
    is_gguf,
    naming_broken_files,
)
from fminfer.core.quantities import list_few, with_noun

Form = Literal["safetensors", "bin", "layers", "metaseq", "gguf"]
LAYER = re.compile(r"pytorch_(\d+)\.pt")
BEFORE = "pytorch_embs.pt"
AFTER = "pytorch_lm_head.pt"  # of a folder with a file a layer
PART = re.compile(r"reshard-model_part-(\d+)\.pt")  # of metaseq
SHARD_OF = re.compile(r"(.*-)(\d+)-of-(\d+)(\.\w+)")
RESHARD = (
    "python -m metaseq.scripts.reshard_fsdp --input 'checkpoint_last-model_part-0-shard*.pt' "
    "--output reshard-model_part-0.pt --num-output-shards 1 --skip-optimizer-state True "
    "--unflatten-weights True"
)
ADAPTER_WEIGHTS = "adapter_model"  # what the names of an adapter's files begin with
# Mistral's and Llama's own form, which lies beside the model's in many folders.
CONSOLIDATED = "consolidated"
OTHERS = (".h5", ".msgpack", ".gguf", ".pth", ".ckpt", ".onnx", ".nemo")


@dataclass(slots=True, frozen=True)
class WeightFiles:
    """The files of a folder that make up the model."""

    form: Form
    files: list[Path]
    # of each tensor, where an index tells it
    homes: dict[str, str] = field(default_factory=dict)
    index: str = ""  # the name of such an index


def find_weights(folder: Path) -> WeightFiles:
    """Find the files of the model in a folder; safetensors first, where it is there twice.

    A GGUF file stands for its folder: the first one of a model that was split.
    """
    if is_gguf(folder):
        return WeightFiles("gguf", _find_gguf_parts(folder))
    return (
        _find_saved_files(folder, "safetensors", "model.safetensors", "*.safetensors")
        or _find_saved_files(folder, "bin", "pytorch_model.bin", "pytorch_model*.bin")
        or _find_layer_files(folder)
        or _find_metaseq_files(folder)
        or WeightFiles("safetensors", [])
    )


def read_indexed_names(folder: Path) -> list[str]:
    """Return the tensors that an index names; none where there is no index."""
    for one in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{one}.index.json").exists():
            return list(_read_index(index))
    return []


def no_weights_error(folder: Path) -> CheckpointError:
    """Return the error of a folder without weights; it names what cannot be read."""
    others = sorted(file.name for file in folder.glob("*") if file.suffix in OTHERS)
    if ggufs := [name for name in others if name.endswith(GGUF)]:
        return gguf_only_error(str(folder), ggufs)
    unread = f"; it holds {others[0]}, which does not run" if others else ""
    return CheckpointError(
        f"{folder} holds no .safetensors file and no pytorch_model.bin{unread}. Fetch "
        "one of them; docs/models.md lists all forms of weights that run"
    )


def unsharded_error(name: str) -> CheckpointError:
    """Return the error of a file that metaseq's training wrote."""
    return CheckpointError(
        f"{name} is a raw shard of metaseq, a piece of all weights; join the shards of "
        f"each model part first: {RESHARD}"
    )


def _find_saved_files(
    folder: Path, form: Form, one: str, several: str
) -> WeightFiles | None:
    """Find what transformers saves, in its order: the one file, those of an index, else all.

    Some repositories hold the same weights twice, the second time in another format.
    """
    index = folder / f"{one}.index.json"
    is_one = (folder / one).exists()
    if index.exists() and not is_one:
        homes = _read_index(index)
        files = sorted({folder / name for name in {*homes.values()}})
        missing = [file.name for file in files if not file.exists()]
        for name in missing[:1]:
            others = sorted(file.name for file in {*folder.glob(several)} - {*files})
            remedy = f". If {list_few(others, 2)} hold the model, delete {index.name}"
            raise CheckpointError(
                f"{folder} lacks {name}, which its {index.name} names ({len(missing)} "
                f"such files); fetch it{remedy if others else ''}"
            )
        return WeightFiles(form, files, homes, index.name)
    files = [folder / one] if is_one else sorted(folder.glob(several))
    files = [file for file in files if not file.name.startswith(ADAPTER_WEIGHTS)]
    files = [file for file in files if not file.name.startswith(CONSOLIDATED)] or files
    names = [file.name for file in files]
    for name in names:
        parts = _part_names(name)
        missing = [other for other in parts if other not in names]
        if missing and len(names) < len(parts):  # some count from 0
            raise CheckpointError(
                f"{folder} lacks {missing[0]}, a part beside {name}; fetch it"
            )
    return WeightFiles(form, files, {}, index.name) if files else None


def _find_gguf_parts(file: Path) -> list[Path]:
    """Find the parts of a GGUF model by the name of the first one: m-00001-of-00003.gguf."""
    if not file.is_file():
        raise CheckpointError(
            f"there is no file {file}. A GGUF file of the hub is downloaded first: hf "
            "download ID FILE --local-dir ."
        )
    if not (parts := _part_names(file.name)):
        return [file]
    if file.name != parts[0]:
        first = file.with_name(parts[0])
        raise CheckpointError(f"{file} is one part of a model; give the first, {first}")
    return _require_files(file.parent, parts)


def _part_names(name: str) -> list[str]:
    """Return the names of all parts by the name of one, such as m-00001-of-00003.gguf.

    A file that is not a part has none.
    """
    if (match := SHARD_OF.fullmatch(name)) is None:
        return []
    stem, number, num, suffix = match.groups()
    return [
        f"{stem}{n:0{len(number)}}-of-{num}{suffix}" for n in range(1, int(num) + 1)
    ]


def _read_index(index: Path) -> dict[str, str]:
    with naming_broken_files(index):
        check_no_impostor(index)
        homes = _parse_json(index.read_bytes())["weight_map"]
        names = {str(name) for name in homes.values()}
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index} names {name}, which is outside its folder")
    return {str(tensor): str(name) for tensor, name in homes.items()}


def _parse_json(text: bytes) -> Any:
    """Parse JSON fast; errors and what is odd but right are those of Python's parser."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)


def _find_layer_files(folder: Path) -> WeightFiles | None:
    """Find a file for each layer, one before them and one after them."""
    numbers = _find_file_numbers(folder, LAYER)
    ends = [name for name in (BEFORE, AFTER) if (folder / name).exists()]
    if not numbers and not ends:
        return None
    layers = [f"pytorch_{number}.pt" for number in range(max(numbers, default=0) + 1)]
    return WeightFiles("layers", _require_files(folder, [BEFORE, *layers, AFTER]))


def _find_metaseq_files(folder: Path) -> WeightFiles | None:
    if (folder / "restored.pt").exists():
        return WeightFiles("metaseq", [folder / "restored.pt"])
    if numbers := _find_file_numbers(folder, PART):
        parts = [
            f"reshard-model_part-{number}.pt" for number in range(max(numbers) + 1)
        ]
        return WeightFiles("metaseq", _require_files(folder, parts))
    if raw := sorted(folder.glob("*-shard[0-9]*.pt")):
        raise unsharded_error(raw[0].name)
    return None


def _find_file_numbers(folder: Path, form: re.Pattern[str]) -> list[int]:
    matches = [form.fullmatch(file.name) for file in folder.glob("*.pt")]
    return [int(match[1]) for match in matches if match]


def _require_files(folder: Path, names: list[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).exists()]
    for name in missing[:1]:
        raise CheckpointError(
            f"{folder.absolute()} lacks {name} ({with_noun(len(missing), 'file')} "
            "missing); fetch "
            "what is missing"
        )
    return [folder / name for name in names]
