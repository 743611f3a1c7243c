"""The docs name tests that exist, and examples tell how they are called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent
RULES = TESTS / "contract" / "rules.md"


def test_the_rules_of_the_contract_name_tests_that_exist() -> None:
    table = RULES.read_text()
    named = 0
    file = ""
    for path, name in re.findall(r"`([\w/]*\.py)?(?:::(test_\w+))?`", table):
        file = path or file
        assert (TESTS / file).is_file(), file
        if name:
            assert f"def {name}(" in (TESTS / file).read_text(), (file, name)
            named += 1
    assert named > 40


def test_the_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the one of a server, whose `serving` and `hand_out` are the reader's own."""
    text = (TESTS.parent / "docs" / "python.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    run = [code for code in examples if "while serving" not in code]
    assert len(run) >= 2
    for code in run:
        exec(compile(code, "python.md", "exec", dont_inherit=True), {})
    printed = capsys.readouterr().out
    assert printed.startswith(" south") or printed.startswith(" north"), (
        "answers are texts first"
    )
    assert "'choices'" in printed and "Finished(" in printed


def test_a_picture_shows_a_terminal_half_way_and_at_the_end(tmp_path: Path) -> None:
    """Progress that is overwritten is not seen at the end; letters of XML are."""
    says = "import time\nfor part in range(9): print(f'\\r{part} <of> 9', end='', flush=True)"
    says += "; time.sleep(0.05)\nprint('\\r\\x1b[Kdone')"
    picture = tmp_path / "run.svg"
    script = TESTS.parent / "scripts" / "picture_run.py"
    command = [sys.executable, script, picture, "--", sys.executable, "-c", says]
    subprocess.run(command, check=True, timeout=60)
    lines = [
        each.text
        for each in ElementTree.parse(picture).iter()
        if each.tag.endswith("}text")
    ]
    half = [line for line in lines if line and line.endswith("<of> 9")]
    assert len(half) == 1 and half[0][0] in "2345678"
    assert lines[-1] == "done"


def test_the_ray_example_tells_how_it_is_called() -> None:
    """`--help` was taken for a file, and ended with a traceback; it needs no Ray."""
    example = TESTS.parent / "examples" / "ray_data.py"
    command = [sys.executable, "-S", example]  # -S: without installed packages
    found = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert found.returncode == 0 and "requests.jsonl more.jsonl" in found.stdout
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "required: output, inputs" in found.stderr


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    outside = "".join(page.read_text().split("\n```")[::2])
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", outside, flags=re.M)}


def test_links_to_sections_find_them() -> None:
    """One led to a section whose number had changed."""
    followed = 0
    for page in [*TESTS.parent.glob("*.md"), *TESTS.parent.glob("docs/*.md")]:
        for path, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
            target = page.parent / path if path else page
            assert anchor in anchors_of(target), (page.name, path, anchor)
            followed += 1
    assert followed > 30
