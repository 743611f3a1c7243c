"""Inspect AI's tasks with fminfer as their model provider."""

from __future__ import annotations

import asyncio
import json
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolCall, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from fminfer import Engine, RequestError, UsageError
from fminfer.integrations.inspect_provider import (
    FminferAPI,
    _parse_choice,
    make_fields,
)

ROOT = Path(__file__).parents[2]
ROOMS = ["porch", "bathroom", "office", "kitchen", "attic"]


def ask(api: FminferAPI, messages: list[Any], **settings: Any) -> Any:
    async def main() -> Any:
        try:
            return await api.generate(messages, [], "none", GenerateConfig(**settings))
        finally:
            await api.aclose()

    return asyncio.run(main())


def test_the_entry_point_names_the_module() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (line,) = setup["options.entry_points"]["inspect_ai"].split("\n")[1:]
    name, _, module = line.partition(" = ")
    assert name == "fminfer" and import_module(module).FminferAPI


def test_a_task_has_the_answers_of_a_run(tmp_path: Path) -> None:
    """All samples of a task go through one engine, and greedy answers are those of `run`."""
    questions = [f"How do you go from the {room} to the den?" for room in ROOMS] * 4
    requests = [
        {
            "messages": [{"role": "user", "content": q}],
            "temperature": 0,
            "max_tokens": 20,
        }
        for q in questions
    ]
    with Engine(dtype="float32") as engine:
        records = sorted(engine.run(requests), key=lambda r: r.line.number)
    samples = [Sample(input=q, target="north") for q in questions]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    (log,) = eval(
        task,
        model="fminfer/demo",
        model_args={"dtype": "float32"},
        temperature=0,
        max_tokens=20,
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success" and log.samples is not None, log.error
    by_question = {str(s.input): s.output for s in log.samples}
    for question, record in zip(questions, records, strict=True):
        output = by_question[question]
        assert output.completion == record.text
        assert output.usage is not None
        assert output.usage.output_tokens == record.num_completion_tokens
        assert output.stop_reason in ("stop", "max_tokens")
    share = sum("north" in r.text for r in records) / len(records)
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(share)


def test_settings_become_fields() -> None:
    answer = JSONSchema(type="object", properties={"n": JSONSchema(type="integer")})
    config = GenerateConfig(
        max_tokens=3,
        stop_seqs=["x"],
        num_choices=2,
        logit_bias={5: 1.5},
        top_logprobs=2,
        logprobs=True,
        max_retries=4,
        response_schema=ResponseSchema(name="a", json_schema=answer),
        extra_body={"min_p": 0.1},
    )
    fields = make_fields(config)
    form = fields.pop("response_format")
    assert form["json_schema"]["schema"]["properties"] == {"n": {"type": "integer"}}
    assert fields == {
        "max_tokens": 3,
        "stop": ["x"],
        "n": 2,
        "logit_bias": {"5": 1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "min_p": 0.1,
    }
    with pytest.raises(UsageError, match="does not act on prompt_logprobs, verbosity"):
        make_fields(GenerateConfig(verbosity="low", prompt_logprobs=1))
    assert {*make_fields(GenerateConfig())} == set()


def test_choices_and_logprobs_are_told() -> None:
    api = FminferAPI("demo", dtype="float32")
    message = ChatMessageUser(content="How do you go from the den to the porch?")
    output = ask(api, [message], num_choices=2, logprobs=True, top_logprobs=2, seed=1)
    assert len(output.choices) == 2
    first = output.choices[0].logprobs.content
    assert len(first[0].top_logprobs) == 2 and first[0].logprob <= 0


def test_errors_are_of_their_sample() -> None:
    long = ChatMessageUser(content="north " * 3000)
    output = ask(FminferAPI("demo"), [long])
    assert output.stop_reason == "model_length" and "context" in output.completion
    with pytest.raises(RequestError, match="temperature is 5"):
        ask(FminferAPI("demo"), [ChatMessageUser(content="a")], temperature=5)
    with pytest.raises(UsageError, match="openai-api provider"):
        FminferAPI("demo", base_url="http://127.0.0.1:1/v1")


def test_tools_and_their_results_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model has no tools: what the engine gets is looked at."""
    sent: list[dict[str, Any]] = []
    api = FminferAPI("demo", dtype="float32")

    async def record(request: dict[str, Any]) -> Any:
        sent.append(request)
        raise RequestError("context_length_exceeded", "seen")

    monkeypatch.setattr(api._engine, "generate", record)
    call = ToolCall(id="c1", function="add", arguments={"a": 1})
    messages = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content="1+1?"),
        ChatMessageAssistant(content="", tool_calls=[call]),
        ChatMessageTool(content="2", tool_call_id="c1", function="add"),
    ]
    parameters = ToolParams(
        properties={"a": JSONSchema(type="integer")}, required=["a"]
    )
    tool = ToolInfo(name="add", description="Adds.", parameters=parameters)
    asyncio.run(api.generate(messages, [tool], "any", GenerateConfig()))
    (request,) = sent
    assert [m["role"] for m in request["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    called = request["messages"][2]["tool_calls"][0]["function"]
    assert called["name"] == "add" and json.loads(called["arguments"]) == {"a": 1}
    assert request["tool_choice"] == "required"
    assert request["tools"][0]["function"]["parameters"]["required"] == ["a"]
    assert get_model("fminfer/demo", memoize=False).api.max_connections() == 256


def test_calls_and_thoughts_are_inspects() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    broken = {"name": "add", "arguments": '{"a": '}
    calls = [{"id": "c1", "function": function}, {"id": "c2", "function": broken}]
    message = {"content": None, "tool_calls": calls, "reasoning_content": "Hm."}
    fields = {"message": message, "finish_reason": "tool_calls", "logprobs": None}
    choice = _parse_choice(fields, "demo")
    right, wrong = choice.message.tool_calls or ()
    assert right.arguments == {"a": 1} and not right.parse_error
    assert wrong.arguments == {} and "no JSON" in str(wrong.parse_error)
    assert choice.stop_reason == "tool_calls"
    assert "Hm." in str(choice.message.content[0])
    picture = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA")])
    with pytest.raises(UsageError, match="a message has image; texts alone"):
        ask(FminferAPI("demo"), [picture])
