"""Finds a model by folder, GGUF file, hub id or random config, and reads its config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers

from fminfer.compute.attention.scoring import MOST_RELATIVE, compute_relative_reach
from fminfer.compute.values.spec import Layer, Model
from fminfer.core.config import ModelOptions
from fminfer.core.errors import CheckpointError, UsageError
from fminfer.core.impostors import (
    GGUF,
    check_no_impostor,
    check_plain_files,
    gguf_only_error,
    is_gguf,
    naming_broken_files,
)
from fminfer.models.config_fields import (
    TEXT_PART,
    architecture_of,
    check_counts,
    check_model_type,
    find_quantization,
    is_own_quantization,
)
from fminfer.models.families.tensor_names import Architecture
from fminfer.models.gguf.configs import config_of
from fminfer.models.gguf.gguf_model import (
    cache_small_files,
    gguf_architecture,
    read_gguf_model,
)
from fminfer.models.known_sizes import DEMO_MODEL as DEMO_MODEL
from fminfer.models.known_sizes import (
    DEMO_NAMES,
    SIZES,
    find_model_folder,
    find_size_fields,
    short_name,
)
from fminfer.models.model_folder import (
    SMALL_FILES,
    TELLING_FILES,
    check_files_beside,
    check_not_gguf,
    fetch_files,
    fetch_model,
)
from fminfer.models.sentence_folder import (
    MODULES,
    SentenceFolder,
    read_json_object,
    read_sentence_folder,
)
from fminfer.models.stored.rival_weights import check_rival_files
from fminfer.models.stored.tensor_table import WeightHeaders

GENERATION = "generation_config.json"
# The fields with the tokens that a decoder behind an encoder begins with.
START_FIELDS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id")
NO_OPTIONS = ModelOptions()


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """Where a model comes from, and its config; no weight is loaded yet."""

    name: str  # for people and records; for a folder the last part of its path
    # or a GGUF file, the first of a split one; None: random weights
    folder: Path | None
    config: Any  # transformers.PreTrainedConfig; the text part of a composite one
    architecture: Architecture
    tokenizer_folder: Path | None = None  # None: a tokenizer of bytes
    # of generation_config.json; None: there is none
    generation_folder: Path | None = None
    max_model_len: int | None = None  # a context shorter than the model's
    # name and revision, if weights are at the hub
    unfetched: tuple[str, str | None] | None = None
    # what a folder of sentence-transformers says
    sentence: SentenceFolder | None = None
    headers: WeightHeaders = field(
        default_factory=WeightHeaders, repr=False, compare=False
    )

    def with_weights(self) -> Checkpoint:
        """Return the same with its weights on this machine; errors are those of fetching."""
        if self.unfetched is None:
            return self
        folder = fetch_model(*self.unfetched)
        names = ("folder", "tokenizer_folder", "generation_folder")
        folders: dict[str, Any] = {
            n: folder for n in names if getattr(self, n) == self.folder
        }
        return replace(
            self, **folders, unfetched=None, sentence=read_sentence_folder(folder)
        )

    @property
    def model(self) -> Model:
        """The spec of the model."""
        return self.architecture.model

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""
        model = self.model
        return self._longest_context(
            model.layers[: model.num_cached_layers] or model.layers
        )

    @property
    def source_length(self) -> int:
        """Most tokens of a text that an encoder reads."""
        return self._longest_context(self.model.layers[self.model.num_cached_layers :])

    def _longest_context(self, layers: Sequence[Layer]) -> int:
        if self.max_model_len:
            return self.max_model_len
        side = self.model.encoder or self.model
        lengths = [longest_context_of(self.config)]
        if side.num_positions:  # it has a table of learned positions
            lengths.append(side.num_positions - side.position_offset)
        if self.sentence is not None and self.sentence.max_length:
            lengths.append(self.sentence.max_length)
        relatives = {layer.attention.relative for layer in layers}
        lengths += [compute_relative_reach(each) + 1 for each in relatives if each]
        return min(lengths)

    @property
    def dense_folders(self) -> dict[str, Path]:
        """The folders of dense layers' weights, by the prefixes of their tensors' names."""
        # A folder that `fminfer quantize` has written holds them among its own.
        is_own = is_own_quantization(getattr(self.config, "quantization_config", None))
        folders = self.sentence.dense if self.sentence and not is_own else ()
        return {f"reading_{number}.": each for number, each in enumerate(folders)}

    @property
    def generation_fields(self) -> dict[str, Any]:
        """The fields of generation_config.json, or none. Errors are `read_json_object`'s."""
        folder = self.generation_folder
        return {} if folder is None else read_json_object(folder / GENERATION)

    def check(self) -> None:
        """Check the context length and EOS ids, before anything is loaded."""
        if (length := min(self.context_length, self.source_length)) < 1:
            raise CheckpointError(
                f"{self.name} has a context of {length} tokens by its files; at least 1 is "
                "needed. Use the config.json that the model was published with"
            )
        if not all(type(each) is int and each >= 0 for each in self._stated_eos_ids):
            raise CheckpointError(
                f"{self.name} has the eos_token_id {self._stated_eos_ids!r} in its "
                f"{GENERATION} or config.json; the id of a token, a list of ids or null is "
                "allowed. Write the model's own ids there"
            )

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence, by generation_config.json or else the config."""
        return frozenset(self._stated_eos_ids)

    @property
    def _stated_eos_ids(self) -> list[Any]:
        eos = self.generation_fields.get("eos_token_id", self.config.eos_token_id)
        return eos if isinstance(eos, list) else [] if eos is None else [eos]


def open_model(config: ModelOptions, *, has_weights: bool = True) -> Checkpoint:
    """Find the model that a run is to use; a model of the hub may come without its weights.

    Raises:
        CheckpointError, UsageError: it does not run, or is not as flags say.
    """
    with naming_broken_files(config.random_init or config.model or DEMO_NAMES[0]):
        if config.random_init is not None:
            checkpoint = open_random_checkpoint(
                config.random_init, tokenizer=config.tokenizer
            )
        else:
            checkpoint = open_checkpoint(config.model, config, has_weights=has_weights)
        checkpoint.check()
    name = config.model_type
    config_type = str(checkpoint.config.model_type)
    # as gptneox, gpt-j
    plain_type = (name or "").replace("_", "").replace("-", "").lower()
    if name is not None and plain_type != config_type.replace("_", ""):
        raise UsageError(
            f"--model-type {name} clashes with the model's config, which says {config_type}; "
            "leave the flag out"
        )
    if config.max_model_len is None:
        return checkpoint
    if config.max_model_len > checkpoint.context_length:
        raise UsageError(
            f"--max-model-len is {config.max_model_len}, and the context of "
            f"{checkpoint.name} is {checkpoint.context_length} tokens; give a smaller "
            "one, or leave the flag out"
        )
    return replace(checkpoint, max_model_len=config.max_model_len)


def open_checkpoint(
    name: str | None, options: ModelOptions = NO_OPTIONS, *, has_weights: bool = True
) -> Checkpoint:
    """Find a model by folder, GGUF file or hub id (None, demo: the demo model); read its config.

    Raises:
        CheckpointError: it does not run, or something beside it would change it.
    """
    folder = find_model_folder(name) or Path(str(name))
    is_of_hub = find_model_folder(name) is None
    revision = options.revision
    tokenizer = options.tokenizer
    if revision is not None and not is_of_hub:
        raise CheckpointError(
            f"--revision is {revision!r}, and {name} is a folder; models of the hub "
            "have revisions"
        )
    if is_gguf(folder):
        return _open_gguf_file(str(name), options)
    check_plain_files(folder)
    config_folder = None
    if is_of_hub:
        # First: an architecture that does not run is refused before the download of its weights.
        folder = fetch_files(str(name), ["config.json", *TELLING_FILES], revision)
    check_files_beside(
        str(name or folder), folder, without_adapter=options.without_adapter
    )
    if options.model_config is not None:
        config, config_folder = read_config(options.model_config)
    else:
        if is_of_hub:
            check_not_gguf(str(name), folder, revision)
        config = _read_config_file(folder)
    if is_of_hub and has_weights:
        folder = fetch_model(str(name), revision)
    elif is_of_hub:
        folder = fetch_files(str(name), SMALL_FILES, revision)
    sentence = read_sentence_folder(folder)
    headers = WeightHeaders()
    for each in (folder, *(sentence.dense if sentence else ())):
        check_rival_files(each, headers)
    return Checkpoint(
        DEMO_NAMES[0] if folder is DEMO_MODEL else short_name(str(name)),
        folder,
        find_text_config(config),
        architecture_of(config, None if sentence is None else sentence.pooling),
        folder if tokenizer is None else _find_tokenizer_folder(tokenizer),
        next(
            (f for f in (folder, config_folder) if f and (f / GENERATION).exists()),
            None,
        ),
        unfetched=(str(name), revision) if is_of_hub and not has_weights else None,
        sentence=sentence,
        headers=headers,
    )


def _open_gguf_file(name: str, options: ModelOptions) -> Checkpoint:
    """Open a GGUF file; its metadata are its config and its tokenizer."""
    model = read_gguf_model(Path(name))
    config_name = options.model_config
    tokenizer = options.tokenizer
    config = find_text_config(
        config_of(model) if config_name is None else read_config(config_name)[0]
    )
    architecture = gguf_architecture(model, architecture_of(config).model)
    # A file may have a tokenizer that does not run, if none is loaded.
    small_folder = cache_small_files(
        model, has_tokenizer=not (tokenizer or options.skip_tokenizer_init)
    )
    tokenizer_folder = (
        small_folder if tokenizer is None else _find_tokenizer_folder(tokenizer)
    )
    return Checkpoint(
        short_name(name),
        model.path,
        config,
        architecture,
        tokenizer_folder,
        small_folder,
    )


def open_random_checkpoint(name: str, *, tokenizer: str | None = None) -> Checkpoint:
    """Make a checkpoint of random weights by a config and a tokenizer (None: of bytes)."""
    config, _ = read_config(name)
    architecture = architecture_of(config)
    if architecture.scheme is not None:
        raise CheckpointError(
            f"{name} is the config of a model quantized by {architecture.scheme.method}, and "
            "random weights are floats. Delete its quantization_config, and take --quantize "
            "for weights in few bits"
        )
    tokenizer_folder = None if tokenizer is None else _find_tokenizer_folder(tokenizer)
    return Checkpoint(
        f"random {short_name(name)}",
        None,
        find_text_config(config),
        architecture,
        tokenizer_folder,
    )


def find_text_config(config: Any) -> Any:
    """Find the config of the text model: a part of a composite config, or else all of it."""
    text = getattr(config, TEXT_PART, None)
    if not isinstance(text, transformers.PreTrainedConfig):
        return config
    # the whole model's count
    quantization = find_quantization(config)
    if quantization is not None:
        text.quantization_config = quantization
    for name in ("dtype", "eos_token_id", "tie_word_embeddings"):
        value = getattr(config, name, None)
        setattr(text, name, getattr(text, name, None) if value is None else value)
    return text


def read_config(name: str) -> tuple[Any, Path | None]:
    """Read a config by a size, a config.json, a folder with one, or a hub id.

    Returns:
        the config, and its folder; None: a known size has none.
    """
    if (fields := find_size_fields(name)) is not None:
        return transformers.AutoConfig.for_model(
            fields.pop("model_type"), **fields
        ), None
    path = Path(name)
    if not path.exists():
        if name.count("/") != 1:
            raise CheckpointError(
                f"{name!r} is neither a config.json, a folder with one, a hub id such as "
                f"facebook/opt-125m, nor one of the sizes {', '.join(SIZES)}"
            )
        path = fetch_files(name, SMALL_FILES)
    return _read_config_file(path), path if path.is_dir() else path.parent


def _find_tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer, by folder or hub id."""
    if Path(name).is_file():
        raise CheckpointError(
            f"--tokenizer {name} is a file; give the folder that holds it"
        )
    if Path(name).is_dir():
        return Path(name)
    try:
        return fetch_files(name, SMALL_FILES)
    except CheckpointError as error:
        raise CheckpointError(f"--tokenizer {name}: {error}") from error


def _read_config_file(path: Path) -> Any:
    """Read a config.json, and check what transformers cannot read or what does not run."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        if files := [each.name for each in path.glob(f"*{GGUF}")]:
            raise gguf_only_error(str(path), files)
        raise _no_config_error(path)
    if is_gguf(file):
        raise CheckpointError(
            f"{file} is a GGUF file, no config.json; give it by --model-name"
        )
    check_no_impostor(file)
    with naming_broken_files(file):
        fields = json.loads(file.read_bytes())
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise CheckpointError(
            f"{file} is no JSON object with a model_type; take the model's own config.json"
        )
    check_model_type(str(fields["model_type"]), fields)
    check_counts(fields, file)
    with naming_broken_files(file):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name in START_FIELDS if config.is_encoder_decoder else ():
        # transformers uses no default of the class here
        setattr(config, name, fields.get(name))
    return config


def _no_config_error(path: Path) -> CheckpointError:
    """Return the error of a folder without config.json. It names models in folders below."""
    configs = sorted(path.glob("*/config.json"))
    below = [file.parent for file in configs if "model_type" in read_json_object(file)]
    remedy = (
        "Put the model's own there; or give --model-config a config file, a folder "
        "that has one, a hub id, or a known size"
    )
    if below and (path / MODULES).exists():
        remedy = (
            f"Its model lies in {below[0].name}, as in sentence-transformers' folders of 2020. "
            f"Move it up: mv -n {shlex.quote(str(below[0]))}/* {shlex.quote(str(path))} && "
            f'sed -i \'s/"{below[0].name}"/""/\' {shlex.quote(str(path / MODULES))}'
        )
    elif below:
        remedy = f"Models lie in folders below; give one: --model-name {below[-1]}"
    return CheckpointError(f"{path} has no config.json. {remedy}")


LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
# BLOOM's newer configs state no length; this is what it was trained on
BLOOM_LENGTH = 2048


def longest_context_of(config: Any) -> int:
    """Return the most tokens of one sequence that are computed as transformers computes them.

    Rotary scalings `dynamic` and `longrope` choose frequencies by the length of the
    whole sequence, which rows packed into one step do not share. Up to the length of
    the original training the choice is the same. Beyond it queries of Ministral 3 grow
    with their positions (`llama_4_scaling_beta`).
    """
    if hasattr(config, "relative_attention_max_distance"):
        return MOST_RELATIVE  # whatever n_positions says
    stated = (getattr(config, field, None) for field in LENGTH_FIELDS)
    length = next((int(value) for value in stated if value), BLOOM_LENGTH)
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    # of layers (Gemma 3)
    parameters_by_kind = [
        value for value in rope_parameters.values() if isinstance(value, dict)
    ]
    for parameters in parameters_by_kind or [rope_parameters]:
        if parameters.get("rope_type") == "longrope" or parameters.get(
            "llama_4_scaling_beta"
        ):
            length = min(length, int(parameters["original_max_position_embeddings"]))
    return length
