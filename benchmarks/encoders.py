#!/usr/bin/env python
"""Models with an encoder beside their peers, in turns: each turn is a process of its own.

t5: T5 of 12 + 12 × 512, 64 rows of 16–191 tokens in and 16–128 out, greedy: fminfer,
transformers' `generate` (sorted, batches of 32), CTranslate2 on the same weights. bert:
5,000 texts of 5–400 tokens through a BERT-base shape to vectors: fminfer,
sentence-transformers, ONNX Runtime, OpenVINO. Models are random. A peer runs where this
Python, or a folder of `--packages`, has it.

    python benchmarks/encoders.py t5 --repeats 3 --packages /tmp/ctranslate2
    python benchmarks/encoders.py bert --dtype bfloat16 --side fminfer --side
    sentence-transformers

"run" is the answering alone, "job" is from the start of the process to its end. A table comes
first, one JSON line last.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent.resolve()
SHAPES: dict[str, dict[str, Any]] = {
    "t5": {
        "model_type": "t5",
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 12,
    }
    | {
        "num_decoder_layers": 12,
        "num_heads": 8,
        "vocab_size": 32128,
        "eos_token_id": None,
    }
    | {"decoder_start_token_id": 0},
    "bert": {"model_type": "bert", "vocab_size": 30522},
}
SIDES = {
    "t5": ("fminfer", "transformers", "ctranslate2"),
    "bert": ("fminfer", "sentence-transformers", "onnxruntime", "openvino"),
}
BATCH = 32


def make_prompts(workload: str, scale: float) -> list[tuple[list[int], int]]:
    """Return (ids, tokens to draw) of each row."""
    rng = random.Random(0)
    if workload == "t5":
        lengths = [
            (rng.randint(16, 191), rng.randint(16, 128))
            for _ in range(round(64 * scale))
        ]
    else:
        lengths = [(rng.randint(5, 400), 0) for _ in range(round(5000 * scale))]
    return [([rng.randrange(1000, 30000) for _ in range(n)], new) for n, new in lengths]


def write_model(folder: Path, workload: str) -> None:
    """Write a random model, with a tokenizer whose pieces are words of its ids."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = dict(SHAPES[workload])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    is_t5 = workload == "t5"
    auto = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)
    names = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    names |= {f"t{number}": number for number in range(3, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **special
    ).save_pretrained(folder)


def words(ids: list[int]) -> str:
    return " ".join(f"t{number}" for number in ids)


def run_fminfer(job: dict[str, Any]) -> tuple[float, Any]:
    import fminfer

    sys.path.insert(0, str(ROOT))
    rows = job["rows"]
    how = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if job["workload"] == "t5":
        requests = [how | {"prompt": ids, "max_tokens": new} for ids, new in rows]
    with fminfer.Engine(job["model"], dtype=job["dtype"]) as engine:
        if job["workload"] == "bert":
            texts = [words(ids) for ids, _ in rows]
            started_s = time.perf_counter()
            vectors = engine.embed(texts)
            return time.perf_counter() - started_s, vectors[0][:4].tolist()
        started_s = time.perf_counter()
        found = {r.line.number: r.choices[0].fields for r in engine.run(requests, 1024)}
        run_s = time.perf_counter() - started_s
    return run_s, found[1]["token_ids"][:8]


def run_transformers(job: dict[str, Any]) -> tuple[float, Any]:
    import torch
    import transformers

    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        job["model"], dtype=dtype
    ).eval()
    model.generation_config.decoder_start_token_id = 0
    rows = job["rows"]
    first = None
    started_s = time.perf_counter()
    for places in batches(rows):
        longest = max(len(rows[place][0]) for place in places)
        ids = torch.zeros((len(places), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(places):
            own = torch.tensor(rows[place][0])
            ids[row, : len(own)] = own
            mask[row, : len(own)] = 1
        most = max(rows[place][1] for place in places)
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
        )
        if 0 in places:
            first = made[places.index(0), 1:9].tolist()
    return time.perf_counter() - started_s, first


def batches(rows: list[tuple[list[int], int]]) -> list[list[int]]:
    """Return rows in batches of about the same lengths, as is best for who pads."""
    order = sorted(range(len(rows)), key=lambda n: (rows[n][1], len(rows[n][0])))
    return [order[n : n + BATCH] for n in range(0, len(order), BATCH)]


def run_ctranslate2(job: dict[str, Any]) -> tuple[float, Any]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    target = f"{job['model']}-ct2-{job['dtype']}"
    if not Path(target).exists():
        TransformersConverter(job["model"]).convert(target, quantization=job["dtype"])
    translator = ctranslate2.Translator(
        target, compute_type=job["dtype"], intra_threads=2
    )
    rows = job["rows"]
    tokens = [[f"t{number}" for number in ids] for ids, _ in rows]
    translator.translate_batch(tokens[:1], beam_size=1, max_decoding_length=4)
    first = None
    started_s = time.perf_counter()
    for places in batches(rows):
        most = max(rows[place][1] for place in places)
        made = translator.translate_batch(
            [tokens[place] for place in places],
            **{
                "beam_size": 1,
                "max_decoding_length": most,
                "min_decoding_length": most,
            },
        )
        if 0 in places:
            found = made[places.index(0)].hypotheses[0][:8]
            first = [int(each[1:]) if each[1:].isdigit() else each for each in found]
    return time.perf_counter() - started_s, first


def run_sentence_transformers(job: dict[str, Any]) -> tuple[float, Any]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        job["model"], device="cpu", model_kwargs={"dtype": job["dtype"]}
    )
    model.max_seq_length = 512
    texts = [words(ids) for ids, _ in job["rows"]]
    started_s = time.perf_counter()
    vectors = model.encode(texts, batch_size=BATCH, show_progress_bar=False)
    return time.perf_counter() - started_s, vectors[0][:4].tolist()


def _padded(job: dict[str, Any], infer: Callable[..., Any]) -> tuple[float, Any]:
    """Run an exported graph over sorted batches, and take means."""
    import numpy as np

    rows = job["rows"]
    first = None
    order = sorted(range(len(rows)), key=lambda n: len(rows[n][0]))
    started_s = time.perf_counter()
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        ids = np.zeros(
            (len(places), max(len(rows[place][0]) for place in places)), np.int64
        )
        mask = np.zeros_like(ids)
        for row, place in enumerate(places):
            own = rows[place][0]
            ids[row, : len(own)] = own
            mask[row, : len(own)] = 1
        hidden = infer(ids, mask)
        vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        if 0 in places:
            first = vectors[places.index(0)][:4].tolist()
    return time.perf_counter() - started_s, first


def _export(model: str) -> str:
    """Write the graph of a model in float32 as ONNX, once."""
    import torch
    import transformers

    target = f"{model}.onnx"
    if not Path(target).exists():
        bert = transformers.AutoModel.from_pretrained(
            model, attn_implementation="eager"
        ).eval()

        class Hidden(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bert = bert

            def forward(self, ids: Any, mask: Any) -> Any:
                return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state

        ids = torch.ones((2, 8), dtype=torch.long)
        names = {
            "input_names": ["input_ids", "attention_mask"],
            "output_names": ["hidden"],
        }
        axes = {
            name: {0: "batch", 1: "tokens"}
            for name in (*names["input_names"], "hidden")
        }
        torch.onnx.export(
            Hidden(), (ids, ids), target, **names, dynamic_axes=axes, dynamo=False
        )
    return target


def run_onnxruntime(job: dict[str, Any]) -> tuple[float, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(_export(job["model"]), options)
    return _padded(
        job,
        lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[
            0
        ],
    )


def run_openvino(job: dict[str, Any]) -> tuple[float, Any]:
    import openvino

    core = openvino.Core()
    kind = "bf16" if job["dtype"] == "bfloat16" else "f32"
    hints = {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": 2}
    graph = core.compile_model(core.read_model(_export(job["model"])), "CPU", hints)
    return _padded(job, lambda ids, mask: graph([ids, mask])[0])


RUNS = {
    "fminfer": run_fminfer,
    "transformers": run_transformers,
    "ctranslate2": run_ctranslate2,
    "sentence-transformers": run_sentence_transformers,
    "onnxruntime": run_onnxruntime,
    "openvino": run_openvino,
}


def turn(
    side: str, job: dict[str, Any], packages: tuple[str, ...]
) -> dict[str, Any] | None:
    """Run one side in a process of its own; None: it cannot."""
    paths = [str(ROOT), *packages]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
    }
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--side-of", side],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        print(
            f"{side}: {(done.stderr.strip().splitlines() or ['?'])[-1]}",
            file=sys.stderr,
        )
        return None
    return json.loads(done.stdout.splitlines()[-1]) | {
        "job": time.perf_counter() - started_s
    }


@click.command()
@click.argument("workload", type=click.Choice([*SHAPES]))
@click.option("--side", "sides", multiple=True)
@click.option("--dtype", default="float32")
@click.option("--repeats", default=1)
@click.option("--scale", default=1.0, help="Of the number of rows.")
@click.option(
    "--packages", multiple=True, help="Folders in which Python looks for peers."
)
@click.option("--folder", default="/tmp/fminfer-encoders", type=Path)
def main(
    workload: str,
    sides: tuple[str, ...],
    dtype: str,
    repeats: int,
    scale: float,
    packages: tuple[str, ...],
    folder: Path,
) -> None:
    model = folder / workload
    if not model.exists():
        write_model(model, workload)
    rows = make_prompts(workload, scale)
    job = {"model": str(model), "workload": workload, "dtype": dtype, "rows": rows}
    found: dict[str, list[dict[str, Any]]] = {
        side: [] for side in sides or SIDES[workload]
    }
    for _ in range(repeats):
        for side, runs in found.items():
            one = turn(side, job, packages)
            if one is not None:
                runs.append(one)
    ours = statistics.median(run["run"] for run in found["fminfer"])
    print(f"{'':22} {'run':>8} {'job':>8} {'ours/it':>8}  first")
    for side, runs in found.items():
        if runs:
            run, whole = (
                statistics.median(each[name] for each in runs)
                for name in ("run", "job")
            )
            print(
                f"{side:22} {run:8.2f} {whole:8.2f} {ours / run:8.2f}  {runs[0]['first']}"
            )
    print(json.dumps({"workload": workload, "dtype": dtype, "sides": found}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side-of"]:
        run_s, first = RUNS[sys.argv[2]](json.loads(sys.stdin.read()))
        print(json.dumps({"run": run_s, "first": first}))
    else:
        main()
