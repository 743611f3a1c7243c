"""The summary of a run: for people, and as JSON for `--stats`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fminfer.contract.record import Record
from fminfer.core.errors import RETRYABLE
from fminfer.core.messages import ConstraintMass, RankMemory, describe_memory
from fminfer.core.quantities import (
    describe_bytes,
    describe_dtypes,
    describe_short_time,
    list_few,
    with_noun,
)
from fminfer.files.ordered_output import errors_path, vectors_path
from fminfer.files.output_paths import STDOUT

MAX_LABELS = 1000  # different ones that are counted
NUM_NAMED = 10  # labels that the summary names
# Of answers that are not as they were to be: how a count of the engine is called, and why.
_SHORTFALLS = {
    "num_cut_off": (
        "cut off",
        "by max_tokens, before what was asked for was complete: raise it",
    ),
    "num_open_thoughts": (
        "thoughts",
        "without text, as max_tokens ended the thought: raise it, or give "
        "--thinking-budget",
    ),
    "num_ended_thoughts": (
        "thoughts",
        "without text, as the model ended within its thought; with --thinking-budget it "
        "cannot end there before a constrained answer",
    ),
    "num_truncated_thoughts": ("thoughts", "whose thought a budget ended"),
}


@dataclass(slots=True)
class JobSummary:
    """What a run did; `--stats` writes it as JSON."""

    model: str
    dtype: str
    inputs: list[Path]
    outputs: list[Path]
    kv_dtype: str = ""  # type of the KV cache
    weight_dtype: str = ""  # type of most weights in memory, if it differs
    device: str = ""  # "": nothing was left to answer
    num_threads: int = 0  # computing threads in each process
    num_ranks: int = 1  # processes that compute
    # instructions to which FMINFER_CPU limits the processor; "": no limit
    cpu_limit: str = ""
    # why it was slower than it could be: plain torch in a kernel's place
    why_slower: str = ""
    # whether an answer has the same bytes whatever rows are beside it, and why not
    same_answers: bool = False
    why_dependent: str = ""
    start_to_ready_s: float = 0.0
    num_rows: int = 0  # answered rows
    num_errors: int = 0
    limit: int | None = None  # --limit: requests of each input that were to be answered
    num_kept_rows: int = 0  # rows of earlier runs, answered or refused
    num_kept_errors: int = 0  # errors among them
    num_changed_inputs: int = 0  # inputs that had answers to an earlier form of them
    # of the kept rows, those that were taken from these answers
    num_taken_rows: int = 0
    num_left_out_rows: int = 0  # of these answers, those whose lines are gone
    num_damaged_rows: int = 0  # damaged rows of earlier runs, not kept
    num_tried_rows: int = 0  # rows that failed in earlier runs, and were tried again
    num_files_elsewhere: int = 0  # files that other runs were answering at the end
    # Outputs that this run lost while it slept, and that another run has completed.
    completed_elsewhere: list[str] = field(default_factory=list)
    # inputs that were not answered, and why
    refused: dict[str, str] = field(default_factory=dict)
    errors_by_code: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0  # prompt tokens of answered rows, as in usage
    completion_tokens: int = 0
    wall_s: float = 0.0  # time of answering, without loading
    other_work_s: float = 0.0  # time that all threads together waited for other work
    other_work_share: float = 0.0  # the same as a share of the time of the run's cores
    is_beside_other_work: bool = False  # other work slowed the run
    ranks: list[RankMemory] = field(default_factory=list)  # the most memory of each
    engine: dict[str, Any] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)
    result_cache: str = ""  # folder of answers that several runs share; "": none
    cache_trouble: str = ""  # why it was given up
    report: str = ""  # the HTML page that --report wrote
    report_trouble: str = ""  # why it was not written
    made_up: str = ""  # what a synthetic run answered
    gives_vectors: bool = False  # the model does, and draws no tokens
    has_npy: bool = False  # vectors go to files of their own
    # how often each was the answer, where probabilities were asked for
    labels: dict[str, int] = field(default_factory=dict)
    # of the constrained rows that were measured; None: there are none
    constraint_mass: ConstraintMass | None = None
    table: Path | None = None  # of the rows and their answers
    # Of a run that servers elsewhere answered:
    servers: list[str] = field(default_factory=list)  # their URLs; none: a model here
    server_kind: str = ""  # what they are, such as vllm 0.12.1
    num_sent_again: int = 0  # requests that a server failed at, and were sent again
    num_without_usage: int = 0  # answers whose tokens no server has counted
    cost: str = ""  # "": no price is known

    @property
    def types(self) -> str:
        """Name the dtype, and those of weights and of the KV cache where they are others."""
        of_cache = (
            f", KV cache {self.kv_dtype}"
            if self.kv_dtype not in ("", self.dtype)
            else ""
        )
        return describe_dtypes(self.dtype, self.weight_dtype) + of_cache

    @property
    def has_errors(self) -> bool:
        return self.num_errors + self.num_kept_errors > 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the model computed, as the progress bar counts them too."""
        names = ("num_prompt_tokens", "num_generated_tokens")
        return self._compute_rate(sum(self.engine.get(name, 0) for name in names))

    @property
    def generated_per_s(self) -> float:
        """Of them, those that it drew."""
        return self._compute_rate(self.engine.get("num_generated_tokens", 0))

    @property
    def answered_per_s(self) -> float:
        """Tokens of the answered rows, shared prefixes and copied answers counted."""
        return self._compute_rate(self.prompt_tokens + self.completion_tokens)

    def _compute_rate(self, count: int) -> float:
        return count / self.wall_s if self.wall_s > 0 else 0.0

    def count_record(self, record: Record) -> None:
        """Count a record of this run."""
        self.prompt_tokens += record.num_prompt_tokens
        self.completion_tokens += record.num_completion_tokens
        if record.error is None:
            self.num_rows += 1
            for choice in record.choices:
                if "label_mass" in choice.fields:
                    self._count_label(choice.text)
            return
        self.num_errors += 1
        code = record.error.code
        self.errors_by_code[code] = self.errors_by_code.get(code, 0) + 1

    def _count_label(self, label: str) -> None:
        if label in self.labels or len(self.labels) < MAX_LABELS:
            self.labels[label] = self.labels.get(label, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        names = ("tokens_per_s", "generated_per_s", "answered_per_s")
        rates = {name: getattr(self, name) for name in names}
        paths = {
            "inputs": [*map(str, self.inputs)],
            "outputs": [*map(str, self.outputs)],
            "table": None if self.table is None else str(self.table),
        }
        return asdict(self) | paths | rates

    def to_text(self) -> str:
        """Return the summary for people."""
        return "\n".join(f"{name:<9} {text}" for name, text in self._make_lines())

    def _make_lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line's name and text."""
        place = f"({self.types}{self._device_text()})"
        if self.servers:
            place = f"({self.describe_servers()})"
        yield "model", f"{self.model} {place}"
        yield "rows", self._rows_text()
        if self.num_changed_inputs:
            yield "changed", self._changed_text()
        if self.made_up:
            yield "made up", self.made_up
        if self.device:  # otherwise nothing was left to do
            yield from self._make_work_lines()
        yield from self._make_warning_lines()
        if self.num_files_elsewhere:
            num_files = with_noun(self.num_files_elsewhere, "file")
            yield "elsewhere", f"other runs are answering {num_files}"
        for output in self.completed_elsewhere:
            yield (
                "elsewhere",
                f"{output} was completed by another run, which took it over",
            )
        if self.limit is not None:
            first = f"only the first {with_noun(self.limit, 'request')} of each input (--limit)"
            yield (
                "limit",
                f"{first}; the same command without it answers the others and keeps these",
            )
        for path, reason in self.refused.items():
            yield "refused", f"{path}: {reason}"
        yield from self._make_file_lines()

    def _make_file_lines(self) -> Iterator[tuple[str, str]]:
        files = list(dict.fromkeys(self.outputs))
        if self.table is not None:
            yield "table", str(self.table)
        for path in files:
            yield "output", "stdout" if path == STDOUT else str(path)
        others = [("vectors", vectors_path)] if self.has_npy else []
        others += [("errors", errors_path)] if self.has_errors else []
        for name, place in others:
            for path in map(place, files):
                if path.exists():
                    yield name, str(path)
        if self.report:
            yield "report", self.report
        num_retryable = sum(self.errors_by_code.get(code, 0) for code in RETRYABLE)
        if num_retryable and STDOUT not in files:
            yield (
                "again",
                f"the same command tries {with_noun(num_retryable, 'failed row')} again",
            )

    def _rows_text(self) -> str:
        """Say how many rows were answered, are in error, and were kept."""
        text = f"{self.num_rows:,} answered, {self.num_errors:,} in error"
        if self.errors_by_code:
            codes = (f"{count} {code}" for code, count in self.errors_by_code.items())
            text += f" ({', '.join(codes)})"
        if self.num_tried_rows:
            text += f"; {self.num_tried_rows:,} had failed before"
        if self.num_kept_rows:
            text += f"; {self.num_kept_rows:,} kept from earlier runs"
        if self.num_kept_errors:
            text += f", {self.num_kept_errors:,} of them in error"
        return text

    def describe_servers(self) -> str:
        """Say which servers answered."""
        urls = list_few(self.servers, NUM_NAMED)
        return f"{self.server_kind} at {urls}"

    def _make_server_lines(self) -> Iterator[tuple[str, str]]:
        """Say what is known of answers that servers gave."""
        if num_cached := self.engine["num_cached_tokens"]:
            num_prompt = self.engine["num_prompt_tokens"] + num_cached
            text = f"{num_cached:,} of {num_prompt:,} prompt tokens"
            yield "prefix", f"{text} were in the servers' caches"
        if self.num_sent_again:
            text = with_noun(self.num_sent_again, "request")
            yield "again", f"{text} had to be sent again, as a server failed at them"
        if self.num_without_usage:
            text = with_noun(self.num_without_usage, "answer")
            yield "usage", f"{text} came without a count of tokens, and count as none"
        if self.cost:
            yield "cost", self.cost
        yield (
            "answers",
            "as the servers gave them: not exact, and another run may get others",
        )

    def _device_text(self) -> str:
        if not self.device:
            return ""
        threads = (
            f", {with_noun(self.num_threads, 'thread')}" if self.num_threads else ""
        )
        if threads and self.num_ranks > 1:
            threads = f", {self.num_ranks} ranks of {threads[2:]}"
        limit = f", FMINFER_CPU={self.cpu_limit}" if self.cpu_limit else ""
        return f" on {self.device}{threads}{limit}"

    def _changed_text(self) -> str:
        """Say what became of answers to an earlier form of the inputs."""
        inputs = with_noun(self.num_changed_inputs, "input")
        has = "has" if self.num_changed_inputs == 1 else "have"
        text = (
            f"{inputs} {has} changed: {with_noun(self.num_taken_rows, 'earlier answer')} "
            "taken"
        )
        if self.num_left_out_rows:
            gone = "its line is" if self.num_left_out_rows == 1 else "their lines are"
            text += f", {self.num_left_out_rows:,} left out because {gone} gone"
        return text

    def _make_work_lines(self) -> Iterator[tuple[str, str]]:
        """Say what was computed, what was not computed again, and how fast."""
        stats = self.engine
        if self.labels:
            ordered = sorted(self.labels, key=lambda label: -self.labels[label])
            counts = [f"{label.strip()} {self.labels[label]:,}" for label in ordered]
            yield "labels", list_few(counts, NUM_NAMED)
        tokens = f"{self.prompt_tokens:,} prompt"
        if not self.gives_vectors:
            tokens += f" + {self.completion_tokens:,} generated"
        yield "tokens", tokens
        if self.servers:
            yield from self._make_server_lines()
        elif stats["num_cached_tokens"]:
            yield "prefix", self._prefix_text()
        if stats["num_put_back"] or stats["num_apart"]:
            yield "put back", self._again_text()
        for name, (label, why) in _SHORTFALLS.items():
            if stats[name]:
                yield label, f"{with_noun(stats[name], 'answer')} {why}"
        if self.result_cache:
            num_kept = with_noun(stats["num_kept_requests"], "request")
            yield "cache", f"{num_kept} had an answer in {self.result_cache}"
        if stats["num_copied_requests"]:
            num_copied = with_noun(stats["num_copied_requests"], "request")
            yield (
                "copied",
                f"{num_copied} had the answer of an equal one, which was computed once",
            )
        speed = f"{self.tokens_per_s:,.0f} tokens/s computed"
        if self.gives_vectors or self.servers:
            speed = f"{self._compute_rate(self.num_rows):,.1f} rows/s, {speed}"
        if not self.gives_vectors:
            speed += f", of them {self.generated_per_s:,.0f} generated"
        taken = ("num_cached_tokens", "num_copied_requests", "num_kept_requests")
        if any(stats[name] for name in taken):
            speed += f" ({self.answered_per_s:,.0f} with those that were shared)"
        yield "speed", speed if self.servers else f"{speed}; {self._busy_text()}"
        yield (
            "time",
            f"ready after {self.start_to_ready_s:.1f} s, then "
            f"{describe_short_time(self.wall_s)}",
        )
        if self.constraint_mass is not None:
            yield "allowed", self.constraint_mass.to_text()
        if self.same_answers:
            yield "answers", "the same whatever rows were beside them"
        if self.ranks:
            yield "memory", describe_memory(self.ranks)
        for number, stage in enumerate(stats["stages"]):
            if stage["num_passes"]:
                yield "offload", self._stream_text(number, stage)

    def _prefix_text(self) -> str:
        """Say what the prefix cache saved, and what the best possible one would have saved."""
        stats = self.engine
        total = (
            stats["num_prompt_tokens"]
            - stats["num_again_tokens"]
            - stats["num_label_tokens"]
            + stats["num_cached_tokens"]
        )
        text = (
            f"{stats['num_cached_tokens']:,} of {total:,} prompt tokens were shared and not "
            "computed again"
        )
        if stats["num_counted_shareable"]:
            share = stats["num_counted_cached"] / stats["num_counted_shareable"]
            is_whole = stats["num_counted_tokens"] == total
            text += f"; {share:.1%} of what a trie over the file allows"
            text += "" if is_whole else ", counted over the first rows"
        return text

    def _again_text(self) -> str:
        """Say which rows were fed again, and why."""
        reasons = [
            (self.engine["num_put_back"], "lost their KV cache to others"),
            (self.engine["num_apart"], "gave nan after a shared prefix"),
        ]
        rows = " and ".join(
            f"{with_noun(num, 'row')} {reason}" for num, reason in reasons if num
        )
        return (
            f"{rows}; fed again: {with_noun(self.engine['num_again_tokens'], 'token')}"
        )

    def _busy_text(self) -> str:
        """Say for which share of the run each stage computed."""
        shares = [
            stage["busy_s"] / max(self.wall_s, 1e-9) for stage in self.engine["stages"]
        ]
        if len(shares) < 2:
            return f"stage busy {sum(shares):.0%}"
        bubble = 1 - sum(shares) / len(shares)
        sent = sum(stage["sent_bytes"] for stage in self.engine["stages"])
        each = ", ".join(f"{share:.0%}" for share in shares)
        return f"stages busy {each} (bubble {bubble:.0%}); {sent / 1e6:,.1f} MB sent"

    def _stream_text(self, number: int, stage: dict[str, Any]) -> str:
        """Say how long a stage's streamed layers took, and what set the pace."""
        share = stage["waited_s"] / max(stage["busy_s"], 1e-9)
        num_stages = len(self.engine["stages"])
        stage_text = f" of stage {number}" if num_stages > 1 else ""
        read = f"{describe_bytes(stage['read_bytes'])} read"
        if stage["read_s"]:
            read += (
                f" at {describe_bytes(int(stage['read_bytes'] / stage['read_s']))}/s"
            )
        if self.num_ranks > num_stages:
            read += " by each rank"
        bound = "bringing layers" if share > 0.5 else "computing"
        verdict = f": {bound} set the pace" if share > 0.5 or share < 0.25 else ""
        passes = with_noun(stage["num_passes"], "pass", "passes")
        return (
            f"{passes}{stage_text}, {read}; it waited for layers {share:.0%} of the "
            f"time{verdict}"
        )

    def _make_warning_lines(self) -> Iterator[tuple[str, str]]:
        for number, stage in enumerate(self.engine["stages"]):
            mean = stage["read_bytes"] / stage["read_s"] if stage["read_s"] else 0.0
            if 0 < stage["slowest_read"] < mean / 2:
                yield (
                    "warning",
                    f"the disk of stage {number} was slow at times: one pass read at "
                    f"{describe_bytes(int(stage['slowest_read']))}/s, all together at "
                    f"{describe_bytes(int(mean))}/s",
                )
        for rank, stage in enumerate(self.engine["stages"]):
            if stage["max_tokens"]:
                yield (
                    "warning",
                    f"memory ran out on rank {rank}: it computes {stage['max_tokens']} "
                    "tokens at once now; a smaller --chunk-size or --budget would "
                    "avoid that",
                )
        if self.is_beside_other_work:
            yield (
                "warning",
                "other work slowed this run: threads stood in line for it "
                f"{self.other_work_s:,.1f} s, {self.other_work_share:.0%} of the time "
                "of their cores; run it alone, or keep other work off these cores",
            )
        if self.cache_trouble:
            yield "warning", f"--result-cache was given up: {self.cache_trouble}"
        if self.num_damaged_rows:
            rows = with_noun(self.num_damaged_rows, "row")
            yield (
                "warning",
                f"damaged on the disk, and answered again: {rows} of earlier runs",
            )
        if self.why_dependent:
            yield "note", f"answers may depend on other rows: {self.why_dependent}"
        flags = {"--dtype": self.dtype, "--kv-dtype": self.kv_dtype}
        rounding = {
            flag: name for flag, name in flags.items() if name not in ("", "float32")
        }
        is_seeded = self.engine.get("read", {}).get("num_seeded")
        if is_seeded and rounding and not self.same_answers:
            where = ("" if "--dtype" in rounding else "with a KV cache ") + "in "
            where += next(iter(rounding.values()))
            yield (
                "note",
                f"{where} a seed repeats its draws only beside the same rows and with the same "
                f"options; in float32 ({' and '.join(rounding)}) it does so nearly always",
            )
        for text, num_rows in self.warnings.items():
            yield "warning", f"{text} ({with_noun(num_rows, 'row')})"
