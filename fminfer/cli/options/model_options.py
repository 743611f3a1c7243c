"""Options of the model: which one, and from where its config and tokenizer come."""

from __future__ import annotations

from fminfer.cli.options.option_groups import MODEL, in_group

_option = in_group(MODEL)

MODEL_OPTIONS = [
    _option(
        "--model-name",
        "--model",
        "model",
        help="A local folder, a Hugging Face hub id, or demo: the small model of the package.  "
        "[default: demo; a run then refuses lines that name another model]",
    ),
    _option(
        "--random-init",
        metavar="CONFIG_OR_SIZE",
        help="Random weights, for benchmarks, in the shape of a config.json, a hub id's, or a "
        "known size (llama-160m, bloom-176b, …).",
    ),
    _option(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="A tokenizer from elsewhere: a local folder or hub id.  [default: the model's own]",
    ),
    _option(
        "--model-config",
        metavar="CONFIG_OR_SIZE",
        help="A config from elsewhere: a config.json, its folder, a hub id or a known size.  "
        "[default: the model's own]",
    ),
    _option(
        "--revision",
        help="Branch, tag or commit of a hub model.  [default: its main branch]",
    ),
    _option(
        "--without-adapter",
        is_flag=True,
        help="Answer with the model alone where a LoRA adapter lies beside it. Otherwise such a "
        "folder is refused: adapters are not applied.",
    ),
    _option(
        "--max-model-len",
        type=int,
        help="Most tokens of a prompt and its completion together.  [default: the model's context]",
    ),
    _option("--max-layers", type=int, help="Use only the model's first N layers."),
]
