"""Answers that parse, over HTTP: unmodified clients, streams, batches, and what is refused."""

from __future__ import annotations

import enum
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import instructor
import openai
import pydantic
import pytest
from pydantic import Field

import fminfer
from fminfer.text.limited_process import LimitedPool
from tests.server.batch_calls import CHAT, batch_line
from tests.server.reciting import save_reciting
from tests.server.running import Running, running, until
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"max_rows": 8}, has_state=True)

TALK: list[Any] = [
    {"role": "user", "content": "How do you go from the den to the porch?"}
]
GO: dict[str, Any] = {"prompt": "go"}
MULTIPLE = {"type": "integer", "multipleOf": 123_456_789}  # compiles for hours


class Way(enum.Enum):
    """A direction."""

    north = "north"
    east = "east"


class Closed(pydantic.BaseModel):
    """Has no other keys; the demo model would write many."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Door(Closed):
    """Leads on."""

    kind: Literal["door"]
    code: Annotated[str, Field(pattern=r"^[a-c]{2}$")]


class Stairs(Closed):
    """Lead up."""

    kind: Literal["stairs"]
    steps: int = Field(ge=1, le=20)


class Route(Closed):
    """What models of programs are made of: it is short, for the demo model to end it."""

    ways: list[Way] = Field(min_length=1, max_length=2)
    by: Door | Stairs = Field(discriminator="kind")
    is_far: bool | None
    more: Literal["no", "yes"] = "no"


SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "Route", "schema": Route.model_json_schema()},
}
ASKED: dict[str, Any] = {"model": "demo", "messages": TALK, "max_tokens": 300}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_openais_parse(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        **ASKED, response_format=Route, n=3, seed=1, temperature=temperature
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert (
            isinstance(choice.message.parsed, Route) and choice.finish_reason == "stop"
        )


def test_openais_stream_of_a_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **ASKED, response_format=Route, seed=2
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert len(texts) > 3 and message.parsed == Route.model_validate_json(
        "".join(texts)
    )


def test_instructors_json_schema(client: openai.OpenAI) -> None:
    reader: Any = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(
        reader.create(**ASKED, response_model=Route, seed=4, max_retries=0), Route
    )


def test_instructors_json_tells_the_schema_in_the_prompt_alone(tmp_path: Path) -> None:
    """The model would talk on behind its JSON, where only the end is allowed."""
    route = Route(ways=[Way.east], by=Stairs(kind="stairs", steps=12), is_far=None)
    texts = {"route": f"{route.model_dump_json(indent=1)}\nThat is it."}
    folder = save_reciting(tmp_path, texts, "<|route|>")
    engine = fminfer.Engine(str(folder), dtype="float32")
    with (
        running(engine) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        reader: Any = instructor.from_openai(client, mode=instructor.Mode.JSON)
        asked = ASKED | {"temperature": 0, "response_model": Route, "max_retries": 0}
        assert reader.create(**asked).model_dump() == route.model_dump()
    engine.close()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellms_response_format(litellm: Any, server: Running, provider: str) -> None:
    to_server = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    asked = {"messages": TALK, "max_tokens": 300, "seed": 5} | to_server
    whole = litellm.completion(f"{provider}/demo", response_format=Route, **asked)
    text = whole.choices[0].message.content
    assert Route.model_validate_json(text)
    stream = litellm.completion(
        f"{provider}/demo", response_format=Route, stream=True, **asked
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_deltas_join_to_what_the_constraint_allows(server: Running) -> None:
    """The end of a text that may go on is told by EOS alone, which has no text."""
    wish = {
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 6,
    }
    answer = server.post(CHAT, ASKED | wish | {"response_format": SCHEMA})
    texts = ["", ""]
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert all(map(Route.model_validate_json, texts))
    answer = server.post(
        "/v1/completions", {"prompt": "go", "guided_choice": ["up", "upstairs"]}
    )
    assert answer.json["choices"][0]["text"] in ("up", "upstairs")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "schema, word",
    [
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "uniqueItems",
        ),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "string", "format": "regex"}, "regex"),
        ({"name": "x", "schema": {"type": "object"}}, "no keyword of JSON Schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf whose branches"),
        (MULTIPLE, "more than 2 s"),
    ],
)
def test_what_cannot_be_had_is_named(
    server: Running, schema: dict[str, Any], word: str, *, is_streamed: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.post(CHAT, ASKED | {"response_format": form, "stream": is_streamed})
    assert answer.status == 400 and word in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] == "unsupported_parameter"


def test_a_batch(client: openai.OpenAI, tmp_path: Path) -> None:
    refused = {"type": "json_object", "schema": {"not": {}}}
    forms = {"good": SCHEMA, "refused": refused, "any": {"type": "text"}}
    path = tmp_path / "batch.jsonl"
    lines = [
        batch_line(name, CHAT, **ASKED, response_format=f) for name, f in forms.items()
    ]
    path.write_bytes(b"\n".join(lines))
    file = client.files.create(file=path.open("rb"), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", "it is over")
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id and batch.error_file_id
    records = map(
        json.loads, client.files.content(batch.output_file_id).text.splitlines()
    )
    texts = {
        record["custom_id"]: record["response"]["body"]["choices"][0]["message"][
            "content"
        ]
        for record in records
    }
    assert texts.keys() == {"good", "any"} and Route.model_validate_json(texts["good"])
    assert '"not"' in client.files.content(batch.error_file_id).text.replace("\\", "")


def test_others_do_not_wait_for_a_constraint_that_takes_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two such took both threads that tokenize; requests behind 30 of them waited half
    a minute."""
    label = GO | {"guided_choice": ["north", "east"]}
    assert server.post("/v1/completions", label).status == 200
    go_on = threading.Event()
    compile_now = LimitedPool.ask
    begun = []

    def compile_late(*args: Any, **options: Any) -> Any:
        begun.append(args[1])
        go_on.wait(20)
        return compile_now(*args, **options)

    monkeypatch.setattr(LimitedPool, "ask", compile_late)
    with ThreadPoolExecutor() as asking:
        late = [
            asking.submit(
                server.post,
                "/v1/completions",
                {"prompt": "go", "guided_regex": f"on{n}"},
            )
            for n in range(4)
        ]
        try:
            until(lambda: bool(begun), "one is compiled")
            assert server.post("/v1/completions", GO).status == 200
            assert server.post("/v1/completions", label).status == 200, (
                "its grammar is there"
            )
            tokenized = server.post("/tokenize", GO | {"guided_regex": "unread"})
            assert tokenized.status == 200 and len(begun) <= 3
            assert not [message for message in begun if "unread" in message]
        finally:
            go_on.set()
    texts = [each.result().json["choices"][0]["text"] for each in late]
    assert texts == [f"on{number}" for number in range(4)]


LABELS: dict[str, Any] = {
    "choice": [" north", " south", " south and east"],
    "probabilities": True,
}


def test_label_probabilities_stand_in_each_choice(server: Running) -> None:
    """Of completions and chats, whole and streamed; and of one that asks for less."""
    asked: dict[str, Any] = {"prompt": "Say it:", "structured_outputs": LABELS}
    whole = server.post("/v1/completions", asked).json["choices"][0]
    names = ("text", "label_probabilities", "label_mass", "finish_reason")
    assert whole["text"] == next(iter(whole["label_probabilities"]))
    assert sum(whole["label_probabilities"].values()) == pytest.approx(1)
    events = server.post("/v1/completions", asked | {"stream": True}).events
    (told,) = [e["choices"][0] for e in events if e["choices"][0]["text"]]
    assert {name: told[name] for name in names} == {name: whole[name] for name in names}

    chat = {"messages": TALK, "structured_outputs": LABELS | {"probabilities": 1}}
    answer = server.post(CHAT, chat).json["choices"][0]
    assert [*answer["label_probabilities"]] == [answer["message"]["content"]]
    events = server.post(CHAT, chat | {"stream": True}).events
    (last,) = [e for e in events if e["choices"][0]["finish_reason"]]
    assert last["choices"][0]["label_mass"] == answer["label_mass"]


def test_a_wish_beside_label_probabilities_is_refused(server: Running) -> None:
    asked = {"prompt": "go", "structured_outputs": LABELS, "top_p": 0.5}
    answer = server.post("/v1/completions", asked)
    assert answer.status == 400 and "top_p" in answer.error["message"]
    other = {"regex": "a", "probabilities": True}
    answer = server.post("/v1/completions", GO | {"structured_outputs": other})
    assert answer.status == 400 and "needs choice" in answer.error["message"]


def test_a_batch_has_label_probabilities(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    body = {"model": "demo", "messages": TALK, "structured_outputs": LABELS}
    path.write_bytes(batch_line("one", CHAT, **body))
    file = client.files.create(file=path.open("rb"), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", "it is over")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output
    record = json.loads(client.files.content(output).text)
    choice = record["response"]["body"]["choices"][0]
    assert sum(choice["label_probabilities"].values()) == pytest.approx(1)
    assert {*choice["label_probabilities"]} == {*LABELS["choice"]}
