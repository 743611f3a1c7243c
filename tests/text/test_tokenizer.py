"""Ids to text one at a time, offsets, spelling: for byte-level and sentencepiece tokenizers."""

from __future__ import annotations

import random

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.tokenizer import Tokenizer

TEXTS = [
    "The bedroom is north of the garden.",
    "naïve café — 東京 🙂👩‍👩‍👧 ok",
    "  two  spaces\n\ttab ",
    "é",
    "🙂",
]


def byte_level() -> Tokenizer:
    """Train a byte-level BPE whose emoji and CJK characters split over several ids."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS[:1] * 50, trainer)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>"
    )
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Train a llama-style tokenizer.model with byte fallback and load it as a user would."""
    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(TEXTS[:1] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    transformers.LlamaConfig(vocab_size=300).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer"}'
    )
    return Tokenizer.load(folder)


@pytest.fixture(scope="module", params=["byte_level", "bytes", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, sentencepiece_tokenizer: Tokenizer
) -> Tokenizer:
    if request.param == "sentencepiece":
        return sentencepiece_tokenizer
    return byte_level() if request.param == "byte_level" else Tokenizer(None)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_detokenizing_one_by_one_gives_the_text(
    tokenizer: Tokenizer, text: str, cut: int
) -> None:
    """Wherever the prompt ends, even inside a character, prompt and completion give the text."""
    ids = tokenizer.encode("x " + text).ids
    cut = min(cut, len(ids) - 1)
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    parts = [detokenizer.add(token_id) for token_id in ids[cut:]]
    parts.append(detokenizer.flush())
    prompt = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    assert prompt + "".join(parts) == "x " + text
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    tokenizer = Tokenizer(None)
    ids = list("a🙂".encode())[:-1]
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.add(token_id) for token_id in ids] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_a_replacement_character_of_the_prompt_is_its_own() -> None:
    tokenizer = Tokenizer(None)
    detokenizer = Detokenizer(
        tokenizer, tokenizer.encode("abc\ufffd").ids, is_whole_text=True
    )
    ids = [*tokenizer.encode(" d").ids, 0xC3, 0xA9, 0xC3]
    assert [detokenizer.add(i) for i in ids] == [" ", "d", "", "é", ""]
    assert detokenizer.flush() == "\ufffd"


def test_ids_without_text_do_not_fill_the_window() -> None:
    """After seven ignored EOS a split é came out as U+FFFD, and the window grew with each."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("The").ids)
    parts = [detokenizer.add(i) for i in [0] * 20 + tokenizer.encode("é").ids]
    assert "".join(parts) == "é"
    assert len(detokenizer._ids) < 10


def test_bytes_that_never_become_text_do_not_block() -> None:
    """A model that babbles bytes must not make the window of held-back ids grow for ever."""
    detokenizer = Detokenizer(Tokenizer(None), [])
    text = "".join(detokenizer.add(255) for _ in range(40)) + detokenizer.add(65)
    assert text == "\ufffd" * 40 + "A"


@pytest.mark.parametrize(
    "prompt, completion, text",
    [
        (b"a\xf0\x9f", b"bc", "bc"),  # its U+FFFD stands in the prompt's text already
        (b"a\xf0\x9f\x99", b"\x82b", "🙂b"),
        (b"\xff", b"", ""),
        (b"\xb4\x98", b"\xae\xa7\xae", "\ufffd" * 3),
        (b"\xff\xf0", b"\x9f\x99\x82", "🙂"),
    ],
)
def test_a_prompt_of_ids_that_ends_inside_a_character(
    prompt: bytes, completion: bytes, text: str
) -> None:
    """A broken end of two characters was shown again: the first piece may hold one of them."""
    detokenizer = Detokenizer(Tokenizer(None), list(prompt))
    found = "".join(detokenizer.add(byte) for byte in completion) + detokenizer.flush()
    assert found == text


def byte_starts(text: bytes) -> list[int]:
    """Return the code point of the decoded text to which each byte belongs."""
    starts: list[int] = []
    while len(starts) < len(text):
        rest = text[len(starts) :]
        # What becomes the first character: as many bytes as leave the others' text unchanged.
        whole = rest.decode(errors="replace")
        lengths = [n for n in (1, 2, 3, 4) if n <= len(rest)]
        length = next(
            n
            for n in lengths
            if rest[:n].decode(errors="replace") + rest[n:].decode(errors="replace")
            == whole
            and len(rest[:n].decode(errors="replace")) == 1
        )
        starts += [starts[-1] + 1 if starts else 0] * length
    return starts


def test_offsets_of_bytes_that_are_no_character() -> None:
    """A token behind a broken byte had the byte's offset, as the byte's U+FFFD was not
    yet out."""
    tokenizer = Tokenizer(None)
    assert byte_starts(b"a\xe5\x98a\xff") == [0, 1, 1, 2, 3]
    chance = random.Random(7)
    alphabet = [0x61, 0x62, 0xC3, 0xA9, 0xE5, 0x98, 0xB1, 0xF0, 0x9F, 0x99, 0x82, 0xFF]
    for _ in range(300):
        text = bytes(chance.choices(alphabet, k=9))
        expected = byte_starts(text)
        assert (
            tokenizer.describe_ids(list(text), with_offsets=True).offsets == expected
        ), text
        cut = chance.randrange(9)
        detokenizer = Detokenizer(tokenizer, list(text[:cut]))
        found: list[int] = []
        out = ""
        for byte in text[cut:]:
            out += detokenizer.add(byte)
            found = (
                found[: len(found) + 1 - len(detokenizer.starts)] + detokenizer.starts
            )
        out += detokenizer.flush()
        # An unfinished character of the prompt is the completion's if it is whole now.
        num_prompt = len(text.decode(errors="replace")) - len(out)
        assert found == [max(0, start - num_prompt) for start in expected[cut:]], (
            text,
            cut,
        )


def test_offsets_of_bytes_among_pieces(sentencepiece_tokenizer: Tokenizer) -> None:
    """With byte fallback each broken byte is a character, until the whole one is there."""
    tokenizer = sentencepiece_tokenizer
    ids = tokenizer.encode("x 🙂").ids
    start = ids[:-4]
    emoji = ids[-4:]
    length = len(tokenizer.decode(start))
    for behind, offsets in ((emoji, [0] * 4), (emoji[:3] + ids[:1], [0, 1, 2, 3])):
        found = tokenizer.describe_ids(start + behind, with_offsets=True).offsets
        assert found[len(start) :] == [length + offset for offset in offsets]


def test_leading_space_of_a_completion(sentencepiece_tokenizer: Tokenizer) -> None:
    """Alone, sentencepiece drops the space of `▁no`; after a prompt it must stay."""
    ids = sentencepiece_tokenizer.encode("is north").ids
    place = [
        sentencepiece_tokenizer.piece_of_token(token_id) for token_id in ids
    ].index("▁no")
    assert sentencepiece_tokenizer.decode(ids[place:]) == "north"
    detokenizer = Detokenizer(sentencepiece_tokenizer, ids[:place])
    assert "".join(detokenizer.add(token_id) for token_id in ids[place:]) == " north"


def test_a_broken_end_after_a_whole_character(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    """Byte fallback shows the emoji as broken too, as long as the bytes behind it are."""
    ids = sentencepiece_tokenizer.encode("x 🙂").ids
    detokenizer = Detokenizer(sentencepiece_tokenizer, [])
    text = "".join(detokenizer.add(token_id) for token_id in [*ids, *ids[-4:-2]])
    assert (text, detokenizer.flush()) == ("x 🙂", "\ufffd\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_say_where_each_token_starts(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text, with_offsets=True)
    assert len(encoded.offsets) == len(encoded.ids)
    assert encoded.offsets == sorted(encoded.offsets)
    assert encoded.offsets[0] == 0 and encoded.offsets[-1] < len(text)
    from_ids = tokenizer.describe_ids(encoded.ids, with_offsets=True)
    assert from_ids.text == tokenizer.decode(encoded.ids)
    # llama's tokenizer eats one space that the text begins with
    if from_ids.text == text:
        assert from_ids.offsets[1:] == encoded.offsets[1:], "both ways must agree"


def test_offsets_of_a_known_text() -> None:
    tokenizer = byte_level()
    encoded = tokenizer.encode("The bedroom 🙂!", with_offsets=True)
    pieces = [tokenizer.piece_of_token(token_id) for token_id in encoded.ids]
    assert pieces[:2] == ["The", "Ġbedroom"]
    assert encoded.offsets[:2] == [0, 3], (
        "the space belongs to the token that begins with it"
    )
    emoji = encoded.offsets[pieces.index("!") - 4 : pieces.index("!")]
    assert emoji == [12] * 4, "tokens of one split character share its offset"


def test_ids_without_a_spelling() -> None:
    """Checkpoints pad their vocabulary beyond the tokenizer's; such ids may be drawn."""
    tokenizer = byte_level()
    assert tokenizer.piece_of_token(5000) == "<|id:5000|>"
    assert tokenizer.decode([5000]) == ""


def test_an_empty_prompt_begins_with_bos_or_eos() -> None:
    assert byte_level().encode("").ids == [0]
    assert Tokenizer(None).encode("").ids == []


@pytest.mark.parametrize("text", ["a", " <|endoftext|> b", "What is it? " * 200])
def test_transformers_is_asked_only_where_it_does_more(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It takes five times as long as its backend, which gives the same ids."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    wanted = tokenizer.hf(text)["input_ids"]
    monkeypatch.setattr(type(tokenizer.hf), "_encode_plus", None)
    assert tokenizer.encode(text).ids == wanted

    class Own(type(tokenizer.hf)):  # type: ignore[misc]
        def _encode_plus(self, text: str, **others: object) -> dict[str, list[int]]:
            return {"input_ids": [7]}

    tokenizer.hf.__class__ = Own
    assert Tokenizer(tokenizer.hf).encode(text).ids == [7]
