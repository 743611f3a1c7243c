"""Clients that ask for calls of tools, unmodified: each gets valid arguments of its own type.

The demo model writes no calls by itself. Here a grammar forces them, so arguments that a client
reads are right by their form, whatever their values are. A client that is not installed is
skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from fminfer.models.known_sizes import DEMO_MODEL
from tests.server.running import Running
from tests.server.server_needs import needs_server

openai = pytest.importorskip("openai")

pytestmark = needs_server(model="hermes_model", engine={"max_rows": 8})

# Hermes' form. Tools are named alone, for the demo model has room for 1,024 tokens.
TEMPLATE = """
{%- for tool in tools or [] -%}{{- tool.function.name + '\n' -}}
{%- if loop.last -%}
{{- '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\n' -}}
{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{{- message.role + ': ' + (message.content or '') + '\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' -}}{{- call.function | tojson -}}{{- '</tool_call>' -}}
{%- endfor -%}{%- endfor -%}"""
PROMPT = "Ann is 34."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
NODE_MODULES = Path(os.environ.get("NODE_PATH", "node_modules")).absolute()


class Person(pydantic.BaseModel, extra="forbid"):
    """What a text tells of somebody."""

    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,7}$")
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["calm", "cross"]


class Room(pydantic.BaseModel, extra="forbid"):
    """What a text tells of a room."""

    floor: Literal["attic", "cellar"]
    is_lit: bool


TOOLS: Any = [openai.pydantic_function_tool(each) for each in (Person, Room)]
NAMED: Any = {"type": "function", "function": {"name": "Person"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


def check_arguments(arguments: str) -> None:
    """Check that arguments are those of a `Person`."""
    assert Person.model_validate_json(arguments, strict=True)


@pytest.fixture(scope="module")
def hermes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model behind a template in Hermes' form."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class TestOpenAI:
    """openai-python itself."""

    @pytest.mark.parametrize("tool_choice", ["required", NAMED, ALLOWED])
    def test_parse(self, client: Any, tool_choice: Any) -> None:
        answer = client.chat.completions.parse(
            model="demo",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].message.content is None
        assert type(call.function.parsed_arguments).__name__ == call.function.name
        assert tool_choice == "required" or call.function.name == "Person"

    @pytest.mark.parametrize("tool_choice", ["required", NAMED, ALLOWED])
    def test_stream(self, client: Any, tool_choice: Any) -> None:
        """As in OpenAI's API, the call of a named function ends with "stop"."""
        is_named = tool_choice is NAMED
        with client.chat.completions.stream(
            model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=tool_choice
        ) as stream:
            events = list(stream)
            (choice,) = stream.get_final_completion().choices
        deltas = [
            event.arguments_delta
            for event in events
            if event.type == "tool_calls.function.arguments.delta"
        ]
        calls = choice.message.tool_calls
        assert choice.finish_reason == ("stop" if is_named else "tool_calls")
        assert len(deltas) > len(calls), "arguments come in pieces"
        assert "".join(deltas) == "".join(call.function.arguments for call in calls)
        for call in calls:
            assert type(call.function.parsed_arguments).__name__ == call.function.name
            assert tool_choice == "required" or call.function.name == "Person"

    def test_responses(self, client: Any) -> None:
        tool = openai.pydantic_function_tool(Person)["function"]
        answer = client.responses.create(
            model="demo",
            input=PROMPT,
            tools=[{"type": "function", **tool}],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (call,) = [each for each in answer.output if each.type == "function_call"]
        check_arguments(call.arguments)
        parsed = client.responses.parse(model="demo", input=PROMPT, text_format=Person)
        assert isinstance(parsed.output_parsed, Person)


READ_PERSON: Any = {"model": "demo", "messages": MESSAGES, "response_model": Person}


class TestInstructor:
    """instructor's mode TOOLS, which names the tool."""

    @pytest.fixture
    def reader(self, client: Any) -> Any:
        instructor = pytest.importorskip("instructor")
        return instructor.from_openai(client, mode=instructor.Mode.TOOLS)

    def test_whole(self, reader: Any) -> None:
        person, answer = reader.create_with_completion(max_retries=0, **READ_PERSON)
        assert isinstance(person, Person)
        assert answer.choices[0].message.tool_calls

    def test_parts_of_a_stream(self, reader: Any) -> None:
        parts = list(reader.create_partial(**READ_PERSON))
        assert len(parts) > 3 and parts[0].mood is None
        check_arguments(parts[-1].model_dump_json())


class TestPydanticAI:
    """pydantic-ai's output of tools."""

    @pytest.fixture
    def make_agent(self, server: Running) -> Any:
        ai = pytest.importorskip("pydantic_ai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")

        def make(*types: type, api: str = "openai-chat") -> Any:
            model = ai.models.infer_model(f"{api}:demo", lambda _: provider)
            outputs = [ai.ToolOutput(each, name=each.__name__) for each in types]
            return ai.Agent(model, output_type=outputs, retries=0)

        return make

    @pytest.mark.parametrize("api", ["openai-chat", "openai-responses"])
    def test_tool_output(self, make_agent: Any, api: str) -> None:
        output = make_agent(Person, Room, api=api).run_sync(PROMPT).output
        assert isinstance(output, Person | Room)

    def test_stream(self, make_agent: Any) -> None:
        async def ask() -> list[Any]:
            async with make_agent(Person).run_stream(PROMPT) as run:
                return [part async for part in run.stream_output(debounce_by=None)]

        assert isinstance(asyncio.run(ask())[-1], Person)


class TestLangChain:
    """LangChain's structured output by calls of a function."""

    @pytest.fixture
    def model(self, server: Running) -> Any:
        langchain = pytest.importorskip("langchain_openai")
        return langchain.ChatOpenAI(
            model="demo", base_url=f"{server.url}/v1", api_key="none", max_retries=0
        )

    @pytest.mark.parametrize("is_strict", [None, True])
    def test_structured_output(self, model: Any, is_strict: bool | None) -> None:
        reader = model.with_structured_output(
            Person, method="function_calling", strict=is_strict
        )
        assert isinstance(reader.invoke(PROMPT), Person)

    def test_stream_of_any_tool(self, model: Any) -> None:
        chunks = list(model.bind_tools([Person], tool_choice="any").stream(PROMPT))
        whole = sum(chunks[1:], chunks[0])
        assert len(chunks) > 3 and whole.tool_calls and not whole.invalid_tool_calls
        for call in whole.tool_calls:
            assert Person.model_validate(call["args"])


class TestAgents:
    """openai-agents, over chats and over responses."""

    @pytest.fixture
    def run(self, server: Running) -> Any:
        agents = pytest.importorskip("agents")
        agents.set_tracing_disabled(True)
        calls: list[Person] = []

        @agents.function_tool
        def note_person(
            name: Literal["Ann", "Bob"],
            age: Annotated[int, pydantic.Field(ge=0, le=150)],
            mood: Literal["calm", "cross"],
        ) -> str:
            """Note what a text tells of somebody."""
            calls.append(Person(name=name, age=age, mood=mood))
            return f"{name} is noted."

        async def run(model: str, *, streams: bool = False, **settings: Any) -> Any:
            url = f"{server.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
                agent = agents.Agent(
                    name="reader",
                    instructions="Be brief.",
                    model=getattr(agents, model)(model="demo", openai_client=client),
                    model_settings=agents.ModelSettings(max_tokens=200, **settings),
                    tools=[note_person],
                )
                if not streams:
                    result = await agents.Runner.run(agent, PROMPT, max_turns=2)
                else:
                    result = agents.Runner.run_streamed(agent, PROMPT, max_turns=2)
                    assert [event async for event in result.stream_events()]
            return calls, result

        return lambda *args, **settings: asyncio.run(run(*args, **settings))

    @pytest.mark.parametrize("model", ["ChatCompletions", "Responses"])
    @pytest.mark.parametrize(
        ("tool_choice", "streams"), [("required", False), ("note_person", True)]
    )
    def test_a_tool_is_called_and_its_answer_read(
        self, run: Any, model: str, tool_choice: str, streams: bool
    ) -> None:
        """The second turn is free, and has the call and the tool's answer in its history."""
        calls, result = run(
            f"OpenAI{model}Model", streams=streams, tool_choice=tool_choice
        )
        assert calls and isinstance(result.final_output, str)


class TestLiteLLM:
    """LiteLLM's function, whole and as a stream."""

    @pytest.mark.parametrize("streams", [False, True])
    def test_a_forced_call(self, server: Running, litellm: Any, streams: bool) -> None:
        answer = litellm.completion(
            "openai/demo",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=NAMED,
            stream=streams,
            api_base=f"{server.url}/v1",
            api_key="none",
        )
        if streams:
            answer = litellm.stream_chunk_builder(list(answer))
        (choice,) = answer.choices
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.function.name == "Person"
            check_arguments(call.function.arguments)


@pytest.mark.skipif(
    not (shutil.which("node") and (NODE_MODULES / "ai").is_dir()),
    reason="the AI SDK is not installed; NODE_PATH names its folder of modules",
)
def test_ai_sdk(server: Running, tmp_path: Path) -> None:
    """Vercel's AI SDK: a forced call, one of a named tool in a stream, and an object."""
    script = shutil.copy(Path(__file__).with_name("ai_sdk_tools.mjs"), tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    command = ["node", str(script), f"{server.url}/v1", PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    forced, streamed, generated = map(json.loads, done.stdout.splitlines())
    assert (forced["reason"], streamed["reason"]) == ("tool-calls", "stop")
    assert streamed["num_deltas"] > len(streamed["inputs"])
    for arguments in (*forced["inputs"], *streamed["inputs"], generated):
        check_arguments(json.dumps(arguments))
