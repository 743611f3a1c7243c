"""The table of architectures that run: a config of transformers -> what its model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.errors import CheckpointError
from fminfer.models.architectures import gpt_like, llama_like
from fminfer.models.architectures.naming import Architecture
from fminfer.models.config_fields import ReadConfig

ROWS: dict[str, Callable[[Any], Architecture]] = {
    "llama": llama_like.llama,
    "mistral": llama_like.mistral,
    "qwen2": llama_like.qwen2,
    "qwen3": llama_like.qwen3,
    "gemma": llama_like.gemma,
    "gemma2": llama_like.gemma2,
    "gemma3_text": llama_like.gemma3_text,
    "phi": llama_like.phi,
    "phi3": llama_like.phi3,
    "stablelm": llama_like.stablelm,
    "starcoder2": llama_like.starcoder2,
    "olmo2": llama_like.olmo2,
    "glm4": llama_like.glm4,
    "mixtral": llama_like.mixtral,
    "qwen3_moe": llama_like.qwen3_moe,
    "opt": gpt_like.opt,
    "gpt2": gpt_like.gpt2,
    "gpt_bigcode": gpt_like.gpt_bigcode,
    "gpt_neo": gpt_like.gpt_neo,
    "gpt_neox": gpt_like.gpt_neox,
    "gptj": gpt_like.gptj,
    "codegen": gpt_like.codegen,
    "falcon": gpt_like.falcon,
    "mpt": gpt_like.mpt,
    "bloom": gpt_like.bloom,
}


def check_model_type(model_type: str) -> None:
    """Refuse what does not run.

    Raises:
        CheckpointError: the message lists what does.
    """
    if model_type not in ROWS:
        raise CheckpointError(
            f"the architecture {model_type!r} is not one that fminfer runs; it runs: "
            + ", ".join(sorted(ROWS))
        )


def architecture_of(config: Any) -> Architecture:
    """Return what a config of transformers says.

    Raises:
        CheckpointError: no such architecture runs, or a field says what none of it computes.
    """
    check_model_type(config.model_type)
    read = ReadConfig(config)
    architecture = ROWS[config.model_type](read)
    read.refuse_unread()
    return architecture
