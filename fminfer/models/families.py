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
    """Where one architecture keeps its decoder, its layers and its attention."""

    class_name: str  # in transformers
    decoder: str  # the module that maps ids and positions to normed hidden states
    layers: str  # the list of layers, from the decoder
    attention: str  # the attention module, from a layer
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
) -> Family:
    return Family(class_name, "model", "layers", "self_attn", renames=renames, experts=experts)


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM"),
    "qwen2": _llama_like("Qwen2ForCausalLM"),
    "qwen3": _llama_like("Qwen3ForCausalLM"),
    "gemma": _llama_like("GemmaForCausalLM"),
    "gemma2": _llama_like("Gemma2ForCausalLM"),
    "gemma3_text": _llama_like("Gemma3ForCausalLM"),
    "phi": _llama_like("PhiForCausalLM"),
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
    "opt": Family("OPTForCausalLM", "model.decoder", "layers", "self_attn"),
    "gpt2": Family("GPT2LMHeadModel", "transformer", "h", "attn"),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", "transformer", "h", "attn"),
    "gpt_neo": Family("GPTNeoForCausalLM", "transformer", "h", "attn.attention", adapter="gpt_neo"),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "layers",
        "attention",
        renames=(("embed_out.", "lm_head."),),
    ),
    "gptj": Family("GPTJForCausalLM", "transformer", "h", "attn", adapter="gptj"),
    "codegen": Family("CodeGenForCausalLM", "transformer", "h", "attn", adapter="codegen"),
    "falcon": Family("FalconForCausalLM", "transformer", "h", "self_attention", adapter="falcon"),
    "mpt": Family(
        "MptForCausalLM",
        "transformer",
        "blocks",
        "attn",
        takes_positions=False,
        wants_mask=True,
        adapter="mpt",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "transformer",
        "h",
        "self_attention",
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
