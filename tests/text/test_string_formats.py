"""Formats of JSON Schema: what they let through is what validators take, and it ends."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import pytest

from fminfer.core.errors import RequestError
from fminfer.text.string_formats import FORMATS, NATIVE_FORMATS
from tests.text.test_grammars import as_json, compile_for, follow, ids_of
from tests.text.test_tokenizer import byte_level

HELD = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
]
# characters
BOUNDED = {"date": 12, "time": 26, "date-time": 37, "duration": 70, "uuid4": 38}


def accepts(schema: Any, value: Any) -> bool:
    grammar = compile_for(byte_level(), as_json(schema))
    return follow(grammar, ids_of(grammar, json.dumps(value)))


def draw(schema: Any, rng: random.Random) -> str | None:
    """Draw a text by chance, byte by byte; None: it is long."""
    tokenizer = byte_level()
    grammar = compile_for(tokenizer, as_json(schema))
    matcher = grammar.make_matcher()
    text = b""
    for _ in range(90):
        bits = matcher.mask.bits
        ids = [i for i in range(len(bits) * 8) if bits[i // 8] >> i % 8 & 1]
        if tokenizer.eos_id in ids and (len(ids) == 1 or rng.random() < 0.3):
            return text.decode()
        token_id = rng.choice([each for each in ids if each != tokenizer.eos_id])
        text += grammar.grammars.vocabulary.tokens[token_id]
        matcher.advance(token_id)
    return None


def test_days_are_those_of_the_calendar() -> None:
    """2023-02-29 was a date, and so was a day of the year 0; 1900 has no leap day, 2000
    has one."""
    pattern = re.compile(FORMATS["date"]["pattern"])
    for year in (0, 1, 4, 96, 100, 400, 1900, 2000, 2023, 2024, 2100, 9999):
        for month, day in ((m, d) for m in range(14) for d in range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                datetime.date.fromisoformat(text)
                is_day = True
            except ValueError:
                is_day = False
            assert (pattern.match(text) is not None) is is_day, text


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date-time", "2024-02-29T23:59:59Z", "2023-02-29T23:59:59Z"),
        ("date-time", "2024-12-31T12:00:59.123456789+05:30", "2024-12-31T12:00:60Z"),
        ("date-time", "9999-12-31T00:00:00Z", "0000-01-01T00:00:00Z"),
        ("time", "12:00:59.5Z", "12:00:60Z"),
        ("time", "23:59:59-23:59", "12:00:00.1234567890Z"),
        ("duration", "P1Y2M3DT4H5M6S", "P1234567890D"),
        ("duration", "P4W", "PT"),
        ("email", "a.b@example.org", "a..b@example.org"),
        ("email", f"{'a' * 64}@b.c", f"{'a' * 65}@b.c"),
        ("hostname", "a.example", f"{'a' * 64}.example"),
        (
            "uuid4",
            "12345678-1234-4234-8234-123456789abc",
            "12345678-1234-1234-8234-123456789abc",
        ),
        ("byte", "YQ==", "YQ="),
    ],
)
def test_string_formats_are_held_to(form: str, good: str, bad: str) -> None:
    schema = {"type": "string", "format": form}
    assert accepts(schema, good) and not accepts(schema, bad)
    both = schema | {"pattern": f"^{re.escape(bad)}$"}
    with pytest.raises(RequestError, match=r"nothing matches it$"):
        compile_for(byte_level(), as_json(both))
    assert accepts(schema | {"pattern": f"^{re.escape(good)}$"}, good), (
        "beside a pattern"
    )


@pytest.mark.parametrize("form", HELD)
def test_texts_drawn_by_chance_are_valid(form: str) -> None:
    rust = pytest.importorskip("jsonschema_rs")
    schema = {"type": "string", "format": form}
    assert form in FORMATS or form in NATIVE_FORMATS
    validator = rust.Draft202012Validator(schema, validate_formats=True)
    rng = random.Random(form)
    texts = [draw(schema, rng) for _ in range(12)]
    short = [text for text in texts if text is not None]
    assert short or form in ("uri", "hostname", "email")
    for text in short:
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("form", BOUNDED)
def test_times_end(form: str) -> None:
    """Durations and fractions of a second went on until max_tokens, and were no JSON then."""
    grammar = compile_for(byte_level(), as_json({"type": "string", "format": form}))
    tokenizer = byte_level()
    matcher = grammar.make_matcher()
    zero = ids_of(grammar, "0")[0]
    text = b""
    while tokenizer.eos_id not in (matcher.mask.few or ()):
        bits = matcher.mask.bits
        ids = [i for i in range(len(bits) * 8) if bits[i // 8] >> i % 8 & 1]
        text += grammar.grammars.vocabulary.tokens[zero if zero in ids else ids[0]]
        matcher.advance(zero if zero in ids else ids[0])
        assert len(text) <= BOUNDED[form], text
