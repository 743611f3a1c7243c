"""The JSON Schemas of what a server answers."""

from __future__ import annotations

from typing import get_args

from fminfer.contract.fields import (
    NULL,
    SWITCH,
    TEXT,
    TEXTS,
    Schema,
    allow_null,
    list_of,
    object_of,
    whole,
)
from fminfer.engine.sequence import FinishReason

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS = list_of(COUNT)
REASON: Schema = {"enum": list(get_args(FinishReason))}
ASSISTANT: Schema = {"const": "assistant"}
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


def extend(schema: Schema, properties: dict[str, Schema]) -> Schema:
    """Return the schema of an object that may have further properties."""
    return schema | {"properties": schema["properties"] | properties}


def usage_schema() -> Schema:
    """Return what an answer has cost."""
    details = object_of({"cached_tokens": COUNT, "truncated_tokens": COUNT})
    counts = whole(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
    return extend(counts, {"prompt_tokens_details": allow_null(details)})


def completion_schema() -> Schema:
    """Return the answer of `/v1/completions`."""
    return _answer("text_completion", _text_choice(is_whole=True), is_whole=True)


def completion_chunk_schema() -> Schema:
    """Return one event of a stream of `/v1/completions`."""
    return _answer("text_completion", _text_choice(is_whole=False), is_whole=False)


def chat_completion_schema() -> Schema:
    """Return the answer of `/v1/chat/completions`."""
    message = whole(role=ASSISTANT, content=allow_null(TEXT))
    message = extend(message, {"refusal": NULL, "tool_calls": list_of(_call())})
    return _answer("chat.completion", _chat_choice("message", message, REASON), is_whole=True)


def chat_completion_chunk_schema() -> Schema:
    """Return one event of a stream of `/v1/chat/completions`."""
    calls = list_of(extend(_call(), {"index": COUNT}))
    delta = object_of({"role": ASSISTANT, "content": allow_null(TEXT), "tool_calls": calls})
    choice = _chat_choice("delta", delta, allow_null(REASON))
    return _answer("chat.completion.chunk", choice, is_whole=False)


def error_schema() -> Schema:
    """Return what is sent instead of an answer."""
    message = TEXT | {"description": "What was found, what is allowed, what to do."}
    param = allow_null(TEXT) | {"description": "The field that is wrong."}
    return whole(error=whole(message=message, type=TEXT, param=param, code=allow_null(TEXT)))


def model_schema() -> Schema:
    """Return one entry of `/v1/models`."""
    most = COUNT | {"description": "Most tokens of prompt and answer."}
    kind: Schema = {"const": "model"}
    found = whole(id=TEXT, object=kind, created=COUNT, owned_by=TEXT, max_model_len=most)
    return extend(found, {"root": TEXT, "parent": NULL, "has_chat_template": SWITCH})


def model_list_schema() -> Schema:
    """Return the answer of `/v1/models`."""
    return whole(object={"const": "list"}, data=list_of(model_schema()))


def stats_schema() -> Schema:
    """Return the answer of `/stats`."""
    rates = ("kv_usage", "prompt_tokens_per_s", "generation_tokens_per_s", "uptime_s")
    counts = ("num_running", "num_waiting", "result_cache_queries", "result_cache_hits")
    figures: Schema = dict.fromkeys(counts, COUNT)
    figures |= {name: {"type": "number", "minimum": 0} for name in rates}
    return whole(model=TEXT, **figures)


def tokenize_schema() -> Schema:
    """Return the answer of `/tokenize`."""
    found = whole(count=COUNT, max_model_len=COUNT, tokens=IDS)
    return extend(found, {"token_strs": allow_null(list_of(TEXT))})


def detokenize_schema() -> Schema:
    """Return the answer of `/detokenize`."""
    return whole(prompt=TEXT)


def generation_schema() -> Schema:
    """Return the answer of `/generation`: prompt and completion."""
    return whole(text=TEXT)


def texts_schema() -> Schema:
    """Return the answer of `POST /` and of `/run/…`: the text of each choice."""
    return TEXTS


def _answer(kind: str, choice: Schema, *, is_whole: bool) -> Schema:
    of_kind: Schema = {"const": kind}
    head = {"id": TEXT, "object": of_kind, "created": COUNT, "model": TEXT}
    if is_whole:
        return whole(**head, choices=list_of(choice), usage=usage_schema())
    return extend(whole(**head, choices=list_of(choice)), {"usage": allow_null(usage_schema())})


def _text_choice(*, is_whole: bool) -> Schema:
    best: Schema = {"type": "object", "additionalProperties": NUMBER}
    logprobs = whole(
        tokens=list_of(TEXT),
        token_logprobs=list_of(allow_null(NUMBER)),
        top_logprobs=allow_null(list_of(allow_null(best))),
        text_offset=IDS,
    )
    reason: Schema = {"enum": [each for each in REASON["enum"] if each != "tool_calls"]}
    found = whole(
        text=TEXT,
        index=COUNT,
        logprobs=allow_null(logprobs),
        finish_reason=reason if is_whole else allow_null(reason),
    )
    return extend(found, AT_TIMES)


def _chat_choice(name: str, said: Schema, reason: Schema) -> Schema:
    token = {"token": TEXT, "logprob": NUMBER, "bytes": allow_null(IDS)}
    content = list_of(whole(**token, top_logprobs=list_of(whole(**token))))
    logprobs = extend(whole(content=content), {"refusal": NULL})
    found = whole(**{name: said}, index=COUNT, finish_reason=reason)
    return extend(found, AT_TIMES | {"logprobs": allow_null(logprobs)})


def _call() -> Schema:
    kind: Schema = {"const": "function"}
    return whole(id=TEXT, type=kind, function=whole(name=TEXT, arguments=TEXT))
