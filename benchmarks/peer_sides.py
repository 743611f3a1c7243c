"""The peers' sides of peers.py; each function runs alone in a virtual environment of its own.

It needs nothing of fminfer: `python peer_sides.py SIDE JOB.json` reads the folder of
the model, the rows and the dtype from the JSON file, answers all rows, and prints one
line of JSON: `ready_s` from the process's start, `run_s` of the rows, `tokens` that
were generated, and some answers.
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
SLOTS = 16


def run_generate(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' `generate`: rows sorted by length, batches of 32, left padding, sdpa."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    device = torch.device(job["device"])
    model = model.eval().to(device)
    ready_s = time.perf_counter() - STARTED_S
    answers: dict[int, Any] = {}
    with torch.inference_mode():
        for numbers in _batches(job["rows"]):
            batch = [job["rows"][i] for i in numbers]
            longest = max(len(row["prompt"]) for row in batch)
            gaps = [longest - len(row["prompt"]) for row in batch]
            ids = torch.tensor(
                [[0] * g + r["prompt"] for g, r in zip(gaps, batch, strict=True)]
            )
            mask = torch.tensor([[0] * g + [1] * (longest - g) for g in gaps])
            ids = ids.to(device)
            mask = mask.to(device)
            new = max(row["max_tokens"] for row in batch)
            if new:
                found = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=new,
                    **_how_to_draw(job),
                    pad_token_id=0,
                    eos_token_id=None,
                )[:, longest:].tolist()
                found = [
                    f[: r["max_tokens"]] for f, r in zip(found, batch, strict=True)
                ]
            else:
                found = _score_padded(model, ids, mask)
            answers |= zip(numbers, found, strict=True)
    return _result(ready_s, job, [answers[i] for i in range(len(answers))])


def _score_padded(model: Any, ids: Any, mask: Any) -> list[list[float]]:
    """Return each token's logprob, row by row so that the float32 logits stay small."""
    import torch

    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    scores = []
    for row, target, used in zip(logits, ids, mask, strict=True):
        own = (
            row[:-1]
            .log_softmax(-1, dtype=torch.float32)
            .gather(-1, target[1:, None])[:, 0]
        )
        scores.append(own[len(own) - int(used.sum()) + 1 :].tolist())
    return scores


def run_generate_batch(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' own continuous batching over a paged cache; it generates, and
    cannot score."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, attn_implementation="sdpa"
    )
    model = model.eval().to(job["device"])
    how = transformers.GenerationConfig(
        **_how_to_draw(job), eos_token_id=-1, pad_token_id=0
    )
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
            temperature=row["temperature"],
            top_p=row["top_p"],
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


def run_openvino_dynamic(job: dict[str, Any]) -> dict[str, Any]:
    """OpenVINO as it is by default: activations become 8 bits where weights have 8 or 4."""
    return run_openvino(job, is_dynamic=True)


def run_openvino(job: dict[str, Any], *, is_dynamic: bool = False) -> dict[str, Any]:
    """OpenVINO GenAI's continuous batching over the converted model, prefix caching on."""
    import numpy
    import openvino
    import openvino_genai as genai

    folder = Path(job["openvino"])
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4
    how = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[job["dtype"]]
    }
    if job["bits"] and not is_dynamic:  # activations keep their type
        how["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    pipe = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", how)
    ready_s = time.perf_counter() - STARTED_S
    started = time.perf_counter()
    prompts = []
    configs = []
    for row in job["rows"]:
        config = genai.GenerationConfig(ignore_eos=True, **_how_to_draw(job))
        config.set_eos_token_id(0)  # it refuses to have none, and ignores it
        config.max_new_tokens = max(1, row["max_tokens"])
        if not row["max_tokens"]:
            config.echo = True
            config.logprobs = 1
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


def run_ctranslate2(job: dict[str, Any]) -> dict[str, Any]:
    """CTranslate2's Generator over the converted model: rows sorted by length, batches of 32.

    A call has one max_length: rows of a batch run as long as the longest asks, and are cut. Its
    release 4.8 has no bfloat16 on the CPU; it then computes in float32, and says so.
    """
    import ctranslate2

    folder = Path(job["ctranslate2"])
    names = json.loads((folder / "vocabulary.json").read_text())
    offered = ctranslate2.get_supported_compute_types("cpu")
    kind = job["dtype"] if job["dtype"] in offered else "float32"
    cores = os.cpu_count() or 1
    generator = ctranslate2.Generator(
        str(folder),
        device="cpu",
        compute_type=kind,
        inter_threads=1,
        intra_threads=cores,
    )
    print(f"  ctranslate2: computes in {generator.compute_type}", file=sys.stderr)
    ready_s = time.perf_counter() - STARTED_S
    drawn = _how_to_draw(job)
    how = {}  # else it takes the likeliest token
    if drawn["do_sample"]:
        how = {
            "sampling_temperature": drawn["temperature"],
            "sampling_topp": drawn["top_p"],
        }
        how["sampling_topk"] = 0
    answers: dict[int, Any] = {}
    for numbers in _batches(job["rows"]):
        batch = [job["rows"][i] for i in numbers]
        prompts = [[names[token] for token in row["prompt"]] for row in batch]
        new = max(row["max_tokens"] for row in batch)
        if new:
            results = generator.generate_batch(
                prompts,
                max_length=new,
                end_token=[],
                include_prompt_in_result=False,
                **how,
            )
            found = [
                f.sequences_ids[0][: r["max_tokens"]]
                for f, r in zip(results, batch, strict=True)
            ]
        else:
            results = generator.score_batch(prompts, max_input_length=0)
            found = [result.log_probs for result in results]
        answers |= zip(numbers, found, strict=True)
    return _result(ready_s, job, [answers[i] for i in range(len(answers))])


def run_llama_cpp(job: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's server over the converted model: continuous batching, all rows sent at once.

    16 slots are a good middle: rows that share a prefix want few, as only what an earlier row of
    the slot computed is reused. It gives no logprobs of prompts, so it cannot score.
    """
    import socket
    import subprocess
    import urllib.error
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    rows = job["rows"]
    if not all(row["max_tokens"] for row in rows):
        raise SystemExit("  llama.cpp: its server gives no logprobs of prompts")
    slots = min(len(rows), SLOTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [
        str(Path(sys.prefix) / "bin/llama-server"),
        "--port",
        address.rpartition(":")[2],
    ]
    command += ["--model", str(Path(job["llama.cpp"]) / "model.gguf"), "--offline"]
    command += ["--parallel", str(slots), "--threads", str(os.cpu_count() or 1)]
    # it stops one token before a slot is full
    each = (max(map(_length, rows)) // 256 + 1) * 256
    command += ["--ctx-size", str(slots * each), "--log-verbosity", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answer(row: dict[str, Any]) -> list[int]:
        asked = {
            "prompt": row["prompt"],
            "n_predict": row["max_tokens"],
            "top_k": 0,
            "min_p": 0,
        }
        asked |= {"temperature": row["temperature"], "top_p": row["top_p"]}
        asked |= {"ignore_eos": True, "cache_prompt": True, "return_tokens": True}
        with urllib.request.urlopen(
            f"{address}/completion", json.dumps(asked).encode()
        ) as reply:
            return list(json.load(reply)["tokens"])

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/health"):
                return True
        except urllib.error.URLError:  # no answer yet, or 503 while it loads
            return False

    try:
        while not is_ready():
            if server.poll() is not None:
                raise SystemExit(
                    f"  llama.cpp: its server ended with status {server.returncode}"
                )
            time.sleep(0.05)
        ready_s = time.perf_counter() - STARTED_S
        started = time.perf_counter()
        with ThreadPoolExecutor(len(rows)) as threads:
            answers = list(threads.map(answer, rows))
        run_s = time.perf_counter() - started
    finally:
        server.terminate()
        server.wait()
    return _result(ready_s, job, answers, run_s)


def _how_to_draw(job: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers and OpenVINO call it; all rows draw alike."""
    row = job["rows"][0]
    if row["temperature"] == 0:
        return {"do_sample": False}
    # transformers would keep the 50 best as it comes.
    return {"do_sample": True, "top_k": 0} | {
        name: row[name] for name in ("temperature", "top_p")
    }


def _length(row: dict[str, Any]) -> int:
    return len(row["prompt"]) + int(row["max_tokens"])


def _batches(rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the rows' numbers, sorted by length, 32 a batch."""
    order = sorted(range(len(rows)), key=lambda i: _length(rows[i]))
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


def _result(
    ready_s: float, job: dict[str, Any], answers: list[Any], run_s: float | None = None
) -> dict[str, Any]:
    """Return what is printed; without run_s, all time since the model was ready counts."""
    if run_s is None:
        run_s = time.perf_counter() - STARTED_S - ready_s
    sample = [answer[:8] for answer in answers[:4]]
    tokens = sum(
        len(a) for a, r in zip(answers, job["rows"], strict=True) if r["max_tokens"]
    )
    return {"ready_s": ready_s, "run_s": run_s, "tokens": tokens, "sample": sample}


SIDES = {
    "transformers": run_generate,
    "generate_batch": run_generate_batch,
    "vllm": run_vllm,
    "openvino": run_openvino,
    "openvino-dynamic": run_openvino_dynamic,
    "ctranslate2": run_ctranslate2,
    "llama.cpp": run_llama_cpp,
}

if __name__ == "__main__":
    answer = SIDES[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)
