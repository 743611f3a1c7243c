"""The table of architectures that run: where each keeps its parts. It imports no model code.

A family is one row. Paths are attribute paths from the causal-LM model of transformers. `adapter`
names a module of `fminfer.models.adapters` for architectures whose attention does not go through
transformers' AttentionInterface.
"""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class Family:
    """Where one architecture keeps its decoder, its layers and its attention."""

    class_name: str  # in transformers
    decoder: str  # the module that maps ids and positions to normed hidden states
    layers: str  # the list of layers, from the decoder
    attention: str  # the attention module, from a layer
    takes_positions: bool = True  # the decoder's forward has position_ids
    adapter: str | None = None
    renames: tuple[tuple[str, str], ...] = ()  # old tensor name prefix -> today's


def _llama_like(class_name: str) -> Family:
    return Family(class_name, "model", "layers", "self_attn")


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM"),
    "qwen2": _llama_like("Qwen2ForCausalLM"),
    "qwen3": _llama_like("Qwen3ForCausalLM"),
    "gemma": _llama_like("GemmaForCausalLM"),
    "phi": _llama_like("PhiForCausalLM"),
    "opt": Family("OPTForCausalLM", "model.decoder", "layers", "self_attn"),
    "gpt2": Family("GPT2LMHeadModel", "transformer", "h", "attn"),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "layers",
        "attention",
        renames=(("embed_out.", "lm_head."),),
    ),
    "gptj": Family("GPTJForCausalLM", "transformer", "h", "attn", adapter="gptj"),
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
