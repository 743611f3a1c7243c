"""What each argument of vLLM's names does here: one table, which docs/other_names.md shows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fminfer.core.errors import UsageError

Effect = Literal["acted on", "no effect", "refused"]


@dataclass(slots=True, frozen=True)
class Argument:
    """What an argument does."""

    effect: Effect
    text: str = ""  # what it becomes, why it has no effect, or what to do instead
    passes: tuple[Any, ...] = (None,)  # values of a refused one that change nothing


def _acted_on(**texts: str) -> dict[str, Argument]:
    return {name: Argument("acted on", text) for name, text in texts.items()}


def _without_effect(text: str, names: str) -> dict[str, Argument]:
    return {name: Argument("no effect", text) for name in names.split()}


def _refused(text: str, names: str, *passes: Any) -> dict[str, Argument]:
    values = (None, *passes)
    return {name: Argument("refused", text, values) for name in names.split()}


# vLLM's names of options that have another one here.
OPTIONS = {
    "pipeline_parallel_size": "pipeline_group_size",
    "data_parallel_size": "data_group_size",
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "chunk_size",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_dtype": "kv_dtype",
}
_OF_CALLS = {
    **_acted_on(use_tqdm="a bar of prompts; a function makes it"),
    **_refused("A run has one model; merge an adapter into it", "lora_request"),
    **_refused("Texts alone are read", "mm_processor_kwargs"),
}
_OF_VECTORS = {
    **_OF_CALLS,
    **_acted_on(truncate_prompt_tokens="keeps so many tokens of a text"),
    **_refused("Ask fminfer.Engine.embed", "pooling_params pooling_task"),
    **_refused("Ask fminfer.Engine", "tokenization_kwargs"),
}
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "LLM": {
        **_acted_on(
            model="a folder, a .gguf file or a hub id",
            tokenizer="`tokenizer`",
            revision="`revision`",
            dtype="`dtype`; half and float, too",
            seed="`seed`, of requests without one of their own",
            quantization="of a checkpoint that is quantized; others are refused",
            generation_config="auto: default parameters are the model's; vllm: vLLM's",
            tensor_parallel_size="`tensor_parallel_size`",
            max_model_len="`max_model_len`",
            max_logprobs="`max_logprobs`",
            block_size="`block_size`",
            skip_tokenizer_init="`skip_tokenizer_init`",
            chat_template="`chat_template`",
            **{name: f"`{option}`" for name, option in OPTIONS.items()},
        ),
        **_without_effect(
            "memory and speed are planned here",
            "gpu_memory_utilization swap_space enforce_eager enable_chunked_prefill "
            "compilation_config max_seq_len_to_capture distributed_executor_backend "
            "disable_custom_all_reduce async_scheduling num_gpu_blocks_override "
            "attention_backend kv_cache_memory_bytes optimization_level",
        ),
        **_without_effect(
            "nothing is logged", "disable_log_stats disable_log_requests"
        ),
        **_without_effect("no code of a model is run", "trust_remote_code"),
        **_without_effect("the model's files say it", "task runner load_format"),
        **_without_effect("texts alone are read", "limit_mm_per_prompt"),
        **_without_effect("llguidance does it", "structured_outputs_config"),
        **_refused(
            "Give offload='auto'",
            "cpu_offload_gb offload_backend offload_group_size",
            0,
        ),
        **_refused("Set HF_HOME", "download_dir"),
        **_refused(
            "Merge an adapter into the model", "enable_lora lora_modules", False
        ),
        **_refused("There is none", "speculative_config logits_processors"),
        **_refused(
            "Change the model's config.json",
            "hf_overrides rope_scaling rope_theta pooler_config override_pooler_config "
            "override_generation_config convert",
            {},
            "auto",
        ),
        **_refused("The tokenizer's files say it", "tokenizer_mode", "auto"),
    },
    # Its fields go into requests, which refuse what nobody acts on.
    "SamplingParams": {
        **_acted_on(
            **{
                name: "as in a request"
                for name in (
                    "n",
                    "best_of",
                    "presence_penalty",
                    "frequency_penalty",
                    "repetition_penalty",
                    "temperature",
                    "top_p",
                    "top_k",
                    "min_p",
                    "seed",
                    "stop",
                    "stop_token_ids",
                    "bad_words",
                    "include_stop_str_in_output",
                    "ignore_eos",
                    "min_tokens",
                    "logprobs",
                    "skip_special_tokens",
                    "truncate_prompt_tokens",
                    "logit_bias",
                    "allowed_token_ids",
                )
            },
            max_tokens="None: what the context leaves",
            prompt_logprobs="so many alternatives for each token of the prompt",
            structured_outputs="what the text must be",
            guided_decoding="its older name",
        ),
        **_without_effect("whole answers are returned", "output_kind"),
        **_refused("There is no other form", "flat_logprobs", False),
        **_refused(
            "There is no other way", "detokenize spaces_between_special_tokens", True
        ),
        **_refused("logit_bias changes logits", "logits_processors"),
        **_refused("Nobody reads them", "extra_args", {}),
    },
    "generate": {
        **_acted_on(
            prompts="a text, ids, {'prompt': …}, {'prompt_token_ids': …}, or a list",
            sampling_params="one, or one for each prompt; none: the model's defaults",
        ),
        **_without_effect("prompts share the engine in their order", "priority"),
        **_refused("Give {'prompt_token_ids': ids} as prompts", "prompt_token_ids"),
        **_OF_CALLS,
    },
    "chat": {
        **_acted_on(
            messages="one conversation, or a list",
            sampling_params="as in generate",
            chat_template="in place of the model's",
            add_generation_prompt="begins the answer",
            continue_final_message="goes on with the last message",
            tools="the template writes them",
            chat_template_kwargs="further variables of the template",
        ),
        **_without_effect("texts alone are read", "chat_template_content_format"),
        **_OF_CALLS,
    },
    "embed": {**_acted_on(prompts="as in generate"), **_OF_VECTORS},
    "classify": {**_acted_on(prompts="as in generate"), **_OF_VECTORS},
    "score": {
        **_acted_on(
            data_1="a text, or one for each of data_2",
            data_2="a text, or a list",
        ),
        **_OF_VECTORS,
        **_refused("Texts are compared as they are", "chat_template"),
    },
}


def check_arguments(call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments that are acted on; warn of those that have no effect.

    Raises:
        TypeError: it has no such argument.
        UsageError: an argument that is refused.
    """
    table = ARGUMENTS[call]
    acted_on = {}
    without_effect = []
    for name, value in arguments.items():
        if name not in table:
            raise TypeError(
                f"{call} has no argument {name!r}; it has {', '.join(table)}"
            )
        argument = table[name]
        if argument.effect == "acted on":
            acted_on[name] = value
        elif argument.effect == "no effect":
            without_effect.append(f"{name} ({argument.text})")
        elif value not in argument.passes:
            raise UsageError(f"{call}: {name} is not supported. {argument.text}")
    if without_effect:
        names = ", ".join(without_effect)
        warnings.warn(f"{call}: without effect here: {names}", stacklevel=3)
    return acted_on
