"""Folders that hold a sentencepiece model and no tokenizer.json, against sentencepiece
itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from fminfer.text.detokenizer import Detokenizer, drop_broken_end
from fminfer.text.sentencepieces import follow_model_file
from fminfer.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import byte_level

CORPUS = (
    "The bedroom is north of the garden, and the northern bedrooms are in the garden house.\n"
    "A quick brown fox jumps over the lazy dog; numbers 0123456789 are two by two!\n"
)
TEXTS = [
    "The north garden",
    " leading",
    "   three leading, and  two  inside   ",
    "a line\nanother\n\n\n end \n",
    "\ttab\tx",
    "🙂 ok 👩‍👩‍👧",
    "東京 is naïve café —",
    "control \x07 and \u200b and \ufffd",
    " ",
    "   ",
    "north",
]
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 2048,
    "sp_model_kwargs": {},
}
T5 = {
    "tokenizer_class": "T5Tokenizer",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "extra_ids": 10,
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # kind: (file, its training, tokenizer_config.json)
    "llama": (
        "tokenizer",
        {
            "vocab_size": 360,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
        },
        LLAMA | {"legacy": False},
    ),
    # As OpenLLaMA's: normalized, doubled spaces removed, and "legacy" not yet invented.
    "open_llama": (
        "tokenizer",
        {"vocab_size": 360, "model_type": "bpe", "byte_fallback": True},
        LLAMA,
    ),
    "t5": (
        "spiece",
        {
            "vocab_size": 70,
            "hard_vocab_limit": False,
            "model_type": "unigram",
            "pad_id": 0,
            "eos_id": 1,
            "unk_id": 2,
            "bos_id": -1,
        },
        T5,
    ),
}


def make_folder(folder: Path, kind: str) -> Any:
    """Train a small model into a folder as a checkpoint has it; return sentencepiece's own."""
    name, training, tokenizer_config = KINDS[kind]
    (folder / "corpus.txt").write_text(CORPUS * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / name),
        minloglevel=2,
        **training,
    )
    transformers.LlamaConfig(vocab_size=400).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return sentencepiece.SentencePieceProcessor(
        model_file=str(folder / f"{name}.model")
    )


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Tokenizer, Any]:
    """Give (kind, our tokenizer, sentencepiece's)."""
    folder = tmp_path_factory.mktemp(request.param)
    own = make_folder(folder, request.param)
    return request.param, Tokenizer.load(folder), own


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_sentencepiece(pair: tuple[str, Tokenizer, Any], text: str) -> None:
    """transformers alone loses one leading space, and keeps spaces that the model merges."""
    kind, tokenizer, own = pair
    expected = own.encode(text)
    expected = [*expected, 1] if kind == "t5" else [1, *expected]
    assert tokenizer.encode(text).ids == expected


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(pair: tuple[str, Tokenizer, Any], text: str) -> None:
    """With an identity model every text does; others give what sentencepiece itself gives."""
    kind, tokenizer, own = pair
    ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer, [])
    one_by_one = "".join(detokenizer.add(i) for i in ids) + detokenizer.flush()
    assert one_by_one == tokenizer.decode(ids)
    if kind == "llama":
        assert one_by_one == text
    elif (
        2 not in ids or kind == "open_llama"
    ):  # T5's <unk> is special, and so without text
        assert one_by_one == own.decode(own.encode(text))


def test_pieces_are_the_vocabulary(pair: tuple[str, Tokenizer, Any]) -> None:
    _, tokenizer, own = pair
    for token_id in range(own.get_piece_size()):
        assert tokenizer.piece_of_token(token_id) == own.id_to_piece(token_id)
    assert tokenizer.piece_of_token(5000) == "<|id:5000|>"


def test_bos_eos_and_extra_ids(pair: tuple[str, Tokenizer, Any]) -> None:
    kind, tokenizer, own = pair
    if kind == "t5":
        assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
        first = own.get_piece_size()
        sentinels = {tokenizer.piece_of_token(i) for i in range(first, first + 10)}
        assert sentinels == {f"<extra_id_{i}>" for i in range(10)}
        assert tokenizer.decode([*tokenizer.encode("north").ids, first]) == "north"
    else:
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.encode("").ids == [1]


@pytest.mark.parametrize("text", TEXTS)
def test_offsets(pair: tuple[str, Tokenizer, Any], text: str) -> None:
    kind, tokenizer, _ = pair
    encoded = tokenizer.encode(text, with_offsets=True)
    assert len(encoded.offsets) == len(encoded.ids)
    assert encoded.offsets == sorted(encoded.offsets)
    assert encoded.offsets[0] == 0 and encoded.offsets[-1] <= len(text)
    if kind == "llama":  # what each piece spells stands where it is said to start
        for token_id, offset in zip(encoded.ids[1:], encoded.offsets[1:], strict=True):
            spelled = tokenizer.piece_of_token(token_id).replace("▁", " ")
            if not spelled.startswith("<0x"):
                assert spelled.strip() == "" or text[offset:].lstrip().startswith(
                    spelled.strip()
                )


def test_offsets_of_a_known_text(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path)
    encoded = tokenizer.encode("The 🙂 garden", with_offsets=True)
    found = dict(
        zip(map(tokenizer.piece_of_token, encoded.ids), encoded.offsets, strict=True)
    )
    assert (
        found["<s>"] == 0
        and found["<0xF0>"] == found["<0x82>"] == 4
        and found["▁garden"] == 5
    )


def test_a_tokenizer_json_rules_where_there_is_one(tmp_path: Path) -> None:
    make_folder(tmp_path, "open_llama")
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path)
    hf.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    text = "  two  spaces"
    assert Tokenizer.load(tmp_path).encode(text).ids == hf(text)["input_ids"]


def test_files_that_are_no_model_of_this_tokenizer(tmp_path: Path) -> None:
    """Tiktoken's tokenizer.model is text; XLM-R's and others' pieces have shifted ids."""
    backend = byte_level().backend
    assert backend is not None
    before = backend.to_str()
    (tmp_path / "a.model").write_text("aGVsbG8= 0\nd29ybGQ= 1\n")
    (tmp_path / "b.model").write_bytes(b"")
    make_folder(tmp_path, "llama")
    follow_model_file(backend, tmp_path)
    assert backend.to_str() == before


def random_ids(tokenizer: Tokenizer, vocab: int, rng: random.Random) -> list[int]:
    """Draw ids of a vocabulary and beyond, with runs of bytes, characters cut and whole."""
    spelled = tokenizer.encode(
        "x" + rng.choice(["é", "🙂", "東京", "👩‍👩‍👧", "\ufffd"])
    ).ids
    tail = [i for i in spelled if i not in (tokenizer.bos_id, tokenizer.eos_id)]
    ids: list[int] = []
    while len(ids) < 40:
        draw = rng.random()
        if draw < 0.4:
            ids += [rng.randrange(vocab + 3)] * rng.choice([1, 1, 1, 12])
        elif draw < 0.8:
            ids += tail[: rng.randint(1, len(tail))]
        else:
            ids += [rng.randrange(3, vocab) for _ in range(rng.randint(1, 15))]
    return ids


@pytest.mark.parametrize("kind", ["bytes", "byte_level", *sorted(KINDS)])
def test_one_by_one_equals_at_once(kind: str, tmp_path: Path) -> None:
    """A run of over eight broken bytes once took the start of a good character with it."""
    if kind == "bytes":
        tokenizer = Tokenizer(None)
        vocab = 256
    elif kind == "byte_level":
        tokenizer = byte_level()
        vocab = 290
    else:
        vocab = make_folder(tmp_path, kind).get_piece_size()
        tokenizer = Tokenizer.load(tmp_path)
    rng = random.Random(3)
    for _ in range(150):
        ids = random_ids(tokenizer, vocab, rng)
        cut = rng.choice([0, 1, 5, 20])
        detokenizer = Detokenizer(tokenizer, ids[:cut])
        parts = [detokenizer.add(token_id) for token_id in ids[cut:]]
        parts.append(detokenizer.flush())
        prompt = tokenizer.decode(ids[:cut])
        found = "".join(parts)
        # A character that the prompt left broken is the prompt's, unless it was completed.
        prompts = (prompt, drop_broken_end(prompt))
        assert tokenizer.decode(ids) in [shown + found for shown in prompts]
        assert len(detokenizer._ids) < 40, "the window must not grow for ever"


def test_many_broken_bytes_and_then_a_character(tmp_path: Path) -> None:
    own = make_folder(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path)
    byte = {value: own.piece_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = (
        [byte[0xFF]] * 23
        + [byte[value] for value in "🙂".encode()]
        + [byte[0xF0], byte[0x9F]]
    )
    assert (
        tokenizer.decode(ids) == own.decode(ids) == "\ufffd" * 23 + "🙂" + "\ufffd" * 2
    )
    detokenizer = Detokenizer(tokenizer, [])
    parts = [detokenizer.add(token_id) for token_id in ids]
    assert parts[3:23] == ["\ufffd"] * 20 and parts[26].endswith("🙂")
    assert "".join(parts) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", [*TEXTS, " " * 5000, "a " * 5000, "\x07" * 5000, "ﬁ" * 500]
)
def test_texts_have_at_least_so_many_tokens(
    pair: tuple[str, Tokenizer, Any], text: str
) -> None:
    """Some of these models merge spaces, drop signs, or have one token for all that is
    unknown."""
    _, tokenizer, _ = pair
    assert tokenizer.count_least_tokens(text) <= len(tokenizer.encode(text).ids)
