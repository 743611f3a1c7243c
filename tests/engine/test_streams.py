"""Deltas of a stream: joined they are the answer, nothing is taken back, all comes early."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fminfer.engine.blocks import BlockPool
from fminfer.engine.engine_core import Delta, Event
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.scheduler import Scheduler
from fminfer.runtime.team.team_process import StreamPosition
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import IS_ALL
from tests.engine import test_prefix
from tests.engine.test_contract import Bench, ScriptedPipeline
from tests.engine.test_put_back import rows
from tests.line_bench import LineBench
from tests.streams import check_stream, events_of, failed, of_request
from tests.text.test_sentencepiece import TEXTS, make_folder

EMOJI = "🙂".encode()
ASKED: dict[str, Any] = {
    "prompt": ">",
    "temperature": 0,
    "max_tokens": 8,
    "is_streamed": True,
    "return_token_ids": True,
}


def stream(bench: LineBench, **request: Any) -> list[Event]:
    """Return the events of one streamed request, whose deltas are seen to be its answer."""
    request_id = bench.add(**ASKED | request)
    events = events_of(bench.loop)
    check_stream(events, request_id)
    bench.scheduler.check_books()
    return events


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Delta) and event.text]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (b"abcdefgh", {}),
        (b"abcdefgh", {"n": 3}),
        (b"abcdefgh", {"n": 2, "best_of": 4}),
        (b"abcdefgh", {"n": 3, "temperature": 1}),
        (b"abcdefgh", {"n": 2, "best_of": 4, "temperature": 1}),
        (b"abcdefgh", {"prompt": [">", ">>", "x" * 20], "n": 2}),
        (b"abcdefgh", {"prompt": [[62, 62], [62]]}),
        (b"abcdefgh", {"max_tokens": 0, "n": 2, "prompt": ["xyz", "x"]}),
        (b"abcdefgh", {"stop": "cd"}),
        (b"abcdefgh", {"stop": ["cdx", "defy"]}),  # begun and not completed
        (b"abcdefgh", {"stop": ["a"]}),  # at once complete
        (b"abcdefgh", {"stop": ["cd"], "include_stop_str_in_output": True}),
        (b"abcdefgh", {"stop": ["cd", "h"], "min_tokens": 4}),
        (b"abcab\0cd", {"stop": ["abx"]}),
        (b"\0bc", {}),
        (b"ab\0d", {"ignore_eos": True, "stop_token_ids": [100]}),
        (b"abcd", {"stop_token_ids": [99], "include_stop_str_in_output": True}),
        (b"a" + EMOJI * 3, {}),
        (b"a" + EMOJI * 3, {"max_tokens": 7, "stop": ["🙂🙂x"]}),
        (b"a\xf0\x9fb\xe5\xe5c\xff"[:7], {"stop": ["\ufffdc"]}),
        (b"a" + EMOJI[:3] + b"\0", {"include_stop_str_in_output": True}),
    ],
)
def test_joined_deltas_are_the_answer(
    script: bytes, fields: dict[str, Any], logprobs: int | None, echo: bool
) -> None:
    stream(Bench(script), logprobs=logprobs, echo=echo, **fields)


def test_tokens_come_one_by_one() -> None:
    assert texts(stream(Bench())) == list("abcdefgh")
    assert texts(stream(Bench(), echo=True, max_tokens=3)) == [">a", "b", "c"]
    assert texts(stream(Bench(b"a" + EMOJI + b"b"), max_tokens=6)) == ["a", "🙂", "b"]


def test_what_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    assert texts(stream(Bench(), stop=["bcd!", "ef?"])) == ["a", "bcd", "efg", "h"]
    assert texts(stream(Bench(), stop=["bcd"])) == ["a"]
    late = stream(Bench(), stop=["bc", "xyz"], min_tokens=8)
    assert texts(late) == ["a", "bc", *"defgh"], (
        "a whole one that does not count is none"
    )
    assert texts(stream(Bench(b"aab"), stop=["aax"], max_tokens=3)) == ["aab"]


def test_the_best_of_several_are_told_at_the_end() -> None:
    """Only then it shows which they are."""
    events = stream(Bench(), n=2, best_of=4, temperature=1)
    assert [type(event).__name__ for event in events] == ["Delta", "Delta", "Finished"]


def test_only_who_asks_for_it_has_a_stream() -> None:
    bench = Bench()
    ids = [
        bench.add(**ASKED | {"is_streamed": is_streamed})
        for is_streamed in (False, True)
    ]
    events = events_of(bench.loop)
    assert len(of_request(events, ids[0])) == 1
    check_stream(events, ids[1])


def test_a_row_that_gives_nan_fails_behind_what_was_told() -> None:
    bench = Bench(b"ab\xffd")
    bench.add(**ASKED)
    events = events_of(bench.loop)
    assert texts(events) == ["a", "b"]
    assert [each.error.code for each in failed(events)] == ["nan_logits"]
    assert events[-1] is failed(events)[0]


ALPHABET = [*"abab\n", "é", "🙂", "\ufffd"]
SCRIPTS = st.lists(
    st.one_of(
        st.sampled_from([each.encode() for each in ALPHABET]),
        st.sampled_from([b"\xf0", b"\x9f", b"\xc3", b"\xe5\xad", b"\xfe", b"\0"]),
    ),
    min_size=1,
    max_size=30,
).map(b"".join)
STOPS = st.lists(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=4), max_size=3)


@settings(
    max_examples=900 if IS_ALL else 100,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    script=SCRIPTS,
    stop=STOPS,
    max_tokens=st.integers(1, 30),
    fields=st.fixed_dictionaries(
        {
            "logprobs": st.sampled_from([None, 0, 2]),
            "echo": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.sampled_from([[], [98], [0x9F]]),
            "prompt": st.sampled_from(
                [">", ">🙂", [62, 0xF0], [0xF0, 0x9F], [62, 0x9F]]
            ),
        }
    ),
    min_tokens=st.integers(0, 30),
)
def test_random_streams(
    script: bytes,
    stop: list[str],
    max_tokens: int,
    fields: dict[str, Any],
    min_tokens: int,
) -> None:
    """No delta takes text back, and what is held back could become a stop or a character."""
    bench = Bench(script, context=100)
    request = ASKED | fields | {"stop": stop, "max_tokens": max_tokens}
    request["min_tokens"] = min(min_tokens, max_tokens)
    request_id = bench.add(**request)
    events: list[Event] = []
    held: list[tuple[int, str]] = []  # characters told, and all that was drawn
    while bench.loop.has_work:
        events += bench.loop.step()
        sequences = [
            s for r in bench.loop._open.values() for p in r.prompts for s in p.sequences
        ]
        for sequence in sequences:
            told = "".join(texts(events))
            ids = bytes(token.token_id for token in sequence.tokens)
            held.append((len(told), ids.decode(errors="replace")))
    (choice,) = check_stream(events, request_id)
    bench.scheduler.check_books()
    prompt = request["prompt"] if isinstance(request["prompt"], str) else None
    # broken bytes at its end may become a character with the first tokens
    if prompt is None:
        return
    for num_told, text in held:
        text = (prompt if fields["echo"] and num_told else "") + text
        assert choice["text"][:num_told] == text[:num_told]
        rest = text[num_told:]
        broken = rest[-3:]
        rest = rest[: len(rest) - len(broken)] + broken.rstrip("\ufffd")
        assert not rest or any(
            each.startswith(rest) and each != rest for each in stop
        ), rest


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder, "llama")
    return Tokenizer.load(folder)


def scripted(tokenizer: Tokenizer, ids: list[int]) -> LineBench:
    """Return a loop that draws these ids behind a prompt of one token."""
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, chunk_size=16, max_rows=8, micro_batches=2)
    pipeline = ScriptedPipeline(cast(bytes, ids), 4)
    limits = RequestLimits(200, 360, frozenset({2}))
    return LineBench(limits, scheduler, pipeline, tokenizer=tokenizer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skips", [True, False])
def test_streams_of_sentencepiece(
    llama_tokenizer: Tokenizer, text: str, skips: bool
) -> None:
    """Leading spaces, bytes in the place of tokens, and special tokens between them."""
    ids = [1, *llama_tokenizer.encode(text, add_special_tokens=False).ids]
    ids = [*ids[:3], 1, 0, *ids[3:]]
    for first in (ids, ids[1:]):
        for fields in (
            {},
            {"stop": ["he", "or x"]},
            {"ignore_eos": True, "echo": True},
        ):
            bench = scripted(llama_tokenizer, [*first, 2])
            request = {
                "prompt": [1],
                "max_tokens": len(first) + 1,
                "logprobs": 2,
            } | fields
            events = stream(bench, **request, skip_special_tokens=skips)
            assert len(texts(events)) > 1 or len(ids) < 12


@settings(
    max_examples=300 if IS_ALL else 30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data())
def test_streams_of_random_ids(llama_tokenizer: Tokenizer, data: st.DataObject) -> None:
    # of which 255 gives nan
    known = st.integers(0, 359).filter(lambda token_id: token_id != 255)
    ids = data.draw(st.lists(known, min_size=1, max_size=15))
    fields = {
        "prompt": data.draw(st.lists(st.integers(0, 359), min_size=1, max_size=1)),
        "max_tokens": len(ids),
        "logprobs": data.draw(st.sampled_from([0, 3])),
        "echo": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "stop": data.draw(
            st.lists(st.sampled_from(["t", " th", "or", "e ", "\ufffd"]), max_size=2)
        ),
    }
    stream(scripted(llama_tokenizer, ids), **fields)


def test_rows_that_lose_their_blocks_go_on_with_their_streams() -> None:
    """Some for want of blocks, others for rows of a higher priority."""
    requests = rows(2, 40, 60, 0.9) + rows(3, 40, 60, 0.0)
    asked = [
        request | {"max_tokens": 60, "return_token_ids": True, "is_streamed": True}
        for request in requests
    ]
    sizes: dict[str, Any] = {
        "has_cache": True,
        "block_size": 4,
        "chunk": 64,
        "max_rows": 64,
    }
    roomy = test_prefix.Bench(num_blocks=9000, **sizes)
    ids = [roomy.add(**request) for request in asked]
    events = events_of(roomy.loop)
    expected = [check_stream(events, request_id) for request_id in ids]
    tight = test_prefix.Bench(num_blocks=100, **sizes)
    found = list[Event]()
    ids = []
    for number, request in enumerate(asked):
        ids.append(tight.add(priority=number % 3 - 1, **request))
        found += tight.loop.step()
    found += events_of(tight.loop)
    assert [check_stream(found, request_id) for request_id in ids] == expected
    assert tight.loop.stats.num_put_back > 10
    tight.scheduler.check_books()


@settings(
    max_examples=300 if IS_ALL else 30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(script=SCRIPTS, stop=STOPS, data=st.data())
def test_a_stream_that_begins_anew_tells_nothing_twice(
    script: bytes, stop: list[str], data: st.DataObject
) -> None:
    """As often as the pipeline dies, and whatever of it was heard."""
    asked = {
        "stop": stop,
        "logprobs": 1,
        "max_tokens": 12,
        "echo": data.draw(st.booleans()),
    }
    *deltas, answer = stream(Bench(script), **asked, n=2)
    heard: dict[int, StreamPosition] = {}
    told: list[Event] = []
    cuts = data.draw(st.lists(st.integers(0, len(deltas)), max_size=3))
    for cut in [*cuts, len(deltas)]:
        for each in heard.values():
            each.begin_anew()
        for delta in deltas[:cut]:
            assert isinstance(delta, Delta)
            new = heard.setdefault(delta.index, StreamPosition()).cut_repeated(delta)
            told += [] if new is None else [new]
    check_stream([*told, answer], answer.request_id)
