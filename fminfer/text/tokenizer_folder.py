"""Reads the tokenizer of a folder as transformers' class, with what its files say."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import (
    check_no_impostor,
    check_plain_files,
    naming_broken_files,
)
from fminfer.text.sentencepieces import follow_model_file
from fminfer.text.tokenizer_file import OTHER_FILES, check_growth, follow_tokenizer_file

# where models that read images, too, kept theirs
LEGACY_TEMPLATE = "chat_template.json"
MAX_FAULT = 200  # characters of what a library says
BYT5 = "ByT5Tokenizer"  # whose vocabulary is the 256 bytes, in no file
# Files of vocabularies, beside those whose names end in .model or .tiktoken.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")


def read_tokenizer(folder: Path, config: Any | None) -> tuple[Any, str]:
    """Return transformers' tokenizer of a folder, and what a user is to know of its files.

    Args:
        config: the model's; it tells the tokenizer's kind if the folder has no config.

    Raises:
        CheckpointError: the folder has no tokenizer that transformers can read.
    """
    check_plain_files(folder)
    has_file = any(is_vocabulary_file(file.name) for file in folder.iterdir())
    if not has_file and (name := _find_class_name(folder)) != BYT5:
        class_words = f" of its class {name}" if name else ""
        raise CheckpointError(
            f"{folder} has no tokenizer{class_words} (tokenizer.json, tokenizer.model or the "
            f"like; only {BYT5} needs none). Put the model's own there; or name a folder or "
            "hub id that has it by --tokenizer; or, if all prompts are token ids, give "
            "--skip-tokenizer-init, with which answers have token ids and no text"
        )
    for file in folder.iterdir():
        if is_vocabulary_file(file.name) or file.name == "tokenizer_config.json":
            check_no_impostor(file)
        if file.name == "tokenizer.json":
            with naming_broken_files(file):
                check_growth(file)
    if (folder / "config.json").exists() or (folder / "tokenizer_config.json").exists():
        config = None

    hf, note = _load_tokenizer(folder, config)
    if (backend := getattr(hf, "backend_tokenizer", None)) is not None:
        file = folder / "tokenizer.json"
        if file.exists():
            note = note or follow_tokenizer_file(hf, file)
        else:
            follow_model_file(backend, folder)
    if not hf.chat_template and (file := folder / LEGACY_TEMPLATE).exists():
        with naming_broken_files(file):
            hf.chat_template = read_template(file)
    return hf, note


def _load_tokenizer(folder: Path, config: Any | None) -> tuple[Any, str]:
    """Return transformers' tokenizer of a folder, and what is to be told of it.

    A tokenizer.json says all that a class can say, so it does without one that cannot be made.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    try:
        return AutoTokenizer.from_pretrained(
            folder, config=config, trust_remote_code=False
        ), ""
    except MemoryError:
        raise
    except Exception as error:  # classes that do not fit their file raise anything
        fault = error
    _check_whole_files(folder)
    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(f"{folder} has no usable tokenizer: {fault}") from fault
    reason = " ".join(str(fault).split())[:MAX_FAULT]
    with naming_broken_files(
        f"{folder / 'tokenizer.json'}, or a file of the tokenizer beside it,"
    ):
        hf = PreTrainedTokenizerFast.from_pretrained(folder)
    return (
        hf,
        f"{folder}: tokenizer.json is used without its class, which cannot be made ({reason})",
    )


def _find_class_name(folder: Path) -> str | None:
    """Return the class of a tokenizer that a folder's configs name."""
    for name in ("tokenizer_config.json", "config.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads((folder / name).read_bytes())["tokenizer_class"])
    return None


def _check_whole_files(folder: Path) -> None:
    """Raise a CheckpointError that names a file of broken JSON, as one whose download broke off.

    It is asked once loading has failed: to parse 30 MB twice would slow every start.
    """
    for file in sorted(folder.glob("*.json")):
        if is_vocabulary_file(file.name) or file.name in OTHER_FILES:
            with naming_broken_files(file):
                json.loads(file.read_bytes())


def is_vocabulary_file(file_name: str) -> bool:
    """Tell whether a file of this name may hold a tokenizer's vocabulary."""
    return file_name in VOCABULARIES or file_name.endswith((".model", ".tiktoken"))


def read_template(file: Path) -> str:
    """Return the chat template that a file holds: Jinja, or a processor's chat_template.json.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no template.
    """
    text = file.read_text("utf-8-sig")  # a byte order mark is no part of a prompt
    if file.suffix != ".json":
        return text
    fields = json.loads(text)
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if not isinstance(template, str):
        raise ValueError("it is no JSON object with a text as its chat_template")
    return template
