"""One line in, a Request or a RequestError with its code, its field and what to do."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from fminfer.contract.chat import parse_chat
from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.field_table import FIELDS
from fminfer.contract.prompts import MAX_CHOICES
from fminfer.contract.request import Request, RequestParams
from fminfer.contract.request import parse_request as check_fields
from fminfer.core.errors import ErrorCode, RequestError


def parse_request(raw: bytes, *, max_logprobs: int, is_strict: bool = False) -> Request:
    envelope = parse_envelope(Line(0, 1, raw))
    if envelope.error is not None:
        raise envelope.error
    return check_fields(envelope.fields, max_logprobs=max_logprobs, is_strict=is_strict)


def params(**fields: object) -> RequestParams:
    line = json.dumps({"prompt": "x"} | fields).encode()
    return parse_request(line, max_logprobs=100).params


def refused(line: bytes | dict[str, object]) -> RequestError:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(RequestError) as caught:
        parse_request(raw, max_logprobs=100)
    assert caught.value.code in get_args(ErrorCode)
    return caught.value


def test_defaults_are_those_of_openai() -> None:
    found = params()
    assert (found.max_tokens, found.temperature, found.top_p, found.n) == (
        16,
        1.0,
        1.0,
        1,
    )
    assert found == params(
        max_tokens=None, temperature=None, stop=None, best_of=None, echo=None
    )


def test_integral_floats_pass_for_integers_and_booleans_do_not() -> None:
    assert params(max_tokens=2.0, logprobs=1.0).max_tokens == 2
    assert refused({"prompt": "x", "max_tokens": True}).code == "invalid_type"
    assert refused({"prompt": "x", "max_tokens": "5"}).code == "invalid_type"
    assert refused({"prompt": "x", "max_tokens": 2.5}).code == "invalid_type"


def test_echo_takes_0_and_1() -> None:
    assert params(echo=1).echo and not params(echo=0).echo
    assert refused({"prompt": "x", "echo": "yes"}).code == "invalid_type"
    assert refused({"prompt": "x", "echo": 2}).code == "invalid_type"


def test_stop_is_a_string_or_a_list() -> None:
    assert params(stop="a").stop == ("a",)
    assert params(stop=["a", "b", "a"]).stop == ("a", "b")
    assert params(stop=[]).stop == ()
    assert refused({"prompt": "x", "stop": ["a", ""]}).code == "out_of_range"
    assert refused({"prompt": "x", "stop": [1]}).code == "invalid_type"


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: object, expected: object) -> None:
    line = json.dumps({"prompt": prompt}).encode()
    assert parse_request(line, max_logprobs=100).prompts == expected


@pytest.mark.parametrize(
    "prompt", [5, True, {"a": 1}, [1, "a"], [[1], "a"], [None], [True]]
)
def test_prompts_of_a_wrong_type(prompt: object) -> None:
    assert refused({"prompt": prompt}).code == "invalid_type"


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"temperature": 2.1}, "out_of_range", "temperature"),
        ({"temperature": -1}, "out_of_range", "temperature"),
        ({"top_p": 1.5}, "out_of_range", "top_p"),
        ({"top_k": -2}, "out_of_range", "top_k"),
        ({"n": 0}, "out_of_range", "n"),
        ({"n": 129}, "out_of_range", "n"),
        ({"best_of": 129}, "out_of_range", "best_of"),
        ({"logprobs": 101}, "out_of_range", "logprobs"),
        ({"logprobs": "5"}, "invalid_type", "logprobs"),
        ({"max_tokens": -1}, "out_of_range", "max_tokens"),
        ({"seed": 2**70}, "out_of_range", "seed"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"stream": 0}, "unsupported_parameter", "stream"),
        ({"logit_bias": {"5": 1, "05": 100}}, "out_of_range", "logit_bias"),
        ({"prompt": ["a"] * 2000, "n": 128}, "out_of_range", "n"),
        ({"prompt": ["a"] * 2000, "best_of": 128, "n": 1}, "out_of_range", "best_of"),
        ({"prompt": ["a"] * 20_000}, "out_of_range", "prompt"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"frequency_penalty": 2.1}, "out_of_range", "frequency_penalty"),
        ({"presence_penalty": -2.1}, "out_of_range", "presence_penalty"),
        ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "out_of_range", "repetition_penalty"),
        ({"repetition_penalty": 1001}, "out_of_range", "repetition_penalty"),
        ({"min_p": 1.1}, "out_of_range", "min_p"),
        ({"min_tokens": 17}, "out_of_range", "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "out_of_range", "min_tokens"),
        ({"logit_bias": {"5": 101}}, "out_of_range", "logit_bias[5]"),
        ({"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias[5]"),
        ({"logit_bias": {"five": 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": [5]}, "invalid_type", "logit_bias"),
        ({"stop_token_ids": 5}, "invalid_type", "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "invalid_type", "stop_token_ids"),
        ({"stop": ["", "x"]}, "out_of_range", "stop"),
        ({"allowed_token_ids": []}, "out_of_range", "allowed_token_ids"),
        ({"allowed_token_ids": [5, True]}, "invalid_type", "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "invalid_type", "allowed_token_ids"),
        ({"bad_words": ["a", ""]}, "out_of_range", "bad_words"),
        ({"bad_words": ["a", 5]}, "invalid_type", "bad_words"),
        ({"truncate_prompt_tokens": 0}, "out_of_range", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "out_of_range", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2.5}, "invalid_type", "truncate_prompt_tokens"),
        (
            {"truncate_prompt_tokens": 5, "truncation_side": "up"},
            "out_of_range",
            "truncation_side",
        ),
        ({"truncation_side": "right"}, "out_of_range", "truncation_side"),
        ({"return_token_ids": 1}, "invalid_type", "return_token_ids"),
        ({"top_k": -2}, "out_of_range", "top_k"),
        ({"echo": 2}, "invalid_type", "echo"),
        ({"prompt": None}, "missing_prompt", "prompt"),
        ({"prompt": []}, "out_of_range", "prompt"),
        ({"prompt": [[]]}, "out_of_range", "prompt"),
    ],
)
def test_refused_values(fields: dict[str, object], code: str, param: str) -> None:
    error = refused({"prompt": "x"} | fields)
    assert (error.code, error.param) == (code, param)
    assert param in error.message


@pytest.mark.parametrize(
    "name, neutral",
    [
        ("suffix", ""),
        ("stream", False),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("min_tokens", None),
        ("allowed_token_ids", None),
        ("bad_words", []),
        ("truncate_prompt_tokens", None),
        ("truncation_side", "left"),
    ],
)
def test_neutral_values_of_what_is_not_supported_pass(
    name: str, neutral: object
) -> None:
    assert params(**{name: neutral}) == params()


def test_lists_of_one_meaning_are_equal() -> None:
    found = params(allowed_token_ids=[7, 5, 7.0], bad_words=["b", "a", "b"])
    assert found == params(allowed_token_ids=[5, 7], bad_words=["a", "b"])
    assert (found.allowed_token_ids, found.bad_words) == ((5, 7), ("a", "b"))


@pytest.mark.parametrize(
    "fields, limit",
    [
        ({"seed": 2**63}, "at most 9223372036854775807"),
        ({"seed": -(2**64)}, "at least -9223372036854775808"),
        ({"seed": -(2**63) - 1}, "at least -9223372036854775808"),
        ({"max_tokens": 2**64 + 1}, "at most 9223372036854775807"),
        ({"max_tokens": -1}, "at least 0"),
        ({"n": 129}, "from 1 to 128"),
    ],
)
def test_a_number_is_told_the_limit_that_it_breaks(
    fields: dict[str, object], limit: str
) -> None:
    """A seed of 2^63 was told that it must be at least -2^63; -2^63 - 1 passed for -2^63."""
    assert limit in refused({"prompt": "x"} | fields).message
    assert params(seed=-(2**63)).seed == -(2**63)


def test_the_same_token_biased_twice_is_refused() -> None:
    """One of "5" and "05" was dropped in silence."""
    message = refused({"prompt": "x", "logit_bias": {"5": 1, "05": 100}}).message
    assert '"5"' in message and '"05"' in message


def test_choices_of_a_line_have_a_joint_limit() -> None:
    """10 KB with 2,000 prompts and n 128 made 256,000 sequences, and took gigabytes."""
    message = refused({"prompt": ["a"] * 2000, "n": 128}).message
    assert "256,000" in message and f"{MAX_CHOICES:,}" in message
    assert params(prompt=["a"] * (MAX_CHOICES // 128), n=128).n == 128


def test_messages_are_no_prompt_of_completions() -> None:
    """Chat lines were told that prompt is absent, with no word of chat."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    error = refused(chat)
    assert (error.code, error.param) == ("missing_prompt", "messages")
    assert "/v1/chat/completions" in error.message
    both = refused(chat | {"prompt": "Hello"})
    assert both.param == "messages" and "keep the one" in both.message


def test_a_misspelt_prompt_is_named() -> None:
    assert "promt" in refused({"promt": "x"}).message


def test_a_missing_prompt_is_told_from_a_null_one() -> None:
    assert "absent" in refused({}).message
    assert "null" in refused({"prompt": None}).message


@pytest.mark.parametrize(
    "line, code, hint",
    [
        (b"{", "invalid_json", "spread over several lines"),
        (b'{"prompt": "x",', "invalid_json", "spread over several lines"),
        (b'"prompt": "x",', "invalid_json", "spread over several lines"),
        (b'{"prompt": "x",}', "invalid_json", "comma before the last brace"),
        (b"hello", "invalid_json", "one JSON object"),
        (b'{"prompt": "x", "top_p": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "x", "top_p": Infinity}', "invalid_json", "Infinity"),
        (b"[1]", "not_an_object", "list"),
        (b"null", "not_an_object", "null"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "byte 12"),
        (b'{"prompt": "\\ud800"}', "invalid_utf8", "surrogate"),
        (b"[" * 100_000, "invalid_json", "nested"),
        (b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}", "invalid_type", "a list"),
        (b"\xef\xbb\xbf" + b'{"prompt": "x"}', "invalid_json", "byte order mark"),
        ('{"prompt": "x"}'.encode("utf-16-le"), "invalid_json", "not JSON"),
    ],
)
def test_lines_that_are_no_request(line: bytes, code: str, hint: str) -> None:
    error = refused(line)
    assert error.code == code
    assert hint in error.message


def test_a_lone_surrogate_outside_the_prompt_is_no_error() -> None:
    """orjson refuses lone surrogates everywhere; JSON allows them, and only a prompt is text."""
    assert parse_request(
        b'{"prompt": "x", "id": "\\ud800"}', max_logprobs=5
    ).prompts == ["x"]


def test_best_of_below_n_is_n_with_a_warning() -> None:
    """Real HELM files hold best_of 1 with n 4."""
    request = parse_request(b'{"prompt": "x", "n": 4, "best_of": 1}', max_logprobs=5)
    assert request.params.best_of == 4
    assert [*map(str, request.warnings)] == [
        "best_of is below n and is taken as n: best_of 1 with n 4"
    ]


def test_unknown_keys_are_kept_with_a_warning() -> None:
    request = parse_request(b'{"prompt": "x", "foo": 1, "engine": "e"}', max_logprobs=5)
    assert [*map(str, request.warnings)] == [
        "unknown parameters are kept and not acted on: foo"
    ]


def test_a_misspelt_parameter_is_told_the_nearest_name() -> None:
    """`temprature` was only listed as unknown."""
    request = parse_request(b'{"prompt": "x", "temprature": 0}', max_logprobs=5)
    assert "temprature (did you mean temperature?)" in str(request.warnings[0])
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        parse_request(
            b'{"prompt": "x", "max_token": 0}', max_logprobs=5, is_strict=True
        )
    (warning,) = parse_request(
        b'{"prompt": "x", "sampler_prioritty": 0}', max_logprobs=5
    ).warnings
    assert str(warning).endswith(": sampler_prioritty"), (
        "no name that is refused is the nearest"
    )


def test_greedy_candidates_are_computed_once() -> None:
    assert params(temperature=0, best_of=5).num_candidates == 1
    assert params(top_p=0, n=3).num_candidates == 1
    assert params(n=3, best_of=5).num_candidates == 5
    assert params(n=3, max_tokens=0).num_candidates == 1


def test_what_is_drawn_by_chance_and_what_is_fed() -> None:
    assert params().is_by_chance and not params(seed=1).is_by_chance
    assert params(seed=1).effective_seed == 1 and params(top_k=2).is_by_chance
    for greedy in ({"temperature": 0}, {"top_p": 0}, {"top_k": 1}, {"max_tokens": 0}):
        found = params(seed=1, **greedy)
        assert (
            not found.is_random
            and not found.is_by_chance
            and found.effective_seed is None
        )
    assert [
        params(max_tokens=most, echo=True, logprobs=1).count_fed_tokens(5)
        for most in (1, 0)
    ] == [
        5,
        4,
    ]
    assert (
        params(max_tokens=0).count_fed_tokens(5)
        == params(max_tokens=0, echo=True).count_fed_tokens(5)
        == 0
    )
    assert not params().has_penalties and params(presence_penalty=0.5).has_penalties


WISHES = {
    name: each.neutral
    for name, each in FIELDS["completions"].items()
    if each.fate == "refused" and FIELDS["chat"].get(name) is each
}


@pytest.mark.parametrize("name", sorted(WISHES))
def test_a_wish_of_other_tools_is_refused_on_both_endpoints(name: str) -> None:
    """Completions answered them as if they were not there."""
    value = {"choice": ["yes", "no"]}
    wish = {name: [value] if FIELDS["chat"][name].only is list else value}
    error = refused({"prompt": "x"} | wish)
    assert (error.code, error.param) == ("unsupported_parameter", name)
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        parse_chat({"messages": messages} | wish, max_logprobs=5)
    assert caught.value.message == error.message
    for neutral in (None, *WISHES[name]):
        found = parse_request(
            json.dumps({"prompt": "x", name: neutral}).encode(), max_logprobs=5
        )
        assert found.params == params() and not found.warnings


@pytest.mark.parametrize(
    "wish",
    [
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"top_logprobs": 3},
        {"functions": [{}]},
        {"reasoning_effort": "low"},
        {"max_completion_tokens": 3},
        {"stream_options": {"a": 2}},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
def test_fields_of_chat_are_refused_in_completions(wish: dict[str, object]) -> None:
    name = next(iter(wish))
    error = refused({"prompt": "x"} | wish)
    assert error.param == name
    if name in ("tools", "tool_choice", "functions"):
        assert "give messages in place of prompt" in error.message


@pytest.mark.parametrize(
    "neutral",
    [{"top_k": -1}, {"stop": ""}, {"stop": [""]}, {"logprobs": False}, {"suffix": ""}],
)
def test_what_other_tools_call_off_is_off(neutral: dict[str, object]) -> None:
    """vLLM's own default for top_k was out of range."""
    assert params(**neutral) == params()


def test_do_sample_false_is_no_wish_where_nothing_is_sampled() -> None:
    assert params(do_sample=False, temperature=0) == params(temperature=0)


def test_no_unknown_name_is_left_out() -> None:
    """A line with more than five told the first five."""
    line = {f"unknown_{number}": 1 for number in range(50)}
    (warning,) = parse_request(
        json.dumps({"prompt": "x"} | line).encode(), max_logprobs=5
    ).warnings
    assert sorted(name.split(" ")[0] for name in warning.names) == sorted(line)
