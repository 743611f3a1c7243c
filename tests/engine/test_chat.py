"""Chat answers over a scripted model: messages, tool calls, logprobs, lengths, streams."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import transformers

from fminfer.answers import line_counter
from fminfer.contract.envelope import Line
from fminfer.contract.prompts import MAX_ENTRIES
from fminfer.contract.record import Record
from fminfer.core.config import EngineConfig, KnownParser
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Delta, Event, Finished
from fminfer.engine.intake import Intake
from fminfer.engine.prompt_fit import KvSize, RequestLimits
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.runtime.lines.line_intake import FILLS, LineIntake, LineRequest
from fminfer.runtime.team.team_process import StreamPosition
from fminfer.text.tokenizer import Tokenizer
from tests.engine.test_contract import Bench
from tests.line_bench import over_lines, with_options
from tests.streams import check_stream, events_of, of_request
from tests.text.call_writers import write_calls

# Renders as ">", behind which the script begins; a message named more makes it longer.
TEMPLATE = (
    "{{ '>' }}{% for m in messages %}{{ m.name or '' }}{% endfor %}{# tools "
    "<tool_call> #}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "map"}}\n</tool_call>'


class ChatBench(Bench):
    """A scripted engine with a chat template."""

    def __init__(self, script: bytes, context: int = 200, **limits: Any) -> None:
        super().__init__(script, context=context, num_blocks=400)
        limits = {"chat_template": TEMPLATE} | limits
        self.intake = Intake(self.tokenizer, with_options(self.intake.limits, **limits))

    @property
    def warnings(self) -> list[str]:
        """What was warned of, beside what each line is that has no max_tokens and this
        template."""
        always = str(FILLS), "the chat template writes no text of the messages"
        return [text for text in self.intake.warnings.to_dict() if text not in always]

    def choices(self, **fields: Any) -> list[dict[str, Any]]:
        (record,) = self.run({"messages": HELLO, "temperature": 0} | fields)
        assert record.error is None, record.error
        assert record.result is not None
        found: list[dict[str, Any]] = record.result["choices"]
        return found

    def error(self, **fields: Any) -> RequestError:
        (record,) = self.run({"messages": HELLO, "temperature": 0} | fields)
        assert record.error is not None
        return record.error

    def stream(self, **fields: Any) -> list[Event]:
        asked = {"messages": HELLO, "temperature": 0, "return_token_ids": True} | fields
        request_id = self.add(is_streamed=True, **asked)
        events = events_of(self.loop)
        check_stream(events, request_id)
        return events


def test_a_choice_is_a_message() -> None:
    assert ChatBench(b"Hi there\0").choices() == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    first, second = ChatBench(b"Hi, stop").choices(n=2, stop="st", max_tokens=8)
    assert first["stop_reason"] == "st" and first["message"]["content"] == "Hi, "
    assert second == first | {"index": 1}


def test_logprobs_are_entries_of_text() -> None:
    (choice,) = ChatBench(b"a\xe2\0").choices(logprobs=True, top_logprobs=2)
    first, second = choice["logprobs"]["content"]  # EOS is not listed
    assert first["token"] == "a" and first["bytes"] == [97] and first["logprob"] == -1.5
    assert [each["logprob"] for each in first["top_logprobs"]] == [-0.125, -0.25], (
        "best first"
    )
    assert [each["bytes"] for each in first["top_logprobs"]] == [[200], [201]]
    assert set(first["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    assert second["token"] == "bytes:\\xe2" and second["bytes"] == [0xE2]
    (choice,) = ChatBench(b"a\0").choices(logprobs=True)
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert choice["logprobs"]["refusal"] is None


def test_tool_calls_are_read_out_of_the_text() -> None:
    (choice,) = ChatBench(CALL + b"\0").choices(tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert (
        choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    )
    assert call["type"] == "function" and call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"at": "map"}
    (choice,) = ChatBench(b"I look." + CALL + CALL + b"\0").choices(tools=TOOLS)
    assert choice["message"]["content"] == "I look."
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    again = ChatBench(b"I look." + CALL + CALL + b"\0").choices(tools=TOOLS)
    assert again == [choice], "ids are the same in a run that is repeated"


@pytest.mark.parametrize("form", get_args(KnownParser))
def test_calls_of_every_form_are_read(form: KnownParser) -> None:
    """Answers, streams and equal requests; the types of XML come from the tools."""
    arguments = {"at": "5", "n": 5}
    properties = {"at": {"type": "string"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    script = write_calls(form, [("look", arguments)]).encode() + b"\0"
    (choice,) = ChatBench(script, 400, tool_call_parser=form).choices(tools=tools)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == arguments
    ChatBench(script, 400, tool_call_parser=form).stream(tools=tools)


def test_a_wish_for_one_call_changes_no_draw() -> None:
    """It is granted after drawing; the ids of calls stay as well."""
    intake = ChatBench(CALL).intake
    asked = {"messages": HELLO, "tools": TOOLS}
    plain, one = (
        intake.prepare(intake.parse(asked | {"parallel_tool_calls": each}))
        for each in (True, False)
    )
    assert plain.meaning and replace(one, keeps_one_call=False) == plain != one


def test_calls_stay_text_without_tools_or_a_parser() -> None:
    text = CALL.decode()
    for limits, fields in (
        ({}, {}),
        ({}, {"tools": TOOLS, "tool_choice": "none"}),
        ({"tool_call_parser": "none"}, {"tools": TOOLS}),
        ({"tool_call_parser": "llama3_json"}, {"tools": TOOLS}),
    ):
        bench = ChatBench(CALL + b"\0", **limits)
        (choice,) = bench.choices(**fields)
        assert (
            choice["message"]["content"] == text and choice["finish_reason"] == "stop"
        )
        assert not bench.warnings
    bench = ChatBench(CALL + b"\0", chat_template=">{# tools #}")
    (choice,) = bench.choices(tools=TOOLS)
    (warning,) = bench.warnings
    assert choice["message"]["content"] == text and "--tool-call-parser" in warning
    assert "does not write tools" in str(
        ChatBench(
            b"a\0", chat_template=">", strict=True, tool_call_parser="hermes"
        ).error(tools=TOOLS)
    )


def test_a_call_that_is_cut_off_is_content() -> None:
    (choice,) = ChatBench(CALL).choices(tools=TOOLS, max_tokens=20)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20].decode()
    (choice,) = ChatBench(CALL + b"<tool").choices(
        tools=TOOLS, max_tokens=len(CALL) + 5
    )
    assert (
        choice["finish_reason"] == "length"
        and len(choice["message"]["tool_calls"]) == 1
    )


@pytest.mark.parametrize(
    "behind", [CALL, b"And: " + CALL, CALL[:-30], b"Done.", b"<tool_", b""]
)
def test_one_call_is_kept_if_no_more_are_wanted(behind: bytes) -> None:
    """`parallel_tool_calls: false` was refused, and LlamaIndex sends it with all tools."""
    one: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    script = b"I look.\n" + CALL + b"\n" + behind + b"\0"
    (first,) = ChatBench(b"I look.\n" + CALL + b"\0").choices(tools=TOOLS)
    assert ChatBench(script).choices(**one) == [first]
    assert [
        len(each["message"]["tool_calls"])
        for each in ChatBench(script).choices(**one, n=2)
    ] == [1, 1]
    deltas = [
        each for each in ChatBench(script).stream(**one) if isinstance(each, Delta)
    ]
    assert "".join(each.text for each in deltas) == "I look."
    assert sum(len(each.tool_calls) for each in deltas) == 1
    assert deltas[-1].finish_reason == "tool_calls"
    llama3 = b'{"name": "look", "parameters": {"at": "map"}}'
    (choice,) = ChatBench(
        llama3 + b"; " + llama3 + behind + b"\0", tool_call_parser="llama3_json"
    ).choices(**one)
    assert (
        len(choice["message"]["tool_calls"]) == 1
        and choice["message"]["content"] is None
    )


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "none"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"parallel_tool_calls": False},
        {"logprobs": True, "top_logprobs": 1},
    ],
)
def test_joined_deltas_are_the_answer(parser: str, fields: dict[str, Any]) -> None:
    llama3 = b'{"name": "look", "parameters": {"at": "map"}}'
    odd = "Grüße 🙂 <tool".encode()
    for script in (
        b"Hi",
        b"\0",
        CALL,
        odd + CALL * 2 + b" and",
        llama3 + b";" + llama3,
        odd,
    ):
        for more in ({}, {"stop": ["map"]}, {"max_tokens": 30}):
            bench = ChatBench(script + b"\0", tool_call_parser=parser)
            bench.stream(tools=TOOLS, **fields, **more)


def test_random_texts_stream_as_they_are_answered() -> None:
    source = random.Random(5)
    pieces = [
        b"<tool_call>",
        b"</tool_call>",
        b'{"name": "f"',
        b', "arguments": {}}',
        b" ",
        b"<",
    ]
    for _ in range(60):
        script = (
            b"".join(source.choices([*pieces, CALL, b"text", "é".encode()], k=6))
            + b"\0"
        )
        for parallel in (True, False):
            asked = {"tools": TOOLS, "logprobs": True, "stop": ["xt"]}
            ChatBench(script).stream(parallel_tool_calls=parallel, **asked)


def test_content_comes_early_and_calls_whole() -> None:
    events = ChatBench(b"Look: " + CALL + b"\0").stream(tools=TOOLS)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert deltas[0].text == "L" and len(deltas) >= 6
    assert sum(len(delta.tool_calls) for delta in deltas) == 1
    assert not any("tool_call>" in delta.text for delta in deltas)
    assert all(
        delta.text or delta.tool_calls or delta.finish_reason for delta in deltas
    )
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_stream_that_begins_anew_repeats_no_call() -> None:
    """Another pipeline goes on with the requests of one that died."""
    asked = {"tools": TOOLS, "logprobs": True}
    events = ChatBench(b"ab" + CALL + CALL + b"\0").stream(**asked)
    deltas = [event for event in events if isinstance(event, Delta)]
    for cut in range(len(deltas)):
        heard = StreamPosition()
        sent = [heard.cut_repeated(delta) for delta in deltas[:cut]]
        heard.begin_anew()
        sent += [heard.cut_repeated(delta) for delta in deltas]
        check_stream([*(each for each in sent if each is not None), events[-1]], 0)


def test_max_tokens_fills_the_context() -> None:
    bench = ChatBench(b"a" * 300, context=50)
    (record,) = bench.run({"messages": HELLO})
    assert record.result is not None
    assert record.result["usage"]["completion_tokens"] == 49
    assert record.result["choices"][0]["finish_reason"] == "length"
    bench = ChatBench(b"a" * 300, context=50, max_new_tokens=7)
    assert len(bench.choices()[0]["message"]["content"]) == 7
    long = [{"role": "user", "content": "x", "name": "y" * 46}]
    assert len(bench.choices(messages=long)[0]["message"]["content"]) == 3


def test_a_default_makes_no_request_impossible() -> None:
    """The KV cache may be smaller than the context, and logprobs have a joint limit."""
    for num_blocks in range(3, 9):
        for n in (1, 2):
            bench = ChatBench(b"a" * 300, kv_size=KvSize(num_blocks, 4))
            small = Bench(num_blocks=num_blocks)
            prepared = bench.intake.prepare(
                bench.intake.parse({"messages": HELLO, "n": n, "seed": 1})
            )
            small.loop.make_request_state(prepared)
            wider = replace(prepared.params, max_tokens=prepared.params.max_tokens + 1)
            with pytest.raises(RequestError, match="KV cache"):
                small.loop.make_request_state(replace(prepared, params=wider))
    bench = ChatBench(b"a", context=10**6)
    fields = {
        "messages": HELLO,
        "n": 128,
        "logprobs": True,
        "top_logprobs": 9,
        "seed": 1,
    }
    prepared = bench.intake.prepare(bench.intake.parse(fields))
    assert prepared.params.max_tokens == MAX_ENTRIES // 1280


def test_too_long() -> None:
    long = [{"role": "user", "content": "x", "name": "y" * 60}]
    error = ChatBench(b"a", context=50).error(messages=long)
    assert error.code == "context_length_exceeded"
    assert "61 tokens" in error.message
    assert "maximum context length is 50 tokens" in error.message
    error = ChatBench(b"a", context=50).error(max_tokens=50)
    assert "max_tokens is 50, 51 in all" in error.message
    assert (
        "min_tokens is 50" in ChatBench(b"a", context=50).error(min_tokens=50).message
    )
    bench = ChatBench(b"a" * 100, context=50, on_too_long="truncate-left")
    (record,) = bench.run({"messages": long, "temperature": 0})
    assert record.result is not None
    assert (
        record.result["usage"]["prompt_tokens_details"]["truncated_tokens"] == 61 - 34
    )
    fields = {"messages": long, "temperature": 0, "truncate_prompt_tokens": -1}
    (wished,) = ChatBench(b"a" * 100, context=50).run(fields)
    assert (
        wished.result is not None and wished.result["usage"] == record.result["usage"]
    )
    assert record.result["usage"]["completion_tokens"] == 16


def test_a_giant_chat_is_refused_without_tokenizing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = ChatBench(b"a")
    monkeypatch.setattr(bench.tokenizer, "encode", None)
    error = bench.error(
        messages=[{"role": "user", "content": "x", "name": "y" * 100_000}]
    )
    assert "at least 100,001" in error.message


def test_equal_lines_share_an_answer_only_in_one_form() -> None:
    """A completion of the rendered text, and a chat with and without tools, differ in form."""
    chat = {"messages": HELLO, "temperature": 0, "max_tokens": 160}
    plain = {
        "prompt": ">",
        "add_special_tokens": False,
        "temperature": 0,
        "max_tokens": 160,
    }
    bench = ChatBench(CALL + CALL + b"\0", context=300)
    runner = over_lines(bench.loop, bench.intake, joins_equal=True)
    tools = chat | {"tools": TOOLS}
    asked = [chat, plain, tools, tools | {"parallel_tool_calls": False}] * 2
    lines = [Line(0, i, json.dumps(each).encode()) for i, each in enumerate(asked, 1)]
    records = sorted(runner.run(lines), key=lambda record: record.line.number)
    results = [
        record.result["choices"] for record in records if record.result is not None
    ]
    assert results[:4] == results[4:] and bench.loop.stats.num_copied_requests == 4
    assert (
        results[0][0]["message"]["content"]
        == results[1][0]["text"]
        == CALL.decode() * 2
    )
    assert [len(each[0]["message"]["tool_calls"]) for each in results[2:4]] == [2, 1]


def test_the_endpoint_may_be_told() -> None:
    intake = ChatBench(b"a").intake
    with pytest.raises(RequestError, match="/v1/chat/completions"):
        intake.parse({"messages": HELLO}, endpoint="completions")
    with pytest.raises(RequestError, match="messages is absent"):
        intake.parse({"prompt": "x"}, endpoint="chat")
    assert intake.parse({"messages": HELLO}).endpoint == "chat"


def test_what_a_template_does_not_look_at_is_told() -> None:
    bench = ChatBench(b"a\0")
    bench.choices(reasoning_effort="low")
    assert bench.warnings == [
        "the chat template does not read these variables, which have no effect: reasoning_effort"
    ]
    aware = ChatBench(b"a\0", chat_template=">{{ reasoning_effort[:0] }}")
    aware.choices(reasoning_effort="low")
    assert not aware.warnings


def test_variables_and_keys_that_a_template_does_not_read_are_told() -> None:
    """A misspelled chat_template_kwargs was dropped, under --strict too."""
    template = (
        ">{% if thinks is defined %}{% endif %}{% for m in messages %}{{ m.hint "
        "}}{% endfor %}"
    )
    parts = [{"type": "text", "text": "", "cache": 1}]
    messages = [{"role": "user", "content": parts, "hint": "", "name": "Ann"}]
    asked = {
        "messages": messages,
        "chat_template_kwargs": {"thinsk": 1, "thinks": 0, "no": None},
    }
    bench = ChatBench(b"a\0", chat_template=template)
    bench.choices(**asked)
    assert bench.warnings == [
        "the chat template does not read these variables, which have no effect: thinsk (did you "
        "mean thinks?)",
        (
            "the chat template does not read these keys of messages, which have no "
            "effect: cache, name"
        ),
    ]
    error = ChatBench(b"a\0", chat_template=template, strict=True).error(**asked)
    assert error.code == "unsupported_parameter" and "thinsk" in error.message


JSON = {"response_format": {"type": "json_object"}}
FINAL = {"continue_final_message": True, "add_generation_prompt": False}


def continuing(content: Any, **more: Any) -> dict[str, Any]:
    return (
        {"messages": [*HELLO, {"role": "assistant", "content": content}]} | FINAL | more
    )


@pytest.mark.parametrize(
    ("template", "fields", "kinds"),
    [
        ("{{ messages }}<think>\n", JSON, ["thought"]),
        ("{{ messages }}[THINK]", JSON, ["thought"]),
        ("<|channel|>analysis<|message|>", {"guided_choice": ["a"]}, ["thought"]),
        ("{{ messages }}<think>\n\n</think>\n\n", JSON, []),
        ("{{ messages }}<think>\n", {}, []),
        ("What is <think>? {{ messages }}", JSON, []),
        (
            "{{ messages[-1].content }}",
            continuing("<think>\nLet me", **JSON),
            ["thought"],
        ),
        ("{{ messages[-1].content }}", continuing("<think>So.</think>", **JSON), []),
        (
            "{{ messages[-1].content }}",
            continuing('{"v": ', **JSON),
            ["continue_final_message"],
        ),
        (
            "{{ messages[-1].content }}",
            continuing("```json\n[1,", **JSON),
            ["continue_final"],
        ),
        ("{{ messages[-1].content }}", continuing("Here it is: ", **JSON), []),
        (
            "{{ messages[-1].content[0].text }}",
            continuing([{"type": "text", "text": "[1, "}], **JSON),
            ["continue_final_message"],
        ),
        ("{{ messages[-1].content }}", continuing('{"v": '), []),
    ],
)
def test_constraints_that_begin_inside_of_something(
    template: str, fields: dict[str, Any], kinds: list[str]
) -> None:
    """JSON stood inside a thought, or a second object behind the begun one, without a word."""
    bench = ChatBench(b"{}", chat_template=template, reasoning_parser="none")
    bench.intake.report_warnings(
        *bench.intake.parse({"messages": HELLO, "max_tokens": 9} | fields).warnings
    )
    told = [text for text in bench.warnings if "constraint" in text]
    assert len(told) == len(kinds) and all(
        k in t for k, t in zip(kinds, told, strict=True)
    )


def test_a_completion_that_begins_inside_a_thought() -> None:
    bench = ChatBench(b"{}")
    request = bench.intake.parse({"prompt": "<think>\n", "max_tokens": 9} | JSON)
    assert any("open thought" in str(warning) for warning in request.warnings)


def test_equal_chats_are_equal_while_the_clock_goes_on() -> None:
    """Of two equal lines, the second counted as another one if a second began between them."""
    clock = iter(range(100))
    template = ">{{ strftime_now('%S') }}"
    bench = ChatBench(b"a\0", chat_template=template)
    with pytest.MonkeyPatch.context() as patch:
        times = (f"2026-01-01T00:00:{n:02}+00:00" for n in clock)
        patch.setattr(line_counter, "read_clock", lambda: next(times))
        lines = [Line(0, n, json.dumps({"messages": HELLO}).encode()) for n in (1, 2)]
        intake = LineIntake(bench.intake)
        first, second = (intake.open(line) for line in lines)
    assert isinstance(first, LineRequest) and isinstance(second, LineRequest)
    assert [each.prepared.repeat for each in (first, second)] == [0, 1]


def test_half_a_surrogate_pair_and_an_empty_prompt_cost_their_line_only() -> None:
    lines = [
        {"messages": [{"role": "user", "content": "x", "name": "\ud800"}]},
        {"messages": HELLO, "temperature": 0},
    ]
    wrong, right = ChatBench(b"a\0").run(*lines)
    assert wrong.error is not None and wrong.error.code == "invalid_utf8"
    assert wrong.error.param == "messages" and right.error is None
    assert ChatBench(b"a", chat_template="{{ '' }}").error().code == "missing_prompt"


def test_a_deep_value_costs_its_line_only() -> None:
    """Chats of several lines are rendered together: one that JSON cannot nest ended the run."""
    deep = b"[" * 1000 + b"]" * 1000
    chat = json.dumps({"messages": HELLO}).encode()
    wrong = chat[:-1] + b', "chat_template_kwargs": {"x": ' + deep + b"}}"
    intake = LineIntake(ChatBench(b"a\0").intake)
    lines = [Line(0, number, raw) for number, raw in enumerate((chat, wrong, chat), 1)]
    first, second, third = intake.open_all(lines)
    assert isinstance(first, LineRequest) and isinstance(third, LineRequest)
    assert isinstance(second, Record) and second.error is not None
    assert second.error.code == "unsupported_parameter"


def test_unseeded_chats_are_counted() -> None:
    """Ten equal lines give ten draws, whatever form they have."""
    bench = ChatBench(b"abcdefgh" * 4)
    asked = {"messages": HELLO, "max_tokens": 4}
    keys = []
    for repeat in range(3):
        request = bench.intake.parse(asked)
        state = bench.loop.make_request_state(
            bench.intake.prepare(request, repeat=repeat)
        )
        keys.append(state.prompts[0].sequences[0].noise_key)
    assert len(set(keys)) == 3


def test_a_seed_draws_what_the_completion_of_the_rendered_prompt_draws() -> None:
    intake = (bench := ChatBench(b"abcdefgh")).intake
    loop = bench.loop

    def key(**fields: Any) -> bytes:
        prepared = intake.prepare(intake.parse(fields | {"seed": 3, "top_p": 0.9}))
        return loop.make_request_state(prepared).prompts[0].sequences[0].noise_key

    chat = key(messages=HELLO, max_tokens=5)
    assert chat == key(prompt=">", add_special_tokens=False, max_tokens=5)
    assert chat == key(messages=HELLO) and chat != key(messages=HELLO, temperature=0.5)


def test_a_cancelled_chat_says_nothing_more() -> None:
    bench = ChatBench(b"abcdefgh")
    request_id = bench.add(messages=HELLO, is_streamed=True)
    events = bench.loop.step()
    bench.loop.cancel(request_id)
    events += events_of(bench.loop)
    assert not any(
        isinstance(each, Finished) for each in of_request(events, request_id)
    )
    bench.scheduler.check_books()


@pytest.mark.parametrize("is_special", [True, False])
def test_a_tag_that_is_a_special_token_is_read_all_the_same(is_special: bool) -> None:
    """Answers leave special tokens out, and calls would lose their tags with them."""
    hf = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    hf.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=is_special)
    intake = Intake(
        Tokenizer(hf),
        RequestLimits(100, len(hf), config=EngineConfig(tool_call_parser="hermes")),
    )
    asked = {"messages": HELLO, "tools": TOOLS}
    assert intake.parse(asked).params.skip_special_tokens is not is_special
    assert intake.parse({"messages": HELLO}).params.skip_special_tokens
