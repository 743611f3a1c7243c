"""Section 9 of the contract: each of its items is one test here, by its name, on the
demo model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import fminfer
from fminfer.contract.envelope import Line

WAY = "Question: How do you go from the bathroom to the office?\nAnswer:"
EOS = 0
CONTEXT = 1024
ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32", kernels="off")
    yield engine
    engine.close()


def answer(engine: fminfer.Engine, **fields: Any) -> dict[str, Any]:
    """Answer one greedy request about the way; return its result."""
    (record,) = engine.run(
        [{"prompt": WAY, "temperature": 0, "max_tokens": 12} | fields]
    )
    assert record.error is None, record.error
    result: dict[str, Any] = record.to_dict()["result"]
    return result


def choice(engine: fminfer.Engine, **fields: Any) -> dict[str, Any]:
    (found,) = answer(engine, **fields)["choices"]
    return dict(found)


def pieces(engine: fminfer.Engine) -> tuple[str, list[str]]:
    """Return the text that the model answers, and the text of its tokens."""
    found = choice(engine, logprobs=0)
    tokens = [
        token.replace("Ġ", " ").replace("Ċ", "\n")
        for token in found["logprobs"]["tokens"]
    ]
    assert "".join(tokens) == found["text"] and len(tokens) >= 4
    return found["text"], tokens


def check_stop(
    engine: fminfer.Engine, stop: Any, expected: str, num_listed: int
) -> None:
    found = choice(engine, stop=stop, logprobs=0)
    assert (found["text"], found["finish_reason"]) == (expected, "stop")
    assert len(found["logprobs"]["tokens"]) == num_listed
    assert found["stop_reason"] in ([stop] if isinstance(stop, str) else stop)


def test_stop_across_two_tokens(engine: fminfer.Engine) -> None:
    text, tokens = pieces(engine)
    stop = tokens[1][-2:] + tokens[2][:2]
    check_stop(engine, stop, text[: text.index(stop)], 2)


def test_stop_inside_a_token(engine: fminfer.Engine) -> None:
    text, tokens = pieces(engine)
    stop = next(token for token in tokens if len(token) >= 4)[1:3]
    cut = text.index(stop)
    check_stop(engine, stop, text[:cut], len([t for t in offsets(tokens) if t < cut]))


def offsets(tokens: list[str]) -> list[int]:
    return [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_stop_equal_to_the_first_token(engine: fminfer.Engine) -> None:
    _, tokens = pieces(engine)
    check_stop(engine, tokens[0], "", 0)


def test_two_stops_the_later_listed_one_earlier_in_the_text(
    engine: fminfer.Engine,
) -> None:
    text, tokens = pieces(engine)
    late = tokens[2][-3:]
    early = tokens[1][-3:]
    cut = min(text.index(late), text.index(early))
    found = choice(engine, stop=[late, early])
    assert found["text"] == text[:cut]
    # … also when both come with one token
    token = next(token for token in tokens if len(token) >= 4)
    cut = text.index(token[0:1])
    assert choice(engine, stop=[token[2:4], token[0:1]])["text"] == text[:cut]


def test_a_stop_inside_the_echoed_prompt_does_not_stop(engine: fminfer.Engine) -> None:
    found = choice(engine, echo=True, stop="Question")
    assert found["text"] == WAY + choice(engine)["text"]


@pytest.mark.parametrize("echo", [True, False])
def test_eos_as_first_token_under_echo_and_max_tokens_1(
    engine: fminfer.Engine, echo: bool
) -> None:
    """lm-eval slices [ctxlen:-1]; it needs EOS to be an entry of the arrays."""
    ids = engine.tokenizer.encode(WAY).ids
    forced = {
        "prompt": ids,
        "max_tokens": 1,
        "logit_bias": {str(EOS): 100},
        "logprobs": 1,
    }
    found = choice(engine, echo=echo, **forced)
    assert (found["text"], found["finish_reason"]) == (WAY if echo else "", "stop")
    for key in ARRAYS:
        assert len(found["logprobs"][key]) == (len(ids) + 1 if echo else 0), key


@pytest.mark.parametrize("echo", [True, False])
def test_max_tokens_0_with_and_without_echo_n_3(
    engine: fminfer.Engine, echo: bool
) -> None:
    result = answer(engine, max_tokens=0, echo=echo, n=3, temperature=1, logprobs=2)
    num_prompt = len(engine.tokenizer.encode(WAY).ids)
    assert [found["index"] for found in result["choices"]] == [0, 1, 2]
    for found in result["choices"]:
        assert (found["text"], found["finish_reason"]) == (
            WAY if echo else "",
            "length",
        )
        for key in ARRAYS:
            assert len(found["logprobs"][key]) == (num_prompt if echo else 0), key
    assert result["usage"]["completion_tokens"] == 0
    assert result["usage"]["prompt_tokens"] == num_prompt


@pytest.mark.parametrize("k", [0, 1, 5, 50])
def test_logprobs_0_1_5_50(engine: fminfer.Engine, k: int) -> None:
    found = choice(engine, logprobs=k, temperature=1, seed=3)["logprobs"]
    assert len({len(found[key]) for key in ARRAYS if found[key] is not None}) == 1
    if k == 0:
        assert found["top_logprobs"] is None
        return
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        values = list(top.values())
        assert k <= len(top) <= k + 1 and top[token] == logprob
        assert values[:k] == sorted(values[:k], reverse=True)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_prompt_of_context_and_of_context_and_1_tokens(
    engine: fminfer.Engine, extra: int
) -> None:
    ids = [random.Random(4).randrange(1, 300) for _ in range(CONTEXT + extra)]
    scored = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    drawn = {"prompt": ids, "max_tokens": 1}
    records = sorted(engine.run([scored, drawn]), key=lambda record: record.line.number)
    errors = [record.error.code if record.error else None for record in records]
    assert errors == [
        "context_length_exceeded" if extra > 1 else None,
        "context_length_exceeded",
    ]
    if extra < 2:
        logprobs = records[0].to_dict()["result"]["choices"][0]["logprobs"][
            "token_logprobs"
        ]
        assert len(logprobs) == CONTEXT + extra and None not in logprobs[1:]


def test_ids_that_already_start_with_bos_get_no_other(
    llama_checkpoint: tuple[Any, Any],
) -> None:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    engine.tokenizer.bos_id = 1  # whatever BOS is: ids are used as they are
    result = answer(engine, prompt=[1, 70, 71], max_tokens=1, return_token_ids=True)
    engine.close()
    assert result["choices"][0]["prompt_token_ids"] == [1, 70, 71]
    assert result["usage"]["prompt_tokens"] == 3


def test_an_emoji_split_over_several_tokens_with_logprobs(
    engine: fminfer.Engine,
) -> None:
    prompt = "a🙂b"
    found = choice(engine, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    assert found["text"] == prompt
    assert found["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_logit_bias_that_bans_eos(engine: fminfer.Engine) -> None:
    plain = choice(engine, max_tokens=60)
    assert plain["finish_reason"] == "stop", "the demo model ends its answers"
    banned = choice(
        engine, max_tokens=60, logit_bias={str(EOS): -100}, return_token_ids=True
    )
    assert banned["finish_reason"] == "length" and EOS not in banned["token_ids"]
    assert banned["text"].startswith(plain["text"])


def test_top_p_0_is_greedy(engine: fminfer.Engine) -> None:
    assert choice(engine, temperature=2, top_p=0)["text"] == choice(engine)["text"]


def test_temperature_1e_6(engine: fminfer.Engine) -> None:
    assert choice(engine, temperature=1e-6)["text"] == choice(engine)["text"]


def test_n_4_with_best_of_3_is_best_of_4_with_a_warning(engine: fminfer.Engine) -> None:
    result = answer(engine, n=4, best_of=3, temperature=1)
    assert [found["index"] for found in result["choices"]] == [0, 1, 2, 3]
    assert any("best_of 3 with n 4" in warning for warning in engine.warnings)


def test_greedy_best_of_5(engine: fminfer.Engine) -> None:
    alone = answer(engine)
    result = answer(engine, best_of=5)
    assert [found["text"] for found in result["choices"]] == [
        alone["choices"][0]["text"]
    ]
    drawn = alone["usage"]["completion_tokens"]
    assert result["usage"]["completion_tokens"] == 5 * drawn, "all of them count"


def sampled(index: int) -> dict[str, Any]:
    prompt = random.Random(index).choices(range(1, 400), k=10)
    return {"prompt": prompt, "max_tokens": 12, "temperature": 2, "top_p": 0.98}


def answers(engine: fminfer.Engine, requests: list[dict[str, Any]]) -> list[Any]:
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    return [
        [c["text"] for c in record.to_dict()["result"]["choices"]] for record in records
    ]


def test_the_same_prompt_alone_and_among_32_others_gives_the_same_text(
    engine: fminfer.Engine,
) -> None:
    (alone,) = answers(engine, [sampled(0)])
    among = answers(
        engine, [*map(sampled, range(1, 17)), sampled(0), *map(sampled, range(17, 33))]
    )
    assert among[16] == alone


def test_a_shuffled_file_gives_the_same_answers(engine: fminfer.Engine) -> None:
    order = list(range(40))
    expected = answers(engine, [sampled(i) for i in order])
    random.Random(2).shuffle(order)
    found = answers(engine, [sampled(i) for i in order])
    assert [found[order.index(i)] for i in range(40)] == expected
    assert len({text for (text,) in expected}) > 30, "they differ at all"


def test_nested_extra_keys_round_trip_byte_for_byte(engine: fminfer.Engine) -> None:
    raw = (
        b'{ "prompt" : "x","max_tokens":1,  "temperature": 0.0, "top_p":1.0,'
        b'"meta":{"b":[1,2.50,{"\\u00e9":null}],"a":"\\/\xc3\xa9"},"n":1e0}'
    )
    (record,) = engine.run([Line(0, 1, raw + b"\r\n")])
    assert record.to_json().startswith(b'{"request":' + raw + b',"result":')
    assert json.loads(record.to_json())["request"] == json.loads(raw)


def test_duplicate_lines_are_answered_each_and_vary_without_a_seed(
    engine: fminfer.Engine,
) -> None:
    request = sampled(1)
    free = answers(engine, [request] * 10)
    assert len({text for (text,) in free}) > 1
    seeded = answers(engine, [request | {"seed": 5}] * 10)
    assert len({text for (text,) in seeded}) == 1


def test_an_empty_file(engine: fminfer.Engine) -> None:
    assert list(engine.run([])) == []


def test_one_very_long_line(engine: fminfer.Engine) -> None:
    """Ten megabytes cost only their own line."""
    long = {"prompt": "x", "max_tokens": 1, "padding": "é" * 5_000_000}
    too_long = {"prompt": "word " * 200_000, "max_tokens": 1}
    records = sorted(
        engine.run([long, too_long, {"prompt": "x"}]), key=lambda r: r.line.number
    )
    codes = [record.error.code if record.error else None for record in records]
    assert codes == [None, "context_length_exceeded", None]


# A NaN row that leaves its neighbours alone needs damaged weights:
# tests/runtime/test_engine.py::test_nan_weights_cost_each_row_an_error_and_not_the_run
