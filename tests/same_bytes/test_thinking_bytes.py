"""Answers behind thoughts have the same bytes however a run goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fminfer
from fminfer.compute.kernels.kernel_build import find_compiler
from tests.conftest import IS_ALL
from tests.same_bytes.mixed_lines import Lines
from tests.same_bytes.thinking_lines import make_thinking_lines, save_template
from tests.same_bytes.tiny_models import MODELS
from tests.same_bytes.varied_runs import Answers, RunBench, VariedRun
from tests.server.answers import join_chat
from tests.server.test_result_cache import counts, serving

CHAT = "/v1/chat/completions"
# Four choices of a line run together.
RUNS = (
    VariedRun(0, 64, 512, 1, 1),
    VariedRun(2, 5, 64, 1, 1, num_pipelines=2),
    VariedRun(3, 5, 64, 1, 1),
    VariedRun(0, 17, 512, 1, 2),
    VariedRun(0, 17, 64, 1, 1, "killed"),
    VariedRun(1, 64, 64, 1, 1, "served"),
    VariedRun(0, 5, 64, 1, 2, "killed"),
    VariedRun(2, 4, 512, 1, 1, "warm"),
)
NUM_SAMPLE_RUNS = 6

pytestmark = [
    pytest.mark.usefixtures("without_tiles"),
    pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> RunBench:
    folder = tmp_path_factory.mktemp("thinking")
    model = folder / "model"
    MODELS["llama-3x64"].save(model)
    options = {"dtype": "float32", "chat_template": save_template(folder)}
    lines = make_thinking_lines()
    return RunBench(model, "decoder", options, lines, folder, CHAT)


@pytest.fixture(scope="module")
def expected(bench: RunBench) -> Answers:
    return bench.answer(RUNS[0])


def seeded(lines: Lines) -> Lines:
    """Return the lines that a server answers as a file does: it draws others at random."""
    return {
        name: line
        for name, line in lines.items()
        if "seed" in line or line.get("temperature") == 0
    }


def find_different(answers: Answers, expected: Answers) -> list[str]:
    return [
        f"{name}: {answers[name]} is not {expected[name]}"
        for name in answers
        if json.dumps(answers[name]) != json.dumps(expected[name])
    ]


def test_the_lines_show_all_that_thoughts_do(expected: Answers) -> None:
    choices = [choice for answer in expected.values() for choice in answer["choices"]]
    messages = [choice["message"] for choice in choices]
    contents = [message["content"] for message in messages]
    assert sum(bool(choice.get("reasoning_truncated")) for choice in choices) > 70
    assert contents.count(None) > 20 and len({*contents}) > 60
    assert len({message.get("reasoning_content") for message in messages}) > 60
    assert any("label_probabilities" in choice for choice in choices)
    assert any("tool_calls" in message for message in messages)
    assert any("stop_reason" in choice for choice in choices)
    assert any("reasoning_content" not in message for message in messages)


@pytest.mark.parametrize(
    "run", RUNS[1:] if IS_ALL else RUNS[1:NUM_SAMPLE_RUNS], ids=lambda run: run.name
)
def test_thoughts_have_the_same_bytes(
    bench: RunBench, expected: Answers, run: VariedRun
) -> None:
    """Also of lines without a seed, wherever they stand in a file."""
    if run.way == "served":
        bench = replace(bench, lines=seeded(bench.lines))
    assert not find_different(bench.answer(run), expected)


@pytest.mark.parametrize("run", RUNS[:2], ids=lambda run: run.name)
def test_kept_answers_have_their_thoughts(
    bench: RunBench, expected: Answers, tmp_path: Path, run: VariedRun
) -> None:
    """Whole and streamed, computed and kept."""
    lines = seeded(bench.lines)
    options = bench.dtype_options | run.options
    with fminfer.Engine(str(bench.model), **options) as engine:
        for num_kept in (0, 2 * len(lines)):
            with serving(engine, tmp_path) as server:
                answers = {
                    name: {"choices": server.post(CHAT, line).json["choices"]}
                    for name, line in lines.items()
                }
                streams = {
                    name: join_stream(server.post(CHAT, line | {"stream": True}))
                    for name, line in lines.items()
                }
                num_hits = counts(server)[1]
            assert num_hits == num_kept or not num_kept
            assert not find_different(answers, expected)
            plain = {name: strip_ids(answers[name]["choices"]) for name in answers}
            assert streams == plain


def join_stream(answer: Any) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    parts = [part for event in answer.events for part in event["choices"]]
    return strip_ids(join_chat(parts))


def strip_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return choices as a stream has them: without ids, and no content is an empty one."""
    stripped = []
    for choice in choices:
        message = choice["message"]
        names = choice.keys() - {"prompt_token_ids", "token_ids"}
        stripped.append(
            {name: choice[name] for name in names}
            | {
                "message": message
                | {
                    "content": message["content"] or None,
                    "reasoning_content": message.get("reasoning_content"),
                }
            }
        )
    return stripped
