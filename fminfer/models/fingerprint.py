"""What must be the same for the rows of an earlier run to be kept: model, tokenizer,
settings."""

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
from fminfer.models.sentence_folder import sentence_files
from fminfer.models.stored.tensor_table import read_weight_file
from fminfer.models.stored.weight_folder import find_weights

# Of a weight file what names its tensors, and of each of them this much in its middle and at its
# end: training changes a tensor everywhere, new tokens its end. To read 350 GB would
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
# What of a fingerprint either shows in a request once it is prepared (its ids, its
# params), decides whether there is an answer at all, or stands around it. Kept answers
# do not depend on it.
NOT_OF_ANSWERS = frozenset(
    each.told for each in options_of(EngineConfig).values() if each.alters == "requests"
) | {"--model-name"}


def fingerprint_of(
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
    found = {
        "fminfer's version": __version__,
        DRAWING: "Gumbel-max",
        "the model": _model_digest(config.seed, checkpoint),
        "the tokenizer": _files_digest(checkpoint),
        "the dtype": str(dtype).removeprefix("torch."),
        "--model-name": named,  # its last part stands in records
    }
    if config.quantized_to:
        found["--quantize"] = config.quantized_to
    if kv_dtype != dtype:
        found["--kv-dtype"] = str(kv_dtype).removeprefix("torch.")
    for name, each in options_of(type(config)).items():
        value = getattr(config, name)
        if each.alters and (each.is_always_recorded or value not in (each.default, {})):
            found[each.told] = _written(each, value)
    if config.is_unnamed_demo:
        found["--check-model"] = "on without --model-name"
    return found


def terms_of_answers(fingerprint: dict[str, str]) -> dict[str, str]:
    """Return what of a fingerprint the answer to a prepared request with a seed depends on."""
    return {
        name: value for name, value in fingerprint.items() if name not in NOT_OF_ANSWERS
    }


def _written(of: Option, value: object) -> str:
    """Return an option's value as a text: for a file, a digest of its content."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if FILE not in find_annotations(of.hint):
        return str(value)
    try:
        return hashlib.blake2b(Path(str(value)).read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise UsageError(f"{of.told} {value} cannot be read: {error}") from error


def config_text(checkpoint: Checkpoint) -> str:
    """Return a model's config, without where it lies: each machine may have its own copy."""
    fields = checkpoint.config.to_dict()
    fields.pop("_name_or_path", None)
    return json.dumps(fields, sort_keys=True, default=str)


def _model_digest(seed: int, checkpoint: Checkpoint) -> str:
    digest = hashlib.blake2b(config_text(checkpoint).encode(), digest_size=8)
    if checkpoint.folder is None:
        digest.update(b"random %d" % seed)
    else:
        for file in _weight_files(checkpoint).values():
            _add_weights(digest, file)
        for file in sentence_files(checkpoint.folder):
            digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def digest_model(seed: int, checkpoint: Checkpoint) -> str:
    """Return a digest of all that a model's folder holds, and of the version that reads it."""
    return (
        f"{_model_digest(seed, checkpoint)} {_files_digest(checkpoint)} {__version__}"
    )


def digest_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a digest of each weight file, by its name, of some of each tensor."""
    found = {}
    for name, file in _weight_files(checkpoint).items():
        _add_weights(digest := hashlib.blake2b(digest_size=8), file)
        found[name] = digest.hexdigest()
    return found


def _weight_files(checkpoint: Checkpoint) -> dict[str, Path]:
    folders = checkpoint.dense_folders
    if checkpoint.folder is not None:
        folders = {"": checkpoint.folder} | folders
    return {
        start + f.name: f
        for start, each in folders.items()
        for f in find_weights(each).files
    }


def name_differences(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Name the weight files in which two processes differ, three at most; "": none."""
    return list_few(
        [n for n in sorted({**mine, **theirs}) if mine.get(n) != theirs.get(n)], 3
    )


def _add_weights(digest: hashlib.blake2b, file: Path) -> None:
    stored = read_weight_file(file)
    first, last = stored.header
    with naming_broken_files(file), file.open("rb") as tensors:
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        tensors.seek(first)
        digest.update(tensors.read(last - first))
        for first, last in dict.fromkeys(
            tensor.span for tensor in stored.tensors.values()
        ):
            for place in ((first + last - PIECE_BYTES) // 2, last - PIECE_BYTES):
                place = max(first, place)
                tensors.seek(place)
                digest.update(tensors.read(min(PIECE_BYTES, last - place)))


def _files_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the tokenizer's files, and of what says which tokens end a text."""
    digest = hashlib.blake2b(digest_size=8)
    folder = checkpoint.tokenizer_folder
    files = []
    if folder is not None:
        own = (
            f
            for f in folder.iterdir()
            if f.name in TOKENIZER_FILES or f.suffix in SUFFIXES
        )
        files = sorted(file for file in own if file.is_file())
        files += sorted(folder.glob(FURTHER_TEMPLATES))
    if checkpoint.generation_folder is not None:
        files.append(checkpoint.generation_folder / GENERATION)
    for file in files:
        digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()
