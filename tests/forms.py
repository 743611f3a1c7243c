"""Checkpoints in all forms, laid out by hand as the programs that wrote them did."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Files = dict[str, Tensors]
FORMS = (
    "bin",
    "bin-old",
    "bin-shards",
    "bin-pieces",
    "layers",
    "metaseq",
    "metaseq-parts",
)
# What the names of a family begin with, and what its layers are called.
TOPS = {
    "opt": ("model.decoder.", "layers."),
    "gpt_neox": ("gpt_neox.", "layers."),
    "llama": ("model.", "layers."),
    **dict.fromkeys(("bloom", "gptj", "gpt_neo", "gpt2"), ("transformer.", "h.")),
}
AFTER = (
    "ln_f.",
    "final_layer_norm.",
    "norm.",
    "lm_head.",
    "embed_out.",
    "project_out.",
)


def tensors_of(model: Any) -> Tensors:
    """Return a model's tensors; a tied head is a tensor of its own."""
    return {
        name: tensor.detach().clone() for name, tensor in model.state_dict().items()
    }


def lay_out(form: str, model: Any) -> Files:
    """Return the files of a form, as dicts of tensors."""
    tensors = tensors_of(model)
    names = sorted(tensors)
    if form == "safetensors":
        return {"model.safetensors": tensors}
    if form in ("bin", "bin-old"):
        return {"pytorch_model.bin": tensors}
    if form in ("bin-shards", "bin-pieces"):
        return {
            f"pytorch_model-{n + 1:05}-of-00003.bin": {
                name: tensors[name] for name in names[n::3]
            }
            for n in range(3)
        }
    if form == "layers":
        return _by_layer(model.config.model_type, tensors)
    assert form in ("metaseq", "metaseq-parts")
    flat = _as_metaseq(tensors)
    if form == "metaseq":
        return {"restored.pt": flat}
    return {f"reshard-model_part-{n}.pt": _part(flat, n, 2) for n in range(2)}


def write(form: str, files: Files, model: Any, folder: Path) -> Path:
    """Write the files of a form and the config beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    for name, tensors in files.items():
        if form == "safetensors":
            tensors = {n: t.contiguous() for n, t in tensors.items()}
            save_file(tensors, folder / name, metadata={"format": "pt"})
            continue
        what: dict[str, Any] = dict(tensors)
        if form == "metaseq-parts":  # beside what training saved
            what = {
                "cfg": Namespace(arch="opt"),
                "model": what,
                "extra_state": {"epoch": 1},
            }
        is_zip = form != "bin-old"
        torch.save(what, folder / name, _use_new_zipfile_serialization=is_zip)
    if form == "bin-shards":
        homes = {name: file for file, tensors in files.items() for name in tensors}
        index = {"metadata": {"total_size": 1}, "weight_map": homes}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def save(
    form: str,
    model: Any,
    folder: Path,
    change: Callable[[Files], object] = lambda files: None,
) -> Path:
    """Save a model in a form, its files changed."""
    files = lay_out(form, model)
    change(files)
    return write(form, files, model, folder)


def _by_layer(model_type: str, tensors: Tensors) -> Files:
    top, layers = TOPS[model_type]
    files: Files = {"pytorch_embs.pt": {}, "pytorch_lm_head.pt": {}}
    for name, tensor in tensors.items():
        rest = name.removeprefix(top)
        if rest.startswith(layers):
            number, _, rest = rest.removeprefix(layers).partition(".")
            files.setdefault(f"pytorch_{number}.pt", {})[rest] = tensor
        else:
            is_after = rest.startswith(AFTER)
            files["pytorch_lm_head.pt" if is_after else "pytorch_embs.pt"][rest] = (
                tensor
            )
    return files


def _as_metaseq(tensors: Tensors) -> Tensors:
    flat = {"decoder.version": torch.tensor([3.0])}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        name = name.replace("decoder.final_layer_norm.", "decoder.layer_norm.")
        name = name.replace("project_in.", "project_in_dim.")
        name = name.replace("project_out.", "project_out_dim.")
        name = name.replace("lm_head.", "decoder.output_projection.")
        flat[name] = tensor
    for name in [name for name in flat if ".q_proj." in name]:
        parts = [flat.pop(name.replace(".q_proj.", f".{each}_proj.")) for each in "kvq"]
        flat[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return flat


def _part(flat: Tensors, number: int, num_parts: int) -> Tensors:
    """Return a part for tensor parallelism."""

    def cut(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(num_parts, dim)[number]

    found = {}
    for name, tensor in flat.items():
        if ".qkv_proj." in name:
            tensor = torch.cat([cut(each) for each in tensor.chunk(3)])
        elif ".fc1." in name or "embed_tokens" in name or "output_projection" in name:
            tensor = cut(tensor)
        elif name.endswith((".fc2.weight", ".out_proj.weight")):
            tensor = cut(tensor, 1)
        found[name] = tensor.clone()
    return found
