"""Finds a model by folder, hub id or random config, and reads its config.

A model that does not run is refused here, before any weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from fminfer.compute.spec import Model
from fminfer.errors import CheckpointError
from fminfer.models.architectures.naming import Architecture
from fminfer.models.architectures.table import architecture_of, check_model_type
from fminfer.models.context import context_length
from fminfer.models.sizes import DEMO_MODEL, SIZES

SMALL_HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
HUB_FILES = [*SMALL_HUB_FILES, "model*.safetensors"]


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """Where a model comes from, and its config; no weight is loaded yet."""

    name: str
    folder: Path | None  # None: random weights
    config: Any  # transformers.PreTrainedConfig
    architecture: Architecture
    max_model_len: int | None = None  # a context shorter than the model's

    @property
    def model(self) -> Model:
        """The spec of the model."""
        return self.architecture.model

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""
        return self.max_model_len or context_length(self.config)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence, by generation_config.json or else the config."""
        eos = self.config.eos_token_id
        if self.folder is not None and (self.folder / "generation_config.json").exists():
            try:
                fields = json.loads((self.folder / "generation_config.json").read_text())
                eos = fields.get("eos_token_id", eos)
            except (ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.folder}/generation_config.json is no JSON object: {error}"
                ) from error
        return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def open_checkpoint(name: str | None, *, has_weights: bool = True) -> Checkpoint:
    """Find a model by folder or hub id (None: the demo model) and read its config.

    Args:
        has_weights: otherwise a model of the hub is fetched without its weights.

    Raises:
        CheckpointError: nothing there, no config, or an architecture that does not run.
    """
    if name is None:
        name, folder = "fminfer-demo", DEMO_MODEL
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        # The config first: an architecture that does not run is refused before the download.
        _read_config(_download(name, ["config.json"]))
        folder = _download(name, HUB_FILES if has_weights else SMALL_HUB_FILES)
    config = _read_config(folder)
    return Checkpoint(name, folder, config, architecture_of(config))


def open_random(name: str) -> Checkpoint:
    """Make a checkpoint of random weights from a config.json, its folder, or a size of SIZES.

    Raises:
        CheckpointError: no such file or size.
    """
    if name in SIZES:
        fields = dict(SIZES[name])
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    elif Path(name).exists():
        config = _read_config(Path(name))
    else:
        raise CheckpointError(
            f"--random-init {name} is neither a config.json, a folder with one, nor one of the "
            f"sizes {', '.join(SIZES)}"
        )
    return Checkpoint(f"random {name}", None, config, architecture_of(config))


def _download(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # only for models that are not local
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") > 1 or name.startswith(("/", ".", "~")) or Path(name).exists():
        raise _not_found(name)
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except HFValidationError as error:  # in the hub's own words it is about a "repo id"
        raise _not_found(name) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"the model {name!r} is no local folder, and the hub did not give it: {error}"
        ) from error


def _not_found(name: str) -> CheckpointError:
    """Return the error of a name that can be no model of the hub."""
    found = "is a file" if Path(name).is_file() else "is no folder here"
    return CheckpointError(
        f"the model {name!r} {found}, and no model of the hub can have that name. Give the folder "
        "that holds its config.json, or a hub id such as facebook/opt-125m"
    )


def _read_config(path: Path) -> Any:
    """Read a config.json, refusing what does not run: some of it transformers cannot even read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        model_type = json.loads(file.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} has no config.json that is a JSON object with a model_type: {error!r}"
        ) from error
    check_model_type(str(model_type))
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(f"{path} has no usable config.json: {error}") from error
    return config
