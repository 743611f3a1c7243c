"""A folder of a quantized model: written once, read at the speed of the disk.

Its safetensors hold our tensors by our names, such as "layers.0.qkv.weight.int4": joined, laid out
and in the bytes in which they are held. Processors pack them in orders of their own, so they are
packed as they are read. Its config.json says so in `quantization_config`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from fminfer.compute.quantized.block_format import Blocks
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.config_fields import OWN_METHOD
from fminfer.models.formats import Holding
from fminfer.models.hub import SMALL_FILES
from fminfer.models.layer_source import OnProgress, open_weights
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
        UsageError: the folder is there.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there already; name a folder that is new or empty")
    stored = stored_formats(checkpoint).values()
    is_gguf = checkpoint.folder is not None and checkpoint.folder.is_file()
    if is_gguf or any(isinstance(held, Blocks) for parts in stored for held, _ in parts):
        raise CheckpointError(
            f"{checkpoint.name} is {'a GGUF file' if is_gguf else 'quantized already'}; fminfer "
            "runs it as it is. Give the model's folder in 16 or 32 bits"
        )
    dtype = checkpoint.config.dtype or torch.bfloat16
    holding = Holding(dtype, quantized=quantized)
    part = whole_model(checkpoint.model)
    source = open_weights(
        checkpoint, part, holding=holding, device=CPU, seed=seed, on_progress=on_progress
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        shards = _Shards(draft)
        entry = source.entry()
        shards.add(entry, "")
        for number, layer in enumerate(source.layers()):
            shards.add(layer, f"layers.{number}.")
        kept = {id(weight) for weight in entry.values()}
        shards.add({n: w for n, w in source.exit(entry).items() if id(w) not in kept}, "")
        num_bytes = shards.finish()
        _write_small_files(checkpoint, draft, quantized)
        draft.chmod(0o755)
        if output.exists():
            output.rmdir()
        os.replace(draft, output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return num_bytes


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
        (self._folder / name).chmod(0o644)
        self._homes |= dict.fromkeys(self._tensors, name)
        self._num_bytes += self._waiting_bytes
        self._tensors, self._waiting_bytes = {}, 0


def _write_small_files(checkpoint: Checkpoint, folder: Path, quantized: str) -> None:
    """Write the config, and copy what a model has beside its weights."""
    for own in (checkpoint.tokenizer_folder, checkpoint.generation_folder):
        for file in [] if own is None else own.iterdir():
            is_small = file.is_file() and any(file.match(pattern) for pattern in SMALL_FILES)
            if is_small and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    fields["quantization_config"] = {"quant_method": OWN_METHOD, "to": quantized}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
