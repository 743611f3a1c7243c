"""Request parameters on the command line, under the old FM Inference's names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fminfer.core.errors import UsageError
from fminfer.core.option import Option, Options, ShownCount, WholeTexts, option, options_of

_option = partial(option, group="Made-up requests and --prompt", commands=("run",))


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
    generate_seq_length: ShownCount | None = _option(
        "A request's max_tokens. Made-up requests generate all of them.  [default: 32 without "
        "input]",
        sets="max_tokens",
    )
    temperature: float | None = _option(
        "A request's temperature. Made-up ones and --prompt take 0 if it is left out.",
        sets="temperature",
    )
    top_p: float | None = _option("A request's top_p.", sets="top_p")
    top_k: int | None = _option("A request's top_k.", sets="top_k")
    num_completions: int | None = _option("A request's n.", sets="n")
    best_of: int | None = _option(
        "A request's best_of: candidates to draw, of which the best n are returned.", sets="best_of"
    )
    stop: WholeTexts = _option("A request's stop. May be repeated.", default=(), sets="stop")
    echo_prompt: bool = _option("A request's echo.", sets="echo")
    top_k_per_token: int | None = _option("A request's logprobs.", sets="logprobs")

    def check(self) -> None:
        """Refuse to overwrite with nothing."""
        if self.is_overwriting and not self.request_fields:
            raise UsageError(
                "--overwrite-request-args has nothing to overwrite with; give hyperparameters, "
                "such as --temperature 0 --generate-seq-length 20"
            )

    @property
    def flags(self) -> list[str]:
        """Return the flags that are given and say something of requests."""
        return [each.told for each in self._given.values()]

    @property
    def flags_of_no_line(self) -> list[str]:
        """Return the given flags that are not fields of a request."""
        return [each.told for each in self._given.values() if not each.sets]

    @property
    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a request that the given flags name."""
        found = {each.sets: getattr(self, name) for name, each in self._given.items() if each.sets}
        return found | ({"stop": [*self.stop]} if self.stop else {})

    @property
    def _given(self) -> dict[str, Option]:
        """Return the options that are given; 0 is given, and equals False."""
        return {
            name: each
            for name, each in options_of(type(self)).items()
            if name != "is_overwriting" and getattr(self, name) is not each.default
        }
