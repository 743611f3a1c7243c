"""A model larger than memory: fminfer's --offload disk beside accelerate's disk offload.

    python benchmarks/offload.py make /tmp/m7     # a checkpoint in the shape of llama-7b
    python benchmarks/offload.py run /tmp/m7 --memory 6000000000 --rows 256 --new-tokens 8 \\
        --peer-python /tmp/peer/bin/python --peer-batch 8 --peer-batch 64

Each side is a process in a memory control group of its own, in which cached files count
too. That needs root, and cgroups of version 1 or 2. `dd` reads the model past the cache in the
same turn. The peer's time is that of `generate`, ours that of answering: neither counts loading.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

GROUPS = Path("/sys/fs/cgroup")
PEER = """
import json, sys, time, torch, transformers
folder, batch, prompt, new, dtype = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
config = transformers.AutoConfig.from_pretrained(folder)
outer = ("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb")
parts = dict.fromkeys(outer, "cpu")
parts |= {f"model.layers.{n}": "disk" for n in range(config.num_hidden_layers)}
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, device_map=parts, dtype=getattr(torch, dtype), offload_folder=sys.argv[6])
ids = torch.randint(3, config.vocab_size, (batch, prompt))
started = time.perf_counter()
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                     min_new_tokens=new, do_sample=False, pad_token_id=0)
seconds = time.perf_counter() - started
assert out.shape == (batch, prompt + new), out.shape
print(json.dumps({"seconds": seconds}))
"""


@click.group()
def main() -> None:
    """Make a model, or measure with it."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=32)
def make(folder: Path, layers: int) -> None:
    """Write a checkpoint in the shape of llama-7b, in bfloat16, a file a layer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    hidden = 4096
    inner = 11008
    vocab = 32000
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, dtype=torch.bfloat16)
        return empty.normal_(0, 0.02, generator=generator)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    homes: dict[str, str] = {}

    def put(tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{len(set(homes.values())) + 1:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        homes.update(dict.fromkeys(tensors, name))

    for number in range(layers):
        top = f"model.layers.{number}."
        own = {f"self_attn.{n}_proj": draw(hidden, hidden) for n in "qkvo"}
        own |= {f"mlp.{n}_proj": draw(inner, hidden) for n in ("gate", "up")}
        own |= {"mlp.down_proj": draw(hidden, inner), "input_layernorm": ones.clone()}
        own["post_attention_layernorm"] = ones.clone()
        put({f"{top}{name}.weight": tensor for name, tensor in own.items()})
    put(
        {
            "model.embed_tokens.weight": draw(vocab, hidden),
            "model.norm.weight": ones.clone(),
        }
    )
    put({"lm_head.weight": draw(vocab, hidden)})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class MemoryGroup:
    """A control group with a limit of memory, for one process at a time."""

    def __init__(self, limit: int) -> None:
        is_first = (GROUPS / "memory").exists()
        self._folder = GROUPS / ("memory/fminfer" if is_first else "fminfer")
        self._folder.mkdir(exist_ok=True)
        name = "memory.limit_in_bytes" if is_first else "memory.max"
        (self._folder / name).write_text(str(limit))
        self._peak = self._folder / (
            "memory.max_usage_in_bytes" if is_first else "memory.peak"
        )

    def run(self, command: list[str], **env: str) -> tuple[str, float]:
        """Run a command in the group; return its output, and the group's peak in GB."""
        if self._peak.name.startswith("memory.max_usage"):
            self._peak.write_text("0")

        def join() -> None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

        found = subprocess.run(
            command,
            preexec_fn=join,
            capture_output=True,
            text=True,
            env=os.environ | env,
        )
        if found.returncode:
            raise click.ClickException(f"{command[:3]} failed: {found.stderr[-800:]}")
        return found.stdout, int(self._peak.read_text()) / 1e9


def dd_speed(folder: Path) -> float:
    """Return how fast dd reads the model's files past the cache, in bytes a second."""
    num_bytes = 0
    started = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors"))[:12]:
        command = ["dd", f"if={file}", "of=/dev/null", "bs=16M", "iflag=direct"]
        subprocess.run(command, check=True, capture_output=True)
        num_bytes += file.stat().st_size
    return num_bytes / (time.perf_counter() - started)


def run_ours(
    group: MemoryGroup | None, model: Path, asked: Path, *more: str
) -> dict[str, Any]:
    """Answer the rows; return what the run's statistics say."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        command = [
            sys.executable,
            "-m",
            "fminfer",
            "run",
            str(asked),
            "--model-name",
            str(model),
        ]
        command += [
            "--skip-tokenizer-init",
            "--output",
            f"{folder}/out.jsonl",
            "--restart",
        ]
        command += ["--kv-dtype", "bfloat16", "--stats", str(stats), *more]
        peak = 0.0
        if group is None:
            subprocess.run(command, check=True, capture_output=True)
        else:
            peak = group.run(command)[1]
        found = json.loads(stats.read_text())
    (stage,) = found["engine"]["stages"]
    steps = stage["num_passes"] or found["engine"]["num_steps"]
    return {
        "tokens_per_s": found["completion_tokens"] / found["wall_s"],
        "run_s": found["wall_s"],
        "passes": steps,
        "waited": stage["waited_s"] / max(stage["busy_s"], 1e-9),
        "read_gb_per_s": stage["read_bytes"] / max(stage["read_s"], 1e-9) / 1e9,
        "disk_busy": stage["read_s"] / found["wall_s"],
        "peak_gb": peak,
        "other_work": found["other_work_share"],
    }


@main.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--memory", default=6_000_000_000, help="Bytes of each side's control group."
)
@click.option("--rows", default=256)
@click.option("--prompt-tokens", default=8)
@click.option("--new-tokens", default=8)
@click.option(
    "--peer-python", help="Has transformers and accelerate; without it only we run."
)
@click.option("--peer-batch", multiple=True, type=int, default=(8,))
@click.option("--peer-dtype", default="bfloat16")
@click.option(
    "--in-memory", is_flag=True, help="Also without --offload and without the limit."
)
@click.option("--turns", default=1)
@click.option("--trace", help="Where our first run writes its trace.")
def run(
    model: Path,
    memory: int,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    **more: Any,
) -> None:
    """Measure both sides in turns."""
    draw = random.Random(1)
    rows_of_ids = [
        [draw.randrange(3, 32000) for _ in range(prompt_tokens)] for _ in range(rows)
    ]
    asked = Path(tempfile.mkdtemp()) / "rows.jsonl"
    fields = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    asked.write_text(
        "".join(json.dumps({"prompt": ids} | fields) + "\n" for ids in rows_of_ids)
    )
    group = MemoryGroup(memory)
    found = []
    for turn in range(more["turns"]):
        result: dict[str, Any] = {"turn": turn, "dd_gb_per_s": dd_speed(model) / 1e9}
        traced = ("--trace", more["trace"]) if more["trace"] and not turn else ()
        result["fminfer"] = run_ours(group, model, asked, "--offload", "disk", *traced)
        if more["in_memory"]:
            result["in memory"] = run_ours(None, model, asked, "--max-rows", str(rows))
        for batch in more["peer_batch"] if more["peer_python"] else ():
            with tempfile.TemporaryDirectory() as folder:
                numbers = map(str, (batch, prompt_tokens, new_tokens))
                command = [more["peer_python"], "-c", PEER, str(model), *numbers]
                out, peak = group.run(
                    [*command, more["peer_dtype"], folder], HF_HUB_OFFLINE="1"
                )
            seconds = json.loads(out.splitlines()[-1])["seconds"]
            speed = batch * new_tokens / seconds
            result[f"accelerate, {batch} rows"] = {
                "tokens_per_s": speed,
                "peak_gb": peak,
            }
        found.append(result)
        for name, each in result.items():
            click.echo(
                f"{name:>22}  {each if not isinstance(each, dict) else _show(each)}"
            )
    click.echo(json.dumps(found))


def _show(each: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.3g}" for name, value in each.items())


if __name__ == "__main__":
    main()
