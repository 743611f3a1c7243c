"""The table of all architectures, and how a config becomes a spec by its row.

A row gets the config as a `ReadConfig`, which notes the fields that it reads. Any other
field must be in `HARMLESS`, or have the default of the config's class.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fminfer.compute.layers.plain import ACTIVATIONS
from fminfer.compute.values.spec import ACTIVATION_SHAPES, Moe, Pooling
from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import naming_broken_files
from fminfer.models.families import (
    encoder_decoders,
    encoders,
    gpt_like,
    llama_like,
    mixtures,
)
from fminfer.models.families.config_parts import Row
from fminfer.models.families.encoders import (
    with_attention_to_both_sides,
    with_output_head,
)
from fminfer.models.families.tensor_names import Architecture, with_our_names
from fminfer.models.published.schemes import parse_scheme
from fminfer.models.tensor_specs import model_specs

ROWS: dict[str, Row] = {
    **llama_like.ROWS,
    **mixtures.ROWS,
    **gpt_like.ROWS,
    **encoder_decoders.ROWS,
    **encoders.ROWS,
}
# Fields of layers that carry a state from token to token in the place of keys and values.
_OF_STATES = re.compile(
    "mamba|ssm_|state_size|lru_width|linear_conv|linear_attn|linear_num|conv_L_cache"
)
# by no such field
_STATEFUL = ("rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "bailing_hybrid")
_LIKE_NAME = 0.6
_LIKE_FIELDS = 0.75  # a family that is less alike is no help
# Why a field that no row reads changes no answer -> such fields.
_BY_REASON = {
    "of training": """
        attention_dropout attn_pdrop classifier_dropout dropout emb_pdrop embd_pdrop
        embed_dropout embedding_dropout hidden_dropout layerdrop resid_dropout
        resid_pdrop residual_dropout activation_dropout router_jitter_noise
        input_jitter_noise hidden_dropout_prob
        attention_probs_dropout_prob qa_dropout seq_classif_dropout mlp_dropout
        attn_config.attn_pdrop output_router_logits router_aux_loss_coef embedding_fraction
    """,
    "of weights before training": """
        initializer_range init_std init_device initializer_factor embedding_initializer_range
        initializer_cutoff_factor
    """,
    "other code reads it": """
        bos_token_id eos_token_id pad_token_id use_cache tie_word_embeddings cls_token_id
        sep_token_id
    """,
    "checkpoint.context_length reads it": """
        max_position_embeddings n_positions n_ctx max_seq_len seq_length
    """,
    "of an encoder and a decoder: other code reads it, or training does": """
        is_encoder_decoder decoder_start_token_id forced_bos_token_id forced_eos_token_id
        encoder_layerdrop decoder_layerdrop
    """,
    "of heads that generate nothing": """
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj is_decoder decoder_bias sparse_prediction sparse_pred_ignore_index
    """,
    "it chooses how transformers computes, not what": """
        attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn
        attn_config.attn_impl pretraining_tp deterministic_flash_attn reference_compile
    """,
    "the config's class makes other fields of it, such as layer_types or rope_parameters": """
        use_sliding_window max_window_layers attention_types sliding_window_pattern
        no_rope_layer_interval first_k_dense_replace feed_forward_proj
        original_max_position_embeddings
    """,
    "of images": """
        vision_config image_token_index boi_token_index eoi_token_index mm_tokens_per_image
        projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size
    """,
    "a checkpoint of DistilBERT stores them, too": "sinusoidal_pos_embds",
    "transformers' MPT has ALiBi whatever it says": "learned_pos_emb",
}
HARMLESS = {name: why for why, names in _BY_REASON.items() for name in names.split()}
# Fields with several values that all mean the same.
SAME: dict[str, tuple[object, ...]] = {
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "use_bidirectional_attention": (False, None),
}
# Fields that no config class of transformers declares -> the values that we compute.
UNDECLARED: dict[str, tuple[object, ...]] = {
    "attn_config.rope": (False, None),
    "is_causal": (True, None),
}
# The `quantization_config` of folders that `fminfer quantize` writes, and what it is named by.
OWN_FOLDER = {"quant_method": "fminfer", "version": 1}
TEXT_PART = "text_config"  # of a model that reads images, too
# Fields that transformers' models read with getattr, though their configs may not declare them.
UNDECLARED_BUT_READ = {"head_dim", "is_causal"}
# Fields that count something: the least and the most, far beyond all models. -1 means none.
COUNTED = {
    "vocab_size": (1, 1 << 26),
    "num_hidden_layers|n_layers?|num_layers": (1, 4096),
    "(num_attention|n|num)_heads?|hidden_size|d_model|n_embd": (1, 1 << 20),
    "(.*_)?(layers|blocks)": (-1, 4096),
    "(.*_)?head_dim|d_kv": (-1, 1 << 14),
    "(.*_)?(heads|experts|labels|size)": (-1, 1 << 26),
}
_OF_ALL = frozenset(
    field.name for field in dataclasses.fields(transformers.PreTrainedConfig)
)


def is_own_quantization(quantization: object) -> bool:
    """Tell whether `fminfer quantize` wrote the folder.

    Raises:
        CheckpointError: a later fminfer wrote it.
    """
    method, version = OWN_FOLDER.values()
    if not isinstance(quantization, dict) or quantization.get("quant_method") != method:
        return False
    if quantization.get("version") != version:
        raise CheckpointError(
            f"config.json is of a folder that a later fminfer has quantized (its version is "
            f"{quantization.get('version')!r}, this one reads {version}); upgrade fminfer, or "
            "quantize the model again"
        )
    return True


def find_quantization(config: Any) -> object:
    """Find what a config says of quantized weights, for all of the model or its text part."""
    parts = (config, getattr(config, TEXT_PART, None))
    values = (getattr(part, "quantization_config", None) for part in parts)
    return next((value for value in values if value is not None), None)


def check_counts(fields: Mapping[str, Any], file: object) -> None:
    """Refuse a config.json that counts layers, heads or sizes as no model has them.

    transformers would make lists of as many entries, or divide by them.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            check_counts(value, file)
        bounds = next(
            (COUNTED[form] for form in COUNTED if re.fullmatch(form, name)), None
        )
        if (
            bounds
            and isinstance(value, int | float)
            and not bounds[0] <= value <= bounds[1]
        ):
            raise CheckpointError(
                f"{file} sets {name} to {value!r}; a whole number from {bounds[0]} to "
                f"{bounds[1]:,} is allowed. Use the config.json of the published model"
            )


class ReadConfig:
    """A config that notes which of its fields are read."""

    def __init__(self, config: Any, prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix
        self._parts: dict[str, ReadConfig] = {}
        self._read: set[str] = set()
        self._declared = {
            *vars(type(config)()),
            *dir(type(config)),
            *UNDECLARED_BUT_READ,
        }

    def __getattr__(self, name: str) -> Any:
        if name in vars(self._config) and name not in self._declared:
            # transformers keeps it and reads it nowhere: a sliding_window of llama, say.
            raise AttributeError(f"{type(self._config).__name__} declares no {name!r}")
        value = getattr(self._config, name)
        self._read |= {name, self._config.attribute_map.get(name, name)}
        if not isinstance(value, transformers.PreTrainedConfig):
            return value
        if name not in self._parts:
            # the fields of a text part are the model's
            part_prefix = "" if name == TEXT_PART else f"{name}."
            self._parts[name] = ReadConfig(value, self._prefix + part_prefix)
        return self._parts[name]

    def check_unread_fields(self) -> None:
        """Raise a CheckpointError for a field that no row reads and that is not the default."""
        for path, value, usual in self._find_unread_fields():
            raise CheckpointError(
                f"config.json sets {path} to {value!r}, and fminfer computes such a model only "
                f"with {usual!r}; use a checkpoint that has that"
            )

    def _find_unread_fields(self) -> Iterator[tuple[str, object, object]]:
        defaults = type(self._config)()
        for field in dataclasses.fields(self._config):
            path = self._prefix + field.name
            if field.name in self._read or field.name in _OF_ALL or path in HARMLESS:
                continue
            value = getattr(self._config, field.name)
            default = getattr(defaults, field.name)
            if value != default and value not in SAME.get(path, ()):
                yield path, value, default
        for path, runnable in UNDECLARED.items():
            prefix, dot, name = path.rpartition(".")
            if prefix + dot == self._prefix and name not in self._read:
                value = getattr(self._config, name, None)
                if value is not None and value not in runnable:
                    yield path, value, runnable[0]
        for part in self._parts.values():
            yield from part._find_unread_fields()


@naming_broken_files("the model's config.json")
def architecture_of(config: Any, pooling: Pooling | None = None) -> Architecture:
    """Turn a config of transformers into a spec and the sources of its tensors, or refuse it.

    `pooling` is of a folder of sentence-transformers; None: the config says what a model gives.
    """
    check_model_type(config.model_type, config.to_dict())
    read = ReadConfig(config)
    architecture = with_output_head(ROWS[config.model_type](read), read, pooling)
    if architecture.model.is_pooled:
        architecture = with_attention_to_both_sides(architecture, read)
    read.check_unread_fields()
    for layer in dict.fromkeys(architecture.model.layers):
        _check_spec_numbers(layer, "layer")
        # shared ones alike
        mlp = layer.mlp.expert if isinstance(layer.mlp, Moe) else layer.mlp
        if mlp.activation not in ACTIVATIONS.keys() | ACTIVATION_SHAPES.keys():
            raise CheckpointError(
                (
                    f"config.json has the activation {mlp.activation!r}, which does "
                    "not run; these do: "
                )
                + ", ".join(sorted(ACTIVATIONS))
            )
    quantization = find_quantization(config)
    if is_own_quantization(quantization):
        return with_our_names(architecture, model_specs(architecture.model))
    return dataclasses.replace(architecture, scheme=parse_scheme(quantization))


def _check_spec_numbers(part: Any, name: str) -> None:
    """Refuse a part of a spec with a number that nothing can be computed with."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        path = f"{name}.{field.name}"
        if dataclasses.is_dataclass(value):
            _check_spec_numbers(value, path)
        if (
            (isinstance(value, int) and not 0 <= value < 1 << 48)
            or isinstance(value, complex)
            or (field.type in ("int", "float") and not isinstance(value, int | float))
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise CheckpointError(
                f"config.json makes {path} {value!r}, with which nothing can be computed. Use "
                "the config.json of the published model"
            )
    if isinstance(part, Moe) and not 1 <= part.top_k <= part.num_experts:
        raise CheckpointError(
            f"config.json has {part.num_experts} experts, and each token goes to {part.top_k} "
            "of them; 1 to all of them are allowed. Use the config.json of the published model"
        )
    if isinstance(part, Moe) and part.groups > 1:
        size, rest = divmod(part.num_experts, part.groups)
        if rest or size < part.rated_by or not 1 <= part.top_groups <= part.groups:
            raise CheckpointError(
                f"config.json puts {part.num_experts} experts into {part.groups} groups, of "
                f"which {part.top_groups} are chosen by their {part.rated_by} best; groups of "
                "one size are allowed, and 1 to all of them chosen. Use the config.json of the "
                "published model"
            )


def check_model_type(model_type: str, fields: dict[str, Any]) -> None:
    """Refuse an architecture without a row; say its kind, or the nearest family that runs."""
    if model_type in ROWS:
        return
    if kind := describe_unsupported_kind(model_type, fields):
        raise CheckpointError(
            f"the architecture {model_type!r} {kind}; 'fminfer families' lists what runs"
        )

    def likeness(family: str) -> tuple[float, float]:
        shared = len(fields.keys() & _declared_fields(CONFIG_MAPPING[family])) / max(
            1, len(fields)
        )
        return SequenceMatcher(None, model_type.lower(), family).ratio(), shared

    nearest = max(
        ROWS, key=lambda family: likeness(family)[0] + 2 * likeness(family)[1]
    )
    name, shared = likeness(nearest)
    is_near = name >= _LIKE_NAME or shared >= _LIKE_FIELDS
    near = f". By name and config the nearest is {nearest!r}; if" if is_near else "; if"
    raise CheckpointError(
        f"the architecture {model_type!r} is none of the {len(ROWS)} that fminfer runs "
        f"('fminfer families' lists them){near} it is a decoder with attention, "
        "docs/architectures.md tells how to add it"
    )


def describe_unsupported_kind(model_type: str, fields: Mapping[str, Any]) -> str:
    """Return what kind of model no row can describe, by what is declared; "": nothing tells."""
    from transformers.models.auto.modeling_auto import (  # slow, and only for a refusal
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    text = fields.get("text_config")
    if isinstance(text, dict) and (
        kind := describe_unsupported_kind(str(text.get("model_type")), text)
    ):
        return kind
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    if fields.get("is_encoder_decoder", getattr(known, "is_encoder_decoder", False)):
        return f"has an encoder and a decoder; of these {', '.join(encoder_decoders.ROWS)} run"
    if model_type in _STATEFUL or any(
        map(_OF_STATES.search, {*fields, *_declared_fields(known)})
    ):
        return (
            "has layers with a state (state-space, recurrent or linear attention, as "
            "Mamba has), and fminfer computes attention over a KV cache alone"
        )
    if "ForMaskedLM" in str(fields.get("architectures")) or model_type in MASKED:
        return f"is an encoder, which writes no text; of these {', '.join(encoders.ROWS)} run"
    return ""


def _declared_fields(config: Any) -> set[str]:
    return (
        set()
        if config is None
        else {field.name for field in dataclasses.fields(config)}
    )
