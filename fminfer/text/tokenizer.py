"""Text to ids and back, by transformers' tokenizers: spelling and offsets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, ContextDecorator
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from fminfer.core.bounded_cache import BoundedCache
from fminfer.core.errors import RequestError
from fminfer.text.detokenizer import BROKEN, Detokenizer
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.token_lengths import (
    LongestToken,
    count_least_tokens,
    find_longest_token,
)
from fminfer.text.tokenizer_folder import BYT5, read_tokenizer

MAX_KEPT_BYTES = 16 << 20  # of the words of whole requests
BYTES_A_CHARACTER = (
    64  # for a character of them, with its ids; the largest request fits
)


class _Panics(AbstractContextManager[object], ContextDecorator):
    """Turns a panic in the tokenizers library, which is no `Exception`, into a RequestError."""

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: object
    ) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise RequestError(
                "unsupported_parameter",
                f"the model's tokenizer fails at this text: {error}. Change the text, or give a "
                "sound tokenizer by --tokenizer",
            ) from None


PANICS = _Panics()


class Tokenizer:
    """What the engine needs of a tokenizer.

    Args:
        hf: of transformers; None: plain bytes (ids 0 … 255), for random weights without one.
    """

    has_words = True  # otherwise ids have no text
    note = ""  # a line for the user about its files

    def __init__(self, hf: Any | None) -> None:
        backend = (
            _build_byte_tokenizer()
            if hf is None
            else getattr(hf, "backend_tokenizer", None)
        )
        self.hf = hf
        self._word_spellings: BoundedCache[
            tuple[str, ...], tuple[frozenset[tuple[int, ...]], ...]
        ] = BoundedCache(16, MAX_KEPT_BYTES)
        # None: it is sentencepiece's own
        self.backend: BackendTokenizer | None = backend
        self._bytes = (
            _map_byt5_bytes(hf) if backend is None else _map_fallback_bytes(backend)
        )
        self.bos_id: int | None = None if hf is None else hf.bos_token_id
        self.eos_id: int | None = None if hf is None else hf.eos_token_id
        added = {} if hf is None else hf.added_tokens_decoder
        self._added_ids = frozenset(added)  # their pieces are text as it is
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        if hf is not None and backend is None:  # ByT5's EOS is not marked
            self.special_ids |= {*hf.all_special_ids}
        self._is_plain = backend is not None and (
            hf is None or _is_plain_encoder(hf, backend)
        )
        decoder = None if backend is None else backend.decoder
        self._is_byte_level = (
            decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        )

    @property
    def num_trained_tokens(self) -> int:
        """The number of its tokens, without added ones: a model may have no rows for these."""
        if self.backend is not None:
            return self.backend.get_vocab_size(with_added_tokens=False)
        assert self.hf is not None
        return int(self.hf.vocab_size)

    @cached_property
    def doubled_bos(self) -> str | None:
        """The spelling of BOS if a prompt that begins with it gets two; else None."""
        if self.bos_id is None or not self.has_words:
            return None
        bos = self.piece_of_token(self.bos_id)
        return bos if self.encode(bos).ids[:2] == [self.bos_id] * 2 else None

    @cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that are added before each text and after it."""
        bare = self._encode_ids("a", False)
        whole = self._encode_ids("a", True)
        front = whole.index(bare[0]) if bare else len(whole)
        return whole[:front], whole[front + len(bare) :]

    def find_special_id(self, text: str) -> int | None:
        """Return the special token of this spelling; None: there is none."""
        return self._special_by_piece.get(text)

    def cannot_appear(self, text: str) -> bool:
        """Tell whether no answer has a text: a special token is in it, with others beside."""
        return (
            text not in self._special_by_piece
            and self._special_pattern.search(text) is not None
        )

    def find_special_texts(self, text: str) -> list[str]:
        """Return the special tokens that a text spells, each once."""
        return [*dict.fromkeys(self._special_pattern.findall(text))]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_by_piece)) or "(?!)")

    @cached_property
    def _special_by_piece(self) -> dict[str, int]:
        return {
            self.piece_of_token(token_id): token_id for token_id in self.special_ids
        }

    @classmethod
    def load(cls, folder: Path, config: Any | None = None) -> Tokenizer:
        """Load the tokenizer of a folder.

        Args:
            config: the model's. It tells the tokenizer's kind if the folder has no config.

        Raises:
            CheckpointError: the folder has no tokenizer that transformers can read.
        """
        hf, note = read_tokenizer(folder, config)
        tokenizer = cls(hf)
        tokenizer.note = note
        return tokenizer

    def encode(
        self, text: str, *, with_offsets: bool = False, add_special_tokens: bool = True
    ) -> EncodedPrompt:
        """Turn a text into ids; without `add_special_tokens`, with those only that it spells.

        Of no ids it makes BOS, or EOS where there is no BOS; none if the tokenizer has neither.
        """
        ids = self._encode_ids(text, add_special_tokens)
        if not ids:
            start = self.bos_id if self.bos_id is not None else self.eos_id
            return (
                EncodedPrompt([start], text, [0])
                if start is not None
                else EncodedPrompt([], text, [])
            )
        offsets = (
            self._find_text_offsets(text, ids, add_special_tokens)
            if with_offsets
            else []
        )
        return EncodedPrompt(ids, text, offsets)

    @PANICS
    def _encode_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._is_plain and self.backend is not None:
            encodings = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encodings[0].ids
        assert self.hf is not None
        return list(self.hf(text, add_special_tokens=add_special_tokens)["input_ids"])

    def spell_inside(self, text: str) -> list[int] | None:
        """Return the tokens of a text in the middle of another; None: none spell it alone."""
        for before in ("", "="):  # some tokenizers put a space before a text
            ids = self._encode_ids(before + text, False)[len(before) :]
            if b"".join(map(self.bytes_of_token, ids)) == text.encode():
                return ids
        return None

    def spell_words(
        self, words: tuple[str, ...]
    ) -> tuple[frozenset[tuple[int, ...]], ...]:
        """Return `spell_word` of each word. Recent ones are kept: a request asks three times."""
        spelled = self._word_spellings.get(words) if words else ()
        if spelled is None:
            spelled = tuple(map(self.spell_word, words))
            self._word_spellings.put(
                words, spelled, BYTES_A_CHARACTER * sum(map(len, words))
            )
        return spelled

    def spell_word(self, word: str) -> frozenset[tuple[int, ...]]:
        """Return the ids of a word at the start of a text, and of one behind a space."""
        word = word.lstrip() or word  # white space has itself
        return frozenset(
            tuple(self._encode_ids(form, False)) for form in (word, f" {word}")
        ) - {()}

    def count_least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text certainly has; it costs no tokenizing."""
        return count_least_tokens(text, self._longest_token)

    @cached_property
    def _longest_token(self) -> LongestToken | None:
        if self.hf is None:
            return LongestToken(1, is_exact=True)
        if self.backend is None:
            return None
        has_all_bytes = self._is_byte_level or len(self._bytes) == 256
        added = self.hf.added_tokens_decoder.values()
        return find_longest_token(self.backend, added, has_all_bytes=has_all_bytes)

    def describe_ids(
        self,
        ids: list[int],
        *,
        with_offsets: bool = False,
        skip_special_tokens: bool = True,
    ) -> EncodedPrompt:
        """Return a prompt of ids with its text and, if wanted, the offset of each id in it."""
        offsets: list[int] = []
        text = self.decode(ids, skip_special_tokens=skip_special_tokens)
        if with_offsets:
            offsets, text = self._find_detokenized_offsets(ids, skip_special_tokens)
        return EncodedPrompt(ids, text, offsets)

    def piece_of_token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id, such as `Ġnorth` or `▁north`."""
        if self.backend is not None:
            piece = self.backend.id_to_token(token_id)
        else:
            assert self.hf is not None
            in_vocab = token_id < len(self.hf)
            piece = self.hf.convert_ids_to_tokens(token_id) if in_vocab else None
        # Checkpoints pad their vocabulary: such ids can be sampled but have no spelling.
        return piece if piece is not None else f"<|id:{token_id}|>"

    def bytes_of_token(self, token_id: int) -> bytes:
        """Return what an id stands for, in UTF-8; it may be a piece of a character."""
        piece = self.piece_of_token(token_id)
        if token_id in self._added_ids:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(
                _make_byte_alphabet().get(sign, sign.encode()) for sign in piece
            )
        if token_id in self._bytes:
            return bytes([self._bytes[token_id]])
        return piece.replace("▁", " ").encode()  # sentencepiece's sign for a space

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole id sequence."""
        with PANICS:
            return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if self.backend is not None and self._bytes.keys().isdisjoint(ids):
            return str(
                self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            )
        has_text = partial(self.has_text, skip_special_tokens=skip_special_tokens)
        shown = list(filter(has_text, ids))
        if self.backend is not None:
            return self._decode_with_bytes(self.backend, shown)
        assert self.hf is not None
        return str(self.hf.decode(shown, clean_up_tokenization_spaces=False))

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Tell whether `decode` looks at an id: not if it has no spelling, or is special."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        if self.backend is None:
            assert self.hf is not None
            return token_id < len(self.hf)
        return self.backend.id_to_token(token_id) is not None

    def _decode_with_bytes(self, backend: BackendTokenizer, shown: list[int]) -> str:
        """Decode ids with byte-fallback tokens among them, as sentencepiece itself does.

        The backend's ByteFallback shows a whole run of bytes as broken for one that is, so text
        already given out would change. Here only bytes of no character are replaced.
        """
        pieces: list[str] = []
        for is_bytes, run in groupby(shown, self._bytes.__contains__):
            if not is_bytes:
                pieces += map(self.piece_of_token, run)
                continue
            raw = bytes(self._bytes[token_id] for token_id in run)
            for char in raw.decode("utf-8", "surrogateescape"):
                is_broken = "\udc80" <= char <= "\udcff"
                pieces += (
                    [BROKEN]
                    if is_broken
                    else [f"<0x{byte:02X}>" for byte in char.encode()]
                )
        return str(backend.decoder.decode(pieces))

    @PANICS
    def _find_text_offsets(
        self, text: str, ids: list[int], add_special_tokens: bool
    ) -> list[int]:
        """Offsets of a string prompt's ids: from the tokenizer, gaps given to the next token."""
        if self.backend is None:
            return self._find_detokenized_offsets(ids)[0]
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        spans = list(zip(encoding.offsets, encoding.special_tokens_mask, strict=True))
        # Some tokenizers trim white space off their offsets, and tokens of nothing else vanish;
        # and transformers may add tokens that the backend does not know of.
        if encoding.ids != ids or any(
            a == b for (a, b), is_special in spans if not is_special
        ):
            return self._find_detokenized_offsets(ids)[0]
        offsets = []
        last_end = 0
        for (start, end), is_special in spans:
            if is_special:
                start = end = last_end
            offsets.append(min(start, last_end))
            last_end = max(end, last_end)
        return offsets

    def _find_detokenized_offsets(
        self, ids: list[int], skip_special_tokens: bool = True
    ) -> tuple[list[int], str]:
        detokenizer = Detokenizer(self, [], skip_special_tokens=skip_special_tokens)
        offsets: list[int] = []
        parts: list[str] = []
        for token_id in ids:
            parts.append(detokenizer.add(token_id))
            offsets[len(offsets) + 1 - len(detokenizer.starts) :] = detokenizer.starts
        parts.append(detokenizer.flush())
        return offsets, "".join(parts)


def _is_plain_encoder(hf: Any, backend: BackendTokenizer) -> bool:
    """Tell whether transformers' tokenizer only calls its backend, which alone is quicker."""
    backend.no_truncation()  # as transformers sets it for each text
    backend.no_padding()
    backend.encode_special_tokens = hf.split_special_tokens
    methods = (type(hf).__call__, type(hf)._encode_plus)
    return all(
        method.__module__.startswith("transformers.tokenization_utils_")
        for method in methods
    )


def _map_byt5_bytes(hf: Any) -> dict[int, int]:
    """Return id -> byte of ByT5's tokenizer; nothing for others."""
    if type(hf).__name__ != BYT5:
        return {}
    return {hf.convert_tokens_to_ids(chr(byte)): byte for byte in range(256)}


@PANICS
def _map_fallback_bytes(backend: BackendTokenizer) -> dict[int, int]:
    """Return id -> byte of a tokenizer whose decoder reads `<0x41>` as a byte; else nothing."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return {}
    ids = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in ids.items() if token_id is not None}


def _build_byte_tokenizer() -> BackendTokenizer:
    """Build a tokenizer of the 256 bytes, id = byte."""
    vocab = {spelling: byte[0] for spelling, byte in _make_byte_alphabet().items()}
    tokenizer = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def _make_byte_alphabet() -> dict[str, bytes]:
    """Return GPT-2's byte alphabet: printable bytes stand for themselves, others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    pairs += [(chr(256 + place), byte) for place, byte in enumerate(others)]
    return {
        spelling: bytes([byte])
        for spelling, byte in sorted(pairs, key=lambda pair: pair[1])
    }


class NoTokenizer(Tokenizer):
    """Spells id 5 as `token_id:5`, as vLLM does; texts are empty."""

    has_words = False

    def __init__(self) -> None:
        super().__init__(None)

    def encode(
        self, text: str, *, with_offsets: bool = False, add_special_tokens: bool = True
    ) -> EncodedPrompt:
        raise AssertionError("text was to be tokenized without a tokenizer")

    def piece_of_token(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def bytes_of_token(self, token_id: int) -> bytes:
        return self.piece_of_token(token_id).encode()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        return False
