"""The notebook of examples/ runs from its first cell to its last, through an interrupt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interfaces.script_models import save_bert, save_modules

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(tmp_path)
    save_modules(tmp_path, ("Transformer", "Pooling"))
    monkeypatch.setenv("ENCODER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "outputs are stripped"

    nbclient.NotebookClient(book, timeout=LIMIT_S, kernel_name="python3").execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    errors = [o.ename for o in outputs if o.output_type == "error"]
    assert errors == ["KeyboardInterrupt"]
    shown = [{*o.data} for o in outputs if "data" in o]
    assert sum("image/png" in kinds for kinds in shown) == 2, "two plots"
    assert sum("text/html" in kinds for kinds in shown) == 2, "a record and counts"
