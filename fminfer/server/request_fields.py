"""The fields of completions requests, each written once: its limits, default and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fminfer.contract.chat import NEUTRAL as CHAT_NEUTRAL
from fminfer.contract.chat_messages import ROLES
from fminfer.contract.fields import INT64
from fminfer.contract.known_names import RECORDED, Neutral
from fminfer.contract.request import (
    MAX_BIAS,
    MAX_CANDIDATES,
    MAX_REPETITION,
    NEUTRAL,
    SamplingParams,
)
from fminfer.engine.intake import Limits
from fminfer.server.json_schema import (
    ANYTHING,
    NULL,
    SOME_TEXT,
    SWITCH,
    TEXT,
    TEXTS,
    Field,
    FieldTable,
    Schema,
    allow_null,
    integer,
    number,
    object_of,
)

MAX_NAME_CHARS = 256  # of a model's name: each chunk of a stream repeats it


def token_ids(limits: Limits, least: int = 0) -> Schema:
    """Return the schema of a list of the model's token ids, at least so many."""
    return {"type": "array", "items": integer(0, limits.vocab_size - 1), "minItems": least}


def prompt_field(limits: Limits) -> Field:
    """Return the prompts of a request."""
    ids = token_ids(limits, 1)
    return Field(
        "prompt",
        "One prompt or several, as text or as token ids. Ids are used as they are.",
        {"anyOf": [TEXT, TEXTS, ids, {"type": "array", "items": ids, "minItems": 1}]},
        is_required=True,
    )


def draw_fields(limits: Limits) -> tuple[Field, ...]:
    """Return what completions and chat have in common: how tokens are drawn, and where it ends."""
    param = partial(_param, limits.defaults)
    bias: Schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,19}$"},
        "additionalProperties": number(-MAX_BIAS, MAX_BIAS),
    }
    texts: Schema = {"type": "array", "items": SOME_TEXT}
    stop: Schema = {"anyOf": [SOME_TEXT, texts, {"enum": ["", [""]]}]}
    return (
        param("temperature", "0 takes the likeliest token.", number(0, 2)),
        param(
            "top_p",
            "Draw from the fewest tokens of that mass; 0 is greedy.",
            number(0, 1),
        ),
        param("top_k", "Draw from so many tokens; 0 or -1: from all.", integer(-1, INT64 - 1)),
        param(
            "min_p",
            "Drop tokens less likely than this part of the likeliest.",
            number(0, 1),
        ),
        param("n", "Choices for each prompt.", integer(1, MAX_CANDIDATES)),
        Field("stop", "Strings that end a choice, and are cut off.", stop),
        Field("stop_token_ids", "Token ids that end a choice, as EOS does.", token_ids(limits)),
        Field(
            "seed",
            "The same seed draws the same text. Without it, draws are random.",
            integer(-INT64, INT64 - 1),
        ),
        param(
            "frequency_penalty",
            "Taken off a token's logit each time it came.",
            number(-2, 2),
        ),
        param("presence_penalty", "Taken off the logit of a token that came.", number(-2, 2)),
        param(
            "repetition_penalty",
            "Logits of tokens that came, the prompt's included, are divided by it.",
            number(1 / MAX_REPETITION, MAX_REPETITION),
        ),
        Field("logit_bias", "Token ids, and what is added to their logits.", bias),
        param(
            "min_tokens",
            "Nothing ends a choice before it has so many tokens; max_tokens at most.",
            integer(0, limits.context_length - 1),
        ),
        param("ignore_eos", "Go on behind the end-of-text token.", SWITCH),
        param("include_stop_str_in_output", "Keep what ended the choice.", SWITCH),
        param("skip_special_tokens", "false: special tokens show in the text.", SWITCH),
        param("return_token_ids", "Add token ids of prompt and choice.", SWITCH),
    )


def completion_fields(limits: Limits) -> FieldTable:
    """Return the fields of `/v1/completions`."""
    param = partial(_param, limits.defaults)
    fields = (
        prompt_field(limits),
        param(
            "max_tokens",
            "Tokens to draw at most. Prompt and max_tokens must fit the context.",
            integer(0, limits.context_length - 1),
        ),
        *draw_fields(limits),
        Field(
            "best_of",
            "Draw so many, and return the n of the highest mean logprob. Default: n.",
            integer(0, MAX_CANDIDATES),
        ),
        Field(
            "logprobs",
            "Tell each token's logprob, and so many alternatives. Without it, none are told.",
            {"anyOf": [integer(0, limits.max_logprobs), {"enum": [False]}]},
        ),
        param(
            "echo",
            "Put the prompt first, in the text and in logprobs. 0 and 1 pass, too.",
            {"anyOf": [SWITCH, {"enum": [0, 1]}]},
        ),
        param("add_special_tokens", "false: no BOS before a prompt of text.", SWITCH),
        Field("messages", "Not supported.", NULL),
        *around_fields(NEUTRAL),
    )
    return FieldTable(
        "Complete prompts.",
        fields,
        {"prompt": "Question: How do you go", "max_tokens": 8, "temperature": 0},
    )


def _param(defaults: SamplingParams, name: str, meaning: str, schema: Schema) -> Field:
    """Return a field whose default is that of the server's sampling params."""
    return Field(name, meaning, schema, getattr(defaults, name))


def model_field() -> Field:
    """Return the name of the model that is asked for."""
    name: Schema = {"type": "string", "maxLength": MAX_NAME_CHARS}
    meaning = "The model's name; any passes without --check-model."
    return Field("model", meaning, {"anyOf": [name, {"not": TEXT}]})


def around_fields(neutral: Mapping[str, Neutral]) -> tuple[Field, ...]:
    """Return what says nothing of the text: how it is sent, for whom, and what nobody acts on.

    Args:
        neutral: fields that are accepted only at the values that change nothing.
    """
    values = {name: list(each.values) for name, each in neutral.items()}
    options: Schema = {
        "type": "object",
        "properties": {"include_usage": allow_null(SWITCH)},
    }
    return (
        Field("stream", "Send the tokens as they come, as server-sent events.", SWITCH, False),
        Field("stream_options", "include_usage: the last event tells the usage.", options),
        model_field(),
        Field("engine", "An older name of model.", ANYTHING),
        *(
            Field(name, "Not supported.", {"enum": same} if same else NULL)
            for name, same in values.items()
            if not name.startswith("stream")
        ),
        *(
            Field(name, "Changes no answer.", ANYTHING)
            for name in sorted(RECORDED - {"model", "engine"})
        ),
    )


def chat_fields(limits: Limits) -> FieldTable:
    """Return the fields of `/v1/chat/completions`."""
    most = integer(0, limits.context_length - 1)
    fields = (
        Field(
            "messages",
            "The conversation so far. The model's chat template makes a prompt of it.",
            {"type": "array", "items": _message(), "minItems": 1},
            is_required=True,
        ),
        Field("max_tokens", "Tokens to draw at most. Default: the rest of the context.", most),
        Field("max_completion_tokens", "The newer name of max_tokens.", most),
        *draw_fields(limits),
        Field("logprobs", "Tell the logprob of each token.", SWITCH, False),
        Field(
            "top_logprobs",
            "How many alternatives of each token are told; it needs logprobs.",
            integer(0, limits.max_logprobs),
            0,
        ),
        Field(
            "tools",
            "Functions that the model may call. The template shows them to it.",
            {"type": "array", "items": _tool()},
        ),
        Field("tool_choice", '"none" hides the tools.', {"enum": ["auto", "none"]}),
        Field("parallel_tool_calls", "false is refused if there are tools.", SWITCH, True),
        Field("chat_template_kwargs", "Further variables of the template.", {"type": "object"}),
        Field("reasoning_effort", "A variable of some templates.", TEXT),
        Field("add_generation_prompt", "Begin an answer behind the messages.", SWITCH, True),
        Field("continue_final_message", "Go on with the last message.", SWITCH, False),
        *around_fields(CHAT_NEUTRAL),
    )
    example = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    return FieldTable("Answer a conversation.", fields, example)


def _message() -> Schema:
    part = object_of({"type": {"const": "text"}, "text": TEXT}, "type", "text")
    content: Schema = {"anyOf": [TEXT, {"type": "array", "items": part, "minItems": 1}]}
    arguments: Schema = {
        "anyOf": [{"type": "object"}, NULL, TEXT],
        "description": "An object, or a string that holds one as JSON.",
    }
    function = object_of({"name": TEXT, "arguments": arguments}, "name")
    calls: Schema = {"type": "array", "items": object_of({"function": function}, "function")}
    old: Schema = {"function_call": NULL, "audio": NULL}
    others = [role for role in ROLES if role != "assistant"]
    spoken = object_of({"role": {"enum": others}, "content": content} | old, "role", "content")
    answered = object_of(
        {"role": {"const": "assistant"}, "content": allow_null(content)}
        | {"tool_calls": allow_null(calls)}
        | old,
        "role",
    )
    has_content = {"properties": {"content": content}, "required": ["content"]}
    has_calls = {
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    }
    return {"anyOf": [spoken, answered | {"anyOf": [has_content, has_calls]}]}


def _tool() -> Schema:
    function = {"name": SOME_TEXT, "description": {}, "parameters": {}, "strict": {}}
    return object_of(
        {"type": {"const": "function"}, "function": object_of(function, "name")}, "type", "function"
    )
