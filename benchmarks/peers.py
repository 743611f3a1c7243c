#!/usr/bin/env python
"""fminfer beside its peers: the same model, the same rows, in turns.

The workloads are those of against_transformers.py, on a random-init model that is
written to disk once. transformers runs with this Python; vLLM, OpenVINO GenAI, CTranslate2 and
llama.cpp's server where `make_peers.sh FOLDER` has made their virtual environments; the
last three get the checkpoint converted, once. Every turn is a process of its own. "run"
is the answering alone, "job" is from the start of the process to its end. The machine's
roof, a product and a read, is measured between the turns; "limit" is the least time
that a run could take at it (limit.py). A side that cannot answer a workload, or convert
the model, says why and has a – there.

    benchmarks/make_peers.sh ~/peers
    python benchmarks/peers.py --peers ~/peers --workload a --workload b --workload c --repeats 3
    python benchmarks/peers.py --model qwen3-0.5b --workload a --dtype bfloat16
    python benchmarks/peers.py --peers ~/peers --busy 1 --cpu avx2
    python benchmarks/peers.py --device cuda --model llama-8b --workload 512x512+128 \\
        --dtype bfloat16 --side fminfer --side generate_batch

A table comes first, one JSON line last; `--plot` draws the run times.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent
# the package beside this file, whether it is installed or not
sys.path.insert(0, str(ROOT))

from against_transformers import make_workload  # noqa: E402
from limit import Roof, least_s, measure_roof  # noqa: E402
from other_work import BUILD, describe, other_work  # noqa: E402

from fminfer.core.errors import UsageError  # noqa: E402
from fminfer.machine import processor  # noqa: E402
from fminfer.models.known_sizes import SIZES  # noqa: E402

COLOURS = {
    "fminfer": "#4f86b8",
    "transformers": "#c9b458",
    "generate_batch": "#a46fb0",
    "vllm": "#7ba05b",
    "openvino": "#e8983e",
    "openvino-dynamic": "#f2c28f",
    "ctranslate2": "#b8604f",
    "llama.cpp": "#6b6b6b",
}
CONVERTERS = {
    "openvino": "{home}/bin/optimum-cli export openvino --model {model} "
    "--task text-generation-with-past --weight-format {weights} {target}",
    "ctranslate2": "{home}/bin/python {here}/peer_converters.py {side} {model} {target} {dtype}",
    "llama.cpp": "{home}/bin/python {here}/peer_converters.py {side} {model} {target} {kind}",
}
# --bits → --weight-format of optimum-cli, and llama.cpp's form of nearly the same bits.
BITS = {"int8": ("int8", "Q8_0"), "int4": ("int4", "Q4_0")}
MORE_SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.5b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    },
    "bloom-small": {  # 24 × 1024
        "model_type": "bloom",
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 32000,
    },
    "llama-8b": {  # Llama 3's shape
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "llama-tiny": {  # to try this program itself
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 32000,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "opt-small": {"model_type": "opt", "vocab_size": 32000},  # 12 × 768
    "qwen3-moe": {  # 12 × 768, each token has 2 of 16 experts
        "model_type": "qwen3_moe",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "vocab_size": 32000,
        "eos_token_id": None,
    },
}


def write_model(folder: Path, size: str, dtype: str, device: str) -> None:
    """Write a random-init checkpoint and a tokenizer of bytes and fillers, once."""
    if any(folder.glob("model*.safetensors")):
        return
    fields = dict((SIZES | MORE_SIZES)[size])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        )
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"<filler {i}>" for i in range(config.vocab_size - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        folder
    )
    model.save_pretrained(folder)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()  # the sides are to find it free


def convert(
    side: str, peers: Path, folder: Path, dtype: str, bits: str = ""
) -> float | None:
    """Convert the checkpoint into folder/SIDE once; return the seconds, None if it can't."""
    target = folder / f"{side}{bits}"
    weights, form = BITS.get(bits, ("fp16", dtype))
    took = target / "took_s"
    if not took.exists():
        target.mkdir(exist_ok=True)
        names = {"home": peers / side, "here": HERE, "side": side, "dtype": dtype}
        names |= {"model": folder, "target": target, "weights": weights, "kind": form}
        command = [word.format_map(names) for word in CONVERTERS[side].split()]
        started = time.perf_counter()
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            return None
        took.write_text(str(time.perf_counter() - started))
    return float(took.read_text())


def run_fminfer(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Answer the rows with the command, as a user would."""
    rows = folder / "rows.jsonl"
    output = folder / "out.jsonl"
    with rows.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in job["rows"])
    is_gguf = job.get("is_gguf", False)
    bits = job.get("bits", "")
    model = f"{job['llama.cpp']}/model.gguf" if is_gguf else job["model"]
    command = [sys.executable, "-m", "fminfer", "run", str(rows), "--model-name", model]
    if bits and not is_gguf:
        command += ["--quantize", bits]
    command += ["--output", str(output), "--restart", "-q", "--dtype", job["dtype"]]
    command += ["--device", job["device"]]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(
        [*command, "--stats", str(folder / "stats.json")], check=True, env=environ
    )
    stats = json.loads((folder / "stats.json").read_text())
    assert stats["num_errors"] == 0
    return {
        "ready_s": stats["start_to_ready_s"],
        "run_s": stats["wall_s"],
        "tokens": stats["completion_tokens"],
        "sample": [
            _sample(json.loads(line)) for line in output.read_text().splitlines()[:4]
        ],
    }


def _sample(record: dict[str, Any]) -> list[Any]:
    (choice,) = record["result"]["choices"]
    if record["request"]["max_tokens"]:
        return list(choice["token_ids"][:8])
    return list(choice["logprobs"]["token_logprobs"][1:9])


def run_peer(
    python: str, side: str, job: dict[str, Any], folder: Path
) -> dict[str, Any] | None:
    """Answer the rows in a process of the peer's; return None where it cannot, and has
    said why."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [python, str(HERE / "peer_sides.py"), side, str(path)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    # a pipe stays open as long as vLLM's workers
    with (folder / "peer.out").open("w+b") as out:
        process = subprocess.Popen(
            command, stdout=out, env=environ, start_new_session=True
        )
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those that outlive it
        out.seek(0)
        lines = out.read().splitlines()
    if status != 0 or not lines:
        print(f"  {side} ended with status {status}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def find_sides(
    peers: Path | None, wanted: tuple[str, ...], device: str = "cpu"
) -> dict[str, str]:
    """Return the sides that can run here, each with its Python; generate_batch if asked for."""
    sides = {"fminfer": sys.executable, "transformers": sys.executable}
    if "generate_batch" in wanted:
        sides["generate_batch"] = sys.executable
    for name in ("vllm", *(CONVERTERS if device == "cpu" else ())):
        python = peers / name / "bin/python" if peers else None
        if python is not None and python.exists():
            sides[name] = str(python)
    return {
        name: python for name, python in sides.items() if not wanted or name in wanted
    }


def measure(
    workload: str,
    sides: dict[str, str],
    job: dict[str, Any],
    folder: Path,
    repeats: int,
    busy: str = "0",
) -> dict[str, dict[str, Any]]:
    """Run all sides in turns, each beside other work; return the medians of those that can."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name in list(found):
            with other_work(busy):
                started = time.perf_counter()
                if name == "fminfer":
                    result = run_fminfer(job, folder)
                else:
                    result = run_peer(sides[name], name, job, folder)
                job_s = time.perf_counter() - started
            if result is None:
                del found[name]
                continue
            result["job_s"] = job_s
            found[name].append(result)
            print(
                f"  {workload} {name:<13} run {result['run_s']:7.1f} s, job "
                f"{result['job_s']:7.1f} s  {result['sample'][0][:3]}",
                file=sys.stderr,
                flush=True,
            )
    return {
        name: {
            key: statistics.median(r[key] for r in results)
            for key in ("run_s", "job_s", "ready_s")
        }
        | {"runs": [r["run_s"] for r in results], "sample": results[-1]["sample"]}
        for name, results in found.items()
    }


def draw(results: dict[str, dict[str, dict[str, Any]]], title: str) -> str:
    """Return an SVG picture of the run times, a group of bars a workload."""
    left = 120
    width = 560
    bar = 22
    longest = max(
        side["run_s"] for sides in results.values() for side in sides.values()
    )
    out = [f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>']
    y = 40
    for workload, sides in results.items():
        out.append(f'<text x="8" y="{y + 14}">workload {escape(workload)}</text>')
        y += 22
        for name, side in sides.items():
            wide = side["run_s"] / longest * width
            out.append(f'<text x="20" y="{y + 15}">{name}</text>')
            out.append(
                f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{bar - 4}" '
                f'fill="{COLOURS[name]}"/>'
            )
            out.append(
                f'<text x="{left + wide + 6:.1f}" y="{y + 14}">{side["run_s"]:.1f} s</text>'
            )
            y += bar
        y += 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{y}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" '
        'fill="white"/>\n' + "\n".join(out) + "\n</svg>\n"
    )


def _cells(side: dict[str, Any] | None) -> str:
    return (
        f"{side['run_s']:14.1f}{side['job_s']:9.1f}" if side else f"{'–':>14}{'–':>9}"
    )


def make_rows(workload: str, scale: float) -> list[dict[str, Any]]:
    """Return the rows of a workload by its name."""
    # of the BLOOM inference scripts
    if match := re.fullmatch(r"batch-(\d+)", workload):
        prompts = [[40 + (i + j) % 200 for j in range(6)] for i in range(int(match[1]))]
        return [{"prompt": ids, "max_tokens": 100} for ids in prompts]
    if match := re.fullmatch(r"(\d+)x(\d+)\+(\d+)", workload):
        size, num_in, num_out = map(int, match.groups())
        rng = random.Random(2026)
        prompts = [[rng.randrange(32000) for _ in range(num_in)] for _ in range(size)]
        return [{"prompt": ids, "max_tokens": num_out} for ids in prompts]
    if workload not in ("a", "b", "c"):
        raise click.BadParameter(
            f"{workload}: a, b, c, batch-N or ROWSxIN+OUT, as 512x512+128"
        )
    return make_workload(workload, scale)


def check_busy(context: click.Context, option: click.Parameter, value: str) -> str:
    """Take a number of processes, or `build`."""
    if value == BUILD or (value.isascii() and value.isdigit()):
        return value
    raise click.BadParameter(f"{value}: a number of processes, or {BUILD}")


def use_processor(name: str | None) -> None:
    """Hold all sides, and what this process measures, to the units of a lesser processor."""
    if name is not None:
        os.environ[processor.VARIABLE] = name
    try:
        # by variables; torch, oneDNN and MKL read them at first use
        processor.cap_libraries()
    except UsageError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=["a"],
    show_default=True,
    help="a, b, c, batch-N (N rows of 6 tokens, 100 new ones), or ROWSxIN+OUT, as 512x512+128.",
)
@click.option("--model", default="llama-160m", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--device", default="cpu", show_default=True, help="Of all sides: cpu or cuda."
)
@click.option(
    "--peers", type=click.Path(path_type=Path), help="Folder of virtual environments."
)
@click.option(
    "--side", "wanted", multiple=True, help="Only these.  [default: all there are]"
)
@click.option(
    "--bits",
    type=click.Choice(["", *BITS]),
    default="",
    help="Of weights: --quantize of fminfer, OpenVINO's weight format, llama.cpp's "
    "Q8_0 or Q4_0. "
    "OpenVINO does not quantize activations then; the side openvino-dynamic does.",
)
@click.option(
    "--gguf",
    "is_gguf",
    is_flag=True,
    help="fminfer runs the file of llama.cpp, with --bits.",
)
@click.option(
    "--temperature", default=0.0, show_default=True, help="Of rows that generate."
)
@click.option("--top-p", default=1.0, show_default=True, help="Of rows that generate.")
@click.option("--repeats", default=1, show_default=True)
@click.option(
    "--busy",
    default="0",
    show_default=True,
    callback=check_busy,
    help="N processes compute beside each turn; or build: four compile C++.",
)
@click.option(
    "--cpu",
    type=click.Choice([*processor.LEVELS, processor.NATIVE]),
    help="Stand for a lesser processor: fminfer, torch, oneDNN and MKL, and with them "
    "the peers. "
    "OpenVINO's products obey (workload b took 1.7 times as long on a Zen 5 with avx2); "
    "whether its attention does is not known.",
)
@click.option("--scale", default=1.0, show_default=True, help="Share of the rows.")
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/tmp/fminfer-peers")
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the run times, as SVG."
)
def main(
    workloads: tuple[str, ...],
    model: str,
    dtype: str,
    device: str,
    peers: Path | None,
    wanted: tuple[str, ...],
    bits: str,
    is_gguf: bool,
    temperature: float,
    top_p: float,
    repeats: int,
    busy: str,
    cpu: str | None,
    scale: float,
    folder: Path,
    plot: Path | None,
) -> None:
    """Time all sides and print them beside each other."""
    use_processor(cpu)
    folder = folder / f"{model}-{dtype}"
    write_model(folder, model, dtype, device)
    sides = find_sides(peers, wanted, device)
    job: dict[str, Any] = {"model": str(folder), "dtype": dtype, "device": device}
    job |= {"bits": bits, "is_gguf": is_gguf}
    able = dict(sides)
    for name in CONVERTERS:
        if name in sides and peers is not None:
            took_s = convert(name, peers, folder, dtype, bits)
            if took_s is None:
                print(f"  {name}: cannot convert the model", file=sys.stderr)
                del able[name]
                continue
            job[name] = str(folder / f"{name}{bits}")
            print(f"  {name}: converted once, {took_s:.0f} s", file=sys.stderr)
    if is_gguf and "llama.cpp" not in job:
        raise click.ClickException(
            "--gguf needs llama.cpp's environment, which makes the file"
        )
    if bits and "openvino" in able:
        able["openvino-dynamic"] = sides["openvino-dynamic"] = able["openvino"]
    results = {}
    roofs = list[Roof]()
    limits = dict[str, float]()
    for workload in workloads:
        how = {"temperature": temperature, "top_p": top_p}
        how |= {"ignore_eos": True, "return_token_ids": True}
        job["rows"] = [row | how for row in make_rows(workload, scale)]
        results[workload] = measure(workload, able, job, folder, repeats, busy)
        roofs.append(measure_roof(dtype, device))
        limits[workload] = least_s(str(folder), dtype, job["rows"], roofs[-1])
    gemm = statistics.median(roof.flop for roof in roofs) / 1e9
    read = statistics.median(roof.bytes for roof in roofs) / 1e9
    cpu = os.environ.get(processor.VARIABLE) or processor.NATIVE
    print(
        f"\n{model}, {dtype}, weights {bits or dtype}, processor {cpu}, {describe(busy)}, "
        f"medians of {repeats};",
        end=" ",
    )
    print(f"roof {gemm:.0f} GFLOP/s, {read:.0f} GB/s")
    names = "".join(f"{w:>14}{'job':>9}" for w in results)
    print(f"{'seconds':14}{names}")
    for name in sides:
        print(f"{name:14}" + "".join(_cells(r.get(name)) for r in results.values()))
    print(f"{'limit':14}" + "".join(f"{limits[w]:14.1f}{'':9}" for w in results))
    if plot is not None:
        plot.write_text(draw(results, f"{model}, {dtype}: seconds a run"))
    summary = {
        "model": model,
        "dtype": dtype,
        "gemm_gflops": gemm,
        "read_gb_per_s": read,
    }
    summary |= {
        "device": device,
        "bits": bits,
        "is_gguf": is_gguf,
        "limit_s": limits,
        "busy": busy,
        "cpu": cpu,
    }
    summary |= {"temperature": temperature, "top_p": top_p}
    print(json.dumps(summary | {"workloads": results}))


if __name__ == "__main__":
    main()
