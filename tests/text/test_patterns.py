r"""Classes of regexes mean what ECMA 262, Python, Lark and GBNF say, not what Rust's
crate does."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text.patterns import rewrite_lark, rewrite_pattern, rewrite_regex
from tests.text.test_grammars import as_json, compile_for, follow, ids_of
from tests.text.test_tokenizer import byte_level

ASCII = [chr(code) for code in range(32, 127)]
CLASSES = [
    "[^~&&]",
    "[^&&<>]",
    "[a-z&&[^aeiou]",
    "[[:alpha:]",
    "[a-c--b]",
    "[+--]",
    "[--:]",
    "[a~~b]",
    "[a-c-e]",
    r"[\w.-]",
    r"[\]&&\[]",
    r"[\x26-\x28~~]",
    "[^-a]",
    "[a^]",
]


def accepted(constraint: Constraint, texts: list[str]) -> list[str]:
    try:
        grammar = compile_for(byte_level(), constraint)
    except RequestError:
        return []
    return [text for text in texts if follow(grammar, ids_of(grammar, text))]


@pytest.mark.filterwarnings("ignore:Possible (set|nested set)")
@pytest.mark.parametrize("letters", CLASSES)
def test_classes_have_no_set_operators(letters: str) -> None:
    r"""`^[^~&&]$` wrote `~`: in Rust, `&&` is an intersection, here with nothing."""
    try:
        expected = [each for each in ASCII if re.fullmatch(letters, each)]
    except re.error:  # a range from its end to its start
        expected = []
    strings = [json.dumps(each) for each in ASCII]
    as_pattern = accepted(
        as_json({"type": "string", "pattern": f"^{letters}$"}), strings
    )
    assert [json.loads(each) for each in as_pattern] == expected
    assert accepted(Constraint("regex", letters), ASCII) == expected
    assert accepted(Constraint("grammar", f"start: /{letters}/"), ASCII) == expected


def test_patterns_of_names_are_read_alike() -> None:
    schema = {
        "patternProperties": {"^[a&&b]$": {"const": 1}},
        "additionalProperties": False,
    }
    names = [f'{{"{name}":1}}' for name in "ab&c"]
    assert accepted(as_json({"type": "object"} | schema), names) == names[:3]


def test_ecma_has_empty_classes_and_a_dot_without_line_ends() -> None:
    r"""`[^]` was an open class, and `.` let \r and U+2028 through, at which ECMA's dot stops."""
    texts = [
        json.dumps(each, ensure_ascii=False) for each in ("a", "\n", "\r", "\u2028")
    ]
    any_letter, dot = ({"type": "string", "pattern": each} for each in ("^[^]$", "^.$"))
    assert accepted(as_json(any_letter), texts) == texts
    assert accepted(as_json(dot), texts) == texts[:1]
    assert accepted(as_json({"type": "string", "pattern": "^[]$"}), texts) == []
    assert accepted(Constraint("regex", "[]a]"), ["]", "a", "b"]) == ["]", "a"], (
        "as in Python"
    )


def test_strings_and_comments_of_lark_stay() -> None:
    text = 'start: "[&&]" /[a&&b]/ // of [&&]\n# and [--]\nA: /x\\/[~~]/i'
    expected = text.replace("[a&&b]", r"[a\&\&b]").replace("/[~~]", r"/[\~\~]")
    assert rewrite_lark(text) == expected


@pytest.mark.parametrize("rewrite", [rewrite_pattern, rewrite_regex, rewrite_lark])
@pytest.mark.parametrize(
    "part", ["[", "[^", "\\", "[\\", '"\\', "/\\", "[a-", "\\p{", "//", "[]"]
)
def test_long_texts_take_no_time(rewrite: Any, part: str) -> None:
    """A search that starts anew at each open bracket takes hours for 256 KiB of them."""
    start = time.thread_time()
    rewrite(part * (200_000 // len(part)))
    assert time.thread_time() - start < 8
