"""Names of a request's fields: unknown ones are warned of, and no wish is ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fminfer.contract.fields import show
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.core.errors import RequestError

MAX_GUESSED = 5  # of a line's unknown names: each guess takes a millisecond


@dataclass(slots=True, frozen=True)
class Neutral:
    """A field that is accepted only at values that change no answer.

    Args:
        values: these, beside null.
        remedy: what to do for what it asks for; "": nothing does it.
        ours: our name of it; "": there is none.
    """

    values: tuple[object, ...] = ()
    remedy: str = ""
    ours: str = ""

    def accepts(self, value: object) -> bool:
        """Tell whether a value changes no answer."""
        return value is None or any(type(value) is type(ok) and value == ok for ok in self.values)


# Fields that change no answer: they are for the service that stores, routes or bills a request.
RECORDED = frozenset(
    {"model", "engine", "request_type", "user", "store", "metadata", "service_tier", "prediction"}
    | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id", "priority"}
    | {"cache_salt", "cache_prompt", "guided_decoding_backend"}
)
NO_CONSTRAINT = "Constrained decoding is not there yet: ask in the prompt for the form you want"
_ONE = (1, 1.0)
_ZERO = (0, 0.0)
_CONSTRAINTS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("guided_whitespace_pattern", "structural_tag", "grammar", "json_schema"),
)
# What requests of other tools ask for and nobody here acts on, in completions and in chat.
WISHES = {
    "response_format": Neutral(({"type": "text"},), NO_CONSTRAINT),
    **{name: Neutral(("",), NO_CONSTRAINT) for name in _CONSTRAINTS},
    "allowed_token_ids": Neutral((), "logit_bias raises or lowers single tokens"),
    "bad_words": Neutral(([],), "logit_bias bans single tokens"),
    "prompt_logprobs": Neutral((), 'In completions, "echo": true with logprobs gives them'),
    "truncate_prompt_tokens": Neutral((), "A run cuts long prompts by --on-too-long"),
    "return_tokens_as_token_ids": Neutral((False,), "return_token_ids adds the ids"),
    "spaces_between_special_tokens": Neutral((True,)),
    "logits_processors": Neutral(([],)),
    "thinking_token_budget": Neutral(),
    "enable_thinking": Neutral((), 'In chat, give {"enable_thinking": …} as chat_template_kwargs'),
    "use_beam_search": Neutral((False,), "best_of returns the likeliest of several draws"),
    "num_beams": Neutral(_ONE, "best_of returns the likeliest of several draws"),
    "length_penalty": Neutral(_ONE),
    "early_stopping": Neutral((False,)),
    "do_sample": Neutral((True,), 'For the likeliest tokens, give "temperature": 0'),
    "max_new_tokens": Neutral((), ours="max_tokens"),
    "n_predict": Neutral((), ours="max_tokens"),
    "min_new_tokens": Neutral(_ZERO, ours="min_tokens"),
    "num_return_sequences": Neutral(_ONE, ours="n"),
    "stop_sequences": Neutral(([],), ours="stop"),
    "repeat_penalty": Neutral(_ONE, ours="repetition_penalty"),
    "no_repeat_ngram_size": Neutral(_ZERO),
    "penalty_alpha": Neutral(_ZERO),
    "typical_p": Neutral(_ONE),
    "tfs_z": Neutral(_ONE),
    "top_a": Neutral(_ZERO),
    "mirostat": Neutral(_ZERO),
    "xtc_probability": Neutral(_ZERO),
    "dry_multiplier": Neutral(_ZERO),
}


def check_names(
    fields: Mapping[str, Any], known: frozenset[str], *, is_strict: bool
) -> list[RowWarning]:
    """Return a warning of the fields that no parameter has the name of.

    Raises:
        RequestError: there is one, and `is_strict`.
    """
    unknown = unknown_names(fields, known)
    if unknown and is_strict:
        name = cut_name(unknown[0])
        raise RequestError(
            "unsupported_parameter",
            f"{name} is {show(fields[unknown[0]])}, and no parameter has that name"
            f"{guess(name, known)}; remove it, or run without --strict to keep it and not act on "
            "it",
            name,
        )
    if not unknown:
        return []
    names = list(map(cut_name, unknown[: MAX_NAMES + 1]))
    names[:MAX_GUESSED] = [name + guess(name, known) for name in names[:MAX_GUESSED]]
    return [RowWarning("unknown parameters are kept and not acted on", tuple(names))]


def unknown_names(fields: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Return the names that are not known, in order; a null wishes nothing."""
    return sorted(name for name in fields.keys() - known if fields[name] is not None)


def refuse_wishes(fields: Mapping[str, Any], neutral: Mapping[str, Neutral]) -> None:
    """Refuse fields whose values ask for what this version cannot do.

    Raises:
        RequestError: names the field, and what to do.
    """
    for name in sorted(neutral.keys() & fields.keys()):
        each, value = neutral[name], fields[name]
        is_greedy = name == "do_sample" and value is False and fields.get("temperature") == 0
        if is_greedy or each.accepts(value):
            continue
        values = [json.dumps(ok) for ok in each.values if not isinstance(ok, float)]
        allowed = " or ".join(["null", *values])
        if each.ours:
            text = f"{name} is {show(value)}; the name of that is {each.ours} here. Rename it"
            raise RequestError("unsupported_parameter", text, name)
        remedy = f". {each.remedy}" if each.remedy else ""
        raise RequestError(
            "unsupported_parameter",
            f"{name} is {show(value)}, and this version cannot do that; "
            f"remove {name} or set it to {allowed}{remedy}",
            name,
        )


@lru_cache(1024)  # for files with a key of their own on each line
def guess(name: str, known: frozenset[str]) -> str:
    """Ask whether the nearest known parameter was meant."""
    nearest = get_close_matches(name, known, 1, 0.8)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
