"""Counts rows of outputs: answers and errors, how they end, and how long they are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fminfer.job.report.answer_fields import AnswerFields

# an error's code, and its message without numbers and quoted texts
ErrorKind = tuple[str, str]
MAX_MESSAGE = 200  # characters by which messages are told apart
MAX_NAMES = 100  # of codes, models, reasons to end, labels
OTHERS = "(others)"  # behind these names
MAX_KINDS = 300  # of errors
MAX_LENGTH = 1 << 50  # tokens of a row; a record with more was not made by a model
_VARYING = re.compile(r"\d+|\"[^\"]*\"")


@dataclass(slots=True)
class AnswerTally:
    """Counts over all rows, in memory that does not grow with them."""

    num_answers: int = 0
    num_errors: int = 0
    num_unread: int = 0  # lines that are no records
    num_truncated: int = 0  # rows whose prompt was cut to fit
    models: Counter[str] = field(default_factory=Counter)  # of Batch answers
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    error_kinds: Counter[ErrorKind] = field(default_factory=Counter)
    prompt_lengths: Counter[int] = field(default_factory=Counter)  # in tokens
    completion_lengths: Counter[int] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return self.num_answers + self.num_errors

    def add_error(self, error: dict[str, Any]) -> ErrorKind:
        """Count a row without an answer; return its error's code, and what its message says."""
        self.num_errors += 1
        code = count_name(self.error_codes, error.get("code"))
        kind = code, _VARYING.sub("…", str(error.get("message"))[:MAX_MESSAGE])
        if kind not in self.error_kinds and len(self.error_kinds) >= MAX_KINDS:
            kind = code, ""
        self.error_kinds[kind] += 1
        return kind

    def add_answer(self, answer: AnswerFields) -> None:
        """Count an answered row."""
        usage = answer.usage
        num_prompt = usage.get("prompt_tokens")
        num_drawn = usage.get("completion_tokens", 0)
        if isinstance(num_prompt, int) and isinstance(num_drawn, int):
            if max(abs(num_prompt), abs(num_drawn)) > MAX_LENGTH:
                raise ValueError("these are no counts of tokens")
            self.prompt_lengths[num_prompt] += 1
            self.completion_lengths[num_drawn] += 1
        self.num_answers += 1
        self.num_truncated += "truncated_tokens" in (
            usage.get("prompt_tokens_details") or {}
        )
        for choice in answer.choices:
            count_name(self.finish_reasons, choice.get("finish_reason") or "none")
        if answer.is_batch:
            count_name(self.models, answer.fields["response"]["body"].get("model"))


def count_name(counts: Counter[str], value: object, number: int = 1) -> str:
    """Count a name, as one of `others` if there are too many; return it as it is counted."""
    name = str(value)[:MAX_MESSAGE]
    if name not in counts and len(counts) >= MAX_NAMES:
        name = OTHERS
    counts[name] += number
    return name
