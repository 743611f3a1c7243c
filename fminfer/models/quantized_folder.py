"""A folder of a quantized model: written once, and read without rounding again.

Its safetensors hold our tensors by our names, such as "layers.0.qkv.weight.int4", in
the bytes in which they are held. They are packed as they are read, for each processor
in its own order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fminfer.core.errors import CheckpointError
from fminfer.models.checkpoint import GENERATION, Checkpoint
from fminfer.models.config_fields import OWN_FOLDER
from fminfer.models.fingerprint import FURTHER_TEMPLATES, digest_model
from fminfer.models.holding import Holding
from fminfer.models.layer_source import LayerSource, OnProgress, open_weights
from fminfer.models.model_folder import SMALL_FILES, TELLING_FILES
from fminfer.models.origins import find_stored_model
from fminfer.models.sentence_folder import CONFIG, MODULES, list_sentence_files
from fminfer.models.stored.tensor_table import TensorFiles
from fminfer.models.tensor_specs import Weights, whole_model_part

CPU = torch.device("cpu")


def is_quantized_copy(
    folder: Path, checkpoint: Checkpoint, quantized: str, *, seed: int
) -> bool:
    """Tell whether a folder holds this model, quantized so, with whole weight files."""
    try:
        fields = json.loads((folder / CONFIG).read_bytes())
        TensorFiles(folder)  # it raises where one is missing or cut off
        return bool(
            fields["quantization_config"]
            == _quantization_note(checkpoint, quantized, seed)
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
        return False


def _quantization_note(
    checkpoint: Checkpoint, quantized: str, seed: int
) -> dict[str, object]:
    return OWN_FOLDER | {"to": quantized, "source": digest_model(seed, checkpoint)}


def write_quantized_folder(
    checkpoint: Checkpoint,
    folder: Path,
    quantized: str,
    *,
    seed: int,
    on_progress: OnProgress,
) -> int:
    """Write a model with its weights quantized, as --quantize says; return the bytes of weights.

    Raises:
        CheckpointError, OSError: the model is quantized already; a file cannot be written.
    """
    stored = find_stored_model(checkpoint)
    formats = stored.list_formats() if stored else {}
    if any(held.floats is None for parts in formats.values() for held, _ in parts):
        raise CheckpointError(
            f"{checkpoint.name} is quantized already; fminfer runs it as it is. Give "
            "the model in 16 or 32 bits"
        )
    # What stays in floats is as exact as it is stored.
    holding = Holding(torch.float32, keeps_bfloat16=True, quantized=quantized)
    part = whole_model_part(checkpoint.model)
    source = open_weights(
        checkpoint,
        part,
        holding=holding,
        device=CPU,
        seed=seed,
        on_progress=on_progress,
    )
    try:
        num_bytes = _write_weights(source, folder)
    except SafetensorError as error:
        raise OSError(error) from error
    _write_small_files(
        checkpoint, folder, _quantization_note(checkpoint, quantized, seed)
    )
    return num_bytes


def _write_weights(source: LayerSource, folder: Path) -> int:
    """Write a file for each layer, and their index; return the bytes of tensors."""
    homes: dict[str, str] = {}
    num_bytes = 0
    for number, weights in enumerate(filter(None, _weight_groups(source))):
        tensors = {}
        for name, weight in weights.items():
            ending = "" if weight.is_plain else f".{weight.format.name}"
            tensors[name + ending] = weight.tensors[0]
            num_bytes += weight.num_bytes
        file = folder / f"model-{number:05}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)
        homes |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n"
    )
    return num_bytes


def _weight_groups(source: LayerSource) -> Iterator[Weights]:
    """Yield all weights by their names in a folder: entry, each layer's, exit."""
    yield (entry := source.load_entry())
    for number, layer in enumerate(source.load_layers()):
        yield {f"layers.{number}.{name}": weight for name, weight in layer.items()}
    kept = {id(weight) for weight in entry.values()}
    yield {
        n: weight
        for n, weight in source.load_exit(entry).items()
        if id(weight) not in kept
    }


def _write_small_files(
    checkpoint: Checkpoint, folder: Path, note: dict[str, object]
) -> None:
    """Write the config, and copy what a model has beside its weights."""
    tokenizer_folder = checkpoint.tokenizer_folder
    weight_folder = checkpoint.folder
    small_files = [
        f
        for p in (*SMALL_FILES, FURTHER_TEMPLATES)
        for f in (tokenizer_folder.glob(p) if tokenizer_folder else ())
    ]
    small_files = [f for f in small_files if f.name not in (*TELLING_FILES, MODULES)]
    files = [
        (tokenizer_folder, f) for f in small_files if not f.name.endswith(".index.json")
    ]
    files += [
        (weight_folder, file)
        for file in (list_sentence_files(weight_folder) if weight_folder else ())
    ]
    if (generation := checkpoint.generation_folder) and generation != tokenizer_folder:
        files.append((generation, generation / GENERATION))
    for top, file in files:
        target = folder / file.relative_to(str(top))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    fields["quantization_config"] = note
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
