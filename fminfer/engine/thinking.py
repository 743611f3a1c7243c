"""Follows a sequence through its thought, and then through its grammar: what it may draw next.

Within a thought it may draw anything, until a budget is used up: then what ends the thought is
forced. A constraint begins behind the thought. There, the tokens of tags and of white space are
allowed beside those that the grammar allows.
"""

from __future__ import annotations

import copy
from functools import lru_cache

from fminfer.core.errors import RequestError
from fminfer.core.messages import Mask, invert_mask, make_mask, pack_token_ids
from fminfer.core.thought_form import Thought
from fminfer.text.grammars import Grammar, Grammars
from fminfer.text.label_trie import LabelTrie
from fminfer.text.thoughts import ThoughtReader
from fminfer.text.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
MAX_WHITE = 4  # tokens of white space between a thought and a constrained answer


class TagTokens:
    """The tokens of a vocabulary around a thought's closing tag.

    Attributes:
        white: the tokens of white space alone, as bits.
    """

    def __init__(self, grammars: Grammars, closing: str) -> None:
        self._vocabulary = grammars.vocabulary
        self._closing = closing
        self._num_bytes = grammars.num_mask_bytes
        self._bridges: dict[
            str, list[int]
        ] = {}  # by what of the tag stands before them
        last = closing[-1].encode()
        white_ids = []
        for token_id, token in enumerate(self._vocabulary.tokens):
            if token and not token.strip(b" \t\r\n"):
                white_ids.append(token_id)
            elif last in token[:-1]:
                self._add_bridge(token_id, token.decode(errors="replace"))
        self.white = self.pack(white_ids)

    def _add_bridge(self, token_id: int, text: str) -> None:
        """Note a token that ends the tag and begins the answer."""
        for size in range(len(self._closing)):
            rest = self._closing[size:]
            if text.startswith(rest) and text[len(rest) :].strip():
                self._bridges.setdefault(self._closing[:size], []).append(token_id)

    def make_mask_within(self, begun_tag: str) -> Mask | None:
        """Return what a thought may go on with: no token that begins the answer, too.

        None: anything.
        """
        begun = {"", begun_tag}
        bridges = [each for tag in begun for each in self._bridges.get(tag, [])]
        if not bridges:
            return None
        return make_mask(invert_mask(pack_token_ids(bridges, self._num_bytes)))

    def pack(self, ids: list[int]) -> int:
        return int.from_bytes(pack_token_ids(ids, self._num_bytes), "little")

    def make_mask(self, bits: int) -> Mask:
        return make_mask(bits.to_bytes(self._num_bytes, "little"))

    def find_beginnings(self, text: str) -> int:
        """Return the tokens that a text begins with, as bits."""
        sizes = range(1, len(text) + 1)
        starts = (self._vocabulary.find_ids(text[:size].encode()) for size in sizes)
        return self.pack([token_id for ids in starts for token_id in ids])

    def text_of(self, token_id: int) -> str:
        return self._vocabulary.tokens[token_id].decode(errors="replace")


@lru_cache(16)
def find_tag_tokens(grammars: Grammars, closing: str) -> TagTokens:
    return TagTokens(grammars, closing)


@lru_cache(64)
def spell_ending(tokenizer: Tokenizer, thought: Thought) -> list[int]:
    """Return the tokens that end a thought whose budget is used up.

    Raises:
        RequestError: no tokens spell it.
    """
    if thought.budget is None:
        return []
    ids = tokenizer.spell_inside(thought.form.ending)
    if ids is None:
        raise RequestError(
            "unsupported_parameter",
            f"no tokens of this model spell {thought.form.ending!r}, which is to end its "
            f"thought; ask without {BUDGET}",
            BUDGET,
        )
    return ids


class ThoughtMatcher:
    """Where one sequence stands in its thought, or behind it in its grammar.

    Whoever adds text to the sequence feeds the matcher's `reader`.

    Args:
        thought: what the request says of it.
        grammar: of the answer; None: any text.
        labels: of the answer, which are computed, not drawn; None: it is drawn.
    """

    def __init__(
        self,
        thought: Thought,
        tokenizer: Tokenizer,
        grammars: Grammars,
        grammar: Grammar | None = None,
        labels: LabelTrie | None = None,
    ) -> None:
        self.reader = ThoughtReader(thought)
        self.labels = labels
        self.num_tokens = 0  # before the answer
        self.is_truncated = False  # its budget was used up
        self._ending_ids = spell_ending(tokenizer, thought)
        self._num_mask_bytes = grammars.num_mask_bytes
        self._grammar = grammar
        self._tags: TagTokens | None = None
        if grammar is not None or labels is not None:
            self._tags = find_tag_tokens(grammars, thought.form.closing)
        # Where the answer stands in its grammar; None: what was drawn is none of it.
        self._matcher = None if grammar is None else grammar.make_matcher()
        self._phase = self.reader.phase
        self._num_drawn = 0
        self._num_inside = 0  # tokens of thoughts, without tags
        self._num_white = 0  # tokens behind the closing tag
        self._num_read = 0  # characters of the text before the newest token
        self._has_text = True  # the newest token; or it is a piece of a character
        self._answer_start = 0  # of what may be the answer
        self._forced_ids: list[int] = []
        self._force_ending()

    @property
    def is_forcing(self) -> bool:
        return bool(self._forced_ids)

    @property
    def is_open(self) -> bool:
        """Whether the text ends within the thought."""
        return self.reader.phase == "inside"

    @property
    def holds_eos(self) -> bool:
        """Whether EOS cannot be drawn, for a constrained answer follows within the budget."""
        has_budget = self.reader.thought.budget is not None
        return has_budget and self._tags is not None and self.is_open

    @property
    def num_reserved(self) -> int:
        """Tokens of max_tokens that the thought leaves to the longest label."""
        return 0 if self.labels is None else self.labels.num_longest

    @property
    def leads_to_label(self) -> bool:
        """Whether a label comes once no more tokens may be drawn."""
        return self.labels is not None and not self.is_open

    @property
    def mask(self) -> Mask | None:
        """The tokens that may come next; None: any.

        Raises:
            RequestError: the grammar is too complex here.
        """
        if self._forced_ids:
            return make_mask(pack_token_ids(self._forced_ids[:1], self._num_mask_bytes))
        if self._tags is None:
            return None
        if self._phase == "inside":
            return self._tags.make_mask_within(self.reader.held)
        if self._grammar is None:
            return None
        if self._phase == "answer":
            assert self._matcher is not None, "a mask allowed what is no answer"
            return self._matcher.mask
        return self._make_seam_mask(self._tags)

    def _make_seam_mask(self, tags: TagTokens) -> Mask:
        """Return what may come between a thought and the answer, and what begins it."""
        bits = 0
        if self._matcher is not None:
            bits = int.from_bytes(self._matcher.mask.bits, "little")
        if not self._has_text:  # what goes on with a character
            return tags.make_mask(bits)
        held = self.reader.held.lstrip()
        is_behind = self._phase == "behind"
        if is_behind and not held and self._num_white < MAX_WHITE:
            bits |= tags.white
        # a constrained answer has one thought
        for seam in self.reader.thought.form.leads if is_behind else self.reader.seams:
            if seam.startswith(held):
                bits |= tags.find_beginnings(seam[len(held) :])
        return tags.make_mask(bits)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here. What has not begun is not cut off."""
        if self._phase != "answer" or self._matcher is None:
            return True
        return self._matcher.is_complete

    def begins_answer(self, token_id: int, num_left: int) -> bool:
        """Tell whether a token that was drawn is none of the thought, nor of what is behind it.

        Args:
            num_left: tokens that may be drawn.
        """
        if self._phase in ("inside", "answer") or self._forced_ids:
            return self._phase == "answer"
        assert self._tags is not None, "labels need them"
        probe = copy.copy(self.reader)
        probe.spans = [*probe.spans]
        probe.feed(self._tags.text_of(token_id))
        begins = probe.phase == "answer" and probe.answer_start < probe.num_read
        return begins or num_left == 0

    def advance(self, token_id: int) -> None:
        """Follow the newest token, whose text the reader has; never EOS."""
        reader = self.reader
        phase_before = self._phase
        start = self._num_read
        self._phase = reader.phase
        self._num_read = reader.num_read
        self._num_drawn += 1
        del self._forced_ids[:1]
        if phase_before == "answer":
            if self._matcher is not None:
                self._matcher.advance(token_id)
            return
        # a token may hold the tag's end and the answer's beginning, or white space and that
        begins_answer = self._phase == "answer" and reader.answer_start < self._num_read
        is_of_tag = phase_before == "inside" or not begins_answer
        # what may be a tag may be the answer's beginning
        is_settled = self._phase != "behind" or not reader.held.strip()
        if reader.has_thought and is_of_tag and is_settled:
            self.num_tokens = self._num_drawn
        if self._phase == "inside":
            self._num_inside += phase_before == "inside"
            self._force_ending()
        elif self._phase == "behind":
            self._num_white = 0 if phase_before == "inside" else self._num_white + 1
        if self._grammar is not None:
            self._follow_grammar(self._grammar, token_id, start, is_of_tag=is_of_tag)

    def _follow_grammar(
        self, grammar: Grammar, token_id: int, start: int, *, is_of_tag: bool
    ) -> None:
        """Let the grammar follow what is the answer, or may be."""
        held = self.reader.held
        if self._phase == "behind":  # white space there belongs to the tag
            held = held.strip()
        self._has_text = self._num_read > start
        # more white space than that is what the grammar asks for
        is_white_left = self._phase != "behind" or self._num_white <= MAX_WHITE
        if is_of_tag and self._has_text and not held and is_white_left:
            self._matcher = grammar.make_matcher()
            self._answer_start = self._num_read
            return
        matcher = self._matcher
        if matcher is not None and _has_token(matcher.mask, token_id):
            matcher.advance(token_id)
        else:
            self._matcher = None
        if self._phase == "answer":  # with white space that the grammar asks for
            self.reader.answer_start = self._answer_start

    def _force_ending(self) -> None:
        budget = self.reader.thought.budget
        is_used_up = budget is not None and self._num_inside >= budget
        if is_used_up and self._phase == "inside" and not self._forced_ids:
            self._forced_ids = [*self._ending_ids]
            self.is_truncated = True


def _has_token(mask: Mask, token_id: int) -> bool:
    return bool(mask.bits[token_id >> 3] >> (token_id & 7) & 1)
