"""What a request changes in its logits: logit_bias, penalties for earlier tokens, and bans.

Each affected token has a column. Columns are updated as tokens are drawn, so a step sends them
without counting anew. `fminfer.compute.sampling.sampler` applies them.
"""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Any

from fminfer.contract.request import RequestParams
from fminfer.core.errors import RequestError
from fminfer.core.messages import Mask, invert_mask, make_mask, pack_token_ids


class Bans:
    """The tokens that the sequences of a request cannot draw.

    EOS and stop tokens are held until there are `min_tokens`, EOS also in a thought with a
    budget. The last id of each of the `words` is banned where it would complete the word.
    """

    def __init__(
        self,
        params: RequestParams,
        eos_ids: frozenset[int],
        words: list[tuple[int, ...]],
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._held_ids = eos_ids | stop_ids
        self._never = {word[0] for word in words if len(word) == 1}
        # last tokens, by those before
        self._longer: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[:-1], set()).add(word[-1])
        self._lengths = sorted({*map(len, self._longer)})
        # newest tokens that `find_banned` looks at
        self.reach = max(map(len, words), default=1)

    @cached_property
    def mask(self) -> Mask | None:
        """The tokens that may ever be drawn; None: all."""
        has_list = bool(self._params.allowed_token_ids)
        listed = (
            set(self._params.allowed_token_ids) - self._never
            if has_list
            else self._never
        )
        if not (has_list or listed):
            return None
        bits = pack_token_ids(listed, (max(listed, default=-1) + 1) // 64 * 8 + 8)
        return make_mask(bits if has_list else invert_mask(bits))

    def narrow_mask(self, mask: Mask, banned: set[int]) -> Mask:
        """Return a mask of all of the model's tokens without those that are banned.

        If nothing else is left, EOS stays for a complete answer, and so do allowed stop tokens.
        """
        if self.mask is None and not banned:
            return mask
        size = len(mask.bits)
        whole = allowed = int.from_bytes(mask.bits, "little")
        if self.mask is not None:
            end = b"\xff" if self.mask.bits[-1] > 127 else b"\0"
            allowed &= int.from_bytes(self.mask.bits[:size].ljust(size, end), "little")
        bits = allowed & ~int.from_bytes(pack_token_ids(banned, size), "little")
        if not bits:
            held = int.from_bytes(pack_token_ids(self._held_ids, size), "little")
            ends = int.from_bytes(pack_token_ids(self._eos_ids, size), "little")
            bits = (allowed & held) | (whole & ends)
        return make_mask(bits.to_bytes(size, "little"))

    def find_banned(
        self, num_drawn: int, newest: list[int], *, holds_eos: bool = False
    ) -> set[int]:
        """Return the tokens, beside those that are never drawn, that cannot be drawn next.

        Args:
            holds_eos: EOS is one of them.
        """
        banned = set(self._held_ids) if num_drawn < self._params.min_tokens else set()
        if holds_eos:
            banned |= self._eos_ids
        for length in self._lengths:
            banned |= self._longer.get(tuple(newest[-length:]), set())
        return banned

    def require_token(self, num_drawn: int, banned: set[int]) -> None:
        """See that something can be drawn next, or raise a RequestError."""
        allowed = self._params.allowed_token_ids
        held = self._never | banned
        if allowed and all(token_id in held for token_id in allowed):
            raise RequestError(
                "out_of_range",
                "min_tokens or bad_words hold back all of allowed_token_ids for "
                f"generated token {num_drawn}. Allow further tokens, lower min_tokens, "
                "or take out bad_words",
                "allowed_token_ids",
            )


class LogitEdits:
    """Changes of single logits of one sequence, in columns of which a step joins many.

    Of its prompt only repetition_penalty counts the tokens.
    """

    def __init__(self, params: RequestParams, prompt_ids: list[int]) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        self._place: dict[int, int] = {}  # token id -> its place in the columns
        self._num_drawn: dict[int, int] = {}

    @cached_property
    def columns(self) -> dict[str, array[Any]]:
        """Columns with an entry for each edited token, made when a step first asks for them."""
        self.columns = {
            "edit_ids": array("q"),
            "edit_bias": array("f"),  # logit_bias
            "edit_factor": array("f"),  # repetition_penalty
            "edit_minus": array("f"),  # frequency and presence
        }
        for token_id, bias in self._params.logit_bias:
            self.columns["edit_bias"][self._find_place(token_id)] = bias
        if self._params.repetition_penalty != 1:
            for token_id in self._prompt_ids:
                self.columns["edit_factor"][self._find_place(token_id)] = (
                    self._params.repetition_penalty
                )
        return self.columns

    def count_drawn(self, token_id: int) -> None:
        """Note one more drawn token."""
        params = self._params
        if not params.has_penalties:
            return
        place = self._find_place(token_id)
        num_drawn = self._num_drawn[token_id] = self._num_drawn.get(token_id, 0) + 1
        self.columns["edit_factor"][place] = params.repetition_penalty
        self.columns["edit_minus"][place] = (
            params.frequency_penalty * num_drawn + params.presence_penalty
        )

    def _find_place(self, token_id: int) -> int:
        """Return the token's place; a new place changes nothing yet."""
        place = self._place.setdefault(token_id, len(self.columns["edit_ids"]))
        if place == len(self.columns["edit_ids"]):
            for column, value in zip(
                self.columns.values(), (token_id, 0.0, 1.0, 0.0), strict=True
            ):
                column.append(value)
        return place
