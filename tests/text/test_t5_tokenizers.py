"""T5's tokenizer from its sentencepiece model alone, as old checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece

from fminfer.text.tokenizer import Tokenizer
from tests.sequence_models import TEXTS


def test_a_folder_with_spiece_model_alone(tmp_path: Path) -> None:
    """Ids are sentencepiece's own with an end; sentinels count down from the last id."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 50))
    folder = tmp_path / "model"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=120,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "spiece.vocab").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 256}))
    tokenizer = Tokenizer.load(folder)
    own = sentencepiece.SentencePieceProcessor(str(folder / "spiece.model"))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (1, None)
    for text in (*TEXTS[:3], "  two  spaces ﬁ Ａ", "[S2S] a", ""):
        assert tokenizer.encode(text).ids == [*own.encode(text), 1]
    size = own.vocab_size()
    assert tokenizer.encode("<extra_id_0> a <extra_id_99>").ids == [
        *(size + 99, *own.encode("a"), size, 1)
    ]
