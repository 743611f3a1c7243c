"""Chat with a real model: by `Engine`, over ranks, and beside the completion that it
stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import transformers

import fminfer
from fminfer.core.errors import CheckpointError, RequestError, UsageError
from fminfer.engine.engine_core import Delta, Finished
from fminfer.models.checkpoint import GENERATION
from fminfer.models.known_sizes import DEMO_MODEL
from tests.streams import check_stream, events_of

QUESTION = "How do you go from the kitchen to the attic?"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 12,
}
GREEDY = ASKED | {"temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[fminfer.Engine]:
    with closing(fminfer.Engine(dtype="float32")) as engine:
        yield engine


def answers(
    engine: fminfer.Engine, *requests: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    records = sorted(engine.run(requests), key=lambda record: record.line.number)
    assert not [record.error for record in records if record.error]
    return [record.to_dict()["result"]["choices"] for record in records]


def rendered() -> str:
    """Return the prompt that transformers makes of the messages."""
    hf = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    text: str = hf.apply_chat_template(
        ASKED["messages"], tokenize=False, add_generation_prompt=True
    )
    return text


def test_a_chat_is_the_completion_of_its_rendered_prompt(
    engine: fminfer.Engine,
) -> None:
    """With a seed, and greedily; the logprobs are the same floats."""
    for fields in ({"seed": 3}, {"temperature": 0}, {"seed": 4, "n": 2, "top_p": 0.9}):
        prompt = {"prompt": rendered(), "add_special_tokens": False, "max_tokens": 12}
        chat = ASKED | fields | {"logprobs": True, "top_logprobs": 2}
        chats, texts = answers(engine, chat, prompt | fields | {"logprobs": 2})
        for message, text in zip(chats, texts, strict=True):
            assert message["message"]["content"] == text["text"]
            assert message["finish_reason"] == text["finish_reason"]
            listed = [entry["logprob"] for entry in message["logprobs"]["content"]]
            assert listed == text["logprobs"]["token_logprobs"]
            said = b"".join(
                bytes(entry["bytes"]) for entry in message["logprobs"]["content"]
            )
            assert said.decode() == text["text"]


def test_one_by_one(engine: fminfer.Engine) -> None:
    streamed = GREEDY | {"return_token_ids": True, "logprobs": True}
    request_id = engine.add(streamed, is_streamed=True, endpoint="chat")
    events = events_of(engine)
    (choice,) = check_stream(events, request_id)
    assert choice["message"]["content"].split() == ["north"] * 2
    assert sum(isinstance(event, Delta) for event in events) > 1
    engine.add(GREEDY)  # its fields tell that it is chat
    (event,) = events_of(engine)
    assert (
        isinstance(event, Finished) and event.choices[0]["message"] == choice["message"]
    )
    for request, endpoint in ((GREEDY, "completions"), ({"prompt": "x"}, "chat")):
        with pytest.raises(RequestError) as caught:
            engine.add(request, endpoint=endpoint)
        assert caught.value.param == "messages"


def test_max_tokens_left_out_fills_the_context_of_1024(engine: fminfer.Engine) -> None:
    asked = {"messages": ASKED["messages"], "temperature": 0, "ignore_eos": True}
    (record,) = engine.run([asked])
    assert record.result is not None
    usage = record.result["usage"]
    assert usage["total_tokens"] == engine.context_length == 1024


@pytest.mark.parametrize("options", [{"world_size": 2}, {"data_group_size": 2}])
def test_ranks_answer_as_one_process(
    engine: fminfer.Engine, options: dict[str, int]
) -> None:
    requests = [
        GREEDY,
        ASKED | {"seed": 5},
        {"messages": ASKED["messages"], "seed": 6},
        ASKED,
    ]
    expected = answers(engine, *requests)
    with closing(fminfer.Engine(dtype="float32", **options)) as other:  # type: ignore[arg-type]
        assert answers(other, *requests) == expected
        asked = GREEDY | {"return_token_ids": True, "logprobs": True}
        request_id = other.add(asked, is_streamed=True)
        check_stream(events_of(other), request_id)


def test_a_template_of_the_users(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("Question: {{ messages[0].content }}\nAnswer: north{{ add }}")
    options: dict[str, Any] = {"dtype": "float32", "chat_template": str(template)}
    with closing(fminfer.Engine(**options)) as engine:
        asked = GREEDY | {"chat_template_kwargs": {"add": " north"}}
        (chat,), (text,) = answers(engine, GREEDY, asked)
        assert chat["message"]["content"].split() == ["north"]
        assert text["message"]["content"].split() == []
    with pytest.raises(UsageError, match=r"missing\.jinja cannot be read"):
        fminfer.Engine(chat_template=str(tmp_path / "missing.jinja"))


def test_defaults_of_the_models_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    own = {
        "do_sample": False,
        "temperature": 0.0,
        "max_new_tokens": 2,
        "eos_token_id": 0,
    }
    (folder / GENERATION).write_text(json.dumps(own))
    options: dict[str, Any] = {"dtype": "float32", "generation_config": "model"}
    asked = {"messages": ASKED["messages"]}
    prompt = {"prompt": rendered(), "max_tokens": 5}
    with closing(fminfer.Engine(str(folder), **options)) as engine:
        requests = [asked, asked, asked | {"max_tokens": 4}, prompt]
        first, second, longer, text = answers(engine, *requests)
        assert first == second, "temperature 0 is the model's own"
        assert first[0]["finish_reason"] == "length"
        assert first[0]["message"]["content"] == " north north"
        assert longer[0]["message"]["content"] == text[0]["text"] == " north north\n"
    (folder / GENERATION).write_text('{"temperature": -1}')
    with pytest.raises(CheckpointError, match="temperature is -1"):
        fminfer.Engine(str(folder), **options)
    (folder / GENERATION).unlink()
    with pytest.raises(CheckpointError, match=f"has no {GENERATION}"):
        fminfer.Engine(str(folder), **options)


def test_options_of_chat_are_checked() -> None:
    for option in ({"tool_call_parser": "xml"}, {"generation_config": "auto"}):
        with pytest.raises(UsageError, match="must be one of"):
            fminfer.Engine(**option)  # type: ignore[arg-type]


def test_a_run_without_a_tokenizer_has_no_chat() -> None:
    refused = pytest.raises(
        RequestError, match="no tokenizer; give a prompt of token ids"
    )
    with closing(fminfer.Engine(skip_tokenizer_init=True)) as engine, refused:
        engine.add(ASKED)
