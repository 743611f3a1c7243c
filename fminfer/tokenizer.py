"""Text to ids and back: spelling, offsets, and detokenizing one id at a time.

It wraps transformers' tokenizers (fast ones and sentencepiece ones) and knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from fminfer.errors import CheckpointError

BROKEN = "\ufffd"  # what a tokenizer shows for bytes that are no character (yet)
MAX_PENDING_IDS = 8  # held back at most; a character has at most four bytes
CONTEXT_IDS = 8  # prompt ids before a completion that settle its first leading space


@dataclass(slots=True, frozen=True)
class EncodedPrompt:
    """A prompt in ids. `offsets[i]` is the code point of `text` at which id i starts."""

    ids: list[int]
    text: str
    offsets: list[int]  # empty unless asked for


class Tokenizer:
    """What the engine needs of a tokenizer.

    Args:
        hf: a tokenizer of transformers, or None for plain bytes (ids 0 … 255), which serves
            random weights without a tokenizer.
    """

    def __init__(self, hf: Any | None) -> None:
        backend = _byte_tokenizer() if hf is None else getattr(hf, "backend_tokenizer", None)
        self._hf = hf
        self._backend: BackendTokenizer | None = backend
        self.bos_id: int | None = None if hf is None else hf.bos_token_id
        self.eos_id: int | None = None if hf is None else hf.eos_token_id

    @property
    def hf(self) -> Any | None:
        """The tokenizer of transformers; None for plain bytes."""
        return self._hf

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: the folder has no tokenizer that transformers can read.
        """
        from transformers import AutoTokenizer  # slow to import; only where it is needed

        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} has no usable tokenizer: {error}") from error

    def encode(self, text: str, *, with_offsets: bool = False) -> EncodedPrompt:
        """Turn a prompt string into ids by the tokenizer's own special-token policy.

        An empty result (an empty prompt of a tokenizer that adds nothing) becomes BOS, or EOS
        where there is no BOS; it stays empty if the tokenizer has neither.
        """
        if self._hf is None:
            assert self._backend is not None
            ids = self._backend.encode(text).ids
        else:
            ids = self._hf(text)["input_ids"]
        if not ids:
            start = self.bos_id if self.bos_id is not None else self.eos_id
            return EncodedPrompt(
                [] if start is None else [start], text, [] if start is None else [0]
            )
        return EncodedPrompt(ids, text, self._text_offsets(text, ids) if with_offsets else [])

    def describe_ids(self, ids: list[int], *, with_offsets: bool = False) -> EncodedPrompt:
        """Give a prompt of ids its text and, if asked, the offset of each id in it."""
        offsets: list[int] = []
        text = self.decode(ids)
        if with_offsets:
            offsets, text = self._detokenized_offsets(ids)
        return EncodedPrompt(ids, text, offsets)

    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id, such as `Ġnorth` or `▁north`."""
        if self._backend is not None:
            piece = self._backend.id_to_token(token_id)
        else:
            assert self._hf is not None
            in_vocab = token_id < len(self._hf)
            piece = self._hf.convert_ids_to_tokens(token_id) if in_vocab else None
        # Checkpoints pad their vocabulary: such ids can be sampled but have no spelling.
        return piece if piece is not None else f"<|id:{token_id}|>"

    def decode(self, ids: list[int]) -> str:
        """Return the text of a whole id sequence, special tokens left out."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=True))
        assert self._hf is not None
        known = [i for i in ids if i < len(self._hf)]
        return str(
            self._hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _text_offsets(self, text: str, ids: list[int]) -> list[int]:
        """Offsets of a string prompt's ids: from the tokenizer, gaps given to the next token."""
        if self._backend is None:
            return self._detokenized_offsets(ids)[0]
        encoding = self._backend.encode(text)
        spans = list(zip(encoding.offsets, encoding.special_tokens_mask, strict=True))
        # Some tokenizers trim white space off their offsets, and tokens of nothing else vanish;
        # and transformers may add tokens that the backend does not know of.
        if encoding.ids != ids or any(a == b for (a, b), is_special in spans if not is_special):
            return self._detokenized_offsets(ids)[0]
        offsets, last_end = [], 0
        for (start, end), is_special in spans:
            if is_special:
                start = end = last_end
            offsets.append(min(start, last_end))
            last_end = max(end, last_end)
        return offsets

    def _detokenized_offsets(self, ids: list[int]) -> tuple[list[int], str]:
        detokenizer, offsets, parts, length = Detokenizer(self, []), [], [], 0
        for token_id in ids:
            offsets.append(length)
            parts.append(detokenizer.add(token_id))
            length += len(parts[-1])
        parts.append(detokenizer.flush())
        return offsets, "".join(parts)


class Detokenizer:
    """Turns ids into text one at a time, over the whole sequence and never token by token.

    A window of recent ids is detokenized with and without the new one, and the difference is the
    new text: so spaces and characters split over several ids come out right (the scheme of
    Hugging Face's text-generation-inference). A broken end is held back until it completes or
    `flush` is called. Byte-fallback tokenizers show a whole run of bytes as broken while its last
    character is, so the whole run counts as the broken end.

    Args:
        is_whole_text: the prompt was text, so a U+FFFD at its end is its own and not a broken end.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], *, is_whole_text: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt_ids[-CONTEXT_IDS:]  # the window
        self._num_settled = len(self._ids)  # ids of the window whose text is wholly out
        self._text_out = tokenizer.decode(self._ids) if self._ids else ""
        if not is_whole_text:
            self._text_out = self._text_out.rstrip(BROKEN)

    def add(self, token_id: int) -> str:
        """Take the next id and return the text that is now certain."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        certain = text if text == self._text_out else text.rstrip(BROKEN)
        if certain != text and len(self._ids) - self._num_settled >= MAX_PENDING_IDS:
            certain = text  # no character is that long: these bytes will never be one
        new = certain[len(self._text_out) :]
        if new and certain == text:
            self._ids = self._ids[self._num_settled :]
            self._num_settled = len(self._ids)
            self._text_out = self._tokenizer.decode(self._ids)
        elif not new and text and text == self._text_out:
            self._ids.pop()  # an id without text, such as EOS when it is ignored
        else:
            self._text_out += new
        return new

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        text = self._tokenizer.decode(self._ids)
        if text.startswith(self._text_out):
            return text[len(self._text_out) :]
        return self._tokenizer.decode(self._ids[self._num_settled :])


def _byte_tokenizer() -> BackendTokenizer:
    """Build a tokenizer of the 256 bytes, id = byte."""
    spellings = pre_tokenizers.ByteLevel.alphabet()
    by_byte = {_byte_of(spelling): spelling for spelling in spellings}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    tokenizer = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_of(spelling: str) -> int:
    """Invert GPT-2's byte alphabet: printable bytes stand for themselves, others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(spelling)
    if code < 256:
        return code
    return [byte for byte in range(256) if byte not in printable][code - 256]
