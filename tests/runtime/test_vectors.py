"""Vectors, scores and classes against transformers, from lines and from Python."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fminfer
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import CheckpointError, RequestError
from tests.vector_models import WORDS, mean_vectors, save_bert

TEXTS = ["w1 w2 w3", "w4", "", "W9 w10, unknown", " ".join(WORDS[:50])]
Pair = tuple[fminfer.Engine, tuple[Any, Any]]


@pytest.fixture(scope="module", params=[1, 2])
def embedding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Give an engine of one process or two pipelines, and what transformers has."""
    folder = tmp_path_factory.mktemp("bert")
    own = save_bert(folder)
    with fminfer.Engine(str(folder), dtype="float32", data_group_size=request.param) as engine:
        yield engine, own


@pytest.fixture(scope="module", params=[1, 3])
def scoring(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(f"scores{request.param}")
    own = save_bert(folder, num_labels=request.param)
    with fminfer.Engine(str(folder), dtype="float32") as engine:
        yield engine, own


def answers(engine: fminfer.Engine, *requests: dict[str, Any]) -> list[Record]:
    return sorted(engine.run(requests), key=lambda record: record.line.number)


def result(engine: fminfer.Engine, request: dict[str, Any]) -> dict[str, Any]:
    (record,) = answers(engine, request)
    assert record.error is None, record.error
    return dict(record.to_dict()["result"])


def refusal(engine: fminfer.Engine, request: dict[str, Any]) -> RequestError:
    (record,) = answers(engine, request)
    assert record.error is not None
    return record.error


def test_embeddings_are_transformers(embedding: Pair) -> None:
    engine, (model, hf) = embedding
    expected = mean_vectors(model, hf, TEXTS)
    vectors = engine.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    ids = hf(TEXTS)["input_ids"]
    np.testing.assert_array_equal(engine.embed(ids), vectors)
    found = result(engine, {"input": TEXTS})
    assert [each["index"] for each in found["data"]] == [*range(len(TEXTS))]
    told = np.array([each["embedding"] for each in found["data"]], np.float32)
    np.testing.assert_allclose(told, expected, atol=1e-4)
    num_tokens = sum(map(len, ids))
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == num_tokens
    assert "completion_tokens" not in found["usage"]


def test_forms_of_an_embedding(embedding: Pair) -> None:
    engine, _ = embedding
    whole = engine.embed(["w1 w2"])[0]
    (found,) = result(engine, {"input": "w1 w2", "encoding_format": "base64"})["data"]
    np.testing.assert_array_equal(np.frombuffer(b64decode(found["embedding"]), "<f4"), whole)
    np.testing.assert_array_equal(engine.embed(["w1 w2"], dimensions=5)[0], whole[:5])
    for wrong, param in (
        ({"dimensions": 33}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"input": []}, "input"),
        ({"input": [[1, 999]]}, "input"),
        ({"input": None}, "input"),
        ({"input": "w1 " * 70}, "input"),
    ):
        assert refusal(engine, {"input": "w1"} | wrong).param == param


def test_what_a_folder_of_sentence_transformers_says(tmp_path: Path) -> None:
    """Fewer dimensions get length 1 again; prompts stand before texts, of embeddings alone."""
    model, hf = save_bert(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.{k}"} for path, k in kinds.items()]
    prompts = {"query": "w7 w8 ", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": "query"}
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}),
        ("config_sentence_transformers.json", settings),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    plain, asked = mean_vectors(model, hf, ["w1", "w7 w8 w1"])
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        for vector, expected in (
            (engine.embed(["w1"], prompt_name="document"), plain),
            (engine.embed(["w1"]), asked),
            (engine.embed(["w1"], dimensions=5), asked[:5]),
        ):
            np.testing.assert_allclose(vector[0], expected / np.linalg.norm(expected), atol=1e-4)
        assert "document" in str(refusal(engine, {"input": "w1", "prompt_name": "passage"}))
        (score,) = result(engine, {"text_1": "w1", "text_2": "w1"})["data"]
        assert score["score"] == pytest.approx(1, abs=1e-6)


def test_long_texts_are_cut_as_transformers_cuts(embedding: Pair) -> None:
    engine, (model, hf) = embedding
    long = " ".join(WORDS[:90])
    cut = hf.decode(hf(long, truncation=True, max_length=10)["input_ids"], skip_special_tokens=True)
    found = result(engine, {"input": long, "truncate_prompt_tokens": 10})
    (told,) = found["data"]
    np.testing.assert_allclose(told["embedding"], mean_vectors(model, hf, [cut])[0], atol=1e-4)
    assert found["usage"]["prompt_tokens"] == 10
    assert found["usage"]["prompt_tokens_details"]["truncated_tokens"] == 82


def test_batch_lines(embedding: Pair) -> None:
    engine, _ = embedding
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(
            [
                ("/v1/embeddings", {"input": ["w1", "w2"], "model": "mine"}),
                ("/v1/score", {"text_1": "w1", "text_2": "w1"}),
                ("/v1/rerank", {"query": "w1", "documents": ["w2", "w1"], "top_n": 1}),
                ("/v1/completions", {"prompt": "w1"}),
                ("/v1/embeddings", {"input": "w1"}),
            ]
        )
    ]
    raw = [Line(0, number, json.dumps(line).encode()) for number, line in enumerate(lines, 1)]
    records = sorted(engine.run(raw), key=lambda record: record.line.number)
    found = [record.to_dict()["response"] for record in records]
    assert [each["status_code"] for each in found] == [200, 200, 200, 400, 200]
    bodies = [each["body"] for each in found]
    assert bodies[0]["object"] == "list" and bodies[0]["model"] == "mine"
    assert bodies[0]["data"][0]["embedding"] == bodies[4]["data"][0]["embedding"]
    assert bodies[1]["data"][0]["score"] == pytest.approx(1)
    (best,) = bodies[2]["results"]
    assert best["index"] == 1 and best["document"] == {"text": "w1"}
    assert "Ask /v1/embeddings" in bodies[3]["error"]["message"]


def test_cosines(embedding: Pair) -> None:
    engine, _ = embedding
    one, *others = engine.embed(["w1", "w2 w3", "w4"])
    expected = [one @ o / np.linalg.norm(one) / np.linalg.norm(o) for o in others]
    found = result(engine, {"queries": "w1", "documents": ["w2 w3", "w4"]})
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-5)


def logits_of(own: tuple[Any, Any], *texts: list[str]) -> torch.Tensor:
    model, hf = own
    with torch.no_grad():
        rows = [hf(*each, return_tensors="pt") for each in zip(*texts, strict=True)]
        return torch.cat([model(**row).logits for row in rows])


def test_classes_are_transformers(scoring: Pair) -> None:
    engine, own = scoring
    logits = logits_of(own, TEXTS)
    is_one = logits.shape[1] == 1
    expected = logits.sigmoid() if is_one else logits.softmax(-1)
    data = result(engine, {"input": TEXTS})["data"]
    np.testing.assert_allclose([each["probs"] for each in data], expected, atol=1e-5)
    for each, row in zip(data, expected, strict=True):
        assert each["label"] == f"LABEL_{row.argmax()}" and each["num_classes"] == len(row)


def test_scores_of_pairs_are_transformers(scoring: Pair) -> None:
    engine, own = scoring
    documents = ["w5 w6", "w7", "w1 w2 w8", "w7"]
    asked = {"query": "w1 w2", "documents": documents}
    if own[0].config.num_labels > 1:
        assert "Ask /v1/classify" in str(refusal(engine, asked))
        assert "/v1/classify" in str(refusal(engine, {"text_1": "w1", "text_2": "w2"}))
        return
    expected = logits_of(own, ["w1 w2"] * 4, documents).sigmoid()[:, 0].tolist()
    found = result(engine, asked)["results"]
    assert [each["relevance_score"] for each in found] == sorted(
        (pytest.approx(each, abs=1e-5) for each in expected), key=lambda e: -e.expected
    )
    for each in found:
        assert each["document"]["text"] == documents[each["index"]]
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)
    both = result(engine, {"text_1": ["w1 w2"] * 4, "text_2": documents})
    assert [each["score"] for each in both["data"]] == pytest.approx(expected, abs=1e-5)
    refused = refusal(engine, {"text_1": ["a", "b"], "text_2": ["c"]})
    assert refused.param == "text_1" and "as many" in str(refused)


NAMES = ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["today", "config", "older"])
def test_a_score_is_what_its_config_says(name: str, place: str, tmp_path: Path) -> None:
    own = save_bert(tmp_path, num_labels=1)
    if place == "today":
        module = {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""}
        (tmp_path / "modules.json").write_text(json.dumps([module]))
        settings = tmp_path / "config_sentence_transformers.json"
        settings.write_text(json.dumps({"model_type": "CrossEncoder", "activation_fn": name}))
    elif place == "config":
        tell(tmp_path, sentence_transformers={"activation_fn": name})
    else:
        tell(tmp_path, sbert_ce_default_activation_function=name)
    logits = logits_of(own, ["w1 w2"], ["w7"])
    score = logits if "Identity" in name else logits.sigmoid()
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        (found,) = result(engine, {"text_1": "w1 w2", "text_2": "w7"})["data"]
    assert found["score"] == pytest.approx(score.item(), abs=1e-5)


def test_another_activation_is_refused_by_name(tmp_path: Path) -> None:
    save_bert(tmp_path, num_labels=1)
    tell(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(CheckpointError, match=r"scores by .*Tanh; Sigmoid and Identity run"):
        fminfer.Engine(str(tmp_path), dtype="float32")


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_classes_are_what_the_problem_says(kind: str, tmp_path: Path) -> None:
    own = save_bert(tmp_path, num_labels=3)
    tell(tmp_path, problem_type=kind)
    logits = logits_of(own, ["w1 w2 w3"])[0]
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        (found,) = result(engine, {"input": "w1 w2 w3"})["data"]
    expected = logits if kind == "regression" else logits.sigmoid()
    assert found["probs"] == pytest.approx(expected.tolist(), abs=1e-5)


def tell(folder: Path, **fields: object) -> None:
    """Put fields into a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_token_types_are_those_that_the_tokenizer_gives(tmp_path: Path) -> None:
    own = save_bert(tmp_path, num_labels=1)
    file = tmp_path / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"model_input_names": ["input_ids", "attention_mask"]}))
    given = own[1]("w1 w2", "w7", return_tensors="pt")
    with torch.no_grad():
        expected = own[0](input_ids=given["input_ids"]).logits.sigmoid().item()
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        (found,) = result(engine, {"text_1": "w1 w2", "text_2": "w7"})["data"]
    assert found["score"] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(logits_of(own, ["w1 w2"], ["w7"]).sigmoid().item(), abs=1e-4)


def test_what_embed_refuses(embedding: Pair, scoring: Pair) -> None:
    with pytest.raises(TypeError, match=r"give \[text\]"):
        embedding[0].embed("w1 w2")
    with pytest.raises(TypeError, match="a text, or a list of ids, in each place"):
        embedding[0].embed([["w1", "w2"]])
    with pytest.raises(RequestError, match="Ask /v1/score"):
        scoring[0].embed(["w1"])
    assert embedding[0].embed([]).shape == (0, 32)


def test_requests_are_read_ahead_by_their_size(tmp_path: Path) -> None:
    """64 lines of thousands of texts each were tokenized before the first was computed."""
    save_bert(tmp_path)
    read = []

    def requests() -> Iterator[dict[str, Any]]:
        for number in range(64):
            read.append(number)
            yield {"input": [f"w{number} w{text}" + " w7" * 20 for text in range(120)]}

    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        assert next(iter(engine.run(requests()))).error is None
        assert len(read) < 40


def test_the_other_kind_of_model_is_named(embedding: Pair, scoring: Pair) -> None:
    assert "Ask /v1/embeddings" in str(refusal(embedding[0], {"prompt": "w1"}))
    error = scoring[0].prepare
    with pytest.raises(RequestError, match="Ask /v1/score"):
        error({"input": "w1"}, endpoint="embeddings")
    with fminfer.Engine(dtype="float32") as generating:
        assert "needs a model that gives embeddings" in str(refusal(generating, {"input": "w1"}))


def test_equal_lines_are_computed_once_and_a_wrong_one_costs_itself(embedding: Pair) -> None:
    engine, _ = embedding
    before = engine.stats.num_prompt_tokens
    asked = [{"input": "w1 w2"}] * 50 + [{"input": 5}] + [{"input": "w2 w1"}]
    found = answers(engine, *asked)
    assert [record.error is None for record in found] == [True] * 50 + [False, True]
    assert len({json.dumps(r.to_dict()["result"]["data"]) for r in found[:50]}) == 1
    assert engine.stats.num_prompt_tokens - before == 8


def test_a_text_that_is_too_long_is_named(embedding: Pair) -> None:
    asked = {"input": ["w1", "w2", " ".join(["w3"] * 80)]}
    assert str(refusal(embedding[0], asked)).startswith("input[2]: the prompt has 82 tokens; ")
