"""What other tools call flags and commands, and what to type here: told before any guess."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import click

# Names of vLLM, llama.cpp, Hugging Face, SGLang and lm-eval -> what to give, or what to know.
_FLAGS = {
    "o output-file output-path outfile": "--output",
    "i input-file input dataset": "The file needs no flag, as in: fminfer run requests.jsonl",
    "m model-id model-path pretrained": "--model-name",
    "p": "--prompt",
    "c ctx-size max-seq-len max-total-tokens context-length": "--max-model-len",
    "t num-threads": "--threads",
    "b ubatch-size max-num-batched-tokens max-batch-prefill-tokens": "--chunk-size",
    "max-num-seqs max-batch-size max-running-requests parallel np": "--max-rows",
    "pp pp-size pipeline-parallel-size": "--pipeline-group-size",
    "num-gpus": "--world-size",
    "dp dp-size data-parallel-size": "--data-group-size",
    "gpu gpus gpu-ids": "--cuda-id",
    "kv-cache-dtype cache-type-k": "--kv-dtype",
    "torch-dtype precision bf16 half": "--dtype",
    "no-enable-prefix-caching disable-radix-cache": "--no-prefix-cache",
    "override-generation-config": "--generation-config",
    "served-model-name alias": "--served-model-name",
    "disable-log-requests uvicorn-log-level": "--log-level",
    "gpu-memory-utilization mem-fraction-static": "--budget TOKENS, the size of the KV cache",
    "ngl n-gpu-layers gpu-layers device-map": "--device cuda: all layers of a rank are on its GPU",
    "enforce-eager": "--kernels off for plain torch",
    "resume force overwrite": "--restart to answer anew; the same command goes on by itself",
    "tp tp-size num-shard": "--tensor-parallel-size",
    "max-tokens max-new-tokens n-predict max-length": "--generate-seq-length for --prompt. A line "
    "has its own max_tokens; with --overwrite-request-args the flag counts in its place",
    "temp": "--temperature for --prompt; each line has its own",
    "n num-return-sequences": "--num-completions for --prompt; each line has its own n",
    "min-p frequency-penalty presence-penalty repetition-penalty logit-bias ignore-eos logprobs "
    "system-prompt": "It belongs into each line, as docs/contract.md says",
    "quantization load-in-8bit": "--quantize int8 (or int4)",
    "load-in-4bit": "--quantize int4",
    "lora-modules enable-lora lora lora-path adapter peft": "Adapters are not applied; merge it by "
    "peft's merge_and_unload, and give that folder by --model-name",
    "speculative-config draft-model": "There is no speculative decoding; leave the flag out",
    "guided-decoding-backend grammar": "There is no constrained decoding; leave the flag out",
    "trust-remote-code": "Code of a model's folder is never run; leave the flag out",
    "tokenizer-mode load-format": "The model's own files tell it; leave the flag out",
    "cpu-offload-gb": "--offload auto",
    "swap-space": "Keys and values are not moved to other memory; leave the flag out",
    "enable-prefix-caching enable-chunked-prefill": "It is always on; leave the flag out",
    "download-dir cache-dir": "The variable HF_HOME says where models of the hub are kept",
    "tasks num-fewshot model-args": "docs/running.md (Clients) tells how lm-eval runs with fminfer",
}
FLAGS = {
    name: "Give " * text.startswith("--") + text
    for names, text in _FLAGS.items()
    for name in names.split()
}
_COMMANDS = {
    "chat": "fminfer serve has a page to chat; fminfer run --prompt TEXT answers once",
    "generate infer inference predict complete run-batch batch": "fminfer run answers files",
    "convert": "fminfer run reads a model's folder, or a GGUF file, as it is",
    "download pull": "fminfer run --model-name fetches a model of the hub",
    "version": "It is fminfer --version",
    "help": "It is fminfer --help",
    "eval evaluate": FLAGS["tasks"],
}
COMMANDS = {name: text for names, text in _COMMANDS.items() for name in names.split()}


def say_of_option(
    error: click.NoSuchOption, words: list[str], commands: Mapping[str, click.Command]
) -> click.UsageError:
    """Return the error with what to type; of -tp among the words it knows only the -t."""
    typed = error.option_name
    if not typed.startswith("--"):
        typed = next((w.split("=")[0] for w in words if w.startswith(typed)), typed)
    name, ctx = typed.lstrip("-").replace("_", "-"), error.ctx
    assert ctx is not None, "click tells where it met the flag"
    text = FLAGS.get(name, "") if _has(ctx.command, "--model-name") else ""
    text = f"Give --{name}" if _has(ctx.command, f"--{name}") else text
    if not (text or any(each.startswith(typed) for each in error.possibilities or ())):
        owner = next((o for o in ("run", *commands) if _has(commands[o], f"--{name}")), None)
        behind = "; give flags of run behind --" * (ctx.command.name == "submit")
        text = f"It is a flag of fminfer {owner}{behind}" if owner else ""
    foreign = [f for f in re.findall("--[a-z-]+", text) if not _has(ctx.command, f)]
    if foreign:
        order = ("run", *commands)
        owner = next(each for each in order if all(_has(commands[each], f) for f in foreign))
        text += f" ({', '.join(foreign)}: of fminfer {owner})"
    return click.UsageError(f"No such option {typed!r}. {text}.", ctx) if text else error


def _has(command: click.Command, flag: str) -> bool:
    return any(flag in (*param.opts, *param.secondary_opts) for param in command.params)


def say_of_command(name: str) -> str:
    """Return what to type for a command of another tool, or for a file; "": nothing is known."""
    return f"It is: fminfer run {name}" if os.path.exists(name) else COMMANDS.get(name, "")
