"""Writes a GGUF model's small files into the user's cache folder.

Tokenizer, chat template and generation_config.json are files for all other code. They are written
once for each model, whole or not at all, so that processes may do it at the same time.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from pathlib import Path

from fminfer.core.errors import CheckpointError
from fminfer.machine.user_cache import cache_folder
from fminfer.models.gguf.metadata import GgufModel
from fminfer.models.gguf.tokenizer_files import write_generation_config, write_tokenizer_files


def small_files(model: GgufModel, *, has_tokenizer: bool) -> Path:
    """Return the folder of a model's small files, written if it is not there.

    Args:
        has_tokenizer: otherwise generation_config.json is all.

    Raises:
        CheckpointError: the metadata make no tokenizer, or the files cannot be written.
    """
    write = write_tokenizer_files if has_tokenizer else write_generation_config
    try:
        cache = cache_folder()
        if cache is None:
            cache = Path(tempfile.mkdtemp(prefix="fminfer-"))
            atexit.register(shutil.rmtree, cache, ignore_errors=True)
        folder = cache / f"gguf-{_key(model)}{'' if has_tokenizer else '-ends'}"
        if not folder.is_dir():
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
            try:
                write(model.metadata, part)
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same files
                    raise
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return folder
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer of {model.path} cannot be written to the cache folder: {error}. Set "
            "XDG_CACHE_HOME to a folder that you can write"
        ) from error


def _key(model: GgufModel) -> str:
    """Return a digest of what the files are made of: the header, and the code that writes them."""
    first, last = model.header
    digest = hashlib.blake2b(digest_size=16)
    for code in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(code.read_bytes())
    with model.path.open("rb") as file:
        file.seek(first)
        digest.update(file.read(last - first))
    return digest.hexdigest()
