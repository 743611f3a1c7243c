"""Rewrites llama.cpp's GBNF as the Lark of llguidance, a line for each rule.

A rule whose parts are all of fixed letters becomes a terminal: llguidance matches these quickly.
"""

from __future__ import annotations

import json
import re

from fminfer.text.patterns import ATOM

# The first thing that is no comment is the head of a rule, and Lark has no `::=`.
_IS_GBNF = re.compile(r"(?:\s|(?:#|//)[^\n]*(?:\n|\Z))*[\w-]+\s*::=")
_TOKEN = re.compile(
    r'(?P<space>\s+|#[^\n]*)|(?P<head>[\w-]+)\s*::=|(?P<name>[\w-]+)|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<letters>\[\^?(?:\\.|[^\]\\])+\])|(?P<any>\.)|(?P<open>\()|(?P<close>\))"
    r"|(?P<sign>[|*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})",
    re.DOTALL,
)
_LETTER = re.compile(ATOM, re.DOTALL)
_RANGE = re.compile(f"({ATOM})(?:-({ATOM}))?", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ([^\n]*)")
_LARK_NAME = re.compile(r"\b[rT](\d+)\b")


def is_gbnf(text: str) -> bool:
    """Tell GBNF from Lark."""
    return _IS_GBNF.match(text) is not None


def convert_gbnf(text: str) -> str:
    """Return a grammar in Lark.

    Raises:
        ValueError: it is no GBNF; it names the line.
    """
    rules = _parse(text)
    refs = {name: {part[1:] for part in parts if part[0] == "@"} for name, parts in rules.items()}
    for name, names in refs.items():
        if missing := names - rules.keys():
            raise ValueError(f"rule '{min(missing)}' not found, which rule '{name}' needs")
    if "root" not in rules:
        raise ValueError("it has no rule root, at which GBNF starts")
    terminals = _find_terminals(refs)
    names = {
        name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)
    }
    names["root"] = "start"
    # Behind its first character, no part but a reference reads as a name.
    return "\n".join(
        f"{names[name]}: " + (" ".join(names.get(part[1:], part) for part in parts) or '""')
        for name, parts in rules.items()
    )


def blame_rule(text: str, fault: str) -> str:
    """Return what is wrong with the converted grammar in terms of the GBNF."""
    names = [*_parse(text)]
    match = _PLACE.search(fault)
    if match is not None and 0 < int(match[1]) <= len(names):
        fault = f"rule '{names[int(match[1]) - 1]}': {match[2]}"
    return _LARK_NAME.sub(lambda match: f"'{names[int(match[1]) % len(names)]}'", fault)


def _parse(text: str) -> dict[str, list[str]]:
    """Return the parts of each rule in Lark; a name of a rule stands behind `@`."""
    rules: dict[str, list[str]] = {}
    parts: list[str] = []
    position, depth = 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        kind = match.lastgroup if match else None
        depth += (kind == "open") - (kind == "close")
        if match is None or depth < 0 or (kind == "head" and depth):
            raise _fault_at(text, position, "cannot be read")
        if kind == "head":
            parts = rules[match["head"]] = []
        elif kind != "space" and not rules:
            raise _fault_at(text, position, "stands before the first rule")
        elif kind != "space":
            try:
                parts.append(_convert(str(kind), match[0]))
            except ValueError as error:
                raise _fault_at(text, position, str(error)) from None
        position = match.end()
    if depth:
        raise _fault_at(text, len(text), "lacks a closing parenthesis")
    return rules


def _fault_at(text: str, position: int, fault: str) -> ValueError:
    line = text.count("\n", 0, position) + 1
    start = json.dumps(text[position : position + 20], ensure_ascii=False)
    return ValueError(f"line {line}: {start} {fault}")


def _convert(kind: str, token: str) -> str:
    """Return a token of GBNF in Lark."""
    if kind == "name":
        return f"@{token}"
    if kind == "any":
        return "/(?s:.)/"
    if kind == "text":
        letters = _LETTER.findall(token[1:-1])
        return json.dumps("".join(map(_decode, letters)), ensure_ascii=False)
    if kind == "letters":
        sign = "^" if token.startswith("[^") else ""
        return f"/[{sign}{_RANGE.sub(_convert_range, token[1 + len(sign) : -1])}]/"
    return re.sub(r"\s", "", token)


def _convert_range(match: re.Match[str]) -> str:
    ends = [_decode(atom) for atom in match.groups() if atom]
    if ends != sorted(ends):
        raise ValueError(f"has the range {match[0]}, whose end is before its start")
    return "-".join(rf"\x{{{ord(end):x}}}" for end in ends)


def _decode(atom: str) -> str:
    """Return the character that is written, perhaps as an escape."""
    if len(atom) == 1:
        return atom
    code = int(atom[2:], 16) if len(atom) > 2 and atom[1] in "xuU" and atom[2] != "{" else -1
    if atom[1:] not in _SHORT and (not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000):
        raise ValueError(f"has the escape {atom}, which stands for no character")
    return _SHORT.get(atom[1:]) or chr(code)


def _find_terminals(refs: dict[str, set[str]]) -> set[str]:
    """Return the rules that refer to terminals alone; never the root."""
    users: dict[str, list[str]] = {}
    for name, names in refs.items():
        for each in names:
            users.setdefault(each, []).append(name)
    num_left = {name: len(names) for name, names in refs.items()}
    ready = [name for name, count in num_left.items() if not count and name != "root"]
    terminals: set[str] = set()
    while ready:
        name = ready.pop()
        terminals.add(name)
        for user in users.get(name, ()):
            num_left[user] -= 1
            if not num_left[user] and user != "root":
                ready.append(user)
    return terminals
