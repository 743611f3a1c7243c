"""Request parameters on the command line, under the old FM Inference's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True, frozen=True)
class Hyperparameters:
    """The flags that set request parameters; None, () and False: not given."""

    input_seq_length: int | None = None  # tokens of a made-up prompt
    batch_size: int | None = None  # made-up requests that run at once
    generate_seq_length: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    num_completions: int | None = None
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    echo_prompt: bool = False
    top_k_per_token: int | None = None

    @property
    def flags(self) -> list[str]:
        """Return the flags that are given."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        # 0 is given, and equals False.
        given = [name for name, v in values.items() if not (v is None or v is False or v == ())]
        return [f"--{name.replace('_', '-')}" for name in given]

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
