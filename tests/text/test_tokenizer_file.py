"""A folder's tokenizer.json rules, whatever class its tokenizer_config.json names.

transformers 5 builds that class anew from the file's vocabulary, and drops the file's
normalizer, pre-tokenizer and decoder. So the oracle is the tokenizers package, which
reads the file alone.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.cli.app import main
from fminfer.core.errors import CheckpointError
from fminfer.models.known_sizes import DEMO_MODEL
from fminfer.text.gguf_tokenizer import write_tokenizer_files
from fminfer.text.gguf_vocabulary import require_cuts
from fminfer.text.tokenizer import Tokenizer
from tests.conftest import IS_ALL

SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[PAD]",
    "[MASK]",
]
NAMED = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
CORPUS = (
    "the quick brown fox jumps over 123 lazy dogs in 2024 and 1999 ; x = 12345 ; café "
    "naïve 日本\n"
    "    def f(x):\n        return  1000 + 2000\nHELLO Hello World's don't I'm we've 'S 'T\n"
    "Привет мир, 你好世界; e\u0301te\u0301 ½ … <b>{[(/)]}</b> a_b=c+d*e-f? yes! no. "
    "10,000.50 €\n"
    "ＡＢＣ ﬁne ABC fine\n"
) * 20
WORDS = (
    "the|fox|12345|2024|1000|don't|HELLO|Hello's|'S|cafe\u0301|re\u0301sume\u0301|café|naïve|"
    "ＡＢＣ|ﬁne|½|日本語|你好世界|Привет|한국어|ไทย|\U0001f600|x=1|a_b|f(x):|…|\u200b|\ufffd|"
    "\x7f|\n|\n\n|\t|  |    |\r\n|\u00a0|'|\"|<b>|/|\\|,|.|-|<unk>|<s>|</s>|<pad>|[UNK]|[CLS]"
)
# Classes that build their own tokenizer, and the arguments that change a part of it.
_PLAIN = (
    "BlenderbotTokenizer CLIPTokenizer EsmcTokenizer GemmaTokenizer HerbertTokenizer "
    "MBart50Tokenizer MLukeTokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer "
    "SeamlessM4TTokenizer"
)
_WITH_A_SPACE_OR_NOT = (
    "AlbertTokenizer BarthezTokenizer BigBirdTokenizer CamembertTokenizer CodeLlamaTokenizer "
    "CohereTokenizer DebertaV2Tokenizer GPT2Tokenizer GPTNeoXTokenizer LlamaTokenizer "
    "Qwen2Tokenizer RemBertTokenizer XGLMTokenizer"
)
BUILT: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in _PLAIN.split()),
    *(
        (name, {"add_prefix_space": adds})
        for name in _WITH_A_SPACE_OR_NOT.split()
        for adds in (True, False)
    ),
    ("BertTokenizer", {"do_lower_case": True}),
    ("DebertaV2Tokenizer", {"do_lower_case": True}),
    ("AlbertTokenizer", {"do_lower_case": False}),
    ("AlbertTokenizer", {"keep_accents": True}),
    ("BertTokenizer", {"do_lower_case": False}),
    ("BertTokenizer", {"strip_accents": True}),
    ("LlamaTokenizer", {"legacy": True}),
    ("RemBertTokenizer", {"do_lower_case": True}),
]
# Cuts that are published under the names of other classes.
CUTS = (
    "llama-bpe minicpm5 qwen2 qwen35 solar-open seed-coder gpt-4o tekken gpt-2 olmo starcoder "
    "command-r bloom viking deepseek-v3 deepseek-llm deepseek-coder falcon"
)
CLASSES = {  # by the kind of vocabulary that they take
    "BPE": "LlamaTokenizer GPT2Tokenizer Qwen2Tokenizer GPTNeoXTokenizer CohereTokenizer "
    "GemmaTokenizer RobertaTokenizer CodeLlamaTokenizer PreTrainedTokenizerFast",
    "WordPiece": "BertTokenizer MPNetTokenizer FunnelTokenizer SplinterTokenizer",
    "Unigram": "T5Tokenizer XLMRobertaTokenizer AlbertTokenizer CamembertTokenizer "
    "XGLMTokenizer BigBirdTokenizer",
}
TRAINERS = {
    "BPE": trainers.BpeTrainer,
    "WordPiece": trainers.WordPieceTrainer,
    "Unigram": trainers.UnigramTrainer,
}
NUM_TEXTS = 3000 if IS_ALL else 150


def train(
    kind: str, normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> BackendTokenizer:
    """Train a small tokenizer of these parts."""
    ends = (
        {"end_of_word_suffix": "</w>"}
        if isinstance(decoder, decoders.BPEDecoder)
        else {}
    )
    empty: dict[str, Any] = {
        "BPE": models.BPE(unk_token="<unk>", **ends),
        "WordPiece": models.WordPiece(unk_token="[UNK]"),
        "Unigram": models.Unigram(),
    }
    backend = BackendTokenizer(empty[kind])
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    options: dict[str, Any] = {"vocab_size": 600, "special_tokens": SPECIALS, **ends}
    if kind == "BPE" and isinstance(decoder, decoders.ByteLevel):
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    if kind == "Unigram":
        options["unk_token"] = "<unk>"
    trainer = TRAINERS[kind](show_progress=False, **options)
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    return backend


def shapes() -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Yield a name, a kind of vocabulary, and the parts of tokenizers that are published."""
    for name, options in BUILT:
        backend = getattr(transformers, name)(**options).backend_tokenizer
        label = "-".join([name, *(f"{key}={value}" for key, value in options.items())])
        kind = type(backend.model).__name__
        yield label, kind, backend.normalizer, backend.pre_tokenizer, backend.decoder
    for name in CUTS.split():
        cuts = require_cuts(name)
        yield name, "BPE", cuts.normalizer, cuts.pre_tokenizer, decoders.ByteLevel()
    prepends = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    joins = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    yield (
        "llama2",
        "BPE",
        normalizers.Sequence(prepends),
        None,
        decoders.Sequence(joins),
    )


def write_folder(folder: Path, backend: BackendTokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED | config))
    return folder


def make_texts(seed: int, num_texts: int) -> list[str]:
    draw = random.Random(seed)
    words = WORDS.split("|")
    return [
        draw.choice(["", " "]).join(draw.choices(words, k=draw.randint(1, 12)))
        for _ in range(num_texts)
    ]


def differing(folder: Path, texts: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """Return texts that get other tokens than by the file alone, or another text back."""
    tokenizer = Tokenizer.load(folder)
    stored = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        right = stored.encode(text)
        is_same_text = tokenizer.decode(right.ids) == stored.decode(right.ids)
        if right.ids and (ids != right.ids or not is_same_text):
            found.append(
                (text, [tokenizer.piece_of_token(each) for each in ids], right.tokens)
            )
    return found


def test_every_published_shape_cuts_as_its_file(tmp_path: Path) -> None:
    """SmolLM2's digits, Llama 2's space behind BOS, distilled Qwen's letters: each was lost."""
    names = set()
    for number, (label, kind, *parts) in enumerate(shapes()):
        backend = train(kind, *parts)
        classes = [name for name in CLASSES[kind].split() if not label.startswith(name)]
        declared = classes[number % len(classes)]
        folder = write_folder(tmp_path / str(number), backend, tokenizer_class=declared)
        assert differing(folder, make_texts(number, NUM_TEXTS)) == [], (label, declared)
        names.add(label)
    assert len(names) >= 60


def byte_level(**options: Any) -> BackendTokenizer:
    """Train a tokenizer of bytes whose digits stand alone, as SmolLM2's."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = train(
        "BPE", None, pre_tokenizers.Sequence([digits, bytes_]), decoders.ByteLevel()
    )
    for name, value in options.items():
        setattr(backend.model, name, value)
    return backend


@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "LlamaTokenizer"])
@pytest.mark.parametrize(
    "options",
    [{"ignore_merges": True}, {"fuse_unk": False}, {"fuse_unk": True}],
    ids=str,
)
def test_options_of_merges_are_the_files(
    tmp_path: Path, declared: str, options: dict[str, bool]
) -> None:
    """The class that is named has options of its own, such as whether unknown letters
    are one."""
    backend = train("BPE", None, pre_tokenizers.WhitespaceSplit(), decoders.Fuse())
    for name, value in options.items():
        setattr(backend.model, name, value)
    content = json.loads(backend.to_str())
    # no merges make it
    content["model"]["vocab"]["Helo"] = len(content["model"]["vocab"])
    folder = write_folder(
        tmp_path,
        BackendTokenizer.from_str(json.dumps(content)),
        tokenizer_class=declared,
    )
    assert differing(folder, ["Helo", "ÀÈÌÒ the ÀÈ", *make_texts(1, 50)]) == []


def test_the_unknown_piece_is_the_files(tmp_path: Path) -> None:
    """T5's class takes the third piece for what is unknown, and no bytes for it."""
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<x>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("a", -3.0),
    ]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    for has_bytes in (False, True):
        backend = BackendTokenizer(models.Unigram(pieces, 3, has_bytes))
        backend.add_special_tokens(["<pad>", "</s>", "<x>", "<unk>"])
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        folder = write_folder(
            tmp_path / str(has_bytes),
            backend,
            tokenizer_class="T5Tokenizer",
            extra_ids=0,
        )
        assert differing(folder, ["a b é", "aé\u6771 a"]) == []


def test_what_stands_around_a_text_is_the_files(tmp_path: Path) -> None:
    """BERT's class puts [CLS] and [SEP] around each text, whatever the file says."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    backend = train(
        "WordPiece", normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    )
    sep_id = backend.token_to_id("[SEP]")
    backend.post_processor = processors.TemplateProcessing(
        "$A [SEP]", None, [("[SEP]", sep_id)]
    )
    folder = write_folder(
        tmp_path, backend, tokenizer_class="BertTokenizer", do_lower_case=False
    )
    assert differing(folder, ["HELLO the fox", "don't"]) == []


def test_the_language_of_a_text_is_the_folders(tmp_path: Path) -> None:
    """tokenizer_config.json names the language, whose token the file's own may not be."""
    joins = pre_tokenizers.Metaspace()
    backend = train("Unigram", None, joins, decoders.Metaspace())
    backend.add_special_tokens(["en_XX", "fr_XX"])
    backend.post_processor = processors.TemplateProcessing(
        "$A </s> en_XX", None, [("</s>", 2), ("en_XX", backend.token_to_id("en_XX"))]
    )
    folder = write_folder(
        tmp_path, backend, tokenizer_class="MBartTokenizer", src_lang="fr_XX"
    )
    ids = Tokenizer.load(folder).encode("the fox").ids
    assert ids[-2:] == [2, backend.token_to_id("fr_XX")]


@pytest.mark.parametrize("declared", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_flags_of_added_tokens_are_the_files(tmp_path: Path, declared: str) -> None:
    """By tokenizer_config.json tokens swallowed spaces, or were shown, as by no other file."""
    backend = byte_level()
    added = [AddedToken("<call>", rstrip=True), AddedToken("<end>", special=True)]
    backend.add_tokens(added)
    entries = {
        str(backend.token_to_id(token.content)): {
            "content": token.content,
            "lstrip": True,
            "rstrip": not token.rstrip,
            "special": False,
        }
        for token in added
    }
    folder = write_folder(
        tmp_path, backend, tokenizer_class=declared, added_tokens_decoder=entries
    )
    assert differing(folder, ["a <call> b", "a  <end>  b <call>\n"]) == []
    special_ids = Tokenizer.load(folder).special_ids
    assert backend.token_to_id("<end>") in special_ids
    assert backend.token_to_id("<call>") not in special_ids


def test_added_tokens_that_only_the_file_has_are_read(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<call>"), AddedToken("<later>")])
    kept = {str(backend.token_to_id("<call>")): {"content": "<call>"}}
    folder = write_folder(
        tmp_path,
        backend,
        tokenizer_class="LlamaTokenizer",
        added_tokens_decoder=kept,
    )
    assert differing(folder, ["a <call> b <later> c"]) == []


@pytest.mark.parametrize(
    "declared", ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"]
)
def test_tokens_that_only_the_class_names_are_text(
    tmp_path: Path, declared: str
) -> None:
    """Its class gave a model without <|endoftext|> an id for it, behind the model's own.

    Tokens that came behind it in another file got other ids, or the folder was refused.
    """
    backend = byte_level()
    names = {"tokenizer_class": declared, "sep_token": "<sep>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    backend.add_special_tokens(["<sep>"])
    text = "a<|endoftext|> <|padding|> b<sep>"
    assert tokenizer.encode(text).ids == backend.encode(text).ids
    assert "<|endoftext|>" not in map(tokenizer.piece_of_token, range(1000))


def test_a_class_whose_unknown_token_the_file_lacks_is_followed(tmp_path: Path) -> None:
    """BERT's class cannot cut a word where [UNK] is missing; it was tried out, and failed."""
    backend = BackendTokenizer(
        models.BPE({"a": 0, "b": 1, "ab": 2, "?": 3}, [("a", "b")])
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer"}'
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert differing(tmp_path, ["ab", "aab"]) == []


def test_files_that_give_a_token_two_ids_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<call>"), AddedToken("<later>")])
    other = {str(backend.token_to_id("<call>")): {"content": "<other>"}}
    folder = write_folder(
        tmp_path,
        backend,
        tokenizer_class="GPT2Tokenizer",
        added_tokens_decoder=other,
    )
    with pytest.raises(CheckpointError, match="to the token '<call>', and files"):
        Tokenizer.load(folder)


def test_a_class_that_cuts_otherwise_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), tokenizer_class="GPT2Tokenizer")
    assert "the class GPT2Tokenizer" in Tokenizer.load(folder).note
    folder = write_folder(
        tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast"
    )
    assert Tokenizer.load(folder).note == ""


def test_a_run_and_a_check_tell_it_once(tmp_path: Path) -> None:
    """The demo model under the name of a class that composes accents, whose file does not."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "cafe\u0301", "max_tokens": 1}\n' * 2)
    for command in ("run", "check"):
        arguments = [command, str(requests), "--model-name", str(folder)]
        found = CliRunner().invoke(main, arguments)
        assert found.exit_code == 0, found.output
        assert found.output.count("than the class GPTNeoXTokenizer") == 1


def test_a_gguf_file_gives_the_ids_of_its_folder(tmp_path: Path) -> None:
    """One model gave 29 tokens from its folder, and 25 from its GGUF file."""
    digits = byte_level()
    vocabulary = sorted(digits.get_vocab(), key=digits.get_vocab().__getitem__)
    stored = json.loads(digits.to_str())["model"]["merges"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [
            3 if piece in SPECIALS else 1 for piece in vocabulary
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored],
        "tokenizer.ggml.eos_token_id": 2,
    }
    (tmp_path / "gguf").mkdir()
    write_tokenizer_files(metadata, tmp_path / "gguf")
    folder = write_folder(tmp_path / "folder", digits, tokenizer_class="GPT2Tokenizer")
    of_gguf = Tokenizer.load(tmp_path / "gguf")
    of_folder = Tokenizer.load(folder)
    for text in make_texts(3, 300):
        assert of_gguf.encode(text).ids == of_folder.encode(text).ids, text


@pytest.mark.parametrize(
    "declared", ["T5Tokenizer", "PegasusTokenizer", "MistralCommonBackend"]
)
def test_a_file_does_without_a_class_that_cannot_be_made(
    tmp_path: Path, declared: str
) -> None:
    """A class that wants another kind of vocabulary, or a library, made the folder unusable."""
    folder = write_folder(tmp_path, byte_level(), tokenizer_class=declared)
    assert differing(folder, make_texts(4, 50)) == []
    assert "without its class" in Tokenizer.load(folder).note


def test_only_a_tokenizers_own_files_name_its_tokens(tmp_path: Path) -> None:
    """Any file with "token" in its name counted, such as somebody's statistics in Latin-1."""
    folder = write_folder(tmp_path, byte_level(), tokenizer_class="GPT2Tokenizer")
    counts = tmp_path / "token_counts.json"
    counts.write_bytes(b'{"<|endoftext|>": 3}')
    assert differing(folder, ["a<|endoftext|>b"]) == []
    counts.write_bytes('{"caf\u00e9": 3}'.encode("latin-1"))
    assert differing(folder, ["a<|endoftext|>b"]) == []
