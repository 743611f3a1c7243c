"""The table of architectures that run: a config of transformers -> what its model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fminfer.errors import CheckpointError
from fminfer.models.architectures.gpt_like import (
    bloom,
    codegen,
    falcon,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gptj,
    mpt,
    opt,
)
from fminfer.models.architectures.llama_like import (
    gemma,
    gemma2,
    gemma3_text,
    glm4,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    stablelm,
    starcoder2,
)
from fminfer.models.architectures.naming import Architecture
from fminfer.models.config_fields import ReadConfig

ROWS: dict[str, Callable[[Any], Architecture]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi": phi,
    "phi3": phi3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
    "olmo2": olmo2,
    "glm4": glm4,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "opt": opt,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "codegen": codegen,
    "falcon": falcon,
    "mpt": mpt,
    "bloom": bloom,
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
