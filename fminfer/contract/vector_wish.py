"""What a model's vectors are, and what a request makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, frozen=True)
class VectorFacts:
    """What a model's vectors are, and what requests for them may ask.

    Args:
        size: numbers of a vector.
        is_scored: they are the logits of classes, which `labels` names.
        is_score_logit: a pair's score is the logit itself, not the probability of it.
        odds: how probabilities of classes are made of logits; "identity": they are the logits.
        is_normalized: their length is 1.
        prompts: by name, what is put before a text.
        default_prompt: the name of the one that is put there if a request does not say.
        is_lowercased: the tokenizer gets texts in lower case.
    """

    size: int
    is_scored: bool = False
    is_score_logit: bool = False
    odds: Literal["softmax", "sigmoid", "identity"] = "softmax"
    is_normalized: bool = False
    has_types: bool = False  # the second text of a pair has a token type of its own
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    is_lowercased: bool = False


@dataclass(slots=True, frozen=True)
class VectorWish:
    """What is made of the vectors of a request's prompts."""

    facts: VectorFacts = field(repr=False)  # the same for all requests of a model
    dimensions: int | None = None  # keep the first so many numbers
    is_base64: bool = False
    seconds: tuple[str, ...] = ()  # what prompts are compared with: each, or the only one with all
    top_n: int | None = None
    returns_documents: bool = True
