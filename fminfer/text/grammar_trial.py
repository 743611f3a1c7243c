"""Reads constraints and tries their grammars, in a limited process: all of it may take long.

A proof over a schema's unions is cubic, and llguidance does not limit its time. This file
imports neither torch nor transformers, so that the process starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fminfer.core.config import Constraint
from fminfer.text.calls.call_grammars import (
    CallSpec,
    parse_call_spec,
    write_call_grammar,
    write_call_number_grammar,
)
from fminfer.text.gbnf import add_rule_name, is_gbnf
from fminfer.text.grammar_forms import tidy_fault, write_grammar, write_number_grammar
from fminfer.text.json_schemas import (
    MAX_SHORTEST,
    find_shortest_text,
    find_unknown_keywords,
)
from fminfer.text.limited_process import Work
from fminfer.text.plain_schemas import parse_schema

EOS = 256
MOST_BYTES = 64 << 20  # of memory for a grammar; schemas from practice take up to 15 MB
MAX_TRIED = 200  # of the shortest choices, among which the shortest in tokens is sought
# Of a mask. Of 1,000 schemas from practice, one needs more than 10,000.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,  # places of a grammar where an answer may stand at once
    "step_max_items": 25_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}


class _ByteTokenizer:
    """A tokenizer of the 256 bytes, as llguidance's `TokenizerWrapper` takes one."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(EOS)] + [b"<eos>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def build_trial() -> Work:
    """Return what `try_constraint` does with a message."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    return partial(
        try_constraint, LLTokenizer(TokenizerWrapper(_ByteTokenizer()), n_vocab=EOS + 1)
    )


def try_constraint(tokenizer: Any, fields: list[Any]) -> list[Any]:
    """Return a constraint's grammars, unknown keywords, short answers, and memory in bytes.

    One of the short answers is the shortest. The memory is that of the first grammar.

    Raises:
        ValueError: what is wrong with it.
    """
    constraint = Constraint(*fields)
    unknown: list[str] = []
    shortest: list[str | None] = []
    if constraint.kind == "json":
        unknown = sorted(find_unknown_keywords(json.loads(constraint.text)))
    if constraint.kind == "calls":
        return _try_calls(tokenizer, parse_call_spec(constraint.text))
    grammars = [write_grammar(constraint)]
    if constraint.kind == "json":
        grammars.append(write_number_grammar(constraint))
        shortest = [find_shortest_text(parse_schema(constraint.text))]
    elif constraint.kind == "choice":
        shortest = sorted(json.loads(constraint.text), key=len)[:MAX_TRIED]

    fault, num_bytes = _measure_grammar(tokenizer, grammars[0])
    if fault and constraint.kind == "grammar" and is_gbnf(constraint.text):
        fault = add_rule_name(constraint.text, fault)
    if fault:
        raise ValueError(tidy_fault(fault))
    shortest = [text for text in shortest if text and len(text) < MAX_SHORTEST]
    return [grammars, unknown, shortest, num_bytes]


def _measure_grammar(tokenizer: Any, grammar: str) -> tuple[str, int]:
    """Return what is wrong with a grammar ("": nothing), and its memory in bytes."""
    before = _measure_memory()
    fault, _matcher = _try_grammar(tokenizer, grammar)  # alive while it is measured
    num_bytes = max(0, _measure_memory() - before)  # less, if pages were taken from it
    if not fault and num_bytes > MOST_BYTES:
        fault = (
            f"it takes {num_bytes >> 20} MB of memory; at most {MOST_BYTES >> 20} MB is "
            "allowed. Make it simpler"
        )
    return fault, num_bytes


def _try_calls(tokenizer: Any, spec: CallSpec) -> list[Any]:
    """Return what `try_constraint` returns, for calls of tools."""
    schemas = [json.loads(schema) for _, schema in spec.functions]
    unknown = set[str]().union(*map(find_unknown_keywords, schemas))
    grammars = [write_call_grammar(spec), write_call_number_grammar(spec)]
    spec = replace(spec, token_ids={})
    fault, num_bytes = _measure_grammar(tokenizer, write_call_grammar(spec))
    if fault:
        for function in spec.functions:
            alone = write_call_grammar(replace(spec, functions=(function,)))
            if inner_fault := _try_grammar(tokenizer, alone)[0]:
                name = json.dumps(function[0], ensure_ascii=False)
                inner_fault = tidy_fault(inner_fault)
                raise ValueError(f"in the parameters of {name}: {inner_fault}")
        raise ValueError(tidy_fault(fault))
    return [grammars, sorted(unknown), [], num_bytes]


def _measure_memory() -> int:
    """Return the memory that this process has, without what it freed."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _try_grammar(tokenizer: Any, text: str) -> tuple[str, Any]:
    """Return what is wrong with a grammar of llguidance ("": nothing), and its matcher."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return matcher.get_error() or "nothing matches it", matcher
    return str(matcher.get_error()), matcher
