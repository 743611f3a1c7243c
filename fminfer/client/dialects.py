"""What servers call the fields of a request: one table, and what each has no name for.

vLLM's rows follow its /openapi.json (0.12), llama-server's were tried on one. SGLang's,
Ollama's and OpenAI's follow their documents. A field that a server would drop unseen has no
name there. docs/remote_engine.md shows the table (`scripts/field_tables.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fminfer.client.remote_options import DialectName
from fminfer.contract.endpoints import Endpoint
from fminfer.core.config import Constraint

# Counted up whenever a field is translated in another way: answers may then be others.
TRANSLATION = "2"
ALL: tuple[DialectName, ...] = get_args(DialectName)
OURS = ("fminfer",)
VLLM = (*OURS, "vllm")
ENGINES = (*VLLM, "sglang")
LOCAL = (*ENGINES, "llama-server")
HOSTED = (*ENGINES, "openai")
NOT_OLLAMA = (*LOCAL, "openai")


def _name_fields(names: Iterable[str], *fields: str) -> dict[str, frozenset[str]]:
    return dict.fromkeys(fields, frozenset(names))


_DRAWN = {
    **_name_fields(ALL, "temperature", "top_p", "max_tokens", "stop", "seed"),
    **_name_fields(ALL, "frequency_penalty", "presence_penalty"),
    **_name_fields(NOT_OLLAMA, "n", "logprobs", "logit_bias"),
    **_name_fields(LOCAL, "top_k", "min_p", "repetition_penalty", "ignore_eos"),
    **_name_fields(ENGINES, "min_tokens", "stop_token_ids", "skip_special_tokens"),
    **_name_fields(ENGINES, "include_stop_str_in_output"),
    **_name_fields(VLLM, "truncate_prompt_tokens", "truncation_side"),
    **_name_fields(VLLM, "allowed_token_ids", "bad_words", "return_token_ids"),
}
# By endpoint, the servers that have a field, most under this name.
KNOWN_FIELDS: dict[Endpoint, dict[str, frozenset[str]]] = {
    "completions": _DRAWN
    | _name_fields(ALL, "prompt")
    | _name_fields(HOSTED, "echo")
    | _name_fields(VLLM, "add_special_tokens")
    | _name_fields(OURS, "best_of", "decoder_prompt"),
    "chat": _DRAWN
    | _name_fields(ALL, "messages", "tools")
    | _name_fields(NOT_OLLAMA, "top_logprobs", "tool_choice", "parallel_tool_calls")
    | _name_fields((*HOSTED, "ollama"), "reasoning_effort")
    | _name_fields(LOCAL, "chat_template_kwargs")
    | _name_fields(ENGINES, "continue_final_message")
    | _name_fields(VLLM, "add_generation_prompt", "thinking_token_budget")
    | _name_fields(VLLM, "include_reasoning"),
    "embeddings": _name_fields(ALL, "input")
    | _name_fields(ALL, "encoding_format")
    | _name_fields((*HOSTED, "ollama"), "dimensions")
    | _name_fields(VLLM, "truncate_prompt_tokens", "add_special_tokens")
    | _name_fields(OURS, "prompt_name", "truncation_side", "normalize"),
    "score": _name_fields(VLLM, "text_1", "text_2", "queries", "documents"),
    "rerank": _name_fields(LOCAL, "query", "documents"),
    "classify": _name_fields(VLLM, "input"),
}
_SCORED: tuple[Endpoint, ...] = ("score", "rerank", "classify")
KNOWN_FIELDS |= {
    endpoint: KNOWN_FIELDS[endpoint]
    | _name_fields(VLLM, "truncate_prompt_tokens", "use_activation")
    | _name_fields(OURS, "truncation_side", "add_special_tokens", "prompt_name")
    for endpoint in _SCORED
}
# Not sent: all answers have it, or it is made of them here.
MADE_HERE = ("top_n", "return_documents")
# Other names for the same.
RENAMED: dict[tuple[DialectName, Endpoint], Mapping[str, str]] = {
    ("llama-server", "completions"): {"repetition_penalty": "repeat_penalty"},
    ("llama-server", "chat"): {"repetition_penalty": "repeat_penalty"},
    ("sglang", "completions"): {"include_stop_str_in_output": "no_stop_trim"},
    ("sglang", "chat"): {"include_stop_str_in_output": "no_stop_trim"},
    ("openai", "chat"): {"max_tokens": "max_completion_tokens"},
}
# Of these fields a server reads texts alone; llama-server drops a function unseen.
TEXT_ONLY = {("llama-server", "tool_choice"), ("ollama", "prompt")}
# Servers draw by defaults of their own, or of the model's folder, where a request does not
# say; so it says what a field's absence means here.
_WHOLE = {"temperature": 1.0, "top_p": 1.0}
_PLAIN = _WHOLE | {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
DEFAULTS: dict[DialectName, dict[str, Any]] = {
    "fminfer": _WHOLE,
    "vllm": _PLAIN,
    "sglang": _PLAIN | {"top_k": -1},
    # its penalties look back 64 tokens, unless a request says more
    "llama-server": _WHOLE
    | {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 16_384},
    "ollama": _WHOLE,
    # it has the same, and some of its models refuse both fields
    "openai": {},
}
# Others draw a token where a request wants none.
DRAWING_NONE = (*VLLM, "openai")
TITLES: dict[DialectName, str] = {
    "fminfer": "fminfer serve",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama-server": "llama-server",
    "ollama": "Ollama",
    "openai": "OpenAI's API",
}
_TEXTS = {"prompt", "messages", "input", "documents", "text_1"}
_META = re.compile(r"[\\.^$*+?{}\[\]|()]")  # of a regex
_ODD = re.compile(r"[^\w ]")  # in a literal of a grammar


@dataclass(slots=True, frozen=True)
class Dialect:
    """What one kind of server understands."""

    name: DialectName

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Fields of each request that draws, unless it says otherwise."""
        return DEFAULTS[self.name]

    def find_name(self, endpoint: Endpoint, name: str) -> str | None:
        """Return what a server calls a field of ours; None: it has no name for it."""
        if self.name not in KNOWN_FIELDS[endpoint].get(name, ()):
            return None
        return RENAMED.get((self.name, endpoint), {}).get(name, name)

    def has_endpoint(self, endpoint: Endpoint) -> bool:
        """Return whether a server has an endpoint: whether it has a name for its texts."""
        texts = KNOWN_FIELDS[endpoint].keys() & _TEXTS
        return any(self.find_name(endpoint, text) is not None for text in texts)

    def write_constraint(
        self, constraint: Constraint, endpoint: Endpoint
    ) -> dict[str, Any] | None:
        """Return the fields that hold an answer to a constraint; None: there are none."""
        kind = constraint.kind
        text = constraint.text
        if self.name == "vllm":
            return _write_structured_outputs(constraint)
        if constraint.whitespace or kind == "labels":
            return None
        if self.name == "llama-server" and kind == "choice":
            choices = (f'"{_ODD.sub(_spell, each)}"' for each in json.loads(text))
            return {"grammar": f"root ::= {' | '.join(choices)}"}
        if self.name == "sglang" and kind == "choice":
            choices = (_META.sub(r"\\\g<0>", each) for each in json.loads(text))
            return {"regex": f"({'|'.join(choices)})"}
        if kind == "grammar":  # both read GBNF, and not Lark
            names = {"llama-server": "grammar", "sglang": "ebnf"}
            is_known = self.name in names and "::=" in text
            return {names[self.name]: text} if is_known else None
        if kind == "regex" and self.name == "sglang":
            return {"regex": text}
        if kind != "json":
            return None
        schema = json.loads(text)
        if self.name == "llama-server":
            return {"json_schema": schema}
        if endpoint == "chat":
            named = {"name": "answer", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        return {"json_schema": text} if self.name == "sglang" else None


def _spell(match: re.Match[str]) -> str:
    """Spell a character out, as GBNF has it."""
    return f"\\U{ord(match[0]):08X}"


def _write_structured_outputs(constraint: Constraint) -> dict[str, Any] | None:
    """Write a constraint as vLLM has it since 0.11; not each of its backends reads
    patterns of white space."""
    if constraint.kind == "labels" or constraint.whitespace not in ("", "none"):
        return None
    is_text = constraint.kind in ("regex", "grammar")
    value = constraint.text if is_text else json.loads(constraint.text)
    ways: dict[str, Any] = {constraint.kind: value}
    if constraint.whitespace:
        ways["disable_any_whitespace"] = True
    return {"structured_outputs": ways}


DIALECTS = {name: Dialect(name) for name in ALL}
