"""The tokenizers that GGUF files hold, as those of the tokenizers package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.core.errors import CheckpointError

Metadata = Mapping[str, object]
Json = dict[str, object]
KEY_PREFIX = "tokenizer.ggml."  # begins the keys of a tokenizer
# Types of pieces.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
# Ids of special tokens that files of a kind may leave out, as llama.cpp has them.
_USUAL_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
# Stands for rows of the head that no token has. Older converters gave it the type of
# added tokens.
_PADDING = re.compile(r"\[PAD\d+\]")
_SPACE_SWALLOWING = ("phi3", "phimoe")
# Tokens of Phi-3 behind which spaces stay; a GGUF file does not say that others swallow them.
_KEPT_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(slots=True, frozen=True)
class StoredVocabulary:
    """The pieces of a vocabulary in the order of their ids, and all else of its tokenizer."""

    metadata: Metadata
    pieces: list[str | None]  # None: the id has no spelling
    types: list[int]
    scores: list[float]

    @classmethod
    def read(cls, metadata: Metadata) -> StoredVocabulary:
        """Read the vocabulary of a header, which may be broken or empty."""
        tokens, types, scores = (
            list(values)
            if isinstance(values := metadata.get(f"{KEY_PREFIX}{key}"), list)
            else []
            for key in ("tokens", "token_type", "scores")
        )
        pieces = [token if isinstance(token, str) else None for token in tokens]
        types = types or [NORMAL] * len(pieces)
        scores = scores or [0.0] * len(pieces)
        for token_id, (piece, kind) in enumerate(zip(pieces, types, strict=False)):
            if piece and kind in (UNUSED, USER_DEFINED) and _PADDING.fullmatch(piece):
                pieces[token_id] = None
        return cls(metadata, pieces, types, scores)

    def check_counts(self) -> None:
        """Raise a CheckpointError for no piece, or fewer types or scores than pieces."""
        num_pieces = len(self.pieces)
        if not num_pieces or min(len(self.types), len(self.scores)) < num_pieces:
            raise CheckpointError(
                f"the GGUF file has {num_pieces} tokens, {len(self.types)} types and "
                f"{len(self.scores)} scores of tokens: it is broken; fetch it again, "
                "or name a tokenizer by --tokenizer"
            )

    def find_field(self, key: str, default: Any = None) -> Any:
        """Return a field that the file has of its tokenizer."""
        return self.metadata.get(f"{KEY_PREFIX}{key}", default)

    @property
    def kind(self) -> str:
        """What llama.cpp calls it: "gpt2" is of bytes, "llama" and "t5" are of sentencepiece."""
        return str(self.find_field("model"))

    @property
    def ids(self) -> dict[str, int]:
        """The id of each spelling."""
        return {piece: i for i, piece in enumerate(self.pieces) if piece is not None}

    @property
    def leads_with_space(self) -> bool:
        """Whether a text gets a space before it."""
        return bool(self.find_field("add_space_prefix", self.kind == "llama"))

    def find_special_id(self, name: str) -> int | None:
        """Return the id of a special token, such as "bos"; None: there is none."""
        token_id = self.find_field(
            f"{name}_token_id", _USUAL_IDS.get(self.kind, {}).get(name)
        )
        is_token = isinstance(token_id, int) and 0 <= token_id < len(self.pieces)
        return token_id if is_token and self.pieces[token_id] is not None else None

    def find_special_token(self, name: str) -> str | None:
        """Return a special token; None: there is none."""
        token_id = self.find_special_id(name)
        return None if token_id is None else self.pieces[token_id]

    def make_added_tokens(self) -> list[Json]:
        """Return the `added_tokens` of tokenizer.json, which a text is searched for first."""
        arch = self.metadata.get("general.architecture")
        swallows_spaces = self.kind == "llama" and arch in _SPACE_SWALLOWING
        return [
            {
                "id": token_id,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": swallows_spaces and piece not in _KEPT_SPACES,
                "normalized": False,
                "special": self.types[token_id] != USER_DEFINED,
            }
            for token_id, piece in enumerate(self.pieces)
            if piece and self.types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED)
        ]


CutStep = str | pre_tokenizers.PreTokenizer  # a regex: each match is a piece of its own


@dataclass(slots=True, frozen=True)
class Cuts:
    """A row of the table: what happens to a text before the merges, and what goes with that."""

    names: str  # of `tokenizer.ggml.pre`, between spaces
    steps: tuple[CutStep, ...]
    normalizer: normalizers.Normalizer | None = None  # what text goes through first
    # a word of the vocabulary is one token, whatever its merges
    ignores_merges: bool = False
    adds_bos: bool = False  # where the file does not say

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The steps as one."""
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(step), "isolated")
                if isinstance(step, str)
                else step
                for step in self.steps
            ]
        )


def require_cuts(name: object) -> Cuts:
    """Return the row of a name, or raise a CheckpointError."""
    by_name = {row_name: row for row in _ROWS for row_name in row.names.split()}
    if (cuts := by_name.get(str(name))) is None:
        known = ", ".join(sorted(by_name))
        what = (
            "has no tokenizer.ggml.pre"
            if name is None
            else f"has tokenizer.ggml.pre {name!r}"
        )
        raise CheckpointError(
            f"the GGUF file {what}, so that nothing tells how its tokenizer cuts "
            "words. Name the folder or hub id of the original model by --tokenizer. "
            f"Known are {known}"
        )
    return cuts


_NFC = normalizers.NFC()
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)  # in words, then in bytes
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_NUMBERS = pre_tokenizers.Digits(individual_digits=False)
_PUNCTUATION = pre_tokenizers.Punctuation("contiguous")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # one sign before a word belongs to it
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _make_word_regex(
    number: str,
    word: str = r"\p{L}+",
    signs: str = _SIGNS,
    spaces: str = _SPACES,
) -> str:
    """Return the regex of the GPT-4 tokenizer's words, with variants of its parts."""
    return f"{_CONTRACTIONS}|{_LEAD}{word}|{number}|{signs}|{spaces}"


def _make_cased_word_regex(number: str, ending: str) -> str:
    """Return the regex of the GPT-4o tokenizer's words, which capitals begin."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{_LEAD}{upper}*{lower}+{ending}|{_LEAD}{upper}+{lower}*{ending}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_UP_TO_3 = r"\p{N}{1,3}"
_LINE_ENDS = "[\r\n]"
_CJK = "[一-龥ࠀ-一가-퟿]+"
# Letters of scripts that have two cases. Escaped are those that editors may replace by others.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    f"|{_SPACES}"
)
_GPT4 = (_make_word_regex(_UP_TO_3), _BYTES)
_GPT4O = (_make_cased_word_regex(_UP_TO_3, f"{_CONTRACTIONS}?"), _BYTES)
_TEKKEN = (_make_cased_word_regex(r"\p{N}", ""), _BYTES)
_QWEN2 = (_make_word_regex(r"\p{N}"), _BYTES)
_QWEN35 = (
    _make_word_regex(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    _BYTES,
)
# Spaces are cut into runs that are powers of two.
_JAIS2_SPACES = "|".join(
    (
        r"\s*[\r\n]+",
        *(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)),
        r"\s{1,2}(?!\S)",
        r"\s",
    )
)
_JAIS2 = (_make_word_regex(_UP_TO_3, spaces=_JAIS2_SPACES), _BYTES)
# Words with single spaces between them are one piece.
_EXAONE_MOE = (
    _make_word_regex(
        r"\p{N}",
        r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _BYTES,
)
_WIDE_SIGNS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK_V3 = (_UP_TO_3, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS, _BYTES)
_DEEPSEEK_LLM = (
    _LINE_ENDS,
    rf"\s?[{_CASED}]+",
    _WIDE_SIGNS,
    r"\s+$",
    _CJK,
    _DIGITS,
    _BYTES,
)

_ROWS = (
    Cuts(
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2",
        _GPT4,
        ignores_merges=True,
        adds_bos=True,
    ),
    Cuts("glm4 glm5", _GPT4, ignores_merges=True),
    Cuts("dbrx smaug-bpe chatglm-bpe", _GPT4),
    Cuts(
        "minicpm5", (_UP_TO_3, _make_word_regex(r"\p{N}+"), _BYTES), ignores_merges=True
    ),
    Cuts("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan", _QWEN2, _NFC),
    Cuts("qwen35", _QWEN35, _NFC),
    Cuts("solar-open grok-2", _QWEN2),
    Cuts(
        "seed-coder",
        (_make_word_regex(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"), _BYTES),
    ),
    Cuts("jais-2", _JAIS2),
    Cuts("exaone-moe", _EXAONE_MOE, _NFC),
    Cuts("gpt-4o llama4 kanana2 minimax-m2", _GPT4O),
    Cuts("tekken", _TEKKEN, ignores_merges=True, adds_bos=True),
    Cuts("gpt-2 phi-2 jais mellum gigachat trillion granite-docling", (_GPT2,)),
    Cuts("mpt olmo", (_GPT2,), _NFC),
    Cuts("starcoder refact smollm codeshell minerva-7b mellum2", (_DIGITS, _GPT2)),
    Cuts("command-r", (_DIGITS, _GPT2), _NFC),
    Cuts("bloom poro-chat gpt3-finnish", (_BLOOM, _BYTES)),
    Cuts("viking", (_BLOOM, _DIGITS, _BYTES)),
    Cuts("deepseek-v3 hunyuan-dense joyai-llm", _DEEPSEEK_V3),
    Cuts("deepseek-llm", _DEEPSEEK_LLM),
    Cuts(
        "deepseek-coder",
        (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS, _BYTES),
    ),
    Cuts("falcon", (_PUNCTUATION, _GPT2, _NUMBERS, "[0-9][0-9][0-9]")),
)


# Each kind's tokenizer, and the fields of its model in tokenizer.json that hold pieces
# and merges. The package's own classes would not keep ids free that have no spelling.
SPACE = "▁"  # sentencepiece's sign for one


def build_byte_level(
    vocabulary: StoredVocabulary, cuts: Cuts
) -> tuple[BackendTokenizer, Json]:
    """Make GPT-2's kind: pieces of bytes, merged in an order that the file has."""
    ids = vocabulary.ids
    merges = [
        [left, right]
        for left, _, right in (
            str(merge).partition(" ") for merge in vocabulary.find_field("merges", [])
        )
        if left in ids and right in ids and left + right in ids
    ]
    backend = BackendTokenizer(models.BPE(ignore_merges=cuts.ignores_merges))
    backend.normalizer = cuts.normalizer
    backend.pre_tokenizer = cuts.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, {"vocab": ids, "merges": merges}


def build_scored_merges(vocabulary: StoredVocabulary) -> tuple[BackendTokenizer, Json]:
    """Make sentencepiece's BPE: of all neighbours those merge first whose piece scores best.

    As in Llama 2's tokenizer.json, each stretch of text between special tokens gets a space.
    """
    # slow, and only for these
    from transformers.tokenization_utils_base import generate_merges

    ids = vocabulary.ids
    leads = vocabulary.leads_with_space
    merges = generate_merges(
        ids, {piece: vocabulary.scores[i] for piece, i in ids.items()}
    )
    unknown = vocabulary.find_special_token("unknown")
    has_bytes = BYTE in vocabulary.types
    backend = BackendTokenizer(
        models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    backend.normalizer = _make_space_normalizer(leads=leads)
    strips = [decoders.Strip(" ", left=1)] if leads else []
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strips,
        ]
    )
    return backend, {"vocab": ids, "merges": merges}


def build_unigram(vocabulary: StoredVocabulary) -> tuple[BackendTokenizer, Json]:
    """Make sentencepiece's Unigram, T5's kind: the pieces with the best sum of scores."""
    named = (piece or f"[PAD{i}]" for i, piece in enumerate(vocabulary.pieces))
    scored = list(zip(named, vocabulary.scores, strict=False))
    unknown = vocabulary.find_special_id("unknown")
    has_bytes = BYTE in vocabulary.types
    backend = BackendTokenizer(models.Unigram(scored, unknown, has_bytes))
    leads = vocabulary.leads_with_space
    scheme = "always" if leads else "never"
    steps: list[normalizers.Normalizer] = []
    if charsmap := vocabulary.find_field("precompiled_charsmap"):
        stored = np.asarray(charsmap, np.int64).astype(np.uint8).tobytes()
        steps.append(normalizers.Precompiled(stored))
    drops_spaces = bool(vocabulary.find_field("remove_extra_whitespaces"))
    if drops_spaces and leads:  # in words, as T5's tokenizer.json
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme)]
        )
    else:
        if drops_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z| +(?= )"), ""))
        steps.append(_make_space_normalizer(leads=leads))
    backend.normalizer = normalizers.Sequence(steps)
    fallback = [decoders.ByteFallback()] if has_bytes else []
    backend.decoder = decoders.Sequence([*fallback, decoders.Metaspace(SPACE, scheme)])
    return backend, {}


def _make_space_normalizer(*, leads: bool) -> normalizers.Normalizer:
    """Return what writes spaces by their sign; `leads`: one more before the text."""
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if leads else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
