"""Puts together what an engine needs beside weights: tokenizer, limits, a loop over a
pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from fminfer.answers.line_counter import LineCounter
from fminfer.contract.field_table import COLUMNS, FIELDS
from fminfer.contract.fields import INT64, make_integer_kind
from fminfer.contract.request import DEFAULTS, RequestParams, VectorSpec
from fminfer.core.config import (
    EngineConfig,
    MemoryOptions,
    ModelOptions,
    RequestOptions,
    StepSizes,
)
from fminfer.core.errors import CheckpointError, RequestError, UsageError
from fminfer.core.impostors import naming_broken_files
from fminfer.engine.answer import AnswerStyle
from fminfer.engine.blocks import BlockPool
from fminfer.engine.intake import Intake
from fminfer.engine.loop import EngineLoop, Pipeline
from fminfer.engine.prompt_fit import KvSize, RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.start import RequestStarter
from fminfer.models.checkpoint import GENERATION, START_FIELDS, Checkpoint
from fminfer.models.known_sizes import DEMO_NAMES
from fminfer.models.sentence_folder import SentenceFolder
from fminfer.models.stored.tensor_table import find_nonfinite_tensor
from fminfer.text.tokenizer import NoTokenizer, Tokenizer
from fminfer.text.tokenizer_folder import read_template

# Of the fields that decide draws, those for which a model may have defaults.
OF_MODELS = (*COLUMNS, "repetition_penalty")
NAN_REMEDIES = {
    torch.float32: "The weights hold nan, or overflow even in float32. Take another checkpoint",
    torch.float16: "The dtype overflows. Try --dtype float32 or bfloat16",
}


@naming_broken_files("the model's folder")
def make_intake(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    num_blocks: int | None = None,
) -> Intake:
    """Return the intake; `num_blocks` are those of each pipeline's KV cache, once it is
    known."""
    vectors = find_vectors(checkpoint)
    limits = RequestLimits(
        checkpoint.context_length,
        checkpoint.config.vocab_size,
        find_end_ids(checkpoint, tokenizer),
        config,
        _find_model_names(config, checkpoint.name),
        *_find_defaults(config, checkpoint),
        kv_size=None if num_blocks is None else KvSize(num_blocks, config.block_size),
        chat_template=_read_template(config),
        start_ids=find_start_ids(checkpoint),
        vectors=vectors,
        source_length=checkpoint.source_length,
    )
    return Intake(tokenizer, limits)


def build_loop(
    config: MemoryOptions,
    starter: RequestStarter,
    pipeline: Pipeline,
    form: AnswerStyle,
    *,
    sizes: StepSizes,
    num_blocks: int,
    num_stages: int,
    most_read: int = sys.maxsize,
) -> EngineLoop:
    """Put a loop together; an encoder reads `most_read` tokens at once, at most."""
    micro_batches = config.micro_batches or sizes.micro_batches or num_stages + 1
    pool = BlockPool(num_blocks, config.block_size)
    scheduler = Scheduler(
        pool,
        chunk_size=sizes.chunk_size,
        max_rows=sizes.max_rows,
        micro_batches=micro_batches,
        num_stages=num_stages,
        shares=config.prefix_cache,
        most_read=most_read,
        has_long_steps=sizes.micro_batches > 0,
    )
    return EngineLoop(starter, scheduler, pipeline, form, max_steps=config.max_steps)


def load_tokenizer(config: ModelOptions, checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer of a run; random weights have one of bytes, and a run may have none."""
    if config.skip_tokenizer_init:
        return NoTokenizer()
    num_rows = checkpoint.config.vocab_size
    if (folder := checkpoint.tokenizer_folder) is not None:
        with naming_broken_files(f"the tokenizer in {folder}"):
            tokenizer = Tokenizer.load(folder, checkpoint.config)
        if tokenizer.num_trained_tokens > num_rows:
            raise CheckpointError(
                f"the tokenizer in {folder} has {tokenizer.num_trained_tokens} tokens, not "
                f"counting added ones, and the model {num_rows}: it is another "
                "model's. Name the folder of the model's own by --tokenizer"
            )
        if checkpoint.eos_ids and not find_end_ids(checkpoint, tokenizer):
            tokenizer.note += (
                f"{'; ' if tokenizer.note else ''}no eos_token_id of {checkpoint.name} "
                f"is one of its {num_rows} tokens, so that answers end only by "
                "max_tokens or stop"
            )
        return tokenizer
    if num_rows < 256:
        raise CheckpointError(
            f"{checkpoint.name} has a vocabulary of {num_rows}; random weights "
            "are used with a tokenizer of bytes, which needs at least 256"
        )
    return Tokenizer(None)


def _find_model_names(config: EngineConfig, name: str) -> frozenset[str] | None:
    """Return what a line may call the model: its name, path or id, or the path's end.

    None: every name is accepted.
    """
    if name == DEMO_NAMES[0] and (config.check_model or config.is_unnamed_demo):
        return frozenset(DEMO_NAMES)
    if not config.check_model:
        return None
    configured = config.model or config.random_init or name
    return frozenset(
        {name, configured, str(Path(configured)), Path(configured).name} - {""}
    )


def find_end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a sequence: the config's, or else the tokenizer's.

    Some configs name ids that the head has no row for; nothing draws these.
    """
    ids = checkpoint.eos_ids
    if not ids and tokenizer.eos_id is not None:
        ids = frozenset({tokenizer.eos_id})
    return frozenset(each for each in ids if 0 <= each < checkpoint.config.vocab_size)


def find_start_ids(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """Return the ids that a decoder behind an encoder begins with; None: there is no encoder.

    As in transformers, config.json counts only without a generation_config.json. BOS
    begins if no start token is named.
    """
    if checkpoint.model.encoder is None or checkpoint.model.is_pooled:
        return None
    file = GENERATION
    fields = checkpoint.generation_fields
    if checkpoint.generation_folder is None:
        file = "config.json"
        fields = checkpoint.config.to_dict()

    start, bos, forced = map(fields.get, START_FIELDS)
    if start is None:
        start = bos
    # random weights may begin with any token
    if start is None and checkpoint.folder is None:
        start = checkpoint.config.pad_token_id

    ids: list[Any] = [start] if forced is None else [start, forced]
    ids = [
        each[0] if isinstance(each, list) and len(each) == 1 else each for each in ids
    ]
    if all(
        isinstance(each, int) and 0 <= each < checkpoint.config.vocab_size
        for each in ids
    ):
        return tuple(ids)
    stated = ", ".join(f"{name} {fields.get(name)!r}" for name in START_FIELDS)
    raise CheckpointError(
        f"{checkpoint.name} names no token that its decoder can begin with: its {file} has "
        f"{stated}. Write the model's own decoder_start_token_id there"
    )


def make_nan_explanation(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> Callable[[], str]:
    """Return a function that says why numbers are nan, and what helps. It reads weights once."""

    @cache
    def explain() -> str:
        name = (
            ""
            if checkpoint.folder is None
            else find_nonfinite_tensor(checkpoint.folder)
        )
        if name:
            return f"The weights hold nan or infinity, as in {name!r}. Fetch the model again"
        return NAN_REMEDIES.get(dtype, "The dtype overflows. Try --dtype float32")

    return explain


def find_vectors(checkpoint: Checkpoint) -> VectorSpec | None:
    """Return what a model's vectors are; None: it generates text."""
    encoder = checkpoint.model.encoder
    if encoder is None or encoder.pooling is None:
        return None
    pooling = encoder.pooling
    sentence = checkpoint.sentence or SentenceFolder(pooling)
    labels = getattr(checkpoint.config, "id2label", None) or {}
    return VectorSpec(
        pooling.readings[-1].size if pooling.readings else checkpoint.model.hidden_size,
        pooling.is_scored,
        pooling.is_scored and _are_scores_logits(checkpoint),
        _choose_odds(checkpoint, len(labels)),
        pooling.is_normalized,
        has_types=encoder.num_types > 1,
        labels=tuple(labels[number] for number in sorted(labels))
        if pooling.is_scored
        else (),
        prompts=sentence.prompts,
        default_prompt=sentence.default_prompt or None,
        is_lowercased=sentence.is_lowercased,
        similarity=sentence.similarity,
    )


def _are_scores_logits(checkpoint: Checkpoint) -> bool:
    """Tell whether a pair's score is its logit, as sentence-transformers' CrossEncoder
    is activation."""
    config = checkpoint.config
    sentence = checkpoint.sentence
    activation = (
        (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or (sentence and sentence.activation)
    )
    name = str(activation or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise CheckpointError(
            f"{checkpoint.name} makes scores by {activation}; Sigmoid and Identity run. Name "
            "one of them as activation_fn in its config"
        )
    return name == "Identity"


def _choose_odds(
    checkpoint: Checkpoint, num_labels: int
) -> Literal["softmax", "sigmoid", "identity"]:
    """Return how a text's classes get their probabilities: as in transformers' pipeline."""
    kind = getattr(checkpoint.config, "problem_type", None)
    if kind == "regression":
        return "identity"
    return (
        "sigmoid"
        if kind == "multi_label_classification" or num_labels == 1
        else "softmax"
    )


def _find_defaults(
    config: RequestOptions, checkpoint: Checkpoint
) -> tuple[RequestParams, int | None]:
    """Return the defaults of parameters, and the most tokens of a chat without a limit."""
    if config.generation_config == "openai":
        return DEFAULTS, None
    if checkpoint.generation_folder is None:
        raise CheckpointError(
            f"--generation-config model, and {checkpoint.name} has no {GENERATION}; "
            "leave the flag out"
        )
    kinds = {name: FIELDS["completions"][name].kind for name in OF_MODELS}
    kinds["max_new_tokens"] = make_integer_kind(1)
    stated = {name: checkpoint.generation_fields.get(name) for name in kinds}
    try:
        defaults = {
            name: kinds[name].parse(name, value, INT64 - 1)
            for name, value in stated.items()
            if value is not None
        }
        max_new_tokens = defaults.pop("max_new_tokens", None)
        return replace(DEFAULTS, **defaults), max_new_tokens
    except RequestError as error:
        raise CheckpointError(
            f"{checkpoint.generation_folder / GENERATION}: {error.message}. Mend it, "
            "or leave out --generation-config model"
        ) from error


def _read_template(config: RequestOptions) -> str | None:
    """Return the chat template that a run was given."""
    if config.chat_template is None:
        return None
    try:
        return read_template(Path(config.chat_template))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--chat-template {config.chat_template} cannot be read: {error}. Give a "
            "file with a Jinja template"
        ) from error


def make_line_counting(
    config: EngineConfig, checkpoint: Checkpoint
) -> Callable[[], LineCounter]:
    """Return a function that begins to count a file's lines; its first call loads the
    tokenizer."""

    @cache
    def load() -> Intake:
        return make_intake(config, checkpoint, load_tokenizer(config, checkpoint))

    return lambda: LineCounter(load())
