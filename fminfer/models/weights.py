"""From an opened checkpoint to a loaded model on a device, or one stage's part of it.

The model is transformers' own class, built without memory (meta device) and filled straight from
safetensors; what belongs to another stage is never read. It knows nothing of attention or requests.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode

from fminfer.errors import CheckpointError
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.experts import ExpertAssembler, find_piece
from fminfer.models.families import Family
from fminfer.models.slicing import cut
from fminfer.models.weight_files import indexed_homes, weight_files
from fminfer.partition import Part

# Tensors that old checkpoints carry and nothing reads: causal masks and rotary tables.
_IGNORED = re.compile(
    r"\.(attn\.bias|masked_bias|rotary_emb\.inv_freq|attention\.bias|attn\.causal_mask)$"
)
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OnProgress = Callable[[int, int], None]


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    part: Part | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> nn.Module:
    """Build the model, or one stage's part of it, and fill it.

    Args:
        dtype: the type its parameters are held and computed in.
        seed: for random weights, which are the same in whatever parts they are drawn.
        part: the layers to build; None: all.
        on_progress: called with (bytes read, bytes in all) as tensors arrive.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a file is broken.
    """
    model = build_on_meta(checkpoint)
    names = _Names(model)
    if part is not None:
        cut(model, checkpoint.family, part, device)
    names.keep(model)
    if checkpoint.folder is None:
        _fill_randomly(model, names, dtype, device, seed)
    else:
        _fill_from_headers(names, checkpoint, dtype)  # what is wrong is said before much is read
        _fill_from_files(names, checkpoint, dtype, device, on_progress)
    _fill_buffers(model, device)
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def check_weights(checkpoint: Checkpoint) -> None:
    """Find by the headers of weight files alone what `load_model` would refuse.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unexpected, or misshapen.
    """
    if checkpoint.folder is not None:
        model = build_on_meta(checkpoint)
        names = _Names(model)
        names.keep(model)
        _fill_from_headers(names, checkpoint, torch.float32)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype of most weights by their files' headers, or the config's without files.

    A config may not say it, or say another one. None: no dtype of ours, or a file is broken, as
    loading will say.
    """
    files = [] if checkpoint.folder is None else weight_files(checkpoint.folder)
    if not files:
        own: torch.dtype | None = checkpoint.config.dtype
        return own
    sizes: Counter[str] = Counter()
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for part in map(tensors.get_slice, tensors.keys()):
                    sizes[part.get_dtype()] += math.prod(part.get_shape())
    except (SafetensorError, OSError):
        return None
    return _STORED_DTYPES.get(max(sizes, key=sizes.__getitem__, default=""))


def build_on_meta(checkpoint: Checkpoint) -> Any:
    """Build transformers' model, its weights without memory.

    What is made of values, such as norms and rotary tables, is small and has some.
    """
    model_class = getattr(transformers, checkpoint.family.class_name)
    config = checkpoint.config
    config._attn_implementation = "eager"
    with _WithoutMemory():
        return model_class(config)


class _WithoutMemory(TorchFunctionMode):
    """Gives tensors that have no values yet no memory, and draws none for them.

    On torch.device("meta") tables would have no values either, and torch loads its compiler to
    find what operations would make of such tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        changes = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if changes and isinstance(target, torch.Tensor) and target.is_meta:
            return target  # normal_, zero_, …
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        result: torch.Tensor = func(*args, **kwargs)
        return result


class _Names:
    """The parameters of a whole model by name, and where they go in the part that is built.

    A parameter that others are tied to goes to their places too, also where its own is cut away:
    the last stage's head may be the embedding's.
    """

    def __init__(self, model: Any) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._prefix: str = model.base_model_prefix
        self._tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}

    def keep(self, model: nn.Module) -> None:
        """Note what is left of the model; `places` then holds the parameters to fill."""
        alive = set(model.modules())
        for name in self.shapes:
            path, _, leaf = name.rpartition(".")
            if self.modules[path] in alive:
                source = self.source_of(name)
                self.places.setdefault(source, []).append((self.modules[path], leaf))

    def is_needed(self, name: str) -> bool:
        """Tell whether this part holds a parameter, or the one that it is tied to."""
        return self.source_of(name) in self.places

    def resolve(self, name: str) -> str | None:
        """Find the parameter that a checkpoint's tensor name means, or None."""
        # Base-model checkpoints (gpt2's own, say) leave the prefix out.
        return next((n for n in (name, f"{self._prefix}.{name}") if n in self.shapes), None)

    def source_of(self, name: str) -> str:
        """Return the parameter that another is tied to, or itself."""
        return self._tied.get(name, name)

    def held(self, name: str) -> torch.Tensor:
        """Return what a parameter of this part holds now."""
        module, leaf = self.places[name][0]
        tensor: torch.Tensor = getattr(module, leaf)
        return tensor

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Set a parameter everywhere it goes."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, leaf in self.places[name]:
            setattr(module, leaf, parameter)


def _fill_randomly(
    model: Any, names: _Names, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Draw each module's weights as transformers would, by a seed of its own.

    Norms are 1, biases 0, the rest normal.
    """
    with torch.random.fork_rng(devices=[]):
        for path, module in names.modules.items():
            leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
            wanted = [leaf for leaf in leaves if f"{path}.{leaf}" in names.places]
            if not wanted:
                continue
            for leaf in leaves:
                empty = torch.empty(names.shapes[f"{path}.{leaf}"], dtype=dtype, device=device)
                setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
            torch.manual_seed(zlib.crc32(f"{seed} {path}".encode()))
            model._init_weights(module)
            for leaf in wanted:
                names.fill(f"{path}.{leaf}", getattr(module, leaf).data)


def _fill_from_headers(names: _Names, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Fill the parameters with tensors without memory, which have the right shapes."""
    _fill_from_files(names, checkpoint, dtype, torch.device("meta"), lambda done, total: None)


def _fill_from_files(
    names: _Names,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
) -> None:
    loaded: dict[str, str] = {}  # a parameter, and the stored name that it came under
    copies: list[tuple[str, str, torch.Tensor]] = []  # stored name, parameter, what it must equal
    assembler = ExpertAssembler(dtype, device)
    for stored_name, read in _read_tensors(checkpoint, device, on_progress):
        name = _rename(stored_name, checkpoint.family)
        piece = find_piece(name, checkpoint.family)
        if piece is not None and piece.target in names.shapes:
            if piece.target not in names.places:
                continue
            if assembler.add(piece, read(), names.shapes[piece.target]):
                names.fill(piece.target, assembler.take(piece.target))
                loaded[piece.target] = stored_name
            continue
        target = names.resolve(name)
        if target is None:
            if _IGNORED.search(name):
                continue
            raise CheckpointError(
                f"{checkpoint.name} holds a tensor {name!r} that a {checkpoint.family.class_name} "
                "of its config.json does not have; config and weights do not belong together"
            )
        if not names.is_needed(target):
            continue  # another stage's
        tensor = read()
        if tensor.shape != names.shapes[target]:
            raise CheckpointError(
                f"{checkpoint.name}: tensor {name!r} has shape {tuple(tensor.shape)}, and "
                f"config.json asks for {tuple(names.shapes[target])}"
            )
        tensor = tensor.to(device=device, dtype=dtype)
        if (source := names.source_of(target)) != target:
            copies.append((stored_name, source, tensor))
        elif target in loaded:
            raise CheckpointError(
                f"{checkpoint.name} holds {loaded[target]!r} and {stored_name!r}, which are the "
                "same parameter; take the file away that does not belong to the model"
            )
        else:
            names.fill(target, tensor)
            loaded[target] = stored_name
    _check_copies(names, copies, checkpoint.name)
    missing = sorted(names.places.keys() - loaded)
    if missing:
        raise CheckpointError(
            f"{checkpoint.name} lacks {len(missing)} tensors, such as {missing[0]!r}; "
            "the checkpoint is incomplete, fetch it again"
        )


def _check_copies(
    names: _Names, copies: list[tuple[str, str, torch.Tensor]], checkpoint_name: str
) -> None:
    """Refuse a tensor of its own where the config says that it is another's."""
    for stored_name, source, tensor in copies:
        held = names.held(source)
        if not held.is_meta and not torch.equal(tensor, held):
            raise CheckpointError(
                f"config.json of {checkpoint_name} has tie_word_embeddings true, but its tensor "
                f"{stored_name!r} differs from {source!r}, to which it would be tied. If the "
                "weights are right, set tie_word_embeddings to false in config.json"
            )


def _read_tensors(
    checkpoint: Checkpoint, device: torch.device, on_progress: OnProgress
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Give every tensor's name, and a function that reads it.

    Of a tensor that several files hold, the index says which one counts. For the meta device a
    tensor has its shape alone.
    """
    assert checkpoint.folder is not None
    files = weight_files(checkpoint.folder)
    if not files:
        raise CheckpointError(
            f"{checkpoint.folder} holds no .safetensors file; convert other weights with "
            "transformers' save_pretrained"
        )
    homes = indexed_homes(checkpoint.folder)
    seen: dict[str, str] = {}
    total, done = sum(file.stat().st_size for file in files if file.exists()), 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                size = file.stat().st_size
                for index, name in enumerate(names, start=1):
                    if homes.get(name, file.name) == file.name:
                        _see_once(seen, name, file)
                        how = _read_shape if device.type == "meta" else _read_tensor
                        yield name, partial(how, tensors, name)
                    on_progress(done + size * index // len(names), total)
                done += size
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{file} is broken ({error}); fetch it again") from error
    on_progress(total, total)


def _see_once(seen: dict[str, str], name: str, file: Path) -> None:
    if name in seen:
        raise CheckpointError(
            f"{file.parent} holds the tensor {name!r} twice, in {seen[name]} and {file.name}, and "
            "no model.safetensors.index.json says which one counts; take the file away that does "
            "not belong to the model, or fetch the index"
        )
    seen[name] = file.name


def _read_tensor(tensors: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = tensors.get_tensor(name)
    return tensor


def _read_shape(tensors: Any, name: str) -> torch.Tensor:
    return torch.empty(tensors.get_slice(name).get_shape(), device="meta")


def _rename(name: str, family: Family) -> str:
    for old, new in family.renames:
        name = name.replace(old, new)
    return name


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
