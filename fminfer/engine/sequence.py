"""The state of a request being answered, its prompts, and their sequences."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fminfer.contract.request import RequestParams, VectorWish
from fminfer.contract.tool_choice import CallMode
from fminfer.core.config import KnownParser
from fminfer.core.errors import RequestError
from fminfer.core.messages import Mask
from fminfer.core.timing import RowTimes
from fminfer.engine.logit_edits import Bans, LogitEdits
from fminfer.engine.observation import NUM_LIKELIEST, Observation, ObservedMass
from fminfer.engine.thinking import ThoughtMatcher
from fminfer.text.detokenizer import Detokenizer
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.grammars import Matcher

# the last one in chat answers only
FinishReason = Literal["stop", "length", "tool_calls"]
# Of an answer: of shapes A and B, of OpenAI's completions, of chat, or made of vectors.
AnswerKind = Literal[
    "plain", "openai", "chat", "embeddings", "score", "rerank", "classify"
]


ALTERNATIVE = struct.Struct("=qf")  # an id and its logprob


# not frozen: there is one a token, and that costs three times as much
@dataclass(slots=True)
class TokenReport:
    """One token with its logprob and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: bytes = b""  # packed: as tuples, twenty would take six times the memory
    offset: int = 0  # code points of completion before it (completion tokens only)

    def best_alternatives(self, k: int) -> list[tuple[int, float]]:
        """Return the k best alternatives with their logprobs; fewer if there are no more."""
        return list(ALTERNATIVE.iter_unpack(self.top[: k * ALTERNATIVE.size]))


def no_token_error(num_drawn: int) -> RequestError:
    """Return the error of a constraint and bans that together leave no token."""
    return RequestError(
        "out_of_range",
        f"the constraint leaves no token for generated token {num_drawn} that "
        "min_tokens, allowed_token_ids and bad_words allow. Change those or the constraint",
    )


Array = Any  # of numpy
# a list, often still growing, and [start, end)
ReportSlice = tuple[list[TokenReport], int, int]


@dataclass(slots=True, frozen=True)
class PreparedRequest:
    """A request that was checked and tokenized: all that its answer depends on."""

    params: RequestParams
    prompts: list[EncodedPrompt]
    # equal requests without a seed before it; makes them draw differently
    repeat: int = 0
    # without a seed: a digest of its prompts and all of its params
    meaning: bytes = b""
    kind: AnswerKind = "openai"
    # the form of tool calls in the text; None: it is text
    tool_parser: KnownParser | None = None
    # what the model writes behind the first one is left out
    keeps_one_call: bool = False
    # With an encoder: what it reads for each prompt, which is the decoder's then; and
    # how many of that one's first tokens no request has given.
    sources: list[EncodedPrompt] = field(default_factory=list)
    num_start: int = 0
    # what is made of prompts' vectors; None: it draws
    vectors: VectorWish | None = None
    # its answer does not depend on it
    observation: Observation | None = None
    # the tools, if the form of calls needs their schemas
    tools: tuple[dict[str, Any], ...] = ()
    call_mode: CallMode = "auto"  # whether its answer must be calls

    @property
    def is_pooled(self) -> bool:
        """Whether each prompt becomes a vector, and nothing is drawn."""
        return self.vectors is not None


@dataclass(slots=True, eq=False)  # one of two equal requests is not the other
class RequestState:
    """One request from `add` to its answer."""

    id: int
    prepared: PreparedRequest
    added_s: float
    priority: int = 0  # higher ones are admitted first
    is_streamed: bool = False  # its tokens are returned as they come
    is_counted: bool = False  # counted among the lines that were read
    prompts: list[PromptState] = field(default_factory=list)
    times: RowTimes | None = None  # once its first prompt was admitted
    error: RequestError | None = None
    is_cancelled: bool = False
    num_running: int = 0  # its sequences that hold blocks
    num_done: int = 0  # prompts at its beginning that are known to be finished

    def unlink(self) -> None:
        """Cut its links to prompts and theirs to sequences, once nothing asks for them.

        Both point back at it. Reference counts then free all at once, without a collection.
        """
        for prompt in self.prompts:
            for sequence in prompt.sequences:
                sequence.own_walk = None
            prompt.sequences = []
            prompt.walk = None
        self.prompts = []

    @property
    def is_finished(self) -> bool:
        # thousands perhaps, and it is asked as each one ends
        num_prompts = len(self.prompts)
        while self.num_done < num_prompts and self.prompts[self.num_done].is_finished:
            self.num_done += 1
        return self.num_done == num_prompts


@dataclass(slots=True, frozen=True)
class Branch:
    """The tokens that a branch feeds and scores.

    A branch is a prompt and a path in its label trie (`label_walk`).
    """

    parent: PromptState
    # Of the trie of labels: nodes whose tokens it feeds, where 0 is the prompt; and nodes
    # whose logprobs it gives.
    fed_nodes: list[int]
    scored_nodes: list[int]
    # By scored node: where the token before its own stands in the prompt; and its own token.
    positions: list[int]
    target_ids: list[int]


class Walk(Protocol):
    """The search through the labels of a prompt; `label_walk` has it."""

    running: list[PromptState]  # branches that wait or are computed
    computed_ids: list[list[int]]  # prompts of branches that were computed

    def make_wave(self) -> list[PromptState]:
        """Return the branches to compute next; none: the search is over."""

    def finish_branch(self, branch_prompt: PromptState) -> None:
        """Add the logprobs that a branch has given."""

    def choose_label(self, sequence: Sequence) -> tuple[str, list[TokenReport]]:
        """Return the label that a choice is, and new reports of its tokens."""

    def describe_answer(self) -> dict[str, Any]:
        """Return the fields that a choice has of it."""

    def make_longest_branch(self) -> PromptState:
        """Return the branch that needs the most blocks."""


@dataclass(slots=True, eq=False)
class PromptState:
    """One prompt of a request, prefilled once whatever its number of candidates."""

    owner: RequestState
    index: int
    encoded: EncodedPrompt
    source: EncodedPrompt | None = None  # what the encoder reads, if there is a decoder
    sequences: list[Sequence] = field(default_factory=list)
    # tokens that end it: EOS, and those of stop_reasons
    end_ids: frozenset[int] = frozenset()
    bans: Bans | None = None  # what its sequences cannot draw
    # Of stop_token_ids and of stop strings that are special tokens: what stop_reason then is.
    stop_reasons: dict[int, str | int] = field(default_factory=dict)
    is_counted: bool = False  # counted for the best possible prefix cache
    num_cached: int = 0  # its tokens that were found in the prefix cache
    # its tokens that need no more feeding: cached, or sent to the model
    num_fed: int = 0
    # scores of cached tokens
    shared_scores: list[ReportSlice] = field(default_factory=list)
    # its tokens 1 … , under echo
    reports: list[TokenReport] = field(default_factory=list)
    admission_number: int = 0  # of the last one; they are counted
    is_unproven: bool = False  # admitted, but its first result is not there yet
    # tokens that the prefix cache had when it was admitted last
    num_reused: int = 0
    nan_at: str = ""  # where its logits are nan
    # fed without the prefix cache, as what that had gave nan
    is_apart: bool = False
    # Of a prompt that was preempted: all of its tokens, with those that it drew.
    ids_to_refeed: list[int] = field(default_factory=list)
    # What the encoder computed: a vector, (size,) float32; or for the decoder its hidden
    # states as bytes, until they are in a step.
    vector: Array | None = None
    encoder_output: Array | None = None
    # admitted with the blocks of another prompt's encoder output
    shares_encoder_output: bool = False
    # The search for its labels. The prompt is not computed itself; its branches are.
    walk: Walk | None = None
    branch: Branch | None = None  # it is one of another prompt's labels
    # Under observation: the tokens that its grammar allows first, those that begin labels
    # in each spelling; and the logprob of each of these masks.
    observed_masks: list[Mask] = field(default_factory=list)
    mask_reports: list[TokenReport] = field(default_factory=list)

    @property
    def is_pooled(self) -> bool:
        return self.owner.prepared.is_pooled

    @property
    def ids_to_read(self) -> list[int]:
        """The tokens that the encoder reads; none: there is no encoder."""
        if self.source is not None:
            return self.source.ids
        return self.ids if self.is_pooled else []

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the request has given."""
        num_read = 0 if self.source is None else len(self.source.ids)
        return num_read + len(self.ids) - self.owner.prepared.num_start

    @property
    def params(self) -> RequestParams:
        return self.owner.prepared.params

    @property
    def priority(self) -> int:
        return self.owner.priority

    @property
    def ids(self) -> list[int]:
        return self.encoded.ids

    @property
    def ids_to_feed(self) -> list[int]:
        """Its tokens, and those that its sequence drew before it lost its blocks."""
        return self.ids_to_refeed or self.ids

    @property
    def num_to_feed(self) -> int:
        """Tokens the model must see before the next draw; one only scored is never fed."""
        if self.ids_to_refeed:
            return len(self.ids_to_refeed)
        if self.branch is not None:
            return len(self.ids)
        return self.params.count_fed_tokens(len(self.ids))

    @property
    def num_unfed(self) -> int:
        return self.num_to_feed - self.num_fed

    @property
    def has_run(self) -> bool:
        """Whether it, or the prompt of which it is a branch, was admitted before."""
        return bool(self.ids_to_refeed) or self.is_apart or self.is_inner_branch

    @property
    def is_inner_branch(self) -> bool:
        """Whether it is a branch behind the first one, which is the prompt itself."""
        return self.branch is not None and self.branch.fed_nodes[0] > 0

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens of KV cache a sequence of it can need; the last drawn is never fed."""
        return self.num_kv_tokens_for(self.params.max_tokens)

    def num_kv_tokens_for(self, num_drawn: int) -> int:
        """Return the tokens of KV cache one sequence of it needs to draw so many."""
        if self.branch is not None:
            return len(self.ids)
        num_prompt = len(self.ids) if self.params.max_tokens > 0 else self.num_to_feed
        return num_prompt + max(0, num_drawn - 1)

    @property
    def num_top(self) -> int:
        """Alternatives to report for each token."""
        return self.params.logprobs or 0

    @property
    def wants_scores(self) -> bool:
        """Whether its own tokens are to be scored when they are fed."""
        return (
            self.params.echo
            and self.params.logprobs is not None
            and not self.ids_to_refeed
        )

    def add_mask_report(self, report: TokenReport) -> None:
        """Add the score of its next mask, or again of the first if it was fed anew."""
        if len(self.mask_reports) == len(self.observed_masks):
            self.mask_reports = []
        self.mask_reports.append(report)

    @property
    def num_likeliest(self) -> int:
        """How many likely tokens are told of it, under observation."""
        observation = self.owner.prepared.observation
        return NUM_LIKELIEST if observation and observation.spellings else 0

    @property
    def observed_mass(self) -> ObservedMass | None:
        """What was measured of it; None: nothing was."""
        if self.owner.prepared.observation is None:
            return None
        masses = [min(1.0, math.exp(report.logprob)) for report in self.mask_reports]
        if (walk := self.sequences[0].walk) is not None:
            mass = walk.describe_answer()["label_mass"]
        elif masses:
            mass = masses.pop(0)
        else:
            return None
        likeliest_tokens = [
            pair
            for report in self.mask_reports[:1]
            for pair in report.best_alternatives(self.num_likeliest)
        ]
        return ObservedMass(mass, tuple(masses), tuple(likeliest_tokens))

    def copy_shared_scores(self) -> None:
        """Copy the reports of other prompts' prefixes, as the first result comes.

        Theirs are in by now: what this prompt shares was sent in before it.
        """
        for reports, start, end in self.shared_scores:
            self.reports += reports[start:end]
        self.shared_scores = []

    def reset_results(self) -> None:
        """Be as before any of it was fed; lists that others share are left as they are.

        What was scored before it lost its blocks stays: it is not scored again.
        """
        self.num_fed = 0
        self.nan_at = ""
        if not self.ids_to_refeed:
            self.reports = []
            self.shared_scores = []

    @property
    def is_finished(self) -> bool:
        if self.is_pooled:
            return self.vector is not None
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice being made."""

    prompt: PromptState
    noise_key: bytes
    detokenizer: Detokenizer | None  # None if nothing is generated
    block_table: list[int] = field(default_factory=list)
    slot: int = -1  # its number among running sequences, while it has blocks
    # blocks of its prompt's encoder output
    cross_table: list[int] = field(default_factory=list)
    cross_slot: int = -1  # that of these
    num_sent: int = 0  # blocks of its table that were sent to the stages
    tokens: list[TokenReport] = field(default_factory=list)
    text: str = ""
    num_cut: int = 0  # tokens at the end that start behind a stop string's cut
    # tokens at the end that the model has not seen: the newest, forced ones
    num_unfed: int = 0
    edits: LogitEdits | None = None  # None if its logits are left as they are
    # where it stands in its thought; None: it does not think
    thought: ThoughtMatcher | None = None
    # where it stands in its grammar, perhaps behind a thought; None: it has no constraint
    matcher: Matcher | ThoughtMatcher | None = None
    # behind its thought, the search for its labels; others share that of the prompt
    own_walk: Walk | None = None
    mask: Mask | None = None  # with a matcher, what it may draw next, all bans counted
    # it ended by its length, and its grammar allows no end there
    is_cut_off: bool = False
    ended_by_token: bool = False  # EOS or one of stop_token_ids
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id

    @property
    def position(self) -> int:
        """Where its newest token stands in the sequence."""
        return len(self.prompt.ids) + len(self.tokens) - 1

    @property
    def banned_ids(self) -> set[int]:
        """The tokens, beside those that are never drawn, that it cannot draw next."""
        bans = self.prompt.bans
        if bans is None:
            return set()
        newest = [token.token_id for token in self.tokens[-bans.reach :]]
        holds_eos = self.thought is not None and self.thought.holds_eos
        return bans.find_banned(self.num_answer_tokens, newest, holds_eos=holds_eos)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that it drew, without those of its thought."""
        num_thought = 0 if self.thought is None else self.thought.num_tokens
        return len(self.tokens) - num_thought

    @property
    def is_thinking(self) -> bool:
        """Whether its text ends within its thought."""
        return self.thought is not None and self.thought.is_open

    @property
    def walk(self) -> Walk | None:
        """The search for its labels."""
        return self.own_walk or self.prompt.walk

    def update_mask(self) -> None:
        """Update what it may draw next by its grammar and bans; raise if that is nothing."""
        assert self.matcher is not None, "it has no grammar"
        mask = self.matcher.mask
        bans = self.prompt.bans
        is_forced = self.thought is not None and self.thought.is_forcing
        if bans is not None and not is_forced:
            if mask is None:
                bans.require_token(len(self.tokens), self.banned_ids)
            else:
                mask = bans.narrow_mask(mask, self.banned_ids)
        if mask is not None and mask.few == ():
            raise no_token_error(len(self.tokens))
        self.mask = mask

    @property
    def num_draws_left(self) -> int:
        """The most tokens that it may still draw."""
        num_reserved = 0 if self.thought is None else self.thought.num_reserved
        return max(0, self.prompt.params.max_tokens - num_reserved - len(self.tokens))

    @property
    def listed_tokens(self) -> list[TokenReport]:
        """The tokens that the logprobs arrays show: none behind a cut, the end only under echo.

        The end is EOS or a stop token; where its text is wanted it is listed, too.
        """
        params = self.prompt.params
        last = len(self.tokens) - self.num_cut
        if self.ended_by_token and not (
            params.echo or params.include_stop_str_in_output
        ):
            last = min(last, len(self.tokens) - 1)
        return self.tokens[:last]

    @property
    def mean_logprob(self) -> float:
        """What best_of ranks by; an empty completion comes last."""
        if not self.tokens:
            return float("-inf")
        return sum(token.logprob for token in self.tokens) / len(self.tokens)
