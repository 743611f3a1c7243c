"""Scripts in the shape of public ones, with the import changed, and what the originals print."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

import fminfer
from tests.interfaces.script_models import build_models

HERE = Path(__file__).parent
EXPECTED = HERE / "vllm_expected"  # what vLLM 0.32 printed: run_original.py
OF_VLLM = sorted((HERE / "vllm_scripts").glob("*.py"))
OF_SENTENCES = sorted((HERE / "sentence_scripts").glob("*.py"))
IMPORT = re.compile(r"^from (vllm|sentence_transformers)(\.\w+)* import", re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


def run(text: str) -> str:
    """Run a script in this process; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def check_alike(printed: str, expected: str) -> None:
    """Words are equal, whole numbers too, and others within 1e-4."""
    # vLLM holds back half of a character at the end
    numbered = [
        NUMBER.sub("#", text.replace("\ufffd", "")) for text in (printed, expected)
    ]
    words = [re.sub(r"[\s\[\](),]+", " ", text) for text in numbered]
    assert words[0] == words[1]
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True)
    for number, other in pairs:
        if re.search(r"[.e]", other):
            assert float(number) == pytest.approx(float(other), rel=1e-6, abs=1e-4)
        else:
            assert number == other


def test_there_are_ten_of_each() -> None:
    assert len(OF_VLLM) == len(OF_SENTENCES) == 10


@pytest.mark.filterwarnings("ignore:LLM. without effect")
@pytest.mark.parametrize("path", OF_VLLM, ids=lambda path: path.stem)
def test_a_script_of_vllm_prints_what_vllm_printed(
    path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", places["LLAMA"])
    for name in ("CLASSES", "SCORES", "VECTORS"):
        monkeypatch.setenv(name, places[name])
    text, count = IMPORT.subn("from fminfer import", path.read_text())
    assert count
    printed = run(text)
    check_alike(printed, (EXPECTED / f"{path.stem}.txt").read_text())


@pytest.mark.parametrize("path", OF_SENTENCES, ids=lambda path: path.stem)
def test_a_script_of_sentence_transformers_prints_the_same(
    path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    monkeypatch.setenv("MODEL", places["VECTORS"])
    for name in ("NORMED", "PROMPTED"):
        monkeypatch.setenv(name, places[name])
    expected = run(path.read_text())
    printed = run(IMPORT.sub("from fminfer import", path.read_text()))
    check_alike(printed, expected)


def test_names_are_loaded_on_first_use() -> None:
    assert {"LLM", "SamplingParams", "SentenceTransformer"} <= {*dir(fminfer)}
    assert fminfer.SamplingParams().max_tokens == 16
