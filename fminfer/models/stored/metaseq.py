"""OPT as metaseq saves it: its names and its parts → the names of transformers.

A fused qkv_proj holds keys, values and queries in this order. In parts for tensor parallelism each
part has its share of all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fminfer.core.errors import CheckpointError
from fminfer.models.stored.stored_tensors import JoinedTensor, StoredFile, StoredTensor

LEFT_OUT = ("decoder.version", "decoder.output_projection.weight")  # a copy of the embedding
FUSED = ".qkv_proj."
BY_ROWS = (FUSED, ".fc1.", ".embed_tokens.")
BY_COLUMNS = (".out_proj.weight", ".fc2.weight")
RENAMED = {
    "decoder.layer_norm.": "decoder.final_layer_norm.",
    "decoder.project_in_dim.": "decoder.project_in.",
    "decoder.project_out_dim.": "decoder.project_out.",
}
RESHARD = (
    "python -m metaseq.scripts.reshard_fsdp --input 'checkpoint_last-model_part-0-shard*.pt' "
    "--output reshard-model_part-0.pt --num-output-shards 1 --skip-optimizer-state True "
    "--unflatten-weights True"
)


def join_parts(files: Sequence[StoredFile]) -> dict[str, JoinedTensor]:
    """Return the tensors of all parts under the names of transformers.

    Raises:
        CheckpointError: parts have different tensors, or weights are still flat.
    """
    first = files[0]
    for file in files:
        for name in file.tensors.keys() ^ first.tensors.keys():
            raise CheckpointError(
                f"{first.path.name} and {file.path.name} do not hold the same tensors: {name!r} is "
                "in one of them; fetch both again"
            )
    for name in first.tensors:
        if "flat_param" in name:
            raise unsharded_error(first.path.name)
    found: dict[str, JoinedTensor] = {}
    for name in first.tensors.keys() - set(LEFT_OUT):
        parts = [file.tensors[name] for file in files]
        for theirs, tensor in _join(name, parts):
            for old, new in RENAMED.items():
                theirs = theirs.replace(old, new)
            found[theirs] = tensor
    return found


def unsharded_error(name: str) -> CheckpointError:
    """Return the error of a file that metaseq's training wrote."""
    return CheckpointError(
        f"{name} is a raw shard of metaseq, a piece of all weights; join the shards of each model "
        f"part first: {RESHARD}"
    )


def _join(name: str, parts: list[StoredTensor]) -> Iterator[tuple[str, JoinedTensor]]:
    dim = next((0 for each in BY_ROWS if each in name), None)
    dim = 1 if name.endswith(BY_COLUMNS) else dim
    _check_shapes(name, parts, dim)
    if FUSED not in name:
        yield name, JoinedTensor(tuple(parts if dim is not None else parts[:1]), dim or 0)
        return
    for place, which in enumerate(("k_proj", "v_proj", "q_proj")):
        sizes = [part.shape[0] // 3 for part in parts]
        rows = (part.rows(place * n, (place + 1) * n) for part, n in zip(parts, sizes, strict=True))
        yield name.replace("qkv_proj", which), JoinedTensor(tuple(rows))


def _check_shapes(name: str, parts: list[StoredTensor], dim: int | None) -> None:
    """Refuse parts that cannot be joined along a dimension, or are not the same without one."""
    shapes = [[*part.shape] for part in parts]
    is_split = dim is None or all(len(shape) > dim for shape in shapes)
    if dim is not None and is_split:
        for shape in shapes:
            is_split = is_split and (FUSED not in name or shape[0] % 3 == 0)
            del shape[dim]
    if not is_split or any(shape != shapes[0] for shape in shapes):
        found = " and ".join(str(part.shape) for part in parts[:2])
        raise CheckpointError(
            f"{parts[0].file.parent}: tensor {name!r} has shape {found}, which is no part of "
            "a model; fetch the files again"
        )
