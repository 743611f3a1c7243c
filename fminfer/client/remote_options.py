"""The options of a run that servers elsewhere answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fminfer.core.errors import UsageError
from fminfer.core.option import (
    Bytes,
    Count,
    Least,
    Options,
    Seconds,
    option,
    options_of,
)
from fminfer.files.remote_files import show_url

DialectName = Literal["fminfer", "vllm", "sglang", "llama-server", "ollama", "openai"]
# Options of a model that mean something to servers' lines, too.
SHARED = {
    "model",
    "prefix_cache",
    "max_logprobs",
    "strict",
    "check_model",
    "request_args",
}
Price = Annotated[float, Least(0)]
KEY_VARIABLE = "FMINFER_ENGINE_KEY"

_option = partial(option, group="Engine elsewhere", commands=("run", "serve"))
_shared_option = partial(_option, commands=("run", "check", "serve"))
_cost_option = partial(_option, commands=("run",))


@dataclass(frozen=True)
class RemoteOptions(Options):
    """Which servers answer a run's lines, and what that may cost."""

    engine: str | None = _shared_option(
        "Let servers answer, and load no model: the base URL of each, with commas between "
        f"them. They must serve the same model. {KEY_VARIABLE} has their key.",
        metavar="URL[,URL…]",
    )
    engine_api: Literal["auto", DialectName] = _shared_option(
        "What the servers are, and so what they call a request's fields.  "
        "[default: as they say]",
        default="auto",
    )
    engine_key_file: Path | None = _shared_option(
        f"A file with the servers' key, in place of {KEY_VARIABLE}."
    )
    engine_timeout_s: Seconds = _shared_option(
        "A server that sends no token of an answer for so long has failed at it.",
        default=600.0,
    )
    engine_patience_s: Seconds = _shared_option(
        "End the run when no server has answered anything for so long.", default=900.0
    )
    max_in_flight: Count = _option(
        "Most requests at a time to each server. How many it gets depends on how many "
        "answers that brings.",
        default=1024,
    )
    max_answer_bytes: Bytes = _option(
        "Most bytes of an answer; a longer one is an error of its line.",
        default=64 << 20,
    )
    price_in: Price | None = _cost_option(
        "What a million prompt tokens cost. The summary then says what the run cost."
    )
    price_out: Price | None = _cost_option("What a million generated tokens cost.")
    stop_at_cost: Price | None = _cost_option(
        "End the run, with status 75, when the answers in its outputs have cost so much. "
        "The same command with a higher limit goes on."
    )

    @property
    def urls(self) -> list[str]:
        """The servers' base URLs, without a slash at the end; /v1 is added to a host."""
        urls = [each.strip().rstrip("/") for each in (self.engine or "").split(",")]
        return [each if urlsplit(each).path else f"{each}/v1" for each in urls]

    def check(self) -> None:
        """Raise a UsageError for a URL that is none, and for a limit without prices."""
        for url in self.urls if self.engine is not None else []:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UsageError(
                    f"--engine has {show_url(url)!r}; give base URLs as in "
                    "http://host:8000/v1, with commas between them"
                )
            if parts.username or parts.password or parts.query:
                raise UsageError(
                    f"--engine {show_url(url)} holds a password or a query, which others "
                    f"would see. Give the key by {KEY_VARIABLE} or --engine-key-file"
                )
        if self.stop_at_cost is not None and self.price_in is None is self.price_out:
            raise UsageError(
                "--stop-at-cost needs --price-in or --price-out: what a million tokens cost"
            )


def check_no_model_flags(*tables: Options) -> None:
    """Raise a UsageError for options of a model, which no server hears of."""
    for table in tables:
        for name, each in options_of(type(table)).items():
            if name not in SHARED and getattr(table, name) != each.default:
                raise UsageError(
                    f"{each.told} is of a model that is loaded here, and --engine has "
                    "servers answer. Leave one of the two out"
                )
