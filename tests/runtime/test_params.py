"""Parameters that change logits or ends, on a small real model, against slow definitions."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import fminfer
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.forward.stage import MAX_LOGITS
from fminfer.text.tokenizer import Tokenizer

PROMPT = [5, 17, 80, 33, 200, 17, 17]
Options = dict[str, Any]


@pytest.fixture(scope="module")
def engine(llama_checkpoint: tuple[Path, Any]) -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    yield engine
    engine.close()


def choices(engine: fminfer.Engine, *requests: Options) -> list[Options]:
    base = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    records = sorted(
        engine.run([base | r for r in requests]), key=lambda r: r.line.number
    )
    return [record.to_dict()["result"]["choices"][0] for record in records]


def slow_greedy(
    model: Any, request: Options, count: int = 12
) -> tuple[list[int], list[float]]:
    """Draw greedily with the penalties as they are defined; return ids and raw logprobs."""
    ids = list(PROMPT)
    logprobs = []
    for _ in range(count):
        with torch.no_grad():
            raw = model(torch.tensor([ids])).logits[0, -1]
        logits = raw.clone()
        for token_id, bias in request.get("logit_bias", {}).items():
            logits[int(token_id)] += bias
        drawn = Counter(ids[len(PROMPT) :])
        for token_id in set(ids):
            penalty = request.get("repetition_penalty", 1)
            value = logits[token_id]
            logits[token_id] = value / penalty if value > 0 else value * penalty
        for token_id, times in drawn.items():
            logits[token_id] -= request.get("frequency_penalty", 0) * times
            logits[token_id] -= request.get("presence_penalty", 0)
        banned = set(ends_of_words(request, ids[len(PROMPT) :]))
        kept = set(request.get("allowed_token_ids", range(len(logits)))) - banned
        logits[[each for each in range(len(logits)) if each not in kept]] = float(
            "-inf"
        )
        ids.append(int(logits.argmax()))
        logprobs.append(torch.log_softmax(raw, -1)[ids[-1]].item())
    return ids[len(PROMPT) :], logprobs


def ends_of_words(request: Options, drawn: list[int]) -> Iterator[int]:
    """Yield the tokens that would complete a bad word; the model's tokens are bytes."""
    for word in request.get("bad_words", []):
        for form in (word.lstrip().encode(), b" " + word.lstrip().encode()):
            if list(form[:-1]) == drawn[len(drawn) - len(form) + 1 :]:
                yield form[-1]


BANNING: list[Options] = [
    {"allowed_token_ids": [44, 17, 200, 90]},
    {"allowed_token_ids": [*range(0, 300, 3)], "repetition_penalty": 1.5},
    {"allowed_token_ids": [9, 17, 250], "logit_bias": {"9": 3, "40": 100}},
    {"allowed_token_ids": [9, 17, 250], "presence_penalty": 2, "frequency_penalty": 2},
    {"allowed_token_ids": [97, 98, 99], "bad_words": ["aa", "cc", "b"]},
    {
        "allowed_token_ids": [97, 98, 99, 100],
        "bad_words": ["ba", "ab", "aa", "bb", "bcb", "dd"],
    },
    {"allowed_token_ids": [32, 97, 98], "bad_words": [" aa", "b a", "bbb", "ab"]},
]


def test_bans_are_as_defined_and_rows_keep_their_own(
    engine: fminfer.Engine, llama_checkpoint: tuple[Path, Any]
) -> None:
    """All in one batch, plain rows among them, also of a prompt that is cached by then."""
    plain, _ = slow_greedy(llama_checkpoint[1], {})
    said = [
        {"bad_words": [bytes([token_id]).decode()]}
        for token_id in plain
        if token_id < 128
    ]
    requests: list[Options] = [{"logprobs": 0}]
    for banning in BANNING + said + [{"bad_words": ["q", "a", "never said"]}]:
        requests += [banning | {"logprobs": 0}, {"logprobs": 0}]
    expected = [slow_greedy(llama_checkpoint[1], banning) for banning in requests[1::2]]
    of_plain = slow_greedy(llama_checkpoint[1], requests[0])
    for _ in range(2):
        found = choices(engine, *requests)
        for number, (request, choice) in enumerate(zip(requests, found, strict=True)):
            ids, logprobs = expected[number // 2] if number % 2 else of_plain
            assert choice["token_ids"] == ids, request
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                logprobs, abs=1e-4
            )
    texts = {tuple(choice["token_ids"]) for choice in found}
    assert len(texts) > len(BANNING), f"bans change too little of {plain}"


def test_bans_hold_in_each_part_of_a_step(
    llama_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the logits of a step's rows do not fit at once, each row keeps its own mask."""
    monkeypatch.setitem(MAX_LOGITS, "cpu", 3 * 300)  # three rows
    requests = [options for banning in BANNING for options in ({}, banning)]
    own = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32")
    try:
        found = choices(own, *requests)
    finally:
        own.close()
    for request, choice in zip(requests, found, strict=True):
        assert choice["token_ids"] == slow_greedy(llama_checkpoint[1], request)[0], (
            request
        )


def test_no_draw_completes_a_bad_word(engine: fminfer.Engine) -> None:
    """Sampled, of several choices, and streamed rows among others."""
    letters = {"allowed_token_ids": [32, 97, 98], "prompt": "aab", "temperature": 2}
    words = ["aba", " bb", "a  "]
    asked = letters | {"max_tokens": 60, "n": 8, "return_token_ids": True}
    records = engine.run([asked, asked | {"bad_words": words, "best_of": 12}])
    free, held = sorted(records, key=lambda record: record.line.number)
    assert free.result is not None and held.result is not None
    free_text, held_text = (
        " | ".join(choice["text"] for choice in record.result["choices"])
        for record in (free, held)
    )
    assert all(word.strip() in free_text for word in words)
    for choice in held.result["choices"]:
        drawn = choice["token_ids"]
        assert set(drawn) <= {32, 97, 98} and len(drawn) == 60
        for end in range(len(drawn)):
            assert drawn[end] not in ends_of_words({"bad_words": words}, drawn[:end])
    assert "aba" not in held_text


def test_allowed_tokens_are_drawn_by_their_own_probabilities(
    engine: fminfer.Engine,
) -> None:
    """Two tokens share all the mass, by their own logits; the logprobs stay those of
    all tokens."""
    asked = {"prompt": PROMPT, "max_tokens": 1, "n": 128, "logprobs": 0, "seed": 1}
    (record,) = engine.run(
        [asked | {"allowed_token_ids": [9, 10], "return_token_ids": True}]
    )
    drawn = record.to_dict()["result"]["choices"]
    logprobs = {c["token_ids"][0]: c["logprobs"]["token_logprobs"][0] for c in drawn}
    assert set(logprobs) == {9, 10} and max(logprobs.values()) < -1
    share = 1 / (1 + torch.tensor(logprobs[9] - logprobs[10]).exp().item())
    count = sum(choice["token_ids"] == [10] for choice in drawn)
    assert abs(count - 128 * share) < 4 * (128 * share * (1 - share)) ** 0.5 + 1


def test_a_list_of_the_whole_vocabulary_changes_nothing(engine: fminfer.Engine) -> None:
    plain, listed = choices(engine, {}, {"allowed_token_ids": [*range(300)]})
    assert plain == listed


def test_ends_are_drawn_only_if_they_are_allowed(engine: fminfer.Engine) -> None:
    asked = {
        "allowed_token_ids": [97, 98],
        "stop_token_ids": [98],
        "logit_bias": {"98": 100},
    }
    ended, held = choices(engine, asked, asked | {"min_tokens": 3})
    assert (ended["token_ids"], ended["stop_reason"]) == ([98], 98)
    assert held["token_ids"] == [97, 97, 97, 98]
    (never,) = choices(engine, asked | {"allowed_token_ids": [97]})
    assert never["token_ids"] == [97] * 12


def test_nothing_left_to_draw_is_an_error_of_the_request(
    engine: fminfer.Engine,
) -> None:
    """A row of -inf alone would draw the first token, whether it may be drawn or not."""
    base = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "temperature": 1}
    rows = [
        {"allowed_token_ids": [98], "stop_token_ids": [98], "min_tokens": 1},
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [97], "bad_words": ["aaa"]},
        {"allowed_token_ids": [97, 98], "stop_token_ids": [98], "bad_words": ["a"]},
        {"allowed_token_ids": [97, 300]},
        {"bad_words": [chr(byte) for byte in range(1, 128)]},
    ]
    records = sorted(
        engine.run([base | row for row in rows]), key=lambda record: record.line.number
    )
    told = [
        record.error and (record.error.code, record.error.param) for record in records
    ]
    wrong = ("out_of_range", "allowed_token_ids")
    out = ("token_out_of_range", "allowed_token_ids")
    assert told == [wrong, wrong, wrong, None, out, None]
    assert "generated token 0" in str(records[0].error)
    assert "generated token 2" in str(records[2].error)
    assert records[3].to_dict()["result"]["choices"][0]["stop_reason"] == 98


PENALTIES: list[Options] = [
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 2},
    {"presence_penalty": -2, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.5},
    {"logit_bias": {"17": -100, "40": 1.5, "41": 1.5}},
    {"logit_bias": {"44": 2}, "repetition_penalty": 1.3, "presence_penalty": 0.9},
]


def test_penalties_are_as_defined_and_rows_keep_their_own(
    engine: fminfer.Engine, llama_checkpoint: tuple[Path, Any]
) -> None:
    """All of them in one batch, plain rows among them; the logprobs stay those of raw logits."""
    requests = [{"logprobs": 0}]
    for penalty in PENALTIES:
        requests += [penalty | {"logprobs": 0}, {"logprobs": 0}]
    found = choices(engine, *requests)
    plain, _ = slow_greedy(llama_checkpoint[1], {})
    texts = set()
    for request, choice in zip(requests, found, strict=True):
        ids, logprobs = slow_greedy(llama_checkpoint[1], request)
        assert choice["token_ids"] == ids, request
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        texts.add(tuple(ids))
    assert len(texts) > len(PENALTIES) * 0.7, (
        f"the penalties change too little of {plain}"
    )


def test_repetition_penalty_is_that_of_transformers(
    engine: fminfer.Engine, llama_checkpoint: tuple[Path, Any]
) -> None:
    (choice,) = choices(engine, {"repetition_penalty": 1.4})
    found = llama_checkpoint[1].generate(
        torch.tensor([PROMPT]),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.4,
    )
    assert choice["token_ids"] == found[0, len(PROMPT) :].tolist()


def test_a_bias_moves_draws_as_far_as_it_should(engine: fminfer.Engine) -> None:
    """+100 on one token takes all the mass; the same on two shares it by their own logits."""
    tokens = []
    for bias in ({"9": 100}, {"9": 100, "10": 100}):
        asked = {
            "prompt": PROMPT,
            "max_tokens": 1,
            "n": 100,
            "logprobs": 0,
            "logit_bias": bias,
        }
        (record,) = engine.run([asked])
        drawn = record.to_dict()["result"]["choices"]
        tokens.append({choice["logprobs"]["tokens"][0] for choice in drawn})
    assert len(tokens[0]) == 1 and len(tokens[1]) == 2


def test_min_p_keeps_what_is_near_the_best(engine: fminfer.Engine) -> None:
    (certain,) = engine.run(
        [{"prompt": PROMPT, "max_tokens": 1, "n": 50, "min_p": 1.0}]
    )
    assert len({c["text"] for c in certain.to_dict()["result"]["choices"]}) == 1
    asked = {
        "prompt": PROMPT,
        "max_tokens": 1,
        "n": 128,
        "temperature": 2,
        "logprobs": 1,
    }
    (record,) = engine.run([asked | {"min_p": 0.5}])
    for choice in record.to_dict()["result"]["choices"]:
        logprobs = choice["logprobs"]
        best = max(logprobs["top_logprobs"][0].values())
        # at temperature 2 the ratio 0.5 is one of 0.25 in the raw probabilities
        assert (
            logprobs["token_logprobs"][0]
            >= best + torch.tensor(0.25).log().item() - 1e-5
        )


def test_stop_token_ids(engine: fminfer.Engine) -> None:
    (plain,) = choices(engine, {"logprobs": 0})
    stop_id = plain["token_ids"][4]
    first = plain["token_ids"].index(stop_id)
    asked = {"stop_token_ids": [stop_id], "logprobs": 0}
    bare, echoed, kept, ignoring = choices(
        engine,
        asked,
        asked | {"echo": True},
        asked | {"include_stop_str_in_output": True},
        asked | {"ignore_eos": True},
    )
    for choice in (bare, echoed, kept, ignoring):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)
        assert choice["token_ids"] == plain["token_ids"][: first + 1]
    assert len(bare["logprobs"]["tokens"]) == first
    assert len(echoed["logprobs"]["tokens"]) == len(PROMPT) + first + 1
    assert len(kept["logprobs"]["tokens"]) == first + 1
    piece = engine.tokenizer.decode([stop_id])
    assert (
        kept["text"] == bare["text"] + piece or "\ufffd" in kept["text"] + bare["text"]
    )


def test_min_tokens_holds_back_every_end(engine: fminfer.Engine) -> None:
    """End tokens cannot be drawn before it, and stop strings do not stop before it."""
    (plain,) = choices(engine, {"max_tokens": 20})
    stop_id = plain["token_ids"][1]
    (held,) = choices(
        engine, {"max_tokens": 20, "stop_token_ids": [stop_id], "min_tokens": 6}
    )
    assert stop_id not in held["token_ids"][:6]
    assert held["token_ids"][0] == plain["token_ids"][0]
    # the model writes aaaaa…
    letter = {"logit_bias": {"97": 100}, "max_tokens": 9, "stop": "a"}
    early, late = choices(engine, letter, letter | {"min_tokens": 5})
    assert early["text"] == "" and early["token_ids"] == [97]
    assert late["text"] == "aaaaa" and late["stop_reason"] == "a"
    assert len(late["token_ids"]) == 6


def test_min_tokens_holds_back_an_eos_that_is_ignored() -> None:
    """Under `ignore_eos` the EOS was drawn before `min_tokens`, as by no other engine."""
    engine = fminfer.Engine(dtype="float32")  # the demo model, which ends its answers
    (eos,) = engine.intake.limits.eos_ids
    way = {
        "prompt": "Question: How do you go from the den to the porch?\nAnswer:",
        "temperature": 0,
    }
    way |= {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    ended, held, half = (
        record.to_dict()["result"]["choices"][0]["token_ids"]
        for record in engine.run(
            [way, way | {"min_tokens": 12}, way | {"min_tokens": 6}]
        )
    )
    engine.close()
    assert eos in ended and eos not in held
    assert eos not in half[:6] and eos in half[6:]


def test_include_stop_str_in_output(engine: fminfer.Engine) -> None:
    letter = {"logit_bias": {"97": 100}, "max_tokens": 9, "stop": "aaa", "logprobs": 0}
    cut, kept = choices(engine, letter, letter | {"include_stop_str_in_output": True})
    assert (cut["text"], kept["text"]) == ("", "aaa")
    assert len(cut["logprobs"]["tokens"]) == 0 and len(kept["logprobs"]["tokens"]) == 3


def test_ids_of_a_biased_or_stopping_token_must_exist(engine: fminfer.Engine) -> None:
    wrong = [
        {"logit_bias": {"300": 1}},
        {"stop_token_ids": [300]},
        {"stop_token_ids": [-1]},
    ]
    records = list(engine.run([{"prompt": "x", **fields} for fields in wrong]))
    for record in records:
        assert record.error is not None and record.error.code == "token_out_of_range"
        assert "0 to 299" in record.error.message


@pytest.fixture(scope="module")
def special_tokenizer() -> Tokenizer:
    """Words, with BOS added in front and EOS spelled </s>."""
    words = ["<s>", "</s>", "one", "two", "three"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: i for i, word in enumerate(words)}, unk_token="one"
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    return Tokenizer(hf)


def test_a_stop_string_that_is_a_special_token_stops(
    llama_checkpoint: tuple[Path, Any],
    special_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts leave special tokens out: such a stop never matched, in silence."""
    monkeypatch.setattr(
        "fminfer.runtime.engine_api.load_tokenizer", lambda *_: special_tokenizer
    )
    told: list[str] = []
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    engine.intake.on_warning = told.append
    to_eos = {
        "prompt": "two three",
        "logit_bias": {"1": 100},
        "max_tokens": 3,
        "ignore_eos": True,
    }
    asked = [
        {},
        {"stop": ["x", "</s>"]},
        {"stop": "</s>", "skip_special_tokens": False},
        {"stop": "</s>", "min_tokens": 2, "logit_bias": {"1": 100, "2": 50}},
        {"stop": "</s> two"},
        {"stop": "</s>", "include_stop_str_in_output": True},
    ]
    found = choices(engine, *(to_eos | each for each in asked))
    engine.close()
    reasons = [None, "</s>", "</s>", "</s>", None, "</s>"]
    assert [choice.get("stop_reason") for choice in found] == reasons
    assert [len(choice["token_ids"]) for choice in found] == [3, 1, 1, 3, 3, 1]
    assert [choice["text"].strip() for choice in found[1::4]] == ["", "</s>"]
    (warning,) = told
    assert (
        "line 5: stop strings with a special token" in warning and "</s> two" in warning
    )


def test_a_prompt_that_spells_bos_is_told_that_it_gets_two(
    special_tokenizer: Tokenizer,
) -> None:
    intake = Intake(special_tokenizer, RequestLimits(100, 5))
    (warning,) = intake.parse({"prompt": "<s> two"}).warnings
    assert "begin with <s>" in str(warning) and "add_special_tokens" in str(warning)
    for others in (
        {"prompt": "two <s>"},
        {"prompt": "<s> two", "add_special_tokens": False},
    ):
        assert not intake.parse(others).warnings
    assert not intake.parse({"prompt": [0, 3]}).warnings, "ids are used as they are"
    strict = Intake(
        special_tokenizer, RequestLimits(100, 5, config=EngineConfig(strict=True))
    )
    with pytest.raises(RequestError, match="they have two"):
        strict.parse({"prompt": ["two", "<s> two"]})


def test_many_bad_words_are_tokenized_once(
    engine: fminfer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 4,096 words left the cache before they were asked for again: 3 s for each request."""
    asked = {"bad_words": [f"word {number}" for number in range(5000)], "max_tokens": 1}
    told: Counter[str] = Counter()
    tokenize = Tokenizer._encode_ids
    monkeypatch.setattr(
        Tokenizer,
        "_encode_ids",
        lambda own, text, added: told.update([text]) or tokenize(own, text, added),
    )
    choices(engine, asked, asked | {"max_tokens": 2})
    assert len(told) == 10_000 and set(told.values()) == {1}


def test_bad_words_without_a_token_are_refused(special_tokenizer: Tokenizer) -> None:
    """Texts without a token became BOS, and so BOS would have been banned."""
    intake = Intake(special_tokenizer, RequestLimits(100, 5))
    for words in (["\n"], ["two", " "]):
        with pytest.raises(
            RequestError, match=r"bad_words is .* strings that have tokens"
        ):
            intake.parse({"prompt": "two", "bad_words": words})
    with pytest.raises(RequestError, match="fewer: they can ban every token"):
        intake.parse(
            {"prompt": "two", "bad_words": ["<s>", "</s>", "one", "two", "three"]}
        )
    with pytest.raises(RequestError, match="more tokens than the model has rows"):
        Intake(special_tokenizer, RequestLimits(100, 3)).parse(
            {"prompt": [1], "bad_words": ["two"]}
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_as_by_transformers(
    special_tokenizer: Tokenizer, side: str
) -> None:
    """That is what vLLM does: the BOS that the tokenizer adds stays, and is counted."""
    hf = copy.deepcopy(special_tokenizer.hf)  # it would go on cutting
    assert hf is not None
    text = "two three two one three"
    hf.truncation_side = side
    intake = Intake(special_tokenizer, RequestLimits(100, 5))
    for length, adds in itertools.product((2, 3, 5, 6, 50), (True, False)):
        fields = {"truncate_prompt_tokens": length, "truncation_side": side}
        fields |= {"prompt": text, "add_special_tokens": adds}
        (prompt,) = intake.prepare(intake.parse(fields)).prompts
        ids = hf(text, truncation=True, max_length=length, add_special_tokens=adds)[
            "input_ids"
        ]
        assert prompt.ids == ids, fields
        assert prompt.num_cut == 5 + adds - len(ids)
        (prompt,) = intake.prepare(
            intake.parse(fields | {"prompt": [0, 3, 4, 3, 2, 4]})
        ).prompts
        ids = [0, 3, 4, 3, 2, 4]
        assert prompt.ids == (ids[-length:] if side == "left" else ids[:length])
    assert not intake.warnings.to_dict(), "it is the request's own wish"


def test_special_tokens_are_added_and_shown_as_asked(
    llama_checkpoint: tuple[Path, Any],
    special_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "fminfer.runtime.engine_api.load_tokenizer", lambda *_: special_tokenizer
    )
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32", kernels="off")
    to_bos = {"prompt": "two three", "logit_bias": {"0": 100}, "max_tokens": 2}
    with_bos, without, shown, echoed = choices(
        engine,
        to_bos,
        to_bos | {"add_special_tokens": False},
        to_bos | {"skip_special_tokens": False},
        {
            "prompt": [0, 3, 4],
            "echo": True,
            "max_tokens": 0,
            "skip_special_tokens": False,
        },
    )
    engine.close()
    assert with_bos["prompt_token_ids"] == [0, 3, 4] and without[
        "prompt_token_ids"
    ] == [3, 4]
    assert with_bos["text"] == "" and shown["text"].split() == ["<s>", "<s>"]
    assert echoed["text"] == "<s> two three"
