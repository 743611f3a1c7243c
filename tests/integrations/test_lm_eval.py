"""lm-evaluation-harness itself: its tasks with our model and with its own `hf`, side by side."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import fminfer
from fminfer.integrations.lm_eval import FminferLM
from fminfer.models.checkpoint import DEMO_MODEL
from tests.integrations.lm_eval_tasks import (
    QUESTIONS,
    STEPS,
    TOLERANCE,
    Task,
    check_loglikelihoods,
    check_metrics,
    choice_task,
    evaluate,
    generation_task,
    responses,
    save_llama_style,
    task,
)

LONG = "Question: How do you go from the den to the porch?\nAnswer: north\n" * 120


def tasks() -> list[Task]:
    # A BOS spelled out, an empty context, a trailing space, and one that is cut from the left.
    contexts = [*QUESTIONS, "<s>" + QUESTIONS[0], "", "Answer: ", LONG + QUESTIONS[0]]
    texts = [
        "north",
        QUESTIONS[0] + " north east\n",
        LONG + QUESTIONS[1],
        "\n\n é 東 \n",
    ]
    perplexities = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    return [
        choice_task(contexts),
        task(
            "perplexity",
            "loglikelihood_rolling",
            [{"text": text} for text in texts],
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": name} for name in perplexities],
        ),
        generation_task("stops", contexts[:-3], until=["\n", " west"], max_gen_toks=12),
        generation_task(
            "inside",
            contexts[5:-3],
            until=["h e", "ast"],
            max_gen_toks=40,
            do_sample=False,
        ),
        generation_task(
            "lengths",
            [LONG, *contexts[:3]],
            until="</s>",
            max_gen_toks=9,
            do_sample=False,
            temperature=0.7,
        ),
        generation_task(
            "ends",
            contexts[5:-3],
            until=["<|im_end|>"],
            max_new_tokens=40,
            temperature=0,
        ),
    ]


@pytest.fixture(scope="module")
def llama_style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-style")
    save_llama_style(folder)
    return folder


@pytest.fixture(scope="module", params=["demo", "llama_style"])
def folder(request: pytest.FixtureRequest, llama_style: Path) -> Path:
    return DEMO_MODEL if request.param == "demo" else llama_style


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        evaluate("fminfer", folder, tasks(), {"kernels": "off"}),
        evaluate("hf", folder, tasks()),
    )


def test_the_tasks_metrics_are_those_of_hf(both: Any) -> None:
    ours, theirs = both
    assert set(ours["results"]) == {task["task"] for task in tasks()}
    check_metrics(ours, theirs)


def test_loglikelihoods_and_greedy_flags(both: Any) -> None:
    ours, theirs = (responses(results, "choice") for results in both)
    assert len(ours) == 12 * len(STEPS)
    check_loglikelihoods(ours, theirs)
    assert {our[1] for (our,) in ours} >= {False}


def test_rolling_loglikelihoods_over_many_windows(both: Any, folder: Path) -> None:
    ours, theirs = (responses(results, "perplexity") for results in both)
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(hf.encode(LONG)) > 2 * 1024, "the long text fits a window"
    for (our,), (their,) in zip(ours, theirs, strict=True):
        # `hf` adds the logprobs of a window up in float32: at -10,000 that is good to 0.001.
        assert our == pytest.approx(their, abs=TOLERANCE, rel=1e-7)


@pytest.mark.parametrize("name", ["stops", "inside", "lengths", "ends"])
def test_generated_texts(both: Any, name: str) -> None:
    ours, theirs = (responses(results, name) for results in both)
    assert ours == theirs
    assert any(text for (text,) in ours)


def test_the_demo_model_answers_its_questions(both: Any, folder: Path) -> None:
    """What is compared above are real answers, greedy flags of both kinds among them."""
    ours, _ = both
    if folder == DEMO_MODEL:
        assert responses(ours, "stops")[0] == [" north east east east east east"]
        assert {flag for ((_, flag),) in responses(ours, "choice")} == {False, True}


@pytest.fixture(scope="module")
def demo() -> Iterator[FminferLM]:
    model = FminferLM(dtype="float32", kernels="off", max_length=64)
    yield model
    model.engine.close()


def instances(request_type: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type, {}, args, i) for i, args in enumerate(arguments)]


def test_max_length_cuts_contexts_and_says_so(
    demo: FminferLM, caplog: pytest.LogCaptureFixture
) -> None:
    """With less context than the model's, `hf` and we cut alike; 64 ids are fed, 65 scored."""
    requests = instances(
        "loglikelihood", [(LONG + text, " north") for text in QUESTIONS]
    )
    with caplog.at_level(logging.WARNING, "fminfer"):
        ours = demo.loglikelihood(requests, disable_tqdm=True)
    assert "8 of 8 prompts are longer than max_length, 64 tokens" in caplog.text
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO_MODEL, dtype=torch.float32
    )
    for request, (logprob, _) in zip(requests, ours, strict=True):
        ids = demo.tok_encode("".join(request.args))[-65:]
        with torch.no_grad():
            row = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0, -1], -1)
        assert logprob == pytest.approx(row[ids[-1]].item(), abs=TOLERANCE)


def test_a_refused_request_is_named_and_the_next_call_works(demo: FminferLM) -> None:
    gen_kwargs = {
        "until": ["\n"],
        "max_gen_toks": 5,
        "do_sample": True,
        "temperature": 3,
    }
    good = instances(
        "generate_until", [(QUESTIONS[0], gen_kwargs | {"temperature": 1})] * 3
    )
    bad = instances("generate_until", [(QUESTIONS[1], gen_kwargs)])
    message = r"request 2 of 4, '…stion: .*': temperature is 3"
    with pytest.raises(fminfer.FminferError, match=message):
        demo.generate_until(good[:1] + bad + good[1:], disable_tqdm=True)
    assert len(demo.generate_until(good, disable_tqdm=True)) == 3


def test_sampled_texts_follow_their_kwargs(demo: FminferLM) -> None:
    gen_kwargs = {
        "until": [],
        "max_gen_toks": 12,
        "do_sample": True,
        "temperature": 1.5,
    }
    texts = demo.generate_until(
        instances("generate_until", [("north", gen_kwargs)] * 8), disable_tqdm=True
    )
    assert len(set(texts)) > 4, "repeats of a document are draws of their own"
    greedy = [gen_kwargs | change for change in ({"top_k": 1}, {"do_sample": False})]
    texts = demo.generate_until(
        instances("generate_until", [("north", kwargs) for kwargs in greedy]),
        disable_tqdm=True,
    )
    assert texts[0] == texts[1]


def test_texts_are_held_to_what_a_task_asks_for(demo: FminferLM) -> None:
    """Tasks could not ask for it: their texts were refused, whatever lm-eval calls the field."""
    array = {
        "type": "array",
        "items": {"enum": ["east", "west"]},
        "minItems": 1,
        "maxItems": 3,
    }
    form = {"type": "json_schema", "json_schema": {"name": "ways", "schema": array}}
    kwargs: dict[str, Any] = {
        "until": [],
        "max_gen_toks": 40,
        "do_sample": True,
        "temperature": 1.5,
    }
    ways: list[dict[str, Any]] = [
        {"guided_choice": ["up", "down"]},
        {"structured_outputs": {"regex": "[a-c]{5}"}},
    ]
    ways += [{"response_format": form, "guided_whitespace_pattern": " ?"}]
    labels, letters, lists = (
        demo.generate_until(
            instances("generate_until", [("north", kwargs | way)] * 4),
            disable_tqdm=True,
        )
        for way in ways
    )
    assert set(labels) <= {"up", "down"}
    assert all(len(text) == 5 and set(text) <= set("abc") for text in letters)
    assert all(set(json.loads(text)) <= {"east", "west"} for text in lists)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"num_beams": 4}, "num_beams, which fminfer cannot do; it knows until"),
        ({"max_gen_toks": 64}, "max_gen_toks is 64, .* 64 tokens"),
        ({"until": ""}, "until holds an empty string"),
    ],
)
def test_generation_kwargs_that_cannot_be_done(
    demo: FminferLM, gen_kwargs: dict[str, Any], message: str
) -> None:
    kwargs = {"until": ["\n"], "max_gen_toks": 3} | gen_kwargs
    with pytest.raises(fminfer.FminferError, match=message):
        demo.generate_until(
            instances("generate_until", [("north", kwargs)]), disable_tqdm=True
        )


def test_what_lm_eval_cannot_have(demo: FminferLM) -> None:
    with pytest.raises(fminfer.UsageError, match="attention is called kernels now"):
        FminferLM(attention="eager")
    with pytest.raises(fminfer.UsageError, match=r"no option peft; .*options are pre"):
        FminferLM(peft="adapter")
    with pytest.raises(
        fminfer.UsageError, match=r"max_length is 1025; it must be from 2 to .* 1024"
    ):
        FminferLM(max_length=1025, dtype="float32")
    with pytest.raises(fminfer.UsageError, match=r"demo_model has no tokenizer; give"):
        FminferLM(random_init=str(DEMO_MODEL), dtype="float32")
    long = instances("loglikelihood", [("north", " north" * 80)])
    with pytest.raises(
        fminfer.UsageError, match=r"has 80 tokens; it must have from 1 to .* 64"
    ):
        demo.loglikelihood(long, disable_tqdm=True)


def test_kept_answers_are_taken_by_a_second_evaluation(tmp_path: Path) -> None:
    """What `fminfer run --result-cache` does: nothing is computed again."""
    pairs = instances("loglikelihood", [("How do you", " go"), ("from the", " den")])
    texts = instances("generate_until", [("How do", {"max_gen_toks": 4, "until": []})])
    seen = []
    for _ in range(2):
        model = FminferLM(dtype="float32", result_cache=str(tmp_path / "kept"))
        answers = model.loglikelihood(pairs), model.generate_until(texts)
        seen.append((answers, model.engine.stats.num_prompt_tokens))
        model.engine.close()
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] > 0 and seen[1][1] == 0


def test_lm_evals_cache_holds_the_answers(tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model="fminfer",
            model_args="dtype=float32,kernels=off",
            tasks=tasks()[:3],
            limit=2,
            use_cache=str(tmp_path / "cache"),
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
        return results

    first = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fminfer.Engine, "run", None)  # nothing may be asked again
        second = run()
    for name in ("choice", "perplexity", "stops"):
        assert [responses(first, name)] == [responses(second, name)]


# The command, without the thousands of tasks that come with lm-eval: it reads them for 10 s.
RUN_COMMAND = """
import functools, runpy
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
runpy.run_module("fminfer.integrations.lm_eval", run_name="__main__")
"""


def test_the_command(tmp_path: Path) -> None:
    """`python -m fminfer.integrations.lm_eval` is lm-eval's command, and knows fminfer."""
    docs = tmp_path / "docs.jsonl"
    docs.write_text(
        "".join(
            json.dumps({"text": text, "steps": " north"}) + "\n" for text in QUESTIONS
        )
    )
    (tmp_path / "rooms.yaml").write_text(
        f"""
task: rooms
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{steps}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 10}}
metric_list: [{{metric: exact_match}}]
"""
    )
    command = [sys.executable, "-c", RUN_COMMAND, "run", "--model", "fminfer"]
    command += [
        "--model_args",
        "dtype=float32,kernels=off",
        "--limit",
        "4",
        "--log_samples",
    ]
    command += [
        "--tasks",
        str(tmp_path / "rooms.yaml"),
        "--output_path",
        str(tmp_path / "out"),
    ]
    environ = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "out").rglob("samples_rooms_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 4
    assert samples[0]["resps"] == [[" north east east east east east"]]
