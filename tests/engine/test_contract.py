"""What a request means: stops, lengths, echo, logprobs, choices (docs/contract.md).

The model is a stub that draws what a test scripts, so that every case is exact: its
"logits" put a given id first at each position, and everything else is the engine's own code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fminfer.compute.values.step import Results, Step, StepResult, TokenLogprobs
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.engine.blocks import BlockPool
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PreparedRequest, RequestState
from fminfer.engine.start import RequestStarter
from fminfer.runtime.lines.runner import LOOKAHEAD
from fminfer.text.tokenizer import Tokenizer
from tests.line_bench import LineBench
from tests.steps import Row, StepReader, make_logprobs

EOS = 0
CONTEXT = 40
VOCAB = 256


class ScriptedPipeline:
    """Draws the script's byte for each position after the prompt `>`; checks every step
    it gets."""

    def __init__(self, script: bytes, block_size: int) -> None:
        self.script = script
        self.block_size = block_size
        self.num_in_flight = 0
        self.fails = False
        self.steps: list[Step] = []
        self._reader = StepReader()
        self._results: list[StepResult] = []

    def submit(self, step: Step) -> None:
        rows = self._reader.rows(step)
        assert step.num_tokens > 0 and all(row.token_ids for row in rows)
        for row in rows:
            blocks_needed = -(-(row.position + len(row.token_ids)) // self.block_size)
            assert len(row.block_table) >= blocks_needed
        self.steps.append(step)
        self.num_in_flight += 1
        self._results.append(self._answer(step, rows))

    def collect(self) -> StepResult:
        self.num_in_flight -= 1
        result = self._results.pop(0)
        if self.fails:
            raise RuntimeError("the stage failed")
        return result

    def drop_steps(self) -> None:
        self._results.clear()
        self.num_in_flight = 0

    def _answer(self, step: Step, rows: list[Row]) -> StepResult:
        positions = [
            row.position + i for row in rows for i in range(len(row.token_ids))
        ]
        ids = []
        for place, draw in enumerate(step.draws):
            token = self.script[positions[draw["token_index"]] % len(self.script)]
            ids.append(token if draw["temperature"] == 0 else token ^ (place % 2))
        results: Results = {}
        if len(step.draws):
            results["tokens"] = _logprobs(ids, step.draws["num_top"])
        if len(step.scores):
            results["prompt scores"] = _logprobs(
                step.scores["target_id"].tolist(), step.scores["num_top"]
            )
        return StepResult(step.step_id, results, [])


def _logprobs(ids: list[int], num_top: np.ndarray) -> TokenLogprobs:
    """Say that every id had -1.5, and that the ids from 200 were better than it."""
    most = int(num_top.max())
    return make_logprobs(
        ids,
        [math.nan if token_id == 255 else -1.5 for token_id in ids],
        [range(200, 200 + most)] * len(ids),
        [[-0.125 * (j + 1) for j in range(most)]] * len(ids),
    )


def usage(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Bench(LineBench):
    """An engine loop over the scripted pipeline. The script is read from the prompt's end on."""

    def __init__(self, script: bytes = b"abcdefgh", **options: int) -> None:
        block_size = options.get("block_size", 4)
        num_blocks = options.get("num_blocks", 64)
        pool = BlockPool(num_blocks, block_size)
        scheduler = Scheduler(
            pool,
            chunk_size=options.get("chunk_size", 16),
            max_rows=options.get("max_rows", 8),
            micro_batches=2,
            shares=bool(options.get("prefix_cache", True)),
        )
        self.pipeline = ScriptedPipeline(script, block_size)
        super().__init__(
            RequestLimits(options.get("context", CONTEXT), VOCAB, frozenset({EOS})),
            scheduler,
            self.pipeline,
            tokenizer=self.make_tokenizer(),
        )

    def make_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of 256 ids; None: each of them is its byte."""
        return None

    def run(
        self, *requests: dict[str, Any], read_ahead: int = LOOKAHEAD
    ) -> list[Record]:
        lines = [
            Line(0, i, json.dumps(r).encode()) for i, r in enumerate(requests, start=1)
        ]
        return sorted(
            self.run_lines(lines, read_ahead), key=lambda record: record.line.number
        )

    def result(self, **request: Any) -> dict[str, Any]:
        (record,) = self.run({"prompt": ">", "temperature": 0} | request)
        assert record.error is None, record.error
        assert record.result is not None
        return record.result

    def choice(self, **request: Any) -> dict[str, Any]:
        (choice,) = self.result(**request)["choices"]
        assert isinstance(choice, dict)
        return choice


def test_length() -> None:
    choice = Bench().choice(max_tokens=3)
    assert choice == {"text": "abc", "index": 0, "finish_reason": "length"}


def test_eos_is_not_in_the_text_nor_listed_without_echo() -> None:
    choice = Bench(b"ab\0d").choice(logprobs=0)
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_eos_first_under_echo_with_one_token() -> None:
    """lm-eval slices [ctxlen:-1] and so always drops one generated entry: EOS must be one."""
    choice = Bench(b"..\0").choice(
        prompt=list(b"xyz"), max_tokens=1, echo=True, logprobs=1
    )
    assert choice["text"] == "xyz" and choice["finish_reason"] == "stop"
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(choice["logprobs"][key]) == 4, key
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_ignore_eos() -> None:
    assert Bench(b"a\0b").choice(max_tokens=3, ignore_eos=True)["text"] == "a\0b"


@pytest.mark.parametrize(
    "stop, text, tokens",
    [
        ("bc", "a", "a"),  # across two tokens
        (["d"], "abc", "abc"),  # one token
        (["a"], "", ""),  # the first token
        (["ef", "cd"], "ab", "ab"),  # the later listed one is earlier in the text
        ([">", "c"], "ab", "ab"),  # the prompt's own text does not stop
        ("xyz", "abcdefgh", "abcdefgh"),
    ],
)
@pytest.mark.parametrize("echo", [False, True])
def test_stop_strings(
    stop: str | list[str], text: str, tokens: str, echo: bool
) -> None:
    choice = Bench().choice(stop=stop, max_tokens=8, logprobs=0, echo=echo)
    prompt = ">" if echo else ""
    assert choice["text"] == prompt + text
    assert choice["finish_reason"] == ("length" if stop == "xyz" else "stop")
    assert "".join(choice["logprobs"]["tokens"]) == prompt + tokens
    assert choice["logprobs"]["text_offset"] == list(
        range(1 - len(prompt), len(text) + 1)
    )


def test_stop_wins_over_length_and_its_tokens_count() -> None:
    result = Bench().result(stop="c", max_tokens=3)
    assert result["choices"][0]["finish_reason"] == "stop"
    assert result["usage"] == usage(1, 3)


def test_a_stop_inside_a_token_keeps_the_token_across_the_cut() -> None:
    """The bytes of one character share its offset; a stop that ends inside keeps what began."""
    emoji = "🙂".encode()
    choice = Bench(b"a" + emoji + b"bc").choice(stop="b", max_tokens=7, logprobs=0)
    assert choice["text"] == "a🙂"
    assert choice["logprobs"]["text_offset"] == [1, 2, 2, 2, 2]
    assert len(choice["logprobs"]["tokens"]) == 5


def test_offsets_behind_bytes_that_are_no_character() -> None:
    """The token behind such a byte began too early, and stayed behind a stop string's cut."""
    request = {"prompt": "ab", "max_tokens": 4, "logprobs": 0}
    bench = Bench(b"_\xe5a\xe5a_")
    assert bench.choice(**request)["logprobs"]["text_offset"] == [2, 3, 4, 5]
    cut = bench.choice(**request, stop="a")
    assert (cut["text"], cut["logprobs"]["text_offset"]) == ("\ufffd", [2])
    whole = bench.choice(**request, stop="a", include_stop_str_in_output=True)
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("\ufffda", [2, 3])
    echoed = {
        "prompt": [97, 0xE5, 97, 97],
        "max_tokens": 0,
        "logprobs": 0,
        "echo": True,
    }
    assert bench.choice(**echoed)["logprobs"]["text_offset"] == [0, 1, 2, 3]
    ended = Bench(b"_\xe5\0").choice(**request, include_stop_str_in_output=True)
    assert ended["text"] == "\ufffd\0" and ended["logprobs"]["text_offset"] == [2, 3]


def test_a_broken_end_of_a_prompt_is_shown_once() -> None:
    """Under echo two broken bytes at the prompt's end stood in the completion's text as well."""
    bench = Bench(b"_\xae\xa7\xae")
    asked = {"prompt": [0xB4, 0x98], "max_tokens": 3}
    for echo in (False, True):
        text = bench.choice(**asked, echo=echo)["text"]
        assert text == "\ufffd" * (5 if echo else 3)


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    choice = Bench(b"a" + "🙂".encode()).choice(max_tokens=3)
    assert choice["text"] == "a\ufffd"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_max_tokens_0(echo: bool, logprobs: int | None) -> None:
    bench = Bench()
    result = bench.result(prompt="xyz", max_tokens=0, echo=echo, logprobs=logprobs, n=3)
    assert len(result["choices"]) == 3
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
    choice = result["choices"][2]
    assert (choice["text"], choice["finish_reason"]) == (
        "xyz" if echo else "",
        "length",
    )
    assert ("logprobs" in choice) == (logprobs is not None)
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == (
            [None, -1.5, -1.5] if echo else []
        )
    assert result["usage"] == usage(3, 0)
    fed = sum(step.num_tokens for step in bench.pipeline.steps)
    assert fed == (2 if echo and logprobs is not None else 0), (
        "what nobody asks for is not run"
    )


def test_a_prompt_of_context_and_one_more() -> None:
    whole = "x" * CONTEXT
    assert (
        Bench().choice(prompt=whole, max_tokens=0, echo=True, logprobs=0)["text"]
        == whole
    )
    more = whole + "y"
    found = Bench().choice(prompt=more, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    assert found["token_logprobs"] == [None] + [-1.5] * CONTEXT
    for request in (
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"max_tokens": 1, "echo": True},
    ):
        (record,) = Bench().run({"prompt": more} | request)
        assert (
            record.error is not None and record.error.code == "context_length_exceeded"
        )
    assert Bench().choice(prompt=whole[:-3], max_tokens=3)["finish_reason"] == "length"
    (record,) = Bench().run({"prompt": whole[:-3], "max_tokens": 4})
    assert record.error is not None and "41 in all" in record.error.message


@pytest.mark.parametrize("k", [0, 1, 5, 50])
def test_logprobs(k: int) -> None:
    choice = Bench().choice(prompt=">>", max_tokens=2, logprobs=k)
    found = choice["logprobs"]
    assert list(found) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert found["token_logprobs"] == [-1.5, -1.5] and found["text_offset"] == [2, 3]
    if k == 0:
        assert found["top_logprobs"] is None
        return
    values = list(found["top_logprobs"][0].values())
    assert len(values) == k + 1, "the chosen token stands behind the k best"
    assert values[-1] == -1.5 and values[:-1] == sorted(values[:-1], reverse=True)


def test_rows_with_fewer_logprobs_than_their_neighbours_get_their_own_number() -> None:
    requests = [{"prompt": ">", "logprobs": k, "temperature": 0} for k in (1, 5, 2)]
    for request, record in zip(requests, Bench().run(*requests), strict=True):
        assert record.result is not None
        top = record.result["choices"][0]["logprobs"]["top_logprobs"]
        assert {len(entry) for entry in top} == {request["logprobs"] + 1}


def test_prompts_times_n_in_order() -> None:
    result = Bench().result(prompt=[">", ">>"], n=2, max_tokens=2)
    assert [c["text"] for c in result["choices"]] == ["ab", "ab", "bc", "bc"]
    assert [c["index"] for c in result["choices"]] == [0, 1, 2, 3]
    assert result["usage"] == usage(3, 8)


def test_a_prompt_is_fed_once_whatever_n() -> None:
    bench = Bench()
    bench.result(prompt="x" * 10, n=4, max_tokens=3, temperature=1)
    lengths = np.concatenate([step.lengths for step in bench.pipeline.steps])
    assert lengths[lengths > 1].sum() == 10
    copies = [copy for step in bench.pipeline.steps for copy in step.block_copies]
    assert len(copies) == 3, "the unfilled block is copied for each other candidate"
    assert bench.loop.stats.num_prompt_tokens == 10


def test_greedy_candidates_are_computed_once_and_counted() -> None:
    bench = Bench()
    result = bench.result(n=2, best_of=5, max_tokens=3)
    assert [choice["text"] for choice in result["choices"]] == ["abc", "abc"]
    assert result["usage"]["completion_tokens"] == 15
    assert bench.loop.stats.num_generated_tokens == 3


def test_request_is_verbatim_and_order_of_lines_is_known() -> None:
    raw = (
        b'{"engine":"e", "prompt" : ">","temperature":0.0, "x":{"y":[1.0,null]}, '
        b'"max_tokens":1}'
    )
    (record,) = Bench().run_lines([Line(3, 7, raw + b"\n")])
    assert record.to_json().startswith(b'{"request":' + raw + b',"result":{"choices":[')
    assert (record.line.source, record.line.number) == (3, 7)


def test_bad_lines_cost_only_themselves() -> None:
    records = Bench().run(
        {"prompt": ">", "max_tokens": 1, "temperature": 0},
        {"prompt": 5},
        {"prompt": [1, 256]},
        {"prompt": ""},
        {"prompt": ">", "max_tokens": 1, "temperature": 0},
    )
    codes = [record.error.code if record.error else None for record in records]
    assert codes == [None, "invalid_type", "token_out_of_range", "missing_prompt", None]
    error = records[2].to_dict()
    assert error["line"] == 3 and error["request"] == {"prompt": [1, 256]}
    assert error["error"]["type"] == "invalid_request_error" and not error["retryable"]


def test_nan_costs_only_its_row() -> None:
    records = Bench(b"ab\xffd").run(
        {"prompt": ">", "max_tokens": 2, "temperature": 0},
        {"prompt": ">", "max_tokens": 4, "temperature": 0},
        {"prompt": "\xff>", "max_tokens": 0, "echo": True, "logprobs": 1},
    )
    codes = [record.error.code if record.error else None for record in records]
    assert codes == [None, "nan_logits", None]
    assert records[1].error is not None and records[1].error.type == "server_error"


def test_what_can_never_fit_is_an_error_of_its_row() -> None:
    """A request with too large an n, of chat as well, was told of its best_of."""
    records = Bench(num_blocks=4).run(
        {"prompt": ">", "max_tokens": 17, "temperature": 0},
        {"prompt": ">", "max_tokens": 16, "temperature": 0},
        {"prompt": ">", "max_tokens": 2, "n": 9},
    )
    codes = [record.error.code if record.error else None for record in records]
    assert codes == ["out_of_memory", None, "out_of_memory"]
    assert (
        records[2].error is not None
        and "--max-rows allows 8" in records[2].error.message
    )
    assert records[2].error.param == "n" and "best_of" not in records[2].error.message
    chat, drawn, memory = Bench(num_blocks=4).run(
        {"prompt": ">", "max_tokens": 2, "n": 9, "best_of": 9},
        {"prompt": ">", "max_tokens": 2, "n": 2, "best_of": 9},
        {"prompt": ">", "max_tokens": 16, "n": 3},
    )
    assert chat.error is not None and chat.error.param == "n"
    assert drawn.error is not None and drawn.error.param == "best_of"
    assert drawn.error.message.startswith("best_of is 9")
    assert memory.error is not None and "lower max_tokens or n" in memory.error.message
    assert records[0].error is not None and "16 tokens" in records[0].error.message


@pytest.mark.parametrize("num_blocks", [20, 26, 64])
@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_any_budget_and_chunk_size_gives_the_same(
    num_blocks: int, chunk_size: int
) -> None:
    """Forty rows of all kinds through a cache that holds few of them; the books end even."""
    requests = [
        {
            "prompt": ">" * (1 + i * 7 % 20),
            "max_tokens": i * 5 % 13,
            "temperature": i % 3 * 0.5,
            "n": 1 + i % 3,
            "echo": i % 2 == 0,
            "logprobs": i % 4 or None,
        }
        for i in range(40)
    ]

    def texts(records: list[Record]) -> list[Any]:
        assert not [record.error for record in records if record.error]
        return [
            [c["finish_reason"] for c in r.to_dict()["result"]["choices"]]
            for r in records
        ]

    bench = Bench(num_blocks=num_blocks, chunk_size=chunk_size)
    found = bench.run(*requests)
    assert texts(found) == texts(Bench().run(*requests))
    assert all(step.num_tokens <= chunk_size for step in bench.pipeline.steps)
    bench.scheduler.check_books()


def test_a_fault_of_ours_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    encode = bench.tokenizer.encode

    def fail_on_x(text: str, **options: Any) -> Any:
        if text == "x":
            raise ValueError("boom")
        return encode(text, **options)

    monkeypatch.setattr(bench.tokenizer, "encode", fail_on_x)
    records = bench.run({"prompt": "x"}, {"prompt": ">", "max_tokens": 1})
    assert records[0].error is not None and records[0].error.code == "internal_error"
    assert records[1].error is None


def test_so_does_one_as_its_row_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the run."""
    start = RequestStarter.start_request

    def fail_on_x(
        self: RequestStarter, request_id: int, prepared: PreparedRequest
    ) -> RequestState:
        if prepared.prompts[0].text == "x":
            raise ValueError("boom")
        return start(self, request_id, prepared)

    monkeypatch.setattr(RequestStarter, "start_request", fail_on_x)
    records = Bench().run({"prompt": "x"}, {"prompt": ">", "max_tokens": 1})
    assert records[0].error is not None and records[0].error.code == "internal_error"
    assert records[1].error is None


def test_a_run_that_is_left_early_leaves_nothing_behind() -> None:
    """The next run used to yield the old run's records, or never end."""
    bench = Bench()
    lines = [Line(0, i, b'{"prompt": ">", "max_tokens": 9}') for i in range(1, 40)]
    left = bench.run_lines(lines)
    next(left)
    left.close()
    assert [r.line.number for r in bench.run({"prompt": ">", "max_tokens": 3})] == [1]


def test_an_engine_can_be_used_after_a_failure() -> None:
    """It used to wait for ever: blocks were held by sequences that nobody would end."""
    bench = Bench()
    bench.pipeline.fails = True
    with pytest.raises(RuntimeError, match="the stage failed"):
        bench.run({"prompt": ">"}, {"prompt": ">>", "n": 3})
    bench.pipeline.fails = False
    assert bench.result(max_tokens=2)["choices"][0]["text"] == "ab"


def test_reading_is_lazy() -> None:
    """No more lines are read than can run or wait; records come while the input goes on."""
    num_read = 0

    def lines() -> Iterator[Line]:
        nonlocal num_read
        for number in range(1, 2001):
            num_read += 1
            yield Line(0, number, b'{"prompt": ">", "max_tokens": 5, "temperature": 0}')

    records = Bench().run_lines(lines())
    next(records)
    assert num_read < 200
    assert sum(1 for _ in records) == 1999


def test_an_empty_input() -> None:
    assert Bench().run() == []


def test_times_add_up() -> None:
    requests = [{"prompt": ">" * (1 + i), "max_tokens": 1 + i % 7} for i in range(30)]
    records = Bench().run(*requests)
    times = [record.to_dict()["result"]["request_time"] for record in records]
    assert all(time["batch_size"] >= 1 and min(time.values()) >= 0 for time in times)
    for time in times:
        parts = time["prefill_time"] + time["decode_time"]
        assert parts == pytest.approx(time["batch_time"])


def test_prompts_that_cannot_be_fed_yet_hold_no_blocks() -> None:
    """Ninety-six prompts let in at once held 2 GB of KV cache while one of them was
    being fed."""
    bench = Bench(num_blocks=1000, max_rows=100, prefix_cache=False)
    scored = {"prompt": "x" * 16, "max_tokens": 0, "echo": True, "logprobs": 0}
    bench.run(*[scored] * 50)
    assert bench.loop.stats.max_rows_running <= 4
