"""A reader that does what HELM's offline evaluation does with a results file.

HELM (github.com/stanford-crfm/helm) imports lines `{"request": …, "result": …}` into a
cache keyed by the request's JSON with sorted keys; its client for offline models
answers from that cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPELLINGS = {"Ġ": " ", "▁": " ", "Ċ": "\n"}  # as vocabularies write them


@dataclass(frozen=True)
class HelmCompletion:
    text: str
    logprob: float
    tokens: list[tuple[str, float]]
    finish_reason: str | None


@dataclass(frozen=True)
class HelmAnswer:
    completions: list[HelmCompletion]
    batch_request_time: float  # seconds
    batch_size: float


class HelmCache:
    """What HELM holds after the import of one file.

    Raises:
        KeyError: a line without `request` or `result`.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, Any] = {}
        for line in path.read_text().splitlines():
            if line.strip():
                record = json.loads(line)
                self._results[_key(record["request"])] = record["result"]

    def answer(self, request: dict[str, Any]) -> HelmAnswer:
        """Answer a request as HELM would; KeyError if the file does not hold it."""
        result = self._results[_key(request)]
        return HelmAnswer(
            [_completion(choice) for choice in result["choices"]],
            result["request_time"]["batch_time"],
            result["request_time"]["batch_size"],
        )


def _key(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)


def _completion(choice: dict[str, Any]) -> HelmCompletion:
    text = _plain(choice["text"])
    tokens = [(text, 0.0)]  # all HELM has where there are no logprobs
    # where null is there it fails, as it does on the next line
    if "logprobs" in choice:
        names = choice["logprobs"]["tokens"]
        values = choice["logprobs"]["token_logprobs"]
        tokens = [
            (_plain(name), value or 0.0)
            for name, value in zip(names, values, strict=True)
        ]
    return HelmCompletion(
        text, sum(value for _, value in tokens), tokens, choice.get("finish_reason")
    )


def _plain(text: str) -> str:
    for spelling, character in _SPELLINGS.items():
        text = text.replace(spelling, character)
    return text
