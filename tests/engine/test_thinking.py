"""Thoughts are told from answers; what is asked of an answer begins behind its thought."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fminfer.core.thought_form import Thought
from fminfer.engine.engine_core import Delta
from fminfer.runtime.team.team_process import StreamPosition
from fminfer.text.thoughts import THOUGHT_FORMS, ThoughtReader, find_thoughts
from tests.engine.thinking_bench import HELLO, OPENING, TEMPLATE, ThinkingBench
from tests.streams import answer_in, check_stream, events_of

CHOICE: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
HARMONY = ">{# <|channel|>analysis<|message|> #}"
COHERE = ">{# <|START_THINKING|> #}"
RESPONSE = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>"
LATER = "<|start|>assistant<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
JSON_FINAL = "<|start|>assistant<|channel|>final <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (TEMPLATE, "<think>So.</think>\n\nYes", ("So.", "Yes", "stop")),
        (TEMPLATE, "\n<think>So.</think>Yes", ("So.", "Yes", "stop")),
        (OPENING, "So.</think> \n Yes ", ("So.", "Yes ", "stop")),
        (OPENING + "\n", "So.</think>Yes", ("So.", "Yes", "stop")),
        (TEMPLATE, "Yes </think> no", (None, "Yes </think> no", "stop")),
        (TEMPLATE, " <thin", (None, " <thin", "stop")),
        (TEMPLATE, "<think>So.</thin", ("So.</thin", None, "stop")),
        (OPENING, "", (None, None, "stop")),
        (OPENING, "</think>", (None, "", "stop")),
        (OPENING, "So.</think>\n<thin", ("So.", "<thin", "stop")),
        (
            OPENING,
            "a</think>\n<think>b</think>c<think>d</think>",
            ("a\nb", "c<think>d</think>", "stop"),
        ),
        (
            OPENING,
            'a</think>{"v": "<think>b</think>"}',
            ("a", '{"v": "<think>b</think>"}', "stop"),
        ),
        (OPENING, "<</<</th</think></think>", ("<</<</th", "</think>", "stop")),
        (OPENING + "{# </think> #}\n\n</think>\n\n", "Yes", (None, "Yes", "stop")),
        (HARMONY, f"{LATER[18:]}a<|end|>{FINAL}Yes", ("a", "Yes", "stop")),
        (
            HARMONY,
            f"{LATER[18:]}a<|end|>{LATER}b<|end|>{FINAL}Yes",
            ("a\nb", "Yes", "stop"),
        ),
        (HARMONY, f"{FINAL[18:]}Yes", (None, "Yes", "stop")),
        (HARMONY, f"{LATER[18:]}a<|end|>{JSON_FINAL}{{}}", ("a", "{}", "stop")),
        (HARMONY, f"{JSON_FINAL[18:]}{{}}", (None, "{}", "stop")),
        (COHERE, f"{RESPONSE}Yes<|END_RESPONSE|>", ("a", "Yes", "stop")),
    ],
)
def test_a_thought_is_told_from_its_answer(
    template: str, text: str, expected: tuple[Any, ...]
) -> None:
    bench = ThinkingBench(text.encode() + b"\0", template, context=400)
    reasoning, content, reason = bench.message()
    assert (reasoning, content, reason) == expected or (
        reasoning is None and expected[0] is None and content == expected[1]
    )
    bench.stream_events()


@pytest.mark.parametrize("name", THOUGHT_FORMS)
def test_each_form_in_pieces(name: Any) -> None:
    """A tag over three tokens, or over as many as it has characters, is the same tag."""
    form = THOUGHT_FORMS[name]
    text = f"{form.opening}I <think{form.closing}{form.behind}Yes {form.closing}"
    for size in (1, 2, 3, len(text)):
        reader = ThoughtReader(Thought(form))
        for start in range(0, len(text), size):
            reader.feed(text[start : start + size])
        reader.finish()
        ((start, end),) = reader.spans
        assert text[start:end] == "I <think"
        assert text[reader.answer_start :] == f"Yes {form.closing}"


def test_the_end_of_a_form_is_no_stop_of_the_request() -> None:
    bench = ThinkingBench(f"{RESPONSE}Yes<|END_RESPONSE|>".encode(), COHERE, context=99)
    (choice,) = bench.choices()
    assert choice["finish_reason"] == "stop" and "stop_reason" not in choice
    (choice,) = bench.choices(stop="es")
    assert choice["message"]["content"] == "Y" and choice["stop_reason"] == "es"


@pytest.mark.parametrize(
    ("template", "script", "stop", "content"),
    [
        (TEMPLATE, b"<th\0", "<", ""),
        (TEMPLATE, b"\n\n\0", "\n", ""),
        (OPENING, b"a</think>\n<th\0", "th", "<"),
    ],
)
def test_a_stop_is_sought_in_what_is_no_tag_after_all(
    template: str, script: bytes, stop: str, content: str
) -> None:
    for max_tokens in (len(script) - 1, 60):
        fields = {"stop": stop, "max_tokens": max_tokens, "logprobs": True}
        bench = ThinkingBench(script, template)
        (choice,) = bench.choices(**fields)
        assert choice["message"]["content"] == content
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        bench.stream_events(**fields)


@pytest.mark.parametrize(
    ("begun", "answer", "stop", "min_tokens"),
    [
        ("", "\n\n\n\n\n\n", "\n", 2),
        ("", "<thab<cd", "<", 2),
        ("a</think>\n", "<thab<cd", "<", 1),
        ("a</think>\n", "<thab<cd", "<", 3),
        ("a</think>\n", "<thab<cd", "<", 5),
        ("a</think>\n", "<thab<cd", "b<c", 6),
    ],
)
def test_min_tokens_count_in_what_is_no_tag_after_all(
    begun: str, answer: str, stop: str, min_tokens: int
) -> None:
    """As in an answer that has no thought."""
    fields = {"stop": stop, "min_tokens": min_tokens, "logprobs": True}
    (expected,) = ThinkingBench(f"{answer}\0".encode(), ">").choices(**fields)
    template = OPENING if begun else TEMPLATE
    bench = ThinkingBench(f"{begun}{answer}\0".encode(), template)
    (choice,) = bench.choices(**fields)
    assert choice["message"]["content"] == expected["message"]["content"]
    assert choice.get("stop_reason") == expected.get("stop_reason")
    bench.stream_events(**fields)


def test_a_thoughts_tokens_are_counted_without_the_answers_beginning() -> None:
    bench = ThinkingBench(b"a</think>\n<thabcd\0", OPENING)
    details = bench.usage()["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("a</think>\n")}
    labels = {"structured_outputs": {"choice": ["yes", "no"], "probabilities": True}}
    usage = bench.usage(**labels)
    assert usage["completion_tokens_details"] == details
    assert usage["completion_tokens"] == 10 + len("no")


def test_a_stream_lists_no_tokens_that_a_stop_may_drop() -> None:
    bench = ThinkingBench(b"\n\nYes\0")
    bench.stream_events(stop="\n", logprobs=True)
    bench.stream_events(stop="Y", logprobs=True)


def test_what_is_asked_begins_behind_the_thought() -> None:
    bench = ThinkingBench(b"yes, stop</think>\n\nyes, stop\0", OPENING)
    assert bench.message(stop="stop") == ("yes, stop", "yes, ", "stop")
    assert bench.message(stop=["yes", "p</t"]) == ("yes, stop", "", "stop")
    bench.stream_events(stop="stop")
    assert bench.message(stop="yes", min_tokens=4)[1] == "yes, stop"
    assert bench.message(stop="stop", min_tokens=4)[1] == "yes, "
    assert bench.message(max_tokens=9) == ("yes, stop", None, "length")
    assert bench.message(max_tokens=19) == ("yes, stop", "", "length")
    assert bench.message(include_reasoning=False) == (None, "yes, stop", "stop")
    bench.stream_events(include_reasoning=False)
    (choice,) = bench.choices(logprobs=True)
    assert len(choice["logprobs"]["content"]) == 28, "all tokens but EOS"
    assert choice["logprobs"]["content"][0]["token"] == "y"


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        (b"{}</think>\n{...}\0", JSON, ("{}", "{", None)),
        (b"a</think>\n\n\n\n\n\nyes\0", CHOICE, ("a", "yes", "stop")),
        (b"a</think>\n\nyes, so\0", CHOICE, ("a", "yes", "stop")),
        (b"a</think>maybe\0", CHOICE, ("a", "yes", "stop")),
        (b"a\0", CHOICE, ("a", None, "stop")),
        (b"a</think>\n yes\0", {"guided_regex": " ?yes"}, ("a", None, "stop")),
        (b"a</think> yes\0", {"guided_regex": "\n? yes"}, ("a", None, "stop")),
    ],
)
def test_a_constraint_begins_behind_the_thought(
    script: bytes, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    bench = ThinkingBench(script, OPENING, context=60)
    reasoning, content, reason = bench.message(max_tokens=40, **fields)
    assert reasoning == expected[0]
    if fields is JSON:
        assert content.startswith("{"), content
    elif "guided_regex" in fields:
        assert content in (" yes", "yes")
    else:
        assert (content, reason) == expected[1:]
    bench.stream_events(max_tokens=40, **fields)


@pytest.mark.parametrize("script", [b"\xc3 ", b"\xc3<", b"\xc3\n<", b"\xc3\xa9"])
@pytest.mark.parametrize("begun", [b"", b"a</think>", b"a</think>\n"])
def test_a_begun_character_goes_on(begun: bytes, script: bytes) -> None:
    """White space or a tag in the middle of one ended the whole run."""
    fields = {"structured_outputs": {"choice": ["é", "ß"]}}
    template = OPENING if begun else TEMPLATE
    bench = ThinkingBench(begun + script + b"\0", template)
    assert bench.message(**fields)[1:] in (("é", "stop"), ("ß", "stop"))
    bench.stream_events(**fields)


def test_a_model_that_opens_its_thought_may_do_so_under_a_constraint() -> None:
    bench = ThinkingBench(b"<think>a</think>yes!\0")
    assert bench.message(**CHOICE) == ("a", "yes", "stop")
    assert ThinkingBench(b"yes!\0").message(**CHOICE) == (None, "yes", "stop")
    assert ThinkingBench(b"maybe\0").message(**CHOICE)[1] in ("yes", "no")
    grammar = {"guided_regex": "<b>a"}  # begins as the tag does
    assert ThinkingBench(b"<b>a\0").message(**grammar) == (None, "<b>a", "stop")
    assert ThinkingBench(b"<think>c</think><b>a\0").message(**grammar)[:2] == (
        "c",
        "<b>a",
    )


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_budget_forces_the_closing_tag(with_logprobs: bool) -> None:
    fields = {"logprobs": with_logprobs}
    bench = ThinkingBench(b"aaaaaaaaaaaaaaaaaaaaaa\0", OPENING)
    (choice,) = bench.choices(thinking_token_budget=3, **fields)
    assert choice["reasoning_truncated"] is True
    message = choice["message"]
    assert message["reasoning_content"] == "aaa"
    assert message["content"] == "aaaaaaaaa", "behind 3 + 8 + 2 tokens"
    details = bench.usage(thinking_token_budget=3, **fields)[
        "completion_tokens_details"
    ]
    assert details == {"reasoning_tokens": 13}
    bench.stream_events(thinking_token_budget=3, **fields)
    (choice,) = bench.choices(thinking_token_budget=0, **fields)
    assert choice["message"]["reasoning_content"] is None
    assert choice["message"]["content"] == 12 * "a"
    (choice,) = bench.choices(thinking_token_budget=-1, **fields)
    assert "reasoning_truncated" not in choice
    assert choice["message"]["content"] is None
    whole = ThinkingBench(b"aaa</think>b\0", OPENING)
    (choice,) = whole.choices(thinking_token_budget=3, **fields)
    assert choice["reasoning_truncated"], "its tag was begun one token too late"
    (choice,) = whole.choices(thinking_token_budget=11, **fields)
    assert "reasoning_truncated" not in choice


@pytest.mark.parametrize("fields", [CHOICE, CHOICE | {"logprobs": True}])
def test_a_thought_with_a_budget_does_not_end_a_constrained_answer(
    fields: dict[str, Any],
) -> None:
    """SmolLM2 ended each of 300 thoughts by EOS before its budget: no label was left."""
    bench = ThinkingBench(b"a\0b</think>yes\0", OPENING)
    assert bench.message(**fields) == ("a", None, "stop")
    budgeted = fields | {"thinking_token_budget": 14}
    assert bench.message(**budgeted) == ("a~b", "yes", "stop")
    bench.stream_events(**budgeted)
    assert bench.message(thinking_token_budget=-1, **fields)[1] is None
    stopped = budgeted | {"stop_token_ids": [ord("b")]}
    assert bench.message(**stopped) == ("a~", None, "stop")
    assert bench.message(thinking_token_budget=14) == ("a", None, "stop")


def test_the_budget_of_a_run_and_its_limits() -> None:
    bench = ThinkingBench(b"aaaaaaaaaaaaaaaaaaaa\0", OPENING, thinking_budget=2)
    assert bench.message()[0] == "aa"
    assert bench.message(thinking_token_budget=4)[0] == "aaaa"
    assert bench.message(thinking_token_budget=-1)[1] is None
    assert bench.message(max_tokens=12) == ("aa", "", "length")
    error = bench.error(max_tokens=11)
    assert (
        error.param == "thinking_token_budget" and "raise max_tokens" in error.message
    )
    opens = ThinkingBench(b"<think>aaaaaaaaa\0")
    assert opens.error(max_tokens=18, thinking_token_budget=2).code == "out_of_range"
    assert opens.message(max_tokens=19, thinking_token_budget=2)[0] == "aa"
    silent = ThinkingBench(b"a\0", ">")
    assert "--reasoning-parser" in silent.error(thinking_token_budget=2).message
    assert silent.message(thinking_token_budget=-1)[1] == "a"
    assert silent.error(thinking_token_budget=-2).param == "thinking_token_budget"


def test_labels_begin_behind_the_thought() -> None:
    fields = {"structured_outputs": {"choice": ["yes", "no"], "probabilities": True}}
    for script in (b"so</think>\n\nMaybe\0", b"so</think>\n\n\0"):
        bench = ThinkingBench(script, OPENING)
        for more in ({}, {"n": 3, "temperature": 0}, {"logprobs": True}):
            choices = bench.choices(**fields, **more)
            for choice in choices:
                message = choice["message"]
                assert message["reasoning_content"] == "so"
                assert message["content"] in ("yes", "no")
                assert set(choice["label_probabilities"]) == {"yes", "no"}
        bench.stream_events(**fields)
        assert bench.usage(**fields)["completion_tokens_details"] == {
            "reasoning_tokens": 12
        }
    budget = ThinkingBench(b"aaaaaaaaaaaaaaa\0", OPENING)
    (choice,) = budget.choices(thinking_token_budget=2, **fields)
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["reasoning_truncated"]
    (choice,) = budget.choices(max_tokens=9, **fields)
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    opens = ThinkingBench(b"<think>a</think>yes\0")
    assert opens.message(**fields)[0] == "a"
    assert ThinkingBench(b"yes\0").message(**fields)[0] is None


@pytest.mark.parametrize("begun", [b"", b"a</think>", b"a</think>\n"])
def test_labels_that_begin_as_tags_follow_nothing(begun: bytes) -> None:
    """What looked like a tag stayed before the label, whose probability was another's."""
    labels = {"choice": ["<a>", "<b>"], "probabilities": True}
    fields = {"structured_outputs": labels, "logprobs": True, "return_token_ids": True}
    template = OPENING if begun else TEMPLATE
    (expected,) = ThinkingBench(begun + b"a>\0", template).choices(**fields)
    for script in (b"<a>\0", b"<th>\0", b"<\0"):
        bench = ThinkingBench(begun + script, template)
        (choice,) = bench.choices(**fields)
        assert choice["token_ids"] == expected["token_ids"]
        assert choice["label_mass"] == expected["label_mass"]
        bench.stream_events(**fields)


def test_a_label_follows_no_piece_of_a_header() -> None:
    labels = {"structured_outputs": {"choice": ["yes", "no"], "probabilities": True}}
    thought = f"{LATER[18:]}a<|end|>"
    script = f"{thought}<|start|>assistant<|channel|>final X"
    bench = ThinkingBench(script.encode(), HARMONY, context=200)
    (choice,) = bench.choices(return_token_ids=True, **labels)
    assert bytes(choice["token_ids"]).decode() == f"{thought}no"


def test_max_tokens_that_suffice_give_a_label() -> None:
    """The label's tokens are kept for it, whatever comes before."""
    fields = {"structured_outputs": {"choice": ["yes", "no"], "probabilities": True}}
    for more in ({}, {"logprobs": True}):
        tagged = ThinkingBench(b"so</think>\n\nyes\0", OPENING)
        for size in (13, 14, 15, 16):
            assert tagged.message(max_tokens=size, **more, **fields) == (
                "so",
                "no",
                "stop",
            )
        forced = ThinkingBench(b"aaaaaaaaaaaaaaaa\0", OPENING)
        budgeted = {"thinking_token_budget": 2, "max_tokens": 2 + 10 + 3}
        assert forced.message(**budgeted, **more, **fields) == ("aa", "no", "stop")
        assert forced.usage(**budgeted, **more, **fields)["completion_tokens"] == 14
        opens = ThinkingBench(b"<think>aaaaaaaaaa\0")
        for size in (3, 9):
            assert opens.message(max_tokens=size, **more, **fields)[1] == "no"


def test_open_thoughts_are_counted() -> None:
    bench = ThinkingBench(b"aa\0", OPENING)
    bench.message()
    bench.message(max_tokens=2)
    bench.message(max_tokens=1)
    stats = bench.loop.stats
    assert (stats.num_open_thoughts, stats.num_ended_thoughts) == (2, 1)
    assert stats.num_truncated_thoughts == 0
    bench.message(thinking_token_budget=0)
    assert bench.loop.stats.num_truncated_thoughts == 1


def test_a_stream_that_begins_anew_repeats_no_thought() -> None:
    """Another pipeline may put pieces together that were sent apart."""
    events = ThinkingBench(b"So it is.</think>Yes\0", OPENING).stream_events()
    deltas = [each for each in events if isinstance(each, Delta)]
    for cut in range(1, len(deltas)):
        heard = StreamPosition()
        sent = [heard.cut_repeated(delta) for delta in deltas[:cut]]
        heard.begin_anew()
        first, second, *others = deltas
        joined = replace(
            second,
            reasoning=first.reasoning + second.reasoning,
            token_ids=first.token_ids + second.token_ids,
        )
        sent += [heard.cut_repeated(delta) for delta in (joined, *others)]
        check_stream([*(each for each in sent if each is not None), events[-1]], 0)


def test_a_parser_by_name() -> None:
    text = b"[THINK]a[/THINK]b\0"
    assert ThinkingBench(text, ">").message()[1] == "[THINK]a[/THINK]b"
    named = ThinkingBench(text, ">", reasoning_parser="mistral")
    assert named.message() == ("a", "b", "stop")
    none = ThinkingBench(b"<think>a</think>b\0", reasoning_parser="none")
    assert none.message()[1] == "<think>a</think>b"
    assert "reasoning_content" not in none.choices()[0]["message"]
    assert find_thoughts("{{ messages }}") is None


def test_calls_behind_a_thought() -> None:
    call = json.dumps({"name": "look", "arguments": {"at": "<think>"}})
    text = f"a <tool_call>{call}</tool_call></think>\n<tool_call>{call}</tool_call>\0"
    bench = ThinkingBench(text.encode(), OPENING + "{# tools <tool_call> #}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    (choice,) = bench.choices(tools=tools)
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["reasoning_content"].startswith("a <tool_call>")


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_a_past_thought_has_the_name_that_the_template_reads(
    sent: str, read: str
) -> None:
    template = f">{{% for m in messages %}}{{{{ m.{read} or '' }}}}{{{{ m.content }}}}"
    template += "{% endfor %}"
    past = {"role": "assistant", "content": "Yes", sent: "I think"}
    messages = [past, {"role": "user", "content": "?"}]
    bench = ThinkingBench(b"a\0", template)
    request = bench.intake.parse({"messages": messages, "max_tokens": 1})
    assert request.prompts == [">I thinkYes?"]
    assert not any("do not read" in str(each) for each in request.warnings)


def test_a_past_thought_is_text() -> None:
    bench = ThinkingBench(b"a\0", ">")
    past = {"role": "assistant", "content": "Yes", "reasoning": ["I think"]}
    error = bench.error(messages=[past, {"role": "user", "content": "?"}])
    assert error.code == "invalid_type" and error.param == "messages[0].reasoning"


def test_words_are_a_tag_where_the_prompt_has_them() -> None:
    """Under a constraint, a model that began with "Here" was led into a thought."""
    opening = "Here is my thought process:"
    text = f"{opening} a\nHere is my response: yes\0".encode()
    named = ThinkingBench(text, f"> {opening} >", reasoning_parser="granite")
    assert named.message()[:2] == (" a\n", "yes")
    silent = ThinkingBench(text, ">{# Here is my response: #}")
    assert silent.message()[0] is None
    assert silent.message(**CHOICE)[:2] == (None, "yes")


@pytest.mark.parametrize(
    "fields", [{}, CHOICE, {"thinking_token_budget": 5}, {"n": 2, "logprobs": True}]
)
def test_a_preempted_thought_goes_on_where_it_was(fields: dict[str, Any]) -> None:
    script = b"I think</think>\n\nyes\0"
    chat = {"messages": HELLO, "temperature": 0, "max_tokens": 40} | fields
    expected = ThinkingBench(script, OPENING).choices(**chat)
    bench = ThinkingBench(script, OPENING)
    first = [bench.add(**chat) for _ in range(8)]
    events = [event for _ in range(6) for event in bench.loop.step()]
    urgent = [bench.add(priority=9, **chat) for _ in range(3)]
    events += events_of(bench.loop)
    assert bench.loop.stats.num_put_back, "no row was preempted"
    for request_id in (*first, *urgent):
        assert answer_in(events, request_id) == expected


def test_an_end_of_turn_is_no_channel() -> None:
    """Phi's templates end turns with the tag that ends a thought of gpt-oss."""
    assert find_thoughts("{{ message.content }}<|end|>{# an analysis #}") is None
    assert find_thoughts("<|channel|>analysis<|message|>") == "openai_gptoss"
