"""The files that hold a model's weights, and how large they are. It needs no torch."""

from __future__ import annotations

import json
from pathlib import Path


def weight_files(folder: Path) -> list[Path]:
    """List the files that make up the model: those of the index, else the one, else all.

    Some repositories hold the same weights twice, the second time in another format.
    """
    if homes := indexed_homes(folder):
        return sorted(folder / name for name in set(homes.values()))
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def indexed_homes(folder: Path) -> dict[str, str]:
    """Return the file of each tensor as the index has it; nothing where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {}
    homes: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return homes


def find_weight_files(name: str) -> dict[Path, int]:
    """Return the weight files of a folder, or of the hub's model in its cache, and their sizes.

    Nothing: they are not there, or are broken, as loading will say.
    """
    try:
        folder = _find_folder(name)
        return {
            file: file.stat().st_size for file in ([] if folder is None else weight_files(folder))
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _find_folder(name: str) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # only for models that are not local

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None
