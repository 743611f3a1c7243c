"""What a transformer is made of, told by values alone.

An architecture's row turns a config into a `Model`; `transformer` computes it, and every compiled
body says which of these it can serve. It knows no checkpoint, no device and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Norm:
    """An RMSNorm (Zhang and Sennrich 2019) or a LayerNorm (Ba et al. 2016) over the last dimension.

    y = x / sqrt(mean(x²) + eps) * (weight + offset) + bias; a LayerNorm takes the mean off x first.
    """

    eps: float
    is_rms: bool = True
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0  # Gemma multiplies by 1 + weight


@dataclass(slots=True, frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) of the first 2 * len(inv_freq) elements of a head."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # of cosines and sines
    is_interleaved: bool = False  # neighbours are a pair; otherwise the halves are


@dataclass(slots=True, frozen=True)
class Alibi:
    """A bias by distance (Press et al. 2022), one slope a head."""

    slopes: tuple[float, ...]
    is_rounded: bool = (
        False  # Falcon's: slope · position in bfloat16, added before scores are scaled
    )


@dataclass(slots=True, frozen=True)
class Attention:
    """Causal attention of grouped heads; its products are `qkv`, queries first, and `out`."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    rope: Rope | None = None
    alibi: Alibi | None = None
    window: int | None = None  # keys that a query sees, its own among them; None: all before it
    softcap: float | None = None  # scores are bent into (-softcap, softcap)
    qk_norm: Norm | None = None
    qk_norm_over: str = "head"  # what is normed: "head", "heads" (a weight for each), "all" at once
    clip: float | None = None  # what qkv gives is clamped to [-clip, clip]

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The outputs of `qkv`: of queries, keys and values."""
        return tuple(n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads))  # type: ignore[return-value]

    @property
    def keeps_bias(self) -> bool:
        """Whether a key is kept with its ALiBi bias as one more element; see `transformer`."""
        return self.alibi is not None and self.alibi.is_rounded

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(KV heads, elements) of a token's key in the cache, and of its value."""
        if self.keeps_bias:
            return self.heads, self.head_dim + 1
        return self.kv_heads, self.head_dim


@dataclass(slots=True, frozen=True)
class Mlp:
    """down(act(up(x))), or down(act(first half) * second half) of `up` if it is gated."""

    activation: str
    size: int  # inputs of `down`
    is_gated: bool = True
    has_bias: bool = False

    @property
    def up_size(self) -> int:
        """The outputs of `up`."""
        return self.size * (2 if self.is_gated else 1)


@dataclass(slots=True, frozen=True)
class Moe:
    """A mixture of experts: each token goes to `top_k` of them (Shazeer et al. 2017)."""

    num_experts: int
    top_k: int
    expert: Mlp
    is_normalized: bool = True  # the weights of those chosen sum up to 1


@dataclass(slots=True, frozen=True)
class Layer:
    """Attention and MLP with their norms; a pair is of (attention, MLP)."""

    attention: Attention
    mlp: Mlp | Moe
    before: tuple[Norm | None, Norm | None]  # of their inputs
    after: tuple[Norm | None, Norm | None] = (None, None)  # of their outputs
    of_sum: tuple[Norm | None, Norm | None] = (None, None)  # of the sums (OPT 350m)
    is_parallel: bool = False  # both read the layer's input; without a norm, the MLP attention's
    adds_normed: bool = False  # BLOOM's variant: the residual is what was normed


@dataclass(slots=True, frozen=True)
class Model:
    """A whole decoder: embedding, layers, final norm, head."""

    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    embed_size: int  # of the embedding; another than hidden_size has projections in and out
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    num_positions: int = 0  # rows of the table of learned positions; 0: there is none
    position_offset: int = 0  # its row of position 0
    has_head_bias: bool = False
    logit_cap: float | None = None
