"""Rewrites llama.cpp's GBNF as the Lark of llguidance, a line for each rule.

A rule without recursion becomes a terminal, which llguidance matches quickly.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from fminfer.text.patterns import ATOM

# GBNF begins with the head of a rule, after comments. Lark has no `::=`.
_IS_GBNF = re.compile(r"(?:\s|(?:#|//)[^\n]*(?:\n|\Z))*[\w-]+\s*::=")
_TOKEN = re.compile(
    r'(?P<space>\s+|#[^\n]*)|(?P<head>[\w-]+)\s*::=|(?P<name>[\w-]+)|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<letters>\[\^?(?:\\.|[^\]\\])+\])|(?P<any>\.)"
    r"|(?P<sign>[|*+?()]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})",
    re.DOTALL,
)
_LETTER = re.compile(ATOM, re.DOTALL)
_RANGE = re.compile(f"({ATOM})(?:-({ATOM}))?", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ([^\n]*)")


def is_gbnf(text: str) -> bool:
    """Tell GBNF from Lark."""
    return _IS_GBNF.match(text) is not None


def convert_gbnf(text: str) -> str:
    """Return a grammar in Lark.

    Raises:
        ValueError: the text is not GBNF; the message names the line.
    """
    rules = _parse_rules(text)
    refs = {
        name: {part[1:] for part in parts if part.startswith("@")}
        for name, parts in rules.items()
    }
    for name, needed in (("root", {"root"}), *refs.items()):
        if missing := needed - rules.keys():
            raise ValueError(
                f"rule '{min(missing)}' not found, which rule '{name}' needs"
            )
    terminals = _find_terminals(refs)
    names = {
        name: f"{'T' if name in terminals else 'r'}{n}" for n, name in enumerate(rules)
    }
    names["root"] = "start"
    # Only references have a name after their first character.
    return "\n".join(
        f"{names[name]}: "
        + (" ".join(names.get(part[1:], part) for part in parts) or '""')
        for name, parts in rules.items()
    )


def add_rule_name(text: str, fault: str) -> str:
    """Return a fault of the converted grammar with the name of the GBNF's rule."""
    names = [*_parse_rules(text)]
    match = _PLACE.match(fault)
    return fault if match is None else f"rule '{names[int(match[1]) - 1]}': {match[2]}"


def _parse_rules(text: str) -> dict[str, list[str]]:
    """Return the parts of each rule in Lark; names of rules begin with `@`."""
    rules: dict[str, list[str]] = {}
    parts: list[str] = []
    position = 0
    try:
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or not (rules or match["head"] or match["space"]):
                raise ValueError("cannot be read")
            if match["head"]:
                parts = rules[match["head"]] = []
            elif not match["space"]:
                parts.append(_convert_token(str(match.lastgroup), match[0]))
            position = match.end()
    except ValueError as error:
        line = text.count("\n", 0, position) + 1
        start = json.dumps(text[position : position + 20], ensure_ascii=False)
        raise ValueError(f"line {line}: {start} {error}") from None
    return rules


def _convert_token(kind: str, token: str) -> str:
    """Return a token of GBNF in Lark."""
    if kind == "text":
        letters = _LETTER.findall(token[1:-1])
        return json.dumps("".join(map(_decode_atom, letters)), ensure_ascii=False)
    if kind == "letters":
        sign = "^" if token.startswith("[^") else ""
        return f"/[{sign}{_RANGE.sub(_convert_range, token[1 + len(sign) : -1])}]/"
    return {"name": f"@{token}", "any": "/(?s:.)/"}.get(kind) or re.sub(
        r"\s", "", token
    )


def _convert_range(match: re.Match[str]) -> str:
    return "-".join(
        rf"\x{{{ord(_decode_atom(atom)):x}}}" for atom in match.groups() if atom
    )


def _decode_atom(atom: str) -> str:
    """Return the character that an atom spells, perhaps as an escape."""
    if len(atom) > 3 and atom[1] in "xuU" and atom[2] != "{":
        character = chr(int(atom[2:], 16))
    else:
        character = _SHORT.get(atom[1:], atom)
    if len(character) > 1 or "\ud800" <= character <= "\udfff":
        raise ValueError(f"has the escape {atom}, which stands for no character")
    return character


def _find_terminals(refs: dict[str, set[str]]) -> set[str]:
    """Return the rules that refer only to such rules; never the root or recursive rules."""
    sorter = TopologicalSorter(refs | {"root": {"root"}})
    with suppress(CycleError):
        sorter.prepare()
    terminals: set[str] = set()
    while ready := sorter.get_ready():
        terminals.update(ready)
        sorter.done(*ready)
    return terminals
