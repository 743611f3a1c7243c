"""The JSON Schemas of what a server answers."""

from __future__ import annotations

from typing import get_args

from fminfer.contract.fields import NULL, TEXT, TEXTS, Schema, allow_null, object_of
from fminfer.engine.sequence import FinishReason

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS: Schema = {"type": "array", "items": COUNT}
REASON: Schema = {"enum": list(get_args(FinishReason))}
STOP_REASON: Schema = {
    "type": ["string", "integer", "null"],
    "description": "The stop string, or the id of the stop token.",
}
# What a choice has beside its text, of some requests only.
AT_TIMES: dict[str, Schema] = {
    "stop_reason": STOP_REASON,
    "prompt_token_ids": IDS,
    "token_ids": IDS,
}


def list_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def usage_schema() -> Schema:
    """Return what an answer has cost."""
    details = object_of({"cached_tokens": COUNT, "truncated_tokens": COUNT})
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return object_of(
        {name: COUNT for name in counts} | {"prompt_tokens_details": allow_null(details)}, *counts
    )


def completion_schema() -> Schema:
    """Return the answer of `/v1/completions`."""
    return _answer("text_completion", _text_choice(is_whole=True), is_whole=True)


def completion_chunk_schema() -> Schema:
    """Return one event of a stream of `/v1/completions`."""
    return _answer("text_completion", _text_choice(is_whole=False), is_whole=False)


def chat_completion_schema() -> Schema:
    """Return the answer of `/v1/chat/completions`."""
    message = object_of(
        {
            "role": {"const": "assistant"},
            "content": allow_null(TEXT),
            "refusal": NULL,
            "tool_calls": list_of(_call()),
        },
        *("role", "content"),
    )
    return _answer("chat.completion", _chat_choice("message", message, REASON), is_whole=True)


def chat_completion_chunk_schema() -> Schema:
    """Return one event of a stream of `/v1/chat/completions`."""
    call = _call()
    call["properties"]["index"] = COUNT
    delta = object_of(
        {"role": {"const": "assistant"}, "content": allow_null(TEXT), "tool_calls": list_of(call)}
    )
    choice = _chat_choice("delta", delta, allow_null(REASON))
    return _answer("chat.completion.chunk", choice, is_whole=False)


def error_schema() -> Schema:
    """Return what is sent instead of an answer."""
    error = object_of(
        {
            "message": TEXT | {"description": "What was found, what is allowed, what to do."},
            "type": TEXT,
            "param": allow_null(TEXT) | {"description": "The field that is wrong."},
            "code": allow_null(TEXT),
        },
        *("message", "type", "param", "code"),
    )
    return object_of({"error": error}, "error")


def model_schema() -> Schema:
    """Return one entry of `/v1/models`."""
    return object_of(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": NULL,
            "max_model_len": COUNT | {"description": "Most tokens of prompt and answer."},
            "has_chat_template": {"type": "boolean"},
        },
        *("id", "object", "created", "owned_by", "max_model_len"),
    )


def model_list_schema() -> Schema:
    """Return the answer of `/v1/models`."""
    return object_of(
        {"object": {"const": "list"}, "data": list_of(model_schema())}, "object", "data"
    )


def stats_schema() -> Schema:
    """Return the answer of `/stats`."""
    rates = ("kv_usage", "prompt_tokens_per_s", "generation_tokens_per_s", "uptime_s")
    counts = ("num_running", "num_waiting", "result_cache_queries", "result_cache_hits")
    figures: Schema = dict.fromkeys(counts, COUNT)
    figures |= {name: {"type": "number", "minimum": 0} for name in rates}
    return object_of({"model": TEXT, **figures}, "model", *figures)


def tokenize_schema() -> Schema:
    """Return the answer of `/tokenize`."""
    return object_of(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": IDS,
            "token_strs": allow_null(list_of(TEXT)),
        },
        *("count", "max_model_len", "tokens"),
    )


def detokenize_schema() -> Schema:
    """Return the answer of `/detokenize`."""
    return object_of({"prompt": TEXT}, "prompt")


def generation_schema() -> Schema:
    """Return the answer of `/generation`: prompt and completion."""
    return object_of({"text": TEXT}, "text")


def texts_schema() -> Schema:
    """Return the answer of `POST /` and of `/run/…`: the text of each choice."""
    return TEXTS


def _answer(kind: str, choice: Schema, *, is_whole: bool) -> Schema:
    usage = usage_schema() if is_whole else allow_null(usage_schema())
    named = ("id", "object", "created", "model", "choices")
    return object_of(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": COUNT,
            "model": TEXT,
            "choices": list_of(choice),
            "usage": usage,
        },
        *named,
        *(("usage",) if is_whole else ()),
    )


def _text_choice(*, is_whole: bool) -> Schema:
    logprobs = object_of(
        {
            "tokens": list_of(TEXT),
            "token_logprobs": list_of(allow_null(NUMBER)),
            "top_logprobs": allow_null(
                list_of(allow_null({"type": "object", "additionalProperties": NUMBER}))
            ),
            "text_offset": IDS,
        },
        *("tokens", "token_logprobs", "top_logprobs", "text_offset"),
    )
    reason: Schema = {"enum": [each for each in REASON["enum"] if each != "tool_calls"]}
    return object_of(
        {
            "text": TEXT,
            "index": COUNT,
            "logprobs": allow_null(logprobs),
            "finish_reason": reason if is_whole else allow_null(reason),
        }
        | AT_TIMES,
        *("text", "index", "logprobs", "finish_reason"),
    )


def _chat_choice(name: str, said: Schema, reason: Schema) -> Schema:
    token = object_of(
        {"token": TEXT, "logprob": NUMBER, "bytes": allow_null(IDS)}, "token", "logprob", "bytes"
    )
    entry = object_of(
        token["properties"] | {"top_logprobs": list_of(token)},
        *(*token["required"], "top_logprobs"),
    )
    logprobs = object_of({"content": list_of(entry), "refusal": NULL}, "content")
    return object_of(
        {name: said, "index": COUNT, "logprobs": allow_null(logprobs), "finish_reason": reason}
        | AT_TIMES,
        *(name, "index", "finish_reason"),
    )


def _call() -> Schema:
    function = object_of({"name": TEXT, "arguments": TEXT}, "name", "arguments")
    return object_of(
        {"id": TEXT, "type": {"const": "function"}, "function": function}, "id", "type", "function"
    )
