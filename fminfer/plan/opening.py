"""Finds the model of a run."""

from __future__ import annotations

from dataclasses import replace

from fminfer.core.config import ModelOptions
from fminfer.core.errors import UsageError
from fminfer.models.checkpoint import Checkpoint, open_checkpoint, open_random


def open_model(config: ModelOptions, *, has_weights: bool = True) -> Checkpoint:
    """Find the model that a run is to use.

    Args:
        has_weights: otherwise a model of the hub is fetched without its weights.

    Raises:
        CheckpointError: there is none, or it does not run.
        UsageError: --model-type says it is another, or --max-model-len is beyond its context.
    """
    if config.random_init is not None:
        checkpoint = open_random(config.random_init, tokenizer=config.tokenizer)
    else:
        checkpoint = open_checkpoint(
            config.model,
            has_weights=has_weights,
            model_config=config.model_config,
            tokenizer=config.tokenizer,
            revision=config.revision,
            without_adapter=config.without_adapter,
            needs_tokenizer=not config.skip_tokenizer_init,
        )
    name, of_config = config.model_type, str(checkpoint.config.model_type)
    plain = (name or "").replace("_", "").replace("-", "").lower()  # as gptneox, gpt-j
    if name is not None and plain != of_config.replace("_", ""):
        raise UsageError(
            f"--model-type {name} clashes with the model's config, which says {of_config}; "
            "leave the flag out"
        )
    if config.max_model_len is None:
        return checkpoint
    if config.max_model_len > checkpoint.context_length:
        raise UsageError(
            f"--max-model-len is {config.max_model_len}, and the context of {checkpoint.name} is "
            f"{checkpoint.context_length} tokens; give a smaller one, or leave the flag out"
        )
    return replace(checkpoint, max_model_len=config.max_model_len)
