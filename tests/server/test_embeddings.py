"""Vectors, scores and classes over HTTP, and OpenAI's and LiteLLM's clients, unmodified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator

from fminfer.server.batches import batch_request
from tests.server.running import Running, until
from tests.server.server_needs import needs_server
from tests.vector_models import mean_vectors, save_bert

TEXTS = ["w1 w2", "w3", "w4 w5 w6"]


pytestmark = needs_server(model="embedding_model", has_state=True, api_keys=("k1",))
SCORES = needs_server(model="scoring_model")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Give the folder of a model that embeds, and what transformers says of TEXTS."""
    folder = tmp_path_factory.mktemp("bert")
    return folder, mean_vectors(*save_bert(folder), TEXTS)


@pytest.fixture(scope="module")
def embedding_model(bert: tuple[Path, Any]) -> Path:
    return bert[0]


@pytest.fixture(scope="module")
def expected(bert: tuple[Path, Any]) -> Any:
    return bert[1]


@pytest.fixture(scope="module")
def scoring_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    save_bert(folder, num_labels=1)
    return folder


def connect(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="k1", max_retries=0)


def test_openais_client(server: Running, expected: Any) -> None:
    """It asks for base64, and turns that into numbers itself."""
    with connect(server) as client:
        found = client.embeddings.create(model="mine", input=TEXTS)
        np.testing.assert_allclose(
            [each.embedding for each in found.data], expected, atol=1e-4
        )
        assert found.model == "mine" and found.usage.prompt_tokens == 12
        plain = client.embeddings.create(
            model="mine", input=TEXTS[0], encoding_format="float"
        )
        first = found.data[0].embedding
        assert np.float32(plain.data[0].embedding).tolist() == first
        short = client.embeddings.create(model="mine", input=TEXTS[0], dimensions=4)
        assert short.data[0].embedding == first[:4]
        ids = client.embeddings.create(model="mine", input=[[2, 6, 7, 3]])
        assert ids.data[0].embedding == first
        with pytest.raises(
            openai.BadRequestError, match="Ask /v1/embeddings"
        ) as caught:
            client.completions.create(model="mine", prompt="w1")
        assert caught.value.status_code == 400


def test_litellms_vectors(litellm: Any, server: Running, expected: Any) -> None:
    to_server = {"api_base": f"{server.url}/v1", "api_key": "k1"}
    for provider in ("openai", "hosted_vllm"):
        found = litellm.embedding(f"{provider}/mine", input=TEXTS, **to_server)
        told = [each["embedding"] for each in found.data]
        np.testing.assert_allclose(told, expected, atol=1e-4)


@SCORES
def test_litellms_ranking(litellm: Any, server: Running) -> None:
    direct = server.post("/v1/rerank", {"query": "w1", "documents": TEXTS}).json
    found = litellm.rerank(
        "hosted_vllm/mine", query="w1", documents=TEXTS, top_n=2, api_base=server.url
    )
    assert [each["index"] for each in found.results] == [
        each["index"] for each in direct["results"][:2]
    ]


@SCORES
@pytest.mark.parametrize(
    "path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"]
)
def test_answers_are_what_the_document_says(server: Running, path: str) -> None:
    asked = {"query": "w1", "documents": TEXTS}
    if path.endswith("score"):
        asked = {"text_1": "w1", "text_2": TEXTS}
    found = server.post(path, asked)
    assert found.status == 200
    operation = server.get("/openapi.json").json["paths"][path]["post"]
    told = operation["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator(told).validate(found.json)
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator(body).validate(asked)
    assert len(found.json.get("results") or found.json["data"]) == 3


@SCORES
def test_classes(server: Running) -> None:
    found = server.post("/classify", {"input": TEXTS}).json
    assert [each["num_classes"] for each in found["data"]] == [1, 1, 1]
    assert (
        server.post("/v1/embeddings", {"input": "w1"})
        .error["message"]
        .endswith("/v1/classify")
    )


def test_a_batch(
    server: Running, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes at most so many inputs, as OpenAI's; a line beyond them is refused by itself."""
    assert batch_request.MAX_INPUTS == 50_000
    monkeypatch.setattr(batch_request, "MAX_INPUTS", 50)
    bodies: list[Any] = [{"input": TEXTS}, {"input": ["w1"] * 16}]
    bodies += 4 * [{"input": ["w2"] * 12}]
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": body,
        }
        for number, body in enumerate(bodies)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with connect(server) as client:
        file = client.files.create(file=path.open("rb"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="Ask /v1/embeddings"):
            client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        until(
            lambda: client.batches.retrieve(batch.id).status == "completed",
            "it is over",
        )
        over = client.batches.retrieve(batch.id)
        assert over.output_file_id is not None and over.error_file_id is not None
        answers = client.files.content(over.output_file_id).text.splitlines()
        errors = client.files.content(over.error_file_id).text.splitlines()
    data = json.loads(answers[0])["response"]["body"]["data"]
    np.testing.assert_allclose(
        [each["embedding"] for each in data], expected, atol=1e-4
    )
    assert len(answers) == 4 and len(errors) == 2 and "more than 50 inputs" in errors[0]


def test_other_routes_of_such_a_model(server: Running) -> None:
    keys = {"Authorization": "Bearer k1"}
    assert server.post("/tokenize", {"prompt": "w1 w2"}, headers=keys).json[
        "tokens"
    ] == [
        2,
        6,
        7,
        3,
    ]
    assert server.get("/stats", headers=keys).json["generation_tokens_per_s"] == 0
    metrics = server.get("/metrics", headers=keys).body.decode()
    assert "vllm:prompt_tokens_total" in metrics
    wrong = server.post(
        "/v1/embeddings", {"input": "w1", "dimensions": 99}, headers=keys
    )
    assert wrong.status == 400 and wrong.error["param"] == "dimensions"
