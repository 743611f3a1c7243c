"""Choices whose probabilities are asked for, and what a request may not say beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fminfer.contract.fields import (
    Kind,
    allow_values,
    describe_value,
    make_integer_kind,
)
from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError

MAX_LABELS = 1000
_COUNT = allow_values(
    make_integer_kind(1, MAX_LABELS),
    f"true; 1 … {MAX_LABELS}",
    (True, MAX_LABELS),
    (False, 0),
)
# How many labels are told; true: all, false: the choices are as without the field. No run
# has a limit of its own for it.
PROBABILITIES = Kind(
    lambda name, value, most: _COUNT.parse(name, value, MAX_LABELS),
    _COUNT.make_schema(MAX_LABELS),
    _COUNT.values_text,
)
# They change logits or ends. Nothing is drawn token by token here, so they mean nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ((),),
    "allowed_token_ids": ((),),
    "bad_words": ((),),
    "min_tokens": (0,),
    "stop": ((),),
    "stop_token_ids": ((),),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
}
FIELD = "structured_outputs.probabilities"


def make_label_constraint(
    choices: Constraint, num_listed: int, name: str
) -> Constraint:
    """Return the constraint that asks for the probabilities of choices.

    Args:
        num_listed: of how many labels, the likeliest, the answer tells the probability.
    """
    labels = json.loads(choices.text)
    if len(labels) > MAX_LABELS:
        raise RequestError(
            "out_of_range",
            f"{name}.choice has {len(labels):,} labels; with probabilities it may have at "
            f"most {MAX_LABELS:,}. Leave probabilities out, or ask for fewer",
            name,
        )
    text = json.dumps([labels, min(num_listed, len(labels))], ensure_ascii=False)
    return Constraint("labels", text)


def make_label_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling params that a request for label probabilities has.

    Without `temperature` its answer is the likeliest label; no default of the model counts.

    Raises:
        RequestError: it has a field that changes logits or ends.
    """
    for name, neutral in _REFUSED.items():
        if values.get(name) not in (None, *neutral):
            allowed = "empty" if neutral == ((),) else describe_value(neutral[0])
            raise _refused_field_error(name, values[name], allowed)
    if values["best_of"] > values.get("n", 1):
        raise _refused_field_error("best_of", values["best_of"], "n, or left out")
    params = {name: neutral[0] for name, neutral in _REFUSED.items()}
    return params | {"temperature": values.get("temperature", 0.0)}


def _refused_field_error(name: str, value: object, allowed: str) -> RequestError:
    shown = describe_value([*value] if isinstance(value, tuple) else value)
    return RequestError(
        "unsupported_parameter",
        f"{name} is {shown}; with {FIELD} it must be {allowed}. Remove {name}, or "
        "probabilities",
        name,
    )
