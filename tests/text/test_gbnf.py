"""llama.cpp's GBNF: its escapes, its names of rules, and faults in its own terms."""

from __future__ import annotations

import time

import pytest

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.text.gbnf import convert_gbnf, is_gbnf
from tests.text.test_grammars import compile_for, follow, ids_of
from tests.text.test_tokenizer import byte_level

STATEMENT = """?start: select
?select: "SELECT " column
?column: "a" | "b"  // ::= is of GBNF
"""


def accepts(grammar: str, text: str) -> bool:
    compiled = compile_for(byte_level(), Constraint("grammar", grammar))
    return follow(compiled, ids_of(compiled, text))


@pytest.mark.parametrize(
    ("grammar", "fitting", "other"),
    [
        (r'root ::= "\u00fcber"', "über", "\x0fcber"),
        (r'root ::= "caf\xe9"', "café", "caf"),
        (r'root ::= "\U0001F600\x41"', "😀A", "A"),
        (r'root ::= "\u0041\\\"\n\t"', 'A\\"\n\t', "A"),
        (r"root ::= [\u0400-\u04FF]{2}", "Эѭ", "ab"),
        (r"root ::= [^\U0001F600-\U0001F64F]", "a", "😀"),
        (r"root ::= [\x41-\x43\n]", "B", "x"),
        ("root ::= [^a-zA-Z&&]", "!", "&"),
        ("root ::= [a-c--]", "-", "d"),
        (r"root ::= [\]\[/]+", "[/]", "a"),
        ("root ::= . .", "a\n", "a"),
        ('root ::= "\u007f" [\u007f]', "\u007f\u007f", "\u007f"),
    ],
)
def test_escapes_and_classes(grammar: str, fitting: str, other: str) -> None:
    r"""`\u00fc` became `\ufc`, which stands for another character or for none."""
    assert accepts(grammar, fitting) and not accepts(grammar, other)


@pytest.mark.parametrize(
    ("grammar", "fitting", "other"),
    [
        ('root ::= start "!"\nstart ::= "a"', "a!", "a"),
        ('root ::= Ws ws\nWs ::= "A"\nws ::= "b"', "Ab", "bb"),
        ('root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"', "123", "111"),
        ('root ::= "a"\n  | "b"\n\n  | "c" # ::= start: "x"\n', "c", "x"),
        ('root ::= (\n "a" |\n "b" ) { 2 , 3 } empty\nempty ::=', "aba", "a"),
        ('root ::= "a" root?', "aaa", "b"),
        ("# start: of Lark\nroot ::= [0-9]", "7", "x"),
        (STATEMENT, "SELECT b", "SELECT c"),
        ('// root ::= "x"\nstart: "::=" b\nb: "!"', "::=!", "x"),
    ],
)
def test_lark_and_gbnf_are_told_apart(grammar: str, fitting: str, other: str) -> None:
    """A rule `start` made GBNF Lark, `?start` made Lark GBNF, and names of rules fell
    together."""
    assert accepts(grammar, fitting) and not accepts(grammar, other)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= a\na ::= other", "rule 'other' not found, which rule 'a' needs"),
        ('start ::= "a"', "rule 'root' not found"),
        ('root ::= "a"\nb ::= "b', "line 2: .* cannot be read"),
        ('root ::= "a"\nb ::= "\\q"', "line 2: .* has the escape \\\\q"),
        ('root ::= "\\ud83d"', "line 1: .* stands for no character"),
        ('root ::= "a" odd-name\nodd-name ::= [z-a]', "rule 'odd-name': invalid"),
        ('root ::= ("a"', "rule 'root': "),
    ],
)
def test_faults_are_those_of_the_users_grammar(grammar: str, message: str) -> None:
    """They showed lines of the Lark that was made of it, and names that nobody wrote."""
    with pytest.raises(RequestError, match=message) as caught:
        compile_for(byte_level(), Constraint("grammar", grammar))
    assert "T1:" not in caught.value.message and "r0" not in caught.value.message


def test_large_grammars_take_no_time() -> None:
    """Rules that need each other in a row are looked at once; so are blank lines."""
    start = time.thread_time()
    chain = "".join(f"r{n} ::= r{n + 1}\n" for n in range(8000))
    assert convert_gbnf(f'root ::= r0\n{chain}r8000 ::= "a"').count("\n") == 8001
    for text in (
        "\n" * 200_000 + "root ::= a",
        "#" * 200_000,
        "# \n" * 60_000,
        "a " * 100_000,
    ):
        assert is_gbnf(text) == text.endswith("::= a")
    assert time.thread_time() - start < 2
