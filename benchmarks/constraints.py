"""How long masks of constrained answers take: the first of each schema, and each one after it.

    python benchmarks/constraints.py SCHEMAS.jsonl TOKENIZER

Each line of the file has a `schema` and `tests`, instances of which the valid ones (`valid`) are
followed token by token (`data`). It prints a table, and the figures as JSON in the last line.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text.grammars import Grammar, Grammars
from fminfer.text.tokenizer import Tokenizer


def main() -> None:
    """Time all schemas of a file."""
    source, folder = map(Path, sys.argv[1:])
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.backend is not None and tokenizer.eos_id is not None
    num_tokens = tokenizer.backend.get_vocab_size()
    start = time.perf_counter()
    grammars = Grammars(tokenizer, num_tokens, frozenset({tokenizer.eos_id}))
    grammars.find(Constraint("json", '{"type": "null"}'))
    figures = {"tokens": num_tokens, "index_s": time.perf_counter() - start}
    first = []
    others = []
    num_refused = 0
    open_file = gzip.open if source.suffix == ".gz" else open
    with open_file(source, "rt") as file:
        for line in file:
            each = json.loads(line)
            start = time.perf_counter()
            try:
                grammar = grammars.find(Constraint("json", json.dumps(each["schema"])))
            except RequestError:
                num_refused += 1
                continue
            first.append(time.perf_counter() - start)
            for test in each["tests"]:
                if test["valid"]:
                    others += follow(
                        grammar, json.dumps(test["data"], ensure_ascii=False)
                    )
    figures |= {"schemas": len(first), "refused": num_refused, "masks": len(others)}
    for name, times in (("first", first), ("next", others)):
        for part in (50, 99, 100):
            figures[f"{name}_p{part}_ms"] = float(np.percentile(times, part)) * 1000
    for name, value in figures.items():
        print(f"{name:>14} {value:12,.3f}")
    print(json.dumps(figures))


def follow(grammar: Grammar, text: str) -> list[float]:
    """Return the seconds of each mask on the way through a text."""
    words = grammar.grammars.vocabulary
    matcher = grammar.make_matcher()
    times = []
    for token_id in words(text):
        if not matcher.mask.bits[token_id // 8] >> token_id % 8 & 1:
            break  # an instance in another order
        start = time.perf_counter()
        matcher.advance(token_id)
        assert matcher.mask.bits
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
