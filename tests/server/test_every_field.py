"""Fields that nobody acts on: over all routes, in batches and files, no wish is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field
from tests.server.batch_calls import (
    CHAT,
    COMPLETIONS,
    batch_line,
    content,
    create,
    wait_for_end,
)
from tests.server.running import Running, running
from tests.server.server_needs import needs_server
from tests.vector_models import save_bert

pytestmark = needs_server(engine={"max_rows": 64}, has_state=True)

QUESTION = "How do you go from the porch to the den?"
BODIES: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": QUESTION, "max_tokens": 2, "temperature": 0},
    "chat": {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 2,
        "seed": 5,
    },
    "responses": {"input": QUESTION, "max_output_tokens": 2, "seed": 5},
    "embeddings": {"input": "w1 w2"},
    "score": {"text_1": "w1", "text_2": ["w2", "w3"]},
    "rerank": {"query": "w1", "documents": ["w2", "w3"]},
    "classify": {"input": "w1 w2"},
}
WISH = {"a": ["wish"]}
RESPONSES = "/v1/responses"
URLS: dict[Endpoint, str] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
}
VECTORS: tuple[Endpoint, ...] = ("embeddings", "score", "rerank", "classify")


def refused(endpoint: Endpoint) -> list[Field]:
    """Return the refused fields, but for the question of the other endpoint."""
    found = [each for each in FIELDS[endpoint].values() if each.fate == "refused"]
    assert len(found) > 50, "the test looks at nothing"
    return [each for each in found if each.name not in ("prompt", "messages")]


def wish_of(each: Field) -> dict[str, Any]:
    """Return a request's field with a value that no field takes, of the type of a wish."""
    values: dict[type | None, object] = {list: [WISH], str: "wish"}
    return {each.name: values.get(each.only, WISH)}


def read_choices(answer: dict[str, Any]) -> Any:
    """Return the choices of an answer, or the texts of a response's items."""
    if "output" not in answer:
        return answer["choices"]
    return [item["content"] for item in answer["output"]]


@pytest.mark.parametrize("path", [*URLS.values(), "/generation", "/tokenize"])
def test_a_wish_is_refused_on_every_route(server: Running, path: str) -> None:
    """Some were answered as if they were not there, on one route or on all."""
    endpoints = {url: endpoint for endpoint, url in URLS.items()}
    endpoint = endpoints.get(path, "completions")
    own = "max_new_tokens" if path == "/generation" else ""
    for each in refused(endpoint):
        if each.name == own:
            continue
        for more in ({}, {"stream": True}) if path == URLS[endpoint] else ({},):
            answer = server.post(path, BODIES[endpoint] | more | wish_of(each))
            assert answer.status == 400, (each.name, answer.body)
            assert answer.error["code"] == "unsupported_parameter"
            assert answer.error["param"] == each.name


@pytest.mark.parametrize("endpoint", [*URLS])
def test_neutral_values_and_recorded_fields_change_nothing(
    server: Running, endpoint: Endpoint
) -> None:
    plain = read_choices(server.post(URLS[endpoint], BODIES[endpoint]).json)
    names = server.get("/v1/models").json["data"]
    for each in FIELDS[endpoint].values():
        values = [None, *each.neutral]
        if each.fate == "recorded":
            values.append(names[0]["id"] if each.name in ("model", "engine") else WISH)
        for value in values if each.fate != "acted on" else ():
            answer = server.post(URLS[endpoint], BODIES[endpoint] | {each.name: value})
            assert answer.status == 200, (each.name, value, answer.body)
            assert read_choices(answer.json) == plain, (each.name, value)


@pytest.mark.parametrize("endpoint", [*URLS])
def test_a_wish_is_refused_in_batches_and_files(
    server: Running, endpoint: Endpoint
) -> None:
    wishes = [wish_of(each) for each in refused(endpoint)]
    names = [name for wish in wishes for name in wish]
    lines = [
        json.dumps(
            {"custom_id": name, "method": "POST", "url": URLS[endpoint]}
            | {"body": BODIES[endpoint] | wish}
        ).encode()
        for name, wish in zip([*names, "good"], [*wishes, {}], strict=True)
    ]
    batch = wait_for_end(server, create(server, lines, endpoint=URLS[endpoint]))
    output = content(server, batch["output_file_id"])
    errors = content(server, batch["error_file_id"])
    assert batch["request_counts"] == {
        "total": len(lines),
        "completed": 1,
        "failed": len(names),
    }
    assert [row["custom_id"] for row in output] == ["good"]
    found = {
        row["custom_id"]: row["response"]["body"]["error"]["param"] for row in errors
    }
    assert found == {name: name for name in names}
    with fminfer.Engine(dtype="float32") as engine:
        records = list(engine.run([BODIES[endpoint] | wish for wish in wishes]))
    assert [record.error and record.error.param for record in records] == names


SPELLINGS: dict[str, object] = {
    **{
        "repetitionPenalty": 1.3,
        "topK": 5,
        "toolChoice": "required",
        "Stream": True,
        "n-predict": 3,
    },
    **{"guidedJson": {"type": "object"}, "responseJsonSchema": {"type": "object"}},
}


@pytest.mark.parametrize("endpoint", [*URLS])
def test_another_spelling_is_refused_wherever_it_is_sent(
    server: Running, endpoint: Endpoint
) -> None:
    """`repetitionPenalty` was answered as if it were not there, and `topK` was refused."""
    url = URLS[endpoint]
    body = BODIES[endpoint]
    for name, value in SPELLINGS.items():
        for more in ({}, {"stream": True}):
            answer = server.post(url, body | more | {name: value})
            assert (answer.status, answer.error["param"]) == (400, name)
    lines = [
        batch_line(name, url, **body, **{name: value})
        for name, value in SPELLINGS.items()
    ]
    batch = wait_for_end(server, create(server, lines, endpoint=url))
    assert batch["request_counts"]["failed"] == len(SPELLINGS)
    with fminfer.Engine(dtype="float32") as engine:
        requests = [body | {name: value} for name, value in SPELLINGS.items()]
        records = list(engine.run(requests))
    assert [record.error and record.error.param for record in records] == [*SPELLINGS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give a model that embeds, and one that scores."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("embedding", "scoring")}
    save_bert(found["embedding"])
    save_bert(found["scoring"], num_labels=1)
    return found


@pytest.mark.parametrize("endpoint", VECTORS)
def test_no_wish_for_vectors_is_ignored(
    endpoint: Endpoint, folders: dict[str, Path]
) -> None:
    """`input_type`, `top_k`, `rank_fields` and others were answered as if they were not
    there."""
    folder = folders["embedding" if endpoint == "embeddings" else "scoring"]
    body = BODIES[endpoint]
    path = f"/v1/{endpoint}"
    wishes = [
        each
        for each in refused(endpoint)
        if each.name not in ("query", "queries", "input")
    ]
    wishes = [each for each in wishes if not each.name.startswith("text_")]
    with fminfer.Engine(str(folder), dtype="float32") as engine:
        records = list(engine.run([body | wish_of(each) for each in wishes]))
        told = [record.error and record.error.param for record in records]
        assert told == [each.name for each in wishes]
        with running(engine) as server:
            plain = {**server.post(path, body).json, "id": "", "created": 0}
            for each in wishes:
                answer = server.post(path, body | wish_of(each))
                assert answer.status == 400, (each.name, answer.body)
                assert answer.error["code"] == "unsupported_parameter"
                assert answer.error["param"] == each.name
            for each in FIELDS[endpoint].values():
                values = () if each.fate == "acted on" else (None, *each.neutral)
                for value in values:
                    answer = server.post(path, body | {each.name: value})
                    assert answer.status == 200, (each.name, value, answer.body)
                    assert {**answer.json, "id": "", "created": 0} == plain, (
                        each.name,
                        value,
                    )


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/", {"inputs": QUESTION}, "options"),
        ("/", {"inputs": QUESTION}, "max_new_tokens"),
        ("/detokenize", {"tokens": [5, 6]}, "skip_special_tokens"),
        ("/detokenize", {"tokens": [5, 6]}, "suppress_tokens"),
    ],
)
def test_older_routes_refuse_what_they_do_not_read(
    server: Running, path: str, body: dict[str, Any], name: str
) -> None:
    """They left every other field out in silence."""
    assert server.post(path, body).status == 200
    assert server.post(path, body | {"user": "me", name: None}).status == 200
    answer = server.post(path, body | {name: WISH})
    assert answer.status == 400 and answer.error["param"] == name
