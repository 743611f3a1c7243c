"""The fingerprint: what must not change if a run is to go on from earlier rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from fminfer.core.config import EngineConfig
from fminfer.core.errors import UsageError
from fminfer.core.impostors import naming_broken_files
from fminfer.core.option import FILE, Option, find_annotations, options_of
from fminfer.core.quantities import list_few
from fminfer.core.version import DRAWING, __version__
from fminfer.models.checkpoint import GENERATION, Checkpoint
from fminfer.models.known_sizes import DEMO_NAMES
from fminfer.models.sentence_folder import list_sentence_files
from fminfer.models.stored.tensor_table import WeightHeaders
from fminfer.models.stored.weight_folder import find_weights

# A weight file's digest covers its header, and this much of each tensor, in the middle and at
# the end. Training changes a tensor everywhere, new tokens its end. To read 350 GB would
# take minutes.
PIECE_BYTES = 2048
# By name: a folder may hold outputs too.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SUFFIXES = (".model", ".tiktoken")
# such as one for requests with tools
FURTHER_TEMPLATES = "additional_chat_templates/*.jinja"


def compute_fingerprint(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> dict[str, str]:
    """Return what an answer depends on beside its line, each under the name that people know.

    How the work is done is not in it: stages, budget, chunks and attention may change. Tensor
    parallelism is, because sums of other parts round otherwise.
    """
    is_demo = config.model in (None, *DEMO_NAMES)  # or a model of random weights
    # as in the command to repeat
    named = checkpoint.name if is_demo else str(config.model)
    fingerprint = {
        "fminfer's version": __version__,
        DRAWING: "Gumbel-max",
        "the model": _digest_config_and_weights(config.seed, checkpoint),
        "the tokenizer": _digest_tokenizer(checkpoint),
        "the dtype": str(dtype).removeprefix("torch."),
        "--model-name": named,  # its last part stands in records
    }
    if config.quantized_to:
        fingerprint["--quantize"] = config.quantized_to
    if kv_dtype != dtype:
        fingerprint["--kv-dtype"] = str(kv_dtype).removeprefix("torch.")
    for name, option in options_of(type(config)).items():
        value = getattr(config, name)
        if option.alters and (
            option.is_always_recorded or value not in (option.default, {})
        ):
            fingerprint[option.told] = _option_text(option, value)
    if config.is_unnamed_demo:
        fingerprint["--check-model"] = "on without --model-name"
    return fingerprint


def _option_text(option: Option, value: object) -> str:
    """Return an option's value as a text: for a file, a digest of its content."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if FILE not in find_annotations(option.hint):
        return str(value)
    try:
        return hashlib.blake2b(Path(str(value)).read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise UsageError(f"{option.told} {value} cannot be read: {error}") from error


def config_text(checkpoint: Checkpoint) -> str:
    """Return a model's config, without where it lies: each machine may have its own copy."""
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    return json.dumps(fields, sort_keys=True, default=str)


def _digest_config_and_weights(seed: int, checkpoint: Checkpoint) -> str:
    digest = hashlib.blake2b(config_text(checkpoint).encode(), digest_size=8)
    if checkpoint.folder is None:
        digest.update(b"random %d" % seed)
    else:
        for file in _find_weight_files(checkpoint).values():
            _digest_weight_file(digest, file, checkpoint.headers)
        for file in list_sentence_files(checkpoint.folder):
            digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def digest_model(seed: int, checkpoint: Checkpoint) -> str:
    """Return a digest of all that a model's folder holds, and of the version that reads it."""
    model = _digest_config_and_weights(seed, checkpoint)
    return f"{model} {_digest_tokenizer(checkpoint)} {__version__}"


def digest_weight_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a digest of each weight file, by its name, of some of each tensor."""
    digests = {}
    for name, file in _find_weight_files(checkpoint).items():
        digest = hashlib.blake2b(digest_size=8)
        _digest_weight_file(digest, file, checkpoint.headers)
        digests[name] = digest.hexdigest()
    return digests


def _find_weight_files(checkpoint: Checkpoint) -> dict[str, Path]:
    folders = checkpoint.dense_folders
    if checkpoint.folder is not None:
        folders = {"": checkpoint.folder} | folders
    return {
        start + f.name: f
        for start, each in folders.items()
        for f in find_weights(each).files
    }


def name_different_files(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Name the weight files in which two processes differ, three at most; "": none."""
    return list_few(
        [n for n in sorted({**mine, **theirs}) if mine.get(n) != theirs.get(n)], 3
    )


def _digest_weight_file(
    digest: hashlib.blake2b, file: Path, headers: WeightHeaders
) -> None:
    stored, _ = headers.read(file)
    first, last = stored.header
    with naming_broken_files(file), file.open("rb") as tensors:
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        tensors.seek(first)
        digest.update(tensors.read(last - first))
        for first, last in dict.fromkeys(stored.spans.values()):
            for start in ((first + last - PIECE_BYTES) // 2, last - PIECE_BYTES):
                start = max(first, start)
                tensors.seek(start)
                digest.update(tensors.read(min(PIECE_BYTES, last - start)))


def _digest_tokenizer(checkpoint: Checkpoint) -> str:
    """Return a digest of the tokenizer's files, and of what says which tokens end a text."""
    digest = hashlib.blake2b(digest_size=8)
    folder = checkpoint.tokenizer_folder
    files = []
    if folder is not None:
        named_files = (
            f
            for f in folder.iterdir()
            if f.name in TOKENIZER_FILES or f.suffix in SUFFIXES
        )
        files = sorted(file for file in named_files if file.is_file())
        files += sorted(folder.glob(FURTHER_TEMPLATES))
    if checkpoint.generation_folder is not None:
        files.append(checkpoint.generation_folder / GENERATION)
    for file in files:
        digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()
