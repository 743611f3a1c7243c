"""The OpenAPI document's bodies: they say what requests are accepted, and what answers hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import product
from math import inf, nextafter
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import fminfer
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from fminfer.contract.request import RequestParams
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Finished
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.server import batch_routes, compat, model_routes, schemas
from tests.server.server_needs import needs_server
from tests.streams import events_of

pytestmark = needs_server(engine={"max_rows": 128})

Fields = dict[str, Any]
OF_THE_SERVER = ("stream", "stream_options")  # which it reads itself
PROMPT = {"prompt": [5]}
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}
INPUT = {"input": "Hello"}
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    0.5,
    2.0,
    128,
    129,
    -2.5,
    2**63,
    -(2**63),
    10**30,
    "",
    "x",
    "auto",
    "none",
    "required",
    "text",
    [],
    [""],
    ["a"],
    ["a", ""],
    ["a", 5],
    [0],
    [0, 0.5],
    [True],
    [-1],
    [10**6],
    [[]],
    [[1]],
    [[1], []],
    [[1], ["a"]],
    [None],
    ["text"],
    [{"type": "text"}],
    {},
    {"a": 1},
    {"5": 100},
    {"5": 101},
    {"5": None},
    {"5": True},
    {"type": "text"},
]


@pytest.fixture
def limits(engine: fminfer.Engine) -> RequestLimits:
    return engine.intake.limits


def refusal(
    engine: fminfer.Engine,
    sent: Fields,
    *,
    is_chat: bool = False,
    url: Endpoint | None = None,
) -> RequestError | None:
    """Return why an engine refuses a request; None: it takes it."""
    sent = {name: value for name, value in sent.items() if name not in OF_THE_SERVER}
    endpoint = url or ("chat" if is_chat else "completions")
    try:
        engine.cancel(engine.add(sent, endpoint=endpoint))
    except RequestError as error:
        return error
    return None


# What no schema of one field says: what is compiled, and what other fields or the model lack.
LATER = (
    "that answers are to follow cannot be had",
    "there are no tools",
    "the form of this model's calls is not known",
    "the tags of this model's thoughts are not known",
)


def is_read(error: RequestError | None) -> bool:
    """Tell whether a field has a value that it may have."""
    return error is None or any(text in error.message for text in LATER)


def tables() -> dict[str, tuple[Field, ...]]:
    return {
        "text": (*FIELDS["completions"].values(),),
        "chat": (*FIELDS["chat"].values(),),
    }


def ranges(limits: RequestLimits) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield kind, field, lowest and highest value, and the step to a value beyond; 0: any."""
    for kind, fields in tables().items():
        for each in fields:
            found = schemas.make_field_schema(each, limits)
            for schema in (found, *found.get("anyOf", ())):
                if "minimum" in schema:
                    step = 1 if "integer" in schema["type"] else 0
                    yield kind, each.name, schema["minimum"], schema["maximum"], step


def test_every_default_changes_nothing(
    engine: fminfer.Engine, limits: RequestLimits
) -> None:
    names = {each.name for each in fields_of(RequestParams)}
    for kind, fields in tables().items():
        needed: Fields = PROMPT if kind == "text" else MESSAGES
        plain = engine.intake.parse(needed)
        for each in fields:
            if each.is_required or each.name in OF_THE_SERVER:
                continue
            assert engine.intake.parse(needed | {each.name: None}) == plain
            default = schemas.make_field_schema(each, limits).get("default")
            if default is not None:
                assert engine.intake.parse(needed | {each.name: default}) == plain
            if default is not None and each.name in names and kind == "text":
                assert getattr(plain.params, each.name) == default


def test_every_limit_is_the_real_one(
    engine: fminfer.Engine, limits: RequestLimits
) -> None:
    found = list(ranges(limits))
    assert len(found) > 25, "the test looks at nothing"
    for kind, name, low, high, step in found:
        is_chat = kind == "chat"

        def refuse(
            value: float, name: str = name, is_chat: bool = is_chat
        ) -> RequestError | None:
            sent: Fields = (MESSAGES if is_chat else PROMPT) | {name: value}
            if name == "min_tokens":
                sent["max_tokens"] = max(1, value)
            if name == "top_logprobs":
                sent["logprobs"] = True
            return refusal(engine, sent, is_chat=is_chat)

        assert is_read(refuse(low)), (kind, name, low)
        # A chat's prompt takes the place of some tokens.
        if not (is_chat and high == limits.context_length - 1):
            assert is_read(refuse(high)), (kind, name, high)
        for beyond in (
            (low - step, high + step)
            if step
            else (nextafter(low, -inf), nextafter(high, inf))
        ):
            if name in ("top_k", "thinking_token_budget") and beyond == -1:
                continue  # it means off, or any number
            error = refuse(beyond)
            assert error is not None, (kind, name, beyond)
            assert error.param in (name, "max_tokens", "prompt"), (kind, name, error)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_what_the_schema_allows_is_accepted_and_nothing_else(
    engine: fminfer.Engine, limits: RequestLimits, kind: str
) -> None:
    is_chat = kind == "chat"
    schema = schemas.make_request_schema("chat" if is_chat else "completions", limits)
    valid = Draft202012Validator(schema)
    wrong = []
    for name, value in product(schema["properties"], VALUES):
        if name in OF_THE_SERVER:
            continue
        sent = (MESSAGES if is_chat else PROMPT) | {name: value}
        if name == "min_tokens":
            sent["max_tokens"] = 200
        if name == "top_logprobs":
            sent["logprobs"] = True
        if name == "tool_choice":
            sent["tools"] = [{"type": "function", "function": {"name": "look"}}]
        if name in ("continue_final_message", "messages", "prompt") and is_chat:
            sent["add_generation_prompt"] = None
        error = refusal(engine, sent, is_chat=is_chat)
        if valid.is_valid(sent) is not is_read(error):
            wrong.append(f"{name}: {value!r}: {error}")
    assert not wrong, "\n".join(wrong)


def test_what_the_schema_of_responses_allows_is_accepted_and_nothing_else(
    engine: fminfer.Engine, limits: RequestLimits
) -> None:
    valid = Draft202012Validator(schemas.make_request_schema("responses", limits))
    logprobs = {"include": ["message.output_text.logprobs"]}
    values = [
        *VALUES,
        [{"role": "user", "content": "x"}],
        ["reasoning.encrypted_content"],
    ]
    values += [{"effort": "low", "summary": "auto"}, {"verbosity": "low"}]
    values += [{"format": {"type": kind}} for kind in ("text", "json_schema", "xml")]
    wrong = []
    for name, value in product(schemas.FIELDS["responses"], values):
        sent = INPUT | (logprobs if name == "top_logprobs" else {}) | {name: value}
        if name == "min_tokens":
            sent["max_output_tokens"] = 200
        error = refusal(engine, sent, url="responses")
        if name not in OF_THE_SERVER and valid.is_valid(sent) is not is_read(error):
            wrong.append(f"{name}: {value!r}: {error}")
    assert not wrong, "\n".join(wrong)


TEXT_PART = {"type": "text", "text": "Hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": role, "content": content} | more]
        for role in (
            "system",
            "developer",
            "user",
            "assistant",
            "tool",
            "function",
            None,
            5,
        )
        for content in (
            "x",
            "",
            None,
            [],
            [TEXT_PART],
            [TEXT_PART, {"type": "image_url"}],
            ["x"],
        )
        for more in (
            {},
            {"tool_calls": [CALL]},
            {"tool_calls": []},
            {"tool_calls": [{}]},
        )
    ]
    + [
        [{"role": "assistant", "tool_calls": [call]}]
        for call in (
            CALL,
            {"function": {"name": "look"}},
            {"function": {"name": 5}},
            {"function": {"name": "look", "arguments": {"a": 1}}},
            {"function": {"name": "look", "arguments": [1]}},
            {"function": None},
        )
    ]
    + [
        [{"role": "user"}],
        [{}],
        [[]],
        [{"role": "user", "content": "x", "audio": {"id": "1"}}],
    ],
    ids=str,
)
def test_messages(
    engine: fminfer.Engine, limits: RequestLimits, messages: list[Any]
) -> None:
    # which the demo model's template asks for
    question = {"role": "user", "content": "x"}
    sent = {"messages": [question, *messages]}
    valid = Draft202012Validator(schemas.make_request_schema("chat", limits))
    error = refusal(engine, sent, is_chat=True)
    # Calls of other roles than the assistant's are the template's affair.
    assert valid.is_valid(sent) is (error is None), error


@pytest.mark.parametrize(
    "tool",
    [
        TOOL,
        {
            "type": "function",
            "function": {"name": "look", "strict": None, "description": None},
        },
        {},
        5,
        {"type": "code"},
        {"type": "function"},
        {"type": "function", "function": {}},
        *({"type": "function", "function": {"name": name}} for name in ("", None, 5)),
    ],
    ids=str,
)
def test_tools(engine: fminfer.Engine, limits: RequestLimits, tool: Any) -> None:
    sent = MESSAGES | {"tools": [tool]}
    valid = Draft202012Validator(schemas.make_request_schema("chat", limits))
    error = refusal(engine, sent, is_chat=True)
    assert valid.is_valid(sent) is (error is None), error


def check_answer(schema: Fields, answer: Any) -> None:
    """See that an answer is as its schema says, and that each of its keys is told."""
    Draft202012Validator(schema).validate(answer)
    _check_keys(schema, answer, "")


def _check_keys(schema: Fields, value: Any, where: str) -> None:
    for each in schema.get("anyOf", [schema]):
        properties = each.get("properties")
        if isinstance(value, dict) and properties is not None:
            assert value.keys() <= properties.keys(), where
            for name, item in value.items():
                _check_keys(properties[name], item, f"{where}.{name}")
        for item in value if isinstance(value, list) else []:
            _check_keys(each["items"], item, f"{where}[]")


def whole(kind: str, finished: Finished) -> Fields:
    head = {"id": "cmpl-1", "object": kind, "created": 1, "model": "demo"}
    return head | {"choices": finished.choices, "usage": finished.usage}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 4},
        {"max_tokens": 3, "logprobs": 2, "n": 2, "return_token_ids": True},
        {"max_tokens": 0, "echo": True, "logprobs": 0},
        {
            "max_tokens": 5,
            "stop_token_ids": [*range(1, 400)],
            "echo": True,
            "logprobs": 1,
        },
    ],
)
def test_answers(engine: fminfer.Engine, fields: Fields) -> None:
    engine.add({"prompt": "Question: How do you go"} | fields)
    finished = events_of(engine)[-1]
    assert isinstance(finished, Finished)
    check_answer(schemas.COMPLETION, whole("text_completion", finished))


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 4}, {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2}],
)
def test_chat_answers(engine: fminfer.Engine, fields: Fields) -> None:
    engine.add(MESSAGES | fields)
    finished = events_of(engine)[-1]
    assert isinstance(finished, Finished)
    answer = whole("chat.completion", finished)
    check_answer(schemas.CHAT_COMPLETION, answer)
    answer["choices"][0]["message"] |= {"content": None, "tool_calls": [CALL]}
    answer["choices"][0]["finish_reason"] = "tool_calls"
    check_answer(schemas.CHAT_COMPLETION, answer)
    del answer["usage"]
    assert not Draft202012Validator(schemas.CHAT_COMPLETION).is_valid(answer)


def test_requests_of_older_servers(limits: RequestLimits) -> None:
    generation = Draft202012Validator(compat.make_generation_request_schema(limits))
    assert generation.is_valid(
        {"prompt": "x", "max_new_tokens": 5, "top_k": 3, "n": None}
    )
    for wrong in (
        {},
        {"prompt": ["x"]},
        {"prompt": "x", "n": 1},
        {"prompt": "x", "top_p": 2},
    ):
        assert not generation.is_valid(wrong), wrong
    properties = compat.make_generation_request_schema(limits)["properties"]
    assert properties["max_new_tokens"]["default"] == 64
    assert "default" not in properties["temperature"], (
        "without any of the three it is greedy"
    )
    latency = Draft202012Validator(compat.make_latency_request_schema(limits))
    for sent in (
        {"inputs": "x"},
        {"inputs": ["x"], "parameters": None},
        {"inputs": "x", "parameters": {"do_sample": False, "max_new_tokens": 3}},
    ):
        assert latency.is_valid(sent), sent
    for parameters in (
        {"best_of": 2},
        {"num_return_sequences": 0},
        {"do_sample": 1},
        [],
    ):
        assert not latency.is_valid({"inputs": "x", "parameters": parameters}), (
            parameters
        )


def test_requests_to_the_tokenizer(limits: RequestLimits) -> None:
    tokenize = Draft202012Validator(model_routes.make_tokenize_request_schema(limits))
    assert tokenize.is_valid({"prompt": "x", "return_token_strs": True})
    assert tokenize.is_valid(MESSAGES) and not tokenize.is_valid({"model": "demo"})
    detokenize = Draft202012Validator(
        model_routes.make_detokenize_request_schema(limits)
    )
    assert detokenize.is_valid({"tokens": []})
    assert not detokenize.is_valid({"tokens": [limits.vocab_size]})


def test_a_strict_server_has_no_other_fields(limits: RequestLimits) -> None:
    endpoints: dict[Endpoint, Fields] = {"completions": PROMPT, "chat": MESSAGES}
    for endpoint, sent in endpoints.items():
        for is_strict in (False, True):
            some = replace(limits, config=EngineConfig(strict=is_strict))
            valid = Draft202012Validator(schemas.make_request_schema(endpoint, some))
            assert valid.is_valid(sent | {"max_tokens": 3})
            assert valid.is_valid(sent | {"max_token": 3}) is not is_strict


def test_the_document_is_right_and_its_examples_too(limits: RequestLimits) -> None:
    requests = [
        *(
            schemas.make_request_schema(endpoint, limits)
            for endpoint in schemas.ENDPOINT_DOCS
        ),
        compat.make_generation_request_schema(limits),
        compat.make_latency_request_schema(limits),
        model_routes.make_detokenize_request_schema(limits),
        *model_routes.make_tokenize_request_schema(limits)["anyOf"],
    ]
    for schema in requests:
        Draft202012Validator.check_schema(schema)
        (example,) = schema["examples"]
        Draft202012Validator(schema).validate(example)
    answers = [
        *(each.answer for each in schemas.ENDPOINT_DOCS.values()),
        *(
            each.chunk
            for each in schemas.ENDPOINT_DOCS.values()
            if each.chunk is not None
        ),
        schemas.ERROR,
        model_routes.TOKENIZED,
        model_routes.STATS,
        batch_routes.FILE,
        batch_routes.DELETED,
        batch_routes.BATCH,
        batch_routes.UPLOAD,
    ]
    assert len(answers) > 10
    for answer in answers:
        Draft202012Validator.check_schema(answer)


def test_what_a_route_is_given(limits: RequestLimits) -> None:
    about = schemas.ENDPOINT_DOCS["completions"]
    body = schemas.make_request_schema("completions", limits)
    found = schemas.document_route(
        about.answer, "The choices.", body=body, chunk=about.chunk
    )
    content = found["openapi_extra"]["requestBody"]["content"]
    assert content["application/json"]["schema"]["required"] == ["prompt"]
    told = found["responses"]
    assert told.keys() == {200, 403, *schemas.OF_ANSWERS}
    assert set(told[200]["content"]) == {"application/json", "text/event-stream"}
    assert set(schemas.document_route({}, "x", errors=[401])["responses"]) == {
        200,
        401,
        403,
    }
