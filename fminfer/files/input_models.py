"""Finds models that are given as inputs, and says which command runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.core.impostors import GGUF, is_gguf
from fminfer.files.first_lines import holds_requests
from fminfer.files.line_reader import ROW_ENDINGS, is_input_name
from fminfer.files.streams import is_stream

EXAMPLE = "requests.jsonl"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", GGUF)
MAX_MARK_BYTES = 2**20
# Files that make a folder a model, with keys: the JSON object in the file has one of them.
MARKS = {
    "config.json": ("model_type", "architectures"),
    "adapter_config.json": ("peft_type", "base_model_name_or_path"),
    "modules.json": ("idx",),
    "params.json": ("n_layers", "n_heads"),
}
HUB_NAME = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?"  # of a page
    r"([\w-][\w.-]*/[\w.-]+)/?"
)


def check_no_models(paths: Iterable[Path | str], example: str = "") -> None:
    """Raise a UsageError if an input is a model, with the command to type.

    Args:
        example: the input of `fminfer run` in that command; "": the other inputs.
    """
    names = {path: name_model(path) for path in paths}
    others = shlex.join(str(path) for path, name in names.items() if not name)
    for path, name in names.items():
        if name:
            raise UsageError(describe_model(path, name, example or others))


def check_no_model_folder(flag: str, path: Path) -> None:
    """Raise a UsageError if a folder to write into is a model's: a flag was forgotten."""
    if path.is_dir() and name_model(path):
        raise UsageError(
            f"{flag} {path} is a model's folder, and other files would be written into it. To "
            f"answer with the model, give --model-name {shlex.quote(str(path))}; give another "
            f"{flag}, or leave it out"
        )


def describe_model(path: Path | str, name: str, inputs: str = "") -> str:
    """Say that an input is a model, and which command uses it."""
    command = f"fminfer run {inputs or EXAMPLE} --model-name {shlex.quote(name)}"
    if not os.path.exists(path):
        return (
            f"{path} does not exist; give a .jsonl file or a folder of them. "
            f"If it is a model of the hub: {command}"
        )
    requests = _find_requests(Path(path))
    more = f". To answer {requests[0]}, name that file itself" if requests else ""
    return f"{path} is a model, and not a file of requests; answer them with it: {command}{more}"


def name_model(path: Path | str) -> str:
    """Return what --model-name takes for an input that is a model; "": it is none.

    A folder of requests may hold weights, or a file of a model, but not both.
    """
    file = Path(path)
    if file.is_dir():
        num_marks = sum(_marks_model(file / name, keys) for name, keys in MARKS.items())
        num_marks += any(each.name.endswith(WEIGHTS) for each in file.iterdir())
        is_model = num_marks > 1 or (num_marks == 1 and not _find_requests(file))
        return str(path) if is_model else ""

    if not os.path.lexists(path):
        match = HUB_NAME.fullmatch(str(path))
        is_elsewhere = not file.parent.exists() and not file.name.endswith(ROW_ENDINGS)
        return match[1] if match is not None and is_elsewhere else ""
    if is_stream(file) or not file.is_file():
        return ""
    if is_gguf(file):
        return str(path)

    is_part = file.name.endswith(WEIGHTS) or (
        file.suffix == ".json" and name_model(file.parent)
    )
    return str(file.parent) if is_part and not holds_requests(file) else ""


def _find_requests(folder: Path) -> list[Path]:
    """Return the files of a folder that may hold requests; .json files only if they do."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    inputs = [file for file in files if is_input_name(file.name)]
    return [file for file in inputs if file.suffix != ".json" or holds_requests(file)]


def _marks_model(path: Path, keys: tuple[str, ...]) -> bool:
    fields = None
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= MAX_MARK_BYTES:
            fields = json.loads(path.read_bytes())
    objects = fields if isinstance(fields, list) else [fields]
    return any(
        isinstance(each, dict) and not each.keys().isdisjoint(keys) for each in objects
    )
