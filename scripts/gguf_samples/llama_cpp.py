"""llama.cpp's own tools: its converter and its quantizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Converter:
    """convert_hf_to_gguf.py of a folder of llama.cpp's source."""

    def __init__(self, folder: Path) -> None:
        sys.path[:0] = [str(folder), str(folder / "gguf-py")]
        import convert_hf_to_gguf
        from conversion.base import ModelBase, TextModel

        self._main = convert_hf_to_gguf.main
        self._load_hparams = ModelBase.load_hparams
        self._base = ModelBase
        self._text = TextModel

    def convert(
        self, model: Path, target: Path, form: str, pre: str, hparams: dict[str, Any]
    ) -> None:
        """Convert a model. `pre` names how its tokenizer splits: no hash knows a small one."""

        def load(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
            return dict(self._load_hparams(folder, is_mistral_format)) | hparams

        arguments = ["convert", str(model), "--outfile", str(target), "--outtype", form]
        with (
            patch.object(self._text, "get_vocab_base_pre", lambda self, tokenizer: pre),
            patch.object(self._base, "load_hparams", staticmethod(load)),
            patch.object(sys, "argv", arguments),
        ):
            self._main()


def quantize(quantizer: Path, source: Path, target: Path, form: str) -> None:
    """Run llama-quantize."""
    done = subprocess.run(
        [quantizer, source, target, form, "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{quantizer} {form} failed:\n{done.stdout}{done.stderr}"
    )
