"""Lines that ask for too much: refused before they take memory, and quoted in few bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fminfer.contract.envelope import MAX_QUOTED_BYTES
from fminfer.contract.request import RequestParams
from fminfer.contract.row_warnings import MAX_NAMES
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine import prompt_fit
from fminfer.engine.intake import Intake
from fminfer.engine.logit_edits import LogitEdits
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.sequence import PreparedRequest
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.tokenizer import Tokenizer
from tests.contract.test_shapes import run
from tests.engine.test_contract import Bench

GIANT = "north east " * 200_000


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


def prepare(
    tokenizer: Tokenizer, prompt: Any, on_too_long: Any = "error"
) -> PreparedRequest:
    intake = Intake(
        tokenizer, RequestLimits(512, 407, config=EngineConfig(on_too_long=on_too_long))
    )
    return intake.prepare(intake.parse({"prompt": prompt, "echo": True}))


def refused(
    tokenizer: Tokenizer, prompt: Any, on_too_long: Any = "error"
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(tokenizer, prompt, on_too_long)
    assert caught.value.code == "context_length_exceeded"
    return caught.value


def test_a_giant_prompt_is_refused_without_tokenizing_it(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 21 MB for a context of 512 tokens took 6 GB and 90 s to be refused."""
    monkeypatch.setattr(demo, "encode", None)
    monkeypatch.setattr(demo, "describe_ids", None)
    assert "at least" in refused(demo, GIANT).message
    assert "512" in refused(demo, GIANT).message
    assert "Shorten the prompt or lower max_tokens" in refused(demo, GIANT).message
    assert "1,000,000" in refused(demo, [5] * 1_000_000).message


def test_a_long_prompt_is_told_its_exact_length(demo: Tokenizer) -> None:
    num_tokens = len(demo.encode(GIANT[:20_000]).ids)
    assert f"has {num_tokens:,} tokens" in refused(demo, GIANT[:20_000]).message


@pytest.mark.parametrize("side", ["truncate-left", "truncate-right"])
def test_a_cut_prompt_has_the_ids_of_the_whole_text(demo: Tokenizer, side: str) -> None:
    text = GIANT[:100_000]
    (prompt,) = prepare(demo, text, side).prompts
    ids = demo.encode(text).ids
    room = 512 - 16
    assert prompt.ids == (ids[:room] if side == "truncate-right" else ids[-room:])


def test_a_giant_prompt_is_not_cut(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_fit, "MAX_CUT_CHARS", 2**20)
    monkeypatch.setattr(demo, "encode", None)
    assert "1,048,576" in refused(demo, GIANT, "truncate-left").message


def truncated(
    tokenizer: Tokenizer, on_too_long: Any = "error", **fields: Any
) -> PreparedRequest:
    intake = Intake(
        tokenizer, RequestLimits(512, 407, config=EngineConfig(on_too_long=on_too_long))
    )
    prepared = intake.prepare(intake.parse({"prompt": GIANT[:100_000]} | fields))
    assert bool(intake.warnings.to_dict()) is (on_too_long != "error")
    return prepared


def test_a_request_cuts_its_own_prompt(demo: Tokenizer) -> None:
    """Also a giant one; the run's own cutting and its warning come after that."""
    ids = demo.encode(GIANT[:100_000]).ids
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"truncate_prompt_tokens": 9}, ids[-9:]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, ids[:9]),
        ({"truncate_prompt_tokens": -1}, ids[-496:]),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, ids[:496]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, ids[-12:]),
        (
            {
                "truncate_prompt_tokens": -1,
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            },
            ids[-513:],
        ),
        ({"truncate_prompt_tokens": 9, "prompt": ids[:600]}, ids[591:600]),
        ({"truncate_prompt_tokens": -1, "prompt": [*range(5, 9)]}, [*range(5, 9)]),
    ]
    for fields, expected in cases:
        (prompt,) = truncated(demo, **fields).prompts
        assert prompt.ids == expected, fields
        whole = len(fields["prompt"]) if "prompt" in fields else len(ids)
        assert prompt.num_cut == whole - len(expected)
    (prompt,) = truncated(demo, **cases[5][0]).prompts
    assert prompt.text == demo.decode(prompt.ids) and len(prompt.offsets) == 513
    (prompt,) = truncated(demo, "truncate-right", truncate_prompt_tokens=600).prompts
    assert prompt.ids == ids[-600:][:496] and prompt.num_cut == len(ids) - 496
    with pytest.raises(RequestError, match="600 tokens and max_tokens is 16"):
        truncated(demo, truncate_prompt_tokens=600)
    with pytest.raises(RequestError, match="Lower max_tokens"):
        truncated(demo, truncate_prompt_tokens=-1, max_tokens=512)


def test_a_giant_prompt_is_not_truncated(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client could have four million characters tokenized, which held up all others."""
    monkeypatch.setattr(prompt_fit, "MAX_OWN_CUT_CHARS", 2**16)
    monkeypatch.setattr(demo, "encode", None)
    with pytest.raises(RequestError, match="at most 65,536"):
        truncated(demo, truncate_prompt_tokens=9)


def test_texts_have_at_least_so_many_tokens(demo: Tokenizer) -> None:
    rng = random.Random(1)
    signs = ["north", " ", "\n", "é", "🙂", "한", "ﬁ", "<|endoftext|>", "\u0301", "x"]
    for _ in range(200):
        text = "".join(rng.choices(signs, k=rng.randrange(200)))
        assert (
            demo.count_least_tokens(text) <= len(demo.encode(text).ids)
            if text
            else True
        )


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"prompt": "x" * 45_000}).encode(),
        json.dumps(
            {"request": {"prompt": "x" * 45_000}, "scenario": "y" * 45_000}
        ).encode(),
        b'{"prompt": "' + b"\x01" * 45_000,
    ],
)
def test_an_error_quotes_little_of_its_line(line: bytes) -> None:
    """Five prompts that were too long were copied whole, 227 KB."""
    (record,) = run(line)
    assert record.error is not None
    assert len(record.to_json()) < 4000
    found = record.to_dict()["request"]
    assert isinstance(found, str) and "bytes in all" in found


def test_an_error_holds_a_short_request_verbatim() -> None:
    line = json.dumps({"prompt": "x" * 3000, "n": 0}).encode()
    assert len(line) <= MAX_QUOTED_BYTES
    (record,) = run(line)
    assert record.error is not None and line in record.to_json()


def test_logprobs_of_a_line_have_a_joint_limit(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 bytes that ask for n 128, max_tokens 100,000 and logprobs 20 could take 40 GB."""

    def ask(**fields: Any) -> PreparedRequest:
        intake = Intake(demo, RequestLimits(200_000, 407))
        return intake.prepare(intake.parse({"prompt": [5] * 10} | fields))

    large = {"n": 128, "max_tokens": 100_000}
    with pytest.raises(
        RequestError, match=r"268,800,000 .*128 choices .* at most 16,777,216"
    ) as e:
        ask(logprobs=20, **large)
    assert (e.value.code, e.value.param) == ("out_of_range", "logprobs")
    assert ask(**large) and ask(logprobs=100, max_tokens=150_000)
    monkeypatch.setattr("fminfer.contract.prompts.MAX_ENTRIES", 120)
    assert ask(logprobs=5, max_tokens=10, n=2) and ask(
        logprobs=5, max_tokens=10, echo=True
    )
    scored = {"logprobs": 5, "max_tokens": 0, "echo": True}
    assert ask(prompt=[[5] * 10, [5] * 10], **scored)
    for fields in (
        {"logprobs": 5, "max_tokens": 10, "n": 2, "best_of": 3},
        {"logprobs": 5, "max_tokens": 11, "n": 2, "temperature": 0},
        {"logprobs": 5, "max_tokens": 11, "echo": True},
        scored | {"prompt": [[5] * 10, [5] * 11]},
    ):
        with pytest.raises(RequestError, match="at most 120"):
            ask(**fields)


def test_warnings_do_not_grow_with_the_file() -> None:
    """20,000 lines with different unknown keys printed 20,000 lines, in --stats too."""
    told: list[str] = []
    bench = Bench()
    bench.intake.on_warning = told.append
    rows = [
        {"prompt": ">", "max_tokens": 1, f"key_{i}": i} for i in range(MAX_NAMES + 20)
    ]
    rows += [{"prompt": ">", "max_tokens": 1, "n": i, "best_of": 1} for i in (2, 3, 4)]
    assert not [record.error for record in run(*rows, bench=bench) if record.error]
    names = ", ".join(f"key_{i}" for i in range(MAX_NAMES))
    assert bench.intake.warnings.to_dict() == {
        f"unknown parameters are kept and not acted on: {names} and others": MAX_NAMES
        + 20,
        "best_of is below n and is taken as n: best_of 1 with n 2, best_of 1 with n 3, "
        "best_of 1 with n 4": 3,
    }
    assert len(told) == MAX_NAMES + 4 and told[MAX_NAMES].endswith(
        "others, which are not named"
    )
    assert (
        told[1]
        == "Warning: line 2: unknown parameters are kept and not acted on: key_1"
    )
    run({"prompt": ">", "max_tokens": 1, "x" * 10_000: 1}, bench=bench)
    assert len(told[-1]) < 200


def test_a_prompt_that_is_too_long_is_named(demo: Tokenizer) -> None:
    """Of several prompts, the error did not say which one is too long."""
    for long in (GIANT, "north " * 900, [5] * 900):
        error = refused(
            demo, ["a", "b", long] if isinstance(long, str) else [[5], [6], long]
        )
        assert error.message.startswith("prompt[2]: the prompt has ")
        assert refused(demo, long).message.startswith("the prompt has ")


def test_changes_of_logits_are_made_when_a_sequence_runs() -> None:
    """16,384 prompts that waited had 16,384 tables of a `logit_bias` of 50,000 tokens."""
    params = RequestParams(logit_bias=((5, 1.0), (7, -1.0)), repetition_penalty=1.5)
    edits = LogitEdits(params, [7, 9])
    assert "columns" not in vars(edits)
    assert edits.columns["edit_ids"].tolist() == [5, 7, 9]
    assert edits.columns["edit_bias"].tolist() == [1.0, -1.0, 0.0]
    assert edits.columns["edit_factor"].tolist() == [1.0, 1.5, 1.5]
    edits.count_drawn(11)
    assert edits.columns["edit_ids"].tolist() == [5, 7, 9, 11]
    counted = LogitEdits(params, [7, 9])
    counted.count_drawn(11)
    assert counted.columns == edits.columns
