"""The options of `fminfer.Engine` by name, so that editors and `help` show them.

Their meanings and defaults stand in `EngineConfig`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypedDict, TypeVar

from typing_extensions import Unpack

from fminfer.core.config import (
    DType,
    EngineConfig,
    GenerationDefaults,
    Kernels,
    OnTooLong,
    TokenFormat,
    ToolCallParser,
    list_options,
)
from fminfer.core.errors import UsageError

Init = TypeVar("Init", bound=Callable[..., None])


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, the model left out."""

    random_init: str | None
    tokenizer: str | None
    model_config: str | None
    revision: str | None
    without_adapter: bool
    model_type: str | None
    dtype: DType
    kv_dtype: DType
    device: str
    seed: int
    budget: int | None
    block_size: int
    chunk_size: int | None
    max_rows: int | None
    micro_batches: int | None
    prefix_cache: bool
    max_model_len: int | None
    on_too_long: OnTooLong
    max_logprobs: int
    token_format: TokenFormat
    chat_template: str | None
    tool_call_parser: ToolCallParser
    generation_config: GenerationDefaults
    strict: bool
    request_args: dict[str, Any] | None
    check_model: bool
    skip_tokenizer_init: bool
    kernels: Kernels
    threads: int | None
    max_steps: int | None
    is_only_run: bool
    cuda_ids: tuple[int, ...]
    num_layers: int | None
    max_layers: int | None
    stage_layers: tuple[int, ...] | None
    world_size: int | None
    data_group_size: int
    num_engines: int
    engine_number: int


def make_config(model: str | EngineConfig | None, **options: Unpack[EngineOptions]) -> EngineConfig:
    """Return the config that a model's name, or another config, and options make.

    Raises:
        UsageError: an option that does not exist, or cannot be.
    """
    known = [field.name for field in fields(EngineConfig)]
    refuse_old_names(options)
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name}; the options are {', '.join(known)}")
    if isinstance(model, EngineConfig):
        return replace(model, **options)
    return EngineConfig(model=model, **options)


def refuse_old_names(options: Iterable[str]) -> None:
    """Refuse options under names that they had in earlier versions.

    Raises:
        UsageError: it says the new name, and what the old values are called there.
    """
    if "attention" in options:
        raise UsageError(
            "the option attention is called kernels now; give kernels='auto', 'off' (it was "
            "'eager') or 'require' (it was 'compiled')"
        )


def shows_options(init: Init) -> Init:
    """Have `help` list the options of an `__init__`, with the types and defaults of the config."""
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in fields(EngineConfig)
        if field.name != "model"
    ]
    shown: Any = init
    shown.__doc__ = f"Load the model. The options, with their defaults:\n\n{list_options()}\n"
    shown.__signature__ = signature.replace(parameters=[*own, *options])
    return init
