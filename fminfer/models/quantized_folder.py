"""A folder of a quantized model: written once, and read without rounding again.

Its safetensors hold our tensors by our names, such as "layers.0.qkv.weight.int4", in the bytes in
which they are held. They are packed as they are read, for each processor in its own order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fminfer.compute.quantized import Blocks
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.models.checkpoint import GENERATION, Checkpoint
from fminfer.models.config_fields import OWN_FOLDER
from fminfer.models.fingerprint import FURTHER_TEMPLATES
from fminfer.models.formats import Holding
from fminfer.models.layer_source import LayerSource, OnProgress, open_weights
from fminfer.models.model_folder import SMALL_FILES, TELLING_FILES
from fminfer.models.origins import stored_formats
from fminfer.models.sentence_folder import MODULES, sentence_files
from fminfer.models.tensor_specs import Weights, whole_model

CPU = torch.device("cpu")


def write_quantized(
    checkpoint: Checkpoint, output: Path, quantized: str, *, seed: int, on_progress: OnProgress
) -> int:
    """Write a model with its weights quantized, as --quantize says; return the bytes of weights.

    The folder gets its name once it is complete.

    Raises:
        CheckpointError, UsageError: the model is quantized already; the folder cannot be written.
    """
    output = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there already; name a folder that is new or empty")
    stored = stored_formats(checkpoint).values()
    if any(isinstance(held, Blocks) for parts in stored for held, _ in parts):
        raise CheckpointError(
            f"{checkpoint.name} is quantized already; fminfer runs it as it is. Give the model in "
            "16 or 32 bits"
        )
    # What stays in floats is as exact as it is stored.
    holding = Holding(torch.float32, keeps_bfloat16=True, quantized=quantized)
    part = whole_model(checkpoint.model)
    source = open_weights(
        checkpoint, part, holding=holding, device=CPU, seed=seed, on_progress=on_progress
    )
    draft = output.with_name(f".{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
        draft.mkdir()
        num_bytes = _write_weights(source, draft)
        _write_small_files(checkpoint, draft, quantized)
        os.replace(draft, output)  # which may be there, empty
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {error}. Mend that, or name another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return num_bytes


def _write_weights(source: LayerSource, folder: Path) -> int:
    """Write a file for each layer, and the index that names them; return the bytes of tensors."""
    homes: dict[str, str] = {}
    num_bytes = 0
    for number, weights in enumerate(filter(None, _groups(source))):
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
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return num_bytes


def _groups(source: LayerSource) -> Iterator[Weights]:
    """Give all weights by the names of a folder: before the layers, each layer's, the rest."""
    yield (entry := source.entry())
    for number, layer in enumerate(source.layers()):
        yield {f"layers.{number}.{name}": weight for name, weight in layer.items()}
    kept = {id(weight) for weight in entry.values()}
    yield {n: weight for n, weight in source.exit(entry).items() if id(weight) not in kept}


def _write_small_files(checkpoint: Checkpoint, folder: Path, quantized: str) -> None:
    """Write the config, and copy what a model has beside its weights."""
    own, stored = checkpoint.tokenizer_folder, checkpoint.folder
    found = [f for p in (*SMALL_FILES, FURTHER_TEMPLATES) for f in (own.glob(p) if own else ())]
    found = [f for f in found if f.name not in (*TELLING_FILES, MODULES)]
    files = [(own, f) for f in found if not f.name.endswith(".index.json")]
    files += [(stored, file) for file in (sentence_files(stored) if stored else ())]
    if (generation := checkpoint.generation_folder) and generation != own:
        files.append((generation, generation / GENERATION))
    for top, file in files:
        target = folder / file.relative_to(str(top))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    fields["quantization_config"] = OWN_FOLDER | {"to": quantized}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
