"""lm-evaluation-harness over HTTP: its clients give the numbers of our model in the process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

import fminfer.integrations.lm_eval  # noqa: F401, registers the model
from fminfer.models.checkpoint import DEMO_MODEL
from tests.conftest import more
from tests.integrations.lm_eval_tasks import (
    QUESTIONS,
    ROOMS,
    choice_task,
    evaluate,
    generation_task,
    responses,
    task,
)
from tests.server.running import Running
from tests.server.server_needs import needs_server

pytestmark = needs_server(engine={"kernels": "off"})

TOLERANCE = 1e-4
CLIENTS_LENGTH = 1024
TEXTS = [
    "north",
    QUESTIONS[0] + " north east\n",
    "".join(QUESTIONS) * 12,
    "\n\n é 東 \n",
]
WAYS = [f" How do you go from the {a} to the {b}?" for a, b in pairwise(ROOMS)]
GREEDY = {"until": ["\n", " west"], "max_gen_toks": 12, "temperature": 0}


def scored_tasks() -> list[dict[str, Any]]:
    return [
        choice_task([*QUESTIONS, "", "Answer: "]),
        task(
            "perplexity",
            "loglikelihood_rolling",
            [{"text": text} for text in TEXTS],
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[
                {"metric": name} for name in ("word_perplexity", "bits_per_byte")
            ],
        ),
        generation_task("stops", QUESTIONS, **GREEDY),
        generation_task(
            "ends", QUESTIONS, until=["h e", "ast"], max_gen_toks=40, do_sample=False
        ),
    ]


def chat_tasks(doc_to_text: str) -> list[dict[str, Any]]:
    return [generation_task("chat", WAYS, **GREEDY) | {"doc_to_text": doc_to_text}]


def evaluate_over(
    model: str,
    url: str,
    tasks: list[dict[str, Any]],
    is_chat: bool = False,
    **model_args: Any,
) -> dict[str, Any]:
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": "demo", "base_url": url, "max_retries": 1, **model_args},
        tasks=tasks,
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        task_manager=TaskManager(include_defaults=False),
    )
    return results


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """Evaluate in this process; the client's windows are two tokens below its max_length."""
    length = CLIENTS_LENGTH - 2
    return evaluate(
        "fminfer", DEMO_MODEL, scored_tasks(), {"kernels": "off", "max_length": length}
    )


@pytest.mark.parametrize(
    "model_args",
    [
        {"num_concurrent": 8},
        pytest.param({"batch_size": 5}, marks=more),
        {"num_concurrent": 2, "batch_size": 3, "tokenized_requests": False},
    ],
)
def test_local_completions(
    server: Running, own: dict[str, Any], model_args: dict[str, Any]
) -> None:
    url = f"{server.url}/v1/completions"
    args = {"tokenizer": str(DEMO_MODEL), "max_length": CLIENTS_LENGTH, **model_args}
    found = evaluate_over("local-completions", url, scored_tasks(), **args)
    for name, metrics in own["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(
                    value, rel=TOLERANCE
                )
    for ours, theirs in zip(
        responses(own, "choice"), responses(found, "choice"), strict=True
    ):
        assert theirs[0][0] == pytest.approx(ours[0][0], abs=TOLERANCE)
        assert theirs[0][1] == ours[0][1]
    for name in ("stops", "ends"):
        assert responses(found, name) == responses(own, name)
    assert any(text for (text,) in responses(found, "stops"))


def test_local_chat_completions(server: Running) -> None:
    """The server's chat template writes what the task of the model in the process has."""
    rendered = chat_tasks("Question: {{text | trim}}\nAnswer:")
    own = evaluate("fminfer", DEMO_MODEL, rendered, {"kernels": "off"})
    url = f"{server.url}/v1/chat/completions"
    for concurrent in (1, 4):
        found = evaluate_over(
            "local-chat-completions",
            url,
            chat_tasks("{{text}}"),
            is_chat=True,
            num_concurrent=concurrent,
        )
        assert responses(found, "chat") == responses(own, "chat")
    assert len({text for (text,) in responses(own, "chat")}) > 2
