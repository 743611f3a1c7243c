"""One input line becomes a Request, or a RequestError that says what is wrong with it.

The rules are those of the OpenAI completions API as docs/contract.md spells them out. This module
knows nothing of tokenizers or models: lengths in tokens are checked later, by the worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from fminfer.errors import RequestError

MAX_CANDIDATES = 128  # n and best_of
INT64 = 2**63


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and what is reported of them."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    n: int = 1
    best_of: int = 1  # never below n
    logprobs: int | None = None
    echo: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: the run's seed, and equal lines differ
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def num_candidates(self) -> int:
        """Sequences to compute for each prompt: greedy ones are equal, so one is enough."""
        return 1 if self.is_greedy or self.max_tokens == 0 else self.best_of


DEFAULTS = SamplingParams()


@dataclass(slots=True, frozen=True)
class Request:
    """A line that passed: its bytes, its prompts and its sampling params."""

    raw: bytes  # the JSON object exactly as it came, without surrounding white space
    prompts: list[str | list[int]]
    params: SamplingParams
    warnings: tuple[str, ...] = field(default=())


# Parameters of the format that this version does not act on yet. Each is accepted at the value
# that changes nothing, and refused otherwise, so that no answer ever ignores a wish in silence.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
}
_RECORDED = frozenset({"model", "engine", "request_type", "user"})
_KNOWN = frozenset(
    {
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "best_of",
        "logprobs",
        "echo",
        "stop",
        "seed",
        "ignore_eos",
    }
)


def parse_request(raw: bytes, *, max_logprobs: int) -> Request:
    """Read one line.

    Args:
        raw: the line's bytes.
        max_logprobs: the largest `logprobs` that is allowed.

    Raises:
        RequestError: with one of the codes of the contract's section 3.
    """
    raw = raw.strip()
    return _check(raw, _load_object(raw), max_logprobs)


def _load_object(raw: bytes) -> dict[str, Any]:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "invalid_utf8",
            f"byte {error.start} of the line is not UTF-8 ({raw[error.start]:#04x}); "
            "save the file as UTF-8",
        ) from None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _load_leniently(raw, error)
    if not isinstance(value, dict):
        raise RequestError(
            "not_an_object",
            f"the line holds a JSON {_json_type(value)}; a request is a JSON object, "
            'such as {"prompt": "Hello", "max_tokens": 5}',
        )
    return value


def _load_leniently(raw: bytes, error: orjson.JSONDecodeError) -> Any:
    """Accept what JSON allows and orjson refuses (lone surrogates); explain the rest."""

    def refuse_constant(name: str) -> None:
        raise RequestError("invalid_json", f"{name} is not JSON; use a number or null")

    try:
        return json.loads(raw.decode(), parse_constant=refuse_constant)
    except RecursionError:
        raise RequestError("invalid_json", "the JSON is nested too deep") from None
    except ValueError:
        raise RequestError(
            "invalid_json",
            f"the line is not JSON: {error.msg} at character {error.pos + 1}. " + _json_remedy(raw),
        ) from None


def _json_remedy(raw: bytes) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        return "A byte order mark stands before it; only a file's first line may have one"
    if raw[-1:] == b"}" and raw[:-1].rstrip()[-1:] == b",":
        return "There is a comma before the last brace; remove it"
    if (raw[:1] == b"{" and raw[-1:] != b"}") or raw[:1] in (b'"', b"}", b"]"):
        return (
            "It looks like a piece of a request that is spread over several lines; "
            "write each request on one line (jq -c . does it)"
        )
    return "Write one JSON object on the line"


def _check(raw: bytes, obj: dict[str, Any], max_logprobs: int) -> Request:
    reader = _Reader(obj)
    warnings = []
    _refuse_unsupported(obj)
    unknown = sorted(obj.keys() - _KNOWN - _RECORDED - _NEUTRAL.keys())
    if unknown:
        warnings.append(f"unknown parameters are kept and not acted on: {', '.join(unknown)}")
    n = reader.integer("n", DEFAULTS.n, 1, MAX_CANDIDATES)
    best_of = reader.integer("best_of", n, 0, MAX_CANDIDATES)
    if "best_of" in obj and best_of < n and obj["best_of"] is not None:
        warnings.append(f"best_of {best_of} is below n {n} and is taken as {n}")
    params = SamplingParams(
        max_tokens=reader.integer("max_tokens", DEFAULTS.max_tokens, 0, INT64 - 1),
        temperature=reader.number("temperature", DEFAULTS.temperature, 0, 2),
        top_p=reader.number("top_p", DEFAULTS.top_p, 0, 1),
        top_k=reader.integer("top_k", DEFAULTS.top_k, 0, INT64 - 1),
        n=n,
        best_of=max(n, best_of),
        logprobs=reader.optional_integer("logprobs", 0, max_logprobs),
        echo=reader.boolean("echo", DEFAULTS.echo, also_0_1=True),
        stop=reader.stops(),
        seed=reader.optional_integer("seed", -INT64, INT64 - 1),
        ignore_eos=reader.boolean("ignore_eos", DEFAULTS.ignore_eos),
    )
    return Request(raw=raw, prompts=reader.prompts(), params=params, warnings=tuple(warnings))


def _refuse_unsupported(obj: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = obj.get(name)
        if value is None or any(value == ok and type(value) is not bool for ok in neutral):
            continue
        if any(value is ok for ok in neutral):
            continue
        allowed = " or ".join(["null", *(json.dumps(ok) for ok in neutral)])
        raise RequestError(
            "unsupported_parameter",
            f"{name} is {_show(value)}, and this version cannot do that; "
            f"remove {name} or set it to {allowed}",
            name,
        )


class _Reader:
    """Reads fields of one request by type and limits; null always means the default."""

    def __init__(self, obj: dict[str, Any]) -> None:
        self._obj = obj

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._obj.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_type(name, value, "a number or null")
        if not (low <= value <= high) or math.isnan(value):
            raise _out_of_range(name, value, f"from {low} to {high}")
        return float(value)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self._obj.get(name)
        if value is None:
            return None
        is_integral = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or is_integral):
            raise _wrong_type(name, value, "an integer or null")
        if not low <= value <= high:
            limit = f"from {low} to {high}" if high < INT64 - 1 else f"at least {low}"
            raise _out_of_range(name, value, limit)
        return int(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.optional_integer(name, low, high)
        return default if value is None else value

    def boolean(self, name: str, default: bool, *, also_0_1: bool = False) -> bool:
        value = self._obj.get(name)
        if value is None:
            return default
        if also_0_1 and value in (0, 1) and not isinstance(value, str):
            return bool(value)
        if not isinstance(value, bool):
            raise _wrong_type(name, value, "true, false or null")
        return value

    def stops(self) -> tuple[str, ...]:
        value = self._obj.get("stop")
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise _wrong_type("stop", value, "a string, a list of strings or null")
        if "" in stops:
            raise RequestError(
                "out_of_range", "stop holds an empty string, which stops nothing; remove it", "stop"
            )
        return tuple(dict.fromkeys(stops))

    def prompts(self) -> list[str | list[int]]:
        value = self._obj.get("prompt")
        if value is None:
            found = "null" if "prompt" in self._obj else "absent"
            raise RequestError(
                "missing_prompt",
                f"prompt is {found}; give a string, a list of strings, token ids, or a list of "
                'lists of token ids ("" generates from the start)',
                "prompt",
            )
        if isinstance(value, str):
            return [_encodable(value)]
        if isinstance(value, list) and not value:
            raise RequestError("out_of_range", "prompt is an empty list; give a prompt", "prompt")
        if _is_all(value, lambda v: isinstance(v, str)):
            return [_encodable(text) for text in value]
        if _is_all(value, _is_token_id):
            return [_token_ids(value)]
        if _is_all(value, lambda ids: _is_all(ids, _is_token_id)):
            return [_token_ids(ids) for ids in value]
        raise _wrong_type(
            "prompt",
            value,
            "a string, a list of strings, a list of token ids, or a list of lists of token ids",
        )


def _is_all(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(test(item) for item in value)


def _is_token_id(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )


def _token_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise RequestError(
            "out_of_range", "prompt holds an empty list of token ids; give at least one", "prompt"
        )
    return [int(i) for i in ids]


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_utf8",
            f"prompt holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character "
            f"{error.start}, which is no text; write the whole pair or the character itself",
            "prompt",
        ) from None
    return text


def _wrong_type(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(
        "invalid_type",
        f"{name} is {_show(value)}, a {_json_type(value)}; it must be {allowed}",
        name,
    )


def _out_of_range(name: str, value: object, allowed: str) -> RequestError:
    return RequestError("out_of_range", f"{name} is {_show(value)}; it must be {allowed}", name)


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _show(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a {_json_type(value)} nested too deep to show"
    return text if len(text) <= 60 else text[:57] + "…"
