"""What a tokenizer.json says, told to the tokenizer that transformers makes of its folder.

transformers builds the class that tokenizer_config.json names anew, from the file's vocabulary. It
drops the file's other parts, and other files may change the flags of added tokens. A model was
trained on the tokens that its tokenizer.json makes, so that file is followed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from fminfer.core.errors import CheckpointError
from fminfer.core.impostors import broken

_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# What parts of published tokenizers cut in different ways.
_PROBE = (
    " Two  spaces,\ttabs\n\n  and lines. HELLO Hello's don't 'S 12345 in  2024; 1.000,50 x_1=y+2 "
    "cafe\u0301 café ﬁne ＡＢＣ ½ 你好世界 日本 한국 Привет עברית ไทย \U0001f600 <html>{[(\\/)]}…  "
)


def follow_tokenizer_file(hf: Any, file: Path) -> str:
    """Give the tokenizer of a folder the parts of its tokenizer.json.

    Args:
        hf: of transformers; its backend changes.

    Returns:
        What is to be told to the user, if texts get other ids or spaces by this; else "".

    Raises:
        CheckpointError: the file is broken, or gives a token another id than the folder's others.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import; only where it is needed

    backend: BackendTokenizer = hf.backend_tokenizer
    before = _try_out(backend)
    is_built_anew = type(hf).__init__ is not PreTrainedTokenizerFast.__init__
    stored = _load_file(file) if is_built_anew else backend
    for part in _PARTS if is_built_anew else ():
        setattr(backend, part, getattr(stored, part))
    if getattr(hf, "src_lang", None) is None:  # else it is of the language that the folder names
        backend.post_processor = stored.post_processor
    _replace_added_tokens(backend, stored, file)
    if _try_out(backend) == before:
        return ""
    return (
        f"{file} makes other tokens than the class {type(hf).__name__} that the files beside it "
        "name; the file is followed"
    )


def _try_out(backend: BackendTokenizer) -> tuple[list[str], str]:
    """Return the tokens that a probe is cut into, and the text of them."""
    encoding = backend.encode(_PROBE)
    return encoding.tokens, backend.decode(encoding.ids)


def _load_file(file: Path) -> BackendTokenizer:
    try:
        return BackendTokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own
        raise broken(file, error) from error


def _read_added_tokens(file: Path) -> list[dict[str, Any]]:
    """Return the entries of the file's added tokens; all else of it is not parsed again."""
    text = file.read_text("utf-8")
    key = _ADDED_TOKENS.search(text)
    if key is None:
        return []
    entries: list[dict[str, Any]]
    entries, _ = json.JSONDecoder().raw_decode(text, key.end())
    return entries


def _replace_added_tokens(backend: BackendTokenizer, stored: BackendTokenizer, file: Path) -> None:
    """Take added tokens and their flags from the file; what is special for others stays so.

    Args:
        stored: the tokenizer that the file alone makes.
    """
    entries = sorted(_read_added_tokens(file), key=lambda entry: int(entry["id"]))
    others = backend.get_added_tokens_decoder().values()
    special = {token.content for token in others if token.special}
    tokens = []
    for entry in entries:
        flags = {name: entry.get(name, False) for name in _FLAGS}
        flags["special"] |= entry["content"] in special
        tokens.append(AddedToken(entry["content"], **flags))
    backend.add_tokens(tokens)  # those that are there change their flags
    for token in tokens:
        stored_id = stored.token_to_id(token.content)
        if (token_id := backend.token_to_id(token.content)) != stored_id:
            raise CheckpointError(
                f"{file} gives the token {token.content!r} the id {stored_id}, and with the files "
                f"beside it that is {token_id}. Put the model's own files there"
            )
