"""The peers' sides of peers.py; each function runs alone in a virtual environment of its own.

It needs nothing of fminfer: `python peer_sides.py SIDE JOB.json` reads the folder of the model, the
rows and the dtype from the JSON file, answers all rows, and prints one line of JSON: `ready_s` from
the process's start, `run_s` of the rows, `tokens` that were generated, and some answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STARTED_S = time.perf_counter()
BATCH = 32


def run_generate(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' `generate`: rows sorted by length, batches of 32, left padding, sdpa."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
    ready_s = time.perf_counter() - STARTED_S
    order = sorted(range(len(job["rows"])), key=lambda i: _length(job["rows"][i]))
    answers: dict[int, Any] = {}
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            batch = [job["rows"][i] for i in order[first : first + BATCH]]
            longest = max(len(row["prompt"]) for row in batch)
            gaps = [longest - len(row["prompt"]) for row in batch]
            ids = torch.tensor([[0] * g + r["prompt"] for g, r in zip(gaps, batch, strict=True)])
            mask = torch.tensor([[0] * g + [1] * (longest - g) for g in gaps])
            new = max(row["max_tokens"] for row in batch)
            if new:
                found = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )[:, longest:].tolist()
                found = [f[: r["max_tokens"]] for f, r in zip(found, batch, strict=True)]
            else:
                found = _score_padded(model, ids, mask)
            answers |= zip(order[first : first + BATCH], found, strict=True)
    return _result(ready_s, job, [answers[i] for i in range(len(order))])


def _score_padded(model: Any, ids: Any, mask: Any) -> list[list[float]]:
    """Return each token's logprob, row by row so that the float32 logits stay small."""
    import torch

    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    scores = []
    for row, target, used in zip(logits, ids, mask, strict=True):
        own = row[:-1].log_softmax(-1, dtype=torch.float32).gather(-1, target[1:, None])[:, 0]
        scores.append(own[len(own) - int(used.sum()) + 1 :].tolist())
    return scores


def run_generate_batch(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' own continuous batching over a paged cache; it generates, and cannot score."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, attn_implementation="sdpa"
    ).eval()
    how = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    ready_s = time.perf_counter() - STARTED_S
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=how) as manager:
        names = [
            manager.add_request(row["prompt"], max_new_tokens=row["max_tokens"])
            for row in job["rows"]
        ]
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise SystemExit(f"generate_batch gave {result}")
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
    return _result(ready_s, job, [found[name] for name in names])


def run_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's offline `LLM`, prefix caching on, both cores."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=max(1, row["max_tokens"]),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=None if row["max_tokens"] else 1,
        )
        for row in job["rows"]
    ]
    ready_s = time.perf_counter() - STARTED_S
    started = time.perf_counter()
    prompts = [{"prompt_token_ids": row["prompt"]} for row in job["rows"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    run_s = time.perf_counter() - started
    answers = []
    for row, output in zip(job["rows"], outputs, strict=True):
        if row["max_tokens"]:
            answers.append(list(output.outputs[0].token_ids))
        else:
            pairs = zip(row["prompt"][1:], output.prompt_logprobs[1:], strict=True)
            answers.append([found[token].logprob for token, found in pairs])
    return _result(ready_s, job, answers, run_s)


def run_openvino(job: dict[str, Any]) -> dict[str, Any]:
    """OpenVINO GenAI's continuous batching over the converted model, prefix caching on."""
    import numpy
    import openvino
    import openvino_genai as genai

    folder = Path(job["openvino"])
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4
    hint = {"float32": "f32", "bfloat16": "bf16"}[job["dtype"]]
    pipe = genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": hint}
    )
    ready_s = time.perf_counter() - STARTED_S
    started = time.perf_counter()
    prompts, configs = [], []
    for row in job["rows"]:
        config = genai.GenerationConfig(ignore_eos=True, do_sample=False)
        config.set_eos_token_id(0)  # it refuses to have none, and ignores it
        config.max_new_tokens = max(1, row["max_tokens"])
        if not row["max_tokens"]:
            config.echo, config.logprobs = True, 1
        prompts.append(openvino.Tensor(numpy.array([row["prompt"]], dtype=numpy.int64)))
        configs.append(config)
    outputs = pipe.generate(prompts, configs)
    run_s = time.perf_counter() - started
    answers = []
    for row, output in zip(job["rows"], outputs, strict=True):
        if row["max_tokens"]:
            answers.append(list(output.m_generation_ids[0]))
        else:
            answers.append(list(output.m_scores))
    return _result(ready_s, job, answers, run_s)


def _length(row: dict[str, Any]) -> int:
    return len(row["prompt"]) + int(row["max_tokens"])


def _result(
    ready_s: float, job: dict[str, Any], answers: list[Any], run_s: float | None = None
) -> dict[str, Any]:
    """Return what is printed; without run_s, all time since the model was ready counts."""
    if run_s is None:
        run_s = time.perf_counter() - STARTED_S - ready_s
    sample = [answer[:8] for answer in answers[:4]]
    tokens = sum(len(a) for a, r in zip(answers, job["rows"], strict=True) if r["max_tokens"])
    return {"ready_s": ready_s, "run_s": run_s, "tokens": tokens, "sample": sample}


SIDES = {
    "transformers": run_generate,
    "generate_batch": run_generate_batch,
    "vllm": run_vllm,
    "openvino": run_openvino,
}

if __name__ == "__main__":
    answer = SIDES[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)
