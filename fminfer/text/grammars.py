"""Grammars of constrained answers, compiled by llguidance: which tokens may come next."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from functools import cached_property, lru_cache
from typing import Any

from fminfer.core.bounded_cache import BoundedCache
from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.core.messages import Mask, make_mask
from fminfer.text.grammar_forms import constraint_error, tidy_fault
from fminfer.text.grammar_trial import LIMITS, build_trial
from fminfer.text.label_trie import LabelTrie
from fminfer.text.limited_process import LimitedPool, LimitError
from fminfer.text.tokenizer import Tokenizer

# Its tokens, those for what is unknown left out, must be the bytes of what they say.
PROBE = '{"a": [1, "b c"], "é": "x\\n-2.5"}'


class Vocabulary:
    """The bytes of a model's tokens, as llguidance's `TokenizerWrapper` takes them.

    Raises:
        RequestError: texts are not their tokens' bytes, one after another.
    """

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        if not tokenizer.has_words or not eos_ids:
            lacks = (
                "EOS, which ends such answers" if tokenizer.has_words else "tokenizer"
            )
            raise _no_constraints_error(f"this run has no {lacks}")
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids | eos_ids)
        self.tokens = [
            tokenizer.bytes_of_token(token_id)
            if tokenizer.has_text(token_id, skip_special_tokens=False)
            else b""
            for token_id in range(vocab_size)
        ]
        special = set(self.special_token_ids)
        self._ids = {
            token: i for i, token in enumerate(self.tokens) if i not in special
        }
        self._special = special
        self._longest = max(map(len, self._ids))
        usable = {*self._ids.values()}
        ids = [i for i in tokenizer.encode(PROBE).ids if i in usable]
        # some put a space before a text, and take it off
        text = tokenizer.decode(ids).lstrip(" ")
        if b"".join(self.tokens[i] for i in ids).lstrip(b" ") != text.encode():
            raise _no_constraints_error(
                "the texts of this model's tokenizer are not its tokens' bytes, as in WordPiece"
            )

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens that a model would write for a text in the middle of another."""
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.spell_inside(data.decode())
        if ids and all(i < len(self.tokens) and i not in self._special for i in ids):
            return ids
        return self._tokenize_greedily(data)

    def find_ids(self, token: bytes) -> list[int]:
        """Return the tokens of these bytes: a special one, and one that is not."""
        plain = self._ids.get(token)
        special = [i for i in self.special_token_ids if self.tokens[i] == token]
        return special if plain is None else [plain, *special]

    def _tokenize_greedily(self, data: bytes) -> list[int]:
        """Return the longest token each time, as long as there is one."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), start)
            if end == start:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


NUMBER_BYTES = b"0123456789.+-eE"  # the bytes of numbers: one may go on after these
MAX_KEPT = 256  # grammars
MAX_KEPT_BYTES = 64 << 20  # of memory, as their trials measured it
BYTES_A_CHARACTER = 8  # of a constraint's text, and of its converted form
SPARE_SECONDS = 1.0  # of computing that the masks of a grammar may take beyond the mean
# of computing for a mask, in the mean; schemas from practice take 0.0005
MASK_SECONDS = 0.005
TOKEN_SECONDS = 1e-7  # the same for each token of the vocabulary
TRIALS = LimitedPool(build_trial, num_processes=3)
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
        # tokens of the shortest answer, without EOS; 0: not known
        self.num_shortest = shortest
        self.unknown_keywords: tuple[
            str, ...
        ] = ()  # keywords of a schema that mean nothing
        self.num_bytes = 0  # of its memory
        self.num_nodes = 1
        self.is_kept = False
        self.spare_s = SPARE_SECONDS
        self.first_node = _Node(grammars.compute_mask(roots))

    def check_time(self, spent_s: float) -> None:
        """Raise a RequestError if masks take so long that other requests would wait for them."""
        allowed_s = MASK_SECONDS + TOKEN_SECONDS * len(self.grammars.vocabulary.tokens)
        self.spare_s += min(allowed_s - spent_s, SPARE_SECONDS - self.spare_s)
        if self.spare_s < 0:
            raise _too_complex_error(
                f"a token takes more than {allowed_s * 1000:.0f} ms of computing, in the mean"
            )

    def make_matcher(self) -> Matcher:
        """Return a matcher at the beginning."""
        return Matcher(self)


class Matcher:
    """Where one sequence stands in its grammar.

    It follows kept masks as long as there are any; then it asks llguidance, token by token.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._node: _Node | None = grammar.first_node
        self._mask: Mask | None = grammar.first_node.mask
        self._matchers: list[Any] = []  # of llguidance
        self._pending_ids: list[int] = []  # tokens that they have not consumed yet
        self._newest_id = 0

    @property
    def mask(self) -> Mask:
        """The tokens that may come next, EOS where the answer is complete.

        Raises:
            RequestError: the grammar is too complex here.
        """
        if self._mask is None:
            start_s = time.thread_time()
            matchers = self._advance_matchers()
            grammars = self._grammar.grammars
            if grammars.vocabulary.tokens[self._newest_id][-1:] not in NUMBER_BYTES:
                matchers = matchers[:1]  # outside numbers, the second one allows all
            self._mask = grammars.compute_mask(matchers)
            self._grammar.check_time(time.thread_time() - start_s)
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return all(matcher.is_accepting() for matcher in self._advance_matchers())

    def advance(self, token_id: int) -> None:
        """Follow a token that the mask allowed; never EOS."""
        self._pending_ids.append(token_id)
        self._newest_id = token_id
        node = self._node
        grammar = self._grammar
        if node is None:
            self._mask = None
            return
        self._node = node.next.get(token_id)
        self._mask = self._node.mask if self._node else None
        if self._node is None and grammar.grammars.has_room(grammar):
            self._node = node.next[token_id] = _Node(self.mask)

    def _advance_matchers(self) -> list[Any]:
        """Return the matchers after all tokens of the sequence."""
        if not self._matchers:
            self._matchers = [root.deep_copy() for root in self._grammar.roots]
        for matcher in self._matchers:
            if self._pending_ids:
                matcher.consume_tokens(self._pending_ids)
            # its mask would be EOS alone, and JSON would end in silence
            if matcher.is_error():
                raise _too_complex_error(matcher.get_error())
        self._pending_ids = []
        return self._matchers


def _no_constraints_error(reason: str) -> RequestError:
    message = f"the answer is constrained, and {reason}; ask without a constraint"
    return RequestError("unsupported_parameter", message)


def _too_complex_error(text: str) -> RequestError:
    return RequestError(
        "unsupported_parameter",
        f"the constraint is too complex for the answer that was begun: {tidy_fault(text)}. Make "
        "it simpler",
    )


Compiled = Grammar | LabelTrie


class Grammars:
    """Compiles constraints for one model, and keeps what it compiled. Any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.num_mask_bytes = (vocab_size + 63) // 64 * 8
        self._eos_ids = eos_ids
        self._lock = threading.Lock()  # of counts of masks
        self._compiled: BoundedCache[Constraint, Compiled | RequestError] = (
            BoundedCache(MAX_KEPT, MAX_KEPT_BYTES)
        )
        self._compile_locks: dict[
            Constraint, threading.Lock
        ] = {}  # of those being compiled
        self._num_nodes = 0

    def find(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint, compiled now or before.

        Raises:
            RequestError: there is none; it names what cannot be had.
        """
        grammar = self._find(constraint)
        assert isinstance(grammar, Grammar), "labels have no grammar"
        return grammar

    def find_labels(self, constraint: Constraint) -> LabelTrie:
        """Return the labels of a constraint that asks for their probabilities, as `find`."""
        trie = self._find(constraint)
        assert isinstance(trie, LabelTrie), "a grammar has no labels"
        return trie

    def _find(self, constraint: Constraint) -> Compiled:
        compiled = self._compiled.get(constraint)
        if compiled is None:
            with self._compile_locks.setdefault(constraint, threading.Lock()):
                # Another thread may have compiled it meanwhile.
                compiled = self._compiled.get(constraint) or self._compile_into_cache(
                    constraint
                )
            self._compile_locks.pop(constraint, None)
        if isinstance(compiled, RequestError):
            raise RequestError(compiled.code, compiled.message, compiled.param)
        return compiled

    def has_compiled(self, constraint: Constraint) -> bool:
        """Tell whether `find` knows a constraint already."""
        return constraint in self._compiled

    def has_room(self, grammar: Grammar) -> bool:
        """Tell whether one more mask can be kept, and count it."""
        with self._lock:
            if not grammar.is_kept or self._num_nodes >= MAX_NODES:
                return False
            self._num_nodes += 1
            grammar.num_nodes += 1
            return True

    def compute_mask(self, matchers: list[Any]) -> Mask:
        """Return the tokens that all given matchers allow.

        Raises:
            RequestError: a matcher cannot go on.
        """
        num_bytes = self.num_mask_bytes
        num_words = (self._vocab_size + 31) // 32  # llguidance's are of 32 bits
        allowed = -1
        for matcher in matchers:
            bits = ctypes.create_string_buffer(num_bytes)
            matcher.unsafe_compute_mask_ptr(ctypes.addressof(bits), num_words * 4)
            if matcher.is_error():
                raise _too_complex_error(matcher.get_error())
            allowed &= int.from_bytes(bits.raw, "little")
        return make_mask(allowed.to_bytes(num_bytes, "little"))

    def _compile_into_cache(self, constraint: Constraint) -> Compiled | RequestError:
        compiled: Compiled | RequestError
        try:
            if constraint.kind == "labels":
                labels, num_listed = json.loads(constraint.text)
                compiled = LabelTrie(labels, num_listed, self._spell_label)
            else:
                compiled = self._compile(constraint)
        except RequestError as error:
            compiled = error.with_traceback(None)
        size = BYTES_A_CHARACTER * (len(constraint.text) + 1000) + getattr(
            compiled, "num_bytes", 0
        )
        with self._lock:
            for kept in (compiled, *self._compiled.put(constraint, compiled, size)):
                if isinstance(kept, Grammar):
                    kept.is_kept = kept is compiled
                    self._num_nodes += (
                        kept.num_nodes if kept.is_kept else -kept.num_nodes
                    )
        return compiled

    def _spell_label(self, label: str) -> list[int] | None:
        """Return a label's tokens as constraints allow them; None: no tokens spell it."""
        vocabulary = self.vocabulary
        ids = vocabulary(label)
        spelled = b"".join(vocabulary.tokens[token_id] for token_id in ids)
        return ids if spelled == label.encode() else None

    def _compile(self, constraint: Constraint) -> Grammar:
        # loaded where a request asks for it
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self.vocabulary
        try:
            texts, unknown, shortest, num_bytes = TRIALS.ask(
                [constraint.kind, constraint.text, constraint.whitespace]
            )
        except LimitError as error:
            raise constraint_error(
                constraint, f"{error} to compile. Make it simpler"
            ) from None
        except ValueError as error:
            raise constraint_error(constraint, str(error)) from None

        limits = LLParserLimits(**LIMITS)
        roots = [
            LLMatcher(self._token_index, text, log_level=0, limits=limits)
            for text in texts
        ]
        try:
            grammar = Grammar(
                roots, self, _count_shortest_tokens(shortest, vocabulary, roots[0])
            )
        except RequestError:  # its first mask
            raise constraint_error(constraint, roots[0].get_error()) from None
        grammar.unknown_keywords = tuple(unknown)
        grammar.num_bytes = num_bytes
        if grammar.first_node.mask.few == ():
            raise constraint_error(
                constraint, "no token of this model can begin an answer"
            )
        return grammar

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the model's tokens."""
        return Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)

    @cached_property
    def _token_index(self) -> Any:
        """llguidance's index of them."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        ends = sorted(self._eos_ids)
        wrapper = TokenizerWrapper(self.vocabulary)
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=ends)


@lru_cache(4)
def find_grammars(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
) -> Grammars:
    """Return the only `Grammars` of a model, with all that it compiled."""
    return Grammars(tokenizer, vocab_size, eos_ids)


def _count_shortest_tokens(texts: list[str], vocabulary: Vocabulary, root: Any) -> int:
    """Return how many tokens the shortest of some answers takes; 0: that is not known."""
    for ids in sorted(map(vocabulary, texts), key=len):
        matcher = root.deep_copy()
        if matcher.consume_tokens(ids) and matcher.is_accepting():
            return len(ids)
    return 0
