"""Makes the tokenizer that transformers builds of a folder follow the folder's tokenizer.json.

transformers builds the class that tokenizer_config.json names anew, from the file's
vocabulary. It drops the file's other parts, and adds tokens of the class. Other files
may change the flags of added tokens. A model was trained on the tokens of its
tokenizer.json, so that file is followed.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import naming_broken_files

_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_CHANGING = re.compile(
    r'"(normalizer|pre_tokenizer|post_processor|decoder)"\s*:\s*(?=\{)'
)
# characters or tokens of one character; published files make three or four
MOST_GROWTH = 64
OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Text that published tokenizers cut in different ways.
_PROBE = (
    " Two  spaces,\ttabs\n\n  and lines. HELLO Hello's don't 'S 12345 in  2024; "
    "1.000,50 x_1=y+2 cafe\u0301 café ﬁne ＡＢＣ ½ 你好世界 日本 한국 Привет "
    "עברית ไทย \U0001f600 <html>{[(\\/)]}…  "
)


def follow_tokenizer_file(hf: Any, file: Path) -> str:
    """Give the tokenizer of a folder the parts of its tokenizer.json.

    Args:
        hf: transformers' tokenizer; its backend is changed, or replaced by the file's.

    Returns:
        A line for the user, if texts get other ids or spaces by this; else "".

    Raises:
        CheckpointError: the file is broken, or other files give one of its ids to another token.
    """
    # slow to import; only where it is needed
    from transformers import PreTrainedTokenizerFast

    others: list[AddedToken] = [*hf.added_tokens_decoder.values()]
    before = _encode_probe(hf.backend_tokenizer)
    if type(hf).__init__ is not PreTrainedTokenizerFast.__init__:  # it is built anew
        _replace_backend(hf, _load_file(file), others, file)
    _flag_added_tokens(hf.backend_tokenizer, others, file)
    if _encode_probe(hf.backend_tokenizer) == before:
        return ""
    return (
        f"{file} makes other tokens than the class {type(hf).__name__} that the files beside it "
        "name; the file is followed"
    )


def check_growth(file: Path) -> None:
    """Raise if a part of a tokenizer.json makes a text many times as long.

    Thirty replacements of `a` by `aa` make gigabytes of any request.

    Raises:
        CheckpointError: the file is such a one.
    """
    text = file.read_text("utf-8")
    for key in _CHANGING.finditer(text):
        growth = _find_growth(json.JSONDecoder().raw_decode(text, key.end())[0])
        if growth > MOST_GROWTH:
            raise CheckpointError(
                f"{file}: its {key[1]} may make a text {growth:.3g} times as long; at most "
                f"{MOST_GROWTH} times is allowed. Put the model's own file there"
            )


def _find_growth(part: Any) -> float:
    """Return how many times as long a part of a tokenizer.json may make a text."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1.0, len(new) / max(1, len(old)))
        case {"type": "Replace", "content": str(new)} | {
            "type": "Prepend",
            "prepend": str(new),
        }:
            return 1.0 + len(new)
        case {"type": "TemplateProcessing", "single": list(single)}:
            return max(1.0, len(single))
        case {"type": "ByteLevel"}:
            return 2.0
        case dict():
            return _find_growth(list(part.values()))
        case list():
            return math.prod(map(_find_growth, part))
    return 1.0


def _encode_probe(backend: BackendTokenizer) -> tuple[list[str], str]:
    """Return the tokens of the probe and their text; or no tokens and the error."""
    backend.no_padding()  # a file may ask for a billion tokens
    # the first text, without a space at its end, shows what makes Rust's code panic
    try:
        encoding = [backend.encode(text) for text in ("a", _PROBE)][-1]
    except (
        Exception
    ) as error:  # the file may lack what a class takes for its unknown token
        return [], str(error)
    return encoding.tokens, backend.decode(encoding.ids)


def _load_file(file: Path) -> BackendTokenizer:
    with naming_broken_files(file):  # tokenizers raises no class of its own
        return BackendTokenizer.from_file(str(file))


def _read_added_tokens(file: Path) -> list[dict[str, Any]]:
    """Return the file's added tokens, without parsing the rest of the file again."""
    text = file.read_text("utf-8")
    key = _ADDED_TOKENS.search(text)
    if key is None:
        return []
    entries: list[dict[str, Any]]
    entries, _ = json.JSONDecoder().raw_decode(text, key.end())
    return entries


def _replace_backend(
    hf: Any, stored: BackendTokenizer, others: list[AddedToken], file: Path
) -> None:
    """Make `hf` use the file's tokenizer, with added tokens that other files name.

    Tokens that only the class has, such as `<s>`, become text. A class with languages
    keeps all of its tokens: they are the languages.
    """
    language = getattr(hf, "src_lang", None)
    beside = (file.with_name(name) for name in OTHER_FILES)
    texts = [path.read_text("utf-8") for path in beside if path.exists()]

    def is_named(name: str) -> bool:
        is_kept = language is not None or stored.token_to_id(name) is not None
        return is_kept or any(
            f'"{name}"' in text or json.dumps(name) in text for text in texts
        )

    _check_id_owners(hf, stored, file)
    stored.add_tokens([token for token in others if is_named(token.content)])
    stored.encode_special_tokens = hf.backend_tokenizer.encode_special_tokens
    hf._tokenizer = stored
    for name, token in hf.special_tokens_map.items():
        if stored.token_to_id(str(token)) is None:
            setattr(hf, name, None)
    # the tokens around a text become those of the folder's language
    if language is not None:
        hf.src_lang = language


def _check_id_owners(hf: Any, stored: BackendTokenizer, file: Path) -> None:
    """Raise if another file gives an id of tokenizer.json to another token."""
    num_trained = stored.get_vocab_size(with_added_tokens=False)
    for token_id, token in hf.init_kwargs["added_tokens_decoder"].items():
        owner = stored.id_to_token(token_id)
        if token_id >= num_trained and owner not in (None, token.content):
            raise CheckpointError(
                f"{file} gives the id {token_id} to the token {owner!r}, and files "
                f"beside it give it to {token.content!r}. Put the model's own files "
                "there"
            )


def _flag_added_tokens(
    backend: BackendTokenizer, others: list[AddedToken], file: Path
) -> None:
    """Give added tokens the file's flags; what other files make special stays so."""
    special = {token.content for token in others if token.special}
    tokens = []
    for entry in _read_added_tokens(file):
        flags = {name: entry.get(name, False) for name in _FLAGS}
        flags["special"] |= entry["content"] in special
        tokens.append(AddedToken(entry["content"], **flags))
    backend.add_tokens(tokens)  # this changes the flags of existing tokens
