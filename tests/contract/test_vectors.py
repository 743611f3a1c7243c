"""Requests for vectors: which model answers which endpoint, what fields say, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fminfer.contract.endpoints import Endpoint
from fminfer.contract.request import Request, VectorSpec
from fminfer.contract.vectors import check_endpoint, parse_vectors
from fminfer.core.errors import RequestError

EMBEDDER = VectorSpec(8, prompts={"query": "Q: ", "none": ""}, default_prompt="query")
RANKER = VectorSpec(1, is_scored=True)
CLASSIFIER = VectorSpec(3, is_scored=True)
PAIR: dict[str, Any] = {"text_1": "a", "text_2": "b"}
RANKED: dict[str, Any] = {"query": "a", "documents": ["b", "c"]}


def parse(endpoint: Endpoint, facts: VectorSpec = EMBEDDER, **fields: Any) -> Request:
    return parse_vectors(fields, endpoint, facts, is_strict=False)


def refused(
    endpoint: Endpoint, facts: VectorSpec = EMBEDDER, **fields: Any
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(endpoint, facts, **fields)
    return caught.value


@pytest.mark.parametrize("facts", [None, EMBEDDER, RANKER, CLASSIFIER])
def test_a_model_answers_its_own_endpoints_and_names_them_for_others(
    facts: VectorSpec | None,
) -> None:
    drawn = {"completions": "/v1/completions", "chat": "/v1/completions"}
    compared = {"score": "/v1/score", "rerank": "/v1/rerank"}
    served: dict[str, str] = drawn
    if facts is not None:
        served = {"embeddings": "/v1/embeddings"} | compared
        if facts.is_scored:
            served = {"classify": "/v1/classify"} | (
                compared if facts.size == 1 else {}
            )
    endpoints: list[Endpoint] = [
        "completions",
        "chat",
        "embeddings",
        "score",
        "rerank",
        "classify",
    ]
    for endpoint in endpoints:
        if endpoint in served:
            check_endpoint(endpoint, facts)
            continue
        with pytest.raises(
            RequestError, match=r"needs a model that \w+.* this one .*Ask "
        ) as caught:
            check_endpoint(endpoint, facts)
        assert caught.value.code == "unsupported_parameter"
        assert any(url in caught.value.message for url in served.values())


def test_texts_and_names_of_each_endpoint() -> None:
    request = parse("embeddings", input=["a", "b"])
    assert (request.prompts, request.vectors.names) == (["a", "b"], ("input", ""))  # type: ignore[union-attr]
    for fields, names in [
        (PAIR, ("text_1", "text_2")),
        ({"queries": "a", "documents": "b"}, ("queries", "documents")),
    ]:
        request = parse("score", **fields)
        wish = request.vectors
        assert wish is not None and wish.names == names
        assert (request.prompts, wish.seconds, request.endpoint) == (
            ["a"],
            ("b",),
            "score",
        )
    wish = parse("rerank", RANKER, query="a", documents=["b", {"text": "c"}]).vectors
    assert (
        wish is not None
        and wish.seconds == ("b", "c")
        and wish.names == ("query", "documents")
    )
    assert wish.returns_documents and wish.top_n is None and not wish.is_raw
    assert request.params.max_tokens == 0 and request.params.truncation_side == "right"


def test_a_model_without_settings_of_its_own() -> None:
    facts = VectorSpec(8)
    assert (facts.odds, facts.similarity, facts.labels) == ("softmax", "cosine", ())
    assert not facts.is_normalized and not facts.is_scored and not facts.has_types
    assert not parse("embeddings", facts, input="a").params.is_by_chance


def test_fields_say_what_is_made_of_vectors() -> None:
    fields = {"dimensions": 4, "normalize": True, "encoding_format": "base64"}
    wish = parse("embeddings", input="a", **fields).vectors
    assert wish is not None and (wish.dimensions, wish.is_normalized) == (4, True)
    assert wish.is_base64
    wish = parse("embeddings", input="a", dimensions=8).vectors
    assert wish is not None and wish.dimensions is None, "all of them"
    assert not wish.is_normalized and not wish.is_base64
    fields = {"top_n": 1, "return_documents": False, "use_activation": False}
    wish = parse("rerank", RANKER, **RANKED, **fields).vectors
    assert wish is not None and (wish.top_n, wish.returns_documents, wish.is_raw) == (
        1,
        False,
        True,
    )
    assert not parse("score", RANKER, **PAIR, use_activation=True).vectors.is_raw  # type: ignore[union-attr]
    assert (
        parse(
            "embeddings", input="a", truncate_prompt_tokens=3
        ).params.truncate_prompt_tokens
        == 3
    )
    assert "no_such" in str(parse("embeddings", input="a", no_such=1).warnings)


@pytest.mark.parametrize(
    ("name", "prefix"), [(None, "Q: "), ("query", "Q: "), ("none", "")], ids=str
)
def test_a_models_prompt_stands_before_texts(name: str | None, prefix: str) -> None:
    wish = parse("embeddings", input="a", prompt_name=name).vectors
    assert wish is not None and wish.prefix == prefix
    assert parse("embeddings", VectorSpec(8), input="a").vectors.prefix == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("endpoint", "facts", "fields", "code", "param", "told"),
    [
        ("embeddings", EMBEDDER, {}, "missing_prompt", "input", "absent"),
        ("rerank", RANKER, {"documents": ["b"]}, "missing_prompt", "query", "absent"),
        (
            "rerank",
            RANKER,
            {"query": "a", "documents": []},
            "out_of_range",
            "documents",
            "empty",
        ),
        (
            "rerank",
            RANKER,
            RANKED | {"query": 5},
            "invalid_type",
            "query",
            "query is 5",
        ),
        (
            "rerank",
            RANKER,
            RANKED | {"documents": ["b", 5]},
            "invalid_type",
            "documents",
            "strings",
        ),
        (
            "rerank",
            RANKER,
            RANKED | {"query": ["a", "b"]},
            "out_of_range",
            "query",
            "2 texts",
        ),
        (
            "score",
            RANKER,
            PAIR | {"queries": "c"},
            "unsupported_parameter",
            "queries",
            "the same",
        ),
        (
            "score",
            RANKER,
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "out_of_range",
            "text_1",
            "or as many",
        ),
        (
            "rerank",
            RANKER,
            RANKED | {"documents": [{"text": "b", "image": "x"}]},
            "unsupported_parameter",
            "documents.image",
            "only text is read",
        ),
        (
            "embeddings",
            EMBEDDER,
            {"dimensions": 9},
            "out_of_range",
            "dimensions",
            "have 8 numbers",
        ),
        (
            "embeddings",
            VectorSpec(8, is_normalized=True),
            {"normalize": False},
            "unsupported_parameter",
            "normalize",
            "length 1",
        ),
        (
            "score",
            EMBEDDER,
            PAIR | {"use_activation": False},
            "unsupported_parameter",
            "use_activation",
            "no logits",
        ),
        (
            "embeddings",
            EMBEDDER,
            {"prompt_name": "x"},
            "out_of_range",
            "prompt_name",
            'is "x"; this model has "query", "none"',
        ),
        (
            "embeddings",
            VectorSpec(8),
            {"prompt_name": "x"},
            "out_of_range",
            "prompt_name",
            "this model has none",
        ),
        (
            "embeddings",
            EMBEDDER,
            {"input": [[1, 2]], "prompt_name": "query"},
            "unsupported_parameter",
            "prompt_name",
            "token ids",
        ),
    ],
    ids=lambda each: str(each)[:40],
)
def test_each_refusal_names_its_field(
    endpoint: Endpoint,
    facts: VectorSpec,
    fields: Any,
    code: str,
    param: str,
    told: str,
) -> None:
    if endpoint == "embeddings" and fields:
        fields = {"input": "a"} | fields
    error = refused(endpoint, facts, **fields)
    assert (error.code, error.param) == (code, param), error.message
    assert told in error.message
