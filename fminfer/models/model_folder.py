"""Fetches a model's folder from the hub, and checks the files beside its weights."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import GGUF, gguf_only_error
from fminfer.models.known_sizes import find_model_folder
from fminfer.models.sentence_folder import list_dense_weights, read_json_object
from fminfer.models.stored.weight_folder import ADAPTER_WEIGHTS, find_weights

ADAPTER = "adapter_config.json"
QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
TELLING_FILES = [ADAPTER, *QUANTIZED]
# A * stands for a slash, too: those of folders in it come along, as sentence-transformers' do.
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]
# Of weights the first form that a repository holds. Both would double the download.
WEIGHT_FILES = (["model*.safetensors"], ["*.safetensors"], ["pytorch_model*.bin"])


def fetch_files(name: str, files: list[str], revision: str | None = None) -> Path:
    """Fetch the files of a hub's model that match some patterns, and return their folder.

    Raises:
        CheckpointError: the hub has no such model or revision, or does not answer.
    """
    from huggingface_hub import snapshot_download  # only for models that are not local
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    is_path = name.startswith(("/", ".", "~")) or Path(name).exists()
    if is_path or name.count("/") > 1:
        raise _not_found_error(name)
    try:
        return Path(snapshot_download(name, allow_patterns=files, revision=revision))
    except HFValidationError as error:  # in the hub's own words it is about a "repo id"
        raise _not_found_error(name) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise CheckpointError(
            f"{name!r}{at} is no local folder, and the hub did not give it: {error}\n"
            "Without a connection, copy its files into a folder here and give that (of "
            "GGUF, give the file)"
        ) from error


def fetch_model(name: str, revision: str | None = None) -> Path:
    """Fetch a model's small files, and its weights in one form.

    Errors are those of `fetch_files`.
    """
    folder = fetch_files(name, SMALL_FILES, revision)
    # The commit, so that files of a branch that moves meanwhile are not mixed.
    commit = folder.name if len(folder.name) == 40 else revision
    names = _list_hub_files(name, commit)
    if names is None:
        return folder
    names = [each for each in names if not each.startswith(ADAPTER_WEIGHTS)]
    for patterns in WEIGHT_FILES:
        if any(fnmatch(each, pattern) for each in names for pattern in patterns):
            return fetch_files(
                name, SMALL_FILES + patterns + list_dense_weights(folder), commit
            )
    return folder  # loading says that it has no weights


def find_weight_files(name: str) -> dict[Path, int]:
    """Return the weight files of a folder or hub id on this machine, and their sizes.

    Pipes and devices are left out: to read them ahead might never end. A broken folder has none.
    """
    try:
        if (folder := find_model_folder(name)) is None:
            # only for models that are not local
            from huggingface_hub import try_to_load_from_cache

            config = try_to_load_from_cache(name, "config.json")
            folder = Path(config).parent if isinstance(config, str) else None
        files = [] if folder is None else find_weights(folder).files
        return {file: file.stat().st_size for file in files if file.is_file()}
    except (CheckpointError, OSError, ValueError):
        return {}


def check_not_gguf(name: str, folder: Path, revision: str | None) -> None:
    """Raise a CheckpointError for a repository that holds no config, but GGUF files."""
    if not (folder / "config.json").exists():
        files = [
            file
            for file in _list_hub_files(name, revision) or []
            if file.endswith(GGUF)
        ]
        if files:
            raise gguf_only_error(name, files, is_of_hub=True)


def _list_hub_files(name: str, revision: str | None) -> list[str] | None:
    """Return the files at the top of a repository; None: the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(name, revision=revision).siblings or []
    except Exception:  # of whatever library the hub's client speaks HTTP with
        return None
    return [each.rfilename for each in siblings if "/" not in each.rfilename]


def _not_found_error(name: str) -> CheckpointError:
    """Return the error of a name that can be no model of the hub."""
    if Path(name).is_file():
        has_one = (Path(name).parent / "config.json").exists()
        remedy = (
            f"give its folder, {Path(name).parent}"
            if has_one
            else "give a model's folder"
        )
        return CheckpointError(f"the model {name!r} is a file; {remedy}")
    return CheckpointError(
        f"the model {name!r} is no folder here, and no model of the hub can have that "
        "name. Give the folder that holds its files, or a hub id such as "
        "facebook/opt-125m"
    )


def check_files_beside(name: str, folder: Path, *, without_adapter: bool) -> None:
    """Raise a CheckpointError for an adapter that counts, or a file that says "quantized"."""
    weights = (
        f
        for f in folder.glob("*.safetensors")
        if not f.name.startswith(ADAPTER_WEIGHTS)
    )
    is_model = (folder / "config.json").exists() or any(weights)
    if (folder / ADAPTER).exists() and not (is_model and without_adapter):
        fields = read_json_object(folder / ADAPTER)
        kind = fields.get("peft_type", "LoRA")
        base = fields.get("base_model_name_or_path")
        holds = (
            f"a model and beside it a {kind} adapter"
            if is_model
            else f"a {kind} adapter alone"
        )
        flag = (
            "; or give --without-adapter, and the model answers without it"
            if is_model
            else ""
        )
        raise CheckpointError(
            f"{name} holds {holds} ({ADAPTER}), which fminfer does not apply. Its base model is "
            f"{base or 'not named'}. Merge the two by peft's merge_and_unload, save that by "
            f"save_pretrained, and give its folder{flag}"
        )
    for file in QUANTIZED:
        if (
            (folder / file).exists()
            and not _is_unquantized(read_json_object(folder / file))
            and not _is_told_quantized(folder)
        ):
            raise CheckpointError(
                f"the weights of {name} are quantized, as its {file} says, and its "
                "config.json has no quantization_config that says how. Take a newer copy of "
                f"the model, or one in 16 bits. If they are not quantized, delete {file}"
            )


def _is_told_quantized(folder: Path) -> bool:
    """Tell whether a config.json says how weights are quantized, which then counts."""
    config = folder / "config.json"
    if not config.exists():
        return False
    fields = read_json_object(config)
    text = fields.get("text_config")
    parts = (fields, text if isinstance(text, dict) else {})
    return any(part.get("quantization_config") for part in parts)


def _is_unquantized(fields: dict[str, Any]) -> bool:
    """Tell whether a file of a quantizer says that nothing is quantized."""
    section = fields.get("quantization", fields)
    names = ("quant_algo", "quant_method")
    return section == {} or (
        isinstance(section, dict)
        and any(section.get(name, 0) is None for name in names)
    )
