"""A synthetic run: requests of random tokens, as many and as long as the command line says."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fminfer.contract.request import parse_request
from fminfer.core.errors import RequestError, UsageError
from fminfer.core.option import (
    Option,
    Options,
    ShownCount,
    WholeTexts,
    option,
    options_of,
)
from fminfer.core.quantities import with_noun

_option = partial(option, group="Made-up requests and --prompt", commands=("run",))
# of rows that a template makes requests of, too
_field_option = partial(_option, commands=("run", "check"))


@dataclass(frozen=True)
class Hyperparameters(Options):
    """The flags that set request parameters; None, () and False: not given."""

    is_overwriting: bool = _option(
        "With input: the request parameters below replace each line's own.",
        flags=("--overwrite-request-args",),
    )
    input_seq_length: ShownCount | None = _option(
        "Without input: make up prompts of this many random tokens.  [default: 128]"
    )
    batch_size: ShownCount | None = _option(
        "Without input: number of made-up requests that run at once.  [default: 8]"
    )
    generate_seq_length: ShownCount | None = _field_option(
        "A request's max_tokens. Made-up requests generate all of them.  [default: 32 without "
        "input]",
        sets="max_tokens",
    )
    temperature: float | None = _field_option(
        "A request's temperature. Made-up ones and --prompt take 0 if it is left out.",
        sets="temperature",
    )
    top_p: float | None = _field_option("A request's top_p.", sets="top_p")
    top_k: int | None = _field_option("A request's top_k.", sets="top_k")
    num_completions: int | None = _field_option("A request's n.", sets="n")
    best_of: int | None = _field_option(
        "A request's best_of: candidates to draw, of which the best n are returned.",
        sets="best_of",
    )
    stop: WholeTexts = _field_option("A request's stop. May be repeated.", sets="stop")
    echo_prompt: bool = _field_option("A request's echo.", sets="echo")
    top_k_per_token: int | None = _field_option(
        "A request's logprobs.", sets="logprobs"
    )

    dimensions: int | None = _field_option(
        "The dimensions of a request for embeddings: keep so many numbers.",
        sets="dimensions",
    )

    def check(self) -> None:
        """Raise a UsageError if there is nothing to overwrite with."""
        if self.is_overwriting and not self.request_fields:
            raise UsageError(
                "--overwrite-request-args has nothing to overwrite with; give hyperparameters, "
                "such as --temperature 0 --generate-seq-length 20"
            )

    @property
    def flags(self) -> list[str]:
        """Return the flags that are given and say something of requests."""
        return [each.told for each in self._set_options.values()]

    @property
    def flags_of_no_line(self) -> list[str]:
        """Return the given flags that are not fields of a request."""
        return [each.told for each in self._set_options.values() if not each.sets]

    @property
    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a request that the given flags name."""
        fields = {
            each.sets: getattr(self, name)
            for name, each in self._set_options.items()
            if each.sets
        }
        return fields | ({"stop": [*self.stop]} if self.stop else {})

    @property
    def _set_options(self) -> dict[str, Option]:
        """Return the options that are given; 0 is given, and equals False."""
        return {
            name: each
            for name, each in options_of(type(self)).items()
            if name != "is_overwriting" and getattr(self, name) is not each.default
        }


# What a user of the ancestor, which ran five batches, leaves out.
PROMPT_TOKENS = 128
NEW_TOKENS = 32
BATCH_SIZE = 8
NUM_BATCHES = 5
MOST_PROMPT_TOKENS = 20_000_000  # of all requests together: some 130 MB


@dataclass(slots=True, frozen=True)
class Synthetic:
    """Which requests are made up; a UsageError says that they are too many."""

    flags: Hyperparameters
    num_batches: int = NUM_BATCHES

    def __post_init__(self) -> None:
        if self.num_requests * self.prompt_tokens > MOST_PROMPT_TOKENS:
            raise UsageError(
                f"{self.num_batches:,} batches of {self.batch_size:,} prompts of "
                f"{self.prompt_tokens:,} tokens are too many to be made up: at most "
                f"{MOST_PROMPT_TOKENS:,} tokens are. Without input, --num-iters counts batches"
            )

    @property
    def batch_size(self) -> int:
        """Return the requests that run at once."""
        return self.flags.batch_size or BATCH_SIZE

    @property
    def num_requests(self) -> int:
        return self.num_batches * self.batch_size

    @property
    def num_rows(self) -> int:
        """Return the sequences that run at once: one for a greedy request, as all are equal."""
        flags = self.flags
        num_candidates = max(flags.num_completions or 1, flags.best_of or 1)
        return self.batch_size * (num_candidates if flags.temperature else 1)

    @property
    def prompt_tokens(self) -> int:
        return self.flags.input_seq_length or PROMPT_TOKENS

    def describe(self, wall_s: float) -> str:
        """Say what ran, and how fast: a batch's share of the seconds."""
        new_tokens = self._request_fields["max_tokens"]
        return (
            f"{with_noun(self.num_batches, 'batch', 'batches')} of "
            f"{with_noun(self.batch_size, 'request')}, each a prompt of "
            f"{self.prompt_tokens:,} random tokens and {new_tokens:,} new ones; "
            f"{wall_s / self.num_batches:.2f} s a batch"
        )

    def write_requests(
        self,
        path: Path,
        *,
        vocab_size: int,
        context_length: int,
        max_logprobs: int,
        seed: int,
    ) -> None:
        """Write the requests as lines, the same for the same seed.

        Raises:
            UsageError: such requests cannot be.
        """
        self._check_lengths(context_length, max_logprobs)
        ids = random.Random(seed)
        with path.open("w") as file:
            for _ in range(self.num_requests):
                prompt = [ids.randrange(vocab_size) for _ in range(self.prompt_tokens)]
                file.write(json.dumps({"prompt": prompt} | self._request_fields) + "\n")

    @property
    def _request_fields(self) -> dict[str, Any]:
        defaults = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        return defaults | self.flags.request_fields

    def _check_lengths(self, context_length: int, max_logprobs: int) -> None:
        request = {"prompt": [0]} | self._request_fields
        try:
            parse_request(request, max_logprobs=max_logprobs)
        except RequestError as error:
            raise UsageError(
                f"a synthetic run of such requests cannot be: {error}"
            ) from error
        num_tokens = self.prompt_tokens + request["max_tokens"]
        if num_tokens > context_length:
            raise UsageError(
                f"--input-seq-length {self.prompt_tokens} and --generate-seq-length "
                f"{request['max_tokens']} are {num_tokens} tokens, and this model's context is "
                f"{context_length}; give shorter ones"
            )
