"""T5's tokenizer from its sentencepiece model alone, as old checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import transformers

from fminfer.core.errors import CheckpointError
from fminfer.text.detokenizer import Detokenizer
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
    (folder / "config.json").write_text(
        json.dumps({"model_type": "t5", "vocab_size": 256})
    )
    tokenizer = Tokenizer.load(folder)
    own = sentencepiece.SentencePieceProcessor(str(folder / "spiece.model"))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (1, None)
    for text in (*TEXTS[:3], "  two  spaces ﬁ Ａ", "[S2S] a", ""):
        assert tokenizer.encode(text).ids == [*own.encode(text), 1]
    size = own.vocab_size()
    assert tokenizer.encode("<extra_id_0> a <extra_id_99>").ids == [
        size + 99,
        *own.encode("a"),
        size,
        1,
    ]


def name_class(folder: Path, file: str, name: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (folder / file).write_text(
        json.dumps({"model_type": "t5", "tokenizer_class": name})
    )


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_byt5_needs_no_vocabulary_file(file: str, tmp_path: Path) -> None:
    """A folder without such a file had no tokenizer, and ByT5 publishes none."""
    name_class(tmp_path, file, "ByT5Tokenizer")
    tokenizer = Tokenizer.load(tmp_path)
    theirs = transformers.ByT5Tokenizer()
    for text in (*TEXTS, "h\u00e9llo \u6771\u4eac </s> <extra_id_0>x", ""):
        ids = theirs(text).input_ids
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    ids = theirs("\u00e9\u6771", add_special_tokens=False).input_ids
    assert b"".join(map(tokenizer.bytes_of_token, ids)) == "\u00e9\u6771".encode()
    assert tokenizer.added_ids == ([], [1])

    detokenizer = Detokenizer(tokenizer, [])
    streamed = [detokenizer.add(each) for each in ids]
    assert streamed == ["", "\u00e9", "", "", "\u6771"]


def test_another_class_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    name_class(tmp_path, "tokenizer_config.json", "PerceiverTokenizer")
    with pytest.raises(
        CheckpointError, match="no tokenizer of its class PerceiverTokenizer"
    ):
        Tokenizer.load(tmp_path)
