"""Options of requests: what lines of files may ask for, and what a made-up request is."""

from __future__ import annotations

from typing import get_args

import click

from fminfer.cli.options.option_groups import MADE_UP, REQUESTS, in_group
from fminfer.cli.options.value_types import WholeText
from fminfer.core.config import (
    EngineConfig,
    GenerationDefaults,
    OnTooLong,
    TokenFormat,
    ToolCallParser,
)

DEFAULTS = EngineConfig()
_option = in_group(REQUESTS)
_made_up_option = in_group(MADE_UP)

SEED_OPTION = _option(
    "--seed",
    type=int,
    default=DEFAULTS.seed,
    show_default=True,
    help="Seed of requests without one of their own, and of random weights.",
)
CHECK_MODEL_OPTION = _option(
    "--check-model",
    is_flag=True,
    default=DEFAULTS.check_model,
    help="Refuse lines whose model or engine is neither --model-name nor its last part. "
    "Without --model-name it is always on.",
)
REQUEST_OPTIONS = [
    SEED_OPTION,
    _option(
        "--max-logprobs",
        type=int,
        default=DEFAULTS.max_logprobs,
        show_default=True,
        help="Largest logprobs that a request may ask for.",
    ),
    _option(
        "--on-too-long",
        type=click.Choice(get_args(OnTooLong)),
        default=DEFAULTS.on_too_long,
        show_default=True,
        help="What to do with a prompt that leaves no room for max_tokens: refuse it, or cut its "
        "left or right end, with a warning.",
    ),
    _option(
        "--token-format",
        type=click.Choice(get_args(TokenFormat)),
        default=DEFAULTS.token_format,
        show_default=True,
        help="Spelling of logprobs.tokens: vocabulary pieces, or text. auto: text for Batch lines.",
    ),
    _option(
        "--chat-template",
        metavar="FILE",
        help="A Jinja template of chat messages.  [default: the model's own]",
    ),
    _option(
        "--tool-call-parser",
        type=click.Choice(get_args(ToolCallParser)),
        default=DEFAULTS.tool_call_parser,
        show_default=True,
        help="Form in which the model writes tool calls. auto: by its chat template. none: calls "
        "stay text.",
    ),
    _option(
        "--generation-config",
        type=click.Choice(get_args(GenerationDefaults)),
        default=DEFAULTS.generation_config,
        show_default=True,
        help="Defaults of sampling parameters: those of the OpenAI API, or the model's own from "
        "generation_config.json.",
    ),
    _option(
        "--strict",
        is_flag=True,
        default=DEFAULTS.strict,
        help="Refuse requests with unknown parameters, best_of below n and the like. Otherwise "
        "they are answered with a warning.",
    ),
    CHECK_MODEL_OPTION,
    _option(
        "--skip-tokenizer-init",
        is_flag=True,
        default=DEFAULTS.skip_tokenizer_init,
        help="Load no tokenizer. Prompts must be token ids, and answers hold token ids.",
    ),
]
# Of a synthetic run or a first try; Hyperparameters has a field for each of the later ones.
MADE_UP_OPTIONS = [
    _made_up_option(
        "--num-iters",
        "max_steps",
        type=int,
        help="Batches of made-up requests, 5 if left out. With input: stop after this many "
        "micro-batches, with exit status 1 if rows are left.  [default: no limit]",
    ),
    _made_up_option(
        "--overwrite-request-args",
        "is_overwriting",
        is_flag=True,
        help="With input: the hyperparameters that follow replace each line's own.",
    ),
    _made_up_option(
        "--input-seq-length",
        type=click.IntRange(min=1),
        help="Without input: make prompts up, each of this many random tokens.  [default: 128]",
    ),
    _made_up_option(
        "--batch-size",
        type=click.IntRange(min=1),
        help="Without input: number of made-up requests that run at once.  [default: 8]",
    ),
    _made_up_option(
        "--generate-seq-length",
        type=click.IntRange(min=1),
        help="max_tokens of made-up requests; no end token ends them earlier.  [default: 32]",
    ),
    _made_up_option(
        "--temperature",
        type=float,
        help="A request's temperature. Made-up ones and --prompt take 0 if it is left out.",
    ),
    _made_up_option("--top-p", type=float, help="A request's top_p."),
    _made_up_option("--top-k", type=int, help="A request's top_k."),
    _made_up_option("--num-completions", type=int, help="A request's n."),
    _made_up_option(
        "--best-of",
        type=int,
        help="A request's best_of: candidates to draw, of which the best n are returned.",
    ),
    _made_up_option(
        "--stop", multiple=True, type=WholeText(), help="A request's stop. May be repeated."
    ),
    _made_up_option("--echo-prompt", is_flag=True, help="A request's echo."),
    _made_up_option("--top-k-per-token", type=int, help="A request's logprobs."),
]
