"""The table of architectures that run: where each keeps its parts. It imports no model code.

A family is one row. Paths are attribute paths from the causal-LM model of transformers. `adapter`
names a module of `fminfer.models.adapters` for architectures whose attention does not go through
transformers' AttentionInterface.
"""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class ExpertPart:
    """One tensor of an expert, and which part of a parameter of all experts it is."""

    name: str
    parameter: str
    index: int
    count: int


def _experts(gate: str, up: str, down: str) -> tuple[ExpertPart, ...]:
    return (
        ExpertPart(gate, "gate_up_proj", 0, 2),
        ExpertPart(up, "gate_up_proj", 1, 2),
        ExpertPart(down, "down_proj", 0, 1),
    )


@dataclass(slots=True, frozen=True)
class Family:
    """Where one architecture keeps its decoder, its layers and its attention.

    `tables`, `entry` and `exit` are modules of the decoder; one stage of several lacks those that
    are another stage's.
    """

    class_name: str  # in transformers
    decoder: str  # the module that maps ids and positions to normed hidden states
    layers: str  # the list of layers, from the decoder
    attention: str  # the attention module, from a layer
    tables: tuple[str, ...]  # the first stage's, looked up by token id or position
    exit: tuple[str, ...]  # the last stage's, from hidden states to hidden states
    entry: tuple[str, ...] = ()  # the first stage's, from hidden states to hidden states
    takes_positions: bool = True  # the decoder's forward has position_ids
    wants_mask: bool = False  # its forward cannot do without one, though the adapter reads none
    adapter: str | None = None
    renames: tuple[tuple[str, str], ...] = ()  # a part of published tensor names -> today's
    experts: tuple[ExpertPart, ...] = ()


def _llama_like(
    class_name: str,
    *,
    renames: tuple[tuple[str, str], ...] = (),
    experts: tuple[ExpertPart, ...] = (),
    norm: str = "norm",
) -> Family:
    return Family(
        class_name,
        "model",
        "layers",
        "self_attn",
        ("embed_tokens",),
        (norm,),
        renames=renames,
        experts=experts,
    )


def _gpt_like(
    class_name: str,
    attention: str = "attn",
    *,
    tables: tuple[str, ...] = ("wte",),
    adapter: str | None = None,
) -> Family:
    return Family(class_name, "transformer", "h", attention, tables, ("ln_f",), adapter=adapter)


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM"),
    "qwen2": _llama_like("Qwen2ForCausalLM"),
    "qwen3": _llama_like("Qwen3ForCausalLM"),
    "gemma": _llama_like("GemmaForCausalLM"),
    "gemma2": _llama_like("Gemma2ForCausalLM"),
    "gemma3_text": _llama_like("Gemma3ForCausalLM"),
    "phi": _llama_like("PhiForCausalLM", norm="final_layernorm"),
    "phi3": _llama_like("Phi3ForCausalLM"),
    "stablelm": _llama_like("StableLmForCausalLM"),
    "starcoder2": _llama_like("Starcoder2ForCausalLM"),
    "olmo2": _llama_like("Olmo2ForCausalLM"),
    "glm4": _llama_like("Glm4ForCausalLM"),
    "mixtral": _llama_like(
        "MixtralForCausalLM",
        renames=((".block_sparse_moe.", ".mlp."),),
        experts=_experts("w1", "w3", "w2"),
    ),
    "qwen3_moe": _llama_like(
        "Qwen3MoeForCausalLM", experts=_experts("gate_proj", "up_proj", "down_proj")
    ),
    "opt": Family(
        "OPTForCausalLM",
        "model.decoder",
        "layers",
        "self_attn",
        ("embed_tokens", "embed_positions"),
        ("final_layer_norm", "project_out"),
        entry=("project_in",),
    ),
    "gpt2": _gpt_like("GPT2LMHeadModel", tables=("wte", "wpe")),
    "gpt_bigcode": _gpt_like("GPTBigCodeForCausalLM", tables=("wte", "wpe")),
    "gpt_neo": _gpt_like(
        "GPTNeoForCausalLM", "attn.attention", tables=("wte", "wpe"), adapter="gpt_neo"
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "layers",
        "attention",
        ("embed_in",),
        ("final_layer_norm",),
        renames=(("embed_out.", "lm_head."),),
    ),
    "gptj": _gpt_like("GPTJForCausalLM", adapter="gptj"),
    "codegen": _gpt_like("CodeGenForCausalLM", adapter="codegen"),
    "falcon": _gpt_like(
        "FalconForCausalLM", "self_attention", tables=("word_embeddings",), adapter="falcon"
    ),
    "mpt": Family(
        "MptForCausalLM",
        "transformer",
        "blocks",
        "attn",
        ("wte",),
        ("norm_f",),
        takes_positions=False,
        wants_mask=True,
        adapter="mpt",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "transformer",
        "h",
        "self_attention",
        ("word_embeddings",),
        ("ln_f",),
        entry=("word_embeddings_layernorm",),
        takes_positions=False,
        adapter="bloom",
    ),
}


def family_of(model_type: str) -> Family:
    """Return the family of a config's `model_type`.

    Raises:
        CheckpointError: no such family runs yet; the message lists those that do.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"the architecture {model_type!r} is not one that fminfer runs; it runs: "
            + ", ".join(sorted(FAMILIES))
        )
    return FAMILIES[model_type]
