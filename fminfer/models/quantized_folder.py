"""A folder of a quantized model: written once, read at the speed of the disk.

Its safetensors hold our tensors by our names, such as "layers.0.qkv.weight.int4": joined, laid out
and in the bytes in which they are held. Processors pack them in orders of their own, so they are
packed as they are read. Its config.json says so in `quantization_config`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fminfer.compute.quantized.block_format import Blocks
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.core.quantities import show_bytes
from fminfer.models.checkpoint import GENERATION, Checkpoint
from fminfer.models.config_fields import OWN_FOLDER
from fminfer.models.fingerprint import FURTHER_TEMPLATES
from fminfer.models.formats import Holding
from fminfer.models.hub import SMALL_FILES
from fminfer.models.layer_source import LayerSource, OnProgress, open_weights
from fminfer.models.tensor_specs import Weights, whole_model
from fminfer.models.weight_headers import stored_formats

SHARD_BYTES = 1 << 29  # of one file
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


def write_quantized(
    checkpoint: Checkpoint, output: Path, quantized: str, *, seed: int, on_progress: OnProgress
) -> int:
    """Write a model with its weights quantized; the folder gets its name once it is complete.

    Args:
        quantized: as --quantize.
        seed: of random weights.
        on_progress: called with (bytes made, bytes in all).

    Returns:
        the bytes of its weights.

    Raises:
        CheckpointError: the model cannot be loaded, or is quantized already.
        UsageError: the folder is there, or cannot be written.
    """
    output = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there already; name a folder that is new or empty")
    stored = stored_formats(checkpoint).values()
    is_gguf = checkpoint.folder is not None and checkpoint.folder.is_file()
    if is_gguf or any(isinstance(held, Blocks) for parts in stored for held, _ in parts):
        raise CheckpointError(
            f"{checkpoint.name} is {'a GGUF file' if is_gguf else 'quantized already'}; fminfer "
            "runs it as it is. Give the model's folder in 16 or 32 bits"
        )
    # What stays in floats is as exact as it is stored.
    holding = Holding(torch.float32, keeps_bfloat16=True, quantized=quantized)
    part = whole_model(checkpoint.model)
    source = open_weights(
        checkpoint, part, holding=holding, device=CPU, seed=seed, on_progress=on_progress
    )
    draft: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        draft = output.with_name(f".{output.name}.part")
        shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
        draft.mkdir()
        num_bytes = _write_weights(source, draft)
        _write_small_files(checkpoint, draft, quantized)
        if output.exists():
            output.rmdir()
        os.replace(draft, output)
    except (OSError, SafetensorError) as error:
        free = (
            f"{show_bytes(shutil.disk_usage(draft).free)} are free there" if draft else "check it"
        )
        raise UsageError(f"--output {output} cannot be written: {error}; {free}") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return num_bytes


def _write_weights(source: LayerSource, folder: Path) -> int:
    shards, entry = _Shards(folder), source.entry()
    shards.add(entry, "")
    for number, layer in enumerate(source.layers()):
        shards.add(layer, f"layers.{number}.")
    kept = {id(weight) for weight in entry.values()}
    shards.add({n: w for n, w in source.exit(entry).items() if id(w) not in kept}, "")
    return shards.finish()


class _Shards:
    """Files of tensors, and the index that names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._homes: dict[str, str] = {}
        self._num_bytes = self._waiting_bytes = self._num_files = 0

    def add(self, weights: Weights, prefix: str) -> None:
        """Take the weights of a layer; write those that fill a file."""
        for name, weight in weights.items():
            ending = "" if weight.is_plain else f".{weight.format.name}"
            self._tensors[f"{prefix}{name}{ending}"] = weight.tensors[0]
            self._waiting_bytes += weight.num_bytes
        if self._waiting_bytes >= SHARD_BYTES:
            self._write()

    def finish(self) -> int:
        """Write the rest and the index; return the bytes of all tensors."""
        self._write()
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._homes}
        path = self._folder / INDEX
        path.write_text(json.dumps(index, indent=2) + "\n")
        return self._num_bytes

    def _write(self) -> None:
        if not self._tensors:
            return
        self._num_files += 1
        name = f"model-{self._num_files:05}.safetensors"
        save_file(self._tensors, self._folder / name, metadata={"format": "pt"})
        (self._folder / name).chmod(self._folder.stat().st_mode & 0o666)
        self._homes |= dict.fromkeys(self._tensors, name)
        self._num_bytes += self._waiting_bytes
        self._tensors, self._waiting_bytes = {}, 0


def _write_small_files(checkpoint: Checkpoint, folder: Path, quantized: str) -> None:
    """Write the config, and copy what a model has beside its weights."""
    own = checkpoint.tokenizer_folder
    files = [] if own is None else [f for pattern in SMALL_FILES for f in own.glob(pattern)]
    templates = [] if own is None else [*own.glob(FURTHER_TEMPLATES)]
    for file in (*files, *templates):
        if own is not None and not file.name.endswith(".index.json"):
            target = folder / file.relative_to(own)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    if checkpoint.generation_folder not in (None, own):
        assert checkpoint.generation_folder is not None, "a folder"
        shutil.copyfile(checkpoint.generation_folder / GENERATION, folder / GENERATION)
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    fields["quantization_config"] = OWN_FOLDER | {"to": quantized}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
