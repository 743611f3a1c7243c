"""From a folder, a hub id or a random config to a loaded model on a device.

The model is transformers' own class, built without memory (meta device) and filled straight from
safetensors. It knows nothing of attention or of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from fminfer.errors import CheckpointError
from fminfer.models.experts import ExpertAssembler, find_piece
from fminfer.models.families import Family, family_of
from fminfer.models.sizes import SIZES
from fminfer.models.variants import check_variant, context_length

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
HUB_FILES = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]
# Tensors that old checkpoints carry and nothing reads: causal masks and rotary tables.
_IGNORED = re.compile(
    r"\.(attn\.bias|masked_bias|rotary_emb\.inv_freq|attention\.bias|attn\.causal_mask)$"
)


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """Where a model comes from, read as far as its config; no weight is loaded yet."""

    name: str
    folder: Path | None  # None: random weights
    config: Any  # transformers.PreTrainedConfig
    family: Family

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""
        return context_length(self.config)

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


def open_checkpoint(name: str | None) -> Checkpoint:
    """Find a model by folder or hub id (None: the demo model) and read its config.

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
        folder = _download(name, HUB_FILES)
    config = _read_config(folder)
    return Checkpoint(name, folder, config, family_of(config.model_type))


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
    return Checkpoint(f"random {name}", None, config, family_of(config.model_type))


def _download(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # only for models that are not local
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"the model {name!r} is no local folder, and the hub did not give it: {error}"
        ) from error


def _read_config(path: Path) -> Any:
    """Read a config.json, refusing what does not run: some of it transformers cannot even read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        model_type = json.loads(file.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} has no config.json that is a JSON object with a model_type: {error!r}"
        ) from error
    family_of(str(model_type))
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(f"{path} has no usable config.json: {error}") from error
    check_variant(config)
    return config


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    """Build the model and fill it.

    Args:
        dtype: the type its parameters are held and computed in.
        seed: for random weights.
        on_progress: called with (bytes read, bytes in all) as tensors arrive.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    model = _build_on_meta(checkpoint)
    if checkpoint.folder is None:
        _fill_randomly(model, dtype, device, seed)
    else:
        _fill_from_files(model, checkpoint, dtype, device, on_progress)
    _fill_buffers(model, device)
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def _build_on_meta(checkpoint: Checkpoint) -> Any:
    model_class = getattr(transformers, checkpoint.family.class_name)
    config = checkpoint.config
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return model_class(config)


def _fill_randomly(model: Any, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Draw weights as transformers would; norms are 1, biases 0, the rest normal."""
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    model.tie_weights()


def _fill_from_files(
    model: Any,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> None:
    wanted = dict(model.named_parameters(remove_duplicate=False))
    tied = _tied_names(model)
    loaded: set[str] = set()
    assembler = ExpertAssembler(dtype, device)
    for name, tensor in _read_tensors(checkpoint, on_progress):
        name = _rename(name, checkpoint.family)
        piece = find_piece(name, checkpoint.family)
        if piece is not None and piece.target in wanted:
            if assembler.add(piece, tensor, wanted[piece.target].shape):
                _set_parameter(model, piece.target, assembler.take(piece.target))
                loaded.add(piece.target)
            continue
        target = _resolve_name(name, wanted, model.base_model_prefix)
        if target is None:
            if _IGNORED.search(name):
                continue
            raise CheckpointError(
                f"{checkpoint.name} holds a tensor {name!r} that a {checkpoint.family.class_name} "
                "of its config.json does not have; config and weights do not belong together"
            )
        if tensor.shape != wanted[target].shape:
            raise CheckpointError(
                f"{checkpoint.name}: tensor {name!r} has shape {tuple(tensor.shape)}, and "
                f"config.json asks for {tuple(wanted[target].shape)}"
            )
        if target in tied:
            continue  # the same values as the tensor it is tied to
        _set_parameter(model, target, tensor.to(device=device, dtype=dtype))
        loaded.add(target)
    model.tie_weights()
    missing = sorted(wanted.keys() - loaded - tied)
    if missing:
        raise CheckpointError(
            f"{checkpoint.name} lacks {len(missing)} tensors, such as {missing[0]!r}; "
            "the checkpoint is incomplete, fetch it again"
        )


def _tied_names(model: Any) -> set[str]:
    """Return the parameters that share another's values, such as a head tied to the embedding."""
    return set(model.get_expanded_tied_weights_keys(all_submodels=True))


def _read_tensors(
    checkpoint: Checkpoint, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    assert checkpoint.folder is not None
    files = _weight_files(checkpoint.folder)
    if not files:
        raise CheckpointError(
            f"{checkpoint.folder} holds no .safetensors file; convert other weights with "
            "transformers' save_pretrained"
        )
    total, done = sum(file.stat().st_size for file in files if file.exists()), 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dict)
                    tensor = tensors.get_tensor(name)
                    yield name, tensor
                    done += tensor.nbytes
                    on_progress(done, total)
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{file} is broken ({error}); fetch it again") from error
    on_progress(total, total)


def _weight_files(folder: Path) -> list[Path]:
    """List the files that make up the model: those of the index, else the one, else all.

    Some repositories hold the same weights twice, the second time in another format.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / name for name in names)
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def _rename(name: str, family: Family) -> str:
    for old, new in family.renames:
        name = name.replace(old, new)
    return name


def _resolve_name(name: str, wanted: dict[str, nn.Parameter], prefix: str) -> str | None:
    """Find the parameter that a checkpoint's tensor name means, or None."""
    if name in wanted:
        return name
    # Base-model checkpoints (gpt2's own, say) leave the prefix out.
    return f"{prefix}.{name}" if f"{prefix}.{name}" in wanted else None


def _set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False))


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Let transformers compute the tables that no checkpoint holds (rotary frequencies, …)."""
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            empty = torch.empty_like(buffer, device=device)
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, empty, persistent=persistent)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # keep what was loaded
    model.initialize_weights()
