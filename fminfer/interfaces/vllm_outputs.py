"""vLLM's outputs, made of records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fminfer.contract.record import Record
from fminfer.interfaces.vllm_params import SamplingParams


@dataclass(slots=True)
class Logprob:
    """A token's logprob, and what it is among all tokens."""

    logprob: float
    # from 1; None: it is not among the alternatives that were asked for
    rank: int | None
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # by token id


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the answer is whole, which it always is."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The answers to a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass(slots=True)
class ScoringOutput:
    """A pair's score."""

    score: float


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of a text's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class PoolingRequestOutput:
    """What a model of vectors or scores says of a text or a pair."""

    request_id: str
    outputs: Any
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """Its `outputs` is an `EmbeddingOutput`."""


class ScoringRequestOutput(PoolingRequestOutput):
    """Its `outputs` is a `ScoringOutput`."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """Its `outputs` is a `ClassificationOutput`."""


@dataclass(slots=True)
class OutputBuilder:
    """Makes outputs of completions records."""

    find_token_id: Callable[[str], int]  # of a vocabulary piece
    decode: Callable[[list[int]], str]
    _known: dict[str, tuple[int, str]] = field(default_factory=dict)

    def build(
        self, record: Record, prompt: str | None, params: SamplingParams
    ) -> RequestOutput:
        """Return a prompt's output.

        Raises:
            RequestError: the request was refused.
        """
        choices = [choice.fields for choice in record.choices]
        prompt_ids = choices[0]["prompt_token_ids"]
        num_echoed = 0
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            num_echoed = len(prompt_ids)
            rows = self._make_logprobs(choices[0], params.prompt_logprobs)
            prompt_logprobs = rows[:num_echoed]
        return RequestOutput(
            request_id=str(record.line.number - 1),
            prompt=prompt,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._build_choice(c, params, num_echoed) for c in choices],
            num_cached_tokens=record.num_cached_tokens,
        )

    def _build_choice(
        self, choice: dict[str, Any], params: SamplingParams, num_echoed: int
    ) -> CompletionOutput:
        logprobs = None
        cumulative = None
        if params.logprobs is not None:
            rows = self._make_logprobs(choice, params.logprobs)[num_echoed:]
            logprobs = [row for row in rows if row is not None]
            values = choice["logprobs"]["token_logprobs"][num_echoed:]
            cumulative = float(sum(values))
        return CompletionOutput(
            index=choice["index"],
            text=self._find_text(choice, params, num_echoed),
            token_ids=choice["token_ids"],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
        )

    def _find_text(
        self, choice: dict[str, Any], params: SamplingParams, num_echoed: int
    ) -> str:
        """Return a choice's text without the prompt, and without a stop that was not wanted."""
        text: str = choice["text"]
        if params.most_logprobs is None:
            return text
        offsets = [*choice["logprobs"]["text_offset"][num_echoed:]]
        if not offsets:
            return ""

        start = offsets[0] if num_echoed else 0
        end = None
        reason: str | int | None = choice.get("stop_reason")
        if not params.include_stop_str_in_output and isinstance(reason, int):
            end = offsets[-1] - offsets[0] + start
        text = text[start:end]
        if not params.include_stop_str_in_output and isinstance(reason, str):
            text = text.removesuffix(reason)
        return text

    def _make_logprobs(
        self, choice: dict[str, Any], num_alternatives: int
    ) -> list[PositionLogprobs | None]:
        """Return a position's logprobs for each token; the first of a prompt has none."""
        logprobs = choice["logprobs"]
        tokens = logprobs["tokens"]
        tops = logprobs["top_logprobs"] or [{}] * len(tokens)
        rows: list[PositionLogprobs | None] = []
        for token, value, top in zip(
            tokens, logprobs["token_logprobs"], tops, strict=True
        ):
            if value is None:
                rows.append(None)
                continue
            ranked = sorted((top or {}).items(), key=lambda item: -item[1])
            ranks = {piece: rank for rank, (piece, _) in enumerate(ranked, start=1)}
            likeliest = ranked[:num_alternatives]
            row: PositionLogprobs = {}
            for piece, logprob in [(token, value), *likeliest]:
                token_id, text = self._describe_piece(piece)
                row.setdefault(token_id, Logprob(logprob, ranks.get(piece), text))
            rows.append(row)
        return rows

    def _describe_piece(self, piece: str) -> tuple[int, str]:
        """Return a vocabulary piece's id and text."""
        if piece not in self._known:
            token_id = self.find_token_id(piece)
            self._known[piece] = token_id, self.decode([token_id])
        return self._known[piece]
