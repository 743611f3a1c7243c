"""sentence-transformers' `SentenceTransformer` over the engine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from fminfer.core.errors import UsageError
from fminfer.runtime.engine_api import Engine

# the power of the norm that measures a difference
DISTANCES = {"euclidean": 2.0, "manhattan": 1.0}
# Of the constructor: the model's files say it, or the engine decides.
WITHOUT_EFFECT = ("trust_remote_code", "backend", "model_card_data", "cache_folder")


class SentenceTransformer:
    """Makes vectors of texts, under sentence-transformers' names.

        model = fminfer.SentenceTransformer("path/to/model")
        vectors = model.encode(["a text", "another"])    # an array (2, size) of float32

    Texts longer than the model reads are cut at their end, as there.

    Args:
        model: a folder or a hub id.
        device: as the engine's; None: auto.
        prompts: texts that stand before texts, by name, in place of the model's.
        default_prompt_name: which of them stands there by itself.
        truncate_dim: numbers to keep of each vector.
        similarity_fn_name: cosine, dot, euclidean or manhattan, in place of the model's.
        options: the engine's own. Its `dtype` is float32, unless it is given.

    Raises:
        FminferError: the model does not run, or gives no vectors.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        similarity_fn_name: str | None = None,
        **options: Any,
    ) -> None:
        if ignored := [name for name in WITHOUT_EFFECT if options.pop(name, None)]:
            names = ", ".join(ignored)
            warnings.warn(
                f"SentenceTransformer: without effect here: {names}", stacklevel=2
            )
        chosen = {
            "device": device or "auto",
            "dtype": "float32",
            "on_too_long": "truncate-right",
        } | options
        self.engine = Engine(model, **chosen)
        spec = self.engine.intake.limits.vectors
        if spec is None or spec.is_scored:
            self.engine.close()
            raise UsageError(f"{model} gives no vectors; Engine.run asks it")
        self.prompts = dict(spec.prompts if prompts is None else prompts)
        self.default_prompt_name = default_prompt_name or spec.default_prompt
        self.truncate_dim = truncate_dim
        self.similarity_fn_name = similarity_fn_name or spec.similarity
        self._size = spec.size
        self._find_prompt(None, self.default_prompt_name)

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        precision: Literal["float32"] = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        normalize_embeddings: bool = False,
        *,
        truncate_dim: int | None = None,
        **others: Any,
    ) -> Any:
        """Return the vector of a text, or those of a list in its order.

        Args:
            prompt_name: which of `prompts` stands before each text.
            prompt: a text that stands there instead.
            batch_size: without effect: the engine packs texts by their tokens.
            convert_to_numpy: an array; False: a list of tensors.
            convert_to_tensor: one tensor.
            normalize_embeddings: vectors have the length 1, also those that are cut.
            truncate_dim: numbers to keep of each vector.

        Raises:
            RequestError: a text is wrong.
            UsageError: what is asked for is not done here.
        """
        _refuse_others(output_value, precision, device, others)
        is_one = isinstance(sentences, str)
        texts = [sentences] if isinstance(sentences, str) else [*sentences]
        prefix = self._find_prompt(prompt, prompt_name or self.default_prompt_name)
        with tqdm(total=len(texts), unit="text", disable=not show_progress_bar) as bar:
            vectors = self.engine.embed(
                [prefix + text for text in texts], prompt_name="", on_answer=bar.update
            )
        vectors = vectors[:, : truncate_dim or self.truncate_dim]
        if normalize_embeddings:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)

        if convert_to_tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(vectors))
            return tensor[0] if is_one else tensor
        if not convert_to_numpy:
            tensors = [*torch.from_numpy(np.ascontiguousarray(vectors))]
            return tensors[0] if is_one else tensors
        return vectors[0] if is_one else vectors

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Return vectors of queries: with the prompt `query`, if the model has it."""
        return self._encode_as(("query",), sentences, options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Return vectors of documents: with the first of the model's prompts for them."""
        return self._encode_as(("document", "passage", "corpus"), sentences, options)

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """Return how alike each vector of one set is to each of another: a tensor (m, n)."""
        a = self._make_comparable(first)
        b = self._make_comparable(second)
        if self.similarity_fn_name in ("cosine", "dot"):
            return a @ b.T
        return -torch.cdist(a, b, p=DISTANCES[self.similarity_fn_name])

    def similarity_pairwise(self, first: Any, second: Any) -> torch.Tensor:
        """Return how alike the vectors of two sets are in each place: a tensor (n,)."""
        a = self._make_comparable(first)
        b = self._make_comparable(second)
        if self.similarity_fn_name in ("cosine", "dot"):
            return (a * b).sum(dim=1)
        power = DISTANCES[self.similarity_fn_name]
        distances: torch.Tensor = torch.linalg.vector_norm(a - b, ord=power, dim=1)
        return -distances

    def _make_comparable(self, vectors: Any) -> torch.Tensor:
        """Return vectors as a tensor (vectors, size), of length 1 if that is compared."""
        matrix = _make_matrix(vectors)
        if self.similarity_fn_name == "cosine":
            matrix = torch.nn.functional.normalize(matrix, dim=1)
        return matrix

    def get_embedding_dimension(self) -> int:
        """Return how many numbers a vector has."""
        return min(self._size, self.truncate_dim or self._size)

    get_sentence_embedding_dimension = get_embedding_dimension

    @property
    def max_seq_length(self) -> int:
        """Tokens of a text that the model reads."""
        return self.engine.context_length

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self.engine.tokenizer.hf

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def _find_prompt(self, prompt: str | None, name: str | None) -> str:
        """Return what stands before each text."""
        if prompt is not None or name is None:
            return prompt or ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise UsageError(f"prompt_name is {name!r}; this model has {known}")
        return self.prompts[name]

    def _encode_as(
        self,
        names: tuple[str, ...],
        sentences: str | Sequence[str],
        options: dict[str, Any],
    ) -> Any:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            known = (name for name in names if name in self.prompts)
            options["prompt_name"] = next(known, None)
        return self.encode(sentences, **options)


def _make_matrix(vectors: Any) -> torch.Tensor:
    """Return vectors as a tensor (vectors, size); one vector by itself is a row."""
    if isinstance(vectors, list):
        vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
    matrix = torch.as_tensor(vectors).float()
    return matrix[None] if matrix.ndim == 1 else matrix


def _refuse_others(
    output_value: str, precision: str, device: str | None, others: dict[str, Any]
) -> None:
    """Raise for what `encode` does not do."""
    if output_value != "sentence_embedding":
        raise UsageError(
            f"output_value is {output_value!r}; only 'sentence_embedding' is supported"
        )
    if precision != "float32":
        raise UsageError(
            f"precision is {precision!r}; only 'float32' is supported. Round the vectors "
            "afterwards"
        )
    if device is not None:
        raise UsageError("encode computes where the model is; give device to the model")
    if others:
        raise TypeError(f"encode has no argument {', '.join(map(repr, others))}")
