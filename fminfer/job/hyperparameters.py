"""Request parameters on the command line, under the old FM Inference's names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fminfer.core.options import Options, WholeTexts, option, options_of

_option = partial(option, group="Made-up requests and --prompt", commands=("run",))


@dataclass(frozen=True)
class Hyperparameters(Options):
    """The flags that set request parameters; None, () and False: not given."""

    is_overwriting: bool = _option(
        False,
        "With input: the hyperparameters that follow replace each line's own.",
        flags=("--overwrite-request-args",),
    )
    input_seq_length: int | None = _option(
        None,
        "Without input: make prompts up, each of this many random tokens.  [default: 128]",
        least=1,
        is_range=True,
    )
    batch_size: int | None = _option(
        None,
        "Without input: number of made-up requests that run at once.  [default: 8]",
        least=1,
        is_range=True,
    )
    generate_seq_length: int | None = _option(
        None,
        "max_tokens of made-up requests; no end token ends them earlier.  [default: 32]",
        least=1,
        is_range=True,
    )
    temperature: float | None = _option(
        None, "A request's temperature. Made-up ones and --prompt take 0 if it is left out."
    )
    top_p: float | None = _option(None, "A request's top_p.")
    top_k: int | None = _option(None, "A request's top_k.")
    num_completions: int | None = _option(None, "A request's n.")
    best_of: int | None = _option(
        None, "A request's best_of: candidates to draw, of which the best n are returned."
    )
    stop: WholeTexts = _option((), "A request's stop. May be repeated.")
    echo_prompt: bool = _option(False, "A request's echo.")
    top_k_per_token: int | None = _option(None, "A request's logprobs.")

    @property
    def flags(self) -> list[str]:
        """Return the flags that are given; 0 is given, and equals False."""
        return [
            each.told
            for name, each in options_of(type(self)).items()
            if name != "is_overwriting"
            and getattr(self, name) not in (None, ())
            and getattr(self, name) is not False
        ]

    @property
    def flags_of_no_line(self) -> list[str]:
        """Return the given flags that are not fields of a request."""
        return [flag for flag in self.flags if flag in ("--input-seq-length", "--batch-size")]

    @property
    def request_fields(self) -> dict[str, Any]:
        """Return the fields of a request that the given flags name."""
        named = {
            "max_tokens": self.generate_seq_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "n": self.num_completions,
            "best_of": self.best_of,
            "stop": [*self.stop] or None,
            "echo": self.echo_prompt or None,
            "logprobs": self.top_k_per_token,
        }
        return {name: value for name, value in named.items() if value is not None}
