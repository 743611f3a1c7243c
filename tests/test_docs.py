"""The docs name tests that exist, and examples tell how they are called."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_the_ray_example_tells_how_it_is_called() -> None:
    """`--help` was taken for a file, and ended with a traceback; it needs no Ray."""
    example = TESTS.parent / "examples" / "ray_data.py"
    command = [sys.executable, "-S", example]  # -S: without installed packages
    found = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert found.returncode == 0 and "requests.jsonl more.jsonl" in found.stdout
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "required: output, inputs" in found.stderr
