"""`/v1/chat/completions`: the answers of a file run, whole and in parts; tokens and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fminfer
from tests.server.answers import answer_file, assert_equal, join_chat
from tests.server.running import Running, running
from tests.server.server_needs import needs_server

pytestmark = needs_server(served_model_names=("rooms", "other"))

URL = "/v1/chat/completions"
QUESTION = "How do you go from the porch to the den?"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
# no end; any letter
BROAD = {"0": -100} | {str(token_id): 12 for token_id in range(65, 91)}
PARTS = [
    {"type": "text", "text": "How do you go"},
    {"type": "text", "text": "to the den?"},
]
TALK = [
    {"role": "developer", "content": "Answer."},
    *ASKED["messages"],
    {"role": "assistant", "content": "north"},
    {"role": "user", "content": PARTS},
]
CHATS: list[dict[str, Any]] = [
    ASKED | {"temperature": 0},
    ASKED | {"seed": 7, "max_tokens": 12, "logit_bias": BROAD, "n": 3},
    ASKED
    | {
        "seed": 7,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
        "n": 2,
    },
    ASKED | {"seed": 3, "max_tokens": 6, "logprobs": True, "ignore_eos": True},
    {
        "messages": TALK,
        "seed": 5,
        "max_tokens": 90,
        "stop": ["tn", "a"],
        "logit_bias": BROAD,
    },
    ASKED | {"max_tokens": 0, "logprobs": True},
    {"messages": [*ASKED["messages"], {"role": "assistant", "content": "south"}]}
    | {"continue_final_message": True, "temperature": 0, "max_tokens": 5},
    ASKED
    | {
        "seed": 9,
        "max_tokens": 9,
        "logit_bias": BROAD,
        "logprobs": True,
        "top_logprobs": 2,
    },
]


@pytest.fixture(scope="module")
def file_answers() -> list[dict[str, Any]]:
    """What the same requests have as answers in a Batch file."""
    return answer_file([(URL, body) for body in CHATS], dtype="float32")


@pytest.mark.parametrize("place", range(len(CHATS)))
def test_answers_are_those_of_a_file(
    server: Running, file_answers: list[dict[str, Any]], place: int
) -> None:
    answer = server.post(URL, CHATS[place])
    assert answer.status == 200
    assert answer.json["object"] == "chat.completion"
    assert_equal(answer.json, file_answers[place])


@pytest.mark.parametrize("place", range(len(CHATS)))
def test_a_streams_parts_are_the_answer(
    server: Running, file_answers: list[dict[str, Any]], place: int
) -> None:
    usage = {"stream_options": {"include_usage": True}}
    answer = server.post(URL, CHATS[place] | {"stream": True} | usage)
    *chunks, last = answer.events
    assert {chunk["object"] for chunk in answer.events} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in answer.events}) == 1
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    joined = join_chat([choice for chunk in chunks for choice in chunk["choices"]])
    assert_equal({"choices": joined, "usage": last["usage"]}, file_answers[place])


def test_the_answers_compared_have_something_in_them(
    file_answers: list[dict[str, Any]],
) -> None:
    messages = [
        choice["message"] for body in file_answers for choice in body["choices"]
    ]
    assert messages[0]["content"].strip().split()[0] in (
        "north",
        "south",
        "east",
        "west",
    )
    assert len({message["content"] for message in messages}) == 8
    reasons = {
        choice["finish_reason"] for body in file_answers for choice in body["choices"]
    }
    assert reasons == {"stop", "length"}
    assert any("stop_reason" in choice for choice in file_answers[4]["choices"])


def test_unseeded_chats_differ_and_a_seed_repeats(server: Running) -> None:
    def text(**fields: Any) -> str:
        request = (
            ASKED | {"max_tokens": 12, "logit_bias": BROAD, "temperature": 2} | fields
        )
        found: str = server.post(URL, request).json["choices"][0]["message"]["content"]
        return found

    assert len({text() for _ in range(5)}) == 5
    assert len({text(seed=4) for _ in range(3)}) == 1


def test_a_chat_is_the_completion_of_its_rendered_prompt(server: Running) -> None:
    fields = {"temperature": 0, "max_tokens": 30}
    chat = server.post(URL, ASKED | fields).json
    prompt = f"Question: {QUESTION}\nAnswer:"
    completion = server.post("/v1/completions", {"prompt": prompt} | fields).json
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "messages", "messages is absent"),
        ({"prompt": "a"}, "messages", "/v1/completions answers prompts"),
        ({"messages": []}, "messages", "an empty list"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role",
            '"robot"',
        ),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "role user"),
        (ASKED | {"logprobs": 3}, "logprobs", '"top_logprobs": 3'),
        (ASKED | {"top_logprobs": 3}, "top_logprobs", '"logprobs": true'),
        (ASKED | {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            ASKED | {"response_format": {"type": "regex"}},
            "response_format",
            "structured_outputs",
        ),
        (
            ASKED | {"max_tokens": 5000},
            "max_tokens",
            "maximum context length is 1024 tokens",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 3000}]},
            "messages",
            "maximum context length is 1024 tokens",
        ),
    ],
)
def test_wrong_chats_are_told_what_is_wrong(
    server: Running, fields: dict[str, Any], param: str, told: str
) -> None:
    for stream in ({}, {"stream": True}):
        answer = server.post(URL, stream | fields)
        assert answer.status == 400
        assert answer.error["param"] == param and told in answer.error["message"]
        assert answer.error["type"] == "invalid_request_error"


def test_any_model_may_be_asked_for_and_the_served_names_are_listed(
    server: Running,
) -> None:
    listed = server.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["rooms", "other"]
    assert {model["max_model_len"] for model in listed["data"]} == {1024}
    assert server.get("/v1/models/other").json == listed["data"][1]
    for asked, named in (
        ("gpt-4o", "gpt-4o"),
        ("other", "other"),
        (None, "rooms"),
        ("", "rooms"),
    ):
        answer = server.post(URL, ASKED | {"model": asked, "max_tokens": 1})
        assert answer.json["model"] == named


def test_tokens_of_a_chat_are_those_that_its_answer_counts(server: Running) -> None:
    found = server.post("/tokenize", ASKED | {"return_token_strs": True}).json
    rendered = f"Question: {QUESTION}\nAnswer:"
    assert (
        found["tokens"] == server.post("/tokenize", {"prompt": rendered}).json["tokens"]
    )
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    usage = server.post(URL, ASKED | {"max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] == found["count"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {
        "prompt": rendered
    }


@pytest.mark.parametrize("text", ["a", " äöü 🙂\n", "<|endoftext|>", "x\x00y"])
def test_text_comes_back_from_its_tokens(server: Running, text: str) -> None:
    tokens = server.post(
        "/tokenize", {"prompt": text, "add_special_tokens": False}
    ).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": text}


def test_tokens_of_what_cannot_be(server: Running) -> None:
    wrong = server.post("/tokenize", {"prompt": ["a", "b"]})
    assert wrong.status == 400 and "several prompts" in wrong.error["message"]
    wrong = server.post("/detokenize", {"tokens": [99999]})
    assert wrong.status == 400 and "token id 99999" in wrong.error["message"]
    wrong = server.post("/detokenize", {"tokens": "5"})
    assert wrong.status == 400 and wrong.error["param"] == "tokens"


def test_a_model_without_a_template_says_so(llama_checkpoint: tuple[Path, Any]) -> None:
    engine = fminfer.Engine(str(llama_checkpoint[0]), dtype="float32")
    with running(engine) as server:
        answer = server.post(URL, ASKED)
        assert (
            answer.status == 400 and "--chat-template FILE" in answer.error["message"]
        )
        (model,) = server.get("/v1/models").json["data"]
        assert model["has_chat_template"] is False
    engine.close()
