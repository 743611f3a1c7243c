"""What sentence-transformers' names do beyond the scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fminfer import SentenceTransformer, UsageError
from tests.interfaces.script_models import build_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    places = build_models(tmp_path_factory.mktemp("models"))
    return SentenceTransformer(places["PROMPTED"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_value": "token_embeddings"}, UsageError, "only 'sentence_embedding'"),
        ({"precision": "int8"}, UsageError, "only 'float32'"),
        ({"device": "cuda"}, UsageError, "give device to the model"),
        ({"prompt_name": "song"}, UsageError, "this model has 'query', 'document'"),
        ({"batch": 3}, TypeError, "no argument 'batch'"),
    ],
)
def test_what_is_not_done_is_refused(
    options: dict[str, Any], error: type, message: str, model: SentenceTransformer
) -> None:
    with pytest.raises(error, match=message):
        model.encode("a dog", **options)


def test_a_model_of_texts_is_refused() -> None:
    with pytest.raises(UsageError, match="demo gives no vectors"):
        SentenceTransformer("demo")


def test_a_bar_counts_texts(
    model: SentenceTransformer, capsys: pytest.CaptureFixture[str]
) -> None:
    model.encode(["a dog", "a cat", "the sun"], show_progress_bar=True)
    assert "3/3" in capsys.readouterr().err
    model.encode(["a dog"])
    assert not capsys.readouterr().err


def test_the_default_prompt_gives_way(model: SentenceTransformer) -> None:
    """An empty prompt, and one by name, stand in its place."""
    places = Path(model.engine.config.model or "")
    default = SentenceTransformer(str(places), default_prompt_name="query")
    with_prompt = default.encode("dog")
    assert np.allclose(with_prompt, model.encode("the red dog"), atol=1e-5)
    assert np.allclose(default.encode("dog", prompt=""), model.encode("dog"), atol=1e-5)
    named = default.encode("dog", prompt_name="document")
    assert np.allclose(named, model.encode("a dog"), atol=1e-5)
    with pytest.warns(UserWarning, match="without effect here: trust_remote_code"):
        SentenceTransformer(str(places), trust_remote_code=True)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_are_those_of_the_original(
    name: str, model: SentenceTransformer
) -> None:
    original = pytest.importorskip("sentence_transformers")
    kind = original.SimilarityFunction
    ours = SentenceTransformer(str(model.engine.config.model), similarity_fn_name=name)
    a = ours.encode(["a dog", "the sun", "red"])
    b = ours.encode(["a cat", "a house", "blue"])
    expected = kind.to_similarity_fn(name)(a, b)
    assert np.allclose(ours.similarity(a, b), expected, atol=1e-5)
    pairwise = kind.to_similarity_pairwise_fn(name)(a, b)
    assert np.allclose(ours.similarity_pairwise(a, b), pairwise, atol=1e-5)
