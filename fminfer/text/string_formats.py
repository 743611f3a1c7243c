"""What formats of JSON Schema and OpenAPI allow, in keywords that llguidance enforces.

Texts of these formats pass validators: days exist, and digits end.
"""

from __future__ import annotations

from typing import Any

# leap years of a century, or leap centuries
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = (  # without leap seconds: few programs read a second 60
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_N = "[0-9]{1,9}"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# before the @ of an email, in at most 64 characters
_A = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_HEX = "[0-9a-fA-F]"


def _make_pattern(pattern: str, **others: Any) -> dict[str, Any]:
    return {"pattern": f"^(?:{pattern})$", **others}


# What replaces each format. An empty entry asks for nothing more.
FORMATS: dict[str, dict[str, Any]] = {
    "date": _make_pattern(_DATE),
    "time": _make_pattern(_TIME),
    "date-time": _make_pattern(f"{_DATE}[tT]{_TIME}"),
    "duration": _make_pattern(f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)"),
    "email": _make_pattern(
        rf"(?:{_A}{{1,64}}|{_A}{{1,20}}(?:\.{_A}{{1,20}}){{1,2}}"
        rf"|{_A}{{1,12}}(?:\.{_A}{{1,12}}){{3,4}})"
        rf"@(?:{_HOST}|\[{_BYTE}(?:\.{_BYTE}){{3}}\])"
    ),
    "hostname": _make_pattern(_HOST, maxLength=253),
    "byte": _make_pattern(
        "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
    ),
    "double": {},  # as all numbers here
    **{
        f"uuid{version}": _make_pattern(
            f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        )
        for version in range(1, 9)
    },
    **{
        f"int{size}": {"minimum": -(2 ** (size - 1)), "maximum": 2 ** (size - 1) - 1}
        for size in (8, 16, 32, 64)
    },
    **{
        f"uint{size}": {"minimum": 0, "maximum": 2**size - 1}
        for size in (8, 16, 32, 64)
    },
}
# Formats of JSON Schema that are left to llguidance, which enforces or refuses them.
NATIVE_FORMATS = frozenset(
    {
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "iri",
        "iri-reference",
    }
    | {"idn-email", "idn-hostname", "regex", "json-pointer", "relative-json-pointer"}
)
