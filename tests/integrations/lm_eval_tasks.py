"""Small tasks for lm-evaluation-harness, and its own `hf` model to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
import transformers
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.conftest import make_model

Task = dict[str, Any]
TOLERANCE = 1e-4
ROOMS = [
    "bathroom",
    "office",
    "garden",
    "den",
    "attic",
    "basement",
    "library",
    "cellar",
]
STEPS = [" north", " south east", " east east", " north east east east east east"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def question(start: str, end: str) -> str:
    return f"Question: How do you go from the {start} to the {end}?\nAnswer:"


QUESTIONS = [question(a, b) for a, b in zip(ROOMS, ROOMS[1:] + ROOMS[:1], strict=True)]


def task(
    name: str, output_type: str, docs: list[dict[str, Any]], **fields: Any
) -> Task:
    return {
        "task": name,
        "output_type": output_type,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        **fields,
    }


def choice_task(texts: list[str]) -> Task:
    """Return one whose choices are STEPS."""
    return task(
        "choice",
        "multiple_choice",
        [{"text": text} for text in texts],
        doc_to_choice=STEPS,
        doc_to_target=3,
        target_delimiter="",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )


def generation_task(name: str, texts: list[str], **gen_kwargs: Any) -> Task:
    return task(
        name,
        "generate_until",
        [{"text": text} for text in texts],
        doc_to_target=" north",
        generation_kwargs=gen_kwargs,
        metric_list=[{"metric": "exact_match"}],
    )


def save_llama_style(folder: Path) -> None:
    """Save a random llama with a tokenizer that adds BOS and writes spaces as `▁`."""
    backend = BackendTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(QUESTIONS + STEPS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_end|>"],
    )
    hf.save_pretrained(folder)
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[[2, 3]] *= 2.5  # so that texts do end by a special token
        # … and begin with a space, where they would with a colon
        colon, space = (backend.token_to_id(piece) for piece in (":", "▁"))
        model.lm_head.weight[space] = model.lm_head.weight[colon] * 1.02
    model.save_pretrained(folder)


def evaluate(
    model: str,
    folder: Path,
    tasks: list[Task],
    model_args: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run lm-eval; settings are those of `simple_evaluate`."""
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "pretrained": str(folder),
            "dtype": "float32",
            **(model_args or {}),
        },
        tasks=tasks,
        device="cpu",
        bootstrap_iters=0,
        # the thousands that come with it
        task_manager=TaskManager(include_defaults=False),
        **settings,
    )
    return results


def responses(results: dict[str, Any], name: str) -> list[Any]:
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["resps"]]


def check_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours["results"]) == set(theirs["results"])
    for name, metrics in theirs["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(
                    value, rel=TOLERANCE
                ), metric


def check_loglikelihoods(ours: list[Any], theirs: list[Any]) -> None:
    for (our,), (their,) in zip(ours, theirs, strict=True):
        assert our[0] == pytest.approx(their[0], abs=TOLERANCE)
        assert our[1] == their[1]
