"""Vectors, scores and classes against transformers, from lines and from Python."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
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
    with fminfer.Engine(
        str(folder), dtype="float32", data_group_size=request.param
    ) as engine:
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
    assert (
        found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == num_tokens
    )
    assert "completion_tokens" not in found["usage"]


def test_forms_of_an_embedding(embedding: Pair) -> None:
    engine, _ = embedding
    whole = engine.embed(["w1 w2"])[0]
    (found,) = result(engine, {"input": "w1 w2", "encoding_format": "base64"})["data"]
    np.testing.assert_array_equal(
        np.frombuffer(b64decode(found["embedding"]), "<f4"), whole
    )
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
    """Fewer dimensions get length 1 again; prompts stand before texts."""
    model, hf = save_bert(tmp_path)
    prompts = {"query": "w7 w8 ", "document": ""}
    save_sentence_files(tmp_path, prompts=prompts, default_prompt_name="query")
    plain, asked = mean_vectors(model, hf, ["w1", "w7 w8 w1"])
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        for vector, expected in (
            (engine.embed(["w1"], prompt_name="document"), plain),
            (engine.embed(["w1"]), asked),
            (engine.embed(["w1"], dimensions=5), asked[:5]),
        ):
            np.testing.assert_allclose(
                vector[0], expected / np.linalg.norm(expected), atol=1e-4
            )
        assert "document" in str(
            refusal(engine, {"input": "w1", "prompt_name": "passage"})
        )
        (score,) = result(engine, {"text_1": "w1", "text_2": "w1"})["data"]
        assert score["score"] == pytest.approx(1, abs=1e-6)


def save_sentence_files(
    folder: Path,
    *,
    is_normalized: bool = True,
    is_lowercased: bool = False,
    **settings: Any,
) -> None:
    """Save what sentence-transformers has beside a model whose vectors are means."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    if is_normalized:
        kinds["2_Normalize"] = "Normalize"
    modules = [
        {"path": path, "type": f"sentence_transformers.{k}"}
        for path, k in kinds.items()
    ]
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}),
        ("config_sentence_transformers.json", settings),
        ("sentence_bert_config.json", {"do_lower_case": is_lowercased}),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))


SOME = ["w1 w2 w3", "w4 w5", "w6", "w1 w9"]
SIMILARITIES: dict[str, Any] = {
    "cosine": partial(torch.nn.functional.cosine_similarity, dim=-1),
    "dot": lambda first, second: (first * second).sum(-1),
    "euclidean": lambda first, second: -torch.dist(first, second, 2),
    "manhattan": lambda first, second: -torch.dist(first, second, 1),
}


@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_score_is_the_model_s_similarity_of_the_vectors_that_are_served(
    name: str, tmp_path: Path
) -> None:
    """Scores were cosines, whatever similarity_fn_name said, and of texts without the prompt."""
    save_bert(tmp_path)
    settings = {
        "similarity_fn_name": name,
        "prompts": {"q": "w7 w8 "},
        "default_prompt_name": "q",
    }
    save_sentence_files(tmp_path, is_normalized=False, **settings)
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        own = torch.from_numpy(engine.embed(SOME)).double()
        scores = result(engine, {"text_1": SOME[0], "text_2": SOME})["data"]
        ranking = result(engine, {"query": SOME[0], "documents": SOME})["results"]
    expected = [SIMILARITIES[name](own[0], each).item() for each in own]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-4)
    ranked = {each["index"]: each["relevance_score"] for each in ranking}
    assert [ranked[number] for number in range(len(SOME))] == pytest.approx(
        expected, abs=1e-4
    )
    assert [*ranked] == sorted(ranked, key=lambda number: -ranked[number])
    assert {each["document"]["text"] for each in ranking} == {*SOME}
    assert "-0.0" not in json.dumps(scores)


def test_prompts_stand_before_the_first_text_of_a_pair(tmp_path: Path) -> None:
    """A cross-encoder's default prompt was not used; sentence-transformers 6 does so."""
    own = save_bert(tmp_path, num_labels=1)
    module = {
        "type": "sentence_transformers.base.modules.transformer.Transformer",
        "path": "",
    }
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    settings = {"prompts": {"q": "w7 w8 ", "other": "w9 "}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        for prefix, fields in (("w7 w8 ", {}), ("w9 ", {"prompt_name": "other"})):
            pairs = logits_of(own, [f"{prefix}w1", f"{prefix}w1"], ["w2", "w3 w4"])
            found = result(
                engine, {"text_1": "w1", "text_2": ["w2", "w3 w4"]} | fields
            )["data"]
            expected = pairs.sigmoid()[:, 0].tolist()
            assert [each["score"] for each in found] == pytest.approx(
                expected, abs=1e-5
            )
            raw = {"query": "w1", "documents": ["w2", "w3 w4"], "use_activation": False}
            best = result(engine, raw | fields)["results"][0]
            assert best["relevance_score"] == pytest.approx(
                pairs.max().item(), abs=1e-4
            )
            (classes,) = result(engine, {"input": "w1"} | fields)["data"]
            alone = logits_of(own, [f"{prefix}w1"]).sigmoid().item()
            assert classes["probs"] == pytest.approx([alone], abs=1e-5)


def test_prompts_do_not_stand_before_token_ids(tmp_path: Path) -> None:
    """`prompt_name` beside token ids was dropped; one that is empty asks for nothing."""
    save_bert(tmp_path)
    save_sentence_files(tmp_path, prompts={"query": "w7 ", "document": ""})
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        refused = refusal(engine, {"input": [2, 6, 3], "prompt_name": "query"})
        assert refused.param == "prompt_name" and "holds token ids" in refused.message
        result(engine, {"input": [[2, 6, 3]], "prompt_name": "document"})


def test_logits_in_place_of_probabilities(scoring: Pair) -> None:
    engine, own = scoring
    for value, expected in ((False, logits_of(own, TEXTS)), (True, None), (None, None)):
        found = result(engine, {"input": TEXTS, "use_activation": value})["data"]
        if expected is None:
            expected = logits_of(own, TEXTS)
            expected = (
                expected.sigmoid() if expected.shape[1] == 1 else expected.softmax(-1)
            )
        np.testing.assert_allclose(
            [each["probs"] for each in found], expected, atol=1e-4
        )


def test_vectors_of_length_1(embedding: Pair, tmp_path: Path) -> None:
    engine, _ = embedding
    (whole,) = engine.embed(["w1 w2"])
    for fields, vector in (({}, whole), ({"dimensions": 5}, whole[:5])):
        for value, expected in (
            (True, vector / np.linalg.norm(vector)),
            (False, vector),
        ):
            (found,) = result(engine, {"input": "w1 w2", "normalize": value} | fields)[
                "data"
            ]
            np.testing.assert_allclose(found["embedding"], expected, rtol=1e-5)
    refused = refusal(engine, {"text_1": "w1", "text_2": "w2", "use_activation": False})
    assert refused.param == "use_activation" and "no logits" in refused.message
    save_bert(tmp_path)
    save_sentence_files(tmp_path)
    with fminfer.Engine(str(tmp_path), dtype="float32") as normed:
        assert refusal(normed, {"input": "w1", "normalize": False}).param == "normalize"
        result(normed, {"input": "w1", "normalize": True})


def test_no_cosine_is_beyond_1(embedding: Pair) -> None:
    """Equal texts had a score of 1.0000000000000002."""
    texts = [f"{first} {second}" for first in WORDS[:12] for second in WORDS[:5]]
    found = result(embedding[0], {"text_1": texts, "text_2": texts})["data"]
    assert all(1 - 1e-6 < each["score"] <= 1 for each in found)


def test_do_lower_case_leaves_special_tokens(tmp_path: Path) -> None:
    """`[SEP]` in a text was lowered to `[sep]`, and a capital sigma as Python does."""
    model, hf = save_bert(tmp_path)
    save_sentence_files(tmp_path, is_normalized=False, is_lowercased=True)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"do_lower_case": False})
    )
    plain = "w1 [SEP] w2"
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        found = engine.embed([plain, "W1 [SEP] W2"])
    np.testing.assert_allclose(
        found, mean_vectors(model, hf, [plain, plain]), atol=1e-4
    )


def test_long_texts_are_cut_as_transformers_cuts(embedding: Pair) -> None:
    engine, (model, hf) = embedding
    long = " ".join(WORDS[:90])
    cut = hf.decode(
        hf(long, truncation=True, max_length=10)["input_ids"], skip_special_tokens=True
    )
    found = result(engine, {"input": long, "truncate_prompt_tokens": 10})
    (told,) = found["data"]
    np.testing.assert_allclose(
        told["embedding"], mean_vectors(model, hf, [cut])[0], atol=1e-4
    )
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
    raw = [
        Line(0, number, json.dumps(line).encode())
        for number, line in enumerate(lines, 1)
    ]
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
    assert [each["score"] for each in found["data"]] == pytest.approx(
        expected, abs=1e-5
    )


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
        assert each["label"] == f"LABEL_{row.argmax()}" and each["num_classes"] == len(
            row
        )


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
        assert each["relevance_score"] == pytest.approx(
            expected[each["index"]], abs=1e-5
        )
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
        module = {
            "type": "sentence_transformers.base.modules.transformer.Transformer",
            "path": "",
        }
        (tmp_path / "modules.json").write_text(json.dumps([module]))
        settings = tmp_path / "config_sentence_transformers.json"
        settings.write_text(
            json.dumps({"model_type": "CrossEncoder", "activation_fn": name})
        )
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
    tell(
        tmp_path,
        sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"},
    )
    with pytest.raises(
        CheckpointError, match=r"scores by .*Tanh; Sigmoid and Identity run"
    ):
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
    file.write_text(
        json.dumps(fields | {"model_input_names": ["input_ids", "attention_mask"]})
    )
    given = own[1]("w1 w2", "w7", return_tensors="pt")
    with torch.no_grad():
        expected = own[0](input_ids=given["input_ids"]).logits.sigmoid().item()
    with fminfer.Engine(str(tmp_path), dtype="float32") as engine:
        (found,) = result(engine, {"text_1": "w1 w2", "text_2": "w7"})["data"]
    assert found["score"] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(
        logits_of(own, ["w1 w2"], ["w7"]).sigmoid().item(), abs=1e-4
    )


def test_what_embed_refuses(embedding: Pair, scoring: Pair) -> None:
    with pytest.raises(TypeError, match=r"give \[text\]"):
        embedding[0].embed("w1 w2")
    with pytest.raises(TypeError, match="a text, or a list of ids, in each place"):
        embedding[0].embed([["w1", "w2"]])
    with pytest.raises(RequestError, match="Ask /v1/score"):
        scoring[0].embed(["w1"])
    assert embedding[0].embed([]).shape == (0, 32)


def test_a_prompt_is_no_question_for_a_model_of_classes(tmp_path: Path) -> None:
    """It was said to give vectors, and the command to type answered with the demo model."""
    save_bert(tmp_path, num_labels=3)
    model = ["--model-name", str(tmp_path)]
    refused = CliRunner().invoke(main, ["run", "--prompt", "w1", *model])
    assert (
        refused.exit_code == 2 and "scores texts or has classes; put" in refused.output
    )
    assert f"fminfer run - --model-name {tmp_path}" in refused.output
    answered = CliRunner().invoke(
        main, ["run", "-q", "-", *model], input='{"input": "a text"}\n'
    )
    assert answered.exit_code == 0, answered.output


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
    needs = pytest.raises(RequestError, match="needs a model that gives embeddings")
    with fminfer.Engine(dtype="float32") as generating, needs:
        generating.prepare({"input": "w1"}, endpoint="embeddings")


def test_equal_lines_are_computed_once_and_a_wrong_one_costs_itself(
    embedding: Pair,
) -> None:
    engine, _ = embedding
    before = engine.stats.num_prompt_tokens
    asked = [{"input": "w1 w2"}] * 50 + [{"input": 5}] + [{"input": "w2 w1"}]
    found = answers(engine, *asked)
    assert [record.error is None for record in found] == [True] * 50 + [False, True]
    assert len({json.dumps(r.to_dict()["result"]["data"]) for r in found[:50]}) == 1
    assert engine.stats.num_prompt_tokens - before == 8


def test_a_text_that_is_too_long_is_named(embedding: Pair) -> None:
    asked = {"input": ["w1", "w2", " ".join(["w3"] * 80)]}
    assert str(refusal(embedding[0], asked)).startswith(
        "input[2]: the prompt has 82 tokens; "
    )


LONG = "w3 " * 80
GIANT = "w3 " * 200_000  # refused before it is tokenized


@pytest.mark.parametrize("long", [LONG, GIANT])
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"query": "w1", "documents": ["w1", "long", "w2"]}, "documents[1]"),
        ({"query": "w1", "documents": ["long"]}, "documents"),
        ({"text_1": "w1", "text_2": ["w1", "w2", "long"]}, "text_2[2]"),
        ({"text_1": ["w1", "w2"], "text_2": ["w1", "long"]}, "text_2[1]"),
        ({"queries": "w1", "documents": ["long", "w2"]}, "documents[0]"),
    ],
)
def test_a_document_that_is_too_long_is_named(
    fields: dict[str, Any], place: str, long: str, embedding: Pair, scoring: Pair
) -> None:
    """Only embeddings said which of many texts was too long."""
    asked = json.loads(json.dumps(fields).replace("long", long))
    engines = [embedding[0]]
    if scoring[1][0].config.num_labels == 1:
        engines.append(scoring[0])
    for engine in engines:
        refused = refusal(engine, asked)
        assert refused.message.startswith(f"{place}: the prompt has ")
        assert refused.param == place.partition("[")[0]


def test_a_query_that_is_too_long_is_named(embedding: Pair) -> None:
    for fields, place in (
        ({"query": LONG, "documents": ["w1", "w2"]}, "query"),
        ({"text_1": ["w1", LONG], "text_2": ["w1", "w2"]}, "text_1[1]"),
    ):
        assert refusal(embedding[0], fields).message.startswith(
            f"{place}: the prompt has "
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "w1", "queries": "w2", "text_2": "w3"}, "queries"),
        ({"text_1": "w1", "text_2": "w2", "documents": "w3"}, "documents"),
        ({"queries": "w1", "documents": "w2", "text_2": "w3"}, "documents"),
        (
            {"query": "w1", "documents": [{"text": "w2", "image": "http://x"}]},
            "documents.image",
        ),
        (
            {"query": "w1", "documents": [{"text": "w2", "audio": "http://x"}]},
            "documents.audio",
        ),
        ({"query": {"text": "w1", "image": "x"}, "documents": ["w2"]}, "query.image"),
        (
            {"text_1": "w1", "text_2": [{"text": "w2", "video_url": "x"}]},
            "text_2.video_url",
        ),
    ],
)
def test_nothing_that_is_to_be_compared_is_dropped(
    embedding: Pair, fields: dict[str, Any], param: str
) -> None:
    """One of two texts, and images beside a text, were left out in silence."""
    error = refusal(embedding[0], fields)
    assert (error.code, error.param) == ("unsupported_parameter", param)


def test_both_names_of_a_side_may_be_mixed(embedding: Pair) -> None:
    """`queries` beside `text_2` was told that documents are absent."""
    engine, _ = embedding
    expected = result(engine, {"text_1": "w1 w2", "text_2": ["w3", "w4 w5"]})
    for first in ("text_1", "queries"):
        for second in ("text_2", "documents"):
            found = result(engine, {first: "w1 w2", second: ["w3", "w4 w5"]})
            assert found["data"] == expected["data"]


def test_an_empty_list_of_texts_is_called_empty(embedding: Pair) -> None:
    """It was said to be a list that must be a list."""
    for fields, name in (
        ({"query": "w1", "documents": []}, "documents"),
        ({"text_1": "w1", "text_2": []}, "text_2"),
    ):
        error = refusal(embedding[0], fields)
        assert error.param == name and "is an empty list" in error.message
