"""What an engine is told: every option of the engine with its default, written once.

The command line reads its defaults from here. It knows nothing of files or of torch.
"""

# ruff: noqa: RUF009  (_option makes a field, as dataclasses.field does)
from __future__ import annotations

from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self

from fminfer.core.errors import UsageError

DType = Literal["auto", "float32", "bfloat16", "float16"]
TokenFormat = Literal["auto", "vocab", "text"]
Kernels = Literal["auto", "off", "require"]
PLACES = {  # what the fields that say where a model comes from may hold
    "model": "a path or hub id",
    "random_init": "a path, hub id or size",
    "tokenizer": "a path or hub id",
    "model_config": "a path, hub id or size",
    "chat_template": "the path of a file",
}
NO_CONFIG = ("glm", "yalm")  # model types of the old tool: GLM-130B and YaLM-100B
OnTooLong = Literal["error", "truncate-left", "truncate-right"]
GenerationDefaults = Literal["openai", "model"]
KnownParser = Literal["hermes", "llama3_json"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "none"]
ConstraintKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(slots=True, frozen=True)
class Constraint:
    """What the text of an answer must be."""

    kind: ConstraintKind
    # A JSON Schema with its keys in order; a regex; a JSON list of strings; Lark or GBNF.
    text: str
    whitespace: str = ""  # a regex of what may stand between JSON tokens; "": ours; "none": nothing


Value = TypeVar("Value")


def _option(default: Value, meaning: str) -> Value:
    """Return a field of a dataclass with its default, and the meaning that `help` shows."""
    made: Any = field(default=default, metadata={"meaning": meaning})
    return cast(Value, made)


@dataclass(slots=True, frozen=True)
class StepSizes:
    """How much is computed at once."""

    chunk_size: int  # most tokens of one step
    max_rows: int  # most sequences that run at once

    @property
    def max_decode_rows(self) -> int:
        """Most sequences of one step that decodes alone."""
        return min(self.chunk_size, self.max_rows)


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Options of one engine.

    Raises:
        UsageError: a value outside its limits.
    """

    model: str | None = _option(
        None, "a folder, a hub id, or demo; None: the demo model, not named"
    )
    random_init: str | None = _option(None, "a config.json, its folder, a hub id, or a size")
    tokenizer: str | None = _option(None, "a folder or hub id; None: the model's own")
    model_config: str | None = _option(None, "a config for the model's weights; None: its own")
    revision: str | None = _option(None, "of a model of the hub: a branch, tag or commit")
    without_adapter: bool = _option(False, "leave out a LoRA adapter beside the model")
    model_type: str | None = _option(None, "checked against the config's")
    dtype: DType = _option("auto", "of weights and hidden states")
    kv_dtype: DType = _option("auto", "of the KV cache; auto: that of hidden states")
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, …")
    seed: int = _option(1, "for requests without a seed of their own, and for random weights")
    budget: int | None = _option(None, "tokens of KV cache for all rows; None: what fits")
    block_size: int = _option(32, "tokens a KV block")
    chunk_size: int | None = _option(None, "most tokens of one step; None: what suits the device")
    max_rows: int | None = _option(None, "most sequences at once; None: what suits the device")
    micro_batches: int | None = _option(None, "steps in flight; None: one more than stages")
    prefix_cache: bool = _option(True, "compute shared prefixes and equal requests once")
    max_model_len: int | None = _option(None, "tokens of a sequence; None: the model's context")
    on_too_long: OnTooLong = _option("error", "a prompt that leaves no room for max_tokens")
    max_logprobs: int = _option(100, "largest `logprobs` a request may ask for")
    token_format: TokenFormat = _option("auto", "of logprobs; auto: text in Batch lines, or vocab")
    skip_tokenizer_init: bool = _option(False, "prompts are token ids, and answers have no text")
    chat_template: str | None = _option(None, "a file, to render messages; None: the model's own")
    tool_call_parser: ToolCallParser = _option("auto", "form of tool calls; auto: by the template")
    generation_config: GenerationDefaults = _option("openai", "whose defaults fill missing params")
    strict: bool = _option(False, "what is otherwise only warned of is the line's error")
    request_args: dict[str, Any] | None = _option(None, "fields that replace each line's own")
    check_model: bool = _option(False, "a line that names another model is an error")
    kernels: Kernels = _option("auto", "our own; off: plain torch; require: never plain torch")
    threads: int | None = _option(None, "that compute in each rank; None: its share of cores")
    max_steps: int | None = _option(None, "micro-batches after which a run stops; None: no limit")
    is_only_run: bool = _option(False, "prefixes need not be kept for another run of the engine")
    cuda_ids: tuple[int, ...] = _option((), "the GPUs of this machine's ranks, in their order")
    num_layers: int | None = _option(None, "layers of each rank; None: balanced by cost")
    max_layers: int | None = _option(None, "the model's first so many; others are left out")
    stage_layers: tuple[int, ...] | None = _option(None, "layers of each rank, one by one")
    world_size: int | None = _option(None, "processes, of all pipelines; None: one each")
    data_group_size: int = _option(1, "pipelines, each with the whole model")
    num_engines: int = _option(1, "on this machine, which share its cores, memory and GPUs")
    engine_number: int = _option(0, "of this one among them")

    def step_sizes(self, device_type: str, num_stages: int) -> StepSizes:
        """Return what was asked for, and of the rest what suits a device.

        A GPU computes thousands of tokens as cheaply as it starts a step's hundreds of kernels.
        Stages wait until the first ones have a step to pass on, so they share those thousands.

        Args:
            device_type: cpu or cuda.
            num_stages: of the pipeline.
        """
        on_gpu = device_type == "cuda"
        chunk_size = max(512, 4096 // num_stages) if on_gpu else 512
        return StepSizes(self.chunk_size or chunk_size, self.max_rows or (1024 if on_gpu else 256))

    @property
    def is_unnamed_demo(self) -> bool:
        """Whether the demo model answers because no model was named."""
        return self.model is None and self.random_init is None

    @property
    def num_stages(self) -> int:
        """Processes of each pipeline."""
        return self.num_ranks // self.data_group_size

    @property
    def num_ranks(self) -> int:
        """Processes of all pipelines."""
        return self.world_size or self.data_group_size

    @classmethod
    def from_fields(cls, told: dict[str, Any]) -> Self:
        """Return the options that another process has told."""
        lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
        return cls(**told | lists)

    def __post_init__(self) -> None:
        sizes = ("block_size", "chunk_size", "max_rows", "micro_batches", "max_model_len")
        counts = ("num_layers", "max_layers", "max_steps", "threads", "world_size")
        for name in (*sizes, *counts, "data_group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if (self.world_size or self.data_group_size) % self.data_group_size:
            raise UsageError(
                f"world_size is {self.world_size}, which data_group_size {self.data_group_size} "
                "does not divide"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; it must fit 64 bits, with a sign")
        if self.max_logprobs < 0:
            raise UsageError(f"max_logprobs is {self.max_logprobs}; it must be at least 0")
        if self.budget is not None and self.budget < self.block_size:
            raise UsageError(
                f"budget is {self.budget} tokens; it must hold one block, {self.block_size} tokens"
            )
        for name, allowed in (
            ("dtype", get_args(DType)),
            ("kv_dtype", get_args(DType)),
            ("kernels", get_args(Kernels)),
            ("tool_call_parser", get_args(ToolCallParser)),
            ("generation_config", get_args(GenerationDefaults)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        for name, place in PLACES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | PathLike):
                raise UsageError(f"{name} is of type {type(value).__name__}; give {place}")
        if self.model_type in NO_CONFIG:
            raise UsageError(
                f"--model-type {self.model_type}: transformers has no public config of it, so that "
                "it does not run. glm4 does (zai-org/GLM-4-9B-0414, for one)"
            )
        if self.model is not None and self.random_init is not None:
            raise UsageError(
                "--model-name and --random-init contradict each other; give one of them"
            )
        for name in ("model_config", "revision"):
            value = getattr(self, name)
            if value is not None and self.model is None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is {value!r}; give the model too, by --model-name")
        if self.tokenizer is not None and self.skip_tokenizer_init:
            raise UsageError(
                "--tokenizer and --skip-tokenizer-init contradict each other; give one of them"
            )


def list_options() -> str:
    """Return a line for each option: its name, type, default and meaning."""
    types, lines = get_type_hints(EngineConfig), []
    for each in fields(EngineConfig):
        kind = types[each.name]
        values = " | ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else each.type
        lines.append(f"{each.name}: {values} = {each.default!r}  {each.metadata['meaning']}")
    return "\n".join(lines)


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\nOptions:\n{list_options()}\n"
