"""Names and layouts of the tensors of a checkpoint that ours are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from fminfer.compute.values.spec import Attention, Model, Pooling
from fminfer.models.published.schemes import Scheme

Shape = tuple[int, ...]
Change = Callable[[torch.Tensor, Attention], torch.Tensor]


@dataclass(slots=True, frozen=True)
class Layout:
    """How a stored tensor becomes ours: turned, and then with its rows in another order."""

    # of rows; queries, keys and values stay among themselves
    change: Change | None = None
    is_transposed: bool = False  # stored matrices are (inputs, outputs)
    is_row: bool = False  # stored vectors are matrices of one row
    added: float = 0.0  # to each value

    def to_outputs_first(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what is stored, outputs first: a view, or with what is added."""
        if self.added:
            return stored + self.added
        if self.is_row:
            return stored[0]
        return stored.mT if self.is_transposed and stored.dim() > 1 else stored

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape in which a checkpoint holds a tensor."""
        if self.is_transposed and len(shape) > 1:
            return (*shape[:-2], shape[-1], shape[-2])
        return (1, *shape) if self.is_row else shape


AS_STORED = Layout()
# Parameters of an activation → their published names (Apertus).
XIELU = {"positive": "alpha_p", "negative": "alpha_n", "beta": "beta", "eps": "eps"}


@dataclass(slots=True, frozen=True)
class Source:
    """The modules of a checkpoint whose weights and biases are joined into one of ours.

    Rows are joined in order. In a name `*` stands for 0, 1, …: these are stacked. A name `a|b`
    means that a checkpoint has either a or b. A name that begins with `/` is whole:
    nothing comes before it, also in a layer.
    """

    names: tuple[str, ...]
    layout: Layout = AS_STORED
    # A parameter that some checkpoints have instead, equal to ours. All have it, if
    # names is empty.
    whole: str = ""


Sources = dict[str, Source]


@dataclass(slots=True, frozen=True)
class Architecture:
    """What a row returns: the spec of the model, and where its tensors are."""

    model: Model
    outer: Sources  # of tensors outside layers
    inner: Sources  # of a layer
    prefix: str  # of a layer's names, with {} for its number
    # The prefix that checkpoints saved without the head leave out; | is between several.
    base: str
    # a pattern of the names of stored tensors that are none of the model's
    left_out: str = ""
    # Of an encoder's layers beside a decoder's; "": as those above.
    encoder_prefix: str = ""
    encoder_inner: Sources = field(default_factory=dict)
    # How an encoder scores classes, and where the tensors for it are.
    scored: tuple[Pooling, Sources] | None = None
    # how a published quantized checkpoint stores matrices
    scheme: Scheme | None = None

    def find_layer_sources(self, number: int) -> tuple[Sources, str]:
        """Return the sources of a layer's tensors, and what their names begin with."""
        place = number - self.model.num_cached_layers
        if self.encoder_prefix and place >= 0:
            return self.encoder_inner, self.encoder_prefix.format(place)
        return self.inner, self.prefix.format(number)


def with_our_names(architecture: Architecture, names: Iterable[str]) -> Architecture:
    """Return an architecture whose checkpoint has all tensors by our names, as "0.up.weight"."""
    names_in_layers = (
        name.partition(".")[2] if name[0].isdigit() else name for name in names
    )
    our_sources = {
        module: Source((module,))
        for module, _, _ in (name.rpartition(".") for name in names_in_layers)
    }
    return Architecture(
        architecture.model, our_sources, our_sources, prefix="layers.{}.", base=""
    )


def make_sources(layout: Layout = AS_STORED, **ours: str) -> Sources:
    """Return sources by our names, with __ for a dot; spaces separate the checkpoint's names."""
    return {
        name.replace("__", "."): Source(tuple(theirs.split()), layout)
        for name, theirs in ours.items()
    }


def find_source(ours: str, sources: Mapping[str, Source]) -> Source:
    """Find the source of one of our tensors: its own, or that of its module."""
    return sources.get(ours) or sources[ours.rpartition(".")[0]]


def expert_sources(up: str, down: str, whole: str) -> Sources:
    """Return the sources of experts: modules of each expert, or two parameters of all."""
    return {
        "experts.up": Source(tuple(up.split()), whole=f"{whole}.gate_up_proj"),
        "experts.down": Source((down,), whole=f"{whole}.down_proj"),
    }


def parameter_source(name: str, layout: Layout = AS_STORED) -> Source:
    """Return a source that is a parameter by its full name, or by one of two."""
    return Source((), layout, name)


def with_layout(layout: Layout, sources: Sources, *ours: str) -> Sources:
    """Return sources in which those of some tensors have another layout."""
    return sources | {name: replace(sources[name], layout=layout) for name in ours}


def _regroup_heads(t: torch.Tensor, attention: Attention) -> torch.Tensor:
    parts = t.view(attention.kv_heads, -1, attention.head_dim, *t.shape[1:])
    return torch.cat(
        [
            part.reshape(-1, *t.shape[1:])
            for part in (parts[:, :-2], parts[:, -2], parts[:, -1])
        ]
    )


def _regroup_cores(t: torch.Tensor, attention: Attention) -> torch.Tensor:
    parts = t.view(4, 3, -1, *t.shape[1:])
    return torch.cat([parts[:, i].reshape(-1, *t.shape[1:]) for i in (0, 2, 1)])


def _deinterleave_rows(t: torch.Tensor, attention: Attention) -> torch.Tensor:
    return torch.cat([t[:, ::2], t[:, 1::2]], 1)


def _regroup_pairs(t: torch.Tensor, attention: Attention) -> torch.Tensor:
    num_turned = sum(attention.qkv_sizes[:2])
    pairs = t[:num_turned].view(-1, attention.head_dim // 2, 2, *t.shape[1:])
    return torch.cat([pairs.transpose(1, 2).reshape(-1, *t.shape[1:]), t[num_turned:]])


TRANSPOSED = Layout(is_transposed=True)  # GPT-2's Conv1D, gpt-oss's experts
INTERLEAVED = Layout(_deinterleave_rows)  # gpt-oss's rows of gate and up
INTERLEAVED_TRANSPOSED = Layout(_deinterleave_rows, is_transposed=True)
# Each KV head's queries, key and value follow each other: BLOOM, GPT-NeoX, Falcon, GPT-BigCode.
BY_HEAD = Layout(_regroup_heads)
AS_ROW = Layout(is_row=True)  # ERNIE's bias of experts
# CodeGen's: four cores of a TPU, each with queries, values and keys
BY_CORE = Layout(_regroup_cores)
# llama.cpp's LLaMA and Granite: neighbours of a head form pairs
BY_PAIRS = Layout(_regroup_pairs)
WITH_ONE = Layout(added=-1.0)  # llama.cpp's norms of Gemma
