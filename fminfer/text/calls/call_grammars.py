"""Grammars of tool calls: a form, functions, and whether calls must come become Lark.

A constraint of the kind "calls" has them as JSON, with the ids of those marks that are special
tokens of the model. In a limited process, which knows bytes alone, the marks are texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fminfer.core.config import Constraint, KnownParser
from fminfer.text.calls.argument_grammars import ArgumentWriter, escape_regex, quote
from fminfer.text.calls.call_forms import find_form
from fminfer.text.calls.call_syntax import SYNTAXES, choose_variant
from fminfer.text.grammar_forms import convert_lark, make_number_regex
from fminfer.text.plain_schemas import count_digits, parse_schema

_ANY_TEXT = "/(?s:.*)/"
_SPACE = r"[ \t\r\n]*"
_NAME = re.compile(r"[\w.:/-]+")
_JSON_RULES = r"""
json_value: json_object | json_array | JSON_STRING | JSON_NUMBER | "true" | "false" | "null"
json_object: "{" _space (json_pair ("," _space json_pair)*)? "}"
json_pair: JSON_STRING _space ":" _space json_value _space
json_array: "[" _space (json_value _space ("," _space json_value _space)*)? "]"
_space: JSON_SPACE?
JSON_SPACE: /[ \t\r\n]+/
JSON_STRING: /(?s:"(?:[^"\\]|\\.)*")/
JSON_NUMBER: /NUMBER/
"""


@dataclass(slots=True, frozen=True)
class CallSpec:
    """What a grammar of calls is made of."""

    form: KnownParser
    variant: int  # of the form
    functions: tuple[tuple[str, str], ...]  # names, and schemas of arguments in JSON
    is_forced: (
        bool  # calls and nothing else; otherwise text, and calls where they begin
    )
    is_single: bool  # at most one call
    token_ids: dict[str, int]  # of marks that are special tokens


def make_calls_constraint(
    form: KnownParser,
    template: str,
    functions: tuple[tuple[str, str], ...],
    find_special_id: Callable[[str], int | None],
    *,
    is_forced: bool,
    is_single: bool,
) -> Constraint:
    """Return the constraint that holds the calls of a model with this chat template."""
    special_ids = {mark: find_special_id(mark) for mark in find_form(form).markers}
    token_ids = {mark: i for mark, i in special_ids.items() if i is not None}
    variant = choose_variant(form, template)
    spec = CallSpec(form, variant, functions, is_forced, is_single, token_ids)
    return Constraint("calls", json.dumps(asdict(spec), ensure_ascii=False))


def parse_call_spec(text: str) -> CallSpec:
    """Return what a constraint of calls says."""
    return CallSpec(**json.loads(text))


def write_call_grammar(spec: CallSpec) -> str:
    """Return the grammar of calls in llguidance's own form.

    Raises:
        ValueError: they cannot be held to a function's schema, or its name cannot be written.
    """
    return convert_lark(_CallWriter(spec, bounds_numbers=False).write())


def write_call_number_grammar(spec: CallSpec) -> str:
    """Return the grammar of the same calls, with any JSON whose numbers are bounded in it."""
    digits = [count_digits(parse_schema(schema)) for _, schema in spec.functions]
    number = make_number_regex(*map(max, zip(*digits, strict=True)))
    rules = _JSON_RULES.replace("NUMBER/", f"{number}/")
    return convert_lark(_CallWriter(spec, bounds_numbers=True).write() + rules)


class _CallWriter:
    """Writes the rules of one answer."""

    def __init__(self, spec: CallSpec, *, bounds_numbers: bool) -> None:
        self._spec = spec
        self._syntax = SYNTAXES[spec.form][spec.variant]
        marks = map(re.escape, sorted(spec.token_ids, key=len, reverse=True))
        self._marks = re.compile(f"({'|'.join(marks)})") if spec.token_ids else None
        self._arguments = ArgumentWriter(
            self._syntax, self._write_text, bounds_numbers=bounds_numbers
        )

    def write(self) -> str:
        """Return the whole grammar."""
        syntax = self._syntax
        calls = [self._write_call(*function) for function in self._spec.functions]
        rules = {"calls": " | ".join(calls)}
        lead = f"({self._write_text(syntax.lead)})? " if syntax.lead else ""
        before = self._write_text(syntax.opening + syntax.before_name)
        if self._spec.is_forced:
            rules["start"] = f"{lead}{before} block"
        elif syntax.begins_answer:
            rules["start"] = f"FREE | {lead}{before} block"
            starts = "|".join(map(escape_regex, (syntax.lead, syntax.trigger)))
            rules["FREE"] = f"{_ANY_TEXT} & ~/(?s:{_SPACE}(?:{starts}).*)/"
        else:
            rules |= self._write_mixed_rules()
        more = self._write_text((syntax.between or "") + syntax.before_name)
        is_single = self._spec.is_single or syntax.between is None
        others = "" if is_single else f"({more} calls)*"
        rules["block"] = f"calls {others} {self._write_text(syntax.closing)}"
        rules |= {head: body for body, head in self._arguments.rules.items()}
        return "".join(f"{head}: {body}\n" for head, body in rules.items())

    def _write_mixed_rules(self) -> dict[str, str]:
        """Return rules of free text in which calls may begin."""
        syntax = self._syntax
        trigger = self._write_text(syntax.trigger)
        is_token = syntax.trigger in self._spec.token_ids
        behind = (syntax.opening + syntax.before_name).partition(syntax.trigger)[2]
        free = "".join(
            f" | TEXT {self._write_text(mark)}"
            for mark in syntax.free_marks
            if mark in self._spec.token_ids
        )
        end = "(TEXT | head called)" if self._spec.is_single else "TEXT"
        more = (
            free.removeprefix(" | ") if self._spec.is_single else f"head called{free}"
        )
        # A reader also reads the form's other variants, and tokens that spell a mark.
        starts = {each.trigger for each in SYNTAXES[self._spec.form]}
        if not is_token:
            starts.remove(syntax.trigger)
        other_starts = "|".join(map(escape_regex, sorted(starts)))
        return {
            "start": f"({more})* {end}" if more else end,
            "TEXT": _ANY_TEXT
            + (f" & ~/(?s:.*(?:{other_starts}).*)/" if starts else ""),
            "called": f"{self._write_text(behind)} block",
            "head" if is_token else "head[lazy]": f"TEXT {trigger}",
        }

    def _write_call(self, name: str, schema: str) -> str:
        """Return one function's call behind the text before its name."""
        syntax = self._syntax
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"the name {quote(name)} cannot be held. Take letters, digits, _ and -"
            )
        try:
            arguments = self._arguments.write_arguments(schema)
        except (AttributeError, TypeError, ValueError) as error:
            is_told = isinstance(error, ValueError)
            fault = error if is_told else "a keyword has a value of the wrong type"
            raise ValueError(f"in the parameters of {quote(name)}: {fault}") from None
        before = self._write_text(name + syntax.before_arguments)
        return f"{before} {arguments} {self._write_text(syntax.after_arguments)}"

    def _write_text(self, text: str) -> str:
        """Return a text in Lark; marks that are special tokens are these tokens."""
        parts = self._marks.split(text) if self._marks else [text]
        token_ids = self._spec.token_ids
        return " ".join(
            f"<[{token_ids[part]}]>" if part in token_ids else quote(part)
            for part in parts
            if part
        )
