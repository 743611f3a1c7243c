"""The options of an engine, in five parts by subject; `option` says what each field holds."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from fminfer.core.errors import UsageError
from fminfer.core.impostors import check_plain_file
from fminfer.core.option import (
    OF_ENGINE,
    OF_WEIGHTS,
    Amount,
    ConfigPlace,
    Count,
    ModelPlace,
    Options,
    TextFile,
    describe_options,
    option,
    options_of,
)

DType = Literal["auto", "float32", "bfloat16", "float16"]
# as a dtype: weights of so many bits, and arithmetic as by auto
BITS = ("int8", "int4")
ModelDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
Quantized = Literal[
    "int8",
    "int8-32",
    "int8-row",
    "int4",
    "int4-128",
    "int4-symmetric",
    "int4-symmetric-128",
]
TokenFormat = Literal["auto", "vocab", "text"]
Kernels = Literal["auto", "off", "require"]
SameAnswers = Literal["auto", "on"]
NO_CONFIG = ("glm", "yalm")  # model types of the old tool: GLM-130B and YaLM-100B
OnTooLong = Literal["error", "truncate-left", "truncate-right"]
GenerationDefaults = Literal["openai", "model"]
EmbeddingsForm = Literal["json", "npy"]
KnownParser = Literal[
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "deepseek_v3",
    "openai",
    "granite",
    "phi4_mini_json",
]
ToolCallParser = Literal["auto", KnownParser, "none"]
KnownThoughts = Literal[
    "qwen3",
    "deepseek_r1",
    "seed_oss",
    "mistral",
    "openai_gptoss",
    "cohere",
    "kimi",
    "granite",
    "open_thoughts",
    "thinking",
    "thought",
    "reasoning",
]
ReasoningParser = Literal["auto", KnownThoughts, "none"]
Offload = Literal["off", "auto", "cpu", "disk"]
ConstraintKind = Literal["json", "regex", "choice", "grammar", "labels", "calls"]


@dataclass(slots=True, frozen=True)
class Constraint:
    """What the text of an answer must be."""

    kind: ConstraintKind
    # A JSON Schema with its keys in order; a regex; a JSON list of strings; Lark or GBNF;
    # or a JSON list: labels whose probabilities are asked for, and how many are told;
    # or, for calls of tools, a `CallSpec` in JSON.
    text: str
    # a regex of what may stand between JSON tokens; "": ours; "none": nothing
    whitespace: str = ""


@dataclass(slots=True, frozen=True)
class StepSizes:
    """How much is computed at once."""

    chunk_size: int  # most tokens of one step
    max_rows: int  # most sequences that run at once
    micro_batches: int = 0  # steps in flight; 0: one more than there are stages

    @property
    def max_decode_rows(self) -> int:
        """Most sequences of one step that decodes alone."""
        return min(self.chunk_size, self.max_rows)


ON_CPU = StepSizes(512, 256)
ON_GPU = StepSizes(4096, 1024)
# Each step reads streamed layers again, so it has as many tokens as memory allows.
STREAMED = {"cpu": StepSizes(4096, 1024), "cuda": StepSizes(8192, 4096)}
BLOCK_SIZE = 32

_model_option = partial(option, group="Model", commands=OF_ENGINE)
_weights_option = partial(_model_option, commands=OF_WEIGHTS)
_speed_option = partial(option, group="Speed and memory", commands=OF_ENGINE)
_rank_option = partial(option, group="Ranks", commands=OF_ENGINE)
_request_option = partial(option, group="Requests", commands=("run", "serve", "check"))
_recorded_option = partial(_request_option, alters="requests", is_always_recorded=True)


def contradiction_error(first: str, second: str) -> UsageError:
    """Return the error of two options that cannot be given together."""
    return UsageError(f"{first} and {second} contradict each other; give one of them")


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model answers, and how much of it."""

    model: ModelPlace | None = _weights_option(
        "A local folder, a .gguf file, a Hugging Face hub id, or demo: the package's "
        "small model.  [default: demo; a run then refuses lines that name another "
        "model]",
        flags=("--model-name", "--model"),
        is_positional=True,
        old={"checkpoint": {}},
    )
    random_init: ConfigPlace | None = _weights_option(
        "Random weights, for benchmarks, in the shape of a config.json, a hub id or a "
        "known size (llama-160m, bloom-176b, …).",
        metavar="CONFIG_OR_SIZE",
        is_positional=True,
    )
    tokenizer: ModelPlace | None = _weights_option(
        "A tokenizer from elsewhere: a local folder or hub id.  [default: the model's own]",
        metavar="FOLDER_OR_ID",
        old={"tokenizer_path": {}},
    )
    model_config: ConfigPlace | None = _weights_option(
        "A config from elsewhere: a config.json, its folder, a hub id or a known size.  "
        "[default: the model's own]",
        metavar="CONFIG_OR_SIZE",
    )
    revision: str | None = _weights_option(
        "Branch, tag or commit of a hub model.  [default: its main branch]"
    )
    without_adapter: bool = _weights_option(
        "Answer with the model alone where a LoRA adapter lies beside it. Otherwise "
        "such a folder is refused: adapters are not applied."
    )
    max_model_len: Count | None = _model_option(
        "Most tokens of a prompt and its completion together.  [default: the model's context]",
        alters="requests",
    )
    max_layers: Count | None = _model_option(
        "Use only the model's first N layers.",
        alters="answers",
        is_always_recorded=True,
    )
    skip_tokenizer_init: bool = _recorded_option(
        "Load no tokenizer. Prompts must be token ids, and answers hold token ids.",
        alters="answers",
    )
    model_type: str | None = _model_option(
        "Checked against the model's config (opt, bloom, gptj, …).",
        group="Old command lines",
    )

    @property
    def is_unnamed_demo(self) -> bool:
        """Whether the demo model answers because no model was named."""
        return self.model is None and self.random_init is None

    def check(self) -> None:
        """Refuse names that contradict each other."""
        if self.model_type in NO_CONFIG:
            raise UsageError(
                f"--model-type {self.model_type}: transformers has no public config of "
                "it, so that it does not run. glm4 does (zai-org/GLM-4-9B-0414, for "
                "one)"
            )
        if None not in (self.model, self.random_init):
            raise contradiction_error("--model-name", "--random-init")
        if self.tokenizer and self.skip_tokenizer_init:
            raise contradiction_error("--tokenizer", "--skip-tokenizer-init")
        for name in ("model_config", "revision"):
            value = getattr(self, name)
            if value is not None and self.model is None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} is {value!r}; give the model too, by --model-name"
                )


@dataclass(frozen=True)
class ComputeOptions(Options):
    """What computes, and in which types."""

    dtype: ModelDType = _speed_option(
        "Type of the arithmetic. auto: bfloat16 where the machine is fast in it; on a GPU, "
        "float16 checkpoints stay float16. With float32 on a CPU, weights that are stored in "
        "bfloat16 stay bfloat16 in memory, unless --kernels off is set. int8, int4: as auto "
        "with --quantize int8 or int4.",
        default="auto",
        old={
            "--fp16": {"true": "float16"},
            "half": {"true": "float16", "false": "float32"},
        },
    )
    kv_dtype: DType = _speed_option(
        "Type of the KV cache. auto: as --dtype. 16 bits beside float32 halve its memory, but "
        "round keys and values. Answers then repeat only as well as in 16 bits.",
        default="auto",
    )
    quantize: Quantized | None = _speed_option(
        "Round weights to 8 or 4 bits while they are read. int8: a scale for each 128 "
        "inputs; int8-32: for each 32; int8-row: for each row. int4: a scale and a "
        "minimum for each 32; int4-128: for each 128; symmetric: no minimum. Groups of "
        "128 become 32 where rows do not divide by 128. Head and embedding get 8 "
        "bits.  [default: weights keep their bits]",
    )
    device: str = _speed_option(
        "Where to compute: auto, cpu, cuda, cuda:0, …", default="auto"
    )
    kernels: Kernels = _speed_option(
        "Use of fminfer's own kernels: C++ on a CPU, which needs g++, and Triton on a "
        "GPU. auto: where they serve the model and pass their trial; plain torch "
        "elsewhere. off: plain torch. require: fail, with the reason, where auto would "
        "fall back.",
        default="auto",
        old={"--attention": {"auto": "auto", "eager": "off", "compiled": "require"}},
    )
    same_answers: SameAnswers = _speed_option(
        "Whether an answer has the same bytes whatever rows are computed beside it. auto: "
        "yes where that costs nothing: on a CPU without AMX, with fminfer's kernels. on: "
        "refuse to run where it cannot be so; with AMX, take kernels that do without it. "
        "auto is nearly always right, and the summary says what holds.",
        default="auto",
        alters="answers",
        must_agree=True,
    )
    threads: Count | None = _speed_option(
        "Computing threads of each rank.  [default: OMP_NUM_THREADS, or the cores that this "
        "process may use, shared by the ranks of the machine]"
    )
    cuda_ids: tuple[int, ...] = _rank_option(
        "The GPUs of this machine's ranks, in their order: 0,1,2.  [default: all]",
        flags=("--cuda-id",),
        commands=("run", "serve", "bench"),
    )

    @property
    def quantized_to(self) -> str:
        """What weights are quantized to; "": nothing."""
        return self.quantize or (self.dtype if self.dtype in BITS else "")

    def check(self) -> None:
        """Refuse two numbers of bits."""
        if self.dtype in BITS and self.quantize not in (None, self.dtype):
            raise contradiction_error(
                f"--dtype {self.dtype}", f"--quantize {self.quantize}"
            )


@dataclass(frozen=True)
class MemoryOptions(Options):
    """How much is held in memory, and computed at once."""

    offload: Offload = _speed_option(
        "Stream layers of a model that does not fit the device's memory: bring them "
        "again for each pass, which computes thousands of tokens. auto: stream only "
        "layers that do not fit, from a GPU's host memory or, if they do not fit "
        "there, from the disk. cpu: stream all layers from a GPU's host memory. disk: "
        "stream all layers from the model's files.",
        default="off",
        must_agree=True,
    )
    budget: int | None = _speed_option(
        "Size of the KV cache in tokens (prompts and new tokens of all rows that run "
        f"at once), rounded up to blocks of {BLOCK_SIZE}.  [default: what fits in half "
        "of the free RAM (in 70 % with --offload), or in a GPU beside weights, a "
        "step's work and 1.5 GiB]",
        must_agree=True,
    )
    block_size: Count = option(
        "Tokens of a KV block.", default=BLOCK_SIZE, must_agree=True
    )
    chunk_size: Count | None = _speed_option(
        f"Most tokens of one step.  [default: {ON_CPU.chunk_size}; on a GPU "
        f"{ON_GPU.chunk_size}, divided among the ranks of a pipeline; with --offload "
        f"{STREAMED['cpu'].chunk_size}, on a GPU {STREAMED['cuda'].chunk_size}, or "
        "what fits]"
    )
    max_rows: Count | None = _speed_option(
        "Most sequences that run at once.  "
        f"[default: {ON_CPU.max_rows}; on a GPU {ON_GPU.max_rows}; with --offload "
        f"{STREAMED['cpu'].max_rows}, on a GPU {STREAMED['cuda'].max_rows}]",
        must_agree=True,
        old={
            "--max_batchsize": {},
            "--max_batch_size": {},
            "executor_max_batch_size": {},
        },
    )
    micro_batches: Count | None = _speed_option(
        "Micro-batches in flight in a pipeline.  [default: one more than it has stages; with "
        "--offload one a stage, or one alone if stages share a disk]"
    )
    prefix_cache: bool = _speed_option(
        "Compute once the prefixes that prompts share, and equal greedy requests.",
        default=True,
    )
    max_steps: Count | None = option(
        "Without input: number of batches of made-up requests. With input: stop after this many "
        "micro-batches, with exit status 1 if requests are left.  [default: 5 without input; no "
        "limit with input]",
        group="Made-up requests and --prompt",
        commands=("run",),
        flags=("--num-iters",),
    )

    def choose_step_sizes(self, device_type: str, num_stages: int) -> StepSizes:
        """Return the sizes that are set, and for the others what suits a device, cpu or cuda.

        A GPU computes thousands of tokens as cheaply as it starts a step's hundreds of kernels.
        Stages wait until the first ones have a step to pass on, so they share those thousands.
        """
        most = ON_GPU if device_type == "cuda" else ON_CPU
        chunk_size = max(ON_CPU.chunk_size, most.chunk_size // num_stages)
        return StepSizes(self.chunk_size or chunk_size, self.max_rows or most.max_rows)

    def check(self) -> None:
        """Refuse a KV cache that holds nothing."""
        if self.budget is not None and self.budget < self.block_size:
            raise UsageError(
                f"budget is {self.budget} tokens; it must hold one block, "
                f"{self.block_size} tokens"
            )


@dataclass(frozen=True)
class GroupSizes(Options):
    """Over how many processes a run is spread."""

    calls_flags = True

    world_size: Count | None = _rank_option(
        "Number of ranks, which are processes, in all pipelines together.  [default: "
        "--pipeline-group-size × --tensor-parallel-size × --data-group-size]"
    )
    data_group_size: Count = _rank_option(
        "Number of pipelines, each with the whole model. They share the input.",
        default=1,
    )
    pipeline_group_size: Count | None = _rank_option(
        "Stages of each pipeline. Each has some of the layers.  [default: --world-size / "
        "(--tensor-parallel-size × --data-group-size), or 1]",
        old={"pp_init_size": {}},
    )
    tensor_parallel_size: Count = _rank_option(
        "Ranks of each stage. Each has a part of every layer: of heads, MLPs, experts and "
        "vocabulary. All must be on one machine.",
        default=1,
        flags=("--tensor-parallel-size", "--tp"),
        alters="answers",
        must_agree=True,
        old={"tp_init_size": {}},
    )

    @property
    def configured_stages(self) -> int | None:
        """Stages of each pipeline; None: no option says it."""
        if self.pipeline_group_size is None and self.world_size is not None:
            return self.world_size // (self.data_group_size * self.tensor_parallel_size)
        return self.pipeline_group_size

    @property
    def num_stages(self) -> int:
        """Stages of each pipeline."""
        return self.configured_stages or 1

    @property
    def configured_ranks(self) -> int | None:
        """Processes of all pipelines; None: no option says it."""
        return None if self.configured_stages is None else self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Processes of all pipelines."""
        return self.num_stages * self.tensor_parallel_size * self.data_group_size

    def check(self) -> None:
        """Refuse numbers that do not fit together."""
        if self.world_size not in (None, self.num_ranks):
            names = ("world_size", "pipeline_group_size", "data_group_size")
            world, stages, groups = map(self.shown_name, names)
            size = self.tensor_parallel_size
            tensor = ""
            if size > 1:
                tensor = f"× {self.shown_name('tensor_parallel_size')} {size} "
            raise UsageError(
                f"{world} {self.world_size} is not {stages} "
                f"{self.pipeline_group_size or '(any)'} {tensor}× {groups} "
                f"{self.data_group_size}; give the product, or leave {world} out"
            )


@dataclass(frozen=True)
class RankOptions(GroupSizes):
    """How the model's layers are spread over processes."""

    calls_flags = False

    num_layers: Count | None = _rank_option(
        "Layers of each stage; the last one may have fewer.  [default: balanced by cost]"
    )
    stage_layers: tuple[int, ...] | None = _rank_option("Layers of each stage: 9,9,8.")


@dataclass(frozen=True)
class RequestOptions(Options):
    """What requests may ask for, and what they mean."""

    seed: int = _recorded_option(
        "Seed of random weights, and of requests without one of their own. A server draws such "
        "requests at random.",
        default=1,
        commands=OF_WEIGHTS,
        must_agree=True,
    )
    max_logprobs: Amount = _recorded_option(
        "Largest value of logprobs in a request.", default=100
    )
    on_too_long: OnTooLong = _recorded_option(
        "What to do with a prompt that leaves no room for max_tokens: refuse it, or "
        "cut its left or right end, with a warning.",
        default="error",
    )
    token_format: TokenFormat = _recorded_option(
        "Spelling of logprobs.tokens: vocabulary pieces, or text. auto: text for Batch lines.",
        default="auto",
        alters="answers",
    )
    chat_template: TextFile | None = _request_option(
        "A Jinja template of chat messages.  [default: the model's own]",
        metavar="FILE",
        alters="requests",
    )
    tool_call_parser: ToolCallParser = _recorded_option(
        "Format of the model's tool calls. auto: by its chat template. none: calls stay text.",
        default="auto",
    )
    reasoning_parser: ReasoningParser = _request_option(
        "Tags of the thoughts before a chat's answers. auto: by its chat template. none: "
        "thoughts stay text.",
        default="auto",
        alters="requests",
    )
    thinking_budget: Amount | None = _request_option(
        "Most tokens of a chat's thought, where its thinking_token_budget does not say. "
        "Then its closing tag is forced, and the answer follows. Both must fit into "
        "max_tokens.  [default: no limit]",
        alters="requests",
    )
    generation_config: GenerationDefaults = _recorded_option(
        "Defaults of sampling parameters: those of the OpenAI API, or the model's own from "
        "generation_config.json.",
        default="openai",
    )
    embeddings: EmbeddingsForm = _request_option(
        "npy: write the vectors of embeddings as one .npy file beside the output, in place of "
        "numbers in its records. Row i is line i of the input, counted from 0; lines without an "
        "answer have rows of nan.",
        default="json",
        alters="requests",
        commands=("run", "check"),
    )
    strict: bool = _recorded_option(
        "Refuse requests with unknown parameters, best_of below n and the like. "
        "Otherwise they are answered with a warning."
    )
    check_model: bool = _recorded_option(
        "Refuse requests whose model or engine is neither --model-name nor its last "
        "part. A server answers 404. A run without --model-name always does so."
    )
    request_args: dict[str, Any] | None = option(
        "Fields that replace each request's own.",
        flags=("--overwrite-request-args",),
        alters="requests",
    )

    def check(self) -> None:
        """Refuse a template in a pipe, and a seed of more than 64 bits."""
        # a template is read more than once
        check_plain_file(Path(self.chat_template or "."))
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(
                f"seed is {self.seed}; it must fit into a signed number of 64 bits"
            )


@dataclass(frozen=True)
class EngineConfig(
    RequestOptions, RankOptions, MemoryOptions, ComputeOptions, ModelOptions
):
    """Options of one engine. A value outside its limits raises UsageError."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Return the options that another process has sent."""
        lists = {
            name: tuple(value)
            for name, value in fields.items()
            if isinstance(value, list)
        }
        return cls(**fields | lists)


EngineConfig.__doc__ = (
    f"{EngineConfig.__doc__}\nOptions:\n{describe_options(EngineConfig)}\n"
)


def make_config(model: str | EngineConfig | None, **options: Any) -> EngineConfig:
    """Return the config of a model, or another config, with options set."""
    check_option_names(options, options_of(EngineConfig))
    if isinstance(model, EngineConfig):
        return replace(model, **options)
    return EngineConfig(model, **options)


def check_option_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for an option that does not exist, or has a new name."""
    for name in names:
        for each in options_of(EngineConfig).values():
            if (values := each.old.get(f"--{name}")) is not None:
                meant = [
                    f"{v!r} (it was {k!r})" if k != v else repr(v)
                    for k, v in values.items()
                ]
                remedy = f"; give {each.name}={', '.join(meant)}" if meant else ""
                raise UsageError(f"the option {name} is called {each.name} now{remedy}")
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? The" if near else "the"
        raise UsageError(
            f"there is no option {name}; {hint} options are {', '.join(known)}"
        )
