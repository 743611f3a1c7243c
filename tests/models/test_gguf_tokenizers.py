"""Tokenizers of GGUF files: ids, text and special tokens are those of the model's own
tokenizer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as BackendTokenizer
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer, T5TokenizerFast
from transformers.tokenization_utils_base import generate_merges

from fminfer.core.errors import CheckpointError
from fminfer.models.stored.gguf_file import read_gguf
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.gguf_tokenizer import write_tokenizer_files
from fminfer.text.gguf_vocabulary import require_cuts
from fminfer.text.tokenizer import Tokenizer

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
DATA = Path(__file__).parents[1] / "data" / "gguf"
SAMPLES = [
    "bloom",
    "cohere",
    "deepseek_v2",
    "falcon",
    "gemma",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "llama3",
    "olmo2",
    "phi3",
    "qwen2",
    "starcoder2",
]
PROSE = Path(__file__).parents[2] / "docs" / "structure.md"
TEXTS = [
    "",
    " ",
    "   ",
    "\n\n \t\r\n",
    " two  spaces   three",
    "It's a test, WE'LL see: don't 'Re",
    "x = {'a': 12345, \"b\": 3.14}  # code\n\treturn 0x1F\n",
    "naïve cafe\u0301 – Ǆ Ωmega 東京タワー 한국어 สวัสดี हिन्दी",
    "🙂 👩‍👩‍👧 ½ ² Ⅷ ４２ \u00a0\u3000 end",
    "ends with spaces   ",
    "=" * 40,
    " " * 40 + "x",
]


def load(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer_files(metadata, folder)
    return Tokenizer.load(folder)


def refusal(metadata: dict[str, Any], folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer_files(metadata, folder)
    return str(caught.value)


def own_keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def train_bytes(
    splits: pre_tokenizers.PreTokenizer, size: int = 400
) -> tuple[list[str], Any]:
    """Return the pieces and the merges of a byte-level tokenizer that is trained on prose."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = splits
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([PROSE.read_text("utf-8")[:20_000], *TEXTS], trainer)
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


def byte_metadata(pre: str | None, *specials: str, **more: Any) -> dict[str, Any]:
    pieces, merges = train_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    types = [NORMAL] * len(pieces) + [CONTROL] * len(specials)
    keys = own_keys(
        model="gpt2",
        tokens=[*pieces, *specials],
        token_type=types,
        merges=[" ".join(merge) for merge in merges],
        **more,
    )
    return keys | ({} if pre is None else own_keys(pre=pre))


def train_pieces(folder: Path, kind: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train a sentencepiece model; return it, and what a converter writes of it."""
    file = folder / "prose.txt"
    lines = [
        *PROSE.read_text("utf-8")[:30_000].splitlines(),
        *" ".join(TEXTS).splitlines(),
    ]
    file.write_text("\n".join(filter(None, lines)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(file),
        model_prefix=str(folder / "pieces"),
        model_type="unigram" if kind == "t5" else "bpe",
        minloglevel=2,
        **options,
    )
    stored = importlib.import_module(
        "sentencepiece.sentencepiece_model_pb2"
    ).ModelProto()
    stored.ParseFromString((folder / "pieces.model").read_bytes())
    keys = own_keys(
        model=kind,
        pre="default",
        tokens=[each.piece for each in stored.pieces],
        scores=[each.score for each in stored.pieces],
        token_type=[each.type for each in stored.pieces],
    )
    return stored, keys


@pytest.mark.parametrize("name", SAMPLES)
def test_ids_are_those_of_the_tokenizer_that_was_converted(
    name: str, tmp_path: Path
) -> None:
    _, metadata = read_gguf(DATA / f"{name}.gguf")
    tokenizer = load(metadata, tmp_path)
    for said in json.loads((DATA / f"{name}.json").read_text("utf-8"))["texts"]:
        text = said["text"]
        assert tokenizer.encode(text, add_special_tokens=False).ids == said["ids"], text
        assert tokenizer.encode(text).ids == said["ids_with_special"], text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)],
)
def test_byte_level_ids_and_text_are_those_of_transformers(
    pre: str, expected: Any, tmp_path: Path
) -> None:
    metadata = byte_metadata(pre, "<|x|>")
    tokenizer = load(metadata, tmp_path)
    pieces = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    own = expected(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    own.add_tokens([AddedToken("<|x|>", special=True, normalized=False)])
    for text in [*TEXTS, "a<|x|> b<|x|><|x"]:
        ids = own(text)["input_ids"]
        assert tokenizer._encode_ids(text, False) == ids, text
        plain = own.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == plain


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        (
            "llama-bpe",
            "I'VE 12345 (a)\n\n b",
            ["I", "'VE", " ", "123", "45", " (", "a", ")\n\n", " b"],
        ),
        ("qwen2", "x123 y", ["x", "1", "2", "3", " y"]),
        ("qwen35", "हिन्दी!", ["हिन्दी", "!"]),
        ("qwen2", "हिन्दी!", ["ह", "िन", "्द", "ी!"]),
        ("minicpm5", "a 12345", ["a", " ", "123", "45"]),
        ("seed-coder", "a!\n\nb", ["a", "!", "\n\n", "b"]),
        ("gpt-4o", "fooBar's HTTPServer", ["foo", "Bar's", " HTTPServer"]),
        ("tekken", "fooBar's 42", ["foo", "Bar", "'s", " ", "4", "2"]),
        ("smollm", "in 2024's", ["in", " ", "2", "0", "2", "4", "'s"]),
        ("gpt-2", "in 2024's", ["in", " 2024", "'s"]),
        ("bloom", "a, b1 (c)", ["a", ",", " b1", " (", "c", ")"]),
        ("viking", "a, b1", ["a", ",", " b", "1"]),
        (
            "deepseek-v3",
            "我想apple 1234 ...\nx",
            ["我想", "apple", " ", "123", "4", " ...\n", "x"],
        ),
        ("deepseek-llm", "我 was 42\n", ["我", " was", " ", "4", "2", "\n"]),
        ("deepseek-llm", "ªb Ωß", ["ª", "b", " Ωß"]),
        ("deepseek-coder", "x( y42 ;\n", ["x", "(", " y", "4", "2", " ;", "\n"]),
        ("falcon", "$1234 ok", ["$", "123", "4", " ok"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizer_json_has_it(
    name: str, text: str, pieces: list[str]
) -> None:
    decoder = decoders.ByteLevel()
    found = [
        piece for piece, _ in require_cuts(name).pre_tokenizer.pre_tokenize_str(text)
    ]
    assert [decoder.decode([piece]) for piece in found] == pieces


def test_a_word_of_the_vocabulary_needs_no_merges_where_the_tokenizer_says_so(
    tmp_path: Path,
) -> None:
    ids = {}
    for pre in ("llama-bpe", "dbrx"):
        metadata = byte_metadata(pre)
        metadata["tokenizer.ggml.tokens"].append("zyxwv")
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
        (tmp_path / pre).mkdir()
        ids[pre] = load(metadata, tmp_path / pre)._encode_ids("zyxwv", False)
    assert ids["llama-bpe"] == [len(metadata["tokenizer.ggml.tokens"]) - 1]
    assert len(ids["dbrx"]) > 1


@pytest.mark.parametrize("leads", [True, False])
def test_scored_merges_give_the_ids_of_sentencepiece(
    leads: bool, tmp_path: Path
) -> None:
    _, metadata = train_pieces(
        tmp_path,
        "llama",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=leads,
        allow_whitespace_only_pieces=True,
    )
    own = sentencepiece.SentencePieceProcessor(
        model_file=str(tmp_path / "pieces.model")
    )
    if not leads:
        metadata |= own_keys(add_space_prefix=False)
    (tmp_path / "files").mkdir()
    tokenizer = load(metadata, tmp_path / "files")
    for text in TEXTS:
        ids = own.encode(text)
        assert tokenizer._encode_ids(text, False) == ids, text
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == own.decode(ids)


def test_gemmas_runs_of_spaces_are_single_tokens(tmp_path: Path) -> None:
    """A GGUF file has its user's pieces with spaces, without their scores."""
    runs = ["▁" * count for count in range(2, 9)] + [
        "\n" * count for count in range(1, 5)
    ]
    stored, metadata = train_pieces(
        tmp_path,
        "llama",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["<start_of_turn>", *runs],
    )
    scores = {each.piece: each.score for each in stored.pieces}
    ids = {piece: token_id for token_id, piece in enumerate(scores)}
    own = GemmaTokenizer(
        vocab=ids,
        merges=generate_merges(ids, scores),
        bos_token="<s>",
        eos_token="</s>",
    )
    users = [each.piece for each in stored.pieces if each.type == USER_DEFINED]
    own.add_tokens(
        [AddedToken(piece, normalized=False, special=False) for piece in users]
    )
    metadata |= own_keys(
        add_space_prefix=False,
        tokens=[p.replace("▁", " ") if p in users else p for p in scores],
        scores=[
            -1000.0 if piece in users else score for piece, score in scores.items()
        ],
    )
    (tmp_path / "files").mkdir()
    tokenizer = load(metadata, tmp_path / "files")
    for text in [*TEXTS, "<start_of_turn>user\n\n   a  b<start_of_turn>"]:
        expected = own(text, add_special_tokens=False)["input_ids"]
        assert tokenizer._encode_ids(text, False) == expected, text
        assert tokenizer.decode(expected) == own.backend_tokenizer.decode(expected)


def test_unigram_gives_the_ids_of_t5s_tokenizer(tmp_path: Path) -> None:
    stored, metadata = train_pieces(
        tmp_path,
        "t5",
        vocab_size=400,
        character_coverage=0.98,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    charsmap = stored.normalizer_spec.precompiled_charsmap
    metadata |= own_keys(
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=[byte - 256 if byte > 127 else byte for byte in charsmap],
    )
    own = T5TokenizerFast(
        vocab=[(each.piece, each.score) for each in stored.pieces],
        _spm_precompiled_charsmap=charsmap,
        extra_ids=0,
    )
    (tmp_path / "files").mkdir()
    tokenizer = load(metadata, tmp_path / "files")
    for text in TEXTS[:-2]:  # runs have several best ways
        ids = own(text)["input_ids"]
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == own.backend_tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("leads", "drops"), [(True, False), (False, False), (False, True)]
)
def test_unigram_has_the_spaces_that_the_file_says(
    leads: bool, drops: bool, tmp_path: Path
) -> None:
    stored, metadata = train_pieces(
        tmp_path,
        "t5",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=drops,
        add_dummy_prefix=leads,
    )
    metadata |= own_keys(
        unknown_token_id=0, eos_token_id=2, remove_extra_whitespaces=drops
    )
    metadata |= own_keys(add_space_prefix=True) if leads else {}
    own = sentencepiece.SentencePieceProcessor(
        model_file=str(tmp_path / "pieces.model")
    )
    (tmp_path / "files").mkdir()
    tokenizer = load(metadata, tmp_path / "files")
    assert stored.pieces[0].type == UNKNOWN
    for text in TEXTS[:-2]:
        assert tokenizer.encode(text).ids == [*own.encode(text), 2], text
        assert tokenizer.decode(own.encode(text)) == own.decode(own.encode(text))


@pytest.mark.parametrize(
    ("pre", "said", "ids"),
    [
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("tekken", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_bos_and_eos_stand_around_a_text_as_the_file_or_its_kind_says(
    pre: str, said: dict[str, bool], ids: tuple[bool, bool], tmp_path: Path
) -> None:
    metadata = byte_metadata(pre, "<bos>", "<eos>", **said)
    last = len(metadata["tokenizer.ggml.tokens"])
    metadata |= own_keys(bos_token_id=last - 2, eos_token_id=last - 1)
    tokenizer = load(metadata, tmp_path)
    found = tokenizer.encode("a b").ids
    assert (found[0] == last - 2, found[-1] == last - 1) == ids
    assert (tokenizer.bos_id, tokenizer.eos_id) == (last - 2, last - 1)


def test_a_merge_of_pieces_that_are_not_there_is_left_out(tmp_path: Path) -> None:
    """The tokenizers package refuses it, and no text could need it."""
    metadata = byte_metadata("gpt-2")
    metadata["tokenizer.ggml.merges"].insert(0, "t unknown")
    assert load(metadata, tmp_path).decode(list(range(3))) == '!"#'


def test_control_tokens_are_special_and_padding_has_no_text(tmp_path: Path) -> None:
    """Padding was a token of the user's in old files, and its name was found in texts."""
    metadata = byte_metadata("gpt-2")
    pieces = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    first = len(pieces)
    pieces += [
        "<|c|>",
        "<tool>",
        b"\xff\xfe",
        f"[PAD{first + 3}]",
        f"[PAD{first + 4}]",
        "<unk>",
    ]
    types += [CONTROL, USER_DEFINED, NORMAL, USER_DEFINED, UNUSED, UNKNOWN]
    tokenizer = load(metadata, tmp_path)
    assert tokenizer.special_ids == {first, first + 5}
    assert tokenizer._encode_ids("<|c|><tool><unk>", False) == [
        first,
        first + 1,
        first + 5,
    ]
    assert (
        tokenizer.decode([first, first + 1, first + 2, first + 3, first + 4])
        == "<tool>"
    )
    assert len(tokenizer._encode_ids(f"[PAD{first + 3}]", False)) > 1
    assert len(tokenizer._encode_ids(f"[PAD{first + 4}]", False)) > 1


def test_phi_3_swallows_spaces_behind_special_tokens(tmp_path: Path) -> None:
    """Only Phi-3's own tokenizer.json says so, and llama.cpp follows it by the model's name."""
    ids = {}
    for arch in ("phi3", "phimoe", "llama"):
        tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "<|user|>"]
        keys = own_keys(
            model="llama",
            tokens=tokens,
            scores=[0.0, 0.0, 0.0, -2.0, -3.0, -1.0, -1000.0],
            token_type=[UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, CONTROL],
        )
        (tmp_path / arch).mkdir()
        metadata = {"general.architecture": arch, **keys}
        ids[arch] = load(metadata, tmp_path / arch)._encode_ids(
            "<|user|> a<s> a", False
        )
    swallowed = [6, 5, 1, 3, 5]
    assert ids == {
        "phi3": swallowed,
        "phimoe": swallowed,
        "llama": [6, 3, 5, 1, 3, 5],
    }


def test_chat_templates_are_kept_with_their_names(tmp_path: Path) -> None:
    metadata = byte_metadata("gpt-2", "<bos>")
    metadata |= own_keys(bos_token_id=len(metadata["tokenizer.ggml.tokens"]) - 1)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ messages[0]['content'] }}"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    template = ChatTemplate(load(metadata, tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, []).text == "<bos>hi"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert template.render(messages, [tool]).text == "tools: hi"


def generation(
    folder: Path, template: str, *specials: str, **more: Any
) -> dict[str, Any]:
    metadata = byte_metadata("gpt-2", *specials, **more)
    metadata |= {"tokenizer.chat_template": template, "general.sampling.temp": 0.6}
    first = len(metadata["tokenizer.ggml.tokens"]) - len(specials)
    metadata |= own_keys(eos_token_id=first)
    write_tokenizer_files(metadata, folder)
    fields: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    fields["eos_token_id"] = [each - first for each in fields["eos_token_id"]]
    return fields


def test_a_turn_ends_at_the_token_that_the_template_writes(tmp_path: Path) -> None:
    """A file of Gemma names <eos> alone, and answers went on behind <end_of_turn>."""
    specials = ("<eos>", "<end_of_turn>", "<|im_end|>", "<|end|>")
    found = generation(tmp_path, "{{ x }}<end_of_turn>\n", *specials)
    assert found == {"eos_token_id": [0, 1], "temperature": 0.6}
    assert generation(tmp_path, "<|end|>", *specials)["eos_token_id"] == [0, 3]


def test_the_end_of_a_part_of_a_turn_ends_no_answer(tmp_path: Path) -> None:
    specials = ("<|endoftext|>", "<|return|>", "<|call|>", "<|end|>")
    found = generation(tmp_path, "<|end|> <|call|> <|return|>", *specials)
    assert found["eos_token_id"] == [0, 1, 2]


def test_ends_that_the_file_names_are_all_of_the_list(tmp_path: Path) -> None:
    metadata = byte_metadata("gpt-2", eos_token_id=3, eot_token_id=5, eom_token_id=7)
    write_tokenizer_files(metadata | own_keys(padding_token_id=10**6), tmp_path)
    fields = json.loads((tmp_path / "generation_config.json").read_text())
    assert fields == {"eos_token_id": [3, 5, 7]}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert"}, ["'bert'", "gpt2, llama, t5", "--tokenizer"]),
        ({"model": "none"}, ["no tokenizer", "--tokenizer"]),
        ({}, ["no tokenizer", "--tokenizer"]),
        (
            {"model": "gpt2", "pre": "my-own"},
            ["'my-own'", "llama-bpe", "qwen2", "--tokenizer"],
        ),
        ({"model": "gpt2"}, ["no tokenizer.ggml.pre", "--tokenizer"]),
        ({"model": "llama"}, ["0 tokens", "--tokenizer"]),
        (
            {"model": "llama", "tokens": ["a", "b"], "token_type": [1]},
            ["2 tokens, 1 types"],
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    keys: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(own_keys(**keys), tmp_path)
    assert all(word in message for word in words), message


def test_text_is_composed_where_the_tokenizer_does_so(tmp_path: Path) -> None:
    assert isinstance(require_cuts("qwen2").normalizer, normalizers.NFC)
    assert require_cuts("llama-bpe").normalizer is None
    tokenizer = load(byte_metadata("qwen2"), tmp_path)
    assert tokenizer._encode_ids("cafe\u0301", False) == tokenizer._encode_ids(
        "café", False
    )
