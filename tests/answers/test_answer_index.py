"""Answers that are taken from earlier runs: the very same, for the same request and
model only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.answers.answer_index import (
    NOT_OF_ANSWERS,
    AnswerIndex,
    RecentAnswers,
    answer_terms,
    make_answer_key,
    open_answer_index,
)
from fminfer.answers.cache_place import CachePlace
from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.contract.request import RequestParams, VectorSpec, VectorWish
from fminfer.core.config import Constraint, EngineConfig
from fminfer.core.thought_form import Thought, ThoughtForm
from fminfer.engine.engine_core import Finished
from fminfer.engine.observation import Observation
from fminfer.engine.sequence import PreparedRequest
from fminfer.models.checkpoint import open_checkpoint, open_model
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.plan.planning import plan_ahead
from fminfer.text.encoded_prompt import EncodedPrompt

SEEDED = RequestParams(max_tokens=8, temperature=0.9, seed=4)
# A value of each that is another than SEEDED's.
OTHER: dict[str, Any] = {
    **{"max_tokens": 9, "min_tokens": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 40},
    **{"min_p": 0.1, "n": 2, "best_of": 3, "logprobs": 0, "echo": True, "stop": ("a",)},
    **{"stop_token_ids": (5,), "include_stop_str_in_output": True, "ignore_eos": True},
    **{"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    **{"logit_bias": ((3, 1.0),), "seed": 5, "add_special_tokens": False},
    **{"skip_special_tokens": False, "return_token_ids": True},
    **{"allowed_token_ids": (5,), "bad_words": ("a",)},
    **{"truncate_prompt_tokens": 5, "truncation_side": "right"},
    **{"constraint": Constraint("regex", "a+"), "decoder_prompt": "a"},
    "thought": Thought(ThoughtForm("<think>", "</think>")),
}
PROMPT = EncodedPrompt([1, 2, 3], "abc", [0, 1, 2])
OTHER_PROMPT: dict[str, Any] = {
    **{"ids": [1, 2, 4], "text": "abd", "offsets": [0, 1, 1]},
    **{"num_cut": 1, "is_whole_text": True, "types": [0, 0, 1]},
}
OTHER_PREPARED: dict[str, Any] = {
    **{"kind": "chat", "tool_parser": "hermes", "keeps_one_call": True},
    **{"tools": ({"function": {"name": "f"}},), "call_mode": "one"},
    **{"sources": [PROMPT], "num_start": 1, "vectors": VectorWish(VectorSpec(8))},
}
QUESTION = "Question: How do you go from the den to the porch?\nAnswer:"
CHAT = {
    "messages": [
        {"role": "user", "content": "How do you go from the den to the porch?"}
    ]
}
GREEDY: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0}
DRAWN: dict[str, Any] = {
    "prompt": QUESTION,
    "max_tokens": 8,
    "temperature": 1.5,
    "seed": 3,
}
REQUESTS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | {"logprobs": 3},
    GREEDY | {"logprobs": 2, "echo": True},
    GREEDY | {"n": 3, "return_token_ids": True},
    GREEDY | {"stop": [" "], "include_stop_str_in_output": True},
    GREEDY | {"stop_token_ids": [*range(200)], "max_tokens": 20},
    GREEDY | {"prompt": [QUESTION, "é 🤗"], "logprobs": 0},
    GREEDY | {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 1},
    {"prompt": QUESTION, "max_tokens": 0, "echo": True, "logprobs": 5},
    {"prompt": QUESTION, "max_tokens": 0},
    DRAWN,
    DRAWN | {"seed": 4, "logprobs": 2},
    DRAWN | {"n": 2, "best_of": 4, "logprobs": 1},
    DRAWN | {"logit_bias": {"7": 5}, "presence_penalty": 1, "top_p": 0.9},
    DRAWN | {"allowed_token_ids": [299, 272, 199], "bad_words": [" east"]},
    DRAWN | {"truncate_prompt_tokens": 3, "echo": True},
    CHAT | {"max_tokens": 9, "temperature": 0},
    CHAT | {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    CHAT | {"max_tokens": 9, "seed": 8, "n": 2},
    {"request": GREEDY | {"top_k": 1}, "id": "wrapped"},
    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": GREEDY},
    {
        "custom_id": "2",
        "method": "POST",
        "url": "/v1/completions",
        "body": DRAWN | {"logprobs": 1},
    },
    {
        "custom_id": "3",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT | {"seed": 1},
    },
]


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    engine = fminfer.Engine(dtype="float32")
    yield engine
    engine.close()


@contextmanager
def cached(engine: fminfer.Engine, folder: Path) -> Iterator[AnswerIndex]:
    """Give an engine the cache of a folder."""
    told: list[str] = []
    fingerprint = plan_ahead(engine.config, open_model(engine.config)).fingerprint()
    cache = open_answer_index(fingerprint, CachePlace(folder, 2**24), told.append)
    assert cache is not None
    engine.runs.cache = cache
    try:
        yield cache
    finally:
        engine.runs.cache = None
        cache.close()
    assert told == [] and cache.trouble == ""


def lines(requests: list[dict[str, Any]]) -> Iterator[Line]:
    for number, request in enumerate(requests, 1):
        yield Line(0, number, json.dumps(request).encode())


def answers(engine: fminfer.Engine, requests: list[dict[str, Any]]) -> list[Record]:
    return sorted(engine.run(lines(requests)), key=lambda record: record.line.number)


def without_times(record: Record) -> bytes:
    """Return the bytes of a record but for what differs between a computed and a taken
    answer."""
    text = re.sub(rb'"request_time":\{[^}]*\}', b"", record.to_json())
    text = re.sub(rb'"created":\d+', b"", text)
    return re.sub(rb'"cached_tokens":\d+', b"", text)


def test_answers_of_another_run_are_the_same_to_the_last_bit(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with cached(engine, tmp_path) as cache:
        computed = answers(engine, REQUESTS)
        assert (cache.num_asked, cache.num_found) == (len(REQUESTS), 0)
    assert all(record.error is None for record in computed)
    before = engine.stats.num_generated_tokens, engine.stats.num_prompt_tokens
    kept = engine.stats.num_kept_requests
    with cached(engine, tmp_path) as cache:
        taken = answers(engine, REQUESTS)
        assert (cache.num_asked, cache.num_found) == (len(REQUESTS), len(REQUESTS))
    assert (engine.stats.num_generated_tokens, engine.stats.num_prompt_tokens) == before
    assert engine.stats.num_kept_requests - kept == cache.num_found
    assert [*map(without_times, taken)] == [*map(without_times, computed)]
    for record in taken:
        assert record.num_cached_tokens == record.num_prompt_tokens > 0
        if record.envelope.shape != "batch":
            assert record.result is not None
            assert record.result["request_time"]["batch_time"] == 0


@pytest.mark.parametrize("text", ["half a pair \ud83e", 'a "quote"\n\x00', "é 🤗", ""])
def test_any_text_and_number_comes_back(text: str, tmp_path: Path) -> None:
    numbers = [
        -9999.0,
        -0.0,
        1e-308,
        -0.1 - 0.2,
        -1.1754943508222875e-38,
        -5e-324,
        None,
    ]
    choices = [{"text": text, "logprobs": {text: numbers}, "index": 2**63}]
    told: list[str] = []
    for _ in range(2):  # before it is written, and from the disk
        cache = open_answer_index({}, CachePlace(tmp_path, 2**24), told.append)
        assert cache is not None
        cache.add(prepared(), Finished(7, choices, finished("").usage, {}))
        found = cache.find(prepared())
        cache.close()
        assert found is not None and repr(found.choices) == repr(choices) and not told


def test_a_request_without_a_seed_is_drawn_anew(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    drawn = {"prompt": QUESTION, "max_tokens": 12, "temperature": 2}
    with cached(engine, tmp_path) as cache:
        first = answers(engine, [drawn])
        answers(engine, [drawn])
    assert cache.num_asked == 0 and first[0].error is None
    assert engine.prepare(drawn).params.is_by_chance
    assert not engine.prepare(drawn | {"max_tokens": 0}).params.is_by_chance


def test_an_error_is_not_kept(engine: fminfer.Engine, tmp_path: Path) -> None:
    wrong = [GREEDY | {"max_tokens": 10**6}, GREEDY | {"n": 0}]
    for _ in range(2):
        with cached(engine, tmp_path) as cache:
            assert all(record.error is not None for record in answers(engine, wrong))
    assert cache.num_asked == cache.num_found == 0


def test_equal_lines_of_a_run_follow_one_that_was_found(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    with cached(engine, tmp_path):
        answers(engine, [GREEDY])
    copied = engine.stats.num_copied_requests
    kept = engine.stats.num_kept_requests
    with cached(engine, tmp_path) as cache:
        found = answers(engine, [GREEDY] * 200)
    assert len(found) == 200 and len({without_times(r) for r in found}) == 1
    assert (cache.num_asked, cache.num_found) == (1, 1)
    assert engine.stats.num_copied_requests - copied == 199
    assert engine.stats.num_kept_requests - kept == 1


def test_found_and_computed_lines_together(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    requests = [
        GREEDY | {"prompt": f"{number} of many", "max_tokens": 2}
        for number in range(300)
    ]
    alone = answers(engine, requests)
    with cached(engine, tmp_path):
        answers(engine, requests[::3])
    with cached(engine, tmp_path) as cache:
        together = answers(engine, requests)
    assert (cache.num_asked, cache.num_found) == (300, 100)
    texts = [
        [choice["text"] for choice in (r.result or {})["choices"]] for r in together
    ]
    assert texts == [
        [choice["text"] for choice in (r.result or {})["choices"]] for r in alone
    ]


def prepared(params: RequestParams = SEEDED, **others: Any) -> PreparedRequest:
    return PreparedRequest(params, [PROMPT], **others)


def key(prepared: PreparedRequest) -> bytes:
    return make_answer_key(prepared, b"terms")


@pytest.mark.parametrize("name", [each.name for each in fields(RequestParams)])
def test_every_parameter_is_in_the_key(name: str) -> None:
    """A field that is new must be added to OTHER, and is then seen to be in the key."""
    other = replace(SEEDED, **{name: OTHER[name]})
    assert other != SEEDED and key(prepared(other)) != key(prepared())


@pytest.mark.parametrize("name", [each.name for each in fields(EncodedPrompt)])
def test_all_of_a_prompt_is_in_the_key(name: str) -> None:
    other = PreparedRequest(SEEDED, [replace(PROMPT, **{name: OTHER_PROMPT[name]})])
    assert key(other) != key(prepared())


def test_all_of_a_request_is_in_the_key() -> None:
    """`repeat` and `meaning` only tell requests apart whose draws nobody repeats."""
    seen = {"params", "prompts", *OTHER_PREPARED}
    assert {each.name for each in fields(PreparedRequest)} == {
        *seen,
        "repeat",
        "meaning",
        "observation",
    }
    measured = prepared(observation=Observation(()))
    assert key(measured) == key(prepared()), "a run measures some of its rows"
    for name, value in OTHER_PREPARED.items():
        assert key(prepared(**{name: value})) != key(prepared())
    sources = [[PROMPT], [replace(PROMPT, text="abd")], [PROMPT, PROMPT]]
    assert len({key(prepared(sources=each)) for each in sources}) == 3, (
        "what an encoder reads"
    )
    for name, value in OTHER_PREPARED.items():
        if name != "sources":
            both = {"sources": [PROMPT], name: value}
            assert key(prepared(**both)) != key(prepared(sources=[PROMPT])), (
                f"{name} beside it"
            )
    assert make_answer_key(prepared(), b"other") != make_answer_key(
        prepared(), b"terms"
    )


def test_where_prompts_end_is_in_the_key() -> None:
    def of(*ids: list[int]) -> bytes:
        return key(
            PreparedRequest(SEEDED, [EncodedPrompt(each, "", []) for each in ids])
        )

    cut = [
        of([1, 2], [3]),
        of([1], [2, 3]),
        of([1, 2, 3]),
        of([1, 2, 3], []),
        of([], [1, 2, 3]),
    ]
    assert len({*cut}) == len(cut)
    texts = [[("ab", [1]), ("c", [1])], [("a", [1]), ("bc", [1])]]
    keys = [
        key(
            PreparedRequest(
                SEEDED, [EncodedPrompt(ids, text, []) for text, ids in each]
            )
        )
        for each in texts
    ]
    assert keys[0] != keys[1]


def test_what_says_the_same_has_one_key(engine: fminfer.Engine) -> None:
    """The order of keys, 1 for 1.0, who asks, and a greedy request's seed."""
    same = [
        GREEDY,
        {"temperature": 0.0, "max_tokens": 8.0, "prompt": QUESTION, "user": "me"},
        GREEDY | {"seed": 7, "n": 1, "best_of": 1, "stop": None, "stream": False},
        GREEDY | {"model": "another", "logit_bias": {}},
    ]
    assert len({key(engine.prepare(each)) for each in same}) == 1
    chat = CHAT | {"temperature": 0, "max_tokens": 5}
    same = [
        chat,
        CHAT | {"temperature": 0, "max_completion_tokens": 5, "user": "me", "seed": 3},
    ]
    assert len({key(engine.prepare(each)) for each in same}) == 1
    assert len({key(engine.prepare(DRAWN | {"seed": seed})) for seed in (3, 3, 4)}) == 2


def test_what_a_chat_may_draw_at_most_is_in_the_key(engine: fminfer.Engine) -> None:
    """Without max_tokens the KV cache limits it, and --budget that."""
    asked = engine.prepare(CHAT | {"temperature": 0})
    other = replace(
        asked, params=replace(asked.params, max_tokens=asked.params.max_tokens - 1)
    )
    assert key(asked) != key(other)


def terms(**options: Any) -> dict[str, str]:
    config = EngineConfig(**options)
    return answer_terms(plan_ahead(config, open_model(config)).fingerprint())


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_dtype": "bfloat16"},
        {"max_layers": 1},
        {"token_format": "text"},
        {"skip_tokenizer_init": True},
        {"random_init": "llama-160m"},
    ],
)
def test_another_model_or_number_type_has_other_answers(
    options: dict[str, Any],
) -> None:
    assert terms(**{"dtype": "float32"} | options) != terms(dtype="float32")


def test_other_files_of_a_model_have_other_answers(tmp_path: Path) -> None:
    """Weights, config and tokenizer; another name or place of the same does not count."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    assert terms(model=str(tmp_path / "model")) == terms()
    weights = next((tmp_path / "model").glob("*.safetensors"))
    for name, old, new in (
        (weights.name, weights.read_bytes()[-400:], bytes(400)),
        ("tokenizer.json", b"}", b"} "),
        ("config.json", b'"rms_norm_eps": 1e-', b'"rms_norm_eps": 2e-'),
    ):
        path = tmp_path / "model" / name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(old, new))
        assert path.read_bytes() != whole, name
        assert terms(model=str(tmp_path / "model")) != terms(), name
        path.write_bytes(whole)


def test_what_shows_in_a_request_does_not_split_answers(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    for options in (
        {"seed": 9},
        {"strict": True},
        {"check_model": True},
        {"max_logprobs": 5},
        {"on_too_long": "truncate-left"},
        {"max_model_len": 64},
        {"chat_template": str(tmp_path / "template")},
        {"request_args": {"n": 2}},
        {"tool_call_parser": "hermes"},
        {"reasoning_parser": "none"},
        {"thinking_budget": 9},
        {"budget": 640},
        {"max_rows": 3},
        {"kernels": "off"},
        {"embeddings": "npy"},
    ):
        assert terms(**options) == terms(), options
    named = {
        "--chat-template",
        "--overwrite-request-args",
        "--max-model-len",
        "--embeddings",
        "--reasoning-parser",
        "--thinking-budget",
    }
    always = plan_ahead(EngineConfig(), open_checkpoint(None)).fingerprint().keys()
    elsewhere = {"--tool-call-parser", "--generation-config"}
    assert always | named | elsewhere >= NOT_OF_ANSWERS, (
        "names that are no longer there"
    )


def test_another_template_gives_another_answer(
    engine: fminfer.Engine, tmp_path: Path
) -> None:
    """It writes another prompt. So does --on-too-long, which cuts it."""
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    chat = CHAT | {"temperature": 0, "max_tokens": 4}
    with cached(engine, tmp_path):
        answers(engine, [chat])
    other = fminfer.Engine(dtype="float32", chat_template=str(tmp_path / "template"))
    try:
        with cached(other, tmp_path) as cache:
            answers(other, [chat])
            assert (cache.num_asked, cache.num_found) == (1, 0)
    finally:
        other.close()
    with cached(engine, tmp_path) as cache:
        answers(engine, [chat])
        assert (cache.num_asked, cache.num_found) == (1, 1)


def finished(text: str) -> Finished:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    return Finished(7, [{"text": text}], usage, {})


def text_of(answer: Finished | None) -> str | None:
    return None if answer is None else str(answer.choices[0]["text"])


def test_answers_in_memory_leave_by_their_last_use() -> None:
    cache = AnswerIndex({}, None, RecentAnswers(2, 1))
    requests = [prepared(replace(SEEDED, seed=seed)) for seed in range(3)]
    for seed in (0, 1):
        cache.add(requests[seed], finished(str(seed)))
    assert text_of(cache.find(requests[0])) == "0"
    cache.add(requests[2], finished("2"))
    assert [text_of(cache.find(each)) for each in requests] == ["0", None, "2"]
    assert (cache.num_asked, cache.num_found) == (4, 3)


def test_a_list_of_answers_is_drawn_from_once_it_is_full() -> None:
    """Only for who takes chance; and only when there are as many as were asked for."""
    cache = AnswerIndex({}, None, RecentAnswers(2, 3))
    drawn = prepared(replace(SEEDED, seed=None), meaning=b"m", repeat=5)
    again = replace(drawn, repeat=6)
    for text in "abc":
        assert cache.find(again, takes_chance=True) is None
        cache.add(drawn, finished(text))
    cache.add(drawn, finished("d"))
    found = {text_of(cache.find(again, takes_chance=True)) for _ in range(200)}
    assert found == {"a", "b", "c"}
    assert cache.find(again) is None, "a line of a file is drawn"
    cache.add(prepared(), finished("seeded"))
    assert text_of(cache.find(prepared())) == "seeded", "one answer is enough"


def test_without_a_list_nothing_that_chance_decides_is_kept() -> None:
    cache = AnswerIndex({}, None, RecentAnswers(9, 1))
    drawn = prepared(replace(SEEDED, seed=None), meaning=b"m")
    cache.add(drawn, finished("a"))
    assert cache.find(drawn, takes_chance=True) is None and cache.num_asked == 0


def test_what_the_disk_has_comes_into_memory(tmp_path: Path) -> None:
    told: list[str] = []
    place = CachePlace(tmp_path, 2**24)
    for size in (0, 5):
        cache = open_answer_index({}, place, told.append, size=size)
        assert cache is not None
        cache.add(prepared(), finished("kept"))
        cache.close()
    cache = open_answer_index({}, place, told.append, size=5)
    assert cache is not None and text_of(cache.find(prepared())) == "kept"
    cache.close()
    assert text_of(cache.find(prepared())) == "kept" and not told
    assert open_answer_index({}, None, told.append) is None


def test_another_model_finds_none_of_them(tmp_path: Path) -> None:
    for model, is_there in (("a", False), ("b", False), ("a", True)):
        cache = open_answer_index(
            {"weights": model}, CachePlace(tmp_path, 2**24), print
        )
        assert cache is not None and (cache.find(prepared()) is not None) == is_there
        cache.add(prepared(), finished(model))
        cache.close()


def test_a_folder_that_cannot_be_used_shows_as_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, is_trouble in (
        (tmp_path / "new", False),
        (tmp_path / "file" / "new", True),
    ):
        told: list[str] = []
        cache = open_answer_index({}, CachePlace(folder, 2**24), told.append)
        assert cache is not None and bool(cache.trouble) == bool(told) == is_trouble
        cache.close()
