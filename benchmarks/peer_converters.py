"""Converters of peers.py's peers whose own commands stumble over its model's plain tokenizer.

`python peer_converters.py SIDE MODEL TARGET DTYPE` writes the checkpoint in the folder MODEL, as
the peer wants it, into the folder TARGET. Prompts are token ids, so what a tokenizer
lacks here may be anything.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def convert_to_ctranslate2(model: str, target: str, dtype: str) -> None:
    """CTranslate2's own converter, which writes no special tokens and then loads none
    without."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            tokenizer = super().load_tokenizer(*args, **kwargs)
            first = tokenizer.convert_ids_to_tokens(0)
            tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token = first
            return tokenizer

    Converter(model).convert(target, quantization=dtype, force=True)


def convert_to_gguf(model: str, target: str, dtype: str) -> None:
    """llama.cpp's convert_hf_to_gguf.py: it knows tokenizers by a hash, and wants some
    merges."""
    sys.path.insert(0, str(Path(sys.prefix) / "source"))
    import convert_hf_to_gguf
    from conversion.base import TextModel

    def take_as_gpt2(self: Any, tokenizer: Any) -> str:
        self.gguf_writer.add_token_merges(["Ġ Ġ"])
        return "gpt-2"

    TextModel.get_vocab_base_pre = take_as_gpt2
    kind = {"float32": "f32", "bfloat16": "bf16", "Q8_0": "q8_0"}.get(dtype, "f16")
    file = Path(target) / "model.gguf"
    sys.argv[1:] = [model, "--outtype", kind, "--outfile", str(file)]
    convert_hf_to_gguf.main()
    if dtype == "Q4_0":
        plain = file.rename(file.with_name("plain.gguf"))
        quantizer = Path(sys.prefix) / "bin/llama-quantize"
        subprocess.run([quantizer, "--pure", plain, file, dtype], check=True)
        plain.unlink()


if __name__ == "__main__":
    {"ctranslate2": convert_to_ctranslate2, "llama.cpp": convert_to_gguf}[sys.argv[1]](
        *sys.argv[2:]
    )
