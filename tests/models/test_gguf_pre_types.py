"""How GGUF tokenizers cut texts, beside tokenizer.json with the models' published cuts.

The cuts stand here as tokenizer.json has them, and nothing of fminfer's table is used. One
vocabulary serves all. It is trained on whole lines, so that its pieces cross every cut: a
cut at another place gives other ids.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, pre_tokenizers, trainers

from fminfer.text.gguf_tokenizer import write_tokenizer_files
from fminfer.text.gguf_vocabulary import require_cuts
from fminfer.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
NUM_TEXTS = 2000
Json = dict[str, Any]
BYTES: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
WORDS = BYTES | {"use_regex": True}
DIGITS: Json = {"type": "Digits", "individual_digits": True}
NFC: Json = {"type": "NFC"}
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
    r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
JAIS2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|"
    r"\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def splits(*patterns: str) -> Json:
    """Return cuts by these patterns in turn, and then into bytes."""
    steps = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in patterns
    ]
    return sequence(*steps, BYTES)


# Each pre-type: what tokenizer.json has as pre_tokenizer and as normalizer, and whether a
# word of the vocabulary needs no merges.
PUBLISHED: dict[str, tuple[Json, Json | None, bool]] = {
    "llama-bpe": (splits(LLAMA3), None, True),
    "smaug-bpe": (splits(LLAMA3), None, False),
    "glm4": (splits(LLAMA3), None, True),
    "chatglm-bpe": (splits(LLAMA3), None, False),
    "jais-2": (splits(JAIS2), None, False),
    "exaone-moe": (splits(EXAONE_MOE), NFC, False),
    "command-r": (sequence(DIGITS, WORDS), NFC, False),
    "olmo": (WORDS, NFC, False),
    "mpt": (WORDS, NFC, False),
    "gpt-2": (WORDS, None, False),
    "phi-2": (WORDS, None, False),
    "starcoder": (sequence(DIGITS, WORDS), None, False),
    "refact": (sequence(DIGITS, WORDS), None, False),
    "smollm": (sequence(DIGITS, WORDS), None, False),
    "seed-coder": (splits(SEED_CODER), None, False),
    "tekken": (splits(TEKKEN), None, True),
    "hunyuan": (splits(QWEN2), NFC, False),
    "hunyuan-dense": (splits(*DEEPSEEK_V3), None, False),
    "qwen2": (splits(QWEN2), NFC, False),
    "stablelm2": (splits(QWEN2), NFC, False),
    "gpt-4o": (splits(GPT_4O), None, False),
    "minimax-m2": (splits(GPT_4O), None, False),
}
# llama.cpp's converter writes these for the models of an architecture. Those of ernie4_5,
# ernie4_5-moe, phimoe and nemotron have a tokenizer of sentencepiece.
BY_ARCHITECTURE = {
    "smollm3": "smaug-bpe",
    "jais2": "jais-2",
    "exaone-moe": "exaone-moe",
    "glm4": "glm4",
    "glm4moe": "glm4",
    "cohere2": "command-r",
    "olmo": "olmo",
    "olmoe": "olmo",
    "seed_oss": "seed-coder",
    "apertus": "tekken",
    "mistral3": "tekken",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan-moe": "hunyuan",
    "dots1": "qwen2",
    "arcee": "llama-bpe",
    "stablelm": "stablelm2",
    "phi2": "phi-2",
    "granitemoe": "refact",
    "mpt": "mpt",
    "gptj": "gpt-2",
    "starcoder": "starcoder",
    "minimax-m2": "minimax-m2",
}
PARTS = (
    "the house", "The", "HTTPServer", "fooBar", "don't", "WE'LL", "I'Ve", "it’s", "'D ", "'",
    "a b c d", "x = y", "naïve", "cafe\u0301", "Straße", "ﬁn", "Ωmega", "ЖиЗнь не", "ДокУмент",
    "東京タワー", "我想要", "中文，标点。", "ひらがな", "한국어 문장", "\u1112\u1161\u11ab",
    "हिन्दी में", "สวัสดีครับ", "ភាសាខ្មែរ", "السَّلام", "שָׁלוֹם", "ქართული", "አማርኛ", "ǅ", "ʰ", "ª",
    "1", "12", "345", "6789", "1234567890", "3.14", "1,000", "0x1F", "½", "²", "Ⅷ", "４２",
    "٣٤٥", "१२३", "①", " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n ",
    "\n    ", "\u00a0", "\u3000", "\u2009", "\u200b", "\u2028", "\x85", "\x0b", "\x0c",
    ".", "...", "!?", "(", ")", "--", "——", "=" * 9, "/", "//", "\\", "</s>", "#", "$5", "€",
    "“q”", "…", "、", "_", "a_b", "`", "~", "^", "|", "&&", "@user", "http://a.b/c?d=e",
    "🙂", "👩‍👩‍👧", "🇩🇪", "❤️", "\x00", "\x07", "\x1b[0m", "\x7f", "\ufeff", "\ufffd", "\u0301",
)  # fmt: skip


@cache
def texts() -> list[str]:
    """Return texts of many scripts, in which anything may follow anything."""
    rng = random.Random(11)
    made = [" " * count + "x" for count in (5, 7, 31, 77, 300, 600, 1100)]
    made += [f"a{' ' * count}" for count in (1, 2, 3, 6, 513)]
    made += ["", *PARTS]
    while len(made) < NUM_TEXTS:
        glue = rng.choice(("", "", " ", "\n"))
        made.append(glue.join(rng.choices(PARTS, k=rng.randint(1, 12))))
    return made


@cache
def train_vocabulary() -> tuple[list[str], list[list[str]]]:
    """Return the pieces and merges of a vocabulary whose pieces cross every cut.

    Some merges are left out, so that whole words of it are reached only without merges.
    """
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    prose = (ROOT / "docs" / "structure.md").read_text("utf-8")[:20_000]
    backend.train_from_iterator([*prose.split("\n\n"), *texts()], trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [merge for number, merge in enumerate(model["merges"]) if number % 9]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def encode_as_published(
    pre_tokenizer: Json, normalizer: Json | None, ignores_merges: bool
) -> list[list[int]]:
    """Return the ids of all texts by a tokenizer.json with published cuts."""
    pieces, merges = train_vocabulary()
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "model": {
            "type": "BPE",
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": merges,
            "ignore_merges": ignores_merges,
        },
    }
    backend = BackendTokenizer.from_str(json.dumps(content))
    return [each.ids for each in backend.encode_batch(texts())]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_two_thousand_texts_have_the_ids_of_tokenizer_json(
    pre: str, tmp_path: Path
) -> None:
    pieces, merges = train_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [1] * len(pieces),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
    write_tokenizer_files(metadata, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text, ids in zip(texts(), encode_as_published(*PUBLISHED[pre]), strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def test_texts_tell_all_published_cuts_apart() -> None:
    """A wrong cut would be seen: each cut that is published gives other ids than all others."""
    kinds = {json.dumps(kind): kind for kind in PUBLISHED.values()}
    ids = [json.dumps(encode_as_published(*kind)) for kind in kinds.values()]
    assert len(ids) == len({*ids}) > 10


@pytest.mark.parametrize("architecture", BY_ARCHITECTURE)
def test_pre_types_of_the_architectures_are_proven(architecture: str) -> None:
    pre = BY_ARCHITECTURE[architecture]
    assert pre in PUBLISHED
    assert pre in require_cuts(pre).names.split()
