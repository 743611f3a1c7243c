"""The spec: what a transformer is made of, as plain values, which each family makes of
a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Norm:
    """An RMSNorm (Zhang and Sennrich 2019) or a LayerNorm (Ba et al. 2016) over the
    last dimension.

    y = x / sqrt(mean(x²) + eps) * (weight + offset) + bias. A LayerNorm first subtracts
    the mean.
    """

    eps: float
    is_rms: bool = True
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0  # Gemma multiplies by 1 + weight


@dataclass(slots=True, frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) on the first 2 * len(inv_freq) elements of a head."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # multiplies cosines and sines
    # neighbours form pairs; otherwise elements of the two halves do
    is_interleaved: bool = False


@dataclass(slots=True, frozen=True)
class Alibi:
    """ALiBi, a bias by distance (Press et al. 2022), with one slope a head."""

    slopes: tuple[float, ...]
    # Falcon's: slope · position is rounded to bfloat16 and added before scores are scaled.
    is_rounded: bool = False


@dataclass(slots=True, frozen=True)
class Relative:
    """T5's bias by distance (Raffel et al. 2020): each head has learned one for each bucket.

    Near distances have a bucket each; farther ones share theirs, in steps of a logarithm.
    """

    buckets: int
    max_distance: int
    is_causal: bool  # otherwise half of the buckets are for keys behind the query

    @property
    def num_exact(self) -> int:
        """How many distances, from 0 on, have a bucket of their own."""
        return (self.buckets if self.is_causal else self.buckets // 2) // 2


@dataclass(slots=True, frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one vector.

    The cache keeps it, normed, and one rotated key of all heads. `kv_up` is moved to queries and
    outputs, so that heads attend to the vector itself.
    """

    rank: int  # of the vector
    query_rank: int | None  # None: queries are one product
    key_dim: int  # of a head, beside what is rotated
    turned_dim: int  # which is rotated
    value_dim: int
    norm: Norm  # of the vector, and of that of queries


@dataclass(slots=True, frozen=True)
class StageHeads:
    """Of a part of a layer: the heads of all ranks, for a norm over all of them together."""

    heads: int
    kv_heads: int
    kv_copies: int  # how many ranks have this one's KV heads, itself included


@dataclass(slots=True, frozen=True)
class Attention:
    """Attention of grouped heads, with the products `qkv` (in this order) and `out`."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    # otherwise a query sees keys behind it, as far as those before it
    is_causal: bool = True
    rope: Rope | None = None
    alibi: Alibi | None = None
    relative: Relative | None = None
    # keys that a query sees, its own included; None: all before it
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    qk_norm: Norm | None = None
    # or "heads" (each has its own weights) or "all" of them in one norm
    qk_norm_over: str = "head"
    qk_norm_is_last: bool = False  # it comes after rotary positions (Hunyuan)
    clip: float | None = None  # the outputs of qkv are clamped to [-clip, clip]
    # each head has the score of one key more, without a value (gpt-oss)
    has_sinks: bool = False
    latent: Latent | None = None  # instead of qkv; one KV head, of rank + turned_dim
    # of which these are some; None: a norm needs no others
    stage_heads: StageHeads | None = None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The outputs of `qkv`: of queries, keys and values."""
        return tuple(
            n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)
        )  # type: ignore[return-value]

    @property
    def out_inputs(self) -> int:
        """The inputs of `out`."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def has_cached_bias(self) -> bool:
        """Whether a cached key has its ALiBi bias as one more element; see `transformer`."""
        return self.alibi is not None and self.alibi.is_rounded

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(2, KV heads, elements) of a token's key and value in the cache; 1: they are one."""
        if self.has_cached_bias:
            return 2, self.heads, self.head_dim + 1
        return 1 if self.latent else 2, self.kv_heads, self.head_dim


# The tensors of activations that have some, for each MLP.
ACTIVATION_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "xielu": {"positive": (1,), "negative": (1,), "beta": (), "eps": ()}
}


@dataclass(slots=True, frozen=True)
class Mlp:
    """down(act(up(x))), or down(act(first half) * second half) of `up` if it is gated."""

    activation: str
    size: int  # inputs of `down`
    is_gated: bool = True
    has_bias: bool = False
    # gate <= limit, |second half| <= limit, which 1 is added to
    limit: float | None = None
    # where hidden states are float16, `down` is float32 (T5 overflows)
    is_wide: bool = False

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
    scores: str = "softmax"  # or "sigmoid" (DeepSeek V3) or "sparsemixer" (Phi-3.5 MoE)
    # scores are made in float32 in any dtype, as all of "sigmoid" are
    is_precise: bool = False
    # of sparsemixer: how far below the best a score still counts
    mixer_eps: float = 0.0
    has_router_bias: bool = False  # of the product that scores are made of
    has_choice_bias: bool = False  # added to scores, for the choice alone
    groups: int = 1  # of experts, side by side
    # those whose best scores sum up highest; the others have no chance
    top_groups: int = 1
    rated_by: int = 2  # so many best scores of a group are summed
    scale: float = 1.0  # multiplies the weights
    shared: Mlp | None = None  # an expert that every token goes to besides
    has_shared_gate: bool = False  # a sigmoid of one product multiplies what it gives


@dataclass(slots=True, frozen=True)
class Cross:
    """Attention to what the encoder gave, between a layer's own attention and its MLP.

    Its products are `cross_q`, `cross_kv` (keys, then values) and `cross_out`.
    """

    attention: Attention  # as wide as the layer's own
    input_norm: Norm | None  # on its input
    sum_norm: Norm | None  # on the residual sum behind it


@dataclass(slots=True, frozen=True)
class Layer:
    """Attention and MLP with their norms. Each pair is (of attention, of the MLP)."""

    attention: Attention
    mlp: Mlp | Moe
    input_norms: tuple[Norm | None, Norm | None]  # on their inputs
    output_norms: tuple[Norm | None, Norm | None] = (None, None)  # on their outputs
    # on the residual sums (OPT 350m)
    sum_norms: tuple[Norm | None, Norm | None] = (None, None)
    # both read the layer's input; an MLP without a norm shares the other
    is_parallel: bool = False
    # the residual is the output of the norm (a variant of BLOOM)
    adds_normed: bool = False
    residual_scale: float = 1.0  # multiplies what attention and MLP add (Granite)
    cross: Cross | None = None


@dataclass(slots=True, frozen=True)
class Reading:
    """A dense layer behind pooling: norm(activation(x·Wᵀ + b))."""

    size: int  # outputs
    activation: str = ""  # "": none
    has_bias: bool = True
    norm: Norm | None = None


@dataclass(slots=True, frozen=True)
class Pooling:
    """How the hidden states of a prompt's tokens become one vector."""

    mode: str  # a mode of sentence-transformers: "mean", "cls", "max", …, or "last"
    readings: tuple[Reading, ...] = ()
    is_normalized: bool = False  # to length 1
    is_scored: bool = False  # the vector is the logits of classes
    padding_id: int | None = None  # for "last": tokens with this id are skipped


@dataclass(slots=True, frozen=True)
class Encoder:
    """Layers that see each prompt whole and keep no keys; they come last in a model."""

    num_layers: int
    final_norm: Norm | None = None
    embed_norm: Norm | None = None
    num_positions: int = 0  # rows of a table of learned positions; 0: no such table
    position_offset: int = 0  # the row of position 0
    num_types: int = 0  # rows of a table of token types (BERT's segments)
    padding_id: int | None = None  # tokens with this id get no position (RoBERTa)
    pooling: Pooling | None = None  # None: there is a decoder
    has_embed: bool = False  # whether it may have an embedding of its own


@dataclass(slots=True, frozen=True)
class Model:
    """A whole model: embedding, layers, final norm, head; the encoder's layers come last."""

    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    embed_size: int  # if it differs from hidden_size, the model projects in and out
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    num_positions: int = 0  # rows of the table of learned positions; 0: no such table
    position_offset: int = 0  # the row of position 0
    has_sinusoids: bool = False  # the table is computed, not learned (XGLM)
    has_head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    encoder: Encoder | None = None

    @property
    def num_cached_layers(self) -> int:
        """The layers that keep keys and values: all but the encoder's, which come
        behind them."""
        return len(self.layers) - (self.encoder.num_layers if self.encoder else 0)

    @property
    def is_pooled(self) -> bool:
        """Whether it gives one vector a prompt, and draws nothing."""
        return self.encoder is not None and self.encoder.pooling is not None
