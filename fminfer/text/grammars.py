"""Grammars of constrained answers, compiled by llguidance: which tokens may come next."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from functools import cached_property, lru_cache
from typing import Any

from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.core.messages import Mask, make_mask
from fminfer.text.gbnf import blame_rule, is_gbnf
from fminfer.text.grammar_forms import refuse, tidy, write_grammar, write_number_bound
from fminfer.text.grammar_trial import GrammarTrial
from fminfer.text.json_schemas import find_shortest, find_unknown
from fminfer.text.plain_schemas import parse_schema
from fminfer.text.tokenizer import Tokenizer

# Its tokens, those for what is unknown left out, must be the bytes of what they say.
PROBE = '{"a": [1, "b c"], "é": "x\\n-2.5"}'


class Vocabulary:
    """The bytes of a model's tokens, as llguidance's `TokenizerWrapper` takes them.

    Raises:
        RequestError: texts are not their tokens' bytes, one after another.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not tokenizer.has_words or not eos_ids:
            lacks = "EOS, which ends such answers" if tokenizer.has_words else "tokenizer"
            raise _refuse_all(f"this run has no {lacks}")
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids | eos_ids)
        self.tokens = [
            tokenizer.token_bytes(token_id)
            if tokenizer.has_text(token_id, skip_special_tokens=False)
            else b""
            for token_id in range(vocab_size)
        ]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids))
        usable = {*self._ids.values()}
        ids = [each for each in tokenizer.encode(PROBE).ids if each in usable]
        text = tokenizer.decode(ids).lstrip(" ")  # some put a space before a text, and take it off
        if b"".join(self.tokens[each] for each in ids).lstrip(b" ") != text.encode():
            raise _refuse_all(
                "the texts of this model's tokenizer are not its tokens' bytes, as in WordPiece"
            )

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens that a model would write for a text in the middle of another."""
        data = text if isinstance(text, bytes) else text.encode()
        for before in ("", "="):  # some tokenizers put a space before a text
            ids = self._tokenizer.encode(before + data.decode(), add_special_tokens=False).ids
            ids = ids[len(before) :]
            has_all = all(token_id < len(self.tokens) for token_id in ids)
            if has_all and b"".join(self.tokens[token_id] for token_id in ids) == data:
                return ids
        return self._cut(data)

    def _cut(self, data: bytes) -> list[int]:
        """Take the longest token each time, as far as there are tokens."""
        ids: list[int] = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


NUMBER_BYTES = b"0123456789.+-eE"  # the bytes of numbers: one may go on after these
MAX_KEPT = 256  # grammars
MAX_OPEN = 10_000  # places of a grammar where an answer may stand at once
MAX_TRIED = 200  # choices, the shortest, that are looked at for the shortest in tokens
MAX_NODES = 2048  # masks that are kept, of all grammars: each has a bit for every token


class _Node:
    """A place that several sequences reach by the same tokens."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.next: dict[int, _Node] = {}


class Grammar:
    """A grammar over the tokens of a model."""

    def __init__(self, roots: list[Any], grammars: Grammars, shortest: int) -> None:
        # Matchers of llguidance at the start. All must allow a token. Each sequence gets copies.
        self.roots = roots
        self.grammars = grammars  # which count the masks that are kept
        self.shortest = shortest  # tokens of the shortest answer, without EOS; 0: not known
        self.unknown: tuple[str, ...] = ()  # keywords of a schema that mean nothing
        self.num_nodes, self.is_kept = 1, False
        self.first = _Node(grammars.mask_of(roots))

    def start(self) -> Matcher:
        """Return a matcher at the beginning."""
        return Matcher(self)


class Matcher:
    """Where one sequence stands in its grammar.

    It follows kept masks as long as there are any; then it asks llguidance, token by token.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._node: _Node | None = grammar.first
        self._mask: Mask | None = grammar.first.mask
        self._matchers: list[Any] = []  # of llguidance
        self._untold: list[int] = []  # tokens that they have not consumed yet
        self._newest_id = 0

    @property
    def mask(self) -> Mask:
        """The tokens that may come next, EOS where the answer is complete.

        Raises:
            RequestError: the grammar is too complex here.
        """
        if self._mask is None:
            matchers = self._follow()
            grammars = self._grammar.grammars
            if grammars.vocabulary.tokens[self._newest_id][-1:] not in NUMBER_BYTES:
                matchers = matchers[:1]  # outside numbers, the second one allows all
            self._mask = grammars.mask_of(matchers)
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return all(matcher.is_accepting() for matcher in self._follow())

    def take(self, token_id: int) -> None:
        """Go on behind a token that the mask allowed; never EOS."""
        self._untold.append(token_id)
        self._newest_id = token_id
        node, grammar = self._node, self._grammar
        if node is None:
            self._mask = None
            return
        self._node = node.next.get(token_id)
        self._mask = self._node.mask if self._node else None
        if self._node is None and grammar.grammars.has_room(grammar):
            self._node = node.next[token_id] = _Node(self.mask)

    def _follow(self) -> list[Any]:
        """Return the matchers after all tokens of the sequence."""
        if not self._matchers:
            self._matchers = [root.deep_copy() for root in self._grammar.roots]
        for matcher in self._matchers:
            if self._untold:
                matcher.consume_tokens(self._untold)
            if matcher.is_error():  # its mask would be EOS alone, and JSON would end in silence
                raise _refuse_here(matcher.get_error())
        self._untold = []
        return self._matchers


def _refuse_all(why: str) -> RequestError:
    told = f"the answer is constrained, and {why}; ask without a constraint"
    return RequestError("unsupported_parameter", told)


def _refuse_here(text: str) -> RequestError:
    return RequestError(
        "unsupported_parameter",
        f"the constraint is too complex for the answer that was begun: {tidy(text)}. Make it "
        "simpler",
    )


class Grammars:
    """Compiles constraints for one model, and keeps what it compiled. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._lock = threading.Lock()
        self._found: OrderedDict[Constraint, Grammar | RequestError] = OrderedDict()
        self._num_nodes = 0
        self._trial = GrammarTrial()

    def find(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint, compiled now or before.

        Raises:
            RequestError: there is none; it names what cannot be had.
        """
        with self._lock:
            if (found := self._found.get(constraint)) is not None:
                self._found.move_to_end(constraint)
        if found is None:
            try:
                found = self._compile(constraint)
            except RequestError as error:
                found = error
            self._keep(constraint, found)
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message, found.param)
        return found

    def has(self, constraint: Constraint) -> bool:
        """Tell whether `find` knows a constraint already."""
        with self._lock:
            return constraint in self._found

    def has_room(self, grammar: Grammar) -> bool:
        """Tell whether one more mask can be kept, and count it."""
        with self._lock:
            if not grammar.is_kept or self._num_nodes >= MAX_NODES:
                return False
            self._num_nodes += 1
            grammar.num_nodes += 1
            return True

    def mask_of(self, matchers: list[Any]) -> Mask:
        """Return the tokens that all given matchers allow.

        Raises:
            RequestError: a matcher cannot go on.
        """
        num_bytes = (self._vocab_size + 63) // 64 * 8
        num_words = (self._vocab_size + 31) // 32  # llguidance's are of 32 bits
        allowed = -1
        for matcher in matchers:
            bits = ctypes.create_string_buffer(num_bytes)
            matcher.unsafe_compute_mask_ptr(ctypes.addressof(bits), num_words * 4)
            if matcher.is_error():
                raise _refuse_here(matcher.get_error())
            allowed &= int.from_bytes(bits.raw, "little")
        return make_mask(allowed.to_bytes(num_bytes, "little"))

    def _keep(self, constraint: Constraint, found: Grammar | RequestError) -> None:
        with self._lock:
            left = [self._found.pop(constraint, None)]  # another thread's
            self._found[constraint] = found
            if len(self._found) > MAX_KEPT:
                left.append(self._found.popitem(last=False)[1])
            for each in (found, *left):
                if isinstance(each, Grammar):
                    each.is_kept = each is found
                    self._num_nodes += each.num_nodes if each.is_kept else -each.num_nodes

    def _compile(self, constraint: Constraint) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits  # loaded where a request asks for it

        words, index = self.vocabulary, self._index
        unknown: set[str] = set()
        texts: list[str] = []
        try:
            if constraint.kind == "json":
                unknown = find_unknown(json.loads(constraint.text))
            texts.append(write_grammar(constraint))
            if constraint.kind == "json":
                texts.append(write_number_bound(constraint))
            fault = self._trial.compile(texts[0])
            if constraint.kind == "grammar" and is_gbnf(constraint.text):
                fault = blame_rule(constraint.text, fault)
        except ValueError as error:
            fault = str(error)
        if not fault:
            limits = LLParserLimits(max_items_in_row=MAX_OPEN, verbose_errors=False)
            roots = [LLMatcher(index, text, log_level=0, limits=limits) for text in texts]
            try:
                grammar = Grammar(roots, self, _count_shortest(constraint, words, roots[0]))
                grammar.unknown = tuple(sorted(unknown))
                if grammar.first.mask.few != ():
                    return grammar
                fault = "no token of this model can begin an answer"
            except RequestError:  # its first mask
                fault = roots[0].get_error()
        raise refuse(constraint, fault)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the model's tokens."""
        return Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)

    @cached_property
    def _index(self) -> Any:
        """llguidance's index of them."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        ends = sorted(self._eos_ids)
        wrapper = TokenizerWrapper(self.vocabulary)
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=ends)


@lru_cache(4)
def find_grammars(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Grammars:
    """Return the one place where the grammars of a model are compiled and kept."""
    return Grammars(tokenizer, vocab_size, eos_ids)


def _count_shortest(constraint: Constraint, words: Vocabulary, root: Any) -> int:
    """Return how many tokens the shortest answer takes; 0: that is not known."""
    texts: list[str] = []
    if constraint.kind == "choice":
        texts = sorted(json.loads(constraint.text), key=len)[:MAX_TRIED]
    elif constraint.kind == "json":
        shortest = find_shortest(parse_schema(constraint.text))
        texts = [] if shortest is None else [shortest]
    for ids in sorted(map(words, texts), key=len):
        matcher = root.deep_copy()
        if matcher.consume_tokens(ids) and matcher.is_accepting():
            return len(ids)
    return 0
