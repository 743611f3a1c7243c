"""Whatever the document at /openapi.json allows, and what it does not: nothing is a 500."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.conftest import IS_ALL
from tests.server.running import Running
from tests.server.server_needs import needs_server

# Few tokens of context: random requests ask for as many as they may.
pytestmark = needs_server(engine={"max_model_len": 64, "max_rows": 16}, has_state=True)


@pytest.fixture
def document(server: Running) -> Any:
    return load_document(f"{server.url}/openapi.json")


@cache
def load_document(url: str) -> Any:
    return schemathesis.openapi.from_url(url)


ROUTES = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    "POST /detokenize",
    "POST /generation",
    "POST /",
    "GET /run/{text}",
    "GET /run_{name}/{text}",
    "GET /v1/models/{model}",
    "GET /v1/models",
    "GET /metrics",
    "GET /version",
    "GET /stats",
    "GET /health",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "DELETE /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_request_is_a_500(document: Any, route: str, mode: str) -> None:
    """Neither one that the document allows nor one that it does not."""
    method, path = route.split()
    operation = document[path][method]
    if mode == "negative" and not operation.body:
        pytest.skip("it has nothing that could be wrong")

    @settings(
        max_examples=60 if IS_ALL else 10,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def check(case: Any) -> None:
        case.call_and_validate(checks=[not_a_server_error], timeout=30)

    check()


def test_the_document_has_every_route_and_no_error_of_fastapis(server: Running) -> None:
    document = server.get("/openapi.json").json
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/stats",
        "/metrics",
        "/version",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1/classify",
        "/score",
        "/rerank",
        "/v2/rerank",
        "/classify",
        "/generation",
        "/run/{text}",
        "/run_{name}/{text}",
        "/",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
    } == set(document["paths"])
    for path in (each for each in document["paths"] if "{" not in each and each != "/"):
        assert "it is at /" in server.get(f"/elsewhere{path}").error["message"], (
            "paths are known"
        )
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in str(document)
