"""Checks lines one by one, exactly as a run would, and counts what they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fminfer.answers.answer_index import RecentAnswers
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import RequestError
from fminfer.engine.loop import EngineLoop
from fminfer.engine.prefix import SharedTokens
from fminfer.engine.sequence import PromptState, RequestState
from fminfer.runtime.lines.line_intake import LineIntake

# What is kept of the beginning, to find its steps: some seconds of simulation.
SAMPLE_TOKENS = 200_000  # prompt tokens, and tokens to be drawn
SAMPLE_BYTES = 64 << 20
# requests among which equal ones are found, about as many as a run keeps
MAX_SEEN = 8192


@dataclass(slots=True)
class LineCounts:
    """What the lines of a run ask for."""

    num_lines: int = 0
    num_wrong: int = 0
    errors_by_code: dict[str, int] = field(default_factory=dict)
    num_equal: int = 0  # lines that have the answer of an earlier one, computed once
    num_prompts: int = 0
    num_sequences: int = 0  # that are computed: greedy candidates are one
    prompt_tokens: int = 0
    max_drawn_tokens: int = 0
    longest_row: int = 0  # tokens of a prompt and its max_tokens
    # Of the lines that are not equal to another:
    tokens_to_feed: int = 0
    tokens_to_draw: int = 0
    # Of those, the prompts over which the best possible prefix cache was counted:
    num_counted_tokens: int = 0
    num_shared_tokens: int = 0

    @property
    def num_right(self) -> int:
        return self.num_lines - self.num_wrong

    @property
    def reserved_tokens(self) -> int:
        """Return the tokens of all prompts and of all that may be drawn."""
        return self.prompt_tokens + self.max_drawn_tokens

    @property
    def shared_share(self) -> float:
        """Return the share of tokens to feed that others have fed before."""
        return self.num_shared_tokens / max(1, self.num_counted_tokens)

    @property
    def tokens_to_compute(self) -> float:
        """Return the tokens that are fed or drawn once prefixes are shared."""
        return self.tokens_to_feed * (1 - self.shared_share) + self.tokens_to_draw


class LineChecker:
    """Checks a run's lines in their order; `loop`, of an engine as it would be, opens requests.

    With a prefix cache, the run shares prefixes and the answers of equal requests.
    """

    def __init__(
        self,
        intake: LineIntake,
        loop: EngineLoop,
        *,
        has_prefix_cache: bool,
        on_wrong: Callable[[Record], None],
    ) -> None:
        self._intake = intake
        self._loop = loop
        self._on_wrong = on_wrong
        self._seen: RecentAnswers[bool] = RecentAnswers(
            MAX_SEEN if has_prefix_cache else 0
        )
        self._shared = SharedTokens() if has_prefix_cache else None
        self._sample_bytes = 0
        self.counts = LineCounts()
        self.first: tuple[Line, PromptState] | None = None
        self.sample: list[Line] = []  # the first lines that can be answered
        self.num_sample_tokens = 0.0  # of those, as tokens_to_compute counts them
        self._is_full = False

    def add(self, line: Line) -> None:
        """Check the next line."""
        self.counts.num_lines += 1
        request = self._intake.open(line)
        if isinstance(request, Record):
            self._report_wrong(request)
            return
        try:
            state = self._loop.make_request_state(request.prepared)
        except RequestError as error:
            self._report_wrong(Record(line, request.envelope, error=error))
            return
        self.first = self.first or (line, state.prompts[0])
        is_equal = request.key is not None and self._seen.find(request.key) is not None
        if request.key is not None:
            self._seen.add(request.key, True)  # as if it were answered at once
        self._count(state, is_equal=is_equal)
        self._keep(line)

    def _report_wrong(self, record: Record) -> None:
        assert record.error is not None
        counts = self.counts
        code = record.error.code
        counts.num_wrong += 1
        counts.errors_by_code[code] = counts.errors_by_code.get(code, 0) + 1
        self._on_wrong(record)

    def _count(self, state: RequestState, *, is_equal: bool) -> None:
        counts = self.counts
        counts.num_equal += is_equal
        for prompt in state.prompts:
            to_draw = prompt.params.max_tokens * len(prompt.sequences)
            counts.num_prompts += 1
            counts.num_sequences += len(prompt.sequences)
            counts.prompt_tokens += prompt.num_prompt_tokens
            counts.max_drawn_tokens += to_draw
            row = max(
                len(prompt.ids_to_read), len(prompt.ids) + prompt.params.max_tokens
            )
            counts.longest_row = max(counts.longest_row, row)
            if not is_equal:
                counts.tokens_to_feed += len(prompt.ids_to_read) + prompt.num_to_feed
                counts.tokens_to_draw += to_draw
                self._count_shared(prompt)

    def _count_shared(self, prompt: PromptState) -> None:
        # only whole memories are shared
        if self._shared is None or prompt.source is not None:
            return
        if prompt.num_to_feed and not self._shared.is_full:
            num_shared = self._shared.add(prompt.ids[: prompt.num_to_feed])
            self.counts.num_counted_tokens += prompt.num_to_feed
            self.counts.num_shared_tokens += min(num_shared, prompt.num_to_feed - 1)

    def _keep(self, line: Line) -> None:
        """Keep the first lines, without a gap."""
        counts = self.counts
        self._sample_bytes += len(line.raw)
        num_tokens = counts.tokens_to_feed + counts.tokens_to_draw
        is_much = num_tokens > SAMPLE_TOKENS or self._sample_bytes > SAMPLE_BYTES
        if self._is_full or (is_much and self.sample):
            self._is_full = True
            return
        self.sample.append(line)
        self.num_sample_tokens = counts.tokens_to_compute
