"""lm-evaluation-harness with chat templates: our model and its own `hf`, side by side."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from lm_eval.loggers import EvaluationTracker

import fminfer
from fminfer.integrations.lm_eval import FminferLM
from fminfer.models.checkpoint import DEMO_MODEL
from tests.integrations.lm_eval_tasks import (
    QUESTIONS,
    STEPS,
    Task,
    check_loglikelihoods,
    check_metrics,
    evaluate,
    generation_task,
    responses,
    save_llama_style,
    task,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes BOS, and refuses system messages, as Gemma's does.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SYSTEM = "Answer by steps only."
USER = [{"role": "user", "content": "Where is the den?"}]
# template, settings, model_args
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "chatml": (
        CHATML,
        {
            "apply_chat_template": True,
            "fewshot_as_multiturn": True,
            "system_instruction": SYSTEM,
        },
        {},
    ),
    # A prefix of scored texts that is not BOS: `hf` looks for one there, and for BOS elsewhere.
    "strict": (
        STRICT,
        {"apply_chat_template": True, "system_instruction": SYSTEM},
        {"prefix_token_id": 3},
    ),
    "named": (
        {"default": CHATML, "strict": STRICT},
        {"apply_chat_template": "strict", "fewshot_as_multiturn": True},
        {},
    ),
}


def tasks() -> list[Task]:
    fewshot = {
        "num_fewshot": 2,
        "fewshot_split": "test",
        "description": "Give directions.\n",
    }
    choice = task(
        "choice",
        "multiple_choice",
        [{"text": text} for text in QUESTIONS[:4]],
        doc_to_choice=STEPS,
        doc_to_target=3,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    plain = generation_task("plain", QUESTIONS[:4], until=[" west"], max_gen_toks=12)
    begun = generation_task(
        "begun", QUESTIONS[:4], until=["<|im_end|>"], max_gen_toks=12
    )
    return [
        choice | fewshot,
        plain | fewshot,
        begun | fewshot | {"gen_prefix": "Steps:"},
    ]


def save_chat_model(folder: Path, template: Any, *, is_demo: bool) -> None:
    """Save a model whose tokenizer has this template, or these by their names."""
    if is_demo:
        shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    else:
        save_llama_style(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module", params=list(CASES))
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    template, settings, model_args = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_chat_model(folder, template, is_demo=request.param == "chatml")
    found = []
    for model, more in (("fminfer", {"kernels": "off"}), ("hf", {})):
        tracker = EvaluationTracker()
        settings = settings | {"evaluation_tracker": tracker}
        results = evaluate(model, folder, tasks(), model_args | more, **settings)
        results["reported template"] = tracker.general_config_tracker.chat_template
        found.append(results)
    return found[0], found[1]


def test_chats_have_the_metrics_of_hf(both: Any) -> None:
    ours, theirs = both
    assert ours["reported template"] == theirs["reported template"] != None  # noqa: E711
    check_metrics(ours, theirs)
    check_loglikelihoods(responses(ours, "choice"), responses(theirs, "choice"))


def test_chats_have_the_texts_of_hf(both: Any) -> None:
    ours, theirs = (
        responses(results, "plain") + responses(results, "begun") for results in both
    )
    assert ours == theirs
    assert any(text for (text,) in ours)


def test_prompts_are_chats(both: Any) -> None:
    """What is compared above has the template's markers, and an answer that goes on."""
    prompts = {}
    for name in ("choice", "plain", "begun"):
        ours, theirs = (
            [sample["arguments"] for sample in results["samples"][name]]
            for results in both
        )
        assert ours == theirs
        prompts[name] = ours[0][0][0]
    assert prompts["plain"].endswith(("<|im_start|>assistant\n", "[assistant] "))
    assert prompts["begun"].endswith(
        ("<|im_start|>assistant\nSteps:", "[assistant] Steps:")
    )


@pytest.fixture(scope="module")
def llama_style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-style")
    save_llama_style(folder)
    return folder


def make_lm(folder: Path, **options: Any) -> FminferLM:
    return FminferLM(str(folder), dtype="float32", kernels="off", **options)


@pytest.fixture(scope="module")
def without_template(llama_style: Path) -> Iterator[FminferLM]:
    model = make_lm(llama_style)
    yield model
    model.engine.close()


def test_a_model_without_a_template_says_what_to_do(
    without_template: FminferLM,
) -> None:
    with pytest.raises(
        fminfer.UsageError, match=r"no chat template; give one by chat_template="
    ):
        without_template.apply_chat_template(USER)


def test_a_template_from_a_file(
    without_template: FminferLM, llama_style: Path, tmp_path: Path, caplog: Any
) -> None:
    path = tmp_path / "strict.jinja"
    path.write_text("{{ greeting }}" + STRICT)
    model = make_lm(
        llama_style, chat_template=str(path), chat_template_args={"greeting": "é"}
    )
    system = [{"role": "system", "content": SYSTEM}]
    with caplog.at_level(logging.WARNING, "fminfer"):
        for _ in range(2):
            text = model.apply_chat_template(system + USER)
            assert text == "é<s>[user] Where is the den?</s>[assistant] "
    assert (
        caplog.text.count("the chat template refuses system messages (System role") == 1
    )
    assert model.chat_template(True) == path.read_text()
    assert model.tokenizer_name != without_template.tokenizer_name
    model.engine.close()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ({"tools": CHATML, "rag": CHATML}, "multiple chat templates"),
    ],
)
def test_a_template_that_cannot_write_a_task(
    llama_style: Path, tmp_path: Path, template: Any, reason: str
) -> None:
    save_chat_model(tmp_path, template, is_demo=False)
    model = make_lm(tmp_path)
    with pytest.raises(
        fminfer.UsageError, match=rf"cannot write the task's messages: .*{reason}"
    ):
        model.apply_chat_template(USER)
    model.engine.close()


def test_a_named_template_that_is_not_applied(tmp_path: Path, caplog: Any) -> None:
    """lm-eval hands the name to no one who renders; the numbers are those of `hf`."""
    save_chat_model(tmp_path, CASES["named"][0], is_demo=False)
    model = make_lm(tmp_path)
    with caplog.at_level(logging.WARNING, "fminfer"):
        assert model.chat_template("default") == CHATML
        assert not [each for each in caplog.records if each.name.startswith("fminfer")]
        assert model.chat_template("strict") == STRICT
    assert "lm-eval reports the chat template 'strict', but" in caplog.text
    model.engine.close()
