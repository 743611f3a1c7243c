"""Refuses by name what lies beside a model, or in its place, and would change its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fminfer.core.errors import CheckpointError

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"  # what the names of their files begin with
QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
TELLING_FILES = [ADAPTER, *QUANTIZED]


def refuse_what_is_beside(name: str, folder: Path, *, without_adapter: bool) -> None:
    """Refuse an adapter, and weights that another file calls quantized.

    Args:
        name: of the model, as it was given.
        without_adapter: an adapter beside a model is left out.

    Raises:
        CheckpointError: it says what is there, and what to do.
    """
    weights = (f for f in folder.glob("*.safetensors") if not f.name.startswith(ADAPTER_WEIGHTS))
    is_model = (folder / "config.json").exists() or any(weights)
    if (folder / ADAPTER).exists() and not (is_model and without_adapter):
        raise _adapter_error(name, _read(folder / ADAPTER), is_model=is_model)
    for file in QUANTIZED:
        if (folder / file).exists() and not _names_none(_read(folder / file)):
            raise CheckpointError(
                f"the weights of {name} are quantized, as its {file} says, which does not run yet; "
                f"take a checkpoint in 16 or 32 bits. If they are not, give a copy without {file}"
            )


def _names_none(fields: Any) -> bool:
    """Tell whether a file of a quantizer says that nothing is quantized."""
    section = fields.get("quantization", fields) if isinstance(fields, dict) else None
    names = ("quant_algo", "quant_method")
    return section == {} or (
        isinstance(section, dict) and any(section.get(name, 0) is None for name in names)
    )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _adapter_error(name: str, adapter: Any, *, is_model: bool) -> CheckpointError:
    fields = adapter if isinstance(adapter, dict) else {}
    kind, base = fields.get("peft_type", "LoRA"), fields.get("base_model_name_or_path")
    holds = f"a model and beside it a {kind} adapter" if is_model else f"a {kind} adapter alone"
    flag = "; or give --without-adapter, and the model answers without it" if is_model else ""
    return CheckpointError(
        f"{name} holds {holds} ({ADAPTER}), which fminfer does not apply. Its base model is "
        f"{base or 'not named'}. Merge the two by peft's merge_and_unload, save that by "
        f"save_pretrained, and give its folder{flag}"
    )
