"""How byte-level tokenizers cut text before their merges, by the names of `tokenizer.ggml.pre`.

A GGUF file names the way and does not describe it. The steps here are those of the models' own
tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from fminfer.core.errors import CheckpointError

Step = str | pre_tokenizers.PreTokenizer  # a regex: each match is a piece of its own


@dataclass(slots=True, frozen=True)
class Cuts:
    """A row of the table: what happens to a text before the merges, and what goes with that."""

    names: str  # of `tokenizer.ggml.pre`, between spaces
    steps: tuple[Step, ...]
    normalizer: normalizers.Normalizer | None = None  # what text goes through first
    ignores_merges: bool = False  # a word of the vocabulary is one token, whatever its merges
    adds_bos: bool = False  # where the file does not say

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The steps as one."""
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step
                for step in self.steps
            ]
        )


def find_cuts(name: object) -> Cuts:
    """Return the row of a name.

    Raises:
        CheckpointError: there is no such row.
    """
    by_name = {each: row for row in _ROWS for each in row.names.split()}
    if (found := by_name.get(str(name))) is None:
        known = ", ".join(sorted(by_name))
        what = "has no tokenizer.ggml.pre" if name is None else f"has tokenizer.ggml.pre {name!r}"
        raise CheckpointError(
            f"the GGUF file {what}, so that nothing tells how its tokenizer cuts words. Name the "
            f"folder or hub id of the original model by --tokenizer. Known are {known}"
        )
    return found


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


def _words(number: str, word: str = r"\p{L}+", signs: str = _SIGNS) -> str:
    """Return the regex of the GPT-4 tokenizer's words, with variants of its parts."""
    return f"{_CONTRACTIONS}|{_LEAD}{word}|{number}|{signs}|{_SPACES}"


def _cased_words(number: str, ending: str) -> str:
    """Return the regex of the GPT-4o tokenizer's words, which capitals begin."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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
_GPT4 = (_words(_UP_TO_3), _BYTES)
_GPT4O = (_cased_words(_UP_TO_3, f"{_CONTRACTIONS}?"), _BYTES)
_TEKKEN = (_cased_words(r"\p{N}", ""), _BYTES)
_QWEN2 = (_words(r"\p{N}"), _BYTES)
_QWEN35 = (_words(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"), _BYTES)
_WIDE_SIGNS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK_V3 = (_UP_TO_3, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS, _BYTES)
_DEEPSEEK_LLM = (_LINE_ENDS, rf"\s?[{_CASED}]+", _WIDE_SIGNS, r"\s+$", _CJK, _DIGITS, _BYTES)

_ROWS = (
    Cuts(
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2",
        _GPT4,
        ignores_merges=True,
        adds_bos=True,
    ),
    Cuts("glm4 glm5", _GPT4, ignores_merges=True),
    Cuts("dbrx smaug-bpe chatglm-bpe", _GPT4),
    Cuts("minicpm5", (_UP_TO_3, _words(r"\p{N}+"), _BYTES), ignores_merges=True),
    Cuts("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan", _QWEN2, _NFC),
    Cuts("qwen35", _QWEN35, _NFC),
    Cuts("solar-open grok-2", _QWEN2),
    Cuts("seed-coder", (_words(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"), _BYTES)),
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
    Cuts("deepseek-coder", (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS, _BYTES)),
    Cuts("falcon", (_PUNCTUATION, _GPT2, _NUMBERS, "[0-9][0-9][0-9]")),
)
