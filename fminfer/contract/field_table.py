"""The one table of a request's fields: what each may be, what becomes of it, and its help.

It has what is acted on or recorded, and from `refused_fields` what is refused. Parsing, the
groups of `split`, the keys of draws, /openapi.json and the tables in docs/contract.md
(`scripts/field_tables`) come from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fminfer.contract.chat_messages import MESSAGES, TOOLS
from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.fields import (
    ANYTHING,
    INT64,
    SWITCH_KIND,
    TEXT,
    TEXT_KIND,
    TEXTS,
    Field,
    Kind,
    Limit,
    Schema,
    allow_values,
    describe_value,
    is_integral,
    make_biases_kind,
    make_enum_kind,
    make_integer_kind,
    make_number_kind,
    make_object_kind,
    make_sorted_kind,
    make_strings_kind,
    make_token_ids_kind,
    make_token_ids_schema,
    make_type_kind,
    make_unchecked_kind,
    wrong_type_error,
)
from fminfer.contract.refused_fields import REFUSED, make_recorded_fields
from fminfer.contract.response_fields import RESPONSE_FIELDS
from fminfer.contract.tool_choice import TOOL_CHOICE
from fminfer.core.errors import RequestError

MAX_CANDIDATES = 128  # n and best_of
MAX_BIAS = 100  # of logit_bias, on either side of 0
MAX_REPETITION = 1000  # beyond it, or one over it, float32 logits lose their order
MAX_NAME_CHARS = 256  # of a model's name: each chunk of a stream repeats it


def _parse_chat_logprobs(name: str, value: Any, most: int) -> bool:
    if is_integral(value):
        raise RequestError(
            "invalid_type",
            f"{name} is {describe_value(value)}; in chat it is true, false or null. Write "
            f'"logprobs": true, "top_logprobs": {describe_value(value)}',
            name,
        )
    return bool(SWITCH_KIND.parse(name, value, most))


def _make_fields(
    kind: Kind,
    limit: Limit = "",
    default: object = None,
    column: str = "",
    **helps: str,
) -> Iterator[Field]:
    """Yield fields of one kind that are acted on, by name with their help."""
    for name, text in helps.items():
        yield Field(name, kind, text, limit, default=default, column=column)


def _parse_stream_options(name: str, value: Any, most: int) -> str:
    """Return which chunks of a stream tell the usage: "each", the "last", or "" for none."""
    options = _STREAM_OPTIONS.parse(name, value, most)
    if not options.get("include_usage"):
        return ""
    return "each" if options.get("continuous_usage_stats") else "last"


_ANY = make_unchecked_kind(ANYTHING)
_OBJECT = make_type_kind(dict, "an object or null", {"type": "object"}, "an object")
_STREAM_OPTIONS = make_object_kind(
    dict.fromkeys(
        ("include_usage", "continuous_usage_stats", "include_obfuscation"), SWITCH_KIND
    )
)
_COUNT = make_integer_kind(0)
_TOP_K = allow_values(_COUNT, "≥ 0; -1", (-1, 0))
_CUT = allow_values(make_integer_kind(1), "≥ 1; -1", (-1, -1))
_SIDE = make_enum_kind("left", "right")
_MODEL: Schema = {
    "anyOf": [{"type": "string", "maxLength": MAX_NAME_CHARS}, {"not": TEXT}]
}


def _make_prompts_schema(most: int) -> Schema:
    ids = make_token_ids_schema(most, 1)
    return {"anyOf": [TEXT, TEXTS, ids, {"type": "array", "items": ids, "minItems": 1}]}


def _parse_text_or_ids(name: str, value: Any, most: int) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(map(is_integral, value)):
        return tuple(int(item) for item in value)
    raise wrong_type_error(name, value, "a string, a list of token ids or null")


def _make_text_or_ids_schema(most: int) -> Schema:
    return {"anyOf": [TEXT, make_token_ids_schema(most)]}


# What is asked; `split` puts requests that differ in nothing else into one part.
_PROMPT = Field(
    "prompt",
    Kind(
        _ANY.parse,
        _make_prompts_schema,
        "string, list of strings, token ids, list of lists of ids",
    ),
    'Ids are used as they are, no BOS added; `""` starts from BOS (EOS if there is none).',
    "vocab",
    is_required=True,
)
_DECODER_PROMPT = Field(
    "decoder_prompt",
    Kind(_parse_text_or_ids, _make_text_or_ids_schema, "string, token ids"),
    "Of a model with an encoder: what its decoder goes on from, behind the token that it begins "
    "with. With echo it is scored. `prompt` is what the encoder reads.",
    "vocab",
)
_INPUT = replace(
    _PROMPT, name="input", help="Each text, or list of ids, gets a vector."
)
_TEXTS = make_unchecked_kind({"anyOf": [TEXT, TEXTS]}, "a string, a list of strings")
_COMPARED = (
    *_make_fields(
        replace(_TEXTS, values_text="a string"),
        query="What documents are compared with.",
    ),
    *_make_fields(
        _TEXTS,
        documents="What query, or each of queries, is compared with.",
        queries="vLLM's newer name of text_1.",
        text_1="One text, or one for each of text_2.",
        text_2="What is compared with text_1.",
    ),
)
_MESSAGES = Field(
    "messages",
    make_unchecked_kind(MESSAGES, "at least one"),
    "The conversation so far. The model's chat template makes a prompt of it.",
    is_required=True,
)
_TOOLS = Field(
    "tools",
    make_unchecked_kind(TOOLS, "functions"),
    "What the model may call, for the template. Calls of a function with `strict: true` follow "
    "its schema.",
)
# What decides which token a draw takes, beside the logits and the seed.
_DRAWS = (
    *_make_fields(
        make_number_kind(0, 2),
        column="f4",
        temperature="0 = argmax, ties to the lowest id.",
    ),
    *_make_fields(
        make_number_kind(0, 1),
        column="f4",
        top_p="Smallest set of that mass, at least one token; 0 = greedy.",
        min_p=(
            "Drop what is less likely than min_p × the likeliest, after temperature "
            "and top_k."
        ),
    ),
    *_make_fields(_TOP_K, column="i8", top_k="Only the k likeliest; 0 or -1 = off."),
    *_make_fields(
        make_number_kind(-2, 2),
        frequency_penalty="logit − penalty · how often the token was drawn.",
        presence_penalty="logit − penalty, of tokens that were drawn.",
    ),
    *_make_fields(
        make_number_kind(1 / MAX_REPETITION, MAX_REPETITION),
        repetition_penalty="Logits of prompt and drawn tokens: above 0 divided by it, others "
        "multiplied.",
    ),
    *_make_fields(
        make_biases_kind(MAX_BIAS),
        logit_bias="Added to the logit; affects greedy, too.",
    ),
    *_make_fields(
        make_sorted_kind(make_token_ids_kind(1)),
        "vocab",
        allowed_token_ids="No other token is drawn, EOS neither unless it is listed.",
    ),
    *_make_fields(
        make_sorted_kind(make_strings_kind(allows_one=True)),
        bad_words="Their tokens, also those behind a space, are never drawn to the end.",
    ),
)
_RECORDED = (
    Field(
        "model",
        make_unchecked_kind(_MODEL),
        "`--check-model` compares it.",
        fate="recorded",
    ),
    Field("engine", _ANY, "An older name of model, compared as well.", fate="recorded"),
    *make_recorded_fields(
        "request_type", "user", "store", "metadata", "service_tier", "prediction"
    ),
    *make_recorded_fields(
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id"
    ),
    *make_recorded_fields(
        "prompt_cache_options", "session_id", "priority", "cache_salt", "cache_prompt"
    ),
    *make_recorded_fields(
        "guided_decoding_backend", "stream_interval", "return_mm_kwargs"
    ),
    *make_recorded_fields(
        "keep_alive", "timeout", "extra_headers", "extra_query", "use_cache"
    ),
    *make_recorded_fields("batch_size"),
    # Of samplers that are refused unless they are off.
    *make_recorded_fields(
        "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"
    ),
    *make_recorded_fields(
        "dry_base", "dry_allowed_length", "dry_sequence_breakers", "dry_penalty_last_n"
    ),
    *make_recorded_fields("smoothing_curve", "timings_per_token"),
)
_GENERATION_FIELDS = (
    *_DRAWS,
    *_RECORDED,
    *_make_fields(make_integer_kind(1, MAX_CANDIDATES), n="Choices for each prompt."),
    *_make_fields(
        make_strings_kind(allows_one=True),
        stop="Cut at the earliest match. An empty string by itself: none.",
    ),
    *_make_fields(
        make_token_ids_kind(),
        "vocab",
        stop_token_ids="Each ends a choice, as EOS does; ignore_eos does not ignore them.",
    ),
    *_make_fields(
        _COUNT,
        "context",
        min_tokens="At most max_tokens. EOS (also under ignore_eos) and stop tokens cannot be "
        "drawn before it; a stop string that is complete by then never stops.",
    ),
    *_make_fields(
        _CUT,
        truncate_prompt_tokens="Keep so many tokens of a longer prompt; -1: what the context "
        "leaves beside max_tokens.",
    ),
    *_make_fields(
        _SIDE,
        truncation_side='Where truncate_prompt_tokens cuts; "right" keeps the first tokens.',
    ),
    *_make_fields(
        make_integer_kind(-INT64),
        seed="The same seed draws the same text. Default: the run's `--seed`.",
    ),
    *_make_fields(
        SWITCH_KIND,
        ignore_eos="Go on to max_tokens.",
        include_stop_str_in_output="The stop string or stop token stays in text and arrays.",
        skip_special_tokens="false: special tokens show in the text.",
        return_token_ids="Each choice gets `prompt_token_ids` and `token_ids` (all drawn ones).",
    ),
    Field(
        "stream",
        SWITCH_KIND,
        "Send the tokens as they come, as server-sent events. In a file only false passes.",
        fate="served",
        default=False,
        neutral=(False,),
    ),
    Field(
        "stream_options",
        Kind(_parse_stream_options, _STREAM_OPTIONS.form),
        "`include_usage`: the last event tells the usage, and with "
        "`continuous_usage_stats` each "
        "one. `include_obfuscation` changes nothing. In a file only {} passes.",
        fate="served",
        neutral=({},),
    ),
    *CONSTRAINTS.values(),
)
_COMPLETIONS_FIELDS = (
    _PROMPT,
    _DECODER_PROMPT,
    *_make_fields(
        _COUNT,
        "context",
        max_tokens="Tokens to draw at most. Prompt and max_tokens must fit the model's context.",
    ),
    *_make_fields(
        make_integer_kind(0, MAX_CANDIDATES),
        best_of="Draw so many, return the n of highest mean logprob. Default: n; below "
        "n it counts "
        "as n, with a warning.",
    ),
    *_make_fields(
        allow_values(_COUNT, "≥ 0; true, false", (False, None), (True, 1)),
        "logprobs",
        logprobs=(
            "Each token's logprob, and so many alternatives; true = 1, null or false: "
            "none."
        ),
    ),
    *_make_fields(
        allow_values(SWITCH_KIND, "true, false; 0, 1", (0, False), (1, True)),
        echo="The prompt first, in text and in logprobs.",
    ),
    *_make_fields(
        SWITCH_KIND, add_special_tokens="false: no BOS before a string prompt."
    ),
)
_CHAT_FIELDS = (
    _MESSAGES,
    _TOOLS,
    *_make_fields(
        _COUNT,
        "context",
        max_tokens="Tokens to draw at most. Default: the rest of the context. It is "
        "lowered if the "
        "KV cache or the limit of logprobs allows less, with a warning.",
        max_completion_tokens="The newer name of max_tokens; two different values are refused.",
    ),
    *_make_fields(
        replace(SWITCH_KIND, parse=_parse_chat_logprobs),
        default=False,
        logprobs="Tell the logprob of each token.",
    ),
    *_make_fields(
        _COUNT,
        "logprobs",
        0,
        top_logprobs=(
            "Alternatives of each token that are told; refused without `logprobs: "
            "true`."
        ),
    ),
    *_make_fields(
        TOOL_CHOICE,
        tool_choice='"none" keeps the tools from the template. "required" forces one call or '
        "several, a function exactly one of it. `allowed_tools` limits calls to some tools. "
        'Default: "auto".',
    ),
    *_make_fields(
        SWITCH_KIND,
        default=True,
        parallel_tool_calls="false: the message ends with its first call.",
        add_generation_prompt=(
            "Begin the assistant's message; false with continue_final_message."
        ),
    ),
    *_make_fields(
        SWITCH_KIND,
        default=False,
        continue_final_message="Go on with the last message.",
    ),
    *_make_fields(
        _OBJECT,
        chat_template_kwargs="Further variables of the template, none of its own as `messages`.",
    ),
    *_make_fields(TEXT_KIND, reasoning_effort="A variable of the template."),
    *_make_fields(
        allow_values(_COUNT, "≥ 0; -1", (-1, -1)),
        "context",
        thinking_token_budget="Most tokens of the thought; 0: none, -1: any number. Then its "
        "closing tag is forced. Default: the run's `--thinking-budget`.",
    ),
    *_make_fields(
        SWITCH_KIND,
        default=True,
        include_reasoning="false: the message has no `reasoning_content`.",
    ),
)


_VECTOR_FIELDS = (
    *_RECORDED,
    *_make_fields(
        TEXT_KIND,
        prompt_name="The name of one of the model's own prompts. It stands before each "
        "text, and "
        'before the first text of a pair. Token ids take none. "": none. Default: the '
        "model's default prompt, if it has one.",
    ),
    *_make_fields(
        SWITCH_KIND, add_special_tokens="false: no special tokens around a text."
    ),
    *_make_fields(
        _CUT,
        truncate_prompt_tokens="Keep so many tokens of a longer text, its special tokens among "
        "them; -1: what the model reads.",
    ),
    *_make_fields(
        _SIDE,
        default="right",
        truncation_side='Where truncate_prompt_tokens cuts; "right" keeps the first tokens.',
    ),
)
_EMBEDDINGS_FIELDS = (
    _INPUT,
    *_VECTOR_FIELDS,
    *_make_fields(
        make_integer_kind(1),
        dimensions="Keep the first so many numbers; the model's vectors of length 1 get that "
        "length again.",
    ),
    *_make_fields(
        make_enum_kind("float", "base64"),
        default="float",
        encoding_format='"base64": the bytes of float32 numbers, little-endian.',
    ),
    *_make_fields(
        SWITCH_KIND,
        normalize="true: each vector has the length 1. Default: as the model says.",
    ),
)
_SCORE_FIELDS = (
    *_VECTOR_FIELDS,
    *_make_fields(
        SWITCH_KIND,
        default=True,
        use_activation="false: scores and classes are logits. Embedding models refuse it.",
    ),
)
_RERANKED = tuple(each for each in _COMPARED if each.name in ("query", "documents"))
_RERANK_FIELDS = (
    *(replace(each, is_required=True) for each in _RERANKED),
    *_SCORE_FIELDS,
    *_make_fields(
        make_integer_kind(0), top_n="Tell only the best so many. 0, or default: all."
    ),
    *_make_fields(
        SWITCH_KIND, default=True, return_documents="false: leave the documents out."
    ),
)


def _index_fields(*rows: Field) -> dict[str, Field]:
    fields_by_name = {each.name: each for each in rows}
    assert len(fields_by_name) == len(rows), "each name has one meaning"
    return fields_by_name


_OTHERS_OF_RESPONSES = {each.name for each in (*RESPONSE_FIELDS, *REFUSED["responses"])}
_ACTED_ON: dict[Endpoint, tuple[Field, ...]] = {
    "completions": (*_COMPLETIONS_FIELDS, *_GENERATION_FIELDS),
    "chat": (*_CHAT_FIELDS, *_GENERATION_FIELDS),
    "responses": (
        *RESPONSE_FIELDS,
        *(
            each
            for each in (*_CHAT_FIELDS, *_GENERATION_FIELDS)
            if each.name not in _OTHERS_OF_RESPONSES
        ),
    ),
    "embeddings": _EMBEDDINGS_FIELDS,
    "score": (*(each for each in _COMPARED if each.name != "query"), *_SCORE_FIELDS),
    "rerank": _RERANK_FIELDS,
    "classify": (_INPUT, *_SCORE_FIELDS),
}
FIELDS = {
    endpoint: _index_fields(*rows, *REFUSED[endpoint])
    for endpoint, rows in _ACTED_ON.items()
}
DRAW_FIELDS = tuple(each.name for each in _DRAWS)
COLUMNS = {
    each.name: each.column for each in _DRAWS if each.column
}  # of `compute.step.DRAW`, with their types
# What may differ between requests of one part of `split`: it changes no draw.
_LINE_FIELDS = (
    _PROMPT,
    _DECODER_PROMPT,
    _MESSAGES,
    _TOOLS,
    _INPUT,
    *_COMPARED,
    *CONSTRAINTS.values(),
    *_RECORDED,
)
LINE_FIELDS = frozenset(each.name for each in _LINE_FIELDS).union(
    ("instructions", "text", "reasoning", "include")  # of responses
)
