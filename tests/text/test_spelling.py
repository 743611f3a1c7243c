"""How tokens are spelled in the logprobs arrays: by piece, or by the text that they
stand for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.contract.envelope import Line
from fminfer.engine.answer import AnswerStyle
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.spelling import Spelling
from fminfer.text.tokenizer import Tokenizer
from tests.engine.test_contract import Bench
from tests.text.test_tokenizer import TEXTS, byte_level, sentencepiece_tokenizer

__all__ = ["sentencepiece_tokenizer"]  # a fixture


def sentencepiece_like(*, strips: bool) -> Tokenizer:
    """Build a tokenizer of transformers' own llama layout: ▁ for spaces, byte fallback, BOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁north", "north", "▁▁", "a", "é"]
    backend = BackendTokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("▁tagĠ", special=False, normalized=False)])
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    return Tokenizer(hf)


@pytest.fixture(
    scope="module", params=["byte_level", "bytes", "sentencepiece", "with_space"]
)
def tokenizer(
    request: pytest.FixtureRequest, sentencepiece_tokenizer: Tokenizer
) -> Tokenizer:
    if request.param == "sentencepiece":
        return sentencepiece_tokenizer
    if request.param == "with_space":
        return sentencepiece_like(strips=False)
    return byte_level() if request.param == "byte_level" else Tokenizer(None)


def as_bytes(spelling: str) -> bytes:
    """Read a spelling as a client of the OpenAI API does."""
    if not spelling.startswith("bytes:"):
        return spelling.encode()
    escaped = spelling.removeprefix("bytes:").encode()
    return re.sub(
        rb"\\x([0-9a-f]{2})", lambda hit: bytes.fromhex(hit[1].decode()), escaped
    )


def join(tokenizer: Tokenizer, ids: list[int]) -> str:
    spelling = Spelling(tokenizer, is_text=True)
    first = spelling.find_first_text(ids, skip_special_tokens=True)
    shown = [
        spelling.spell_token(i, is_first=n == first)
        for n, i in enumerate(ids)
        if n >= first
    ]
    return b"".join(map(as_bytes, shown)).decode()


@pytest.mark.parametrize("text", [*TEXTS, " x", "back\\slash 🙂\\x41"])
def test_spellings_joined_give_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert join(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_spellings_of_a_completion_give_its_text(
    tokenizer: Tokenizer, text: str
) -> None:
    """Wherever the prompt ends on a whole character: the completion's leading space is there."""
    ids = tokenizer.encode("a " + text).ids
    spelling = Spelling(tokenizer, is_text=True)
    first = spelling.find_first_text(ids, skip_special_tokens=True)
    cut = first + 1
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    found = "".join(detokenizer.add(i) for i in ids[cut:]) + detokenizer.flush()
    joined = b"".join(as_bytes(spelling.spell_token(i)) for i in ids[cut:])
    assert joined.decode() == found


def test_byte_level_spellings() -> None:
    tokenizer = byte_level()
    text = Spelling(tokenizer, is_text=True)
    vocab = Spelling(tokenizer, is_text=False)
    ids = tokenizer.encode("The bedroom 🙂").ids
    assert [vocab.spell_token(i) for i in ids][:2] == ["The", "Ġbedroom"]
    assert [text.spell_token(i) for i in ids] == [
        "The", " bedroom", " ", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"
    ]  # fmt: skip
    assert text.spell_token(0) == "<eos>", "special tokens are shown by their names"
    assert text.spell_token(5000) == vocab.spell_token(5000) == "<|id:5000|>"


def test_sentencepiece_spellings() -> None:
    for strips in (True, False):
        tokenizer = sentencepiece_like(strips=strips)
        spelling = Spelling(tokenizer, is_text=True)
        ids = {piece: i for i in range(280) if (piece := tokenizer.piece_of_token(i))}
        assert spelling.spell_token(ids["▁north"]) == " north"
        assert spelling.spell_token(ids["▁north"], is_first=True) == (
            "north" if strips else " north"
        )
        assert spelling.spell_token(ids["north"], is_first=True) == "north"
        assert spelling.spell_token(ids["▁▁"], is_first=True) == (
            " " if strips else "  "
        )
        assert spelling.spell_token(ids["<0xE2>"]) == "bytes:\\xe2"
        assert spelling.spell_token(ids["<0x41>"]) == "A"
        assert spelling.spell_token(ids["</s>"]) == "</s>"
        assert spelling.spell_token(ids["▁tagĠ"]) == "▁tagĠ", (
            "an added token is its own text"
        )
        assert spelling.find_first_text([ids["<s>"], 5], skip_special_tokens=True) == 1
        assert spelling.find_first_text([ids["<s>"], 5], skip_special_tokens=False) == 0


def test_a_piece_with_a_broken_character_and_plain_letters() -> None:
    """OpenAI's own form: printable ASCII stays, the other bytes are escaped."""
    tokenizer = Tokenizer(None)
    tokenizer.bytes_of_token = lambda token_id: b" a\\\xe2\x80"  # type: ignore[method-assign]
    assert Spelling(tokenizer, is_text=True).spell_token(1) == "bytes: a\\x5c\\xe2\\x80"


def choice(token_format: Any, line: dict[str, Any], script: bytes) -> dict[str, Any]:
    bench = Bench(script)
    bench.loop._style = AnswerStyle(bench.tokenizer, token_format)
    (record,) = bench.run_lines([Line(0, 1, json.dumps(line).encode())])
    assert record.error is None and record.result is not None
    found: dict[str, Any] = record.result["choices"][0]
    return found


def test_batch_lines_get_text_and_the_others_pieces_unless_told() -> None:
    body = {"prompt": ">", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    script = " x🙂".encode()
    pieces = ["Ġ", "x", "ð", "Ł", "Ļ", "Ĥ"]
    texts = [" ", "x", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    for token_format, of_bare, of_batch in [
        ("auto", pieces, texts),
        ("vocab", pieces, pieces),
        ("text", texts, texts),
    ]:
        for line, expected in [
            (body, of_bare),
            ({"request": body}, of_bare),
            (batch, of_batch),
        ]:
            found = choice(token_format, line, script)
            assert found["text"] == " x🙂"
            logprobs = found["logprobs"]
            assert logprobs["tokens"] == expected
            for token, logprob, top in zip(
                expected,
                logprobs["token_logprobs"],
                logprobs["top_logprobs"],
                strict=True,
            ):
                assert top[token] == logprob, "one spelling, one float, in both places"


def test_under_echo_the_tokens_begin_with_the_prompt() -> None:
    line = {
        "prompt": "é>",
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    found = choice("text", line, b"...ab")
    joined = b"".join(map(as_bytes, found["logprobs"]["tokens"])).decode()
    assert joined.startswith(found["text"]) and found["text"].startswith("é>")


def test_of_two_ids_with_one_spelling_the_better_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "bytes_of_token", lambda self, token_id: b"same")
    line = {"prompt": ">", "max_tokens": 1, "temperature": 0, "logprobs": 3}
    found = choice("text", line, b"a")
    assert found["logprobs"]["top_logprobs"] == [{"same": -0.125}]
