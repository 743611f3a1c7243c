"""The docs name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
CONTRACT = TESTS.parent / "docs" / "contract.md"


def test_the_contract_names_tests_that_exist() -> None:
    table = CONTRACT.read_text().split("## 11.")[1]
    named, file = 0, ""
    for path, name in re.findall(r"`([\w/]*\.py)?(?:::(test_\w+))?`", table):
        file = path or file
        assert (TESTS / file).is_file(), file
        if name:
            assert f"def {name}(" in (TESTS / file).read_text(), (file, name)
            named += 1
    assert named > 40
