"""What a report counts over all rows, in memory that does not grow with them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fminfer.core.quantities import counted
from fminfer.job.report.answer_fields import AnswerFields, choice_logprobs, prompt_of
from fminfer.job.report.histogram import Histogram
from fminfer.job.report.plain_text import dump

MAX_VALUES = 200  # different values of a parameter that are counted one by one
MAX_VALUE_LENGTH = 200
MAX_CODES = 100
MAX_KINDS = 300  # of errors
ErrorKind = tuple[str, str]  # an error's code, and its message without numbers and quoted texts
_GIVEN = re.compile(r"\d+|\"[^\"]*\"")
UNTOLD = frozenset({"prompt", "messages", "suffix", "user", "metadata", "prompt_cache_key"})
NUMBERS = (int, float)
MAX_NUMBER = 1e300  # larger integers are no floats, and are taken as texts
LOGPROB_SCALE = 100
TIME_SCALE = 1000  # milliseconds


@dataclass(slots=True)
class Values:
    """The values of one sampling parameter, as JSON."""

    counts: Counter[Any] = field(default_factory=Counter)
    num_others: int = 0  # rows with further values

    def add(self, value: Any) -> None:
        # True is 1 for a dict, and lists have no hash.
        if type(value) not in NUMBERS or abs(value) > MAX_NUMBER:
            value = dump(value)[:MAX_VALUE_LENGTH]
        if value in self.counts or len(self.counts) < MAX_VALUES:
            self.counts[value] += 1
        else:
            self.num_others += 1


@dataclass(slots=True)
class AnswerTally:
    """Counts over the rows of one output, or of several."""

    num_answers: int = 0
    num_errors: int = 0
    num_unread: int = 0  # lines that are no records
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_truncated: int = 0  # rows whose prompt was cut to fit
    num_without_times: int = 0
    num_without_requests: int = 0  # answers of Batch lines
    num_with_logprobs: int = 0
    num_choices: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # chat, completion
    models: Counter[str] = field(default_factory=Counter)  # of Batch answers
    finish_reasons: Counter[str] = field(default_factory=Counter)
    params: dict[str, Values] = field(default_factory=dict)
    error_codes: Counter[str] = field(default_factory=Counter)
    error_kinds: Counter[ErrorKind] = field(default_factory=Counter)
    prompt_lengths: Histogram = field(default_factory=Histogram)
    completion_lengths: Histogram = field(default_factory=Histogram)
    mean_logprobs: Histogram = field(default_factory=lambda: Histogram(LOGPROB_SCALE))
    seconds: Histogram = field(default_factory=lambda: Histogram(TIME_SCALE))

    def add_error(self, answer: AnswerFields) -> ErrorKind:
        """Count a row without an answer; return its error's code, and what its message says."""
        assert answer.error is not None, "a row with an answer"
        self.num_errors += 1
        self.shapes[answer.shape] += 1
        code = str(answer.error.get("code"))[:60]
        if code not in self.error_codes and len(self.error_codes) >= MAX_CODES:
            code = "others"
        self.error_codes[code] += 1
        kind = code, _GIVEN.sub("…", str(answer.error.get("message"))[:MAX_VALUE_LENGTH])
        if kind not in self.error_kinds and len(self.error_kinds) >= MAX_KINDS:
            kind = code, ""
        self.error_kinds[kind] += 1
        if answer.shape != "batch":
            self.add_params(answer.request)
        return kind

    def add_answer(self, answer: AnswerFields) -> float | None:
        """Count an answered row; return its mean logprob, if it is known."""
        usage, choices = answer.usage, answer.choices
        self.num_answers += 1
        self.shapes[answer.shape] += 1
        kind = "chat" if answer.is_chat else "completion" if choices else "vectors"
        self.kinds[kind] += 1
        num_prompt, num_drawn = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
        if isinstance(num_prompt, int) and isinstance(num_drawn, int):
            self.prompt_tokens += num_prompt
            self.completion_tokens += num_drawn
            self.prompt_lengths.add(num_prompt)
            self.completion_lengths.add(num_drawn)
        details = usage.get("prompt_tokens_details")
        if details:
            self.cached_tokens += details.get("cached_tokens") or 0
            self.num_truncated += "truncated_tokens" in details
        self.num_choices += len(choices)
        for choice in choices:
            self.finish_reasons[choice.get("finish_reason") or "none"] += 1
        if "batch_time" in answer.times:
            self.seconds.add(answer.times["batch_time"])
        else:
            self.num_without_times += 1
        if answer.shape == "batch":
            self.num_without_requests += 1
            self.models[str(answer.fields["response"]["body"].get("model"))[:200]] += 1
        else:
            self.add_params(answer.request)
        return self._add_logprobs(answer)

    def add_params(self, request: Any) -> None:
        """Count the sampling parameters of a request."""
        if type(request) is not dict:
            return
        for name, value in request.items():
            if name in UNTOLD:
                continue
            values = self.params.get(name)
            if values is None:
                if len(self.params) >= MAX_VALUES:
                    continue
                values = self.params[name] = Values()
            is_list_of_tools = name == "tools" and type(value) is list
            values.add(counted(len(value), "function") if is_list_of_tools else value)

    def _add_logprobs(self, answer: AnswerFields) -> float | None:
        """Count the mean logprob of all tokens that a row has drawn or scored."""
        total, number = 0.0, 0
        for choice in answer.choices:
            if choice.get("logprobs") is None:
                continue
            request = answer.request if type(answer.request) is dict else {}
            is_echo = bool(request.get("echo"))
            prompt = prompt_of(request, choice.get("index", 0)) if is_echo else None
            values = choice_logprobs(choice, prompt, is_echo=is_echo)
            total += sum(values)
            number += len(values)
        if not number:
            return None
        self.num_with_logprobs += 1
        self.mean_logprobs.add(total / number)
        return total / number
