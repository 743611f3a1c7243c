"""Unsupported fields of other tools, by endpoint, and what to do instead.

The other tools are OpenAI, vLLM, SGLang, llama.cpp, Ollama, text-generation-inference and
text-embeddings-inference, Gemini, Anthropic, Cohere, Jina, Voyage, Infinity and
sentence-transformers. A value that changes nothing is accepted. Any other value is an error, for
an ignored field would change answers unseen. A new endpoint needs an entry in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.fields import ANYTHING, Field, make_unchecked_kind
from fminfer.contract.response_fields import RESPONSE_FIELDS

_ANY = make_unchecked_kind(ANYTHING)


def _refused(
    remedy: str,
    neutral: list[object],
    *names: str,
    ours: str = "",
    only: type | None = None,
) -> Iterator[Field]:
    """Yield unsupported fields, with the values that change nothing."""
    for name in names:
        yield Field(
            name,
            _ANY,
            remedy,
            fate="refused",
            neutral=tuple(neutral),
            ours=ours,
            only=only,
        )


def make_recorded_fields(*names: str) -> Iterator[Field]:
    """Yield fields that are for the service that stores, routes or bills a request."""
    for name in names:
        yield Field(name, _ANY, "Changes no answer.", fate="recorded")


_INSIDE = "Put its fields into the request itself, by the names in docs/contract.md"
_COLUMN = "Put a column of data beside a `request` object"
_SCHEMA = "response_format or structured_outputs asks for JSON"
_THOUGHT = (
    "In chat, thinking_token_budget limits thoughts, and chat_template_kwargs may switch "
    "them off"
)
_SPLIT = "reasoning_content has a chat's thought; include_reasoning false leaves it out"
_UNSPLIT = "Thoughts are a part of the text here. In chat they are told apart"
_SYSTEM = f"In chat, give a message with the role system. {_COLUMN}"
_CONTEXT = "Give it to the run as --max-model-len"
_WEIGHTS = "A run has one model; merge an adapter into it"
_BEAMS = "best_of returns the likeliest of several"
_BIAS = "logit_bias and bad_words ban tokens; allowed_token_ids allows them"
_GREEDY = 'For the likeliest tokens, give "temperature": 0'
_START = "decoder_prompt begins an answer"
_END = "ignore_eos, stop and stop_token_ids say where an answer ends"
# Of completions and chat alike.
_DRAW_FIELDS = (
    *_refused(
        "structured_outputs takes json, regex, choice or grammar",
        [""],
        "structural_tag",
    ),
    *_refused(
        'In completions, "echo": true with logprobs returns them', [], "prompt_logprobs"
    ),
    *_refused("logprobs returns the likeliest tokens", [], "logprob_token_ids"),
    *_refused("logprobs returns the likeliest tokens", [0], "n_probs", "top_n_tokens"),
    *_refused("logprobs returns the likeliest tokens", [0], "top_logprobs_num"),
    *_refused("logprobs returns them", [False], "return_logprob", "output_scores"),
    *_refused("logprobs returns them", [False], "response_logprobs"),
    *_refused(
        'In completions, "echo": true with logprobs returns them',
        [False],
        "output_logits",
    ),
    *_refused(
        "", [False], "decoder_input_details", "post_sampling_probs", "flat_logprobs"
    ),
    *_refused(
        "", [False], "output_hidden_states", "output_attentions", "return_hidden_states"
    ),
    *_refused("return_token_ids adds the ids", [False], "return_tokens_as_token_ids"),
    *_refused("return_token_ids adds the ids", [False], "return_tokens"),
    *_refused(
        "logprobs has text_offset in completions", [False], "return_token_offsets"
    ),
    *_refused(
        "Give the prompt as text or as token ids", [], "prompt_embeds", "input_embeds"
    ),
    *_refused(f"Give prompt or messages. {_COLUMN}", [""], "input"),
    *_refused(
        "logit_bias changes logits", [[]], "logits_processors", "logits_processor"
    ),
    *_refused("logit_bias changes logits", [""], "custom_logit_processor"),
    *_refused("logit_bias changes logits", [[], {}], "sequence_bias", "logit_bias_exp"),
    *_refused(_BIAS, [[]], "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
    *_refused(
        _BIAS,
        [[]],
        "force_words_ids",
        "banned_tokens",
        "custom_token_bans",
        "token_ban",
    ),
    *_refused(_BIAS, [[], ""], "ban_tokens", "ban_token_ids"),
    *_refused(_BIAS, [[]], "allowed_tokens", "excluded_tokens", "banned_strings"),
    *_refused(_START, [[]], "forced_decoder_ids", "decoder_input_ids"),
    *_refused(_START, [], "forced_bos_token_id", "decoder_start_token_id"),
    *_refused("", [], "forced_eos_token_id", "exponential_decay_length_penalty"),
    *_refused(
        _END, [[], ""], "eos_token_id", "stopping_criteria", "stop_regex", "stop_token"
    ),
    *_refused(_END, [[], ""], "eos_token"),
    *_refused(_END, [False], "ban_eos_token", "no_stop_trim"),
    *_refused("repetition_penalty makes repetitions rare", [], "repetition_detection"),
    *_refused("Give it in the chat_template_kwargs of a chat", [], "enable_thinking"),
    *_refused(_THOUGHT, [], "think", "reasoning_budget"),
    *_refused(_THOUGHT, [], "thinking", "reasoning", only=dict),
    *_refused(_THOUGHT, [], "thinking_budget", "thinking_config"),
    *_refused(_BEAMS, [False], "use_beam_search"),
    *_refused(_BEAMS, [1], "num_beams", "num_beam_groups", "beam_width"),
    *_refused("", [0], "diversity_penalty"),
    *_refused(_GREEDY, [True], "do_sample"),
    *_refused(_GREEDY, [False], "greedy", "greedy_sampling"),
    *_refused(_GREEDY, ["sample"], "decoding_method"),
    *_refused("", [""], "suffix"),
    *_refused("", [True], "spaces_between_special_tokens", "detokenize"),
    *_refused(
        "",
        [False],
        "watermarking",
        "watermark",
        "early_stopping",
        "dynamic_temperature",
    ),
    *_refused(
        "", [{}], "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args"
    ),
    *_refused(
        "", [1], "length_penalty", "typical_p", "typical", "typ_p", "tfs_z", "tfs"
    ),
    *_refused("", [1], "guidance_scale", "cfg_scale", "encoder_repetition_penalty"),
    *_refused(
        "", [0], "routed_experts_prompt_start", "no_repeat_ngram_size", "penalty_alpha"
    ),
    *_refused("", [0], "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"),
    *_refused("", [0], "top_a", "mirostat", "mirostat_mode", "dry_multiplier"),
    *_refused("", [0], "xtc_probability"),
    *_refused(
        "", [0], "dynatemp_range", "dynatemp_min", "dynatemp_max", "smoothing_factor"
    ),
    *_refused(
        "", [0], "n_keep", "num_keep", "n_discard", "n_indent", "t_max_predict_ms"
    ),
    *_refused("", [0, -1], "top_n_sigma", "nsigma", "adaptive_target"),
    *_refused("repetition_penalty counts the whole text", [-1], "repeat_last_n"),
    *_refused(
        "repetition_penalty counts the whole text", [0], "repetition_penalty_range"
    ),
    *_refused("repetition_penalty counts the whole text", [0], "rep_pen_range"),
    *_refused("repetition_penalty counts the whole text", [-1], "penalty_last_n"),
    *_refused(
        "Section 7 of docs/contract.md has their order",
        [[]],
        "samplers",
        "sampler_order",
    ),
    *_refused(
        "Section 7 of docs/contract.md has their order", [[]], "sampler_priority"
    ),
    *_refused("", [""], "negative_prompt"),
    *_refused("Answers are text", [["text"]], "modalities", "response_modalities"),
    *_refused("Answers are text", [], "audio"),
    *_refused("Answers are text", [{}], "media_io_kwargs", "mm_processor_kwargs"),
    *_refused(
        "Prompts are text", [[]], "images", "image", "image_data", "multi_modal_data"
    ),
    *_refused("Ask for it in words", ["medium"], "verbosity"),
    *_refused(
        "", [False], "safe_prompt", "enable_search", "token_healing", "temperature_last"
    ),
    *_refused(
        "", [], "max_time", "search_parameters", "search_options", "guardrailConfig"
    ),
    *_refused("", [], "moderation", "web_search_options"),
    *_refused("", [], "previous_response_id"),
    *_refused("", [], "conversation", only=dict),
    *_refused("", [[]], "transforms", "plugins", "safety_settings"),
    *_refused(
        "POST /tokenize of a server returns a chat's tokens",
        [False],
        "return_prompt_text",
    ),
    *_refused("Give the run --chat-template FILE", [], "chat_template", "template"),
    *_refused("Give the run --chat-template FILE", [], "prompt_template"),
    *_refused("Give the run --chat-template FILE", [], "instruction_template"),
    *_refused(
        'In chat, give {"documents": …} as chat_template_kwargs', [], "documents"
    ),
    *_refused("In chat, give tools and tool_choice", ["none", "auto"], "function_call"),
    *_refused("Write it into the prompt", [""], "input_prefix", "input_suffix"),
    *_refused(
        "In chat, give all as messages", [[]], "history", "chat_history", only=list
    ),
    *_refused("In chat, give all as messages", [[]], "conversation_history", only=list),
    *_refused("In chat, it belongs into messages", [{}], "message", only=dict),
    *_refused(
        "In chat, the last message may be the assistant's, with continue_final_message true and "
        "add_generation_prompt false",
        [""],
        "prefill",
        "response_prefix",
        "assistant_prefix",
        "assistant_prefill",
    ),
    *_refused(
        "Write what the model shall read into the prompt or the messages",
        [[], ""],
        "data_sources",
        "file_ids",
        "attachments",
        "cached_content",
    ),
    *_refused("", [False], "search_queries_only"),
    # Supported settings in the wrong place.
    *_refused(_INSIDE, [{}], "extra_body", "generation_config"),
    *_refused(_INSIDE, [{}], "sampling_params", "sampling_parameters", "model_kwargs"),
    *_refused(_INSIDE, [{}], "inference_config", "generate_kwargs", "extra_json"),
    *_refused(_INSIDE, [{}], "textGenerationConfig", "additionalModelRequestFields"),
    *_refused("In chat, give tools and tool_choice", [{}], "tool_config"),
    *_refused("In chat, give tools and tool_choice", [[]], "mcp_servers", "connectors"),
    *_refused(_INSIDE, [{}], "options", "parameters", "params", only=dict),
    *_refused(_INSIDE, [{}], "config", "sampling", "kwargs", only=dict),
    *_refused(_INSIDE, [{}], "nvext"),
    *_refused(
        _SCHEMA, [{}], "guided_decoding", "response_schema", "response_json_schema"
    ),
    *_refused(_SCHEMA, [{}], "guided_json_schema", "response_model", "format_schema"),
    *_refused(_SCHEMA, [{}], "constraint", only=dict),
    *_refused(_SCHEMA, [{}], "constraints", only=dict),
    *_refused("A grammar holds from the first token on", [False], "grammar_lazy"),
    *_refused("A grammar holds from the first token on", [[]], "grammar_triggers"),
    *_refused(
        _SCHEMA, [{}], "output_config", "text_format", "output_schema", "outlines"
    ),
    *_refused(_SCHEMA, [{}], "text", only=dict),
    *_refused(
        _SCHEMA,
        ["", "text"],
        "format",
        "output_format",
        "response_type",
        "grammar_type",
    ),
    *_refused(_SCHEMA, ["text/plain"], "response_mime_type"),
    *_refused(_SCHEMA, [False], "json_mode", "json_object", "guided_json_object"),
    *_refused(_SYSTEM, [""], "system", "system_prompt", "instructions"),
    *_refused(_SYSTEM, [""], "system_instruction", "system_message"),
    *_refused(_SYSTEM, [""], "preamble", "prompt_mode"),
    *_refused(_CONTEXT, [], "num_ctx", "n_ctx", "max_model_len", "truncation_length"),
    *_refused(_CONTEXT, [], "max_context_length"),
    *_refused("truncate_prompt_tokens cuts a prompt", [], "prompt_truncate_len"),
    *_refused("truncate_prompt_tokens cuts a prompt", [], "prompt_truncation"),
    *_refused("Give the run --on-too-long", [], "context_length_exceeded_behavior"),
    *_refused("logprobs returns them", ["NONE"], "return_likelihoods"),
    *_refused(
        _WEIGHTS, [[], {}], "lora", "lora_path", "lora_request", "adapter", "adapter_id"
    ),
    *_refused(_WEIGHTS, [[], {}, ""], "adapters", "lora_name"),
    *_refused("truncate_prompt_tokens cuts a prompt", [False, "disabled"], "truncate"),
    *_refused(
        "truncate_prompt_tokens cuts a prompt", [False, "disabled"], "truncation"
    ),
    *_refused(
        "max_tokens counts generated tokens, without the prompt", [], "max_length"
    ),
    *_refused(
        "min_tokens counts generated tokens, without the prompt", [0], "min_length"
    ),
    *_refused("", [], "max_new_tokens", "n_predict", "num_predict", ours="max_tokens"),
    *_refused("", [], "max_output_tokens", "max_generated_tokens", ours="max_tokens"),
    *_refused(
        "", [], "max_gen_len", "max_tokens_to_sample", "num_tokens", ours="max_tokens"
    ),
    *_refused("", [[]], "stopping_strings", "end_sequences", ours="stop"),
    *_refused("", [[], ""], "antiprompt", "reverse_prompt", ours="stop"),
    *_refused("", [False], "ignore_eos_token", ours="ignore_eos"),
    *_refused("", [], "sampler_seed", ours="seed"),
    *_refused("", [""], "grammar_string", ours="grammar"),
    *_refused("", [""], "regex_pattern", ours="guided_regex"),
    *_refused("", [0], "min_new_tokens", "min_completion_tokens", ours="min_tokens"),
    *_refused("", [1], "num_return_sequences", "num_completions", ours="n"),
    *_refused("", [1], "candidate_count", "num_generations", ours="n"),
    *_refused("", [[]], "stop_sequences", "stop_strings", ours="stop"),
    *_refused("", [[]], "stop_words", "stop_str", "stops", ours="stop"),
    *_refused("", [1], "repeat_penalty", "rep_pen", ours="repetition_penalty"),
    *_refused("", [], "temp", ours="temperature"),
    *_refused("", [], "random_seed", ours="seed"),
    *_refused("", [""], "regex", ours="guided_regex"),
    *_refused("", [""], "ebnf", ours="guided_grammar"),
    *_refused("", [{}], "structured_output", ours="structured_outputs"),
)
_IN_CHAT = "It belongs to chat: give messages in place of prompt"
_COMPLETIONS_FIELDS = (
    *_DRAW_FIELDS,
    *_refused(_IN_CHAT, [], "messages", "reasoning_effort"),
    *_refused(_UNSPLIT, [-1], "thinking_token_budget"),
    *_refused(_UNSPLIT, [True], "include_reasoning"),
    *_refused(_UNSPLIT, [False], "separate_reasoning", "include_thoughts"),
    *_refused(_UNSPLIT, ["none"], "reasoning_format"),
    *_refused(_IN_CHAT, [[]], "tools", "functions"),
    *_refused(_IN_CHAT, ["none", "auto"], "tool_choice"),
    *_refused(_IN_CHAT, [{}], "chat_template_kwargs"),
    *_refused(_IN_CHAT, [True, False], "parallel_tool_calls"),
    *_refused(_IN_CHAT, [True], "add_generation_prompt"),
    *_refused(_IN_CHAT, [False], "continue_final_message"),
    *_refused(_IN_CHAT, [True], "raw"),
    *_refused("Give that number as logprobs", [0], "top_logprobs"),
    *_refused("", [], "max_completion_tokens", ours="max_tokens"),
    *_refused("", [], "inputs", "input_ids", "prompt_token_ids", ours="prompt"),
    *_refused("", [False], "return_full_text", ours="echo"),
    *_refused("", [True], "add_bos_token", ours="add_special_tokens"),
)
_IN_PROMPT = "The prompt of a chat request is its messages"
_CHAT_FIELDS = (
    *_DRAW_FIELDS,
    *_refused(_IN_PROMPT, [], "prompt", "inputs", "input_ids", "prompt_token_ids"),
    *_refused(
        "An answer in chat is a message; /v1/completions has echo", [False, 0], "echo"
    ),
    *_refused("An answer in chat is a message", [False], "return_full_text"),
    *_refused("/v1/completions has raw prompts", [False], "raw"),
    *_refused("/v1/completions has best_of", [1], "best_of"),
    *_refused("/v1/completions has decoder_prompt", [], "decoder_prompt"),
    *_refused("Give tools and tool_choice", [[]], "functions"),
    *_refused(_SPLIT, [True], "separate_reasoning", "include_thoughts"),
    *_refused(_SPLIT, ["auto", "deepseek"], "reasoning_format"),
    *_refused("The template writes them", [False], "add_special_tokens"),
    *_refused("The template writes it", [], "add_bos_token"),
)
_NOTHING_KEPT = "No response is kept. Send the whole conversation as input"
_ONE_CHOICE = "A response is one choice; /v1/chat/completions has n"
_OF_RESPONSES = (
    *_refused(_NOTHING_KEPT, [], "previous_response_id", "conversation"),
    *_refused(
        "No response is kept. A Batch file is answered later", [False], "background"
    ),
    *_refused("Write its text into instructions and input", [], "prompt"),
    *_refused("The client calls each tool itself", [], "max_tool_calls"),
    *_refused("", [[]], "context_management"),
    *_refused("", [], "messages", "inputs", "input_ids", ours="input"),
    *_refused("", [], "prompt_token_ids", ours="input"),
    *_refused("", [], "instruction", ours="instructions"),
    *_refused("", [], "max_tokens", "max_completion_tokens", ours="max_output_tokens"),
    *_refused("text.format asks for JSON", [], "response_format"),
    *_refused("Give it as reasoning.effort", [], "reasoning_effort"),
    *_refused(
        '"include": ["message.output_text.logprobs"] asks for them', [False], "logprobs"
    ),
    *_refused(_ONE_CHOICE, [1], "n", "best_of"),
    *_refused("/v1/chat/completions has it", [True], "add_generation_prompt"),
    *_refused("/v1/chat/completions has it", [False], "continue_final_message"),
)
# What the others of chat say of fields that a response has.
_OTHER_HINTS: dict[str, dict[str, Any]] = {
    "max_tokens": {"ours": "max_output_tokens"},
    "n": {"ours": "", "help": _ONE_CHOICE},
}
_RESPONSES_FIELDS = (
    *_OF_RESPONSES,
    *(
        replace(each, **_OTHER_HINTS.get(each.ours, {}))
        for each in _CHAT_FIELDS
        if each.name not in {row.name for row in (*RESPONSE_FIELDS, *_OF_RESPONSES)}
    ),
)
_PROMPTS = "prompt_name names one of the model's own prompts; or write it into the text"
_CUT = "truncate_prompt_tokens cuts each text"
_NUMBERS = 'Numbers are float32; "encoding_format": "base64" makes them smaller'
# Of embeddings, scores, rankings and classes alike.
_VECTOR_FIELDS = (
    *_refused(_PROMPTS, [""], "prompt", "input_type", "text_type", "task", "task_type"),
    *_refused(
        _PROMPTS, [""], "instruction", "instruct", "instructions", "query_instruction"
    ),
    *_refused("prompt_name names one of the model's own prompts", [], "prompts"),
    *_refused(
        _PROMPTS, [""], "prefix", "query_prefix", "document_prefix", "doc_prefix"
    ),
    *_refused(_PROMPTS, [""], "system"),
    *_refused(_PROMPTS, [False], "is_query", "is_document", "is_passage"),
    *_refused(_CUT, [False, "NONE", "none"], "truncate", "truncation", "auto_truncate"),
    *_refused(_CUT, [], "max_tokens", "max_tokens_per_doc", "max_tokens_per_query"),
    *_refused(
        _CUT, [], "max_length", "max_doc_length", "max_query_length", "truncate_length"
    ),
    *_refused(_CUT, [], "overlap_tokens", "max_seq_length", "max_chunks_per_doc"),
    *_refused("", ["Right", "right"], "truncation_direction", ours="truncation_side"),
    *_refused(_NUMBERS, ["float32"], "embed_dtype", "precision", "dtype"),
    *_refused(_NUMBERS, ["float"], "output_dtype", "embedding_type", "embeddings_type"),
    *_refused(_NUMBERS, [["float"], "float"], "embedding_types"),
    *_refused(_NUMBERS, ["float32", "none"], "quantization", "quantize"),
    *_refused(_NUMBERS, ["native", "little"], "endianness"),
    *_refused(
        "Each text has one vector", [False], "late_chunking", "return_multivector"
    ),
    *_refused(
        "Each text has one vector", [False], "multi_vector", "multivector_output"
    ),
    *_refused("Each text has one vector", [False, {}], "sparse", "return_sparse_vecs"),
    *_refused("Each text has one vector", ["sentence_embedding"], "output_value"),
    *_refused("Each text has one vector", ["dense"], "output_type"),
    *_refused(
        "Each text has one vector", [False], "return_sparse", "return_colbert_vecs"
    ),
    *_refused(
        "The model's modules.json decides it",
        [],
        "pooling",
        "pooling_type",
        "pooling_task",
    ),
    *_refused(
        "Each answer has all scores", [], "score_threshold", "threshold", "min_score"
    ),
    *_refused("Each answer has all scores", [], "relevance_threshold"),
    *_refused("The model's config names its classes", [], "candidate_labels"),
    *_refused(
        "The model's config names its classes", [[]], "labels", "classes", only=list
    ),
    *_refused("The model's config decides it", [""], "problem_type"),
    *_refused(
        "/v1/score compares text_1 and text_2", [], "text_pair", "text_pairs", "pairs"
    ),
    *_refused("The model's config names its classes", [], "hypothesis_template"),
    *_refused("Each class has its probability", [True], "return_all_scores"),
    *_refused("Each class has its probability", [], "top_labels", "multi_label"),
    *_refused("Only texts are read", ["text"], "modality"),
    *_refused("Only texts are read", [[]], "image", "images", "video", "audio"),
    *_refused("Only texts are read", [{}], "mm_processor_kwargs", "media_io_kwargs"),
    *_refused("Give texts in place of messages", [], "messages", "chat_template"),
    *_refused("Give texts in place of messages", [{}], "chat_template_kwargs"),
    *_refused(
        "Give texts in place of messages", [True, False], "add_generation_prompt"
    ),
    *_refused("Give texts in place of messages", [False], "continue_final_message"),
    *_refused(
        "", [False], "stream", "return_embeddings", "rewrite_query", "echo", "logprobs"
    ),
    *_refused("", [1], "n"),
    *_refused(_INSIDE, [{}], "extra_body"),
    *_refused(_INSIDE, [{}], "options", "parameters", only=dict),
    *_refused(
        _WEIGHTS, [[], {}], "lora", "lora_path", "lora_request", "adapter", "adapter_id"
    ),
    *_refused(
        "The model's config decides it", [], "score_function", "similarity_fn_name"
    ),
    *_refused("The model's config decides it", [""], "similarity", "metric", only=str),
    *_refused(
        '"use_activation": false returns logits', [False], "raw_scores", "return_logits"
    ),
    *_refused(
        '"use_activation": false returns logits', [True], "softmax", "apply_softmax"
    ),
    *_refused('"use_activation": false returns logits', [True], "activation"),
    *_refused(
        '"use_activation": false returns logits',
        [],
        "function_to_apply",
        "activation_fn",
    ),
    *_refused(
        "normalize is of embeddings, and use_activation of scores, rankings and classes",
        [],
        "normalization",
        "normalize_scores",
    ),
    *_refused("Documents are compared by their text", [["text"]], "rank_fields"),
)
_IN_EMBEDDINGS = "/v1/embeddings has dimensions, normalize and encoding_format"
_IN_RERANK = "/v1/rerank ranks documents"
_IN_SCORE = "/v1/score compares texts"
_DIMENSIONS = (
    "output_dimension",
    "dimension",
    "output_dimensionality",
    "truncate_dim",
    "embedding_dimension",
    "embedding_dim",
    "embed_dim",
    "matryoshka_dim",
    "dim",
    "dims",
)
_NORMALIZE = (
    "normalized",
    "normalise",
    "normalize_embeddings",
    "l2_normalize",
    "l2_normalized",
)
_DOCUMENTS = ("texts", "passages", "docs", "sentences")
_NOT_EMBEDDED = (
    *_refused(_IN_EMBEDDINGS, [], "dimensions", *_DIMENSIONS),
    *_refused(_IN_EMBEDDINGS, [], "normalize", "embd_normalize", *_NORMALIZE),
    *_refused(_IN_EMBEDDINGS, ["float"], "encoding_format"),
)
_NOT_RANKED = (
    *_refused(_IN_RERANK, [], "query"),
    *_refused(_IN_RERANK, [0], "top_n"),
    *_refused(_IN_RERANK, [False], "return_documents", "return_text", "return_input"),
)
_COMPARED = ("text_1", "text_2", "queries", "data_1", "data_2")
REFUSED: dict[Endpoint, tuple[Field, ...]] = {
    "completions": _COMPLETIONS_FIELDS,
    "chat": _CHAT_FIELDS,
    "responses": _RESPONSES_FIELDS,
    "embeddings": (
        *_VECTOR_FIELDS,
        *_NOT_RANKED,
        *_refused(_IN_RERANK, [0], "top_k"),
        *_refused(_IN_RERANK, [], "documents"),
        *_refused(_IN_SCORE, [], *_COMPARED),
        *_refused("", [], "inputs", "input_ids", *_DOCUMENTS, ours="input"),
        *_refused("", [], *_DIMENSIONS, ours="dimensions"),
        *_refused("", [], "use_activation", *_NORMALIZE, ours="normalize"),
        *_refused('"normalize": true is what 2 is in llama.cpp', [], "embd_normalize"),
    ),
    "score": (
        *_VECTOR_FIELDS,
        *_NOT_EMBEDDED,
        *_NOT_RANKED,
        *_refused(_IN_RERANK, [0], "top_k"),
        *_refused(
            "Give text_1 and text_2", [], "input", "inputs", "input_ids", *_DOCUMENTS
        ),
        *_refused("", [], "data_1", ours="text_1"),
        *_refused("", [], "data_2", ours="text_2"),
    ),
    "rerank": (
        *_VECTOR_FIELDS,
        *_NOT_EMBEDDED,
        *_refused("Give query and documents", [], "input", "inputs", "input_ids"),
        *_refused(_IN_SCORE, [], *_COMPARED),
        *_refused("", [], *_DOCUMENTS, ours="documents"),
        *_refused("", [0], "top_k", ours="top_n"),
        *_refused("", [True], "return_text", "return_input", ours="return_documents"),
    ),
    "classify": (
        *_VECTOR_FIELDS,
        *_NOT_EMBEDDED,
        *_NOT_RANKED,
        *_refused("Each class has its probability", [0], "top_k"),
        *_refused(_IN_RERANK, [], "documents"),
        *_refused(_IN_SCORE, [], *_COMPARED),
        *_refused("", [], "inputs", "input_ids", *_DOCUMENTS, ours="input"),
    ),
}
