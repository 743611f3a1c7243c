"""Random requests and malformed lines: what must hold of every answer, and of every line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fminfer
from fminfer.contract.envelope import Line
from fminfer.contract.request import RequestParams
from fminfer.files.line_reader import read_lines
from fminfer.text.tokenizer import _make_byte_alphabet
from tests.conftest import num_examples

# Emoji (with joiners and skin tones), CJK, combining marks, control characters, what tokenizers
# treat specially, and anything else that UTF-8 can say.
ODD_LETTERS = (
    "🙂👩\u200d👩\u200d👧👍🏽🇫🇷漢字かな한글e\u0301\u200b\u2028"
    "\x00\x07\x1b\t\n\r \u00a0▁Ġ\ufffd\ufeff"
)
TEXTS = st.text(
    st.one_of(
        st.sampled_from(ODD_LETTERS),
        st.characters(codec="utf-8"),
        st.sampled_from("abc How go?"),
    ),
    max_size=40,
)

# Lone bytes among them, but not at the end: test_tokenizer.py has those.
WHOLE_IDS = st.lists(st.integers(1, 406), max_size=30).map(lambda ids: [*ids, 35, 40])


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=16)
    yield engine
    engine.close()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": draw(
            st.one_of(TEXTS, WHOLE_IDS, st.lists(TEXTS, min_size=1, max_size=2))
        ),
        "max_tokens": draw(st.integers(0, 12)),
        "temperature": draw(st.sampled_from([0, 1, 2.0, None])),
        "echo": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([0, 1, 3])),
        "n": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(-5, 5)),
    }
    request["stop"] = draw(st.one_of(st.none(), st.text(min_size=1, max_size=2)))
    request["user"] = draw(TEXTS)
    request["include_stop_str_in_output"] = draw(st.booleans())
    if draw(st.booleans()):
        request["ignore_eos"] = True
        request["frequency_penalty"] = draw(st.floats(-2, 2))
        request["logit_bias"] = {
            str(draw(st.integers(1, 406))): draw(st.floats(-100, 100))
        }
    return request


@settings(
    max_examples=num_examples(120),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=st.lists(
        st.tuples(requests(), st.booleans(), st.sampled_from([None, 1])), max_size=4
    )
)
def test_every_answer_holds_together(engine: fminfer.Engine, batch: list[Any]) -> None:
    raws = [
        json.dumps(
            request, ensure_ascii=ascii, indent=None if indent is None else " " * 0
        ).replace("\n", " ")
        for request, ascii, indent in batch
    ]
    lines = [Line(0, i, raw.encode()) for i, raw in enumerate(raws, start=1)]
    records = sorted(engine.run(lines), key=lambda record: record.line.number)
    for (request, _, _), raw, record in zip(batch, raws, records, strict=True):
        assert record.error is None, record.error
        assert record.to_json().startswith(
            b'{"request":' + raw.encode() + b',"result":'
        )
        prompts = request["prompt"]
        num_prompts = (
            len(prompts)
            if isinstance(prompts, list) and "str" in str(type(prompts[0]))
            else 1
        )
        choices = record.to_dict()["result"]["choices"]
        assert [choice["index"] for choice in choices] == list(
            range(num_prompts * request["n"])
        )
        for choice in choices:
            check_choice(request, choice)


def check_choice(request: dict[str, Any], choice: dict[str, Any]) -> None:
    logprobs = choice["logprobs"]
    lengths = {len(logprobs[key]) for key in logprobs if logprobs[key] is not None}
    assert len(lengths) == 1
    if request["logprobs"]:
        for token, logprob, top in zip(
            logprobs["tokens"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            strict=True,
        ):
            assert (logprob is None and top is None) or top[token] == logprob
    check_text(request, choice["text"], logprobs["tokens"], logprobs["text_offset"])


def check_text(
    request: dict[str, Any], text: str, tokens: list[str], offsets: list[int]
) -> None:
    pieces = [
        b""
        if token == "<|endoftext|>"
        else b"".join(map(_make_byte_alphabet().__getitem__, token))
        for token in tokens
    ]
    joined = b"".join(pieces)
    assert joined.decode(errors="replace").startswith(text) or text.endswith(
        "\ufffd"
    ), tokens
    assert offsets == sorted(offsets)
    base = 0 if request["echo"] or not offsets else offsets[0]
    for i, offset in enumerate(offsets):
        before = b"".join(pieces[:i])
        try:
            assert offset - base == len(before.decode()), (tokens, offsets)
        except UnicodeDecodeError:
            assert 0 <= offset - base <= len(before), (tokens, offsets)


ODD_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2.0,
    1.5,
    -0.0,
    1e308,
    2**63,
    2**64,
    -(2**70),
    10**400,
    "",
    "1",
    "x",
    " ",
    "\ud800",
    [],
    [None],
    [[]],
    [[[1]]],
    ["a", 1],
    [1, "a"],
    {},
    {"1": 1},
    {"a": {"b": []}},
    [0] * 600,
    [10**9],
    [-1],
    "long " * 300,
    {"5": 1000},
    {"-1": 0},
]
FIELDS = [field.name for field in fields(RequestParams)]
FIELDS += ["prompt", "stream", "suffix", "user", "model", "engine", "unknown", ""]
FIELDS += ["request", "body", "custom_id", "method", "url"]
FRAGMENTS = rb"{ } [ ] , : \" \\ NaN Infinity - \ud800 \u0000 1e999 ' // null".split()
FRAGMENTS += [b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xc3", b"\r", b"\t", b"[" * 3000]


def odd_line(rng: random.Random) -> bytes:
    """Make one line: a request with odd values, bytes cut, doubled or thrown in, or
    pure noise."""
    kind = rng.random()
    if kind < 0.03:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(40))).replace(
            b"\n", b""
        )
    request: dict[str, Any] = {"prompt": "x", "max_tokens": rng.randrange(3)}
    for _ in range(rng.randrange(4)):
        request[rng.choice(FIELDS)] = rng.choice(ODD_VALUES)
    if rng.random() < 0.1:
        request = {
            rng.choice(["request", "body", "x"]): request,
            "custom_id": rng.choice("ab"),
        }
    raw = json.dumps(request, ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        place = rng.randrange(len(raw) + 1)
        change = rng.randrange(3)
        if change == 0:
            raw = raw[:place] + rng.choice(FRAGMENTS) + raw[place:]
        elif change == 1:
            raw = raw[:place] + raw[place + rng.randrange(1, 5) :]
        else:
            raw = raw[:place]
    return raw


def test_thousands_of_odd_lines_cost_only_themselves(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """Every line gives one record; no line that is answered differs from when it is alone."""
    rng = random.Random(11)
    good = b'{"prompt": "How do you go", "max_tokens": 3, "temperature": 0}'
    count = num_examples(10_000)
    raws = [odd_line(rng) if i % (count // 200) else good for i in range(count)]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\n".join(raws))
    lines = list(read_lines(path, 0))
    records = sorted(engine.run(iter(lines)), key=lambda record: record.line.number)
    assert [record.line.number for record in records] == [line.number for line in lines]
    codes = {record.error.code for record in records if record.error is not None}
    assert "internal_error" not in codes
    assert len(codes) >= 8, f"the lines are not odd enough: {codes}"
    for record in records:
        shown = record.to_json()
        assert b"\n" not in shown
        json.loads(shown)
    answers = [
        r.to_dict()["result"]["choices"][0]["text"]
        for r in records
        if r.line.raw == good
    ]
    answers += [
        r.to_dict()["result"]["choices"][0]["text"]
        for r in records
        if r.line.raw.strip() == good
    ]
    assert len(answers) >= 200 and len(set(answers)) == 1
