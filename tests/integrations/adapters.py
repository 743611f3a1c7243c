"""A reader that does what the lm-eval adapters of DejaVu and H2O do with a results file.

Both (github.com/FMInference/DejaVu, github.com/FMInference/H2O) write one request for
each context and continuation, and later look each up again by its JSON, keys in the
order they wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def adapter_request(text: str, **changes: Any) -> dict[str, Any]:
    """Return the request they write for a context and its continuation."""
    return {
        "best_of": 1,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "model": "x",
        "n": 1,
        "prompt": text,
        "request_type": "language-model-inference",
        "stop": None,
        "temperature": 0,
        "top_p": 1,
    } | changes


class AdapterResults:
    """Scores continuations from one results file.

    Args:
        tokenizer: transformers' own, as the adapters load it.
        sort_keys: of the key that requests are found by.
    """

    def __init__(self, path: Path, tokenizer: Any, *, sort_keys: bool = False) -> None:
        self._tokenizer = tokenizer
        self._sort_keys = sort_keys
        records = [
            json.loads(line) for line in path.read_text().splitlines() if line.strip()
        ]
        self._results = {
            self._key(record["request"]): record["result"] for record in records
        }

    def score(
        self, context: str, continuation: str, **changes: Any
    ) -> tuple[list[int], float, bool]:
        """Return all ids, the continuation's mean logprob, and whether it is the greedy one."""
        request = adapter_request(context + continuation, **changes)
        logprobs = self._results[self._key(request)]["choices"][0]["logprobs"]
        tokens = logprobs["tokens"]
        values = logprobs["token_logprobs"]
        assert values[0] is None
        ids = self._tokenizer.convert_tokens_to_ids(tokens)
        start, end = (self._count(text) for text in (context, context + continuation))
        best = [next(iter(top)) for top in logprobs["top_logprobs"][start:end]]
        return ids, sum(values[start:end]) / (end - start), best == tokens[start:end]

    def _key(self, request: dict[str, Any]) -> str:
        return json.dumps(request, sort_keys=self._sort_keys)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
