"""Reads the files of sentence-transformers beside a model: pooling, prompts, similarity."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fminfer.compute.values.spec import Pooling, Reading
from fminfer.contract.request import SIMILARITIES, Similarity
from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import naming_broken_files

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
CONFIG = "config.json"
TEXT_SETTINGS = "sentence_*_config.json"  # beside the model, as a pattern
TOKENIZER = "tokenizer_config.json"
# in the folder of a dense layer
DENSE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "weightedmean_tokens": "weightedmean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
_ACTIVATIONS = {
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}


@dataclass(slots=True, frozen=True)
class SentenceFolder:
    """The settings of a folder of sentence-transformers."""

    pooling: Pooling | None  # None: nothing pools, as in a folder of a cross-encoder
    dense: tuple[Path, ...] = ()  # the folders of its dense layers' weights, in order
    max_length: int | None = None  # tokens of a text that are read
    is_lowercased: bool = False  # texts are, before the tokenizer reads them
    # by name; texts begin with one
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""  # the name of the one that is used if none is asked for
    # torch's name of the function that makes scores of logits
    activation: str | None = None
    similarity: Similarity = "cosine"  # how two vectors are compared


@naming_broken_files("modules.json, or a file that it names,")
def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """Read the settings of a folder of sentence-transformers; None: it is no such folder.

    Raises:
        CheckpointError: one of its modules does not run.
    """
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if (
        kinds[:1] != ["Transformer"] and "Pooling" not in kinds
    ) or "LogitScore" in kinds:
        return None
    if others := sorted(
        {*kinds} - {"Transformer", "Pooling", "Dense", "Normalize", "Dropout"}
    ):
        raise _unsupported_error(folder / MODULES, f"the module {others[0]}")
    # only training applies it
    order = " ".join(kind for kind in kinds if kind != "Dropout")
    if not re.fullmatch("Transformer( Pooling( Dense)*( Normalize)?)?", order):
        raise _unsupported_error(folder / MODULES, f"the modules {order} in this order")
    folders = [place for _, place in modules]
    if folders[0] != folder:
        raise _unsupported_error(
            folder / MODULES,
            f"its model in a folder below, {folders[0].name}; move it up",
        )
    dense = [each for each, kind in zip(folders, kinds, strict=True) if kind == "Dense"]
    pooling = None
    if "Pooling" in kinds:
        readings = tuple(_read_dense_layer(each / CONFIG) for each in dense)
        mode = _read_pooling_mode(folders[kinds.index("Pooling")] / CONFIG)
        pooling = Pooling(mode, readings, is_normalized="Normalize" in kinds)
    texts = next(
        (read_json_object(each) for each in sorted(folders[0].glob(TEXT_SETTINGS))), {}
    )
    settings = read_json_object(folder / SETTINGS)
    prompts, default_prompt = _parse_prompts(folder / SETTINGS, settings, pooling)
    return SentenceFolder(
        pooling,
        tuple(dense),
        texts.get("max_seq_length")
        or read_json_object(folder / TOKENIZER).get("model_max_length"),
        bool(texts.get("do_lower_case")),
        prompts,
        default_prompt,
        settings.get("activation_fn"),
        _parse_similarity(folder / SETTINGS, settings),
    )


def _parse_prompts(
    file: Path, settings: dict[str, Any], pooling: Pooling | None
) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the name of the default prompt; "": there is none."""
    prompts = {
        name: text or "" for name, text in (settings.get("prompts") or {}).items()
    }
    default = settings.get("default_prompt_name") or ""
    # sentence-transformers gives every embedding model these two prompts, empty.
    usual = () if pooling is None else ("query", "document")
    if default in usual:
        prompts.setdefault(default, "")
    if default and default not in prompts:
        known = ", ".join(prompts) or "none"
        raise CheckpointError(
            f"{file} names {default!r} as default_prompt_name, and its prompts are: {known}. "
            "Add that prompt, or set default_prompt_name to one of them or to null"
        )
    return prompts, default


def _parse_similarity(file: Path, settings: dict[str, Any]) -> Similarity:
    name = settings.get("similarity_fn_name") or "cosine"
    similarity = next((each for each in SIMILARITIES if each == name), None)
    if similarity is None:
        raise CheckpointError(
            f"{file} names {name!r} as similarity_fn_name; these run: "
            f"{', '.join(SIMILARITIES)}. Set it to one of them, or to null for cosine"
        )
    return similarity


def read_json_object(file: Path) -> dict[str, Any]:
    """Return what a JSON file beside a model says; {}: there is none."""
    with naming_broken_files(file):
        fields = json.loads(file.read_bytes()) if file.exists() else {}
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} is no JSON object; fetch it again")
    return fields


def list_sentence_files(folder: Path) -> list[Path]:
    """List the files of such a folder that are no weights, for digests and copies."""
    if not (folder / MODULES).exists():
        return []
    files = {folder / MODULES, folder / SETTINGS}
    for _, module_folder in _read_modules(folder):
        files.update(module_folder.glob(TEXT_SETTINGS))
        if module_folder != folder:
            files.add(module_folder / CONFIG)
    return sorted(file for file in files if file.is_file())


def list_dense_weights(folder: Path) -> list[str]:
    """List the weight files that dense layers may have, by their paths in the folder."""
    folders = [
        module_folder
        for kind, module_folder in _read_modules(folder)
        if kind == "Dense"
    ]
    files = [
        module_folder / name for module_folder in folders for name in DENSE_WEIGHTS
    ]
    return [str(file.relative_to(folder)) for file in files]


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module in MODULES; empty: there is no such file."""
    if not (folder / MODULES).exists():
        return []
    with naming_broken_files(folder / MODULES):
        fields = json.loads((folder / MODULES).read_bytes())
        pairs = [(str(each["type"]), str(each.get("path") or "")) for each in fields]
    for _, path in pairs:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(
                f"{folder / MODULES} names {path!r}, which is not in its folder; "
                "correct the path"
            )
    return [(kind.rpartition(".")[2], folder / path) for kind, path in pairs]


def _read_pooling_mode(file: Path) -> str:
    fields = _read_module_config(file)
    start = "pooling_mode_"
    old_modes = [
        name[len(start) :]
        for name, value in fields.items()
        if value and name.startswith(start)
    ]
    modes = fields.get("pooling_mode") or old_modes or ["mean"]
    names = [
        _MODES.get(each, each)
        for each in ([modes] if isinstance(modes, str) else modes)
    ]
    if len(names) != 1 or names[0] not in _MODES.values():
        known = ", ".join(_MODES.values())
        raise _unsupported_error(
            file, f"not one pooling of {known}, but {', '.join(names)},"
        )
    if not fields.get("include_prompt", True):
        raise _unsupported_error(
            file, "include_prompt false, which leaves a prompt's tokens out of the mean"
        )
    return names[0]


def _read_dense_layer(file: Path) -> Reading:
    fields = _read_module_config(file)
    activation = str(fields.get("activation_function", "Tanh")).rpartition(".")[2]
    names = {fields.get(f"module_{end}_name") for end in ("input", "output")}
    if activation not in _ACTIVATIONS:
        raise _unsupported_error(
            file, f"the activation {activation}; these run: {', '.join(_ACTIVATIONS)}"
        )
    if fields.get("use_residual") or not names <= {None, "sentence_embedding"}:
        raise _unsupported_error(
            file, "a dense layer that is not the usual one, between two vectors"
        )
    if not isinstance(fields.get("out_features"), int):
        raise _unsupported_error(file, "no out_features")
    return Reading(
        fields["out_features"], _ACTIVATIONS[activation], fields.get("bias", True)
    )


def _read_module_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(
            f"{MODULES} names {file.parent.name}, and {file} is missing; fetch the whole folder"
        )
    return read_json_object(file)


def _unsupported_error(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} has {what}, which does not run. docs/encoders.md lists what does; a "
        f"copy of the folder without {MODULES} is read as a plain model"
    )
