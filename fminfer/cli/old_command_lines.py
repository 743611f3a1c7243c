"""What only old command lines and those of other tools need: names, start lines, .py files.

EnergonAI's services have their keys in a Python file: model_class = opt_125M,
tp_init_size = 2, … Or they start with --name M --tp 8 --http_host H --http_port 7070
--dtype fp16 --max_batchsize 4 --random_init True --random_model_size 7b1
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fminfer.cli.config_keys import list_file_keys, translate_keys
from fminfer.cli.flags import GroupedOption
from fminfer.cluster.resources import SubmitOptions
from fminfer.cluster.slurm_and_lsf import split_old_job_name
from fminfer.core.errors import UsageError
from fminfer.files.input_models import describe_model, name_model

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
    "ngl n-gpu-layers gpu-layers device-map": (
        "--device cuda: all layers of a rank are on its GPU"
    ),
    "enforce-eager": "--kernels off for plain torch",
    "resume force overwrite": "--restart to answer anew; the same command goes on by itself",
    "tp tp-size num-shard": "--tensor-parallel-size",
    (
        "max-tokens max-new-tokens n-predict max-length"
    ): "--generate-seq-length for --prompt. A line "
    "has its own max_tokens; with --overwrite-request-args the flag counts in its place",
    "temp": "--temperature for --prompt; each line has its own",
    "n num-return-sequences": "--num-completions for --prompt; each line has its own n",
    "min-p frequency-penalty presence-penalty repetition-penalty logit-bias ignore-eos logprobs "
    "grammar system-prompt": "It belongs into each line, as docs/contract.md says",
    "quantization load-in-8bit": "--quantize int8 (or int4)",
    "load-in-4bit": "--quantize int4",
    (
        "lora-modules enable-lora lora lora-path adapter peft"
    ): "Adapters are not applied; merge it by "
    "peft's merge_and_unload, and give that folder by --model-name",
    "speculative-config draft-model": "There is no speculative decoding; leave the flag out",
    "guided-decoding-backend": "There is one, llguidance; leave the flag out",
    "trust-remote-code": "Code of a model's folder is never run; leave the flag out",
    "tokenizer-mode load-format": "The model's own files tell it; leave the flag out",
    "cpu-offload-gb": "--offload auto",
    "swap-space": "Keys and values are not moved to other memory; leave the flag out",
    "enable-prefix-caching enable-chunked-prefill": "It is always on; leave the flag out",
    "download-dir cache-dir": "The variable HF_HOME says where models of the hub are kept",
    "tasks num-fewshot model-args": (
        "docs/running.md (Clients) tells how lm-eval runs with fminfer"
    ),
}
FLAGS = {
    name: f"Give {text}" if text.startswith("--") else text
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


def unknown_option_error(
    error: click.NoSuchOption, words: list[str], commands: Mapping[str, click.Command]
) -> click.UsageError:
    """Return the error for an unknown option, with what to type instead.

    click names only the -t of -tp; the words have the rest.
    """
    typed = error.option_name
    if not typed.startswith("--"):
        typed = next((w.split("=")[0] for w in words if w.startswith(typed)), typed)
    name = typed.lstrip("-").replace("_", "-")
    ctx = error.ctx
    order = ("run", *commands)
    assert ctx is not None, "click tells where it met the flag"
    text = FLAGS.get(name, "") if _has_flag(ctx.command, "--model-name") else ""
    text = f"Give --{name}" if _has_flag(ctx.command, f"--{name}") else text
    if not (text or any(each.startswith(typed) for each in error.possibilities or ())):
        owner = next((o for o in order if _has_flag(commands[o], f"--{name}")), None)
        text = f"It is a flag of fminfer {owner}" if owner else ""
        if owner and ctx.command.name == "submit":
            text += "; give flags of run behind --"
    foreign = [
        f for f in re.findall("--[a-z-]+", text) if not _has_flag(ctx.command, f)
    ]
    if foreign:
        owner = next(
            o for o in order if all(_has_flag(commands[o], f) for f in foreign)
        )
        text += f" ({', '.join(foreign)}: of fminfer {owner})"
    return (
        click.UsageError(f"No such option {typed!r}. {text}.", ctx) if text else error
    )


def _has_flag(command: click.Command, flag: str) -> bool:
    return any(flag in (*param.opts, *param.secondary_opts) for param in command.params)


def describe_unknown_command(name: str) -> str:
    """Return what to type for a command of another tool, or for a file; or an empty text."""
    if model := name_model(name):
        return describe_model(name, model)
    return (
        f"It is: fminfer run {name}" if os.path.exists(name) else COMMANDS.get(name, "")
    )


# Of EnergonAI's files: where its own processes met, and how it made its engine.
OLD_SERVER_KEYS = ("host", "port", "backend", "engine_server", "model_type")


def describe_python_config(path: Path) -> str:
    """Return the message that refuses a Python file, with its values in TOML."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"{path} is no TOML, and no Python either: {error}"
    toml = path.with_suffix(".toml")
    text = "\n".join(_make_toml_lines(tree))
    return (
        f"{path} is Python, which is never executed. Write this into {toml}, and give --config "
        f"{toml}:\n\n{text}\n"
    )


def _make_toml_lines(tree: ast.Module) -> Iterator[str]:
    """Write each assignment under our name of its key, or as a comment with the reason."""
    values: dict[str, object] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], ast.Name
        ):
            continue
        key = node.targets[0].id
        source = " ".join(ast.unparse(node.value).split())
        value = _parse_literal(node.value)
        reason = ""
        if key in OLD_SERVER_KEYS:
            reason = "of EnergonAI's own processes, not needed here"
        elif key not in list_file_keys():
            reason = "not known here"
        elif value is None:
            reason = "an expression; write what it gives"
        if reason:
            yield f"# {key} = {source}: {reason}"
            continue
        try:
            translate_keys({key: value}, str)
            values[key] = value
        except UsageError as error:
            yield f"# {error}"
    for entry in translate_keys(values, str):
        yield f"{entry.key.replace('_', '-')} = {_format_toml(entry.value)}"


def _parse_literal(node: ast.expr) -> str | int | float | list[object] | None:
    """Return a literal's value; a name, such as opt_125M, as text; None: an expression."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, str | int | float) for item in items)
    return value if is_plain else None


def _format_toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    # of text, numbers and booleans TOML is the same
    return json.dumps(value, ensure_ascii=False)


DEFAULT_SIZE = "560m"  # of a random model
_option = partial(GroupedOption, group="Old command lines", hidden=True)

OLD_SERVE_OPTIONS = [
    _option(
        ["--config_file", "config"], expose_value=False, help="The same as --config."
    ),
    _option(
        ["--name", "old_name"], help="The same as --model-name, or as --tokenizer."
    ),
    _option(
        ["--random_init", "old_random_init"], type=bool, help="True: --random-init."
    ),
    _option(
        ["--random_model_size", "old_random_model_size"], help="Of --random_init True."
    ),
]


def apply_old_serve_flags(ctx: click.Context) -> list[str]:
    """Set today's parameters to what MODEL and the old flags mean; return notices."""
    names = ("model_argument", "old_name", "old_random_init", "old_random_model_size")
    model, name, is_random, size = (ctx.params.pop(each) for each in names)
    if model is not None:
        _set_parameter(ctx, "model", model, "")
    if is_random:
        _set_parameter(ctx, "random_init", size or DEFAULT_SIZE, "--random_model_size ")
        _set_parameter(ctx, "tokenizer", name or ctx.params["tokenizer"], "--name ")
        _set_parameter(ctx, "model", None, "--random_init True")
    elif name is not None:
        _set_parameter(ctx, "model", name, "--name ")
        _set_parameter(ctx, "random_init", None, "--name")
    if size is not None and not is_random:
        return ["--random_model_size means nothing without --random_init True"]
    return []


def _set_parameter(ctx: click.Context, target: str, value: Any, old: str) -> None:
    """Set a parameter over what a file or a variable says.

    Args:
        old: the old flag, which errors show before the value.
    """
    typed = ctx.params[target]
    source = ctx.get_parameter_source(target)
    if source is ParameterSource.COMMANDLINE and typed != value:
        option = next(param for param in ctx.command.params if param.name == target)
        flag = option.opts[0]
        contradiction = f"{old} and {flag}"
        if value is not None:
            contradiction = f"{old}{value} and {flag} {typed}"
        raise click.UsageError(
            f"{contradiction} contradict each other; give {flag} alone", ctx
        )
    ctx.params[target] = value
    if value is not None:
        ctx.set_parameter_source(target, ParameterSource.COMMANDLINE)


def parse_old_job_name(options: SubmitOptions, job_name: str) -> SubmitOptions:
    """Return the options with the name and the files that an old job's name holds."""
    if (parts := split_old_job_name(job_name)) is None:
        raise UsageError(
            f"--job-name {job_name}: it must be lsf_NAME#PATH, PATH being the files to answer"
        )
    if options.name is not None or options.infer_data:
        raise UsageError(
            "--job-name lsf_NAME#PATH says --name and --infer-data; leave these out"
        )
    return replace(
        options,
        name=parts[0],
        infer_data=(parts[1],),
        scheduler=options.scheduler or "lsf",
    )
