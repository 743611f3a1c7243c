"""Chat requests that are answered together, or again: what each of them gets."""

from __future__ import annotations

import json
from typing import Any

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.engine.prompt_fit import KvSize
from tests.engine.test_chat import CALL, HELLO, TOOLS, ChatBench
from tests.line_bench import over_lines

GREEDY = {"messages": HELLO, "temperature": 0}


def run_joined(bench: ChatBench, *requests: dict[str, Any]) -> list[Record]:
    lines = [
        Line(0, i, json.dumps(r).encode()) for i, r in enumerate(requests, start=1)
    ]
    records = over_lines(bench.loop, bench.intake, joins_equal=True).run(lines)
    return sorted(records, key=lambda record: record.line.number)


def call_id(record: Record) -> str:
    assert record.result is not None, record.error
    (call,) = record.result["choices"][0]["message"]["tool_calls"]
    return str(call["id"])


def test_ids_of_calls_are_the_same_with_company_and_alone() -> None:
    """A greedy line that took another's answer had that one's seed in its ids.

    A run that goes on computes it alone, and wrote other bytes than a run in one go.
    """
    first, second = (GREEDY | {"tools": TOOLS, "seed": seed} for seed in (1, 2))
    together = run_joined(ChatBench(CALL + b"\0"), first, second)
    (alone,) = run_joined(ChatBench(CALL + b"\0"), second)
    assert call_id(together[1]) == call_id(alone)
    drawn = [
        GREEDY | {"tools": TOOLS, "temperature": 1, "seed": seed} for seed in (1, 2)
    ]
    ids = {call_id(record) for record in run_joined(ChatBench(CALL + b"\0"), *drawn)}
    assert len(ids) == 2, "seeds count where chance has a part"


def test_a_default_that_fits_takes_no_error_of_one_that_does_not() -> None:
    """A run's default max_tokens is lowered to the KV cache; the same number written is not."""
    bench = ChatBench(
        b"a" * 3000, context=2000, max_new_tokens=1800, kv_size=KvSize(400, 4)
    )
    written, left_out = run_joined(bench, GREEDY | {"max_tokens": 1800}, GREEDY)
    assert written.error is not None and written.error.code == "out_of_memory"
    assert left_out.result is not None
    assert left_out.num_completion_tokens == 1600


def test_an_answer_that_the_kv_cache_shortens_is_warned_of() -> None:
    bench = ChatBench(b"a" * 3000, context=2000, kv_size=KvSize(400, 4))
    (choice,) = bench.choices()
    assert choice["finish_reason"] == "length"
    (warning,) = bench.warnings
    assert "--budget" in warning and "max_tokens" in warning
    for context, fields in ((2000, {"max_tokens": 9}), (200, {})):
        other = ChatBench(b"a\0", context=context, kv_size=KvSize(400, 4))
        other.choices(**fields)
        assert not other.warnings


def test_an_argument_of_the_run_leaves_nothing_of_what_it_replaces() -> None:
    """They met in the request, which was then refused."""
    for args, fields in (
        ({"logprobs": None}, {"logprobs": True, "top_logprobs": 2}),
        ({"max_completion_tokens": 3}, {"max_tokens": 8}),
        ({"max_tokens": 3}, {"max_completion_tokens": 8}),
        # the old command's flag, for a file with both kinds of lines
        ({"best_of": 1}, {}),
    ):
        (choice,) = ChatBench(b"abcdefgh", request_args=args).choices(**fields)
        assert choice["logprobs"] is None
        assert len(choice["message"]["content"]) == 3 or "max" not in next(iter(args))
    both = {"max_tokens": 3, "max_completion_tokens": 3}
    (choice,) = ChatBench(b"abcdefgh", request_args=both).choices(max_tokens=8)
    assert choice["message"]["content"] == "abc"
