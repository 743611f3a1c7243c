"""Requests to models that give vectors: embeddings, scores of pairs, rankings, classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fminfer.contract.endpoints import DRAWING_ENDPOINTS, URL_OF, Endpoint
from fminfer.contract.fields import describe_value, wrong_type_error
from fminfer.contract.prompts import (
    MEDIA,
    check_choices,
    check_text,
    check_unsupported_keys,
    parse_prompts,
)
from fminfer.contract.read_fields import parse_fields
from fminfer.contract.request import Request, RequestParams, VectorSpec, VectorWish
from fminfer.core.errors import RequestError

# Of requests that draw nothing. A text that is too long keeps its beginning.
POOLED = RequestParams(max_tokens=0, temperature=0.0, truncation_side="right")
_PARAMS = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
_DOCUMENT_REMEDIES = MEDIA | {"audio": MEDIA["images"]}
_ONE_OR_MANY = "a string, or a list of strings"


def parse_vectors(
    fields: Mapping[str, Any],
    endpoint: Endpoint,
    spec: VectorSpec,
    *,
    is_strict: bool,
) -> Request:
    """Check one request for vectors, or for what is made of them."""
    check_endpoint(endpoint, spec)
    values, warnings = parse_fields(
        fields, endpoint, max_logprobs=0, is_strict=is_strict
    )
    firsts, seconds, names = _parse_texts(fields, endpoint)
    wish = VectorWish(
        spec,
        prefix=_parse_prompt_name(values.get("prompt_name"), firsts, spec),
        dimensions=_parse_dimensions(values.get("dimensions"), spec),
        is_normalized=_parse_normalize(values.get("normalize"), spec),
        is_base64=values.get("encoding_format") == "base64",
        is_raw=_parse_use_activation(values.get("use_activation"), spec),
        seconds=tuple(seconds),
        top_n=values.get("top_n"),
        returns_documents=values.get("return_documents", True),
        names=names,
    )
    changes = {name: values[name] for name in _PARAMS if name in values}
    params = replace(POOLED, **changes) if changes else POOLED
    return Request(firsts, params, tuple(warnings), endpoint=endpoint, vectors=wish)


def check_endpoint(endpoint: Endpoint, spec: VectorSpec | None) -> None:
    """Raise an error if a model cannot answer an endpoint; without `spec` it draws text."""
    if needed := _describe_need(endpoint, spec):
        text = f"{URL_OF[endpoint]} needs a model that {needed}"
        raise RequestError("unsupported_parameter", text)


def _describe_need(endpoint: Endpoint, spec: VectorSpec | None) -> str:
    """Say what a model must do for an endpoint, and what to ask this one; "": it does so."""
    if spec is None:
        needs = "gives embeddings" if endpoint == "embeddings" else "scores texts"
        is_drawn = endpoint in DRAWING_ENDPOINTS
        return (
            ""
            if is_drawn
            else f"{needs}, and this one generates text. Ask /v1/completions"
        )
    if endpoint in DRAWING_ENDPOINTS:
        if not spec.is_scored:
            return "generates text, and this one gives vectors. Ask /v1/embeddings"
        urls = "/v1/classify, /v1/score or /v1/rerank"
        return f"generates text, and this one scores texts. Ask {urls}"
    if endpoint == "embeddings" and spec.is_scored:
        return "gives embeddings, and this one scores. Ask /v1/score, /v1/rerank or /v1/classify"
    if endpoint == "classify" and not spec.is_scored:
        return "has classes, and this one gives embeddings. Ask /v1/embeddings"
    if endpoint in ("score", "rerank") and spec.is_scored and spec.size > 1:
        return (
            f"gives one score, and this one has {spec.size} classes. Ask /v1/classify"
        )
    return ""


def _parse_texts(
    fields: Mapping[str, Any], endpoint: Endpoint
) -> tuple[list[str | list[int]], list[str], tuple[str, str]]:
    """Return the prompts, the texts to compare them with, and the names of both fields."""
    if endpoint in ("embeddings", "classify"):
        prompts = parse_prompts(fields, "input")
        check_choices(len(prompts), 1, 1, "input")
        return prompts, [], ("input", "")
    names = ("query", "documents")
    if endpoint == "score":
        first = _choose_field_name(fields, "text_1", "queries")
        names = first, _choose_field_name(fields, "text_2", "documents")
    firsts, seconds = (_parse_strings(fields, name) for name in names)
    if len(firsts) != 1 and (len(firsts) != len(seconds) or endpoint == "rerank"):
        remedy = "give one, which is compared with all"
        if endpoint == "score":
            remedy += ", or as many"
        raise RequestError(
            "out_of_range",
            f"{names[0]} holds {len(firsts)} texts and {names[1]} {len(seconds)}; {remedy}",
            names[0],
        )
    check_choices(len(seconds), 1, 1, names[1])
    return [*firsts], seconds, names


def _choose_field_name(fields: Mapping[str, Any], *names: str) -> str:
    """Return which name of one meaning a request has, or the first; several are an error."""
    present = [name for name in names if fields.get(name) is not None]
    if len(present) > 1:
        raise RequestError(
            "unsupported_parameter",
            f"{' and '.join(present)} mean the same here. Keep one of them",
            present[1],
        )
    return present[0] if present else names[0]


def _parse_strings(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a text, or several; a document of Cohere's form may be an object with its text."""
    value = fields.get(name)
    if value is None:
        raise RequestError(
            "missing_prompt", f"{name} is absent; give {_ONE_OR_MANY}", name
        )
    if value == []:
        raise RequestError(
            "out_of_range", f"{name} is an empty list; give a text", name
        )
    documents = value if isinstance(value, list) else [value]
    for document in (each for each in documents if isinstance(each, dict)):
        check_unsupported_keys(document, name, _DOCUMENT_REMEDIES)
    items = [each.get("text") if isinstance(each, dict) else each for each in documents]
    texts = [check_text(text, name) for text in items if isinstance(text, str)]
    if not texts or len(texts) < len(items):
        raise wrong_type_error(name, value, _ONE_OR_MANY)
    return texts


def _parse_dimensions(dimensions: int | None, spec: VectorSpec) -> int | None:
    if dimensions is not None and dimensions > spec.size:
        raise RequestError(
            "out_of_range",
            f"dimensions is {dimensions}; this model's vectors have {spec.size} "
            "numbers. Give at most so many",
            "dimensions",
        )
    return None if dimensions == spec.size else dimensions


def _parse_normalize(value: bool | None, spec: VectorSpec) -> bool:
    """Return whether vectors are scaled to length 1."""
    if value is False and spec.is_normalized:
        raise RequestError(
            "unsupported_parameter",
            "normalize is false, and this model itself gives its vectors the length 1. Remove "
            "normalize, or remove Normalize from a copy's modules.json",
            "normalize",
        )
    return spec.is_normalized if value is None else value


def _parse_use_activation(value: bool | None, spec: VectorSpec) -> bool:
    """Return whether scores are to stay logits."""
    if value is False and not spec.is_scored:
        raise RequestError(
            "unsupported_parameter",
            "use_activation is false, and this model has no logits: its scores compare vectors. "
            "Remove use_activation",
            "use_activation",
        )
    return value is False


def _parse_prompt_name(
    name: str | None, prompts: list[str | list[int]], spec: VectorSpec
) -> str:
    """Return the model's prompt of a name, or its default one; "": none, by wish or without."""
    if name == "":
        return ""
    if name is not None and name not in spec.prompts:
        known = ", ".join(map(describe_value, spec.prompts)) or "none"
        raise RequestError(
            "out_of_range",
            f"prompt_name is {describe_value(name)}; this model has {known}. Leave it "
            "out, or write the "
            "prompt into the text",
            "prompt_name",
        )
    if name is None:
        return spec.prompts.get(spec.default_prompt or "", "")
    prefix = spec.prompts[name]
    if prefix and any(isinstance(each, list) for each in prompts):
        raise RequestError(
            "unsupported_parameter",
            f"prompt_name is {describe_value(name)} and input holds token ids, which "
            "are read as they are"
            ". Give texts, or put the prompt's ids in front and remove prompt_name",
            "prompt_name",
        )
    return prefix
