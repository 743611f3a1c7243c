"""Groups requests for one file: those of one engine with the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fminfer.contract.chat_messages import count_chars
from fminfer.contract.endpoints import Endpoint, choose_endpoint
from fminfer.contract.field_table import FIELDS, LINE_FIELDS
from fminfer.contract.fields import is_integral
from fminfer.contract.json_object import dump_json
from fminfer.contract.request import DEFAULTS

# What a group's lines may differ in: nothing of it changes how tokens are drawn.
NO_HYPERPARAMETERS = LINE_FIELDS - {"model", "engine"} | {"custom_id", "id"}
# of an answer in chat that may fill the context: about what models then write
CHAT_TOKENS = 512
CHARS_PER_TOKEN = 4  # of English text, about
MAX_LENGTH = 2**32 - 1
_MAX_TOKENS_NAMES: dict[Endpoint, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
}
_TEXTS = ("input", "query", "queries", "documents", "text_1", "text_2")
MAX_DEPTH = 100  # of a hyperparameter; those that mean something have 1


@dataclass(slots=True)
class RequestGroup:
    """Requests to one endpoint of one engine with the same hyperparameters, in plainest form."""

    engine: str | None
    hyperparameters: dict[str, Any]
    endpoint: Endpoint = "completions"
    num_rows: int = 0

    @property
    def max_tokens(self) -> int:
        """How many tokens an answer has at most, or may be expected to have."""
        is_chat = self.endpoint == "chat"
        for name in _MAX_TOKENS_NAMES.get(self.endpoint, ("max_tokens",)):
            value: Any = self.hyperparameters.get(name)
            if is_integral(value) and value >= 0:
                return int(value)
        return CHAT_TOKENS if is_chat else DEFAULTS.max_tokens


class Groups:
    """Groups in the order in which they are first seen."""

    def __init__(self) -> None:
        self.seen: list[RequestGroup] = []
        self._by_key: dict[tuple[str | None, Endpoint, bytes], int] = {}
        # So that a line's fields are looked at just once.
        self._by_spelling: dict[tuple[Endpoint, bytes], int] = {}

    def add(self, fields: dict[str, Any]) -> int:
        """Count a request; return the number of its group."""
        try:
            rest = {
                name: fields[name] for name in fields if name not in NO_HYPERPARAMETERS
            }
            spelling = choose_endpoint(fields), dump_json(rest)
            number = self._by_spelling.get(spelling)
            if number is None:
                number = self._by_spelling[spelling] = self._find_group(fields)
        except RecursionError:  # nested so deep that it is no request
            number = self._find_group({})
        self.seen[number].num_rows += 1
        return number

    def _find_group(self, fields: dict[str, Any]) -> int:
        named = (fields.get(name) for name in ("engine", "model"))
        engine = next((name for name in named if isinstance(name, str) and name), None)
        group = RequestGroup(
            engine, find_hyperparameters(fields), choose_endpoint(fields)
        )
        key = (group.engine, group.endpoint, dump_json(group.hyperparameters))
        number = self._by_key.setdefault(key, len(self.seen))
        if number == len(self.seen):
            self.seen.append(group)
        return number


def find_hyperparameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters so that equal ones look equal, less those that change nothing."""
    hyperparameters = {}
    table = FIELDS[choose_endpoint(fields)]
    for name in sorted(fields.keys() - LINE_FIELDS - NO_HYPERPARAMETERS):
        value = _make_plain(fields[name])
        if name == "stop":
            value = _make_plain_stops(value)
        elif name == "echo" and is_integral(value) and value in (0, 1):
            value = bool(value)
        field = table.get(name)
        if value is not None and not (
            field and field.neutral and field.is_neutral_value(value)
        ):
            hyperparameters[name] = value
    return hyperparameters


def estimate_length(fields: dict[str, Any]) -> int:
    """Estimate the characters of a request's prompts or messages; a token id counts as four."""
    if choose_endpoint(fields) == "chat":
        return min(count_chars(fields["messages"]), MAX_LENGTH)
    names = ("prompt",) if choose_endpoint(fields) == "completions" else _TEXTS
    num_chars = sum(_count_prompt_chars(fields.get(name)) for name in names)
    # an input may be messages
    return min(num_chars + count_chars(fields.get("input")), MAX_LENGTH)


def find_most_varied(groups: list[RequestGroup]) -> tuple[str, int]:
    """Return the hyperparameter with the most values over all groups, and how many those are."""
    values: dict[str, set[bytes]] = {}
    for group in groups:
        for name, value in group.hyperparameters.items():
            values.setdefault(name, set()).add(dump_json(value))
    counts = {name: len(distinct) for name, distinct in values.items()} or {
        "engine": len(groups)
    }
    return max(counts.items(), key=lambda item: item[1])


def _count_prompt_chars(prompt: object) -> int:
    if isinstance(prompt, list):
        return sum(map(_count_item_chars, prompt))
    return len(prompt) if isinstance(prompt, str) else 0


def _count_item_chars(item: object) -> int:
    if isinstance(item, str):
        return len(item)
    return CHARS_PER_TOKEN * (len(item) if isinstance(item, list) else 1)


def _make_plain(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_make_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {name: _make_plain(value[name], depth + 1) for name in sorted(value)}
    return value


def _make_plain_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        return value
    return sorted(set(stops)) or None
