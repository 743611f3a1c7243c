"""Joins the pieces of a server's answer, and holds it to its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fminfer.client.held_answers import check_held
from fminfer.client.remote_request import RemoteRequest
from fminfer.client.server_trouble import ServerTroubleError
from fminfer.client.verdicts import quote
from fminfer.core.errors import RequestError
from fminfer.engine.engine_core import Failed, Finished

MOST_TOKENS = 10**9  # of one answer
MAX_SHOWN = 300  # characters of a server's own words
# What a choice has beside its text, if a server says it: in this order, of these types.
KEPT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "stop_reason": (str, int),
    "label_probabilities": dict,
    "label_mass": (float, int),
    "reasoning_truncated": bool,
    "prompt_token_ids": list,
}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
# Ends of answers that a server did not finish.
BROKEN_ENDS = ("abort", "error")
REFUSED_END = "content_filter"
# What each entry of an answer without choices has.
ENTRY_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "embeddings": {"embedding": (list, str)},
    "score": {"score": (float, int)},
    "rerank": {"relevance_score": (float, int)},
    "classify": {"probs": list},
}
_WRONG = (TypeError, AttributeError, KeyError, ValueError, IndexError)


@dataclass(slots=True)
class _Choice:
    """What came of one choice."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    calls: list[tuple[int, dict[str, list[str]]]] = field(default_factory=list)
    lists: dict[str, list[Any]] = field(default_factory=dict)  # logprobs, token ids
    fields: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)  # of this choice alone

    def add(self, piece: dict[str, Any]) -> None:
        """Add what a chunk, or a whole answer, says of the choice."""
        message = piece.get("delta") or piece.get("message") or {}
        for texts, text in (
            (self.texts, piece.get("text") or message.get("content")),
            (
                self.thoughts,
                message.get("reasoning_content") or message.get("reasoning"),
            ),
            (self.refusals, message.get("refusal")),
            ([], piece.get("finish_reason")),
        ):
            if text:
                texts.append(_require(text, str))
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._add_call(call, place)
        lists = {**(piece.get("logprobs") or {}), "token_ids": piece.get("token_ids")}
        for name, values in lists.items():
            if values is not None:
                self.lists.setdefault(name, []).extend(_require(values, list))
        for name, kind in KEPT_FIELDS.items():
            if piece.get(name) is not None:
                self.fields[name] = _require(piece[name], kind)
        self.finish_reason = piece.get("finish_reason") or self.finish_reason

    def _add_call(self, piece: dict[str, Any], place: int) -> None:
        """Add a part of a call: its name comes first, and its arguments bit by bit."""
        index = _require(piece.get("index", place), int)
        new_id = piece.get("id")
        begun = [call for number, call in self.calls if number == index]
        # some servers give each call the index 0
        if not begun or (new_id and begun[-1]["id"] not in ([], [new_id])):
            begun = [{"id": [], "name": [], "arguments": []}]
            self.calls.append((index, begun[0]))
        call = begun[-1]
        for name, text in {
            **(piece.get("function") or {}),
            "id": piece.get("id"),
        }.items():
            # some servers repeat the name and the id in each part
            if text and name in call and (name == "arguments" or not call[name]):
                call[name].append(_require(text, str))

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def build(self, index: int, request: RemoteRequest) -> dict[str, Any]:
        """Return the choice as our own engine writes it."""
        text = self.text
        choice: dict[str, Any] = {"text": text, "index": index}
        if request.kind == "chat":
            is_other = self.calls or self.refusals
            is_cut_thought = self.thoughts and self.finish_reason == "length"
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text or (None if is_other or is_cut_thought else ""),
                "refusal": "".join(self.refusals) or None,
            }
            if self.thoughts:
                message["reasoning_content"] = "".join(self.thoughts)
            if self.calls:
                message["tool_calls"] = [
                    _build_call(call)
                    for _, call in sorted(self.calls, key=lambda each: each[0])
                ]
            choice = {"index": index, "message": message}
        logprobs = self._build_logprobs(request)
        if logprobs is not None or request.kind != "plain":
            choice["logprobs"] = logprobs
        choice["finish_reason"] = self.finish_reason
        choice |= {
            name: self.fields[name] for name in KEPT_FIELDS if name in self.fields
        }
        if "token_ids" in self.lists:
            choice["token_ids"] = self.lists["token_ids"]
        return choice

    def _build_logprobs(self, request: RemoteRequest) -> dict[str, Any] | None:
        """Return the logprobs; llama-server has those of completions in chat's form."""
        num_top = request.params.logprobs
        if num_top is None:
            return None
        entries = [_make_entry(each, num_top) for each in self.lists.get("content", ())]
        if request.kind == "chat":
            return {"content": entries, "refusal": None}
        lists = {name: self.lists.get(name, []) for name in LISTS}
        if entries:
            lists = _make_lists(entries)
        return lists | ({} if num_top else {"top_logprobs": None})


def _make_entry(entry: dict[str, Any], num_top: int) -> dict[str, Any]:
    """Return a token's entry of chat's logprobs, with so many alternatives."""
    tops = (entry.get("top_logprobs") or [])[:num_top]
    plain = [
        {
            "token": _require(each["token"], str),
            "logprob": _require(each["logprob"], (float, int)),
            "bytes": each.get("bytes"),
        }
        for each in (entry, *tops)
    ]
    return plain[0] | {"top_logprobs": plain[1:]}


def _make_lists(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return chat's logprobs in the form of completions."""
    lists: dict[str, list[Any]] = {name: [] for name in LISTS}
    offset = 0
    for entry in entries:
        tops: dict[str, float] = {}
        for pair in (*entry["top_logprobs"], entry):
            tops.setdefault(pair["token"], pair["logprob"])
        values = (entry["token"], entry["logprob"], tops, offset)
        for name, value in zip(LISTS, values, strict=True):
            lists[name].append(value)
        offset += len(entry["token"])
    return lists


def _build_call(call: dict[str, list[str]]) -> dict[str, Any]:
    texts = {name: "".join(pieces) for name, pieces in call.items()}
    function = {"name": texts["name"], "arguments": texts["arguments"]}
    return {"id": texts["id"], "type": "function", "function": function}


def _require(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} stands where {kind} belongs")
    return value


def read_count(usage: Any, name: str) -> int:
    """Return a count of tokens; 0 for what is none."""
    value = usage.get(name) if isinstance(usage, dict) else None
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 <= value <= MOST_TOKENS else 0


class AnswerBuilder:
    """One answer, while its pieces come."""

    def __init__(self, request: RemoteRequest) -> None:
        self._request = request
        self._choices: dict[int, _Choice] = {}
        self._entries: list[dict[str, Any]] | None = None  # of vectors, scores, ranks
        self._usage: dict[str, Any] | None = None  # of all choices

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add what one event of a stream says, or an answer that is not streamed.

        Raises:
            ServerTroubleError: it is no answer, or breaks off.
        """
        try:
            self._add(chunk)
        except _WRONG as error:
            raise _no_answer_error(error) from None

    def add_whole(self, body: dict[str, Any]) -> None:
        """Add an answer that is not streamed, as `add_chunk` does."""
        self.add_chunk(body)

    def _add(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            text = error.get("message") if isinstance(error, dict) else error
            raise ServerTroubleError(
                f"it sent an error in place of an answer: {quote(str(text), '')}"
            )
        usage = _require(chunk.get("usage") or {}, dict)
        if self._request.kind in ENTRY_FIELDS:
            entries = chunk["results" if self._request.kind == "rerank" else "data"]
            self._entries = [_require(each, dict) for each in _require(entries, list)]
        choices = _require(chunk.get("choices") or [], list)
        for piece in choices:
            index = _require(piece.get("index", 0), int)
            choice = self._choices.setdefault(index, _Choice())
            choice.add(piece)
            choice.usage = usage or choice.usage
            if choice.finish_reason in BROKEN_ENDS:
                raise ServerTroubleError(
                    f"it ended an answer by {choice.finish_reason}"
                )
        if usage and len(choices) != 1:
            self._usage = usage

    def finish(self, request_id: int, times: dict[str, float]) -> Finished | Failed:
        """Return the answer once all of it is there, or its row's error.

        Raises:
            ServerTroubleError: a part of it is missing.
        """
        request = self._request
        try:
            answers = (
                self._build_choices()
                if self._entries is None
                else self._build_entries(self._entries)
            )
            usage = self._build_usage()
        except _WRONG as error:
            raise _no_answer_error(error) from None
        if (refusal := self._find_error()) is not None:
            return Failed(request_id, refusal)
        return Finished(request_id, answers, usage, times, request.kind)

    @property
    def usage(self) -> dict[str, Any] | None:
        """The tokens that the server has counted; None: it has not."""
        usages = [each.usage for each in self._choices.values() if each.usage]
        if self._usage is not None or not usages:
            return self._usage
        # llama-server counts each choice by itself
        n = self._request.params.n if len(usages) > 1 else 1
        num_prompt = sum(read_count(each, "prompt_tokens") for each in usages) // n
        num_drawn = sum(read_count(each, "completion_tokens") for each in usages)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn}
        return usages[0] | counts

    def _build_choices(self) -> list[dict[str, Any]]:
        request = self._request
        num_choices = len(request.prompts) * request.params.n
        if sorted(self._choices) != [*range(num_choices)]:
            raise ServerTroubleError(
                f"its answer has {len(self._choices)} of {num_choices} choices"
            )
        if not all(each.finish_reason for each in self._choices.values()):
            raise ServerTroubleError("its answer broke off before its end")
        return [self._choices[n].build(n, request) for n in range(num_choices)]

    def _build_entries(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of texts or pairs in their order; of a ranking the best."""
        kind = self._request.kind
        wish = self._request.vectors
        assert wish is not None, "its kind is of those that have one"
        num_entries = len(wish.seconds) or len(self._request.prompts)
        by_index = {_require(each["index"], int): each for each in entries}
        if sorted(by_index) != [*range(num_entries)] or len(entries) != num_entries:
            raise ServerTroubleError(
                f"its answer has {len(entries)} of {num_entries} entries"
            )
        for entry in entries:
            for name, types in ENTRY_FIELDS[kind].items():
                _require(entry[name], types)
        if kind != "rerank":
            return [by_index[index] for index in range(num_entries)]
        best = sorted(entries, key=lambda each: -float(each["relevance_score"]))
        return [
            {"index": each["index"]}
            | (
                {"document": {"text": wish.seconds[each["index"]]}}
                if wish.returns_documents
                else {}
            )
            | {"relevance_score": each["relevance_score"]}
            for each in best[: wish.top_n or None]
        ]

    def _build_usage(self) -> dict[str, Any]:
        """Return the usage as our own engine writes it; zeros where the server has none."""
        counted = self.usage or {}
        usage = {"prompt_tokens": read_count(counted, "prompt_tokens")}
        if self._entries is None:
            usage["completion_tokens"] = read_count(counted, "completion_tokens")
        details = counted.get("prompt_tokens_details")
        built: dict[str, Any] = {
            **usage,
            "total_tokens": sum(usage.values()),
            "prompt_tokens_details": {
                "cached_tokens": read_count(details, "cached_tokens")
            },
        }
        drawn = counted.get("completion_tokens_details")
        if num_thought := read_count(drawn, "reasoning_tokens"):
            built["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        return built if counted else built | {"is_missing": True}

    def _find_error(self) -> RequestError | None:
        """Return why the answer is none that the line may get; None: it is one."""
        request = self._request
        for choice in self._choices.values():
            if choice.finish_reason == REFUSED_END:
                return RequestError(
                    "refused_by_server",
                    "the server has cut the answer, as its filter refuses the content",
                )
            if choice.finish_reason == "length":  # it is cut, and says so itself
                continue
            if choice.refusals and request.constraint is not None:
                words = quote("".join(choice.refusals), "")
                return RequestError("refused_by_server", f"the model refuses: {words}")
            fault = ""
            if request.constraint is not None:
                fault = check_held(request.constraint, choice.text)
            elif request.call_mode in ("required", "one") and not choice.calls:
                fault = "the request asks for a call, and the server's answer has none"
            if fault:
                return RequestError("constraint_broken", fault)
        return None


def _no_answer_error(error: Exception) -> ServerTroubleError:
    return ServerTroubleError(
        f"it sent what is no answer of OpenAI's form: {error!r:.{MAX_SHOWN}}"
    )
