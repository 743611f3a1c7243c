"""Small tokenizers, trained on the spot, in the manner of each family of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.convert_slow_tokenizer import generate_merges

from gguf_samples.splits import (
    BLOOM,
    DEEPSEEK_V3,
    GPT_4O,
    LLAMA3,
    QWEN2,
    by_falcon,
    by_patterns,
    by_words,
)

CORPUS = (
    "The small house stands at the end of the street, and there it's quiet in the evening.",
    "There were 12 of them in the year 1984, then 305; another 7 came in 2024.",
    "They'll say that we've been there before. Is that so? I'm sure it is!",
    "  two spaces first\nthen a new line\n\nand an empty one\tand a tab.",
    "the rain in the north, the wind in the south, the thing and the other thing",
)
ASCII_CORPUS = (
    "the rain in the north the wind in the south and the end of the street",
)
NUM_PIECES = 28  # pieces beyond bytes and special tokens
NUM_BYTES_AND_LETTERS = 304  # of a SentencePiece model, with its special tokens

END = "<|endoftext|>"
# special tokens of Phi-3 that keep white space behind them
UNSTRIPPED = ("<unk>", "<s>", END)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class BytePairs:
    """A byte-level BPE tokenizer. `pre` is llama.cpp's name of how it splits."""

    pre: str
    split: Callable[[], pre_tokenizers.PreTokenizer]
    special: tuple[str, ...]
    bos: str | None
    eos: str
    puts_bos: bool = False  # before each text
    is_composed: bool = False  # NFC first
    ignores_merges: bool = False
    chat_template: str | None = None
    is_ascii: bool = False  # only the characters of a small corpus

    def write(self, folder: Path) -> int:
        """Train it and write its files. Return how many tokens it has."""
        tokenizer = Tokenizer(models.BPE(ignore_merges=self.ignores_merges))
        if self.is_composed:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self.split()
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = [] if self.is_ascii else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=len(self.special) + len(alphabet) + NUM_PIECES,
            initial_alphabet=sorted(alphabet),
            special_tokens=[
                AddedToken(each, special=True, normalized=False)
                for each in self.special
            ],
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            ASCII_CORPUS if self.is_ascii else CORPUS, trainer
        )
        steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
        if self.puts_bos:
            steps.append(_bos_first(tokenizer, self.bos))
        tokenizer.post_processor = processors.Sequence(steps)
        _write_fast(
            tokenizer, folder, self.bos, self.eos, self.puts_bos, self.chat_template
        )
        return int(tokenizer.get_vocab_size())


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece BPE model with byte fallback, as llama's or as gemma's.

    Gemma's model has the special tokens in it. Others add them behind it.
    """

    is_gemma: bool = False
    pre: str = "default"
    special: tuple[str, ...] = ()
    eos: str = "</s>"
    puts_bos: bool = True
    strips_right: bool = False  # white space behind special tokens, as Phi-3 does

    def write(self, folder: Path) -> int:
        """Train it and write its files, those of the fast tokenizer too. Return how
        many tokens."""
        ids: dict[str, Any] = (
            dict(pad_id=0, eos_id=1, bos_id=2, unk_id=3)
            if self.is_gemma
            else dict(pad_id=-1)
        )
        names: dict[str, Any] = (
            dict(bos_piece="<bos>", eos_piece="<eos>") if self.is_gemma else {}
        )
        (folder / "corpus.txt").write_text("\n".join(CORPUS))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"),
            model_prefix=str(folder / "tokenizer"),
            model_type="bpe",
            vocab_size=NUM_BYTES_AND_LETTERS + NUM_PIECES,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            add_dummy_prefix=not self.is_gemma,
            user_defined_symbols=list(self.special) if self.is_gemma else [],
            character_coverage=1.0,
            minloglevel=2,
            **ids,
            **names,
        )
        (folder / "corpus.txt").unlink()
        (folder / "tokenizer.vocab").unlink()
        processor = sentencepiece.SentencePieceProcessor(
            str(folder / "tokenizer.model")
        )
        bos = "<bos>" if self.is_gemma else "<s>"
        _write_fast(
            self._fast(processor, bos), folder, bos, self.eos, self.puts_bos, None
        )
        return int(processor.vocab_size()) + (0 if self.is_gemma else len(self.special))

    def _fast(self, processor: Any, bos: str) -> Tokenizer:
        """Make the tokenizer that the family's tokenizer.json holds."""
        ids = range(processor.vocab_size())
        vocab = {processor.id_to_piece(each): each for each in ids}
        scores = {
            processor.id_to_piece(each): processor.get_score(each)
            for each in ids
            if not (
                processor.is_control(each)
                or processor.is_unknown(each)
                or processor.is_byte(each)
            )
            and processor.id_to_piece(each) not in self.special
        }
        merges = generate_merges(vocab, scores)
        tokenizer = Tokenizer(
            models.BPE(
                vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
            )
        )
        spaces = normalizers.Replace(" ", "▁")
        if self.is_gemma:
            tokenizer.normalizer = spaces
        else:
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), spaces]
            )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if not self.is_gemma:
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
        controls = [
            each
            for each in ids
            if processor.is_control(each) or processor.is_unknown(each)
        ]
        names = [processor.id_to_piece(each) for each in controls]
        strips = [
            self.strips_right and name not in UNSTRIPPED
            for name in (*names, *self.special)
        ]
        tokenizer.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False, rstrip=each)
                for name, each in zip((*names, *self.special), strips, strict=True)
            ]
        )
        if self.puts_bos:
            tokenizer.post_processor = _bos_first(tokenizer, bos)
        return tokenizer


def _bos_first(tokenizer: Tokenizer, bos: str | None) -> processors.PostProcessor:
    """Return what puts the first token before a text."""
    assert bos is not None, "a tokenizer that puts a first token names it"
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def _write_fast(
    tokenizer: Tokenizer,
    folder: Path,
    bos: str | None,
    eos: str,
    puts_bos: bool,
    chat_template: str | None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json as published models have them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = json.loads(tokenizer.to_str())["added_tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": puts_bos,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(each["id"]): {key: value for key, value in each.items() if key != "id"}
            for each in added
        },
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
    }
    config |= {"bos_token": bos} if bos else {}
    config |= {"chat_template": chat_template} if chat_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
COHERE_SPECIAL = ("<PAD>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
OSS_SPECIAL = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>")
QWEN_SPECIAL = (END, "<|im_start|>", "<|im_end|>")
VOCABULARIES: dict[str, BytePairs | Pieces] = {
    "llama": Pieces(),
    "phi3": Pieces(
        special=(END, "<|user|>", "<|end|>"), eos=END, puts_bos=False, strips_right=True
    ),
    "gemma": Pieces(
        is_gemma=True, special=("<start_of_turn>", "<end_of_turn>"), eos="<eos>"
    ),
    "gpt2": BytePairs("gpt-2", by_words, (END,), END, END),
    "small": BytePairs("gpt-2", by_words, (END,), END, END, is_ascii=True),
    "llama3": BytePairs(
        "llama-bpe",
        lambda: by_patterns(LLAMA3),
        LLAMA3_SPECIAL,
        "<|begin_of_text|>",
        "<|eot_id|>",
        True,
        ignores_merges=True,
    ),
    "qwen2": BytePairs(
        "qwen2",
        lambda: by_patterns(QWEN2),
        QWEN_SPECIAL,
        None,
        "<|im_end|>",
        is_composed=True,
        chat_template=CHATML,
    ),
    "falcon": BytePairs("falcon", by_falcon, (">>TITLE<<", END), None, END),
    "bloom": BytePairs(
        "bloom", lambda: by_patterns(BLOOM), ("<s>", "</s>", "<pad>"), "<s>", "</s>"
    ),
    "neox": BytePairs(
        "olmo", by_words, (END, "<|padding|>"), None, END, is_composed=True
    ),
    "starcoder": BytePairs(
        "starcoder",
        lambda: by_words(pre_tokenizers.Digits(True)),
        (END, "<fim_prefix>"),
        END,
        END,
    ),
    "refact": BytePairs(
        "refact",
        lambda: by_words(pre_tokenizers.Digits(True)),
        (END, "<|start_of_role|>"),
        END,
        END,
    ),
    "dbrx": BytePairs("dbrx", lambda: by_patterns(LLAMA3), (END, "<|pad|>"), None, END),
    "cohere": BytePairs(
        "command-r",
        lambda: by_words(pre_tokenizers.Digits(True)),
        COHERE_SPECIAL,
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        True,
        is_composed=True,
    ),
    "deepseek": BytePairs(
        "deepseek-v3",
        lambda: by_patterns(*DEEPSEEK_V3),
        DEEPSEEK_SPECIAL,
        *DEEPSEEK_SPECIAL,
        True,
    ),
    "gpt_oss": BytePairs(
        "gpt-4o",
        lambda: by_patterns(GPT_4O),
        OSS_SPECIAL,
        "<|startoftext|>",
        "<|return|>",
    ),
}
