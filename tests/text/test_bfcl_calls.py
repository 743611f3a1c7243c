"""BFCL's single-turn Python calls, written in each form, are read back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from fminfer.core.config import KnownParser
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.calls.call_reader import ToolCallReader
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import IS_ALL
from tests.text.bfcl_calls import BfclCase, read_cases
from tests.text.call_writers import WRITERS, Call

EVERY = 1 if IS_ALL else 60


def split_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the text of each token; one that ends in a character's middle has none."""
    offsets = tokenizer.encode(text, with_offsets=True).offsets
    return [text[a:b] for a, b in pairwise([*offsets, len(text)])]


def read_back(
    form: KnownParser, case: BfclCase, pieces: list[str], *, is_certain: bool = False
) -> tuple[str, list[Call]]:
    reader = ToolCallReader(form, case.tools, is_certain=is_certain)
    parts = [*map(reader.feed, pieces), reader.finish()]
    calls: list[tuple[str, str]] = []
    for call in [call for _, calls in parts for call in calls]:
        name, before = calls.pop() if call.goes_on else (call.name, "")
        calls.append((name, before + call.arguments))
    content = "".join(content for content, _ in parts)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", WRITERS)
def test_calls_are_read_back(form: KnownParser) -> None:
    """Whole, and token by token; under a grammar, too."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    for writer in WRITERS[form]:
        for case in read_cases()[::EVERY]:
            text = writer(case.calls)
            expected = ("", case.calls)
            assert read_back(form, case, [text]) == expected, case.id
            tokens = split_tokens(tokenizer, text)
            for is_certain in (False, True):
                answer = read_back(form, case, tokens, is_certain=is_certain)
                assert answer == expected, case.id


@pytest.mark.parametrize("form", WRITERS)
def test_a_cut_at_every_character_changes_nothing(form: KnownParser) -> None:
    for writer in WRITERS[form]:
        for case in read_cases()[:: EVERY * 10]:
            text = writer(case.calls)
            for place in range(len(text)):
                pieces = [text[:place], text[place:]]
                assert read_back(form, case, pieces) == ("", case.calls), case.id
