"""Finds the forms of messages that a chat template reads, and converts messages to them.

No template says whether it reads contents as strings or as lists of parts, and
arguments of calls as objects or as JSON. A conversation of the same structure, whose
texts are easy to find, shows what arrives in the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from fminfer.text.calls.tool_call import parse_object

ChatMessage = dict[str, Any]
Render = Callable[[list[ChatMessage]], str]
Lacking = Literal["absent", "null", "empty"]
# What a model wrote for arguments may hold no object. Among objects such a text stays a text, or
# becomes the only argument of an object.
ArgumentForm = Literal["objects", "JSON", "only objects"]
ARGUMENT_FORMS: tuple[ArgumentForm, ...] = ("objects", "JSON", "only objects")

# What a probe writes, found in a prompt by one search: texts, keys of parts, arguments, and
# arguments in their object as JSON or Python writes it.
_MARKS = re.compile(r"73019\d{10,}?46285|46120\d{5,}?95837")
_ARGUMENTS = re.compile(r"2864[12]\d{5,}?90753")
_OBJECTS = re.compile(
    r"""\{["'](?:value|arguments)["']: ["']2864[12]\d{5,}?90753["']\}"""
)
_ID = "a1b2c3d4e"  # Mistral's templates want nine letters or digits
# What may stand for the content that a message with calls lacks.
_LACKING: dict[Lacking, ChatMessage] = {
    "absent": {},
    "null": {"content": None},
    "empty": {"content": ""},
}


@dataclass(slots=True, frozen=True)
class Turn:
    """The structure of a message: its role, how many parts it has, and its calls."""

    role: str
    num_parts: int | None  # None: no content; 0: it is a string
    calls: tuple[bool, ...]  # of each, whether its arguments hold an object
    is_empty: bool  # "" stands beside calls, which counts as no content

    @staticmethod
    def from_message(message: ChatMessage) -> Turn:
        """Return the turn of a message."""
        content = message.get("content")
        sent_calls = message.get("tool_calls", ())
        calls = tuple(
            _find_arguments_object(call["function"]["arguments"]) is not None
            for call in sent_calls
        )
        is_empty = content == "" and len(calls) > 0
        num_parts = None if content is None or is_empty else 0
        if isinstance(content, list):
            num_parts = len(content)
        return Turn(message["role"], num_parts, calls, is_empty)

    def make_probe(self, number: int) -> ChatMessage:
        """Return a message of this structure, with texts that are easy to find in a prompt."""
        message: ChatMessage = {"role": self.role}
        if self.num_parts is not None:
            texts = self.make_texts(number)
            parts = [{"type": "text", "text": text} for text in texts]
            message["content"] = parts if self.num_parts else texts[0]
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": _ID,
                    "type": "function",
                    "function": {"name": "probe", "arguments": arguments},
                }
                for arguments in self.make_arguments(number)
            ]
        if self.role == "tool":
            message |= {"tool_call_id": _ID, "name": "probe"}
        return message

    def make_texts(self, number: int) -> list[str]:
        """Return the texts of a probe's content.

        Digits survive a template that trims spaces or changes case.
        """
        return [
            f"73019{number:05}{part:05}46285"
            for part in range(max(1, self.num_parts or 0))
        ]

    def make_arguments(self, number: int) -> list[ChatMessage | str]:
        """Return the arguments of a probe's calls: objects with a text, or a text alone."""
        texts = f"28642{number:05}90753", f"28641{number:05}90753"
        return [
            {"value": texts[1]} if holds_object else texts[0]
            for holds_object in self.calls
        ]


@dataclass(slots=True, frozen=True)
class Forms:
    """How messages are handed to a template."""

    arguments: ArgumentForm = "objects"  # of calls
    lacking: Lacking = "absent"  # the content beside calls
    # roles whose strings become lists of one part
    one_part_roles: frozenset[str] = frozenset()
    list_roles: frozenset[str] = (
        frozenset()
    )  # roles whose lists stay; others' are joined
    losses: tuple[str, ...] = ()  # what the prompt lacks all the same, for people

    def convert(self, message: ChatMessage) -> ChatMessage:
        """Return a message in these forms."""
        changed: ChatMessage = {}
        role = message["role"]
        content = message.get("content")
        if content in (None, "") and "tool_calls" in message:
            changed |= _LACKING[self.lacking]  # a key that is there keeps its place
            content = changed.get("content")
            if not changed:
                message = {
                    name: value for name, value in message.items() if name != "content"
                }
        elif isinstance(content, list) and role not in self.list_roles:
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str):
            is_part = role in self.one_part_roles
            changed["content"] = (
                [{"type": "text", "text": content}] if is_part else content
            )
        if "tool_calls" in message:
            changed["tool_calls"] = [
                self._convert_call(call) for call in message["tool_calls"]
            ]
        return message | changed

    def _convert_call(self, call: ChatMessage) -> ChatMessage:
        arguments = self.convert_arguments(call["function"]["arguments"])
        return call | {"function": call["function"] | {"arguments": arguments}}

    def convert_arguments(self, arguments: ChatMessage | str) -> ChatMessage | str:
        """Return a call's arguments in these forms."""
        if self.arguments == "JSON":
            return (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
        parsed = _find_arguments_object(arguments)
        if parsed is None and self.arguments == "only objects":
            return {"arguments": arguments}
        return arguments if parsed is None else parsed


def _find_arguments_object(arguments: ChatMessage | str) -> ChatMessage | None:
    """Return the object that arguments are, or hold as JSON; None: they hold none."""
    try:
        return parse_object(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None


def find_forms(turns: Sequence[Turn], render: Render) -> Forms:
    """Find out in which forms a template reads messages like these.

    Strings are preferred to lists of one part, and objects to JSON. Lists stay as they were sent
    where each of their texts arrives, and are joined elsewhere.
    """
    probe = _Probe(turns, render)
    forms = _find_call_forms(turns, probe)
    roles = dict.fromkeys(turn.role for turn in turns if turn.num_parts is not None)
    for role in roles:
        in_parts = replace(forms, one_part_roles=forms.one_part_roles | {role})
        if probe.find_arriving_turns(forms, role) < probe.find_arriving_turns(
            in_parts, role
        ):
            forms = in_parts
    # so are roles of which nothing can be seen
    if roles and forms.one_part_roles >= roles.keys():
        forms = replace(forms, one_part_roles=frozenset(turn.role for turn in turns))
    for role in dict.fromkeys(turn.role for turn in turns if turn.num_parts):
        with_lists = replace(forms, list_roles=forms.list_roles | {role})
        if probe.find_arriving_turns(with_lists) >= probe.find_arriving_turns(forms):
            forms = with_lists
    return replace(forms, losses=tuple(_find_losses(turns, probe, forms)))


def _find_losses(turns: Sequence[Turn], probe: _Probe, forms: Forms) -> Iterator[str]:
    if probe.write_prompt(forms) is None:  # refused: nothing is lost in silence
        return
    if probe.count_turns_with_calls(forms) < sum(bool(turn.calls) for turn in turns):
        yield "the chat template leaves out tool calls of messages"
    if any(
        turn.num_parts is not None for turn in turns
    ) and not probe.find_arriving_turns(forms):
        yield "the chat template writes no text of the messages"


def _find_call_forms(turns: Sequence[Turn], probe: _Probe) -> Forms:
    """Return the forms in which most turns have their calls; of equals the first one tried.

    A form that leaves calls out is better than one that the template refuses.
    """
    num_calling = sum(bool(turn.calls) for turn in turns)
    is_empty_sent = any(turn.is_empty for turn in turns)
    lackings: tuple[Lacking, ...] = (
        ("empty", "absent", "null") if is_empty_sent else ("absent", "null", "empty")
    )
    best = Forms(lacking=lackings[0])
    most = -1
    calling_roles = frozenset(turn.role for turn in turns if turn.calls)
    for roles in (frozenset(), calling_roles, frozenset(turn.role for turn in turns)):
        for arguments, lacking in product(ARGUMENT_FORMS, lackings):
            forms = Forms(arguments, lacking, one_part_roles=roles)
            num_written = probe.count_turns_with_calls(forms)
            if num_written > most:
                best = forms
                most = num_written
            if num_written == num_calling:
                return forms
            if not num_calling:  # the other forms differ in calls
                break
    return best


class _Probe:
    """A conversation of some structure, written in one form after another."""

    def __init__(self, turns: Sequence[Turn], render: Render) -> None:
        self._turns = turns
        self._render = render
        self._messages = [turn.make_probe(number) for number, turn in enumerate(turns)]
        self._written: dict[Forms, str | None] = {}

    def write_prompt(self, forms: Forms) -> str | None:
        """Return the prompt; None: the template refuses such messages."""
        if forms not in self._written:
            try:
                self._written[forms] = self._render(self._convert_messages(forms))
            except (MemoryError, OSError):
                raise
            except Exception:  # whatever a template does: it is a program
                self._written[forms] = None
        return self._written[forms]

    def _convert_messages(self, forms: Forms) -> list[ChatMessage]:
        """Return the messages in a form. A part's key shows only if the raw list is written."""
        messages = [forms.convert(message) for message in self._messages]
        for number, message in enumerate(messages):
            if isinstance(content := message.get("content"), list):
                message["content"] = [
                    part | {_make_list_key(number): 0} for part in content
                ]
        return messages

    def find_arriving_turns(self, forms: Forms, role: str | None = None) -> set[int]:
        """Return the numbers of the turns, of one role if given, whose texts all arrive."""
        marks = set(_MARKS.findall(self.write_prompt(forms) or ""))
        return {
            number
            for number, turn in enumerate(self._turns)
            if turn.num_parts is not None and role in (None, turn.role)
            if _make_list_key(number) not in marks
            and marks.issuperset(turn.make_texts(number))
        }

    def count_turns_with_calls(self, forms: Forms) -> int:
        """Return how many turns have the arguments of their calls in the prompt.

        It is -1 if the template refuses the messages, or writes a null as a word.
        """
        text = self.write_prompt(forms)
        if text is None or (forms.lacking == "null" and self._writes_null(forms, text)):
            return -1
        marks = {*_ARGUMENTS.findall(text), *_OBJECTS.findall(text)}
        count = 0
        for number, turn in enumerate(self._turns):
            count += bool(turn.calls) and all(
                _are_arguments_written(marks, sent, forms)
                for sent in turn.make_arguments(number)
            )
        return count

    def _writes_null(self, forms: Forms, text: str) -> bool:
        empty = self.write_prompt(replace(forms, lacking="empty"))
        return empty is not None and any(
            text.lower().count(word) > empty.lower().count(word)
            for word in ("none", "null")
        )


def _are_arguments_written(
    marks: set[str], arguments: ChatMessage | str, forms: Forms
) -> bool:
    """Tell whether arguments are among a prompt's marks, and not as Python writes objects."""
    converted = forms.convert_arguments(arguments)
    wanted = str(arguments["value"] if isinstance(arguments, dict) else arguments)
    if isinstance(converted, str):
        return (converted if forms.arguments == "JSON" else wanted) in marks
    return wanted in marks and str(converted) not in marks


def _make_list_key(number: int) -> str:
    return f"46120{number:05}95837"
