"""Ids to text one at a time: what is certain so far, and where each token starts in it.

Bytes that are no character yet are shown as U+FFFD, and held back. A later token settles whether
they become one character, which all its tokens share, or stay characters of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

BROKEN = "\ufffd"  # what a tokenizer shows for bytes that are no character (yet)
# so many of them may yet become a character, which has at most four bytes
MAX_BROKEN = 3
# ids before a completion, or before the newest, that settle leading spaces
CONTEXT_IDS = 8


class Decoder(Protocol):
    """What a tokenizer must be able to do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool: ...


class Detokenizer:
    """Turns ids into text one at a time.

    A window of recent ids is detokenized with and without the new one, and the difference is the
    new text, as in Hugging Face's text-generation-inference: so spaces and characters split over
    several ids come out right. A broken end is held back until it completes, or cannot any more.

    Args:
        is_whole_text: the prompt was text, so a U+FFFD at its end is its own and not a
        broken end.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: list[int],
        *,
        is_whole_text: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode = partial(
            tokenizer.decode, skip_special_tokens=skip_special_tokens
        )
        self._has_text = partial(
            tokenizer.has_text, skip_special_tokens=skip_special_tokens
        )
        shown = islice(filter(self._has_text, reversed(prompt_ids)), CONTEXT_IDS)
        self._ids = list(shown)[::-1]  # the window
        self._num_settled = len(self._ids)  # ids of the window whose text is wholly out
        text = self._decode(self._ids)
        self._text_out = text if is_whole_text else drop_broken_end(text)
        self._num_held = len(text) - len(self._text_out)  # U+FFFD behind it
        # U+FFFD that the prompt's text shows already, and how many of them came out again.
        self._num_of_prompt = self._num_held
        self._num_left_out = 0
        self._token_starts = TokenStarts(self._num_held)
        # Where the newest token starts in the text that is given out, in code points; before it
        # the starts of those tokens before it whose place was not certain.
        self.starts: list[int] = []

    @property
    def num_open_starts(self) -> int:
        """How many of the newest tokens have a start that may yet change."""
        return self._token_starts.num_open_starts

    def add(self, token_id: int) -> str:
        """Add the next id and return the text that is now certain."""
        if not self._has_text(token_id):
            self._update_starts("", is_inside=False)
            return ""
        num_before = len(self._text_out) + self._num_held
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_inside = self._num_held > 0 and self._is_inside(
            token_id, len(text) - num_before
        )
        certain = drop_broken_end(text)
        new = certain[len(self._text_out) :]
        self._text_out += new
        self._num_held = len(text) - len(self._text_out)
        if new and certain == text:
            self._slide_window(self._num_settled)
        elif (
            len(self._ids) > self._num_settled + CONTEXT_IDS
        ):  # bytes and bytes, no character
            self._slide_window(len(self._ids) - CONTEXT_IDS)
        shown = self._drop_broken_prompt(new)
        self._update_starts(new, is_inside=is_inside)
        return shown

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        return self._drop_broken_prompt(self._decode(self._ids)[len(self._text_out) :])

    def _slide_window(self, num_dropped: int) -> None:
        """Forget the window's first ids."""
        self._ids = self._ids[num_dropped:]
        self._num_settled = len(self._ids)
        text = self._decode(self._ids)
        self._text_out = text[: len(text) - self._num_held]

    def _is_inside(self, token_id: int, num_more: int) -> bool:
        """Tell whether an id goes on with the character that is held back.

        Args:
            num_more: characters that the text has more with it.
        """
        alone = self._decode([token_id])
        return alone.startswith(BROKEN) and num_more < len(alone)

    def _update_starts(self, new: str, *, is_inside: bool) -> None:
        starts = self._token_starts.add(new, self._num_held, is_inside=is_inside)
        num_left_out = self._num_left_out + min(self._num_of_prompt, self._num_held)
        self.starts = (
            [max(0, start - num_left_out) for start in starts]
            if num_left_out
            else starts
        )

    def _drop_broken_prompt(self, new: str) -> str:
        """Leave out what the prompt's text shows already: broken bytes that no id made whole."""
        if not (self._num_of_prompt and new):
            return new
        num_broken = len(new) - len(new.lstrip(BROKEN))
        num_left_out = min(self._num_of_prompt, num_broken)
        self._num_left_out += num_left_out
        # behind a whole character all is its own
        is_all_broken = num_broken == len(new)
        self._num_of_prompt = self._num_of_prompt - num_left_out if is_all_broken else 0
        return new[num_left_out:]


def drop_broken_end(text: str) -> str:
    """Return a text without the U+FFFD at its end that may yet become a character."""
    if not text.endswith(BROKEN):
        return text
    end = text[-MAX_BROKEN:]
    return text[: len(text) - len(end)] + end.rstrip(BROKEN)


@dataclass(slots=True)
class _OpenStart:
    """A token's start, which is `num_certain` plus as many of `num_held` U+FFFD as stay such."""

    num_certain: int  # code points that were certain before it
    num_held: int
    is_inside: bool  # its first byte belongs to the last of them
    text_since: str = ""  # what became certain since

    @property
    def is_settled(self) -> bool:
        return (
            len(self.text_since) >= self.num_held or self.text_since.strip(BROKEN) != ""
        )

    def find_start(self, num_held: int) -> int:
        """Return the start, if the text ends in so many U+FFFD that are held back now."""
        text = self.text_since + BROKEN * num_held
        num_equal = min(self.num_held, len(text) - len(text.lstrip(BROKEN)))
        return (
            self.num_certain
            + num_equal
            - (self.is_inside and num_equal == self.num_held)
        )


class TokenStarts:
    """Starts of tokens, those of the newest corrected as text becomes certain.

    Args:
        num_held: U+FFFD at the end of the prompt's text, which may become a character yet.
    """

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held
        self._num_certain = 0  # code points
        self._open: list[_OpenStart] = []

    @property
    def num_open_starts(self) -> int:
        """How many tokens have an open start."""
        return len(self._open)

    def add(self, new: str, num_held: int, *, is_inside: bool) -> list[int]:
        """Add the next token; return its start, and those before it that are open.

        Args:
            new: what is certain with it.
            num_held: U+FFFD that are held back behind it.
            is_inside: its first byte belongs to the last U+FFFD that was held back before it.
        """
        starts = [self._num_certain]  # as mostly
        if self._num_held or self._open:
            self._open.append(_OpenStart(self._num_certain, self._num_held, is_inside))
            for token in self._open:
                token.text_since += new
            starts = [token.find_start(num_held) for token in self._open]
            self._open = [token for token in self._open if not token.is_settled]
        self._num_certain += len(new)
        self._num_held = num_held
        return starts
